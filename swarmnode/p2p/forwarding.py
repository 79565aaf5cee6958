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

from swarmnode.p2p.gateway import (
    LEASE_SECONDS,
    Gateway,
    RouterKind,
    classify_address,
    query_in_child,
)

log = logging.getLogger(__name__)

RENEW_SECONDS = 1500.0
"""Interval between requests while forwarding works. A mapping lives for LEASE_SECONDS, so one
request may be lost."""
RETRY_SECONDS = 300.0
"""Interval between requests while peers cannot dial this node."""
CHECK_SECONDS = 15.0
EXPLANATIONS = {
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
class ExternalView:
    """Address and reachability of this node as peers on the internet see them."""

    outside: str = ""
    """The public IP address; empty if no peer on the internet sees this node."""
    private: bool = False
    """True if peers cannot dial this node there."""


class Forwarding:
    """Keeps one port forwarded.

    Args:
        port: the port.
        external_view: returns how peers see this node now.
        check: asks a peer to dial this node again.
        ask: see `gateway.query_in_child`.
    """

    def __init__(
        self,
        port: int,
        external_view: Callable[[], ExternalView],
        check: Callable[[], Awaitable[None]],
        ask: Callable[[int], Awaitable[Gateway]] = query_in_child,
    ) -> None:
        self._port = port
        self._external_view = external_view
        self._check = check
        self._ask = ask
        self.kind: RouterKind = "none"
        """Kind of the router's external address in the last answer."""

    async def run(self) -> None:
        """Request and renew the mapping until cancelled."""
        asked_at, outside, mapped = -math.inf, "", False
        while True:
            await trio.sleep(CHECK_SECONDS)
            external_view, now = self._external_view(), trio.current_time()
            if not (external_view.private or mapped):
                continue
            moved = external_view.outside not in ("", outside)
            if not moved and now < asked_at + (
                RETRY_SECONDS if external_view.private else RENEW_SECONDS
            ):
                continue
            asked_at, outside = now, external_view.outside or outside
            found = await self._ask(self._port)
            mapped = found.mapped
            self._log_change(found, classify_address(found.outside, outside))
            if mapped and external_view.private:
                await self._check()

    def _log_change(self, found: Gateway, kind: RouterKind) -> None:
        if kind != self.kind and kind in EXPLANATIONS:
            log.warning(
                "%s (external address of the router: %s)", EXPLANATIONS[kind], found.outside
            )
        elif kind != self.kind and found.mapped:
            log.info("the router forwards port %d to this machine (UPnP)", self._port)
        self.kind = kind
