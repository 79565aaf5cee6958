"""An in-memory network: the connections, requests and scores of an `api.Network`, without libp2p or
delay (unless a latency is set).

    swarm = MemorySwarm()
    a, b, c = (swarm.join(peer) for peer in "abc")      # fully connected
    swarm.cut("a", "c")                                 # a and c are no longer connected

Requests follow the contract of swarmnode/p2p/api.py, and tests/unit/p2p/test_api.py checks it
together with the real network: a request raises only PeerTimeout, Incompatible,
BadMessage("oversize") or PeerError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import trio

from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout
from swarmnode.p2p.api import RequestHandler
from swarmnode.p2p.reputation import PeerScores
from swarmnode.p2p.slots import Service


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

    def cut(self, one: str, other: str) -> None:
        """Disconnect two nodes."""
        self._cut.add(frozenset((one, other)))
        self._notify()

    def neighbours(self, peer_id: str) -> list[str]:
        """Return the ids of the connected peers of a node."""
        return [
            other
            for other in self.nodes
            if other != peer_id and frozenset((peer_id, other)) not in self._cut
        ]

    def _notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class MemoryNetwork(PeerScores):
    """The network of one node."""

    def __init__(self, swarm: MemorySwarm, peer_id: str) -> None:
        super().__init__()
        self.peer_id = peer_id
        self.requests = MemoryRequests(self, swarm)
        self._swarm = swarm

    def connected(self) -> list[str]:
        return self._swarm.neighbours(self.peer_id)

    async def changed(self) -> None:
        await self._swarm.changed.wait()

    def disconnect(self, peer: str) -> None:
        self._swarm.cut(self.peer_id, peer)

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
            response = await requests.answer(own, protocol, data)
            await trio.sleep(self._swarm.latency)
            if len(response) > max_response_bytes:
                raise BadMessage(
                    "oversize", f"{len(response)} bytes announced, {max_response_bytes} allowed"
                )
            return response
        raise PeerTimeout(f"{peer} did not answer {protocol} within {deadline:g} s")
