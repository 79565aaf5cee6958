"""The benchmark of peers' episodes that must not be trained on: each attack has one reason."""

import trio

from benchmarks import episodes_hostile
from benchmarks.episodes_hostile import HONEST, NEW_KEYS, WAYS


def test_each_way_has_one_reason_and_the_honest_author_none(monkeypatch):
    quick = {**WAYS, "takes all CPU": WAYS["never ends"], NEW_KEYS: WAYS["never ends"]}
    monkeypatch.setattr(episodes_hostile, "WAYS", quick)
    with episodes_hostile.game():
        found = trio.run(episodes_hostile.run, 2)
    outcomes = found["outcomes"]
    forged = {name: outcomes.pop(name) for name in list(outcomes) if name.startswith("forged: ")}
    assert len(forged) == 10
    assert all(list(reasons.values()) == [2] for reasons in forged.values())
    assert {reason for reasons in forged.values() for reason in reasons} == {
        "trajectory",
        "bounds",
        "turns",
    }
    assert outcomes == {
        HONEST: {"admitted": 2},
        "never ends": {"trajectory": 2},
        "another reward": {"zero_advantage": 2},
        "takes all CPU": {"trajectory": 2},
        NEW_KEYS: {"trajectory": 2},
    }
    assert (found["internal_errors"], found["scorer"]["failures"]) == (0, 0)
    found["outcomes"] = outcomes
    assert "| honest" in episodes_hostile.show(found)
