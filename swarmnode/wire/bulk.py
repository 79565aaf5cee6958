"""Chunks of a transfer, the root over their hashes, and the bit mask of wanted chunks. Pure; see
protocol/05-bulk.md.

    size 2.5 MiB, chunk_bytes 1 MiB  →  3 chunks, the last of 0.5 MiB
    hashes = BLAKE3 of each chunk, concatenated; wanted = 0b101 requests chunks 0 and 2
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from blake3 import blake3

from swarmnode.errors import BadMessage
from swarmnode.wire import ids, limits
from swarmnode.wire.messages import BulkManifest


def count(manifest: BulkManifest) -> int:
    """Return the number of chunks."""
    return -(-manifest.size // manifest.chunk_bytes)


def span(manifest: BulkManifest, index: int) -> tuple[int, int]:
    """Return the first byte of chunk `index` and the byte after its last."""
    start = index * manifest.chunk_bytes
    return start, min(start + manifest.chunk_bytes, manifest.size)


def digest(data: bytes | memoryview) -> bytes:
    """Return the BLAKE3 hash of a chunk, 32 bytes. It takes a seventh of the time of BLAKE2b and
    releases the GIL."""
    return blake3(data).digest()


def expected(manifest: BulkManifest, index: int) -> bytes:
    """Return the hash that chunk `index` must have."""
    start = index * limits.CHUNK_HASH_BYTES
    return manifest.hashes[start : start + limits.CHUNK_HASH_BYTES]


def root(manifest: BulkManifest) -> bytes:
    """Return the 32-byte root of a transfer: a hash over its size, chunk size and chunk hashes,
    without the transfer id."""
    head = manifest.size.to_bytes(8, "big") + manifest.chunk_bytes.to_bytes(4, "big")
    return hashlib.blake2b(
        ids.DOMAIN_BULK + head + manifest.hashes, digest_size=limits.CHUNK_HASH_BYTES
    ).digest()


def check_manifest(manifest: BulkManifest, transfer: bytes, wanted_root: bytes | None) -> None:
    """Raise BadMessage("bounds") unless the manifest is of this transfer and has this root. None
    accepts any root."""
    if manifest.transfer != transfer or wanted_root not in (None, root(manifest)):
        raise BadMessage("bounds", "the manifest belongs to another transfer")


def check_chunk(manifest: BulkManifest, index: int, data: bytes | memoryview) -> None:
    """Raise BadMessage("hash") unless `data` is chunk `index`."""
    if digest(data) != expected(manifest, index):
        raise BadMessage("hash", f"chunk {index} does not have the hash of the manifest")


def pack_wanted(indices: Iterable[int], chunks: int) -> bytes:
    """Return a mask of `chunks` bits in which those of `indices` are set."""
    bits = bytearray(-(-chunks // 8))
    for index in indices:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def unpack_wanted(wanted: bytes, chunks: int) -> list[int]:
    """Return the indices of a mask, ascending. Raises BadMessage("bounds") unless it has exactly
    `chunks` bits, padded with zeros."""
    if len(wanted) != -(-chunks // 8) or int.from_bytes(wanted, "little") >> chunks:
        raise BadMessage("bounds", f"wanted does not have {chunks} bits")
    return [index for index in range(chunks) if wanted[index >> 3] >> (index & 7) & 1]
