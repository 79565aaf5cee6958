"""Which frames still count. Pure; no torch.

A crew may go on while a former member, or a frame that was long on its way, still believes in the past. Each frame says under which roster,
by which holder of its stage and at which step it was sent; lower numbers are dropped, and a higher roster says that we are the past.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from swarmnode.pipeline.frames import Place

FENCE_REASONS: Final = ("crew", "stage", "roster_epoch", "stage_epoch", "step", "newer")
"""Why a frame is dropped. `newer`: its roster, its sender's epoch or its step is ahead of ours: we missed something."""


@dataclass(frozen=True)
class FenceStatistics:
    dropped: dict[str, int]


class Fence:
    """For one member of a crew; a new roster makes a new fence."""

    def __init__(self, place: Place, stage_epochs: Sequence[int]) -> None:
        self.place = place
        self._stage_epochs = tuple(stage_epochs)
        self._dropped: Counter[str] = Counter()

    def statistics(self) -> FenceStatistics:
        return FenceStatistics(dict(self._dropped))

    def check(self, place: Place, sender: int, step: int | None) -> str | None:
        """Why a frame that came from stage `sender` is to be dropped while we are at `step`; None where it counts.

        `step` is None for frames of the commit itself, which `commit` orders by step and attempt: they are about being a step apart.
        """
        reason = self._reason(place, sender, step)
        if reason:
            self._dropped[reason] += 1
        return reason

    def _reason(self, place: Place, sender: int, step: int | None) -> str | None:
        mine = self.place
        if place.crew != mine.crew:
            return "crew"
        if place.stage != sender or not 0 <= sender < len(self._stage_epochs):
            return "stage"
        if place.roster_epoch != mine.roster_epoch:
            return "newer" if place.roster_epoch > mine.roster_epoch else "roster_epoch"
        if place.stage_epoch != self._stage_epochs[sender]:
            return "newer" if place.stage_epoch > self._stage_epochs[sender] else "stage_epoch"
        if step is None or place.step == step:
            return None
        return "step" if place.step < step else "newer"
