"""The Byzantine node: `python -m swarmnode.demo.liar --config FILE`.

It joins like any other node. Until it is killed, it lists and serves hostile groups (`listings`),
sends too many and malformed requests, sends hostile weights (`weights`), and sends garbage to its
peers' ports.
"""

from __future__ import annotations

import random
import socket
import sys
import time
from functools import partial
from pathlib import Path

import trio

from swarmnode.config import Config, NetworkConfig
from swarmnode.demo.liar.author import Author
from swarmnode.demo.liar.listings import ListingLiar
from swarmnode.demo.liar.weights import WeightLiar
from swarmnode.errors import PeerError
from swarmnode.p2p.identity import load_or_create
from swarmnode.p2p.network import Libp2pNetwork, open_host
from swarmnode.process import die_with_parent, run_main
from swarmnode.tasks.registry import task_version
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.listings import ListingRequest
from swarmnode.wire.manifest import swarm_id

REQUESTS_PER_SECOND = 40.0
REQUEST_TIMEOUT_SECONDS = 2.0
GARBAGE_INTERVAL_SECONDS = 2.0
WEIGHT_ATTACKS = ("nan", "huge", "flipped", "shape", "truncated", "wrong_hash", "silent")
"""Attacks on averaging, in turn; see `weights`."""


async def attack(cfg: NetworkConfig, data_dir: Path, swarm: bytes) -> None:
    """Attack the peers until the process is killed, even if all peers have banned it."""
    identity = load_or_create(data_dir / "identity.key")
    author = Author(swarm, key=identity.private_key)
    async with (
        open_host(cfg, identity, data_dir, swarm=swarm) as network,
        trio.open_nursery() as nursery,
    ):
        ListingLiar(author, time.time, random.Random(0)).serve(network.requests)
        nursery.start_soon(_flood_requests, network, swarm)
        nursery.start_soon(_send_garbage, network)
        nursery.start_soon(partial(WeightLiar(network, WEIGHT_ATTACKS).run, proposes=True))


async def _flood_requests(network: Libp2pNetwork, swarm: bytes) -> None:
    """Request listings at a high rate. About half of the requests are garbage."""
    rng = random.Random(2)
    valid = codec.encode(ListingRequest(swarm, b"", 0, limits.PATIENCE_SECONDS))
    async with trio.open_nursery() as nursery:
        while True:
            for peer in network.connected():
                data = rng.choice((valid, rng.randbytes(len(valid))))
                nursery.start_soon(_request, network, peer, data)
            await trio.sleep(1.0 / REQUESTS_PER_SECOND)


async def _request(network: Libp2pNetwork, peer: str, data: bytes) -> None:
    try:
        await network.requests.request(
            peer,
            ids.LISTING_PROTOCOL,
            data,
            deadline=REQUEST_TIMEOUT_SECONDS,
            max_response_bytes=limits.LISTING_RESPONSE_BYTES,
        )
    except PeerError:
        return  # rejected, as expected


async def _send_garbage(network: Libp2pNetwork) -> None:
    """Send bytes that are not a handshake to the port of each peer."""
    rng = random.Random(1)
    while True:
        await trio.sleep(GARBAGE_INTERVAL_SECONDS)
        for peer in network.connected():
            known = network.peers.get(peer)
            for address in known.addresses[:1] if known else []:
                parts = address.split("/")
                try:
                    with trio.move_on_after(1.0):
                        stream = await trio.open_tcp_stream(parts[2], int(parts[4]))
                        async with stream:
                            await stream.send_all(rng.randbytes(4096))
                except (OSError, IndexError, ValueError, trio.BrokenResourceError, socket.gaierror):
                    continue


def main() -> int:
    die_with_parent()
    config = Config.model_validate_json(Path(sys.argv[sys.argv.index("--config") + 1]).read_bytes())
    config.node.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    swarm = swarm_id(config.swarm.name, {name: task_version(name) for name in config.task.names})
    trio.run(attack, config.network, config.node.data_dir, swarm)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("swarmnode liar", main))
