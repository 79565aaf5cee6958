"""`python -m swarmnode.p2p.gateway [--port PORT] [--url URL]`: query the router by UPnP, print JSON
to stdout.

    outside   external address of the router: public, private (behind another router), or of a
              carrier-grade NAT
    mapped    true if the router forwards PORT to this machine, for one hour, so that a stopped node
              leaves no open port behind

The work is done by miniupnpc, a dependency of py-libp2p. It parses answers of any LAN device in C,
so it runs in a process of its own with a deadline, never in the process that holds the key. NAT-PMP
and PCP are not used, because home routers with these protocols also support UPnP.

The network process keeps one port forwarded while it runs (`Forwarding`):

    peers on the internet cannot dial ─▶ ask the router ─┬─ mapped ─▶ ask again before it expires
                                                         └─ failed ─▶ log once, ask again later

A router that restarts forgets its mappings. Peers then cannot dial this node, which leads to a new
request. A new public address leads to a new request at once.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import math
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import trio

from swarmnode.process import die_with_parent

log = logging.getLogger(__name__)

DISCOVER_MILLISECONDS = 2000
LEASE_SECONDS = 3600
QUERY_TIMEOUT_SECONDS = 15.0
CARRIER = ipaddress.ip_network("100.64.0.0/10")
"""RFC 6598: addresses between a provider's NAT and its customers."""
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
RouterKind = Literal["none", "public", "carrier", "private"]


class Gateway(msgspec.Struct, frozen=True):
    outside: str = ""
    """The router's external IP address; empty if no router answers."""
    mapped: bool = False


def classify_address(outside: str, observed: str = "") -> RouterKind:
    """Classify the external address of a router. Pure.

    Args:
        outside: the external address.
        observed: the address at which peers see this node. If it differs, another NAT follows the
            router.
    """
    try:
        ip = ipaddress.ip_address(outside)
    except ValueError:
        return "none"
    if ip in CARRIER:
        return "carrier"
    if not ip.is_global:
        return "private"
    return (
        "carrier"
        if observed and ipaddress.ip_address(observed).version == ip.version and observed != outside
        else "public"
    )


def query(port: int | None, url: str | None = None) -> Iterator[Gateway]:
    """Query the router; with a port, request a mapping and yield the result.

    Args:
        port: the port to forward; None only queries.
        url: URL of the router's description; None searches by multicast.

    Raises:
        Exception: the library's plain type, if no router answers or the router refuses.
    """
    import miniupnpc

    router = miniupnpc.UPnP()
    router.discoverdelay = DISCOVER_MILLISECONDS
    if url is None:
        router.discover()
        router.selectigd()
    else:
        router.selectigd(url)
    outside = router.externalipaddress() or ""
    yield Gateway(outside)
    if port is not None:
        # Routers that only support permanent mappings refuse; those would outlive the node.
        mapped = router.addportmapping(
            port, "TCP", router.lanaddr, port, "swarmnode", "", LEASE_SECONDS
        )
        yield Gateway(outside, bool(mapped))


async def query_in_child(port: int | None) -> Gateway:
    """Run `query` in a process of its own and return its last result. Never raises for a fault of
    the router."""
    command = [
        sys.executable,
        "-m",
        "swarmnode.p2p.gateway",
        *(("--port", str(port)) if port is not None else ()),
    ]
    with trio.move_on_after(QUERY_TIMEOUT_SECONDS):
        try:
            done = await trio.run_process(
                command,
                capture_stdout=True,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            return msgspec.json.decode((done.stdout.splitlines() or [b"{}"])[-1], type=Gateway)
        except (OSError, msgspec.MsgspecError) as error:
            log.debug("cannot query the router: %s", error)
    return Gateway()


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
        ask: see `query_in_child`.
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


def main() -> int:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--url")
    arguments = parser.parse_args()
    for found in query(arguments.port, arguments.url):
        print(msgspec.json.encode(found).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
