"""Whether the last exchange made the policy worse, by the only measure that counts. Pure; no torch."""

from __future__ import annotations

import math

import msgspec

SIGMAS = 3.0
"""Usual changes of held-out reward beyond which a fall is not chance: one in a thousand, were they normal."""


class WatchStatistics(msgspec.Struct, frozen=True):
    sigma: float | None
    """Usual change between two held-out rewards, units of reward; None until two were seen."""
    before: float | None
    """The reward that the exchange under watch is held to."""
    watching: str | None
    """Peer of the exchange under watch."""
    reverts: int


class RewardWatch:
    """Compares the first held-out reward after an exchange with the last one before it.

    A fall of more than `k` σ asks for the revert buffer. σ is the root mean square of the changes between successive rewards, which also
    has in it what the policy learns in between, and is never taken below `floor`: the same answers to sixteen questions twice do not make a
    measurement exact.
    """

    def __init__(self, k: float = SIGMAS, floor: float = 0.02) -> None:
        self.k = k
        self.floor = floor
        self._last: float | None = None
        self._variance = 0.0
        self._differences = 0
        self._before: float | None = None
        self._watching: str | None = None
        self._reverts = 0

    def committed(self, peer: str) -> None:
        """An exchange with `peer` was applied. Several before the next reward: the last one is blamed, having passed no reward either."""
        self._before, self._watching = self._last, peer

    def observe(self, reward: float) -> str | None:
        """A held-out reward was measured. The peer whose exchange must be taken back, else None."""
        before, peer = self._before, self._watching
        self._before = self._watching = None
        if not math.isfinite(reward):
            return None
        if peer is not None and before is not None and reward < before - self.k * self.sigma:
            self._reverts += 1
            return peer  # and the reward of a policy that is gone is forgotten
        if self._last is not None:
            self._differences += 1
            share = max(0.1, 1 / self._differences)
            self._variance += share * ((reward - self._last) ** 2 - self._variance)
        self._last = reward
        return None

    @property
    def sigma(self) -> float:
        return max(self.floor, math.sqrt(self._variance))

    def statistics(self) -> WatchStatistics:
        return WatchStatistics(self.sigma if self._differences else None, self._before, self._watching, self._reverts)
