"""`benchmarks.real` with the embedded policy in place of the real model: some steps of its arms."""

import json
from dataclasses import asdict, replace

import pytest

from benchmarks import real
from benchmarks.lib import real_cell
from benchmarks.lib.real_cell import PARTS, Arm, Cell, Size, curve, smooth, until_goal
from benchmarks.lib.report import append_row
from benchmarks.lib.simulator import single_thread

SIZE = Size(
    task="rg/chain_sum",
    model="embedded",
    steps=4,
    longest=8,
    learning_rate=1e-2,
    questions=4,
    last_questions=4,
)


@pytest.fixture(scope="module")
def scorer():
    single_thread()
    with real.Scorer() as scorer:
        yield scorer


@pytest.fixture
def run(scorer, tmp_path_factory, monkeypatch):
    """Run an arm, and return its cell and its row."""

    def run(arm, size=SIZE):
        monkeypatch.setitem(real.ARMS, "tested", arm)
        cell = Cell("tested", arm, 1, size, scorer, {}, {}, tmp_path_factory.mktemp("cell"))
        return cell, json.loads(json.dumps({**cell.run(), "size": asdict(size)}))

    return run


def tensors(cell, trained):
    return [
        [p for p in node.policy.model.parameters() if p.requires_grad == trained]
        for node in cell.swarm.nodes
    ]


def test_nodes_share_a_base_and_train_on_groups_that_passed_admission(run):
    cell, row = run(Arm(3))
    for ours, theirs, *_ in zip(*tensors(cell, trained=False), strict=True):
        assert ours is theirs or ours.equal(theirs)  # A is copied and equal on all nodes
    assert all(
        ours is not theirs and not ours.equal(theirs)
        for ours, theirs, *_ in zip(*tensors(cell, trained=True), strict=True)
    )
    assert all(node.admission.statistics().candidates for node in cell.swarm.nodes)
    for node in row["nodes"]:
        assert len(node["tokens"]) == 4
        assert node["judged"]["used"] == sum(node["external"]) > 0


@pytest.mark.parametrize(
    ("arm", "own", "shares"), [(Arm(2, shares=False), 4, False), (Arm(2, own_groups=3), 3, True)]
)
def test_arms_sample_the_groups_of_their_split(run, arm, own, shares):
    _, row = run(arm)
    for node in row["nodes"]:
        assert set(node["own"]) == {own}
        assert shares or not sum(node["external"])


def test_averaging_moves_nodes_together(run, monkeypatch):
    monkeypatch.setattr(real_cell, "AVERAGE_EVERY", 4)
    distance = lambda cell: sum(
        float((ours - theirs).detach().norm())
        for ours, theirs in zip(*tensors(cell, trained=True), strict=True)
    )
    size = replace(SIZE, learning_rate=1e-3)
    apart, _ = run(Arm(2, shares=False), size)
    together, row = run(Arm(2, shares=False, averages=True), size)
    assert row["exchanges"] == {"accepted": 2}
    assert distance(together) < 0.75 * distance(apart)


def row_of(rewards, tokens=10):
    """Return a row of one node that was evaluated after every second step."""
    points = [
        {"step": 2 * i, "tokens": 2 * i * tokens, "cpu": 4.0 * i, "reward": reward}
        for i, reward in enumerate(rewards)
    ]
    steps = 2 * (len(rewards) - 1)
    node = dict.fromkeys(("tokens", "own", "external", "reward", *PARTS), [1] * steps)
    return {"nodes": [node], "held_out": points}


def test_goal_is_reached_between_the_means_of_two_evaluations():
    row = row_of([0.2, 0.4, 0.8, 1.0])
    steps, rewards = zip(*smooth(curve(row, "step")), strict=True)
    assert steps == (1, 3, 5)
    assert rewards == pytest.approx([0.3, 0.6, 0.9])
    assert until_goal(row, "step") == pytest.approx(3 + 2 * 2 / 3)
    assert until_goal(row, "tokens") == pytest.approx(30 + 20 * 2 / 3)
    assert until_goal(row, "cpu") == pytest.approx(6 + 4 * 2 / 3)
    assert until_goal(row_of([0.2, 0.4, 0.8]), "step") is None


def test_finished_cells_are_shown_and_drawn_and_not_repeated(tmp_path, monkeypatch, capsys):
    file, figure, size = tmp_path / "rows.jsonl", tmp_path / "figure.svg", replace(Size(), steps=6)
    for arm, tokens in (("alone", 20), ("2 nodes", 10)):
        row = row_of([0.2, 0.4, 0.8, 1.0], tokens)
        append_row(file, {**row, "arm": arm, "seed": 1, "size": asdict(size)})
    monkeypatch.setattr(real, "Cell", None)
    arguments = f"real --steps 6 --seeds 1 --rows {file} --plot {figure} --arms alone"
    monkeypatch.setattr("sys.argv", [*arguments.split(), "2 nodes"])
    real.main()
    assert "| 2 nodes |     1 |" in capsys.readouterr().out
    assert "held-out reward" in figure.read_text()


@pytest.mark.long
@pytest.mark.swarm
def test_whole_nodes_record_the_same_series(tmp_path):
    size = replace(SIZE, steps=6, learning_rate=1e-3)
    row = {**real.run_sockets(1, size, tmp_path), "size": asdict(size)}
    assert all(len(node[key]) == 6 for node in row["nodes"] for key in ("reward", "tokens", "own"))
    assert sum(row["nodes"][1]["external"]) > 0
    assert "whole" in real.show([row])
