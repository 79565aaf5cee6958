"""What a network does for the rest of a node, as protocols: code above `p2p` depends on these, not
on the classes behind them.

    Network ─ Connections   who is connected; dial, hold, disconnect
            ─ PeerScoring   whom to listen to, and what its messages were worth
            ─ .requests     Requests: one frame each way
            ─ .streams      Streams ▸ PeerStream: long-lived, both ways
            ─ .bulk         Bulk: something large, in verified chunks

Whoever only asks peers takes `Requests`; whoever needs a few of these composes them. `p2p.network`
has the implementation on libp2p, `testing.network` one in memory, and tests/unit/p2p/test_api.py
holds both to what is promised here.

A method that reaches for a peer has a deadline in seconds and raises PeerError (or PeerTimeout,
BadMessage, Incompatible, which are kinds of it) for whatever the peer or the way to it does, and
nothing else. A peer is named by its peer id as text, base58.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Protocol

import trio

from swarmnode.errors import PeerError
from swarmnode.p2p.reputation import COST

if TYPE_CHECKING:  # which load libp2p
    from swarmnode.p2p.addresses import Address
    from swarmnode.p2p.bulk.content import BulkSink, BulkSource
    from swarmnode.wire.messages import BulkManifest

RequestHandler = Callable[[str, bytes], Awaitable[bytes]]
"""(peer id, request) → response. Raises PeerError to refuse; anything else is counted as our own
error, and the stream is reset too."""

StreamHandler = Callable[["PeerStream"], None]
"""Takes a stream that a peer has opened, at once; whoever does not want it resets it."""


class Declined(PeerError):
    """Raised when a peer says that it will not send: `status` is `unknown` (not offered to us, or
    with another root) or `busy`."""

    def __init__(self, status: str) -> None:
        super().__init__(f"the peer answered {status}")
        self.status = status


class AnotherPeer(PeerError):
    """Raised when somebody else answers at the address of the peer that was dialled."""


class Connections(Protocol):
    """Who is connected, and who should be."""

    @property
    def peer_id(self) -> str:
        """Ours."""
        ...

    @property
    def listen_addrs(self) -> list[str]:
        """Multiaddrs that others can dial, with our peer id."""
        ...

    def connected(self) -> list[str]:
        """Peer ids."""
        ...

    async def wait_connected(self, count: int = 1) -> None:
        """Returns once `count` peers are connected."""
        ...

    async def changed(self) -> None:
        """Returns when a connection was opened or closed."""
        ...

    async def dial(self, peer: str, address: str) -> None:
        """Connects now. Raises AnotherPeer, Incompatible (no security protocol in common), or
        PeerError, which says why it failed."""
        ...

    def hold(self, peers: Collection[str]) -> None:
        """Somebody here depends on these peers, and no longer on those of the last call: they are
        redialled first, and never pruned."""
        ...

    def disconnect(self, peer: str) -> None:
        """Closes all connections with `peer`, soon."""
        ...

    def observed(self, peer: str) -> Address | None:
        """The address at which we see a connected peer; the port is ephemeral if it dialled us."""
        ...

    def heard(self, peer: str) -> float | None:
        """When a connected peer last said anything, whatever it was, by trio's clock; None where
        that is not known."""
        ...

    def group(self, peer: str) -> str | None:
        """What a connected peer has in common with others that may be the same operator's: its
        relay, or its /24 or /48. None on this machine."""
        ...


class PeerScoring(Protocol):
    """What a peer's messages have earned it. See reputation.py for the rule."""

    def welcome(self, peer: str) -> bool:
        """Whether anything of `peer` is to be looked at: it is neither greylisted nor banned."""
        ...

    def score(self, peer: str) -> float:
        """0 for a peer that we know nothing of, higher for a useful one, and below 0 for one that
        sent what was wrong."""
        ...

    def accepted(self, peer: str) -> None:
        """Something that `peer` made passed every check."""
        ...

    def rejected(self, peer: str, reason: str, cost: float = COST) -> None:
        """Something that `peer` made was provably wrong; it may be banned and disconnected for it.
        `reason`: of a closed set."""
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
        """The response of a connected peer. `deadline` covers everything, waiting for a slot
        included. `urgent` requests wait for no slot; whoever sends them sees to it that they are
        few.

        Raises PeerTimeout after the deadline, BadMessage("oversize") if the response is longer than
        `max_response_bytes`, Incompatible if the peer does not speak the protocol, PeerError if it
        is not connected or refuses.
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
        """Answers `protocol` with `handler`. `concurrent`, `per_peer` (default: a quarter of it):
        requests served at a time, others are refused at once; one that is not there yet is none of
        them. `deadline`: seconds for handling one, and for writing the response, at most."""
        ...


class PeerStream(Protocol):
    """One stream to a peer, both ways. One task sends, one receives; either may be cancelled, or
    wait for as long as it likes."""

    @property
    def peer(self) -> str:
        """The peer at the other end."""
        ...

    @property
    def sent(self) -> int:
        """Bytes."""
        ...

    @property
    def received(self) -> int:
        """Bytes."""
        ...

    @property
    def broken(self) -> trio.Event:
        """Set when the stream did not end in order."""
        ...

    @property
    def closed(self) -> trio.Event:
        """Set when nothing of the stream is left."""
        ...

    async def receive(self) -> bytes:
        """What has arrived, in order; b"" once the peer has finished. Raises PeerError when the
        stream is broken."""
        ...

    def unread(self, data: bytes) -> None:
        """Gives back what was received and is for whoever receives next."""
        ...

    async def send(self, data: bytes | memoryview) -> None:
        """Returns when what was sent before is written. Raises PeerError when the stream is broken,
        ValueError after `finish`."""
        ...

    def finish(self) -> None:
        """Tells the peer, after what was sent, that this was all. It may still send."""
        ...

    def reset(self, why: str = ...) -> None:
        """Ends both directions, soon; whoever sends or receives here is told `why`."""
        ...


class Streams(Protocol):
    """Long-lived streams to peers."""

    async def open(self, peer: str, protocol: str, *, deadline: float) -> PeerStream:
        """A new stream to a connected peer. Raises PeerTimeout, PeerError."""
        ...

    def serve(
        self, protocol: str, accept: StreamHandler, *, concurrent: int, per_peer: int
    ) -> None:
        """Gives the streams that peers open to `accept`. `concurrent`, `per_peer`: at a time;
        others are reset at once."""
        ...


class Bulk(Protocol):
    """Bytes in verified chunks. Knows nothing of what they mean."""

    def offer(
        self, transfer: bytes, source: BulkSource, *, audience: Collection[str] | None = None
    ) -> None:
        """Serves `source` under this id (32 bytes) until it is withdrawn, to the peer ids in
        `audience`, or to whoever asks. Another source under the same id replaces the earlier one,
        whose transfers end."""
        ...

    def withdraw(self, transfer: bytes) -> None:
        """Nothing of it is sent any more, soon. No error if it was not offered."""
        ...

    async def manifest(
        self, peer: str, transfer: bytes, *, deadline: float = ..., root: bytes | None = None
    ) -> BulkManifest:
        """What `peer` offers under this id; with `root`, nothing but what has this root.

        Raises Declined when it offers nothing to us, BadMessage, PeerTimeout, PeerError."""
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
        """Pulls the chunks that `sink` is missing; returns when all of them are verified and
        accepted.

        Raises PeerTimeout, Declined, BadMessage ("hash": this also costs the peer its standing),
        PeerError, and what the sink raises. Whatever was accepted before stays: call again for the
        rest."""
        ...

    def deadline(self, peer: str, count: int) -> float:
        """Seconds that `count` bytes from `peer` may take, from what was measured."""
        ...


class Network(Connections, PeerScoring, Protocol):
    """All of it."""

    @property
    def requests(self) -> Requests: ...
    @property
    def streams(self) -> Streams: ...
    @property
    def bulk(self) -> Bulk: ...
