"""From groups to rows: advantages group by group, and what of it carries a gradient."""

import pytest
import torch

from swarmnode.config import PolicyConfig
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.trainer.batch import TrainingGroup, assemble, own_group

PROMPT = "Find the greatest common divisor (GCD) of these numbers: 4, 6. Return only the GCD as your answer."


@pytest.fixture(scope="module")
def sample():
    torch.set_num_threads(1)
    policy = load_policy(PolicyConfig())
    return generate(policy, [PROMPT], Sampling(4, 8), policy.random_generator(1))[0]


def test_assembled_rows_keep_groups_together_and_say_what_is_silent(sample):
    useful = own_group(sample, [1.0, 0.0, 0.0, 0.0])
    silent = own_group(sample, [0.0] * 4)
    theirs = TrainingGroup(useful.rows, useful.old_logprobs, useful.rewards, [1.0] * 4, peer="p")
    rows = assemble([useful, silent, theirs], "dr_grpo")
    assert rows.groups == [0] * 4 + [1] * 4 + [2] * 4
    assert rows.external == [False] * 8 + [True] * 4
    assert rows.advantages.tolist() == [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0, 0.75, -0.25, -0.25, -0.25]
    assert rows.informative(external=False) == [0, 1, 2, 3]
    assert rows.informative(external=True) == [8, 9, 10, 11]
    assert rows.zero_advantage_share == 0.5


def test_groups_of_different_size_share_a_batch(sample):
    small = own_group(sample, [1.0, 0.0, 0.0, 0.0])
    pair = own_group(type(sample)(sample.prompt_ids, sample.completions[:2]), [1.0, 0.0])
    rows = assemble([small, pair], "dr_grpo")
    assert rows.advantages.tolist() == [0.75, -0.25, -0.25, -0.25, 0.5, -0.5]
