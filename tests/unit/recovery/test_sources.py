"""Which copy of a stage is taken, in which order, and what is refused."""

import contextlib

import pytest

from swarmnode.errors import Refused
from swarmnode.stages.transfer import (
    Found,
    RecoveryOrder,
    RecoverySettings,
    Run,
    Source,
    SourceKind,
    Verdict,
    check_paper,
)
from swarmnode.stages.wire import StageSpec

SPEC = {i: StageSpec(i, 4, i, i + 1, False) for i in range(4)}
EVERYBODY = frozenset({0, 1, 2, 3})
GOOD, BAD, BROKEN = (
    Verdict(0.001, 0.01, 100),
    Verdict(0.3, 0.2, 100),
    Verdict(float("inf"), float("inf"), 0, finite=False),
)


def order_of(found, stage=1, step=10, run=None, **settings):
    return RecoveryOrder(found, SPEC[stage], step, run or Run(), RecoverySettings(**settings))


def all_of(one):
    """Rungs in the order in which they are taken when each is refused, and what is said in the
    end."""
    order = []
    while True:
        try:
            source = one.next()
        except Refused as error:
            return order, str(error)
        order.append((int(source.kind), source.step, source.holder))
        one.refuse(source, "no good")


def test_every_source_in_its_order():
    found = Found(
        journal=10, replica=True, snapshots={0: 8, 2: 8}, base=True, alive=EVERYBODY - {1}
    )
    order, said = all_of(order_of(found))
    assert order == [
        (0, 10, None),
        (1, None, None),
        (2, 8, 0),
        (2, 8, 2),
        (3, None, None),
        (4, None, None),
    ]
    assert said.count("no good") == 6


def test_an_old_journal_goes_after_a_younger_shadow_and_before_an_older_one():
    found = Found(journal=7, replica=True, snapshots={0: 5, 2: 9})
    assert all_of(order_of(found, synthesis="none", snapshot_every=3))[0] == [
        (1, None, None),
        (2, 9, 2),
        (0, 7, None),
        (2, 5, 0),
    ]


def test_a_journal_that_lacks_no_more_than_a_snapshot_may_needs_no_line():
    found = Found(journal=7, replica=True, snapshots={0: 5, 2: 9})
    assert all_of(order_of(found, synthesis="none", snapshot_every=4))[0] == [
        (0, 7, None),
        (1, None, None),
        (2, 9, 2),
        (2, 5, 0),
    ]
    exact = Found(journal=7, snapshots={0: 10, 2: 10}, roots={0: b"a", 2: b"a"})
    assert all_of(order_of(exact, synthesis="none", snapshot_every=4))[0] == [
        (2, 10, 0),
        (2, 10, 2),
        (0, 7, None),
    ]


def test_what_is_ahead_of_the_crew_is_of_another_history():
    one = order_of(Found(journal=11, snapshots={0: 12, 2: 10}))
    assert one.next() == Source(SourceKind.SNAPSHOT, 10, 2)
    assert [(int(rung), why) for rung, why in one.excluded if "step" in why] == [
        (0, "it is of step 11, and the crew's is 10"),
        (2, "it is of step 12, and the crew's is 10"),
    ]


@pytest.mark.parametrize(
    ("roots", "exact"),
    [({0: b"a", 2: b"a"}, True), ({0: b"a", 2: b"b"}, False), ({0: b"a"}, False)],
)
def test_a_fresh_shadow_is_exact_where_both_neighbours_name_the_same(roots, exact):
    one = order_of(Found(snapshots=dict.fromkeys(roots, 10), roots=roots))
    assert one.next().exact is exact
    assert one.judge(one.next(), BAD, 0) == ("rejoin" if exact else "heal")
    assert one.judge(one.next(), BROKEN, 0) == "next"
    assert order_of(Found(snapshots=dict.fromkeys(roots, 9), roots=roots)).next().exact is False


def test_a_lossy_stage_is_healed_a_few_times_and_then_given_up():
    one = order_of(Found(alive=EVERYBODY - {1}), healings=2)
    source = one.next()
    assert [one.judge(source, BAD, done) for done in range(3)] == ["heal", "heal", "next"]
    assert one.judge(source, GOOD, 1) == "rejoin"
    assert one.judge(source, Verdict(0.001, 0.06, 100), 2) == "next"
    assert one.judge(source, None, 0) == "next"  # nobody can say whether it is right
    assert one.judge(Source(SourceKind.SNAPSHOT, 3, 0), None, 0) == "rejoin"
    assert one.judge(Source(SourceKind.BASE), None, 0) == "rejoin"


def test_a_copy_of_the_crews_own_may_lack_steps_that_went_far_and_what_is_not_its_own_may_not():
    moved, noise = Verdict(0.06, 0.07, 100), Verdict(0.3, 0.1, 100)
    one = order_of(Found(journal=9, snapshots={0: 5}, base=True))
    for source in (Source(SourceKind.JOURNAL, 9), Source(SourceKind.SNAPSHOT, 5, 0)):
        assert one.judge(source, moved, 0) == "rejoin"
        assert one.judge(source, noise, 0) == "heal"
        assert one.judge(source, BROKEN, 0) == "next"
    for rung in (SourceKind.REPLICA, SourceKind.BASE, SourceKind.SYNTHESIS):
        assert one.judge(Source(rung), moved, 0) == "heal"


FAR = Verdict(0.294, 0.408, 100)
A_BIT_LESS_FAR, FARTHER = Verdict(0.286, 0.4, 100), Verdict(0.33, 0.45, 100)


@pytest.mark.parametrize(
    ("found", "verdicts", "whose"),
    [
        (Found(journal=8), {}, (SourceKind.JOURNAL, 8)),
        (Found(snapshots={0: 8, 2: 8}, roots={0: b"a", 2: b"a"}), {}, (SourceKind.SNAPSHOT, 8)),
        (
            Found(snapshots={0: 8, 2: 8}, roots={0: b"a", 2: b"a"}, base=True),
            {},
            (SourceKind.SNAPSHOT, 8),
        ),
        # nobody but its holder says so, and nothing that it could be held against
        (Found(snapshots={0: 8}, roots={0: b"a"}), {}, None),
        (Found(snapshots={0: 8, 2: 8}, roots={0: b"a", 2: b"b"}), {}, None),
        (Found(snapshots={0: 8, 2: 7}, roots={0: b"a", 2: b"b"}), {}, None),
        # no farther than where nothing is left
        (Found(snapshots={0: 8}, roots={0: b"a"}, base=True), {}, (SourceKind.SNAPSHOT, 8)),
        (
            Found(snapshots={0: 8, 2: 7}, roots={0: b"a", 2: b"b"}, base=True),
            {},
            (SourceKind.SNAPSHOT, 8),
        ),
        (Found(snapshots={0: 8, 2: 7}, base=True), {7: A_BIT_LESS_FAR}, (SourceKind.SNAPSHOT, 8)),
        (Found(snapshots={0: 8, 2: 7}, base=True), {8: FARTHER}, (SourceKind.SNAPSHOT, 7)),
        (
            Found(snapshots={0: 8, 2: 7}, base=True),
            {8: FARTHER, 7: FARTHER},
            (SourceKind.BASE, None),
        ),
        (
            Found(snapshots={0: 8, 2: 7}, base=True),
            {8: BROKEN, 7: FARTHER},
            (SourceKind.BASE, None),
        ),
        (Found(journal=8, base=True), {8: FARTHER}, (SourceKind.BASE, None)),
        (
            Found(snapshots={0: 8, 2: 8}, roots={0: b"a", 2: b"a"}, base=True),
            {8: BROKEN},
            (SourceKind.BASE, None),
        ),
    ],
)
def test_after_the_gate_fails_a_true_copy_is_used_last(found, verdicts, whose):
    one = order_of(found, healings=0)
    with contextlib.suppress(Refused):
        while True:
            source = one.next()
            verdict = verdicts.get(source.step, FAR)
            assert one.judge(source, verdict, 0) == "next"
            one.failed(source, verdict, "KL")
    source = one.last_resort()
    assert (None if source is None else (source.kind, source.step)) == whose
    if source is not None:
        assert one.judge(source, FAR, 0) == "rejoin"
        assert one.judge(source, BROKEN, 0) == "next"
    assert one.last_resort() is None


def test_synthesis_needs_both_neighbours_and_the_ends_need_true_copies():
    for alive in ({0, 3}, {2, 3}):
        assert "a neighbour is lost too" in all_of(order_of(Found(alive=frozenset(alive))))[1]
    assert order_of(Found(alive=frozenset({0, 2}))).next().method == "checkfree"
    assert order_of(Found(alive=frozenset({0, 2})), synthesis="uniform").next().method == "uniform"
    assert (
        "trained with swapped stages" in all_of(order_of(Found(alive=EVERYBODY - {0}), stage=0))[1]
    )
    swapped = Run(swapped=True)
    assert (
        "nobody keeps a copy" in all_of(order_of(Found(alive=EVERYBODY - {0}), 0, run=swapped))[1]
    )
    copied = order_of(Found(alive=EVERYBODY - {3}, ends=frozenset({2})), 3, run=swapped)
    assert copied.next() == Source(SourceKind.COPY, method="copy")
    assert (
        "base"
        in all_of(
            order_of(
                Found(alive=EVERYBODY - {3}, ends=frozenset({2})),
                3,
                run=Run(swapped=True, pretrained=True),
            )
        )[1]
    )
    assert "adapter" in all_of(order_of(Found(alive=EVERYBODY - {1}), run=Run(adapter=True)))[1]
    assert "switched off" in all_of(order_of(Found(alive=EVERYBODY - {1}), synthesis="none"))[1]
    # an inner stage has no end to copy
    assert order_of(Found(alive=EVERYBODY - {1}), synthesis="copy").next().method == "checkfree"


def test_a_published_base_goes_before_any_synthesis_and_instead_of_it():
    order, said = all_of(
        order_of(Found(base=True, alive=EVERYBODY - {1}), run=Run(pretrained=True))
    )
    assert order == [(3, None, None)]
    assert "closer" in said


def test_paper_mode_knows_neighbours_only():
    found = Found(
        journal=10, replica=True, snapshots={0: 10, 2: 10}, base=True, alive=EVERYBODY - {1}
    )
    one = order_of(found, mode="checkfree+", run=Run(swapped=True))
    assert all_of(one)[0] == [(1, None, None), (4, None, None)]
    assert sorted(rung for rung, why in one.excluded if why == "paper mode") == [0, 2, 2, 3]
    source = Source(SourceKind.SYNTHESIS, method="checkfree")
    assert (
        one.judge(source, BAD, 0),
        one.judge(source, None, 0),
        one.judge(source, BROKEN, 0),
    ) == ("rejoin", "rejoin", "next")


def test_checkfree_makes_inner_stages_of_their_neighbours_and_copies_the_ends():
    found = Found(
        journal=10, replica=True, snapshots={0: 10, 2: 10}, base=True, alive=EVERYBODY - {1}
    )
    inner = order_of(found, mode="checkfree")
    assert all_of(inner)[0] == [(1, None, None), (4, None, None)]
    assert sorted(kind for kind, why in inner.excluded if why == "paper mode") == [0, 2, 2, 3]
    assert inner.judge(Source(SourceKind.SYNTHESIS, method="checkfree"), BAD, 0) == "rejoin"
    head = order_of(
        Found(journal=10, snapshots={1: 10}, alive=EVERYBODY - {0}), stage=0, mode="checkfree"
    )
    assert [kind for kind, *_ in all_of(head)[0]] == [0, 2]
    assert "needs a run trained with swapped stages" in head.excluded[-1][1]


@pytest.mark.parametrize(
    ("mode", "stages", "run", "match"),
    [
        ("checkfree+", 4, Run(pretrained=True), "2 nats"),
        ("checkfree+", 4, Run(adapter=True), "adapter"),
        ("checkfree+", 3, Run(), "needs four"),
        ("checkfree", 4, Run(pretrained=True), "its own stage is closer"),
        ("checkfree", 4, Run(adapter=True), "adapter"),
        ("checkfree", 2, Run(), "needs three"),
    ],
)
def test_paper_mode_is_refused_where_it_would_harm(mode, stages, run, match):
    with pytest.raises(Refused, match=match):
        check_paper(mode, stages, run)
    check_paper(mode, 4, Run())
    check_paper("off", stages, run)
