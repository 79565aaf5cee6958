"""The content of transfers: immutable sources, and sinks that know which chunks they have.

Both are views of memory or of a mapped file, so that no transfer is copied as a whole.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Protocol

from swarmnode.errors import BadMessage, Unavailable
from swarmnode.wire import bulk, limits
from swarmnode.wire.bounds import check_message
from swarmnode.wire.messages import BulkManifest

Buffer = bytes | bytearray | memoryview | mmap.mmap


class BulkSource:
    """Bytes to offer, which must not change while they are offered.

    The constructor hashes all of them: call it in a thread if there are many.

    Args:
        data: Any buffer. It is referenced, not copied. Peers that receive changed bytes reject this
            node as a liar.
        chunk_bytes: 4 KiB to 1 MiB.

    Raises:
        ValueError: `data` is empty or has more than 32,768 chunks.
    """

    def __init__(self, data: Buffer, *, chunk_bytes: int = limits.BULK_CHUNK_BYTES) -> None:
        self._view = memoryview(data).cast("B").toreadonly()
        self.size = len(self._view)
        self.chunk_bytes = chunk_bytes
        if not limits.BULK_MIN_CHUNK_BYTES <= chunk_bytes <= limits.BULK_CHUNK_BYTES:
            raise ValueError(f"chunks are 4 KiB to 1 MiB, not {chunk_bytes} bytes")
        if not 1 <= self.size <= chunk_bytes * limits.BULK_CHUNKS:
            raise ValueError(f"{self.size} bytes do not make 1 to {limits.BULK_CHUNKS} chunks")
        pieces = (
            self._view[start : start + chunk_bytes] for start in range(0, self.size, chunk_bytes)
        )
        self.hashes = b"".join(map(bulk.digest, pieces))
        self.root = bulk.root(self.manifest(bytes(limits.TRANSFER_BYTES)))

    @classmethod
    def from_file(cls, path: Path, *, chunk_bytes: int = limits.BULK_CHUNK_BYTES) -> BulkSource:
        """Map a file.

        The file may be replaced by a rename. It must not be truncated: a read of a missing page
        ends the process.

        Raises:
            Unavailable: The file cannot be read.
            ValueError: The file is empty.
        """
        try:
            with open(path, "rb") as file:
                return cls(
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), chunk_bytes=chunk_bytes
                )
        except OSError as error:
            raise Unavailable(f"cannot read {path}: {error.strerror}") from error

    def manifest(self, transfer: bytes) -> BulkManifest:
        return BulkManifest(transfer, self.size, self.chunk_bytes, self.hashes)

    def chunk(self, index: int) -> memoryview:
        """Return a read-only view of a chunk. The last chunk may be shorter than `chunk_bytes`."""
        start = index * self.chunk_bytes
        return self._view[start : start + self.chunk_bytes]


class BulkSink(Protocol):
    """Destination of a fetch. The fetch calls it in the event loop."""

    size: int
    """Total bytes, equal to the manifest's size."""

    def missing(self) -> list[int]:
        """Return the chunks that are still to be fetched, ascending."""

    def view(self, index: int) -> memoryview:
        """Return the writable memory of a chunk. Its bytes are valid only after `accept`."""

    def accept(self, index: int) -> None:
        """Mark a chunk as present: the bytes in its view have the hash of the manifest."""


class MemorySink:
    """Sink in memory.

    Args:
        limit: Bytes. A larger manifest is refused before anything is allocated.
        memory: Writable buffer of exactly the manifest's size. The default is an anonymous map,
            whose pages the kernel zeroes when they are written; a bytearray would be zeroed at
            once, in the event loop.

    Raises:
        BadMessage: The manifest contradicts itself, or is above the limit ("oversize").
        ValueError: `memory` does not fit.
    """

    def __init__(self, manifest: BulkManifest, *, limit: int, memory: Buffer | None = None) -> None:
        _check_size(manifest, limit)
        self.manifest = manifest
        self.size = manifest.size
        self.data = memoryview(mmap.mmap(-1, manifest.size) if memory is None else memory).cast("B")
        if len(self.data) != self.size or self.data.readonly:
            raise ValueError(f"{self.size} writable bytes are needed")
        self._have = bytearray(bulk.count(manifest))

    def missing(self) -> list[int]:
        return [index for index, have in enumerate(self._have) if not have]

    def view(self, index: int) -> memoryview:
        start, end = bulk.span(self.manifest, index)
        return self.data[start:end]

    def accept(self, index: int) -> None:
        self._have[index] = 1

    @property
    def complete(self) -> bool:
        return all(self._have)


class FileSink(MemorySink):
    """Sink in a mapped file. Chunks of an earlier process with the right hash are present at once.

    The constructor hashes an existing file: call it in a thread. It reserves the disk space,
    because a mapped file on a full disk would end the process.

    Raises:
        BadMessage: See `MemorySink`.
        Unavailable: The disk is full, or the file cannot be used.
    """

    def __init__(self, manifest: BulkManifest, path: Path, *, limit: int) -> None:
        _check_size(manifest, limit)
        self.path = path
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                resumed = os.fstat(descriptor).st_size == manifest.size
                if not resumed:
                    os.truncate(descriptor, 0)
                    os.posix_fallocate(descriptor, 0, manifest.size)
                self._map = mmap.mmap(file.fileno(), manifest.size)
        except OSError as error:
            raise Unavailable(f"cannot use {path}: {error.strerror}") from error
        super().__init__(manifest, limit=limit, memory=self._map)
        if resumed:
            for index in range(bulk.count(manifest)):
                if bulk.digest(self.view(index)) == bulk.expected(manifest, index):
                    self.accept(index)

    def flush(self) -> None:
        """Write everything to disk."""
        self._map.flush()


def _check_size(manifest: BulkManifest, limit: int) -> None:
    check_message(manifest)
    if manifest.size > limit:
        raise BadMessage("oversize", f"{manifest.size} bytes announced, {limit} allowed")
