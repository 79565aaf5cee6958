"""`benchmarks.second` at a small size: a start policy of one layer, two steps of some arms."""

import json
from dataclasses import asdict, replace

import pytest

from benchmarks import second
from benchmarks.lib import sums_policy
from benchmarks.lib.report import read_rows
from benchmarks.lib.simulator import single_thread
from benchmarks.second import STUDIES, SecondSwarm, Size

TINY = replace(
    sums_policy.SMALL,
    name="tiny",
    hidden=32,
    layers=1,
    intermediate=64,
    peak=1e-2,
    first_look=40,
    most_steps=200,
)
SIZE = Size(steps=2, groups=2, generations=4, longest=24, eval_every=1, eval_questions=4)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A start policy and a scorer for sums of numbers up to four, which it learns in seconds."""
    single_thread()
    folder = tmp_path_factory.mktemp("second")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums_policy, "NUMBERS", {"fewest": 2, "most": 3, "largest": 4})
        patch.setattr(sums_policy, "LOOK", 40)
        directory = sums_policy.make(TINY, folder)
        with second.installed(replace(SIZE, rows=60), folder) as scorer:
            yield directory, scorer


def policies(start, arm):
    return [second.load(member, start[0]) for member in STUDIES[arm].members]


def test_training_and_held_out_questions_are_different_rows(start):
    _, scorer = start
    exam = second.Exam(scorer, SIZE)
    swarm = SecondSwarm(STUDIES["alone"], policies(start, "alone"), SIZE, scorer, 0)
    asked = [ref for ref, _ in swarm.nodes[0].next_questions(40, swarm.names)]
    trained = {one.prompt for one in swarm.score([(ref, []) for ref in asked])}
    assert len(trained) > 10
    assert trained.isdisjoint(exam.prompts)


def test_trl_learns_the_questions_of_the_lone_node(start):
    _, scorer = start
    alone, trl = (
        second.run(arm, 0, SIZE, scorer, policies(start, "alone")) for arm in ("alone", "TRL")
    )
    (ours,), (theirs,) = alone["nodes"], trl["nodes"]
    assert ours["held_out"][0] == theirs["held_out"][0]
    assert [point["step"] for point in theirs["held_out"]] == [0, 1, 2]
    assert len(theirs["tokens"]) == len(ours["tokens"]) == SIZE.steps


def test_each_node_is_recorded_and_finished_runs_are_found(start, tmp_path):
    _, scorer = start
    arm = "LoRA with full"
    row = second.run(arm, 0, SIZE, scorer, policies(start, arm))
    assert [node["policy"] for node in row["nodes"]] == ["1.6 M, LoRA", "1.6 M"]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (found,) = read_rows(file, [asdict(SIZE)])
    assert read_rows(file, [asdict(replace(SIZE, steps=3))]) == []
    assert "LoRA with full" in second.show([found])
