"""Transfers: chunks, the root over their hashes, and the bits that say which are wanted. Pure; see
protocol/05-bulk.md.

size 2.5 MiB, chunk_bytes 1 MiB  →  3 chunks, the last of 0.5 MiB; hashes = BLAKE3 of each, joined;
wanted = 0b101 asks for 0 and 2
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from blake3 import blake3

from swarmnode.errors import BadMessage
from swarmnode.wire import ids, limits
from swarmnode.wire.messages import BulkManifest


def count(manifest: BulkManifest) -> int:
    """Chunks."""
    return -(-manifest.size // manifest.chunk_bytes)


def span(manifest: BulkManifest, index: int) -> tuple[int, int]:
    """First byte of chunk `index`, and the one after its last."""
    start = index * manifest.chunk_bytes
    return start, min(start + manifest.chunk_bytes, manifest.size)


def digest(data: bytes | memoryview) -> bytes:
    """32 bytes: BLAKE3 of a chunk, which takes a seventh of the time of BLAKE2b. Lets other threads
    run while it computes."""
    return blake3(data).digest()


def expected(manifest: BulkManifest, index: int) -> bytes:
    """The hash that chunk `index` must have."""
    start = index * limits.CHUNK_HASH_BYTES
    return manifest.hashes[start : start + limits.CHUNK_HASH_BYTES]


def root(manifest: BulkManifest) -> bytes:
    """32 bytes that stand for the content: its size, how it is cut, and every chunk's hash; not the
    transfer's id."""
    head = manifest.size.to_bytes(8, "big") + manifest.chunk_bytes.to_bytes(4, "big")
    return hashlib.blake2b(
        ids.DOMAIN_BULK + head + manifest.hashes, digest_size=limits.CHUNK_HASH_BYTES
    ).digest()


def pack_wanted(indices: Iterable[int], chunks: int) -> bytes:
    """`chunks` bits, those of `indices` set."""
    bits = bytearray(-(-chunks // 8))
    for index in indices:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def unpack_wanted(wanted: bytes, chunks: int) -> list[int]:
    """The indices, ascending. Raises BadMessage("bounds") when there are not exactly `chunks` bits,
    padded with zeros."""
    if len(wanted) != -(-chunks // 8) or int.from_bytes(wanted, "little") >> chunks:
        raise BadMessage("bounds", f"wanted has not {chunks} bits")
    return [index for index in range(chunks) if wanted[index >> 3] >> (index & 7) & 1]
