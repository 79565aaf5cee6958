"""Detects swaps that made the policy worse, by held-out reward. Pure; no torch.

The state is immutable, so that the trainer can save it with its counters and continue after a
restart.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

SIGMAS: Final = 3.0
"""A fall of held-out reward by more than this many standard deviations is no chance event (one in a
thousand for a normal distribution)."""
WATCHED: Final = 64
"""Most partners under watch; the latest are kept. A stage of a crew never measures a reward."""
FLOOR: Final = 0.02
"""Least σ, in units of reward. Two equal measurements on sixteen questions do not prove that the
noise is zero."""


class RevertMonitor(msgspec.Struct, frozen=True):
    """Compares the first held-out reward after swaps with the last one before them.

    A fall of more than SIGMAS σ calls for a revert. σ is the root mean square of the changes
    between successive rewards, which include the progress of learning, but at least FLOOR.
    """

    last: float | None = None
    """Latest held-out reward of a policy that was not reverted."""
    variance: float = 0.0
    """Mean square of the changes between successive rewards."""
    changes: int = 0
    peers: tuple[str, ...] = ()
    """Partners of the swaps under watch."""
    before: float | None = None
    """Reward before these swaps."""

    @property
    def sigma(self) -> float:
        return max(FLOOR, math.sqrt(self.variance))

    def committed(self, peer: str) -> RevertMonitor:
        """Return the state after a swap with `peer`. If several swaps precede the next reward, any
        of them may cause a fall."""
        others = tuple(other for other in self.peers if other != peer)
        return msgspec.structs.replace(self, peers=(*others, peer)[-WATCHED:], before=self.last)

    def fell(self, reward: float, before: float | None) -> bool:
        """Return True if `reward` is below `before` by more than SIGMAS σ."""
        return before is not None and reward < before - SIGMAS * self.sigma

    def observed(self, reward: float) -> tuple[RevertMonitor, tuple[str, ...]]:
        """Return the state after a measurement, and the peers whose swaps must be reverted."""
        done = msgspec.structs.replace(self, peers=(), before=None)
        if not math.isfinite(reward):
            return done, ()
        if self.peers and self.fell(reward, self.before):
            return done, self.peers  # the reward of the reverted policy is not recorded
        if self.last is None:
            return msgspec.structs.replace(done, last=reward), ()
        changes = self.changes + 1
        share = max(0.1, 1 / changes)
        variance = self.variance + share * ((reward - self.last) ** 2 - self.variance)
        return msgspec.structs.replace(done, last=reward, variance=variance, changes=changes), ()
