"""An in-memory network: an `api.Network` without streams, sockets, libp2p or delay (unless a
latency is set).

    swarm = MemorySwarm()
    a, b, c = (swarm.join(peer) for peer in "abc")      # fully connected
    swarm.cut("a", "c")                                 # a and c are no longer connected

It implements the contract of swarmnode/p2p/api.py, and tests/unit/p2p/test_api.py checks it
together with the real network: a request raises only PeerTimeout, Incompatible,
BadMessage("oversize") or PeerError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import trio

from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.api import RequestHandler
from swarmnode.p2p.reputation import PeerScores
from swarmnode.p2p.slots import Service
from tests.support.fakes.bulk import RequestBulk


class MemorySwarm:
    """The medium. latency: seconds each way for every request."""

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency
        self.nodes: dict[str, MemoryNetwork] = {}
        self.changed = trio.Event()
        self._cut: set[frozenset[str]] = set()

    def join(self, peer_id: str) -> MemoryNetwork:
        """Add a node, connected with all others."""
        node = self.nodes[peer_id] = MemoryNetwork(self, peer_id)
        self._notify()
        return node

    def leave(self, peer_id: str) -> None:
        """Remove a node as if its process were killed."""
        del self.nodes[peer_id]
        self._notify()

    def cut(self, one: str, other: str) -> None:
        """Disconnect two nodes."""
        self._cut.add(frozenset((one, other)))
        self._notify()

    def repair(self, one: str, other: str) -> None:
        """Reconnect two nodes."""
        self._cut.discard(frozenset((one, other)))
        self._notify()

    def neighbours(self, peer_id: str) -> list[str]:
        """Return the ids of the connected peers of a node."""
        if peer_id not in self.nodes:
            return []
        return [
            other
            for other in self.nodes
            if other != peer_id and frozenset((peer_id, other)) not in self._cut
        ]

    def _notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class MemoryNetwork(PeerScores):
    """The network of one node: an `api.Network` without streams. pinned: peers of the last call of
    `pin`."""

    def __init__(self, swarm: MemorySwarm, peer_id: str) -> None:
        super().__init__()
        self.peer_id = peer_id
        self.listen_addrs: list[str] = []
        self.requests = MemoryRequests(self, swarm)
        self.bulk = RequestBulk(self.requests, self)
        self.pinned: frozenset[str] = frozenset()
        self._swarm = swarm

    def connected(self) -> list[str]:
        return self._swarm.neighbours(self.peer_id)

    async def changed(self) -> None:
        await self._swarm.changed.wait()

    async def dial(self, peer: str, address: str) -> None:
        await trio.sleep(self._swarm.latency)
        if peer not in self._swarm.nodes:
            raise PeerError(f"no answer at {address}")
        self._swarm.repair(self.peer_id, peer)

    def pin(self, peers: Collection[str]) -> None:
        self.pinned = frozenset(peers)

    def disconnect(self, peer: str) -> None:
        """Disconnect a peer until the next dial."""
        self._swarm.cut(self.peer_id, peer)

    def observed(self, peer: str) -> Address | None:
        """Return None: there are no addresses in memory."""
        return None

    def last_received(self, peer: str) -> float | None:
        return self.requests.last_received.get(peer) if peer in self.connected() else None

    def origin(self, peer: str) -> str | None:
        return None


class ServedProtocols:
    """The serving side of `api.Requests`, with the product's limits, without streams."""

    def __init__(self, is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed
        self._services: dict[str, Service] = {}

    def serve(self, protocol: str, handler: RequestHandler, **limits: Any) -> None:
        self._services[protocol] = Service(handler, **limits)

    async def answer(self, peer: str, protocol: str, data: bytes) -> bytes:
        """Return the handler's response to a request of `peer`. Raise PeerError; the peer learns no
        details of a refusal."""
        service = self._services.get(protocol)
        if service is None:
            raise Incompatible(f"{protocol} is not supported here")
        with contextlib.suppress(PeerError):
            if self._is_allowed(peer):
                async with service.respond(peer, data) as response:
                    return response
        raise PeerError("the stream was reset")


class MemoryRequests(ServedProtocols):
    """A request calls the handler of the other node under the caller's deadline."""

    def __init__(self, network: MemoryNetwork, swarm: MemorySwarm) -> None:
        super().__init__(network.is_allowed)
        self._network = network
        self._swarm = swarm
        self.last_received: dict[str, float] = {}
        """Peer → time of its last request or answer."""

    async def request(
        self,
        peer: str,
        protocol: str,
        data: bytes,
        *,
        deadline: float,
        max_response_bytes: int,
        urgent: bool = False,
    ) -> bytes:
        with trio.move_on_after(deadline):
            await trio.sleep(self._swarm.latency)
            if peer not in self._network.connected():
                raise PeerError(f"{peer} is not connected")
            own, requests = self._network.peer_id, self._swarm.nodes[peer].requests
            requests.last_received[own] = trio.current_time()
            response = await requests.answer(own, protocol, data)
            await trio.sleep(self._swarm.latency)
            self.last_received[peer] = trio.current_time()
            if len(response) > max_response_bytes:
                raise BadMessage(
                    "oversize", f"{len(response)} bytes announced, {max_response_bytes} allowed"
                )
            return response
        raise PeerTimeout(f"{peer} did not answer {protocol} within {deadline:g} s")
