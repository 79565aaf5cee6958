"""Which way a micro-batch takes through the stages: in their order, or with the first two and the
last two exchanged. Pure; no torch.

    plain      0 → 1 → … → S − 1
    swapped    0: embedding → 1 → 0: layers → 2 → … → S − 1: layers → S − 2 → S − 1: norm and head
    (CheckFree+, arXiv 2506.15461 §3.3)

In a swapped run half of the micro-batches go each way, so that the second stage learns what the
first one does, and the last but one what the last does. Embedding and head stay where they are.
Which way a micro-batch goes is its number's parity: every stage knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarmnode.errors import Refused

Part = Literal["all", "embed", "layers", "head"]
"""What of a stage a hop runs. `all`: whatever it has."""


@dataclass(frozen=True)
class Hop:
    stage: int
    part: Part


Route = tuple[Hop, ...]


def plain(stages: int) -> Route:
    return tuple(Hop(stage, "all") for stage in range(stages))


def swapped_order(stages: int) -> tuple[int, ...]:
    """CheckFree+: the order of the stages' layers for half of the micro-batches.

    Raises Refused for fewer than four stages: the pairs would overlap.
    """
    if stages < 4:
        raise Refused("swapped stages need at least four")
    return (1, 0, *range(2, stages - 2), stages - 1, stages - 2)


def swapped(stages: int) -> Route:
    """Raises Refused as `swapped_order` does."""
    return (
        Hop(0, "embed"),
        *(Hop(stage, "layers") for stage in swapped_order(stages)),
        Hop(stages - 1, "head"),
    )


class Routes:
    """The routes of one crew. `swap` makes it a swapped run; raises Refused then for fewer than
    four stages."""

    def __init__(self, stages: int, swap: bool) -> None:
        self._plain = plain(stages)
        self._swapped = swapped(stages) if swap else self._plain

    def of(self, micro_batch: int, purpose: Literal["learn", "score"] = "learn") -> Route:
        """Only training is swapped: what is generated and scored is the plain policy."""
        return self._swapped if purpose == "learn" and micro_batch % 2 else self._plain


def arriving(route: Route, sender: int, stage: int) -> int | None:
    """Which hop of `route` a forward from `sender` to `stage` begins; None for none. The head sends
    itself the first."""
    if sender == stage == route[0].stage:
        return 0
    return next(
        (
            i
            for i in range(1, len(route))
            if (route[i - 1].stage, route[i].stage) == (sender, stage)
        ),
        None,
    )


def returning(route: Route, sender: int, stage: int) -> int | None:
    """Which hop of `route` a gradient from `sender` to `stage` ends; None for none."""
    return next(
        (
            i
            for i in range(len(route) - 1)
            if (route[i].stage, route[i + 1].stage) == (stage, sender)
        ),
        None,
    )
