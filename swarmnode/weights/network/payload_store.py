"""Files of weights: this node's, which peers may fetch until an offer expires, and those that this
node fetches from peers. trio; no torch."""

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
"""Bytes per second. Both sides cancel a transfer that is slower than this on average."""
OFFER_SECONDS: Final = 600.0
MAX_DELAY_SECONDS: Final = 60.0
"""Longest delay of a transfer behind a steady one that ends at the deadline. A peer that sends
almost nothing is thus cancelled after this time instead of at the deadline."""
PACE_INTERVAL: Final = 5.0
EXPIRY_SECONDS: Final = 2.0
RETRY_SECONDS: Final = (0.2, 5.0)
"""First and longest pause before a broken transfer is resumed. The pause doubles after each attempt
without a new chunk."""
LEFTOVERS: Final = ("out-*", "in-*", "state-*")


def offer_seconds(size: int) -> float:
    """Return the least time for which a file of `size` bytes is offered, in seconds. A transfer at
    SLOWEST bytes per second fits into it."""
    return OFFER_SECONDS + size / SLOWEST


class LocalPayload(msgspec.Struct, frozen=True):
    """A hashed file of this node."""

    source: BulkSource
    path: Path


class PayloadOffer(msgspec.Struct, frozen=True):
    """A file of this node that peers can fetch now. `network.bulk` identifies it by `transfer` and
    `root`."""

    transfer: bytes
    root: bytes
    size: int
    path: Path
    until: float
    """End of the offer, on trio's clock."""


class RemotePayload(msgspec.Struct, frozen=True):
    """A peer's file, as the peer announced it."""

    peer: str
    transfer: bytes
    root: bytes
    size: int
    outer_step: int
    """Outer steps that its weights have taken, by the peer's claim."""


class PayloadStore:
    """Offers, fetches and deletes files of weights in `directory`.

    A file is deleted when its offer ends. All files in `directory` may be deleted while the
    node is stopped.
    """

    def __init__(self, bulk: Bulk, directory: Path) -> None:
        self._bulk = bulk
        self._directory = directory
        self._offers: dict[bytes, PayloadOffer] = {}

    async def run(self) -> None:
        """End expired offers until cancelled."""
        while True:
            await trio.sleep(EXPIRY_SECONDS)
            self.expire(trio.current_time())

    def clean(self) -> None:
        """Delete the files of an earlier process."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for pattern in LEFTOVERS:
            for path in self._directory.glob(pattern):
                path.unlink(missing_ok=True)

    # ---- this node's files -----------------------------------------------------------------------

    async def open(self, name: str) -> LocalPayload | None:
        """Hash a file that the trainer has written, in a thread. Return None if it is missing,
        empty or in another directory."""
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
        """Offer a payload until `until` (trio's clock) to the peers in `audience`, or to every peer
        if that is None."""
        transfer = secrets.token_bytes(limits.TRANSFER_BYTES)
        offer = PayloadOffer(
            transfer, payload.source.root, payload.source.size, payload.path, until
        )
        self._bulk.offer(transfer, payload.source, audience=audience)
        self._offers[transfer] = offer
        return offer

    def is_offered(self, offer: PayloadOffer) -> bool:
        return offer.transfer in self._offers

    def extend(self, offer: PayloadOffer, until: float) -> bool:
        """Prolong an offer to at least `until`. Return False if it has ended."""
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
        offer.path.unlink(missing_ok=True)

    def expire(self, now: float) -> None:
        """End the offers that have expired."""
        for offer in [offer for offer in self._offers.values() if now >= offer.until]:
            self.withdraw(offer)

    # ---- peers' files ----------------------------------------------------------------------------

    def new_path(self) -> Path:
        """Return an unused path for a fetched file."""
        return self._directory / f"in-{secrets.token_hex(8)}.bin"

    def discard(self, path: Path) -> None:
        """Delete a fetched file."""
        with contextlib.suppress(OSError):
            os.unlink(path)

    async def fetch(self, remote: RemotePayload, path: Path, limit: int, deadline: float) -> None:
        """Fetch `remote` into `path`. A broken transfer is resumed while it is on time, because the
        connection may be restored soon.

        Args:
            remote: The peer's file.
            path: Where to write it.
            limit: Most bytes.
            deadline: On trio's clock.

        Raises:
            BadMessage: No honest peer sends this.
            Declined: The peer refuses.
            PeerTimeout: The transfer is too slow.
            PeerError: Any other failure of the peer.
            Unavailable: This node's disk failed.
        """
        manifest = await self._bulk.manifest(
            remote.peer, remote.transfer, deadline=MANIFEST_SECONDS, root=remote.root
        )
        if manifest.size != remote.size:
            raise PeerError(
                f"{remote.peer} announced {remote.size} bytes and offers {manifest.size}"
            )
        sink = await trio.to_thread.run_sync(lambda: FileSink(manifest, path, limit=limit))
        await self._fill_in_time(sink, remote, deadline)

    async def _fill_in_time(self, sink: FileSink, remote: RemotePayload, deadline: float) -> None:
        """Fill `sink`, and cancel a transfer that is more than MAX_DELAY_SECONDS late. Raises the
        errors of `fetch`."""
        began, chunks = trio.current_time(), len(sink.missing())
        failures: list[Exception] = []

        async def watch() -> None:
            while True:
                await trio.sleep(PACE_INTERVAL)
                if trio.current_time() > began + MAX_DELAY_SECONDS + (deadline - began) * (
                    1 - len(sink.missing()) / chunks
                ):
                    filling.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with trio.CancelScope() as filling:
                try:
                    await self._fill(sink, remote, deadline)
                except Exception as failure:  # a nursery would wrap it in a group  # noqa: BLE001
                    failures.append(failure)
            nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]
        if filling.cancelled_caught:
            raise PeerTimeout(f"transfer of weights from {remote.peer} is too slow")

    async def _fill(self, sink: FileSink, remote: RemotePayload, deadline: float) -> None:
        pause = RETRY_SECONDS[0]
        while True:
            left = deadline - trio.current_time()
            if left <= 0:
                raise PeerTimeout(f"weights of {remote.peer} did not arrive in time")
            missing = len(sink.missing())
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
                log.debug("transfer of weights broke off: peer=%s error=%s", remote.peer, error)
            pause = (
                min(2 * pause, RETRY_SECONDS[1])
                if len(sink.missing()) == missing
                else RETRY_SECONDS[0]
            )
            await trio.sleep(min(pause, max(0.0, deadline - trio.current_time())))
