"""Publish and subscribe over GossipSub, with the sharp edges of the library kept inside.

    peer ─▶ pubsub ─▶ _judge (forwarder's standing, validator)  ─ACCEPT▶ into our queue ─▶ async for
    message in topic
               │                                                └ACCEPT▶ forwarded to the mesh
               └ its own ─▶ _may_publish: far more than anybody may, and it is disconnected

The validator is synchronous because py-libp2p's asynchronous ones race its duplicate check: a 20 ms
validator at 50 messages per second let 499 of 1200 duplicates through (and forwarded them). It
cannot raise past this file: what it raises is counted and the message ignored. Expensive checks
belong after the queue. The queue is ours because pubsub's own drops 63 % when its consumer takes
100 ms per message.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import TYPE_CHECKING

import msgspec
import trio

from swarmnode.p2p.storms import Storms
from swarmnode.wire.limits import GOSSIP_BYTES

if TYPE_CHECKING:  # loads libp2p, or us
    from libp2p.peer.id import ID

    from swarmnode.p2p.library.objects import GossipMessage, Pubsub, Router
    from swarmnode.p2p.scoring import PeerScores

log = logging.getLogger(__name__)

QUEUE_MESSAGES = 1024
QUEUE_BYTES = 16 * 2**20
"""Bounds of one topic's queue. When either is reached the newest message is dropped: gossip is
lossy, and admission catches up later."""


class Validation(enum.Enum):
    """What becomes of a message."""

    ACCEPT = "accept"
    """Forward and deliver."""
    IGNORE = "ignore"
    """Drop without blaming whoever forwarded it: stale, a duplicate, too many."""
    REJECT = "reject"
    """Drop, and hold it against the forwarder, who should have seen that nobody can want it."""


Validator = Callable[[bytes, str], Validation]
"""(data, peer id of the forwarder) → Validation. Must be fast: it runs on the network's only
thread."""


@dataclasses.dataclass(frozen=True)
class Message:
    data: bytes
    forwarder: str
    """Peer id of whoever sent it to us; says nothing about who made it."""


class GossipStatistics(msgspec.Struct, frozen=True):
    received: int = 0
    """Messages from peers that were authentic, well-formed and not duplicates: the guards drop and
    count the others before us."""
    accepted: int = 0
    ignored: int = 0
    rejected: int = 0
    delivered: int = 0
    published: int = 0
    published_bytes: int = 0
    unwelcome: int = 0
    """Ignored, among those, because the forwarder is greylisted."""
    validator_errors: int = 0
    dropped: int = 0
    """Accepted but not delivered because our queue was full."""
    queued: int = 0
    mesh: dict[str, int] = {}
    """Peers in the mesh, by topic."""


class Topic:
    """A joined topic; iterate over it for its messages. Single consumer. Not made by hand but by
    `Gossip.join`."""

    def __init__(self, name: str, validator: Validator, messages: int, size: int) -> None:
        self.name = name
        self.validator = validator
        self._room = messages
        self._bytes_left = size
        self._queue: collections.deque[Message] = collections.deque()
        self._news = trio.Event()
        self.delivered = self.dropped = 0

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: Message) -> bool:
        """Queues `message` unless a bound is reached."""
        if len(self._queue) >= self._room or len(message.data) > self._bytes_left:
            self.dropped += 1
            return False
        self._bytes_left -= len(message.data)
        self._queue.append(message)
        self._news.set()
        return True

    async def get(self) -> Message:
        """The next message; waits for one."""
        while not self._queue:
            self._news = trio.Event()
            await self._news.wait()
        message = self._queue.popleft()
        self._bytes_left += len(message.data)
        self.delivered += 1
        return message

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            yield await self.get()


class Libp2pGossip:
    """`pubsub`, `router`: the library's objects, guarded."""

    def __init__(
        self, pubsub: Pubsub, router: Router, own: str, nursery: trio.Nursery, scores: PeerScores
    ) -> None:
        self._pubsub = pubsub
        self._router = router
        self._own = own
        self._nursery = nursery
        self._scores = scores
        self._storms = Storms()
        pubsub.may_publish = self._may_publish
        self._topics: dict[str, Topic] = {}
        self._count = collections.Counter[str]()

    async def join(
        self,
        topic: str,
        validator: Validator,
        *,
        messages: int = QUEUE_MESSAGES,
        size: int = QUEUE_BYTES,
        rate: float = 0.0,
    ) -> Topic:
        """See `api.Gossip.join`."""
        if topic in self._topics:
            raise ValueError(f"{topic} is joined already")
        self._storms.allow(rate)
        joined = self._topics[topic] = Topic(topic, validator, messages, size)
        self._pubsub.set_topic_validator(
            topic, lambda forwarder, message: self._judge(joined, forwarder, message), False
        )
        subscription = await self._pubsub.subscribe(topic)
        self._nursery.start_soon(_drain, subscription)
        return joined

    async def leave(self, topic: str) -> None:
        """Asks the neighbours to send no more of a joined `topic`; what was delivered stays in its
        queue. Publishing still works."""
        await self._pubsub.unsubscribe(topic)

    async def rejoin(self, topic: str) -> None:
        """Takes a `topic` that was left up again."""
        if topic not in self._pubsub.topic_ids:
            self._nursery.start_soon(_drain, await self._pubsub.subscribe(topic))

    async def publish(self, topic: str, data: bytes) -> None:
        """Sends `data` to the topic's peers; returns when it is queued for them. Raises ValueError
        above GOSSIP_BYTES, which the library would drop without a word further up."""
        if len(data) > GOSSIP_BYTES:
            raise ValueError(f"{len(data)} bytes do not fit a gossip message of {GOSSIP_BYTES}")
        await self._pubsub.publish(topic, data)
        self._count["published"] += 1
        self._count["published_bytes"] += len(data)

    def peers(self, topic: str) -> list[str]:
        """Peer ids of the neighbours that are subscribed to `topic`."""
        return [peer.to_base58() for peer in self._pubsub.peer_topics.get(topic, ())]

    def statistics(self) -> GossipStatistics:
        return GossipStatistics(
            received=self._count["received"],
            accepted=self._count["accept"],
            ignored=self._count["ignore"],
            rejected=self._count["reject"],
            delivered=sum(topic.delivered for topic in self._topics.values()),
            published=self._count["published"],
            published_bytes=self._count["published_bytes"],
            unwelcome=self._count["unwelcome"],
            validator_errors=self._count["error"],
            dropped=sum(topic.dropped for topic in self._topics.values()),
            queued=sum(len(topic) for topic in self._topics.values()),
            mesh={name: len(self._router.mesh.get(name, ())) for name in self._topics},
        )

    def _may_publish(self, forwarder: ID) -> bool:
        """What pubsub calls for each message that a neighbour hands over as its own, whatever
        becomes of it. False drops it."""
        peer = forwarder.to_base58()
        storm = self._storms.found(peer, trio.current_time())
        if storm:
            self._scores.stormed(peer)
        return not storm

    def _judge(self, topic: Topic, forwarder: ID, message: GossipMessage) -> bool:
        """What pubsub calls for each new message, our own included. True forwards and delivers
        it."""
        peer = forwarder.to_base58()
        if peer == self._own:
            return True
        self._count["received"] += 1
        verdict, reason = self._verdict(topic, peer, message)
        self._count[verdict.value] += 1
        if verdict is Validation.ACCEPT:
            topic.put(Message(bytes(message.data), peer))
        self._scores.judged(peer, verdict, reason)
        return verdict is Validation.ACCEPT

    def _verdict(self, topic: Topic, peer: str, message: GossipMessage) -> tuple[Validation, str]:
        if not self._scores.welcome(peer):
            self._count["unwelcome"] += 1
            return Validation.IGNORE, "unwelcome"
        try:
            return topic.validator(bytes(message.data), peer), "validator"
        except Exception:
            self._count["error"] += 1
            log.exception(
                "the validator of %s failed on %d bytes; the message is ignored",
                topic.name,
                len(message.data),
            )
            return Validation.IGNORE, "error"


async def _drain(subscription: AsyncIterable[GossipMessage]) -> None:
    """Empties pubsub's own queue, which nobody else reads: `_judge` has already put what was
    accepted into ours, with its forwarder."""
    async for _ in subscription:
        pass
