"""`network.bulk`: what this node offers, and what it fetches from others.

    fetch ─▶ a slot ─▶ ask over libp2p for a port and a token ─▶ connect, handshake ─▶ chunks over the socket
                        └─ none, no connection, no handshake ─────────────────────▶ chunks over a libp2p stream

A transfer that breaks off in the middle is not taken up here: the sink knows what it has, the caller decides whether to call again.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import trio
from libp2p.crypto.keys import KeyPair

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.api import BulkPath, Declined
from swarmnode.p2p.bulk import fetching, serving, tls
from swarmnode.p2p.bulk.bandwidth import Bandwidth
from swarmnode.p2p.bulk.calling import Calling, Fallback
from swarmnode.p2p.bulk.content import BulkSink, BulkSource
from swarmnode.p2p.bulk.fetching import Pull
from swarmnode.p2p.bulk.listener import HANDSHAKES, Listener, Tokens
from swarmnode.p2p.requests import Requests
from swarmnode.wire import bulk, codec, ids, limits
from swarmnode.wire.bounds import check_message
from swarmnode.wire.messages import BulkManifest, BulkManifestRequest, BulkManifestResponse, BulkSocketRequest, BulkSocketResponse

OFF = -1
"""Of `network.bulk_port`: no socket."""
FETCHING = 4
FETCHING_PER_PEER = 1
"""Fetches under way; more wait their turn within their own deadline."""
REQUEST_SECONDS = 10.0
"""For a manifest, and for a port and token."""
OUTCOMES = ("ok", "timeout", "unknown", "busy", "hash", "malformed", "failed", "cancelled")
"""Of our fetches."""


class BulkStatistics(msgspec.Struct, frozen=True):
    """Counters since the host was opened, gauges of now. Paths are `stream` and `socket`."""

    fetched: dict[str, dict[str, int]] = {}
    """Ours: path → outcome (OUTCOMES) → count."""
    served: dict[str, dict[str, int]] = {}
    """Theirs: path → outcome (`serving.OUTCOMES`) → count."""
    received_bytes: dict[str, int] = {}
    """By path; also what was refused afterwards."""
    sent_bytes: dict[str, int] = {}
    """By path, of transfers that have ended."""
    seconds: dict[str, float] = {}
    """By path: spent fetching, waiting for a slot not included."""
    fallbacks: dict[str, int] = {}
    """By reason (`calling.FALLBACKS`)."""
    handshakes: dict[str, int] = {}
    """Inbound TLS connections by outcome (`listener.OUTCOMES`)."""
    bandwidth: dict[str, float] = {}
    """Bytes per second by peer, moving average; at most `bandwidth.PEERS`."""
    offers: int = 0
    fetching: int = 0
    serving: int = 0
    port: int = 0
    """Of the TLS listener, 0 if there is none."""


class Bulk:
    """Made by `Network`. `port`: as `network.bulk_port`. `observed(peer)`: where we see it. `judged(peer, reason)`: it is provably wrong.
    `metered(protocol, received, sent)`: bytes that went by beside libp2p. Set `allows` to `Meter.allows` where there is a budget."""

    def __init__(
        self,
        host: Any,
        nursery: trio.Nursery,
        requests: Requests,
        *,
        listen: list[Address],
        port: int,
        observed: Callable[[str], Address | None],
        welcome: Callable[[str], bool] = lambda peer: True,
        judged: Callable[[str, str], None] = lambda peer, reason: None,
        metered: Callable[[str, int, int], None] = lambda protocol, received, sent: None,
    ) -> None:
        self.bandwidth = Bandwidth()
        self.allows: Callable[[str], bool] = lambda choice: True
        self._host = host
        self._nursery = nursery
        self._requests = requests
        self._listen = listen
        self._port = port
        self._judged = judged
        self._metered = metered
        self._threads = trio.CapacityLimiter(HANDSHAKES + serving.SERVING + 3 * FETCHING)
        self._serving = serving.Serving(nursery, self._threads, welcome, lambda: self.allows("serve"), metered)
        self._calling = Calling(requests, self._threads, observed)
        self._tokens = Tokens()
        self._listener: Listener | None = None
        self._slots = trio.Semaphore(FETCHING)
        self._peer_slots: dict[str, trio.Semaphore] = {}
        self._waiting: collections.Counter[str] = collections.Counter()
        self._fetched: dict[str, collections.Counter[str]] = {"stream": collections.Counter(), "socket": collections.Counter()}
        self._received: collections.Counter[str] = collections.Counter()
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._fallbacks: collections.Counter[str] = collections.Counter()

    async def start(self) -> None:
        """Serves from now on; listens for TLS connections unless the port is OFF. Raises Unavailable if that is taken."""
        self._host.set_stream_handler(ids.BULK_PROTOCOL, self._serving.on_stream)
        self._requests.serve(
            ids.BULK_MANIFEST_PROTOCOL, self._serve_manifest, deadline=REQUEST_SECONDS,
            max_request_bytes=limits.BULK_MANIFEST_REQUEST_BYTES, max_response_bytes=limits.BULK_MANIFEST_RESPONSE_BYTES,
        )  # fmt: skip
        if self._port == OFF:
            return
        keys = KeyPair(self._host.get_private_key(), self._host.get_public_key())
        contexts = self._calling.contexts = await trio.to_thread.run_sync(tls.Contexts, keys)
        self._listener = Listener(contexts, self._tokens, self._serving.on_caller, self._threads)
        await self._listener.start(self._nursery, self._listen, self._port)
        self._requests.serve(
            ids.BULK_SOCKET_PROTOCOL, self._serve_token, deadline=REQUEST_SECONDS,
            max_request_bytes=limits.BULK_SOCKET_REQUEST_BYTES, max_response_bytes=limits.BULK_SOCKET_RESPONSE_BYTES,
        )  # fmt: skip

    # -- what we have

    def offer(self, transfer: bytes, source: BulkSource, *, audience: Collection[str] | None = None) -> None:
        """Serves `source` under this id (32 bytes) until it is withdrawn, to the peer ids in `audience`, or to whoever asks.

        Another source under the same id replaces the earlier one, whose transfers end.
        """
        if len(transfer) != limits.TRANSFER_BYTES:
            raise ValueError(f"a transfer's id has {limits.TRANSFER_BYTES} bytes")
        self.withdraw(transfer)
        self._serving.offers[transfer] = serving.Offer(source, None if audience is None else frozenset(audience))

    def withdraw(self, transfer: bytes) -> None:
        """Nothing of it is sent any more, soon; transfers under way end. No error if it was not offered."""
        self._serving.withdraw(transfer)

    # -- what others have

    async def manifest(self, peer: str, transfer: bytes, *, deadline: float = REQUEST_SECONDS, root: bytes | None = None) -> BulkManifest:
        """What `peer` offers under this id; with `root`, nothing but what has this root.

        Raises Declined when it offers nothing to us, BadMessage, PeerTimeout, PeerError.
        """
        data = await self._requests.request(
            peer, ids.BULK_MANIFEST_PROTOCOL, codec.encode(BulkManifestRequest(transfer)),
            deadline=deadline, max_response_bytes=limits.BULK_MANIFEST_RESPONSE_BYTES,
        )  # fmt: skip
        response = codec.decode(data, BulkManifestResponse, limits.BULK_MANIFEST_RESPONSE_BYTES)
        if response.status != "ok":
            raise Declined(response.status)
        manifest = codec.decode(response.manifest, BulkManifest, limits.BULK_MANIFEST_BYTES)
        if manifest.transfer != transfer or (root is not None and bulk.root(manifest) != root):
            raise BadMessage("bounds", "the manifest of something else")
        return manifest

    def deadline(self, peer: str, count: int) -> float:
        """Seconds that `count` bytes from `peer` may take, from what was measured: see `Bandwidth`."""
        return self.bandwidth.deadline(peer, count)

    async def fetch(
        self, peer: str, transfer: bytes, manifest: BulkManifest, sink: BulkSink, *, deadline: float, path: BulkPath | None = None
    ) -> None:
        """Pulls the chunks that `sink` is missing; returns when all of them are verified and accepted.

        deadline: seconds for everything, waiting for a slot included. path: that one and no other; None is the socket where possible.
        Raises PeerTimeout, Declined, BadMessage ("hash", or what came was no answer; this also costs the peer standing), PeerError for
        everything else, and what the sink raises. Whatever was accepted before stays: call again for the rest. Once this has returned,
        nothing writes to the sink.
        """
        check_message(manifest)
        if sink.size != manifest.size:
            raise ValueError(f"the sink is for {sink.size} bytes, the manifest of {manifest.size}")
        wanted = sink.missing()
        if not wanted:
            return
        pull = Pull(peer, transfer, manifest, sink, wanted)
        outcome = "cancelled"
        try:
            with trio.move_on_after(deadline) as scope:
                await self._in_turn(pull, path)
            if scope.cancelled_caught:
                raise PeerTimeout(f"{pull.moved} of {pull.size} bytes came from {peer} within {deadline:g} s")
            outcome = "ok"
        except Exception as error:
            outcome = _outcome(error)
            if isinstance(error, BadMessage):
                self._judged(peer, f"bulk_{outcome}")
            raise
        finally:
            self._fetched[pull.path][outcome] += 1

    async def _in_turn(self, pull: Pull, path: BulkPath | None) -> None:
        peer = pull.peer
        self._waiting[peer] += 1
        try:
            async with self._peer_slots.setdefault(peer, trio.Semaphore(FETCHING_PER_PEER)), self._slots:
                began = trio.current_time()
                try:
                    await self._pull(pull, path)
                finally:
                    seconds = trio.current_time() - began
                    self.bandwidth.observe(peer, pull.moved, seconds)
                    self._seconds[pull.path] += seconds
                    self._received[pull.path] += pull.moved
        finally:
            self._waiting[peer] -= 1
            if not self._waiting[peer]:
                del self._waiting[peer], self._peer_slots[peer]

    async def _pull(self, pull: Pull, path: BulkPath | None) -> None:
        if path != "stream":
            try:
                control, connection = await self._calling.call(pull)
            except Fallback as fallback:
                if path == "socket":
                    raise PeerError(f"no socket to {pull.peer}: {fallback.args[0]}") from fallback
                self._fallbacks[fallback.args[0]] += 1
            else:
                pull.path = "socket"
                with control, connection:
                    return await self._watched(pull, fetching.over_socket, control, connection, pull, self._threads)
        return await self._watched(pull, fetching.over_stream, self._host, self._nursery, pull, self._threads)

    async def _watched(self, pull: Pull, work: Callable[..., Any], *args: Any) -> None:
        """`work(*args)`, ended when nothing moves. The scope is around waiting for the work, never around a libp2p stream."""

        def moved() -> int:
            if pull.path == "socket":
                self._metered(ids.BULK_SOCKET_PROTOCOL, pull.moved - pull.told, 0)
                pull.told = pull.moved
            return pull.moved

        def stalled() -> None:
            pull.fail(PeerTimeout(f"nothing came from {pull.peer} for {serving.STALL_SECONDS:g} s"))
            scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serving.watch, moved, stalled, float("inf"))
                with trio.CancelScope() as scope:
                    try:
                        await work(*args)
                    except Exception as error:
                        pull.fail(error)
                nursery.cancel_scope.cancel()
        finally:
            moved()
        pull.conclude()

    # -- what others ask

    async def _serve_manifest(self, peer: str, data: bytes) -> bytes:
        request = codec.decode(data, BulkManifestRequest, limits.BULK_MANIFEST_REQUEST_BYTES)
        await trio.lowlevel.checkpoint()
        offer = self._serving.find(peer, request.transfer)
        if offer is None:
            return codec.encode(BulkManifestResponse("unknown", b""))
        return codec.encode(BulkManifestResponse("ok", codec.encode(offer.source.manifest(request.transfer))))

    async def _serve_token(self, peer: str, data: bytes) -> bytes:
        request = codec.decode(data, BulkSocketRequest, limits.BULK_SOCKET_REQUEST_BYTES)
        await trio.lowlevel.checkpoint()
        offer = self._serving.find(peer, request.transfer, request.root)
        if offer is None or self._listener is None:
            return codec.encode(BulkSocketResponse("unknown", 0, b""))
        if not self._serving.has_room(peer, offer):
            return codec.encode(BulkSocketResponse("busy", 0, b""))
        token = self._tokens.issue(peer, request.transfer, trio.current_time())
        return codec.encode(BulkSocketResponse("ok", self._listener.port, token))

    def statistics(self) -> BulkStatistics:
        return BulkStatistics(
            fetched={path: dict(counts) for path, counts in self._fetched.items()},
            served={path: dict(counts) for path, counts in self._serving.outcomes.items()},
            received_bytes=dict(self._received),
            sent_bytes=dict(self._serving.sent),
            seconds=dict(self._seconds),
            fallbacks=dict(self._fallbacks),
            handshakes=dict(self._listener.outcomes) if self._listener else {},
            bandwidth=self.bandwidth.snapshot(),
            offers=len(self._serving.offers),
            fetching=self._waiting.total(),
            serving=self._serving.active,
            port=self._listener.port if self._listener else 0,
        )


def _outcome(error: Exception) -> str:
    """Of OUTCOMES."""
    if isinstance(error, Declined):
        return error.status
    if isinstance(error, BadMessage):
        return "hash" if error.reason == "hash" else "malformed"
    return "timeout" if isinstance(error, PeerTimeout) else "failed"
