"""The schedule of outer steps: which fragment is due after which training step, and which of its
blocks. Pure; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from swarmnode.weights import fragments

EARLY: Final = 0.5
"""An outer step taken within this share of the interval counts as the one that is due now."""


class OuterSchedule:
    """Schedule of the blocks that a node holds.

    Args:
        every: Training steps between two outer steps of one block.
        count: Number of fragments.
        blocks: The held blocks.
    """

    def __init__(self, every: int, count: int, blocks: Iterable[int]) -> None:
        self._every = max(every, count)
        self._count = count
        self._blocks = tuple(blocks)
        self._stepped_at: dict[int, int] = {}

    def due(self, step: int) -> tuple[int, list[int]] | None:
        """Return the fragment that is due after training step `step`, and those of its blocks that
        took no outer step recently, also by a swap that a partner proposed. None without such a
        block."""
        fragment = fragments.due(step, self._every, self._count)
        latest = step - self._every * EARLY
        blocks = [
            block
            for block in self._blocks
            if fragments.fragment_of(block, self._count) == fragment
            and self._stepped_at.get(block, -math.inf) <= latest
        ]
        return (fragment, blocks) if fragment is not None and blocks else None

    def stepped(self, blocks: Iterable[int], step: int) -> None:
        """Record an outer step of `blocks` after training step `step`."""
        self._stepped_at |= dict.fromkeys(blocks, step)
