"""Files of weights that peers may fetch, for how long, and their end. trio; no torch."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import trio

from swarmnode.errors import BadMessage, LocalError, PeerError, PeerTimeout
from swarmnode.p2p.api import Declined
from swarmnode.p2p.bulk import BulkSource, FileSink
from swarmnode.wire import limits

MANIFEST_SECONDS = 10.0
TRIES = 5
RETRY_SECONDS = 0.2
LEFTOVERS = ("out-*", "in-*", "state-*")


class Offer(msgspec.Struct, frozen=True):
    """Something that can be fetched now: `transfer` and `root` are what `network.bulk` knows it by."""

    transfer: bytes
    root: bytes
    size: int
    path: Path


class Offers:
    """`bulk`: `network.bulk`. Every file handed to `offer` is deleted when its last offer ends."""

    def __init__(self, bulk: Any, directory: Path) -> None:
        self._bulk = bulk
        self.directory = directory
        self._uses: dict[Path, int] = {}
        self._until: dict[bytes, tuple[float, Offer]] = {}

    def clean(self) -> None:
        """Delete what an earlier process left."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for pattern in LEFTOVERS:
            for path in self.directory.glob(pattern):
                path.unlink(missing_ok=True)

    async def open(self, path: Path) -> BulkSource | None:
        """The file, hashed in a thread; None when it is not there or empty."""
        try:
            return await trio.to_thread.run_sync(BulkSource.from_file, path)
        except (LocalError, ValueError):
            return None

    def offer(self, source: BulkSource, path: Path, until: float, audience: Collection[str] | None) -> Offer:
        """Serve it until `until` (trio's clock)."""
        offer = Offer(secrets.token_bytes(limits.TRANSFER_BYTES), source.root, source.size, path)
        self._bulk.offer(offer.transfer, source, audience=audience)
        self._uses[path] = self._uses.get(path, 0) + 1
        self._until[offer.transfer] = (until, offer)
        return offer

    def withdraw(self, offer: Offer) -> None:
        if self._until.pop(offer.transfer, None) is None:
            return
        self._bulk.withdraw(offer.transfer)
        self._uses[offer.path] -= 1
        if not self._uses[offer.path]:
            del self._uses[offer.path]
            offer.path.unlink(missing_ok=True)

    def discard(self, path: Path) -> None:
        """Delete a file that nobody is offered."""
        if path not in self._uses and path.parent == self.directory:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def expire(self, now: float) -> None:
        for until, offer in list(self._until.values()):
            if now >= until:
                self.withdraw(offer)

    async def fetch(self, peer: str, transfer: bytes, root: bytes, size: int, path: Path, limit: int, late: float) -> None:
        """Pull `size` bytes of `peer` into `path` before `late`, taking up again what broke off.

        Raises BadMessage for what cannot be honest, Declined, PeerTimeout, PeerError, Unavailable (our disk).
        """
        manifest = await self._bulk.manifest(peer, transfer, deadline=MANIFEST_SECONDS, root=root)
        if manifest.size != size:
            raise PeerError(f"{peer} announced {size} bytes and offers {manifest.size}")
        sink = await trio.to_thread.run_sync(lambda: FileSink(manifest, path, limit=limit))
        tries = 0
        while True:
            left = late - trio.current_time()
            if left <= 0:
                raise PeerTimeout(f"weights of {peer} did not arrive in time")
            try:
                await self._bulk.fetch(peer, transfer, manifest, sink, deadline=min(left, self._bulk.deadline(peer, size)))
                return
            except BadMessage:
                raise
            except PeerError as error:
                tries += 1
                if tries == TRIES or (isinstance(error, Declined) and error.status != "busy"):
                    raise
            await trio.sleep(RETRY_SECONDS)
