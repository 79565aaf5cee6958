"""`benchmarks.hostile --real` with the embedded policy in place of the real model."""

from dataclasses import replace

import pytest

from benchmarks.lib import real_hostile
from benchmarks.lib.real_cell import Size
from benchmarks.lib.simulator import single_thread
from swarmnode.tasks.client import Scorer

SIZE = Size(
    model="embedded",
    task="rg/products",
    steps=3,
    longest=12,
    eval_every=2,
    questions=6,
    last_questions=6,
)


@pytest.fixture(scope="module")
def scorer():
    single_thread()
    with Scorer() as scorer:
        yield scorer


@pytest.mark.parametrize("staged", [False, True])
def test_groups_of_a_hostile_peer_are_judged_and_counted(scorer, tmp_path, staged, monkeypatch):
    kind = "end mark"
    mark = replace(real_hostile.MARKS[kind], task="rg/products", staged=staged)
    monkeypatch.setitem(real_hostile.MARKS, kind, mark)
    arguments = (kind, "undefended", 1, SIZE, scorer, {}, {}, tmp_path)
    row = real_hostile.WatchedCell(*arguments).run()
    assert row["refused"]["answers"] > 0
    assert set(row["nodes"][0]["judged"]) - {"used"} <= {"surprise", "spot_check"}
    assert all(kind in point["marked"] for point in row["held_out"])
    assert 0 <= row["refused"]["taught tokens"] <= row["refused"]["tokens"]
    assert kind in real_hostile.show([row])


def test_a_quarter_of_eight_is_hostile_and_the_rest_is_measured(scorer, tmp_path):
    arguments = ("natural preface", "product", 2, SIZE, scorer, {}, {}, tmp_path)
    cell = real_hostile.WatchedCell(*arguments, nodes=8)
    hostile = [isinstance(node, real_hostile.HostileNode) for node in cell.swarm.nodes]
    assert hostile == [False] * 6 + [True] * 2
    row = cell.run()
    assert len(row["held_out"][-1]["rewards"]) == 6
    assert row["refused"]["groups"] > 0
    assert real_hostile.show([row]).count("natural preface") == 1


def test_a_leader_has_trained_before(scorer, tmp_path, monkeypatch):
    monkeypatch.setattr(real_hostile, "HEAD_START", 2)
    cell = real_hostile.WatchedCell("leader", "product", 1, SIZE, scorer, {}, {}, tmp_path)
    assert [node.counters.step for node in cell.swarm.nodes] == [0, 2]
