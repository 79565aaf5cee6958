"""`python -m swarmnode.p2p.gateway [--port PORT] [--url URL]`: what the router of this network says
by UPnP, as JSON on stdout.

    outside   the address that it has on its other side: public, private (another router behind it),
    or of a provider's carrier-grade NAT
    mapped    whether it forwards PORT to this machine now; for an hour, so that a node that is gone
    leaves no open port behind

miniupnpc does both well, and comes with py-libp2p. It is C that parses what any device of the LAN
sends, so it runs in a process of its own with a deadline, never in the one that holds the key.
NAT-PMP and PCP are not asked for: routers for homes that speak them speak UPnP, too.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import msgspec
import trio

from swarmnode.process import die_with_parent

log = logging.getLogger(__name__)

DISCOVER_MILLISECONDS = 2000
LEASE_SECONDS = 3600
ASK_SECONDS = 15.0
CARRIER = ipaddress.ip_network("100.64.0.0/10")
"""RFC 6598: between a provider's NAT and its customers, and nowhere else."""
Kind = Literal["none", "public", "carrier", "private"]


class Gateway(msgspec.Struct, frozen=True):
    outside: str = ""
    """IP address of the router's other side; empty where none answers."""
    mapped: bool = False


def kind_of(outside: str, observed: str = "") -> Kind:
    """What kind of address a router's outside address is. Pure.

    observed: where peers see this node. A router whose outside address is another one is not the
    last on the way.
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


def ask(port: int | None, url: str | None = None) -> Iterator[Gateway]:
    """What the router says; with a port, again once it has forwarded it. url: of its description,
    found by multicast if None.

    Raises the library's plain Exception where nobody answers or the router refuses.
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
    if port is not None:  # some routers know permanent mappings only, and those we do not make
        mapped = router.addportmapping(
            port, "TCP", router.lanaddr, port, "swarmnode", "", LEASE_SECONDS
        )
        yield Gateway(outside, bool(mapped))


async def asked(port: int | None) -> Gateway:
    """The last that it said, in a process of its own. Never raises for what a router does."""
    command = [
        sys.executable,
        "-m",
        "swarmnode.p2p.gateway",
        *(("--port", str(port)) if port is not None else ()),
    ]
    with trio.move_on_after(ASK_SECONDS):
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
            log.debug("the router was not asked: %s", error)
    return Gateway()


def main() -> int:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--url")
    told = parser.parse_args()
    for found in ask(told.port, told.url):
        print(msgspec.json.encode(found).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
