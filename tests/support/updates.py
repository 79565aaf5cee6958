"""Groups for an update, and a device that is too small for them."""

from __future__ import annotations

import pytest
import torch

from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import Policy
from swarmnode.rollouts.trainer.batch import TrainingGroup, own_group
from swarmnode.trainer import update

GCD_PROMPT = (
    "Find the greatest common divisor (GCD) of these numbers: 4, 6. Return only the GCD as your"
    " answer."
)
PROMPTS = [f"What is {a} + {b}?" for a, b in [(3, 4), (15, 6), (7, 8), (9, 10), (2, 2), (31, 5)]]


def sampled_groups(policy: Policy, prompts: list[str], own: int) -> list[TrainingGroup]:
    """Return groups of four answers; all but the first `own` are of peers."""
    samples = generate(policy, prompts, Sampling(4, 8), policy.random_generator(1))
    made = [own_group(sample, [1.0, 0.0, 0.0, 1.0]) for sample in samples]
    theirs = [
        TrainingGroup(g.rows, g.sampler_logprobs, g.rewards, [0.9] * 4, peer=f"p{n}")
        for n, g in enumerate(made[own:])
    ]
    return [*made[:own], *theirs]


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in policy.trainable_parameters()])


def small_device(monkeypatch: pytest.MonkeyPatch, plain: int, recomputed: int) -> None:
    """Have a device with room for `plain` padded tokens, or `recomputed` with checkpointing."""
    real = update.completion_logprobs

    def limited(policy, batch, temperature):
        if batch.padded_tokens > (recomputed if batch.recompute else plain):
            raise torch.OutOfMemoryError("simulated: out of memory")
        return real(policy, batch, temperature)

    monkeypatch.setattr(update, "completion_logprobs", limited)
