import copy

from swarmnode.latest import Latest


def test_an_assignment_beyond_the_limit_forgets_the_oldest():
    known = Latest[str, int](2)
    known["a"], known["b"] = 1, 2
    known["a"] = 3  # now the latest
    known["c"] = 4
    assert list(known.items()) == [("a", 3), ("c", 4)]
    assert known.setdefault("d", 5) == 5
    assert list(known) == ["c", "d"]
    assert (copied := copy.deepcopy(known)) == known
    assert copied.most == 2
