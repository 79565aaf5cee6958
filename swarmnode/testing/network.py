"""An in-memory network: an `api.Network` without sockets, without libp2p, without delay unless one
is asked for.

    swarm = MemorySwarm()
    a, b, c = (swarm.join(peer) for peer in "abc")      # all connected with all
    swarm.cut("a", "c")                                 # a and c now hear of each other through b
    only

It keeps the promises of swarmnode/p2p/api.py, on which code above the network relies;
tests/unit/p2p/test_api.py holds it and the real one to the same ones: a validator sees a message
once, with its forwarder; what it accepts is forwarded and delivered; a message above 64 KB is
refused; a request raises PeerTimeout, Incompatible, BadMessage("oversize") or PeerError and nothing
else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

import trio

from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.api import Network, RequestHandler
from swarmnode.p2p.gossip import QUEUE_BYTES, QUEUE_MESSAGES, Message, Topic, Validation, Validator
from swarmnode.p2p.reputation import COST, Reputation, Standing
from swarmnode.p2p.scoring import STORM_COST
from swarmnode.p2p.storms import Storms
from swarmnode.testing.streams import MemoryBulk, MemoryStreams
from swarmnode.wire.limits import GOSSIP_BYTES


class MemorySwarm:
    """The medium. latency: seconds that every request takes each way."""

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency
        self.nodes: dict[str, MemoryNetwork] = {}
        self.changed = trio.Event()
        self._cut: set[frozenset[str]] = set()

    def join(self, peer_id: str) -> MemoryNetwork:
        """A new node, connected with all there are."""
        node = self.nodes[peer_id] = MemoryNetwork(self, peer_id)
        self._notify()
        return node

    def leave(self, peer_id: str) -> None:
        """As if its process were killed."""
        gone = self.nodes.pop(peer_id)
        gone.streams.drop(())
        self._notify()

    def cut(self, one: str, other: str) -> None:
        """Disconnect two nodes."""
        self._cut.add(frozenset((one, other)))
        self._notify()

    def mend(self, one: str, other: str) -> None:
        """Connect them again."""
        self._cut.discard(frozenset((one, other)))
        self._notify()

    def neighbours(self, peer_id: str) -> list[str]:
        """Peer ids of the nodes that a node is connected with."""
        if peer_id not in self.nodes:
            return []
        return [
            other
            for other in self.nodes
            if other != peer_id and frozenset((peer_id, other)) not in self._cut
        ]

    def _notify(self) -> None:
        for node in self.nodes.values():
            node.streams.drop(node.connected())
        self.changed.set()
        self.changed = trio.Event()


class MemoryNetwork:
    """One node's network; satisfies `api.Network`. `held`: the peers of the last call of `hold`."""

    def __init__(self, swarm: MemorySwarm, peer_id: str) -> None:
        self.peer_id = peer_id
        self.listen_addrs: list[str] = []
        self.reputation = Reputation()
        self.gossip = MemoryGossip(self, swarm)
        self.requests = MemoryRequests(self, swarm)
        self.streams = MemoryStreams(self, swarm)
        self.bulk = MemoryBulk(self, swarm)
        self.held: frozenset[str] = frozenset()
        self._swarm = swarm

    def connected(self) -> list[str]:
        return self._swarm.neighbours(self.peer_id)

    async def wait_connected(self, count: int = 1) -> None:
        while len(self.connected()) < count:
            await self._swarm.changed.wait()

    async def changed(self) -> None:
        await self._swarm.changed.wait()

    async def dial(self, peer: str, address: str) -> None:
        await trio.sleep(self._swarm.latency)
        if peer not in self._swarm.nodes:
            raise PeerError(f"no answer at {address}")
        self._swarm.mend(self.peer_id, peer)

    def hold(self, peers: Collection[str]) -> None:
        self.held = frozenset(peers)

    def disconnect(self, peer: str) -> None:
        """Until somebody dials again."""
        self._swarm.cut(self.peer_id, peer)

    def observed(self, peer: str) -> Address | None:
        """There are no addresses in memory."""
        return None

    def heard(self, peer: str) -> float | None:
        return self.requests.heard.get(peer) if peer in self.connected() else None

    def group(self, peer: str) -> str | None:
        return None

    def welcome(self, peer: str) -> bool:
        return self.reputation.standing(peer, trio.current_time()) is Standing.GOOD

    def score(self, peer: str) -> float:
        return self.reputation.score(peer, trio.current_time())

    def accepted(self, peer: str) -> None:
        self.reputation.accepted(peer, trio.current_time())

    def rejected(self, peer: str, reason: str, cost: float = COST) -> None:
        if self.reputation.rejected(peer, reason, trio.current_time(), cost) is Standing.BANNED:
            self.disconnect(peer)


def as_network(network: MemoryNetwork) -> Network:
    """The same; type-checked, so that the in-memory network stays an `api.Network`."""
    return network


class MemoryGossip:
    """Flooding: every node that accepts a message passes it to all its neighbours."""

    def __init__(self, network: MemoryNetwork, swarm: MemorySwarm) -> None:
        self._network = network
        self._swarm = swarm
        self._topics: dict[str, Topic] = {}
        self._left: dict[str, Topic] = {}
        self._storms = Storms()

    async def leave(self, topic: str) -> None:
        self._left[topic] = self._topics.pop(topic)
        await trio.lowlevel.checkpoint()

    async def rejoin(self, topic: str) -> None:
        self._topics[topic] = self._left.pop(topic)
        await trio.lowlevel.checkpoint()

    async def join(
        self,
        topic: str,
        validator: Validator,
        *,
        messages: int = QUEUE_MESSAGES,
        size: int = QUEUE_BYTES,
        rate: float = 0.0,
    ) -> Topic:
        if topic in self._topics:
            raise ValueError(f"{topic} is joined already")
        self._storms.allow(rate)
        joined = self._topics[topic] = Topic(topic, validator, messages, size)
        await trio.lowlevel.checkpoint()
        return joined

    async def publish(self, topic: str, data: bytes) -> None:
        if len(data) > GOSSIP_BYTES:
            raise ValueError(f"{len(data)} bytes do not fit a gossip message of {GOSSIP_BYTES}")
        await trio.lowlevel.checkpoint()
        seen = {self._network.peer_id}
        forwarders = deque([self._network.peer_id])
        while forwarders:
            forwarder = forwarders.popleft()
            for peer in self._swarm.neighbours(forwarder):
                if peer not in seen:
                    seen.add(peer)
                    if self._swarm.nodes[peer].gossip.receive(
                        topic, data, forwarder, own=forwarder == self._network.peer_id
                    ):
                        forwarders.append(peer)

    def peers(self, topic: str) -> list[str]:
        return [
            peer
            for peer in self._network.connected()
            if self._swarm.nodes[peer].gossip.has_joined(topic)
        ]

    def has_joined(self, topic: str) -> bool:
        return topic in self._topics

    def receive(self, name: str, data: bytes, forwarder: str, *, own: bool) -> bool:
        """A neighbour forwards a message, or one of its own. Returns whether we forward it, too."""
        if own and self._storms.found(forwarder, trio.current_time()):
            self._network.rejected(forwarder, "storm", STORM_COST)
            self._network.disconnect(forwarder)
            return False
        topic = self._topics.get(name)
        if topic is None or not self._network.welcome(forwarder):
            return False
        verdict = topic.validator(data, forwarder)
        if verdict is Validation.REJECT:
            self._network.rejected(forwarder, "gossip_validator")
        if verdict is Validation.ACCEPT:
            topic.put(Message(data, forwarder))
        return verdict is Validation.ACCEPT


@dataclass
class _Service:
    handler: RequestHandler
    max_request_bytes: int
    max_response_bytes: int
    concurrent: int
    per_peer: int
    deadline: float
    active: Counter[str] = field(default_factory=Counter)


class MemoryRequests:
    """Requests are calls of the other side's handler, under the caller's deadline."""

    def __init__(self, network: MemoryNetwork, swarm: MemorySwarm) -> None:
        self._network = network
        self._swarm = swarm
        self._services: dict[str, _Service] = {}
        self.heard: dict[str, float] = {}
        """Peer → when a request or an answer of its last came."""

    def serve(
        self,
        protocol: str,
        handler: RequestHandler,
        *,
        max_request_bytes: int,
        max_response_bytes: int,
        concurrent: int = 16,
        per_peer: int | None = None,
        deadline: float = 30.0,
    ) -> None:
        most = per_peer or max(1, concurrent // 4)
        self._services[protocol] = _Service(
            handler, max_request_bytes, max_response_bytes, concurrent, most, deadline
        )

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
            response = await self._swarm.nodes[peer].requests.answer(
                self._network.peer_id, protocol, data
            )
            await trio.sleep(self._swarm.latency)
            self.heard[peer] = trio.current_time()
            if len(response) > max_response_bytes:
                raise BadMessage(
                    "oversize", f"{len(response)} bytes announced, {max_response_bytes} allowed"
                )
            return response
        raise PeerTimeout(f"{peer} did not answer {protocol} within {deadline:g} s")

    async def answer(self, peer: str, protocol: str, data: bytes) -> bytes:
        """What the handler makes of a request of `peer`. Raises PeerError, which is all that the
        peer learns of a refusal."""
        self.heard[peer] = trio.current_time()
        service = self._services.get(protocol)
        if service is None:
            raise Incompatible(f"{protocol} is not spoken here")
        busy = (
            service.active.total() >= service.concurrent or service.active[peer] >= service.per_peer
        )
        if busy or len(data) > service.max_request_bytes or not self._network.welcome(peer):
            raise PeerError("the stream was reset")
        service.active[peer] += 1
        try:
            with trio.move_on_after(service.deadline):
                response = await service.handler(peer, data)
                if len(response) <= service.max_response_bytes:
                    return response
        except PeerError:
            # a refusal looks like everything else that the responder does not want: its stream is
            # reset
            pass
        finally:
            service.active[peer] -= 1
        raise PeerError("the stream was reset")
