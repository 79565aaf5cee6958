"""Bulk transfers as requests, for networks without byte streams."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec
import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import Declined, Requests
from swarmnode.wire import bulk, codec, ids, limits
from swarmnode.wire.messages import BulkManifest

if TYPE_CHECKING:  # loads libp2p
    from swarmnode.p2p.bulk.content import BulkSink, BulkSource
    from swarmnode.p2p.reputation import PeerScores

BULK_SECONDS = 10.0


class RequestBulk:
    """`api.Bulk` with one request for each manifest and chunk. Chunks are verified as on a real
    network."""

    def __init__(self, requests: Requests, scores: PeerScores) -> None:
        self._requests = requests
        self._scores = scores
        self._offers: dict[bytes, tuple[BulkSource, frozenset[str] | None]] = {}
        requests.serve(
            ids.BULK_PROTOCOL,
            self._answer,
            max_request_bytes=128,
            max_response_bytes=limits.BULK_MANIFEST_BYTES,
            concurrent=1000,
            per_peer=1000,
        )

    def offer(
        self, transfer: bytes, source: BulkSource, *, audience: Collection[str] | None = None
    ) -> None:
        self._offers[transfer] = source, None if audience is None else frozenset(audience)

    def withdraw(self, transfer: bytes) -> None:
        self._offers.pop(transfer, None)

    def deadline(self, peer: str, count: int) -> float:
        return BULK_SECONDS

    async def manifest(
        self,
        peer: str,
        transfer: bytes,
        *,
        deadline: float = BULK_SECONDS,
        root: bytes | None = None,
    ) -> BulkManifest:
        data = await self._request(peer, _BulkItem(transfer), deadline)
        manifest = codec.decode(data, BulkManifest, limits.BULK_MANIFEST_BYTES)
        bulk.check_manifest(manifest, transfer, root)
        return manifest

    async def fetch(
        self, peer: str, transfer: bytes, manifest: BulkManifest, sink: BulkSink, *, deadline: float
    ) -> None:
        if sink.size != manifest.size:
            raise ValueError(f"the sink is for {sink.size} bytes, the manifest of {manifest.size}")
        until, root = trio.current_time() + deadline, bulk.root(manifest)
        for index in sink.missing():
            item = _BulkItem(transfer, root, index)
            data = await self._request(peer, item, until - trio.current_time())
            view = sink.view(index)
            if len(data) != len(view):
                raise PeerError("wrong length of a chunk")
            view[:] = data
            try:
                bulk.check_chunk(manifest, index, view)
            except BadMessage as error:
                self._scores.rejected(peer, f"bulk_{error.reason}")
                raise
            sink.accept(index)

    async def _request(self, peer: str, item: _BulkItem, deadline: float) -> bytes:
        """Return a manifest or a chunk. Raise Declined if the peer does not offer it."""
        data = await self._requests.request(
            peer,
            ids.BULK_PROTOCOL,
            codec.encode(item),
            deadline=max(0.0, deadline),
            max_response_bytes=limits.BULK_MANIFEST_BYTES,
            urgent=True,
        )
        if not data:
            raise Declined("unknown")
        return data

    async def _answer(self, peer: str, data: bytes) -> bytes:
        """Return the manifest or chunk, or nothing if it is not offered to `peer`."""
        await trio.lowlevel.checkpoint()
        item = msgspec.msgpack.decode(data, type=_BulkItem)
        source, audience = self._offers.get(item.transfer, (None, None))
        if source is None or (audience is not None and peer not in audience):
            return b""
        if not item.root:
            return codec.encode(source.manifest(item.transfer))
        return bytes(source.chunk(item.index)) if item.root == source.root else b""


class _BulkItem(msgspec.Struct):
    """A requested chunk, or the manifest if there is no root."""

    transfer: bytes
    root: bytes = b""
    index: int = 0
