"""One real host in a network namespace, driven over a pipe by nat_process.py.

It first sends {"peer": …, "addrs": […]}. Then it answers {"do": "stat"} and {"do": "request",
"peer": …, "bytes": …}. It ends when the pipe closes. Requests from peers are answered with their
own bytes.
"""

from __future__ import annotations

import hashlib
import logging
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import trio

from swarmnode.config import NetworkConfig
from swarmnode.errors import PeerError
from swarmnode.p2p import identity
from swarmnode.p2p.network import Libp2pNetwork, open_host
from tests.support.netns import enter

DIGEST = "/test/digest/1"
MOST = 2**20


class Child:
    def __init__(self, network: Libp2pNetwork) -> None:
        self.network = network

    async def stat(self) -> dict:
        nat = msgspec.to_builtins(self.network.statistics().nat)
        return {
            "connected": self.network.connected(),
            "nat": nat,
            "peers": {each: self._known(each) for each in self.network.connected()},
        }

    def _known(self, peer: str) -> dict:
        known = self.network.peers.get(peer)
        return {
            "direct": self.network.connections.is_direct(peer),
            "addresses": known.addresses if known is not None else [],
        }

    async def request(self, peer: str, bytes: int) -> dict:
        data = b"x" * bytes
        at = trio.current_time()
        try:
            answer = await self.network.requests.request(
                peer, DIGEST, data, deadline=20.0, max_response_bytes=MOST
            )
        except PeerError as error:
            return {"error": str(error)}
        return {
            "same": answer == data,
            "digest": hashlib.sha256(answer).hexdigest(),
            "seconds": trio.current_time() - at,
        }


async def main(data_dir: Path, cfg: NetworkConfig, swarm: bytes, orders: Connection) -> None:
    async with open_host(
        cfg, identity.load_or_create(data_dir / "identity.key"), data_dir, swarm=swarm
    ) as network:
        child = Child(network)

        async def echo(peer: str, data: bytes) -> bytes:
            return data

        network.requests.serve(DIGEST, echo, max_request_bytes=MOST, max_response_bytes=MOST)
        orders.send({"peer": network.peer_id, "addrs": network.listen_addrs})
        while order := await trio.to_thread.run_sync(_next, orders, abandon_on_cancel=True):
            what = order.pop("do")
            orders.send(await getattr(child, what)(**order))


def _next(orders: Connection) -> dict | None:
    try:
        return orders.recv()
    except EOFError:
        return None


def run(
    namespace: str, data_dir: Path, settings: dict[str, Any], swarm: bytes, orders: Connection
) -> None:
    """Run the host process. settings: fields of NetworkConfig."""
    enter(namespace)
    format = "%(relativeCreated)d %(name)s %(message)s"
    logging.basicConfig(level=logging.INFO, filename=data_dir / "log", format=format, force=True)
    trio.run(main, data_dir, NetworkConfig(**settings), swarm, orders)
