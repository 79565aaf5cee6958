"""Recorded log-probabilities of sampled completions, compared with those that training computes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch

from swarmnode.policy.generate import GroupSample
from swarmnode.policy.logprobs import score
from swarmnode.policy.model import Policy


def rows_of(groups: Iterable[GroupSample]) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, completion ids) of each completion."""
    return [(group.prompt_ids, each.ids) for group in groups for each in group.completions]


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
