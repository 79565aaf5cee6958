"""Whether the last exchange made the policy worse, by the only measure that counts: held-out reward. Pure; no torch.

A frozen state and two transitions, so that it can be kept with the counters of a trainer and goes on where that was killed.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

SIGMAS: Final = 3.0
"""Usual changes of held-out reward beyond which a fall is not chance: one in a thousand, were they normal."""
FLOOR: Final = 0.02
"""Least σ, units of reward: the same answers to sixteen questions twice do not make a measurement exact."""


class RevertMonitor(msgspec.Struct, frozen=True):
    """Compares the first held-out reward after an exchange with the last one before it.

    A fall of more than SIGMAS σ asks for the revert. σ is the root mean square of the changes between successive rewards, which also has
    in it what the policy learns in between, and is never taken below FLOOR.
    """

    last: float | None = None
    """Newest held-out reward of a policy that we still have."""
    variance: float = 0.0
    """Mean square of the changes between successive rewards."""
    changes: int = 0
    peer: str = ""
    """Partner of the exchange under watch; empty while none is."""
    before: float | None = None
    """Reward that the exchange under watch is held to."""

    @property
    def sigma(self) -> float:
        return max(FLOOR, math.sqrt(self.variance))

    def committed(self, peer: str) -> RevertMonitor:
        """An exchange with `peer` was applied. Several before the next reward: the last one is blamed, having passed no reward either."""
        return msgspec.structs.replace(self, peer=peer, before=self.last)

    def stepped_alone(self) -> RevertMonitor:
        """A solo step was taken: the exchange before it cannot be taken back any more."""
        return msgspec.structs.replace(self, peer="", before=None)

    def fell(self, reward: float, before: float | None) -> bool:
        """Whether `reward` is lower than `before` by more than chance."""
        return before is not None and reward < before - SIGMAS * self.sigma

    def observed(self, reward: float) -> tuple[RevertMonitor, str]:
        """A held-out reward was measured. Next, and the peer whose exchange must be taken back: empty where none is."""
        done = self.stepped_alone()
        if not math.isfinite(reward):
            return done, ""
        if self.peer and self.fell(reward, self.before):
            return done, self.peer  # and the reward of a policy that is gone is forgotten
        if self.last is None:
            return msgspec.structs.replace(done, last=reward), ""
        changes = self.changes + 1
        share = max(0.1, 1 / changes)
        variance = self.variance + share * ((reward - self.last) ** 2 - self.variance)
        return msgspec.structs.replace(done, last=reward, variance=variance, changes=changes), ""
