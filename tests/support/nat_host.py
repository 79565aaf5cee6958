"""Real hosts in the namespaces of a `Topology`, each a process driven over a pipe.

A host first sends {"peer": …, "addrs": […]}. Then it answers {"do": "stat"} and {"do": "request",
"peer": …, "bytes": …}. It ends when the pipe closes. Requests from peers are answered with their
own bytes.
"""

from __future__ import annotations

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
from tests.support import forked
from tests.support.hosts import echo
from tests.support.netns import Topology, enter

ECHO = "/test/echo/1"
MOST = 2**20
END_SECONDS = 5.0


class NatHost:
    """A host process in a namespace. It ends when killed or garbage-collected.

    The key and the port stay in `directory`, so that the host can be restarted.

    Args:
        name: The namespace.
        swarm: Swarm id, 32 bytes in hex.
        settings: Fields of NetworkConfig.
    """

    def __init__(
        self,
        net: Topology,
        name: str,
        directory: Path,
        *,
        swarm: str = "09" * 32,
        **settings: object,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self._log = directory / "log"
        self._orders, orders = forked.context.Pipe()
        options = (net.file(name), directory, {"mdns": False, **settings}, bytes.fromhex(swarm))
        self.process = forked.context.Process(target=run, args=(*options, orders), daemon=True)
        self.process.start()
        orders.close()
        hello = self._read()
        self.peer: str = hello["peer"]
        self.addrs: list[str] = hello["addrs"]

    def do(self, what: str, **arguments: object) -> dict[str, Any]:
        """Send one request."""
        self._orders.send({"do": what, **arguments})
        return self._read()

    def kill(self) -> None:
        """Kill the process without a chance to drain. The kernel still closes its connections."""
        self.process.kill()
        self.process.join(END_SECONDS)

    def log(self) -> str:
        return self._log.read_text()

    def sees(self, other: NatHost) -> str:
        """Return `direct`, `relayed` or an empty string."""
        stat = self.do("stat")
        if other.peer not in stat["connected"]:
            return ""
        return "direct" if other.peer in stat["direct"] else "relayed"

    def _read(self) -> dict[str, Any]:
        try:
            return self._orders.recv()
        except EOFError:
            raise RuntimeError(f"the host ended: {self.log()[-2000:]}") from None


class Child:
    """The host of the process."""

    def __init__(self, network: Libp2pNetwork) -> None:
        self.network = network
        network.requests.serve(ECHO, echo, max_request_bytes=MOST, max_response_bytes=MOST)

    async def stat(self) -> dict:
        await trio.lowlevel.checkpoint()
        connected, is_direct = self.network.connected(), self.network.connections.is_direct
        return {
            "connected": connected,
            "nat": msgspec.to_builtins(self.network.statistics().nat),
            "direct": [peer for peer in connected if is_direct(peer)],
        }

    async def request(self, peer: str, bytes: int) -> dict:
        data = b"x" * bytes
        try:
            answer = await self.network.requests.request(
                peer, ECHO, data, deadline=20.0, max_response_bytes=MOST
            )
        except PeerError as error:
            return {"error": str(error)}
        return {"same": answer == data}


async def main(data_dir: Path, cfg: NetworkConfig, swarm: bytes, orders: Connection) -> None:
    async with open_host(
        cfg, identity.load_or_create(data_dir / "identity.key"), data_dir, swarm=swarm
    ) as network:
        child = Child(network)
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
