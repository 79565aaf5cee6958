"""Bytes that an arm of benchmarks.sapo may receive."""

import itertools
from dataclasses import replace

import pytest
import torch

from benchmarks.simulator import PAPER, PARTS, Arm, Swarm
from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.policy.load import load_policy
from swarmnode.tasks.client import Scorer

TRAINING = TrainingConfig(groups_per_step=2, num_generations=2, max_completion_length=8)
FRAGMENT = 63_000
"""Bytes of the larger half of the embedded policy as int8, rounded up."""


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return load_policy(PolicyConfig(threads=1))


def run(policy, arm, allowance, rounds):
    with Scorer() as scorer:
        swarm = Swarm(
            arm,
            [policy.clone(), policy.clone()],
            TRAINING,
            scorer,
            seed=2,
            eval_questions=1,
            allowance=allowance,
        )
        return swarm.run(lambda trace: len(trace.tokens) >= rounds, eval_every=100)


def test_an_arm_receives_what_it_may_and_not_a_fragment_more(policy):
    allowance = [30_000.0] * 6
    trace = run(policy, Arm("averaging", as_much_as="other"), allowance, 6)
    spent = list(itertools.accumulate(trace.received))
    assert all(
        most - FRAGMENT < used <= most
        for used, most in zip(spent, itertools.accumulate(allowance), strict=True)
    )
    taken = sum(trace.extra.get(f"exchange {outcome}", 0) for outcome in ("accepted", "clipped"))
    assert taken >= 2 * 2  # two fragments, by two nodes, in int8; more in int4
    assert PARTS == 2


def test_groups_are_counted_as_they_would_travel(policy):
    unfiltered = replace(PAPER, useful_only=False)
    every = run(policy, Arm("all", 1, unfiltered), (), 2)
    half = run(policy, Arm("half", 1, unfiltered, share_one_of=2), (), 2)
    # one group of two short completions from the only other node
    assert all(200 < received < 2000 for received in every.received)
    assert 0.3 < sum(half.received) / sum(every.received) < 0.7
