"""The serving side: offers, upload slots, and the writing of chunks.

    stream ─▶ request ─▶ look up the offer ─▶ take a slot ─▶ response ─▶ chunks ─▶ close

Uploads of offers without an audience (public uploads) may use at most half of the slots, so that
strangers cannot block a partner. When those are taken, the slowest public upload yields its slot to
a peer that has none; the displaced peer asks again for the missing chunks.

No cancel scope may be put around stream I/O (library/streams.py). A watchdog task resets the stream
instead.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Literal

import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.bulk.content import BulkSource
from swarmnode.p2p.library.streams import Stream
from swarmnode.p2p.slots import PeerCap
from swarmnode.p2p.stream_calls import frame, read_frame, run_on_stream
from swarmnode.wire import bulk, codec, limits
from swarmnode.wire.messages import (
    BulkManifestRequest,
    BulkManifestResponse,
    BulkRequest,
    BulkResponse,
)

log = logging.getLogger(__name__)

UPLOADS = 8
"""Concurrent uploads."""
PUBLIC_UPLOADS = UPLOADS // 2
"""Concurrent public uploads, whose offers are not limited to an audience."""
UPLOADS_PER_PEER = 2
STREAMS = 64
"""Open streams, including those that have not sent a request yet. Others are reset."""
STREAMS_PER_PEER = 4
YIELD_BANDWIDTH = 10**6
"""Bytes per second. A public upload below this rate yields its slot when all public slots are
taken."""
SETTLED_SECONDS = 10.0
"""An upload keeps its slot at least this long."""
STALL_SECONDS = 30.0
"""A transfer ends when nothing moves for this long, on either side."""
MIN_BANDWIDTH = 64 * 1024
"""Bytes per second. An upload may take its size at this rate plus STALL_SECONDS, so that a peer
that reads slowly without pausing does not keep its slot."""
Refusal = Literal["unknown", "busy"]


class BulkServer:
    """Answers peers' requests for manifests and chunks.

    Args:
        is_allowed: Returns False for a peer whose streams are reset unread.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, is_allowed: Callable[[str], bool], clock: Callable[[], float] = trio.current_time
    ) -> None:
        self.allows: Callable[[], bool] = lambda: True
        """Returns False while the byte budget or quiet hours forbid uploads."""
        self.offers: dict[bytes, BulkOffer] = {}
        self.outcomes: collections.Counter[str] = collections.Counter()
        self._is_allowed = is_allowed
        self._clock = clock
        self._streams = PeerCap(STREAMS_PER_PEER, STREAMS)
        self._uploads: set[Upload] = set()

    async def on_stream(self, stream: Stream) -> None:
        """Handle a stream of the bulk protocol. Never raises; always closes or resets."""
        outcome = "unwelcome"
        if self._is_allowed(stream.peer):
            with self._streams.slot(stream.peer) as has_room:
                outcome = await self._answer(stream) if has_room else "busy"
        self.outcomes[outcome] += 1
        await (stream.close() if outcome in ("ok", "unknown") else stream.reset())

    async def answer_manifest(self, peer: str, data: bytes) -> bytes:
        """Handle a request for a manifest."""
        request = codec.decode(data, BulkManifestRequest, limits.BULK_MANIFEST_REQUEST_BYTES)
        await trio.lowlevel.checkpoint()
        offer = self.find(peer, request.transfer)
        if offer is None:
            return codec.encode(BulkManifestResponse("unknown", b""))
        manifest = codec.encode(offer.source.manifest(request.transfer))
        return codec.encode(BulkManifestResponse("ok", manifest))

    # -- offers

    def offer(self, transfer: bytes, source: BulkSource, audience: frozenset[str] | None) -> None:
        """Offer `source` under `transfer` to the peers in `audience`, or to all if it is None."""
        if len(transfer) != limits.TRANSFER_BYTES:
            raise ValueError(f"a transfer id has {limits.TRANSFER_BYTES} bytes")
        self.withdraw(transfer)
        self.offers[transfer] = BulkOffer(source, audience)

    def withdraw(self, transfer: bytes) -> None:
        """Remove an offer and end its uploads."""
        offer = self.offers.pop(transfer, None)
        for upload in self._uploads:
            if upload.offer is offer:
                upload.end("withdrawn")

    def find(self, peer: str, transfer: bytes, root: bytes | None = None) -> BulkOffer | None:
        """Return the offer with this id and root, if `peer` is in its audience."""
        offer = self.offers.get(transfer)
        if offer is None or (offer.audience is not None and peer not in offer.audience):
            return None
        return offer if root is None or offer.source.root == root else None

    # -- slots

    def begin(self, peer: str, request: BulkRequest) -> Upload | Refusal:
        """Take an upload slot, or return the refusal.

        Raises:
            BadMessage: The request does not fit the offer.
        """
        offer = self.find(peer, request.transfer, request.root)
        if offer is None:
            return "unknown"
        chunks = bulk.count(offer.source.manifest(request.transfer))
        indices = bulk.unpack_wanted(request.wanted, chunks)
        if sum(each.peer == peer for each in self._uploads) >= UPLOADS_PER_PEER:
            return "busy"
        if not self.allows():
            return "busy"
        if offer.audience is None and len(self._public_uploads()) >= PUBLIC_UPLOADS:
            slow = self._yielding_upload(peer)
            if slow is None:
                return "busy"
            slow.end("stalled")
            self.finish(slow)
        elif self.active >= UPLOADS:
            return "busy"
        upload = Upload(peer, offer, indices, self._clock())
        self._uploads.add(upload)
        return upload

    def finish(self, upload: Upload) -> None:
        """Free the slot of an upload."""
        self._uploads.discard(upload)

    @property
    def active(self) -> int:
        """The number of uploads."""
        return len(self._uploads)

    def _public_uploads(self) -> list[Upload]:
        return [each for each in self._uploads if each.offer.audience is None]

    def _yielding_upload(self, peer: str) -> Upload | None:
        """Return the slowest public upload below YIELD_BANDWIDTH, if `peer` has none itself."""
        public, now = self._public_uploads(), self._clock()
        slow = [
            each
            for each in public
            if now - each.began >= SETTLED_SECONDS
            and each.sent < YIELD_BANDWIDTH * (now - each.began)
        ]
        if any(each.peer == peer for each in public):
            return None
        return min(slow, key=lambda each: each.sent / (now - each.began), default=None)

    # -- one stream

    async def _answer(self, stream: Stream) -> str:
        """Serve one request. Returns the outcome; the stream is the caller's to end."""
        try:
            request = await run_on_stream(STALL_SECONDS, stream, _read_request)
            upload = self.begin(stream.peer, request)
            if isinstance(upload, str):
                refusal = _response(upload, 0)
                await run_on_stream(STALL_SECONDS, stream, lambda stream: stream.write(refusal))
                return upload
        except BadMessage:
            return "malformed"
        except PeerError as error:
            log.debug("a bulk stream of %s ended: %s", stream.peer, error)
            return "stalled" if isinstance(error, PeerTimeout) else "failed"
        try:
            return await self._send(stream, upload)
        finally:
            self.finish(upload)

    async def _send(self, stream: Stream, upload: Upload) -> str:
        """Write the response and the chunks. Returns the outcome."""
        stream.keep_connection()
        outcome = "failed"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, stream, upload)
            try:
                await stream.write(_response("ok", upload.size))
                for index in upload.indices:
                    chunk = upload.offer.source.chunk(index)
                    await stream.write(chunk)
                    upload.progress(len(chunk), self._clock())
                outcome = "ok"
            except PeerError as error:
                log.debug("a bulk stream of %s ended: %s", stream.peer, error)
                outcome = upload.end_reason or outcome
            nursery.cancel_scope.cancel()
        return outcome

    async def _watch(self, stream: Stream, upload: Upload) -> None:
        """Reset the stream once the upload has ended, stalled or taken too long."""
        while not upload.ended.is_set():
            left = upload.due - self._clock()
            if left <= 0:
                upload.end("stalled")
            with trio.move_on_after(max(0.0, left)):
                await upload.ended.wait()
        await stream.reset()


class BulkOffer:
    """A source and the peer ids that may fetch it; `audience` None means all peers."""

    def __init__(self, source: BulkSource, audience: frozenset[str] | None) -> None:
        self.source = source
        self.audience = audience


class Upload:
    """One transfer to a peer. It has a slot from `BulkServer.begin` to `BulkServer.finish`."""

    def __init__(self, peer: str, offer: BulkOffer, indices: list[int], now: float) -> None:
        self.peer = peer
        self.offer = offer
        self.indices = indices
        self.size = sum(len(offer.source.chunk(index)) for index in indices)
        self.began = now
        self.sent = 0
        self.ended = trio.Event()
        self.end_reason = ""
        self._moved_at = now

    @property
    def due(self) -> float:
        """The time at which it has stalled, or has taken longer than MIN_BANDWIDTH allows."""
        longest = STALL_SECONDS + self.size / MIN_BANDWIDTH
        return min(self._moved_at + STALL_SECONDS, self.began + longest)

    def progress(self, count: int, now: float) -> None:
        """Record that `count` more bytes were written."""
        self.sent += count
        self._moved_at = now

    def end(self, reason: str) -> None:
        """Have the watchdog reset the stream. The first reason counts."""
        self.end_reason = self.end_reason or reason
        self.ended.set()


async def _read_request(stream: Stream) -> BulkRequest:
    data = await read_frame(stream, limits.BULK_REQUEST_BYTES)
    return codec.decode(data, BulkRequest, limits.BULK_REQUEST_BYTES)


def _response(status: Literal["ok", "unknown", "busy"], size: int) -> bytes:
    """Return the frame that precedes the chunks."""
    return frame(codec.encode(BulkResponse(status, size)))
