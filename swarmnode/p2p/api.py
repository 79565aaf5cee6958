"""The network interface for the rest of the node, as protocols.

Code above `p2p` depends on these protocols, not on their implementations.

    Network ─ Connections   connected peers; dial, pin, disconnect
            ─ PeerScoring   which peers are allowed, and how their messages are scored
            ─ .requests     Requests: one frame each way
            ─ .streams      Streams ▸ PeerStream: long-lived, both ways
            ─ .bulk         Bulk: large content in verified chunks

A caller that only sends requests depends on `Requests`; a caller that needs several parts composes
them. `p2p.network` implements the protocols on libp2p, `tests.support.fakes.network` connections,
scores and requests in memory. tests/unit/p2p/test_api.py runs the same contract against both.

Every method that contacts a peer takes a deadline in seconds. It raises PeerError or a subclass
(PeerTimeout, BadMessage, Incompatible) for every fault of the peer or of the connection, and
nothing else. A peer is identified by its peer id as base58 text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Protocol

import trio

from swarmnode.errors import PeerError
from swarmnode.p2p.reputation import COST

if TYPE_CHECKING:  # imported for types only: these modules load libp2p
    from swarmnode.p2p.addresses import Address
    from swarmnode.p2p.bulk.content import BulkSink, BulkSource
    from swarmnode.wire.messages import BulkManifest

RequestHandler = Callable[[str, bytes], Awaitable[bytes]]
"""(peer id, request) → response. Raises PeerError to refuse. Any other exception counts as an
internal error. The stream is reset in both cases."""

StreamHandler = Callable[["PeerStream"], None]
"""Receives each stream that a peer opens. Must not block; resets a stream that it does not want."""


class Declined(PeerError):
    """Raised when a peer refuses a bulk transfer.

    Attributes:
        status: `unknown` (not offered to this node, or offered with another root) or `busy`.
    """

    def __init__(self, status: str) -> None:
        super().__init__(f"the peer answered {status}")
        self.status = status


class WrongPeer(PeerError):
    """Raised when a different peer answers at the dialled address."""


class Connections(Protocol):
    """The connected peers."""

    @property
    def peer_id(self) -> str:
        """Peer id of this node."""
        ...

    @property
    def listen_addrs(self) -> list[str]:
        """Multiaddrs at which other nodes can dial this node, including its peer id."""
        ...

    def connected(self) -> list[str]:
        """Return the peer ids of the connected peers."""
        ...

    async def changed(self) -> None:
        """Return when a connection was opened or closed."""
        ...

    async def dial(self, peer: str, address: str) -> None:
        """Connect now.

        Raises:
            WrongPeer: a different peer answered.
            Incompatible: no security protocol in common.
            PeerError: any other failure, with its reason.
        """
        ...

    def pin(self, peers: Collection[str]) -> None:
        """Pin `peers`: redial them first and never prune them. Replaces the set of the previous
        call."""
        ...

    def disconnect(self, peer: str) -> None:
        """Close all connections with `peer` in the background."""
        ...

    def observed(self, peer: str) -> Address | None:
        """Return the address at which this node sees a connected peer. The port is ephemeral if the
        peer dialled."""
        ...

    def last_received(self, peer: str) -> float | None:
        """Return when a connected peer last sent bytes, on trio's clock; None if unknown."""
        ...

    def origin(self, peer: str) -> str | None:
        """Return the network of a connected peer: its relay, or its /24 or /48 prefix. Peers with
        the same value may belong to one operator. None for a peer on this machine."""
        ...


class PeerScoring(Protocol):
    """Scores of peers by the messages that they sent. See reputation.py for the rule."""

    def is_allowed(self, peer: str) -> bool:
        """Return True unless `peer` is greylisted or banned; its messages are ignored otherwise."""
        ...

    def score(self, peer: str) -> float:
        """Return the score of `peer`: 0 if unknown, positive if useful, negative after invalid
        messages."""
        ...

    def accepted(self, peer: str) -> None:
        """Record that an item created by `peer` passed every check."""
        ...

    def rejected(self, peer: str, reason: str, cost: float = COST) -> None:
        """Record that an item created by `peer` was provably invalid. This may ban and disconnect
        it.

        Args:
            peer: the creator of the item.
            reason: one of a closed set.
            cost: what the score loses.
        """
        ...


class Requests(Protocol):
    """One request and one response, each a frame of bounded length."""

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
        """Send a request to a connected peer and return the response.

        Args:
            peer: the receiver.
            protocol: the protocol id.
            data: the request.
            deadline: seconds for everything, including the wait for a free slot.
            max_response_bytes: limit for the response.
            urgent: do not wait for a slot. Callers keep the number of urgent requests small.

        Raises:
            PeerTimeout: the deadline passed.
            BadMessage: `oversize`, the response is longer than `max_response_bytes`.
            Incompatible: the peer does not support the protocol.
            PeerError: the peer is not connected or refuses.
        """
        ...

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
        """Answer `protocol` with `handler`.

        Args:
            protocol: the protocol id.
            handler: computes the response.
            max_request_bytes: limit for a request.
            max_response_bytes: limit for a response.
            concurrent: requests served at the same time; further requests are refused at once. A
                request counts from its first byte, not while the stream is idle.
            per_peer: the same limit for one peer; a quarter of `concurrent` by default.
            deadline: seconds for handling a request, and again for writing the response.
        """
        ...


class PeerStream(Protocol):
    """A bidirectional stream to a peer. One task may send while another receives. Both may be
    cancelled, and may block without a time limit."""

    @property
    def peer(self) -> str:
        """Peer id of the remote end."""
        ...

    @property
    def sent(self) -> int:
        """Bytes sent."""
        ...

    @property
    def received(self) -> int:
        """Bytes received."""
        ...

    @property
    def broken(self) -> trio.Event:
        """Set when the stream did not end in order."""
        ...

    @property
    def closed(self) -> trio.Event:
        """Set when the stream has ended in both directions."""
        ...

    async def receive(self) -> bytes:
        """Return the next bytes in order, or b"" once the peer has finished. Raises PeerError if
        the stream is broken."""
        ...

    def unread(self, data: bytes) -> None:
        """Put received bytes back, for the next call of `receive`."""
        ...

    async def send(self, data: bytes | memoryview) -> None:
        """Queue `data`; returns when the data sent before is written. Raises PeerError if the
        stream is broken, ValueError after `finish`."""
        ...

    def finish(self) -> None:
        """Signal the end of the sent data. The peer may still send."""
        ...

    def reset(self, why: str = ...) -> None:
        """End both directions in the background. Pending calls of `send` and `receive` raise with
        the text `why`."""
        ...


class Streams(Protocol):
    """Long-lived streams to peers."""

    async def open(self, peer: str, protocol: str, *, deadline: float) -> PeerStream:
        """Open a stream to a connected peer. Raises PeerTimeout or PeerError."""
        ...

    def serve(
        self, protocol: str, accept: StreamHandler, *, concurrent: int, per_peer: int
    ) -> None:
        """Pass the streams that peers open to `accept`.

        Args:
            protocol: the protocol id.
            accept: takes a stream.
            concurrent: streams open at the same time; further streams are reset at once.
            per_peer: the same limit for one peer.
        """
        ...


class Bulk(Protocol):
    """Transfer of bytes in verified chunks, independent of their meaning."""

    def offer(
        self, transfer: bytes, source: BulkSource, *, audience: Collection[str] | None = None
    ) -> None:
        """Serve `source` until it is withdrawn. A second source under the same id replaces the
        first and ends its transfers.

        Args:
            transfer: id of the transfer, 32 bytes.
            source: the content.
            audience: peer ids that may fetch it; None for all.
        """
        ...

    def withdraw(self, transfer: bytes) -> None:
        """Stop serving a transfer, and end its uploads soon. Does nothing if it is not offered."""
        ...

    async def manifest(
        self, peer: str, transfer: bytes, *, deadline: float = ..., root: bytes | None = None
    ) -> BulkManifest:
        """Return the manifest that `peer` offers under this id.

        Args:
            peer: the holder.
            transfer: id of the transfer, 32 bytes.
            deadline: seconds.
            root: accept only a manifest with this Merkle root.

        Raises:
            Declined: the peer does not offer it to this node.
            BadMessage: the answer is invalid.
            PeerTimeout: the deadline passed.
            PeerError: any other failure.
        """
        ...

    async def fetch(
        self,
        peer: str,
        transfer: bytes,
        manifest: BulkManifest,
        sink: BulkSink,
        *,
        deadline: float,
    ) -> None:
        """Pull the chunks that `sink` is missing; returns when all are verified and accepted.

        Accepted chunks stay in the sink after an error; a second call fetches the rest. Exceptions
        of the sink pass through.

        Raises:
            PeerTimeout: the deadline passed.
            Declined: the peer refuses.
            BadMessage: a chunk is invalid. The reason `hash` also lowers the peer's score.
            PeerError: any other failure.
        """
        ...

    def deadline(self, peer: str, count: int) -> float:
        """Return a deadline in seconds for `count` bytes from `peer`, from the measured rate."""
        ...


class Network(Connections, PeerScoring, Protocol):
    """The complete network interface."""

    @property
    def requests(self) -> Requests: ...
    @property
    def streams(self) -> Streams: ...
    @property
    def bulk(self) -> Bulk: ...
