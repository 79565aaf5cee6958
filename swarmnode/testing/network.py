"""An in-memory network with the face of `swarmnode.p2p.network.Network`: gossip, requests, reputation. No sockets, no libp2p, no delay.

    swarm = MemorySwarm()
    a, b, c = (swarm.join(peer) for peer in "abc")      # all connected with all
    swarm.cut("a", "c")                                 # a and c now hear of each other through b only

It keeps the promises that code above the network may rely on, and tests/swarm holds the real one to them too: a validator sees a message
once, with its forwarder; what it accepts is forwarded and delivered; a message above 64 KB is refused; a request raises PeerTimeout,
PeerError or BadMessage("oversize") and nothing else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable

import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.gossip import QUEUE_BYTES, QUEUE_MESSAGES, Message, Topic, Validator, Verdict
from swarmnode.p2p.reputation import COST, Reputation, Standing
from swarmnode.wire.limits import GOSSIP_BYTES

Handler = Callable[[str, bytes], Awaitable[bytes]]


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
        del self.nodes[peer_id]

    def cut(self, one: str, other: str) -> None:
        """Disconnect two nodes."""
        self._cut.add(frozenset((one, other)))

    def mend(self, one: str, other: str) -> None:
        """Connect them again."""
        self._cut.discard(frozenset((one, other)))
        self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def neighbours(self, peer_id: str) -> list[str]:
        if peer_id not in self.nodes:
            return []
        return [other for other in self.nodes if other != peer_id and frozenset((peer_id, other)) not in self._cut]


class MemoryNetwork:
    """One node's network."""

    def __init__(self, swarm: MemorySwarm, peer_id: str) -> None:
        self.peer_id = peer_id
        self.reputation = Reputation()
        self.gossip = MemoryGossip(self, swarm)
        self.requests = MemoryRequests(self, swarm)
        self._swarm = swarm

    def connected(self) -> list[str]:
        return self._swarm.neighbours(self.peer_id)

    async def wait_connected(self, count: int = 1) -> None:
        while len(self.connected()) < count:
            await self._swarm.changed.wait()

    def welcome(self, peer: str) -> bool:
        return self.reputation.standing(peer, trio.current_time()) is Standing.GOOD

    def accepted(self, peer: str) -> None:
        self.reputation.accepted(peer, trio.current_time())

    def rejected(self, peer: str, reason: str, cost: float = COST) -> None:
        if self.reputation.rejected(peer, reason, trio.current_time(), cost) is Standing.BANNED:
            self.disconnect(peer)

    def disconnect(self, peer: str) -> None:
        self._swarm.cut(self.peer_id, peer)


class MemoryGossip:
    """Flooding: every node that accepts a message passes it to all its neighbours."""

    def __init__(self, network: MemoryNetwork, swarm: MemorySwarm) -> None:
        self._network = network
        self._swarm = swarm
        self._topics: dict[str, Topic] = {}
        self._left: dict[str, Topic] = {}

    async def leave(self, topic: str) -> None:
        self._left[topic] = self._topics.pop(topic)
        await trio.lowlevel.checkpoint()

    async def rejoin(self, topic: str) -> None:
        self._topics[topic] = self._left.pop(topic)
        await trio.lowlevel.checkpoint()

    async def join(self, topic: str, validator: Validator, *, messages: int = QUEUE_MESSAGES, size: int = QUEUE_BYTES) -> Topic:
        if topic in self._topics:
            raise ValueError(f"{topic} is joined already")
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
                    if self._swarm.nodes[peer].gossip._receive(topic, data, forwarder):
                        forwarders.append(peer)

    def peers(self, topic: str) -> list[str]:
        return [peer for peer in self._network.connected() if topic in self._swarm.nodes[peer].gossip._topics]

    def _receive(self, name: str, data: bytes, forwarder: str) -> bool:
        topic = self._topics.get(name)
        if topic is None or not self._network.welcome(forwarder):
            return False
        verdict = topic.validator(data, forwarder)
        if verdict is Verdict.REJECT:
            self._network.rejected(forwarder, "gossip_validator")
        if verdict is Verdict.ACCEPT:
            topic.put(Message(data, forwarder))
        return verdict is Verdict.ACCEPT


class MemoryRequests:
    """Requests are calls of the other side's handler, under the caller's deadline."""

    def __init__(self, network: MemoryNetwork, swarm: MemorySwarm) -> None:
        self._network = network
        self._swarm = swarm
        self._services: dict[str, tuple[Handler, int, int, int, int, float]] = {}
        self._active: Counter[tuple[str, str]] = Counter()

    def serve(
        self,
        protocol: str,
        handler: Handler,
        *,
        max_request_bytes: int,
        max_response_bytes: int,
        concurrent: int = 16,
        per_peer: int | None = None,
        deadline: float = 30.0,
    ) -> None:
        most_per_peer = per_peer or max(1, concurrent // 4)
        self._services[protocol] = (handler, max_request_bytes, max_response_bytes, concurrent, most_per_peer, deadline)

    async def request(self, peer: str, protocol: str, data: bytes, *, deadline: float, max_response_bytes: int) -> bytes:
        with trio.move_on_after(deadline):
            await trio.sleep(self._swarm.latency)
            if peer not in self._network.connected():
                raise PeerError(f"{peer} is not connected")
            response = await self._swarm.nodes[peer].requests._answer(self._network.peer_id, protocol, data)
            await trio.sleep(self._swarm.latency)
            if len(response) > max_response_bytes:
                raise BadMessage("oversize", f"{len(response)} bytes announced, {max_response_bytes} allowed")
            return response
        raise PeerTimeout(f"{peer} did not answer {protocol} within {deadline:g} s")

    async def _answer(self, peer: str, protocol: str, data: bytes) -> bytes:
        if protocol not in self._services:
            raise PeerError(f"{protocol} is not spoken here")
        handler, max_request, max_response, concurrent, per_peer, deadline = self._services[protocol]
        busy = sum(n for (_, name), n in self._active.items() if name == protocol) >= concurrent or self._active[peer, protocol] >= per_peer
        if busy or len(data) > max_request or not self._network.welcome(peer):
            raise PeerError("the stream was reset")
        self._active[peer, protocol] += 1
        try:
            with trio.move_on_after(deadline):
                response = await handler(peer, data)
                if len(response) <= max_response:
                    return response
        except PeerError:
            pass  # a refusal looks like everything else that the responder does not want: its stream is reset
        finally:
            self._active[peer, protocol] -= 1
        raise PeerError("the stream was reset")
