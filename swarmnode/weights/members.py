"""Who could be a partner: connected peers that have said they average the same policy, and how far they are. Pure.

A peer says so itself, over a connection that proves who it is. What it says decides only whether it is asked; the fingerprint is compared
again in every proposal, and everything that follows is judged by the gate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

FRESH_SECONDS = 120.0
"""What a peer said is worth this long."""
ASK_SECONDS = 30.0
"""Between two questions to one peer."""
MAX_PEERS = 1024


class Member(msgspec.Struct, frozen=True):
    fingerprint: bytes
    """Empty: it does not average, or has not said."""
    outer_step: int
    at: float


class Members:
    """`now` is any monotonic time in seconds."""

    def __init__(self) -> None:
        self._members: OrderedDict[str, Member] = OrderedDict()

    def said(self, peer: str, fingerprint: bytes, outer_step: int, now: float) -> None:
        """`peer` averages this, and claims so many outer steps. fingerprint empty: it did not answer."""
        self._members.pop(peer, None)
        self._members[peer] = Member(fingerprint, outer_step, now)
        if len(self._members) > MAX_PEERS:
            self._members.popitem(last=False)

    def to_ask(self, connected: Iterable[str], now: float) -> list[str]:
        """Connected peers that have said nothing lately."""
        return [peer for peer in connected if (m := self._members.get(peer)) is None or now - m.at >= ASK_SECONDS]

    def candidates(self, connected: Iterable[str], fingerprint: bytes, now: float) -> list[str]:
        """Connected peers with our fingerprint that said so lately."""
        return [
            peer
            for peer in connected
            if (m := self._members.get(peer)) is not None and m.fingerprint == fingerprint and now - m.at < FRESH_SECONDS
        ]

    def outer_step(self, peer: str) -> int:
        """What it last claimed."""
        member = self._members.get(peer)
        return member.outer_step if member is not None else 0
