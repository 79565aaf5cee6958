"""Decoding in slots equals decoding with a growing cache, for rows of different lengths. Recorded
steps are in test_gpu_policy.py and test_recorded.py."""

import pytest
import torch

from swarmnode.policy.decode import grow
from swarmnode.policy.slots import fill

PROMPTS = [[5, 9, 7, 12, 8], [11, 6], [9, 9, 4]]
GENERATIONS, STEPS = 3, 40
ROWS = len(PROMPTS) * GENERATIONS


def tokens_of(steps):
    return torch.randint(4, 40, (steps, ROWS), generator=torch.Generator().manual_seed(0))


def same(found, expected):
    assert found.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "start"),
    [("llama", grow), ("mistral", grow), ("gpt2", grow), ("llama", fill), ("gpt2", fill)],
)
@torch.no_grad()
def test_kept_rows_do_not_depend_on_dropped_rows(policies, kind, start):
    policy = policies[kind]
    every, _ = grow(policy, PROMPTS, GENERATIONS, STEPS)
    some, _ = start(policy, PROMPTS, GENERATIONS, STEPS)
    left = list(range(ROWS))
    for number, token in enumerate(tokens_of(7)):
        same(some.advance(token[left]), every.advance(token)[left])
        if number in (1, 4):
            kept = list(range(number % 2, len(left), 2))
            some.keep(kept)
            left = [left[row] for row in kept]
    assert left == [1, 5]
