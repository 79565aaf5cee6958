"""Whether exchanges made the policy worse, by the only measure that counts: held-out reward. Pure;
no torch.

A frozen state and two transitions, so that it can be kept with the counters of a trainer and goes
on where that was killed.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

SIGMAS: Final = 3.0
"""Usual changes of held-out reward beyond which a fall is not chance: one in a thousand, were they
normal."""
WATCHED: Final = 64
"""Partners under watch at most, the latest: a stage of a crew never sees a reward."""
FLOOR: Final = 0.02
"""Least σ, units of reward: the same answers to sixteen questions twice do not make a measurement
exact."""


class RevertMonitor(msgspec.Struct, frozen=True):
    """Compares the first held-out reward after exchanges with the last one before them.

    A fall of more than SIGMAS σ asks for the revert. σ is the root mean square of the changes
    between successive rewards, which also has in it what the policy learns in between, and is never
    taken below FLOOR.
    """

    last: float | None = None
    """Newest held-out reward of a policy that we still have."""
    variance: float = 0.0
    """Mean square of the changes between successive rewards."""
    changes: int = 0
    peers: tuple[str, ...] = ()
    """Partners of the exchanges under watch."""
    before: float | None = None
    """Reward that these are held to."""

    @property
    def sigma(self) -> float:
        return max(FLOOR, math.sqrt(self.variance))

    def committed(self, peer: str) -> RevertMonitor:
        """An exchange with `peer` was applied. Several before the next reward: any of them may be
        why it falls."""
        others = tuple(other for other in self.peers if other != peer)
        return msgspec.structs.replace(self, peers=(*others, peer)[-WATCHED:], before=self.last)

    def fell(self, reward: float, before: float | None) -> bool:
        """Whether `reward` is lower than `before` by more than chance."""
        return before is not None and reward < before - SIGMAS * self.sigma

    def observed(self, reward: float) -> tuple[RevertMonitor, tuple[str, ...]]:
        """A held-out reward was measured. Next, and the peers whose exchanges must be taken
        back."""
        done = msgspec.structs.replace(self, peers=(), before=None)
        if not math.isfinite(reward):
            return done, ()
        if self.peers and self.fell(reward, self.before):
            return done, self.peers  # and the reward of a policy that is gone is forgotten
        if self.last is None:
            return msgspec.structs.replace(done, last=reward), ()
        changes = self.changes + 1
        share = max(0.1, 1 / changes)
        variance = self.variance + share * ((reward - self.last) ** 2 - self.variance)
        return msgspec.structs.replace(done, last=reward, variance=variance, changes=changes), ()
