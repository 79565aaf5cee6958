"""The bookkeeping of benchmarks.checkfree: forks that are paired, stages that are really lost,
failures that hit every arm alike."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import checkfree, recoveries, repeated
from benchmarks.checkfree import failure_table, single_tables
from benchmarks.failures import (
    ARMS,
    NO_FAILURE,
    RATES,
    Arm,
    Trail,
    first_at,
    schedule,
    survive,
    target_of,
)
from benchmarks.forks import METHODS, Size, compare, follow, fork, grow
from benchmarks.staged import STAGES, VOCABULARY, WINDOW, Corpus, Staged, build, encode
from swarmnode.stages.model import StageRuntime
from tests.support.split_models import split_model

SIZE = Size(rate=4e-3, marks=(0, 3))
TRUNK = 52


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus():
    """Counting upwards, at one of three speeds."""
    stream = torch.cat([torch.arange(0, 4000, pace) % VOCABULARY for pace in (1, 2, 3)])
    return Corpus(stream, torch.stack([stream[s : s + WINDOW + 1] for s in range(0, 7000, 900)]))


@pytest.fixture(scope="module")
def trunk(corpus):
    torch.set_num_threads(1)
    return grow(Staged(build(0), 4e-3), corpus, 0, 0, TRUNK)


def rows_of(trunk, corpus, lost, *names):
    wanted = [(name, lost, METHODS[name]) for name in names]
    rows = compare(trunk, corpus, 0, TRUNK, SIZE.marks, wanted)
    return {row["method"]: row for row in rows}


def test_what_is_not_lost_has_no_gap_to_the_control(trunk, corpus):
    trunk.staged.roll_back(trunk.checkpoint)
    once = follow(trunk, corpus, 0, TRUNK, SIZE.marks)
    trunk.staged.roll_back(trunk.checkpoint)
    assert follow(trunk, corpus, 0, TRUNK, SIZE.marks) == once


@pytest.mark.parametrize("lost", [(3,), (0,), (7,), (3, 4)])
def test_exact_recovery_costs_nothing_and_random_does(trunk, corpus, lost):
    rows = rows_of(trunk, corpus, lost, "exact, with Adam", "random")
    exact, random = rows["exact, with Adam"], rows["random"]
    assert exact["jump"] == exact["kl"] == exact["nll_rise"] == 0.0
    assert exact["gap"] == {3: 0.0}
    assert exact["gate"]
    assert random["jump"] > 0.0
    assert random["kl"] > 0.0


def test_a_fresh_optimizer_is_the_only_thing_lost(trunk, corpus):
    row = rows_of(trunk, corpus, (3,), "exact, Adam fresh")["exact, Adam fresh"]
    assert row["jump"] == 0.0
    assert row["gap"][3] != 0.0


def test_what_a_method_cannot_do_is_said_and_not_counted(trunk, corpus):
    rows = [*rows_of(trunk, corpus, (3, 4), "CheckFree", "identity").values()]
    assert "neighbour is lost too" in rows[0]["refused"]
    assert "jump" not in rows[0]
    shown = single_tables(
        [row | {"part": "from scratch", "place": "two adjacent stages"} for row in rows]
    )
    assert "refused" in shown
    assert "identity" in shown


def test_a_lost_stage_is_gone(trunk, corpus):
    staged = trunk.staged
    staged.roll_back(trunk.checkpoint)
    staged.lose(3)
    assert math.isnan(staged.measure(corpus.held_out))
    fork(trunk, (3,), recoveries.exact)
    assert math.isfinite(staged.measure(corpus.held_out))


def test_the_paper_raises_the_learning_rate_of_the_stage_it_made(trunk):
    fork(trunk, (3,), METHODS["CheckFree"])
    assert trunk.staged.factors == [1.0, 1.0, 1.0, 1.1, 1.0, 1.0, 1.0, 1.0]
    trunk.staged.roll_back(trunk.checkpoint)
    assert trunk.staged.factors == [1.0] * STAGES


def test_swapped_order_trains_other_weights_and_leaves_the_model_as_it_was(corpus):
    plain, swapped = Staged(build(0), 4e-3), Staged(build(0), 4e-3, swapped=True)
    assert plain.measure(corpus.held_out) == swapped.measure(corpus.held_out)
    for staged in (plain, swapped):
        staged.step(corpus.batch(0, 0))
    assert [n for n, _ in swapped.model.named_parameters()] == [
        n for n, _ in plain.model.named_parameters()
    ]
    assert plain.measure(corpus.held_out) != swapped.measure(corpus.held_out)


def test_failures_hit_every_arm_alike_and_one_stage_at_a_time():
    drawn = schedule(3, RATES["16 %/h"], 5000)
    assert drawn == schedule(3, RATES["16 %/h"], 5000)
    assert schedule(3, RATES["16 %/h"], 800) == {i: s for i, s in drawn.items() if i < 800}
    assert len(drawn) == pytest.approx(5000 * (1 - (1 - 4e-3) ** STAGES), rel=0.2)
    assert set(drawn.values()) == set(range(STAGES))


def test_without_a_failure_in_it_every_plain_arm_is_the_control(corpus):
    control, _ = survive(NO_FAILURE, SIZE, corpus, 0, {}, 10, None)
    for arm in ARMS:
        if arm.name in ("checkpoint every 10", "neighbours' checkpoints every 20", "CheckFree"):
            assert survive(arm, SIZE, corpus, 0, {}, 10, None)[0]["curve"] == control["curve"]


@pytest.mark.parametrize(
    "arm", [Arm("checkpoints", checkpoint=20), Arm("neighbours", neighbours=20), ARMS[4]]
)
def test_what_came_before_the_first_failure_need_not_be_trained_again(corpus, arm):
    failures = {24: 3, 27: 3}
    _, before = survive(NO_FAILURE, SIZE, corpus, 0, {}, 30, None)
    assert (
        survive(arm, SIZE, corpus, 0, failures, 30, None)[0]
        == survive(arm, SIZE, corpus, 0, failures, 30, None, before)[0]
    )


def test_a_run_that_nothing_happens_to_ends_where_the_control_does(corpus):
    _, before = survive(NO_FAILURE, SIZE, corpus, 0, {}, 60, None)
    target = target_of(before.curve, 60)
    row, _ = survive(Arm("c", checkpoint=10), SIZE, corpus, 0, {60: 3}, 120, target, before)
    assert row["iterations"] == first_at(before.curve, target)
    assert row["failures"] == 0


def test_arms_meet_the_failures_that_are_theirs(corpus):
    failures, counted = {3: 0, 5: 3, 7: 7}, {}
    for arm in (
        arm
        for arm in ARMS
        if arm.name
        in (
            "checkpoint every 10",
            "neighbours' checkpoints every 20",
            "CheckFree",
            "CheckFree+",
            "random",
        )
    ):
        run, _ = survive(arm, SIZE, corpus, 0, failures, 10, None)
        counted[arm.name] = run["failures"]
        assert math.isfinite(run["curve"][-1])
    assert (
        counted["checkpoint every 10"]
        == counted["neighbours' checkpoints every 20"]
        == counted["CheckFree+"]
        == 3
    )
    assert counted["CheckFree"] == counted["random"] == 1


def test_a_checkpoint_takes_back_what_came_after_it(corpus):
    """Lost before iteration 15 with one every 10: iterations 15 to 19 go on from the weights of
    10."""
    rolled, _ = survive(Arm("c", checkpoint=10), SIZE, corpus, 0, {15: 3}, 20, None)
    staged = Staged(build(0), SIZE.rate)
    for i in (*range(10), *range(15, 20)):
        staged.step(corpus.batch(0, i))
    assert rolled["curve"][-1] == pytest.approx(staged.measure(corpus.held_out), abs=1e-6)


def test_the_target_is_what_the_control_had():
    curve = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert target_of(curve, 60) == pytest.approx(4.0)
    assert first_at(curve, target_of(curve, 60)) == 60
    assert first_at(curve, 0.5) is None


def test_a_run_that_never_arrives_is_shown_as_such():
    runs = [
        {
            "seed": 1,
            "arm": "no failure",
            "rate": "16 %/h",
            "iterations": 300,
            "failures": 0,
            "cap": 300,
        },
        {
            "seed": 1,
            "arm": "CheckFree",
            "rate": "16 %/h",
            "iterations": None,
            "failures": 7,
            "cap": 750,
        },
    ]
    assert ">2.5 [>2.5 … >2.5], 7 losses" in failure_table(runs)


def test_text_is_printable_characters_only():
    assert encode("a~ \n\té").tolist() == [65, 94, 0, 95]


def arm_of(name):
    return next(arm for arm in ARMS if arm.name == name)


def test_again_and_again_every_way_meets_the_same_losses_and_is_the_control_until_then(
    corpus, monkeypatch
):
    monkeypatch.setattr(repeated, "EVERY", 4)
    rows = {row["arm"]: row for row in repeated.again(2, Size(rate=4e-3, repeated=12), corpus)}
    assert set(rows) == {"no failure", *repeated.ORDER}
    lost = [i for i, stage in schedule(2, repeated.RATE, 12).items() if 0 < stage < STAGES - 1]
    assert len(lost) == 1
    assert 4 < lost[0] < 8
    for row in (rows[name] for name in repeated.ORDER):
        assert row["losses"] == lost
        assert len(row["jumps"]) == len(row["shares"]) == 1
        assert row["gaps"][0] == 0.0
        assert row["gaps"][1] != 0.0


def test_what_is_averaged_again_and_again_becomes_alike(corpus):
    lost = {3: 2, 6: 4, 9: 3, 12: 5, 15: 2}
    alike = {
        name: repeated.endure(arm_of(name), Size(repeated=18), corpus, 0, lost)["alike"]
        for name in repeated.ORDER
    }
    assert (
        min(alike[name] for name in ("CheckFree", "uniform average", "copy of a neighbour")) > 0.3
    )
    assert abs(alike["random"]) < 0.1
    assert alike["zeros"] is None


def test_a_share_is_of_the_squared_norms_of_both_neighbours():
    staged = Staged(build(0), 4e-3)
    assert repeated.share(staged, 3) is None
    staged.squared_norms = [0.0, 0.0, 3.0, 9.0, 1.0, 0.0, 0.0, 0.0]
    assert repeated.share(staged, 3) == 0.75


def test_ways_are_compared_within_a_seed():
    """Ranges overlap, and yet the one is better in each of the two seeds."""

    def row(arm, seed, gap):
        return {
            "arm": arm,
            "seed": seed,
            "curve": [0.0, 0.0],
            "gaps": [9.0, gap],
            "losses": [5, 30],
            "jumps": [9.0, gap],
            "shares": [0.5, 0.7],
            "alike": 0.5,
        }

    rows = [
        row(name, seed, 0.1 * k + seed) for k, name in enumerate(repeated.ORDER) for seed in (1, 2)
    ]
    shown = repeated.tables(rows).splitlines()
    pair = next(line for line in shown if "copy of a neighbour less uniform average" in line)
    assert pair.count("+0.100 [+0.100 … +0.100]") == pair.count("2 of 2") == 2
    assert "+1.600 [+1.100 … +2.100]" in next(
        line for line in shown if line.startswith("| uniform average ")
    )
    assert "median 0.50" in shown[-1]


def test_a_low_rate_has_a_longer_run_and_its_own_target(monkeypatch):
    def survived(arm, size, corpus, seed, failures, cap, target, before=None):
        return {"seed": seed, "arm": arm.name, "cap": cap, "lost": len(failures)}, Trail(
            [3.0 - i / 1000 for i in range(0, cap, 10)]
        )

    monkeypatch.setattr(checkfree, "survive", survived)
    rows = checkfree.at_random(0, Size(steps=100, quick=True), ["5 %/h", "16 %/h"])
    plain = {row["rate"]: row for row in rows if row["arm"] == "no failure"}
    assert {rate: row["iterations"] for rate, row in plain.items()} == {"5 %/h": 300, "16 %/h": 100}
    assert plain["5 %/h"]["target"] < plain["16 %/h"]["target"]
    for name in checkfree.QUICK_ARMS:
        assert {row["rate"]: row["cap"] for row in rows if row["arm"] == name} == {
            "5 %/h": 600,
            "16 %/h": 200,
        }


def test_identity_passes_on_what_it_gets_and_can_still_learn():
    shape = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    spec, stage = split_model(LlamaForCausalLM(shape), [1, 1, 1, 1])[2]
    stage.load_state_dict(recoveries.pass_on(stage.state_dict()))
    x = torch.randn(1, 5, 32)
    y = StageRuntime(spec, stage).run(x, torch.ones(1, 5, dtype=torch.long), torch.arange(5)[None])
    assert torch.equal(y, x)
    (y * torch.randn_like(y)).sum().backward()
    # unlike a stage of zeros
    assert float(stage.model.layers[0].mlp.down_proj.weight.grad.abs().sum()) > 0
