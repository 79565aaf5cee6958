"""Having the router forward our port for as long as we run, where others cannot dial us without
(UPnP; see `gateway.py`).

    peers on the internet cannot dial us ─▶ ask the router ─┬─ it forwards ─▶ asked again before the
    mapping ends
                                                            └─ it does not ─▶ said once, asked again
                                                            later

A router that starts again forgets its mappings: peers soon cannot dial us any more, and it is asked
anew; at a new address at once.
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
"""Between two requests to forward our port while that works; a mapping lives for LEASE_SECONDS, so
that one request may be lost."""
RETRY_SECONDS = 300.0
"""The same while others cannot dial us all the same."""
LOOK_SECONDS = 15.0
WORDS = {
    "carrier": (
        "the provider shares one public address among its customers (carrier-grade NAT): no port"
        " can be forwarded to this machine; relays carry calls to it, and a public address, or"
        " IPv6, is the provider's to give"
    ),
    "private": (
        "the router has another router behind it, whose port would have to be forwarded too; relays"
        " carry calls to this machine"
    ),
}
assert 2 * RENEW_SECONDS < LEASE_SECONDS


@dataclass(frozen=True)
class Seen:
    """How peers on the internet see us."""

    outside: str = ""
    """The IP address; empty where none of them does."""
    private: bool = False
    """They cannot dial us there."""


class Forwarding:
    """seen(): how peers see us now. check(): have a peer try again to dial us. ask(port): see
    `gateway.asked`."""

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
        """What the router's outside address is, as far as it was asked."""

    async def run(self) -> None:
        """Until cancelled."""
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
            log.warning("%s (the router's outside address is %s)", WORDS[kind], found.outside)
        elif kind != self.kind and found.mapped:
            log.info("the router forwards port %d to this machine (UPnP)", self._port)
        self.kind = kind
