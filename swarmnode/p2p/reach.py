"""`python -m swarmnode.p2p.reach`: check bootstrap addresses and dial-back, with JSON on stdin and
stdout.

For each bootstrap address it reports whether the named peer answers; it also reports whether those
peers can dial this node back. Each address is checked in two steps that fail for different reasons:
a TCP connection, then Noise and Yamux with the peer id. The host belongs to this process and has no
peer book. It listens on the node's own ports, so the node must not run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal, TypedDict

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.config import NetworkConfig
from swarmnode.errors import PeerError
from swarmnode.p2p import addresses
from swarmnode.p2p.api import WrongPeer
from swarmnode.p2p.identity import from_key, load_or_create
from swarmnode.p2p.network import Libp2pNetwork, open_host


class Request(msgspec.Struct, frozen=True):
    addresses: list[str]
    """Multiaddrs with peer ids."""
    swarm: str
    """Swarm id in hex."""
    secret: str = ""
    """Secret of a private swarm in hex."""
    identity: str = ""
    """Path of this node's key, for swarms with a member list. Empty uses a fresh key, which is
    required while the node runs."""
    seconds: float = 8.0
    """Timeout per address; all addresses are checked concurrently."""
    listen: list[str] = []
    """Multiaddrs to be dialled back; empty skips that check."""
    relay: Literal["off", "client", "server", "auto"] = "off"
    dial_back_seconds: float = 16.0


class DialBack(TypedDict, total=False):
    """Fields of `doctor.checks.DialBackFacts`."""

    verdict: str
    observed: str
    relays: int


class ReachReport(TypedDict):
    """Results of all checks; `peers` has the fields of `doctor.checks.PeerFacts` in the order of
    the request."""

    peers: list[dict[str, str]]
    dial_back: DialBack


async def reach(request: Request) -> ReachReport:
    """Run all checks with a temporary host."""
    identity = (
        load_or_create(Path(request.identity))
        if request.identity
        else from_key(Ed25519PrivateKey.generate())
    )
    cfg = NetworkConfig(
        listen_addrs=request.listen or ["/ip4/127.0.0.1/tcp/0"],
        mdns=False,
        relay=request.relay,
    )
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="swarmnode-reach-") as directory:
        secret = bytes.fromhex(request.secret) or None
        async with open_host(
            cfg, identity, Path(directory), swarm=bytes.fromhex(request.swarm), secret=secret
        ) as network:

            async def check_address(text: str) -> None:
                found[text] = {"address": text, **await probe(network, text, request.seconds)}

            async with trio.open_nursery() as nursery:
                for text in request.addresses:
                    nursery.start_soon(check_address, text)
            asked = request.listen and any(row["outcome"] == "ok" for row in found.values())
            dial_back_result = (
                await dial_back(network, request.dial_back_seconds) if asked else DialBack()
            )
    return {"peers": [found[text] for text in request.addresses], "dial_back": dial_back_result}


async def dial_back(network: Libp2pNetwork, seconds: float) -> DialBack:
    """Wait for the reachability verdict of the connected peers; if it is "private", also for a
    relay reservation."""
    until = trio.current_time() + seconds
    while True:
        nat = network.statistics().nat
        settled = nat.reach.verdict == "public" or (
            nat.reach.verdict == "private" and nat.client.relays
        )
        if settled or trio.current_time() >= until:
            return {
                "verdict": nat.reach.verdict,
                "observed": nat.reach.observed,
                "relays": len(nat.client.relays),
            }
        await trio.sleep(0.2)


async def probe(network: Libp2pNetwork, text: str, seconds: float) -> dict[str, str]:
    """Return outcome and detail for one address."""
    try:
        where, peer = addresses.parse(text)
    except ValueError as error:
        return {"outcome": "not_tried", "detail": str(error)}
    if peer is None or not isinstance(where, addresses.Address):
        return {"outcome": "not_tried", "detail": "not a direct address of a named peer"}
    started = time.monotonic()
    try:
        with trio.fail_after(seconds):
            await (await trio.open_tcp_stream(where.host, where.port)).aclose()
    except (OSError, trio.TooSlowError) as error:
        why = (
            str(error.__cause__ or error)
            if isinstance(error, OSError)
            else f"no answer within {seconds:g} s"
        )
        return {"outcome": "unreachable", "detail": why}
    connected = time.monotonic() - started
    try:
        with trio.fail_after(seconds):
            await network.dial(peer, str(where))
    except trio.TooSlowError:
        return {"outcome": "no_handshake", "detail": f"no handshake within {seconds:g} s"}
    except WrongPeer:
        return {"outcome": "wrong_peer", "detail": ""}
    except PeerError as error:
        return {"outcome": "no_handshake", "detail": str(error)[:200]}
    return {
        "outcome": "ok",
        "detail": (
            f"TCP in {connected * 1000:.0f} ms, handshake in"
            f" {(time.monotonic() - started - connected) * 1000:.0f} ms"
        ),
    }


if __name__ == "__main__":
    print(json.dumps(trio.run(reach, msgspec.json.decode(sys.stdin.buffer.read(), type=Request))))
