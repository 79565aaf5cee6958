"""Files of weights: those that peers may fetch from us, for how long, and their end; and those that
we fetch. trio; no torch."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec
import trio

from swarmnode.errors import BadMessage, LocalError, PeerError, PeerTimeout
from swarmnode.p2p.api import Bulk, Declined
from swarmnode.p2p.bulk import BulkSource, FileSink
from swarmnode.wire import limits

log = logging.getLogger(__name__)

MANIFEST_SECONDS: Final = 10.0
SLOWEST: Final = 1e6
"""Bytes per second. A transfer that is slower than this all the time is given up, here and where it
is served."""
OFFER_SECONDS: Final = 600.0
PATIENCE_SECONDS: Final = 60.0
"""A transfer may lag behind a steady one by so much: one that sends as little as it may is given up
then, and not at its deadline."""
PACE_INTERVAL: Final = 5.0
EXPIRY_SECONDS: Final = 2.0
RETRY_SECONDS: Final = (0.2, 5.0)
"""Pause before what broke off is asked for again: the first, doubled each time in which nothing new
comes, and the longest."""
LEFTOVERS: Final = ("out-*", "in-*", "state-*")


def offer_seconds(size: int) -> float:
    """For how long so many bytes of ours can be fetched, at least: in time for whoever is slow, or
    has them from us slowly."""
    return OFFER_SECONDS + size / SLOWEST


class LocalPayload(msgspec.Struct, frozen=True):
    """A file of ours, hashed, that can be offered."""

    source: BulkSource
    path: Path


class PayloadOffer(msgspec.Struct, frozen=True):
    """A file of ours that can be fetched now: `transfer` and `root` are what `network.bulk` knows
    it by."""

    transfer: bytes
    root: bytes
    size: int
    path: Path
    until: float
    """When it ends, on trio's clock."""


class RemotePayload(msgspec.Struct, frozen=True):
    """A file of a peer's, as it was announced."""

    peer: str
    transfer: bytes
    root: bytes
    size: int


class PayloadStore:
    """Everything in `directory` may be deleted while the node is down. A file that was offered is
    deleted when its last offer ends."""

    def __init__(self, bulk: Bulk, directory: Path) -> None:
        self._bulk = bulk
        self._directory = directory
        self._uses: dict[Path, int] = {}
        self._payloads: dict[Path, LocalPayload] = {}
        """Those of files with a use. Each maps its file, and holds its disk space."""
        self._offers: dict[bytes, PayloadOffer] = {}
        self._sinks: dict[Path, FileSink] = {}

    async def run(self) -> None:
        """End offers when their time is over, until cancelled."""
        while True:
            await trio.sleep(EXPIRY_SECONDS)
            self.expire(trio.current_time())

    def clean(self) -> None:
        """Delete what an earlier process left."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for pattern in LEFTOVERS:
            for path in self._directory.glob(pattern):
                path.unlink(missing_ok=True)

    # ---- ours ------------------------------------------------------------------------------------

    async def open(self, name: str) -> LocalPayload | None:
        """The file that our trainer has written, hashed in a thread; None when it is not there,
        empty or elsewhere."""
        path = Path(name)
        if not name or path.parent != self._directory:
            return None
        try:
            return LocalPayload(await trio.to_thread.run_sync(BulkSource.from_file, path), path)
        except (LocalError, ValueError):
            return None

    def offer(
        self, payload: LocalPayload, until: float, audience: Collection[str] | None
    ) -> PayloadOffer:
        """Serve it until `until` (trio's clock), to the peers in `audience` or to whoever asks."""
        transfer = secrets.token_bytes(limits.TRANSFER_BYTES)
        offer = PayloadOffer(
            transfer, payload.source.root, payload.source.size, payload.path, until
        )
        self._bulk.offer(transfer, payload.source, audience=audience)
        self._uses[offer.path] = self._uses.get(offer.path, 0) + 1
        self._payloads[offer.path] = payload
        self._offers[transfer] = offer
        return offer

    def offer_again(
        self, offer: PayloadOffer, until: float, audience: Collection[str] | None
    ) -> PayloadOffer | None:
        """Offer the same file to others too. Return None if it is deleted."""
        payload = self._payloads.get(offer.path)
        return None if payload is None else self.offer(payload, until, audience)

    def is_offered(self, offer: PayloadOffer) -> bool:
        return offer.transfer in self._offers

    def extend(self, offer: PayloadOffer, until: float) -> bool:
        """Serve it until `until` at least. False where it has ended."""
        current = self._offers.get(offer.transfer)
        if current is not None:
            self._offers[offer.transfer] = msgspec.structs.replace(
                current, until=max(current.until, until)
            )
        return current is not None

    def withdraw(self, offer: PayloadOffer) -> None:
        if self._offers.pop(offer.transfer, None) is None:
            return
        self._bulk.withdraw(offer.transfer)
        self._uses[offer.path] -= 1
        if not self._uses[offer.path]:
            del self._uses[offer.path], self._payloads[offer.path]
            offer.path.unlink(missing_ok=True)

    def shorten(self, offer: PayloadOffer, until: float) -> None:
        """Serve it until `until` at most."""
        if (current := self._offers.get(offer.transfer)) is not None:
            until = min(current.until, until)
            self._offers[offer.transfer] = msgspec.structs.replace(current, until=until)

    def expire(self, now: float) -> None:
        """End what has been offered for long enough."""
        for offer in [offer for offer in self._offers.values() if now >= offer.until]:
            self.withdraw(offer)

    # ---- others' ---------------------------------------------------------------------------------

    def new_path(self) -> Path:
        """A name for something that is to be fetched."""
        return self._directory / f"in-{secrets.token_hex(8)}.bin"

    def discard(self, path: Path) -> None:
        """Delete what was fetched."""
        with contextlib.suppress(OSError):
            os.unlink(path)

    async def fetch(self, remote: RemotePayload, path: Path, limit: int, deadline: float) -> None:
        """Fetch `remote`, at most `limit` bytes, into `path` before `deadline` (trio's clock),
        taking up again what broke off, for as long as it comes fast enough for that: a connection
        that is gone may be back in half a minute.

        Raises BadMessage for what cannot be honest, Declined, PeerTimeout, PeerError, Unavailable
        (our disk).
        """
        manifest = await self._bulk.manifest(
            remote.peer, remote.transfer, deadline=MANIFEST_SECONDS, root=remote.root
        )
        if manifest.size != remote.size:
            raise PeerError(
                f"{remote.peer} announced {remote.size} bytes and offers {manifest.size}"
            )
        sink = self._sinks[path] = await trio.to_thread.run_sync(
            lambda: FileSink(manifest, path, limit=limit)
        )
        try:
            await self._at_pace(sink, remote, deadline)
        finally:
            del self._sinks[path]

    def lacking(self, path: Path) -> int | None:
        """Chunks that are still to come of what is being fetched into `path`; None where nothing
        is."""
        sink = self._sinks.get(path)
        return None if sink is None else len(sink.missing())

    async def _at_pace(self, sink: FileSink, remote: RemotePayload, deadline: float) -> None:
        """Fill `sink`, or raise what `fetch` raises."""
        began, chunks = trio.current_time(), len(sink.missing())
        failures: list[Exception] = []

        async def watch() -> None:
            while True:
                await trio.sleep(PACE_INTERVAL)
                if trio.current_time() > began + PATIENCE_SECONDS + (deadline - began) * (
                    1 - len(sink.missing()) / chunks
                ):
                    filling.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with trio.CancelScope() as filling:
                try:
                    await self._fill(sink, remote, deadline)
                except Exception as failure:  # out of a nursery it would come in a group  # noqa: BLE001
                    failures.append(failure)
            nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]
        if filling.cancelled_caught:
            raise PeerTimeout(f"weights of {remote.peer} come too slowly")

    async def _fill(self, sink: FileSink, remote: RemotePayload, deadline: float) -> None:
        pause = RETRY_SECONDS[0]
        while True:
            left = deadline - trio.current_time()
            if left <= 0:
                raise PeerTimeout(f"weights of {remote.peer} did not arrive in time")
            lacking = len(sink.missing())
            try:
                usual = self._bulk.deadline(remote.peer, remote.size)
                await self._bulk.fetch(
                    remote.peer, remote.transfer, sink.manifest, sink, deadline=min(left, usual)
                )
                return
            except BadMessage:
                raise
            except PeerError as error:
                if isinstance(error, Declined) and error.status != "busy":
                    raise
                log.debug("weights of %s broke off: %s", remote.peer, error)
            pause = (
                min(2 * pause, RETRY_SECONDS[1])
                if len(sink.missing()) == lacking
                else RETRY_SECONDS[0]
            )
            await trio.sleep(min(pause, max(0.0, deadline - trio.current_time())))
