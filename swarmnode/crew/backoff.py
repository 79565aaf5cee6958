"""With whom to wait: who founded or sealed crews that never did anything, and how long none of theirs is joined. Pure; no torch.

Whoever has keys enough can found a crew of its own and seat a spare in it: every signature is in order, and the spare loads a stage for
nothing. What tells such a crew from another is that it never takes a step. So a crew that this node left before it had taken one costs

    whoever signed it       nothing the first time, then one `unit` of seconds, three, seven, … until a crew with them takes a step
    strangers, all of them  the same, counted over all such crews in a row, but never more than STRANGERS_SECONDS: keys cost nothing

A stranger is who has never taken a step with this node; those who have do not suffer for what others do.

All of it is of this process: after a restart, which no peer can bring about, it begins anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec

PEERS: Final = 256
"""Remembered of either kind; those heard of longest ago are forgotten."""
LONGEST_SECONDS: Final = 3600.0
STRANGERS_SECONDS: Final = 900.0
"""A swarm that is new has only strangers in it."""


class _Strikes(msgspec.Struct):
    count: int = 0
    until: float = -1e18

    def add(self, unit: float, most: float, now: float) -> None:
        self.count += 1
        self.until = now + min(most, unit * (2.0 ** min(self.count - 1, 30) - 1))


class PeerBackoff:
    """unit: seconds."""

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self._worked: OrderedDict[str, None] = OrderedDict()
        self._strikes: OrderedDict[str, _Strikes] = OrderedDict()
        self._strangers = _Strikes()

    def took_a_step(self, peers: Iterable[str]) -> None:
        """A crew with these has."""
        self._strangers = _Strikes()
        for peer in peers:
            self._strikes.pop(peer, None)
            self._worked[peer] = None
            self._worked.move_to_end(peer)
        while len(self._worked) > PEERS:
            self._worked.popitem(last=False)

    def never_ran(self, signers: Iterable[str], now: float) -> None:
        """A crew that these signed is over, and took no step with us."""
        self._strangers.add(self._unit, STRANGERS_SECONDS, now)
        for peer in signers:
            self._strikes.setdefault(peer, _Strikes()).add(self._unit, LONGEST_SECONDS, now)
            self._strikes.move_to_end(peer)
        while len(self._strikes) > PEERS:
            self._strikes.popitem(last=False)

    def waits(self, peer: str, now: float) -> bool:
        """Whether no crew that `peer` signs is joined for now."""
        strikes = self._strikes.get(peer)
        if strikes is not None and now < strikes.until:
            return True
        return peer not in self._worked and now < self._strangers.until
