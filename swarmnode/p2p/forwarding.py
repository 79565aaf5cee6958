"""UPnP port forwarding, renewed while this node runs (see `gateway.py` for the requests).

    peers on the internet cannot dial ─▶ ask the router ─┬─ mapped ─▶ ask again before it expires
                                                         └─ failed ─▶ log once, ask again later

A router that restarts forgets its mappings. Peers then cannot dial this node, which leads to a new
request. A new public address leads to a new request at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from swarmnode.p2p.gateway import LEASE_SECONDS, Gateway, Kind, asked, kind_of

log = logging.getLogger(__name__)

RENEW_SECONDS = 1500.0
"""Interval between requests while forwarding works. A mapping lives for LEASE_SECONDS, so one
request may be lost."""
RETRY_SECONDS = 300.0
"""Interval between requests while peers cannot dial this node."""
LOOK_SECONDS = 15.0
WORDS = {
    "carrier": (
        "the provider shares one public address among its customers (carrier-grade NAT), so no port"
        " can be forwarded to this machine; peers reach it through relays. Ask the provider for a"
        " public IPv4 address or for IPv6"
    ),
    "private": (
        "the router is behind another router, whose port must be forwarded too; peers reach this"
        " machine through relays"
    ),
}
assert 2 * RENEW_SECONDS < LEASE_SECONDS


@dataclass(frozen=True)
class Seen:
    """How peers on the internet see this node."""

    outside: str = ""
    """The public IP address; empty if no peer on the internet sees this node."""
    private: bool = False
    """True if peers cannot dial this node there."""


class Forwarding:
    """Keeps one port forwarded.

    Args:
        port: the port.
        seen: returns how peers see this node now.
        check: asks a peer to dial this node again.
        ask: see `gateway.asked`.
    """

    def __init__(
        self,
        port: int,
        seen: Callable[[], Seen],
        check: Callable[[], Awaitable[None]],
        ask: Callable[[int], Awaitable[Gateway]] = asked,
    ) -> None:
        self._port = port
        self._seen = seen
        self._check = check
        self._ask = ask
        self.kind: Kind = "none"
        """Kind of the router's external address in the last answer."""

    async def run(self) -> None:
        """Request and renew the mapping until cancelled."""
        asked_at, outside, mapped = -math.inf, "", False
        while True:
            await trio.sleep(LOOK_SECONDS)
            seen, now = self._seen(), trio.current_time()
            if not (seen.private or mapped):
                continue
            moved = seen.outside not in ("", outside)
            if not moved and now < asked_at + (RETRY_SECONDS if seen.private else RENEW_SECONDS):
                continue
            asked_at, outside = now, seen.outside or outside
            found = await self._ask(self._port)
            mapped = found.mapped
            self._note(found, kind_of(found.outside, outside))
            if mapped and seen.private:
                await self._check()

    def _note(self, found: Gateway, kind: Kind) -> None:
        if kind != self.kind and kind in WORDS:
            log.warning("%s (external address of the router: %s)", WORDS[kind], found.outside)
        elif kind != self.kind and found.mapped:
            log.info("the router forwards port %d to this machine (UPnP)", self._port)
        self.kind = kind
