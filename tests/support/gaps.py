"""Recorded log-probabilities of sampled completions, compared with those that training computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from swarmnode.policy.engine.continuous import Continuous
from swarmnode.policy.engine.selector import answered
from swarmnode.policy.generate import GroupSample, Sampling, generate
from swarmnode.policy.logprobs import score
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.model import Policy


def sampled_by(
    kind: str, policy: Policy, prompts: Sequence[str], sampling: Sampling, seed: int = 0
) -> list[GroupSample]:
    """Return completions of the engine `lockstep` or `continuous`."""
    rng = policy.random_generator(seed)
    if kind == "lockstep":
        return generate(policy, prompts, sampling, rng)
    return answered(Continuous(policy, MicroBatcher(4096), sampling, rng), prompts)


def rows_of(groups: Iterable[GroupSample]) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, completion ids) of each completion."""
    return [(group.prompt_ids, each.ids) for group in groups for each in group.completions]


def greedy(policy: Policy, prompt_ids: list[int], tokens: int) -> list[int]:
    """Return the completion of transformers' own `generate`."""
    prompt = torch.tensor([prompt_ids])
    out = policy.model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=tokens,
        pad_token_id=policy.pad_id,
    )
    return out[0, prompt.shape[1] :].tolist()


def flat(rows: Iterable[Iterable[float]]) -> torch.Tensor:
    return torch.tensor([*chain.from_iterable(rows)])


def gaps(
    policy: Policy, groups: Iterable[GroupSample], temperature: float = 1.0, alone: bool = False
) -> torch.Tensor:
    """Return the absolute differences in nats, (tokens,).

    Args:
        alone: Score each row in a pass of its own.
    """
    groups = list(groups)
    recorded = flat(each.logprobs for group in groups for each in group.completions)
    parts = [[row] for row in rows_of(groups)] if alone else [rows_of(groups)]
    scored = chain.from_iterable(score(policy, part, temperature) for part in parts)
    return (recorded - flat(scored)).abs()
