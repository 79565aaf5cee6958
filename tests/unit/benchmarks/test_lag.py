"""The arms of `benchmarks.sapo --lag`: what samples is as old as they say."""

import torch

from benchmarks.sapo import LAGGING, arms
from benchmarks.simulator import Past
from swarmnode.config import PolicyConfig
from swarmnode.policy.load import load_policy


def test_a_lagging_policy_is_that_of_so_many_updates_ago():
    now = load_policy(PolicyConfig(devices="cpu", threads=1))
    weight = now.trainable_parameters()[0]
    past, seen = Past(now, 2), []
    with torch.no_grad():
        for value in range(1, 5):
            weight.fill_(float(value))
            past.learnt()
            seen.append(float(past.policy().trainable_parameters()[0].flatten()[0]))
    assert seen[1] not in (1.0, 2.0), "the first policy, until there have been as many updates"
    assert seen == [seen[0], seen[0], 1.0, 2.0]


def test_every_arm_but_one_lags():
    known = arms(["no lag", *LAGGING], 7)
    assert [arm.lag for arm in known] == [0] + [7] * len(LAGGING)
    assert all(
        arm.sharing.corrected for arm in known if arm.correction not in ("uncorrected", "clipped")
    )
