"""What is sent and where it goes: sources that do not change, and sinks that know which chunks they
have.

Both are memory, the process's own or a file's, so that a socket reads into it and writes out of it
without a copy of the whole.
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
    """Bytes that do not change from now on. Hashes all of them when it is made: do that in a thread
    if there are many.

    data: bytes, or anything with a buffer; kept, not copied. Whoever changes it afterwards will be
    taken for a liar by peers. chunk_bytes: 4 KiB to 1 MiB. Raises ValueError for nothing at all,
    and for more than 32,768 chunks.
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
        """A file, mapped: its pages come and go as they are read. It may be replaced by renaming
        another over it, never cut short: reading what is no longer there would end the process.
        Raises Unavailable if it cannot be read, ValueError if it is empty."""
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
        """Read-only; shorter than `chunk_bytes` for the last."""
        start = index * self.chunk_bytes
        return self._view[start : start + self.chunk_bytes]


class BulkSink(Protocol):
    """Where a fetch puts what it receives. Called in the event loop or in a worker thread, `accept`
    in one at a time."""

    size: int
    """Bytes in all; that of the manifest."""

    def missing(self) -> list[int]:
        """Chunks that are still to be fetched, ascending."""

    def view(self, index: int) -> memoryview:
        """Where chunk `index` belongs: writable, of its length. What is in there counts for nothing
        before `accept`."""

    def accept(self, index: int) -> None:
        """What is in `view(index)` is the chunk that the manifest announced."""


class MemorySink:
    """A manifest's bytes in memory.

    limit: bytes; a manifest of more raises BadMessage("oversize") before anything is allocated.
    memory: to be filled instead of pages of its own (which the kernel hands out as they are
    written; a bytearray would be zeroed first, in the event loop); writable and exactly as long,
    ValueError if not.
    """

    def __init__(self, manifest: BulkManifest, *, limit: int, memory: Buffer | None = None) -> None:
        check_message(manifest)
        if manifest.size > limit:
            raise BadMessage("oversize", f"{manifest.size} bytes announced, {limit} allowed")
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
    """A manifest's bytes in a file of their own, mapped. What an earlier process left at `path` is
    taken up where its hashes are right.

    That hashes the whole file if there is one: make it in a thread. The disk space is taken at
    once, because a mapped file that finds the disk full ends the process. Raises
    BadMessage("oversize") as MemorySink does, Unavailable if there is no room or no access.
    """

    def __init__(self, manifest: BulkManifest, path: Path, *, limit: int) -> None:
        check_message(manifest)
        if manifest.size > limit:
            raise BadMessage("oversize", f"{manifest.size} bytes announced, {limit} allowed")
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
        """Returns once everything is on disk."""
        self._map.flush()
