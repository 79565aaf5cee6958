"""Useful groups of recent steps, and when they are replayed."""

from dataclasses import replace

import pytest
import torch

from swarmnode.config import SharingConfig, TrainingConfig
from swarmnode.policy.ways import Row
from swarmnode.rl.corrections import against_sampler, own_correction
from swarmnode.rl.objectives import Objective, policy_loss
from swarmnode.rl.split import AdaptiveSplit
from swarmnode.trainer import replay
from swarmnode.trainer.batch import TrainingGroup, assemble
from swarmnode.trainer.plan import StepPlan
from swarmnode.trainer.replay import RARE, SMOOTHING, STEPS, USES, ReplayBuffer, missing_groups
from swarmnode.trainer.state import Counters


def group(name, *rewards, tokens=4, peer=""):
    rewards = rewards or (0.0, 1.0)
    rows = [Row([1, 2], [name] * tokens) for _ in rewards]
    return TrainingGroup(
        rows, [[-1.0] * tokens for _ in rewards], list(rewards), [1.0] * len(rewards), peer
    )


def names(groups):
    return [one.rows[0][1][0] for one in groups]


def test_groups_without_a_signal_are_not_stored():
    kept = ReplayBuffer()
    kept.store([group(1), group(2, 0.5, 0.5), group(3, 1.0, 0.0, peer="a")], step=0)
    assert sorted(names(kept.take(8))) == [1, 3]


def test_group_is_replayed_at_most_uses_times():
    kept = ReplayBuffer()
    kept.store([group(1)], step=0)
    taken = []
    for step in range(1, STEPS):
        taken += kept.take(8)
        kept.store([], step)
    assert names(taken) == [1] * USES
    assert len(kept) == 0


@pytest.mark.parametrize("late", [0, 1])
def test_group_is_discarded_after_steps(late):
    kept = ReplayBuffer()
    kept.store([group(1)], step=3)
    for step in range(4, 3 + STEPS + late):
        kept.store([], step)
    assert len(kept) == 1 - late


def test_least_used_and_newest_groups_come_first():
    kept = ReplayBuffer()
    kept.store([group(1)], step=0)
    kept.store([group(2)], step=1)
    assert names(kept.take(1)) == [2]
    kept.store([group(3)], step=2)
    assert names(kept.take(3)) == [3, 1, 2]
    assert kept.take(0) == kept.take(-1) == []


def test_oldest_groups_are_discarded_beyond_the_token_limit(monkeypatch):
    monkeypatch.setattr(replay, "TOKENS", 40)
    kept = ReplayBuffer()
    kept.store([group(1, tokens=8), group(2, tokens=8)], step=0)  # of two completions each
    kept.store([group(3, tokens=12)], step=1)
    assert names(kept.take(8)) == [3, 2]
    kept.store([group(4, tokens=400)], step=2)
    assert len(kept) == 0, "a group above the limit is not stored"


def test_disabled_buffer_stays_empty():
    kept = ReplayBuffer(0)
    kept.store([group(1)], step=0)
    assert len(kept) == 0


def test_no_replay_once_useful_groups_are_common():
    kept = ReplayBuffer()
    useful, useless = [group(1)], [group(2, 0.0, 0.0)]
    for _ in range(100):
        kept.observe(9 * useless + useful)
        kept.store(useful, step=0)
    assert kept.spared_groups == 100, "one in ten is rare"
    assert len(kept.take(8)) == 8
    for _ in range(100):
        kept.observe(useless + 2 * useful)
    assert kept.spared_groups == 0
    kept.observe(100 * useless)
    kept.store(useful, step=1)
    assert kept.spared_groups == 0, "nor where everything fails, or succeeds, later on"
    assert kept.take(8) == []


def test_one_lucky_group_at_the_start_is_rare():
    kept = ReplayBuffer()
    kept.observe([group(1)])
    kept.store([group(1)], step=0)
    assert kept.spared_groups == 1
    assert SMOOTHING < RARE


def test_clip_stops_tokens_that_moved_far_enough():
    """Replays make one completion more likely and one less likely. Beyond the clip, both have no
    gradient."""
    mine = replace(group(1, 1.0, 0.0), sampler_logprobs=[[-1.0] * 4] * 2)
    kept = ReplayBuffer()
    kept.store([mine], step=0)
    rows = assemble(kept.take(1), "grpo")
    mask, options = torch.ones(2, 4), own_correction([])
    pulls = []
    for moved in (0.0, 0.1, 0.5, 1.0):  # nats
        logprobs = torch.tensor([[-1.0 + moved] * 4, [-1.0 - moved] * 4], requires_grad=True)
        recorded = torch.tensor([rows.recorded(i) for i in range(2)])
        sampled = torch.tensor([rows.is_sampled(i) for i in range(2)])
        old, weights = against_sampler(logprobs, recorded, sampled, rows.weights, mask, *options)
        policy_loss(
            logprobs, old, rows.advantages, mask, Objective(), 1.0, weights=weights
        ).loss.backward()
        pulls.append([bool(row.any()) for row in logprobs.grad])
    assert pulls == [[True, True], [True, True], [True, False], [False, False]]


@pytest.mark.parametrize(
    ("loss_type", "again"), [("dapo", 1), ("grpo", 1), ("dr_grpo", 1), ("gspo", 0), ("cispo", 0)]
)
def test_only_bounded_objectives_replay_groups(loss_type, again):
    plan = StepPlan(
        TrainingConfig(loss_type=loss_type, groups_per_step=4), SharingConfig(), Counters()
    )
    plan.observe([group(1)], [group(1)])
    assert len(plan.replayed([group(2)])) == again


def test_missing_groups_are_those_without_a_signal():
    assert missing_groups(4, [group(1), group(2, 0.0, 0.0)]) == 3
    assert missing_groups(1, [group(1), group(2)]) == 0


def test_replay_reduces_sampling_but_not_to_zero():
    split = AdaptiveSplit(8, smoothed=2.0)
    seen = []
    for split.replayable in (0, 1, 3, 20):
        seen.append(split.own_groups)
    assert seen == [6, 5, 3, 2]
