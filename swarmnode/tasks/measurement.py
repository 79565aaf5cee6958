"""Request and result of measuring a model on held-out questions, and pass@k. No torch: the command
line imports this module.
"""

from __future__ import annotations

import math

import msgspec


class Request(msgspec.Struct, frozen=True):
    """Request to measure a model."""

    config: str
    """The configuration as JSON. Its `policy.model` is the model to measure."""
    tasks: list[str]
    questions: int
    """Number of held-out questions per task. They are the first ones, which are the same on every
    node.
    """
    samples: int
    """Number of sampled answers per question, n."""
    k: list[int]


class TaskScores(msgspec.Struct, frozen=True):
    """Result of one task. Every number is a mean over its questions."""

    task: str
    questions: int
    greedy: float
    """Mean reward of the greedy answers."""
    reward: float
    """Mean reward of the sampled answers."""
    pass_at: dict[int, float]
    error_at: dict[int, float | None]
    """Standard error of each `pass_at` over the questions; None for a single question."""
    tokens: float
    """Mean length of a sampled answer, in tokens."""
    cut: float
    """Share of sampled answers that reached the length limit."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that at least one of k answers is right, drawn from `samples` answers
    of which `right` are right: 1 − C(n − c, k) / C(n, k).

    Source: Chen et al. (arXiv 2107.03374) §2.1, which shows that 1 − (1 − c/n)^k is biased.

    Raises:
        ValueError: k is not in 1 to n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
