"""Our fetches: whose turn it is, over which path, how long it may take, and what came of it.

    fetch ─▶ a slot ─▶ ask over libp2p for a port and a token ─▶ connect, handshake ─▶ chunks over
    the socket
                        └─ none, no connection, no handshake ─────────────────────▶ chunks over a
                        libp2p stream

A transfer that breaks off in the middle is not taken up here: the sink knows what it has, the
caller decides whether to call again.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import AsyncIterator

import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.api import BulkPath, Declined, PeerScoring, Requests
from swarmnode.p2p.bulk import fetching, serving
from swarmnode.p2p.bulk.bandwidth import Bandwidth
from swarmnode.p2p.bulk.calling import Calling, Fallback
from swarmnode.p2p.bulk.content import BulkSink
from swarmnode.p2p.bulk.fetching import Pull
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.slots import PeerSlots
from swarmnode.p2p.traffic import Traffic
from swarmnode.wire import bulk, codec, ids, limits
from swarmnode.wire.bounds import check_message
from swarmnode.wire.messages import BulkManifest, BulkManifestRequest, BulkManifestResponse

FETCHING = 4
FETCHING_PER_PEER = 1
"""Fetches under way; more wait their turn within their own deadline."""
OUTCOMES = ("ok", "timeout", "unknown", "busy", "hash", "malformed", "failed", "cancelled")


class FetchCounts:
    """By path, of the fetches that have ended: how often they ended how (OUTCOMES), bytes, seconds;
    fallbacks by reason (`calling.FALLBACKS`)."""

    def __init__(self) -> None:
        self.outcomes: dict[BulkPath, collections.Counter[str]] = {
            "stream": collections.Counter(),
            "socket": collections.Counter(),
        }
        self.received: collections.Counter[str] = collections.Counter()
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.fallbacks: collections.Counter[str] = collections.Counter()


class Fetcher:
    """`threads`: limits those that hash and read sockets."""

    def __init__(
        self,
        host: Host,
        requests: Requests,
        calling: Calling,
        scores: PeerScoring,
        traffic: Traffic,
        threads: trio.CapacityLimiter,
    ) -> None:
        self.bandwidth = Bandwidth()
        self.counts = FetchCounts()
        self.slots = PeerSlots(FETCHING_PER_PEER, FETCHING)
        self._host = host
        self._requests = requests
        self._calling = calling
        self._scores = scores
        self._traffic = traffic
        self._threads = threads

    async def manifest(
        self, peer: str, transfer: bytes, deadline: float, root: bytes | None
    ) -> BulkManifest:
        """See `api.Bulk.manifest`."""
        data = await self._requests.request(
            peer,
            ids.BULK_MANIFEST_PROTOCOL,
            codec.encode(BulkManifestRequest(transfer)),
            deadline=deadline,
            max_response_bytes=limits.BULK_MANIFEST_RESPONSE_BYTES,
        )
        response = codec.decode(data, BulkManifestResponse, limits.BULK_MANIFEST_RESPONSE_BYTES)
        if response.status != "ok":
            raise Declined(response.status)
        manifest = codec.decode(response.manifest, BulkManifest, limits.BULK_MANIFEST_BYTES)
        if manifest.transfer != transfer or (root is not None and bulk.root(manifest) != root):
            raise BadMessage("bounds", "the manifest of something else")
        return manifest

    async def fetch(
        self,
        peer: str,
        transfer: bytes,
        manifest: BulkManifest,
        sink: BulkSink,
        deadline: float,
        path: BulkPath | None,
    ) -> None:
        """See `api.Bulk.fetch`."""
        check_message(manifest)
        if sink.size != manifest.size:
            raise ValueError(f"the sink is for {sink.size} bytes, the manifest of {manifest.size}")
        wanted = sink.missing()
        if not wanted:
            return
        pull = Pull(peer, transfer, manifest, sink, wanted)
        outcome = "failed"
        try:
            with trio.move_on_after(deadline) as scope:
                async with self.slots.turn(peer), self._measured(pull):
                    await self._pull(pull, path)
            if scope.cancelled_caught:
                raise PeerTimeout(
                    f"{pull.moved} of {pull.size} bytes came from {peer} within {deadline:g} s"
                )
            outcome = "ok"
        except (trio.Cancelled, BaseExceptionGroup):  # out of a nursery it comes in a group
            outcome = "cancelled"
            raise
        except PeerError as error:
            outcome = _outcome(error)
            if isinstance(error, BadMessage):
                self._scores.rejected(peer, f"bulk_{outcome}")
            raise
        finally:
            self.counts.outcomes[pull.path][outcome] += 1

    @contextlib.asynccontextmanager
    async def _measured(self, pull: Pull) -> AsyncIterator[None]:
        began = trio.current_time()
        try:
            yield
        finally:
            seconds = trio.current_time() - began
            self.bandwidth.observe(pull.peer, pull.moved, seconds)
            self.counts.seconds[pull.path] += seconds
            self.counts.received[pull.path] += pull.moved

    async def _pull(self, pull: Pull, path: BulkPath | None) -> None:
        if path != "stream":
            try:
                control, connection = await self._calling.call(pull)
            except Fallback as fallback:
                if path == "socket":
                    raise PeerError(f"no socket to {pull.peer}: {fallback.args[0]}") from fallback
                self.counts.fallbacks[fallback.args[0]] += 1
            else:
                pull.path = "socket"
                with control, connection:
                    async with self._watched(pull):
                        await fetching.over_socket(control, connection, pull, self._threads)
                return
        async with self._watched(pull):
            await fetching.over_stream(self._host, pull, self._threads)

    @contextlib.asynccontextmanager
    async def _watched(self, pull: Pull) -> AsyncIterator[None]:
        """Ends the block when nothing moves any more; raises PeerTimeout then. The scope is around
        waiting for the work, never around a libp2p stream."""
        watching, working = trio.CancelScope(), trio.CancelScope()

        def moved() -> int:
            if pull.path == "socket":
                self._traffic.count(ids.BULK_SOCKET_PROTOCOL, pull.moved - pull.metered, 0)
                pull.metered = pull.moved
            return pull.moved

        def stalled() -> None:
            pull.fail(PeerTimeout(f"nothing came from {pull.peer} for {serving.STALL_SECONDS:g} s"))
            working.cancel()

        async def watch() -> None:
            with watching:
                await serving.watch(moved, stalled, float("inf"))

        self._host.nursery.start_soon(watch)
        try:
            with working:
                yield
        finally:
            watching.cancel()
            moved()
        pull.conclude()


def _outcome(error: PeerError) -> str:
    """The one of OUTCOMES that an error means."""
    if isinstance(error, Declined):
        return error.status
    if isinstance(error, BadMessage):
        return "hash" if error.reason == "hash" else "malformed"
    return "timeout" if isinstance(error, PeerTimeout) else "failed"
