"""Which frames still count. Pure; no torch.

A crew may go on while a former member, or a frame that was long on its way, still believes in the
past. Each frame says in which crew, by which stage and at which step it was sent. A crew never
changes, so whatever another one says is of the past, or of somebody's future.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from swarmnode.pipeline.frames import Place

FENCE_REASONS: Final = ("crew", "stage", "step", "newer")
"""Why a frame is dropped. `newer`: its step is ahead of ours: we missed something."""


class Fence:
    """For one member of a crew of `stages`; a new crew makes a new fence."""

    def __init__(self, place: Place, stages: int) -> None:
        self.place = place
        self._stages = stages
        self.dropped: Counter[str] = Counter()
        """By FENCE_REASONS."""

    def check(self, place: Place, sender: int, step: int | None) -> str | None:
        """Why a frame that came from stage `sender` is to be dropped while we are at `step`; None
        where it counts.

        `step` is None for frames of the commit itself, which `commit` orders by step and attempt:
        they are about being a step apart.
        """
        reason = self._reason(place, sender, step)
        if reason:
            self.dropped[reason] += 1
        return reason

    def passes(self, place: Place, sender: int, step: int) -> bool:
        """What `check` would say, without counting."""
        return self._reason(place, sender, step) is None

    def _reason(self, place: Place, sender: int, step: int | None) -> str | None:
        if place.crew != self.place.crew:
            return "crew"
        if place.stage != sender or not 0 <= sender < self._stages:
            return "stage"
        if step is None or place.step == step:
            return None
        return "step" if place.step < step else "newer"
