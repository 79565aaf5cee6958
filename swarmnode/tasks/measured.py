"""How good a model is at tasks' held-out questions: what is asked for, what comes back, and pass@k.
No torch: the command line reads it."""

from __future__ import annotations

import math

import msgspec


class Request(msgspec.Struct, frozen=True):
    """What is to be measured."""

    config: str
    """The configuration as JSON, with `policy.model` the model that is meant."""
    tasks: list[str]
    questions: int
    """Held-out questions of each task: the first ones, the same for everybody."""
    samples: int
    """Sampled answers to each question, n."""
    k: list[int]


class Measured(msgspec.Struct, frozen=True):
    """One task; every number is a mean over its questions."""

    task: str
    questions: int
    greedy: float
    """Reward of the greedy answer."""
    reward: float
    """Reward of sampled answers."""
    pass_at: dict[int, float]
    error_at: dict[int, float | None]
    """Standard error of each `pass_at` over the questions; None of one question."""
    tokens: float
    """Length of a sampled answer."""
    cut: float
    """Share of sampled answers that ended at the length limit."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that at least one of k answers drawn from `samples` is right, of which `right`
    are: 1 − C(n − c, k) / C(n, k).

    Source: Chen et al. (arXiv 2107.03374) §2.1, which shows that 1 − (1 − c/n)^k is biased. Raises
    ValueError unless 1 ≤ k ≤ n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
