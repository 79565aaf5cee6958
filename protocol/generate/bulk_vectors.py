"""Vectors of bulk transfers, for `vectors.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.generate.frames import Vector, derived, encoded, pack, refusals
from swarmnode.wire import bulk
from swarmnode.wire.messages import BulkManifest

TRANSFER = b"\x55" * 32
ROOT = b"\x66" * 32
MIB = 2**20


def messages() -> Iterator[Vector]:
    yield from _manifests()
    yield from _requests()


def _manifests() -> Iterator[Vector]:
    good: dict[str, Any] = {
        "transfer": TRANSFER,
        "size": 2 * MIB + 1,
        "chunk_bytes": MIB,
        "hashes": bytes(96),
    }
    smallest = {"size": 8192, "chunk_bytes": 4096, "hashes": bytes(64)}
    yield encoded("two chunks and a byte", "bulk_manifest", good)
    yield encoded("a single byte", "bulk_manifest", {**good, "size": 1, "hashes": bytes(32)})
    yield encoded("smallest chunks", "bulk_manifest", {**good, **smallest})
    most = {"size": 32_768 * MIB + 1, "hashes": bytes(32 * 32_768)}
    yield from refusals(
        "bulk_manifest",
        ("bounds", "nothing", {**good, "size": 0, "hashes": b""}),
        ("bounds", "a byte more than 32 GiB", {**good, **most}),
        ("bounds", "a chunk of 4095 bytes", {**good, "chunk_bytes": 4095}),
        ("bounds", "a chunk of a byte more than 1 MiB", {**good, "chunk_bytes": MIB + 1}),
        ("bounds", "chunks of nothing", {**good, "chunk_bytes": 0}),
        ("bounds", "a hash too many", {**good, "hashes": bytes(128)}),
        ("oversize", "1,048,705 bytes", bytes(1_048_705)),
    )
    yield encoded("a request for a manifest", "bulk_manifest_request", {"transfer": TRANSFER})
    yield from refusals("bulk_manifest_request", ("oversize", "a request of 65 bytes", bytes(65)))
    for status, manifest in (("ok", pack(good)), ("unknown", b""), ("busy", b"")):
        response = {"status": status, "manifest": manifest}
        yield encoded(f"a manifest's response: {status}", "bulk_manifest_response", response)
    too_long = {"status": "ok", "manifest": bytes(1_048_705)}
    yield from refusals(
        "bulk_manifest_response",
        ("bounds", "ok without a manifest", {"status": "ok", "manifest": b""}),
        ("bounds", "unknown with a manifest", {"status": "unknown", "manifest": b"\0"}),
        ("bounds", "a manifest of 1,048,705 bytes in a response", too_long),
    )


def _requests() -> Iterator[Vector]:
    good: dict[str, Any] = {"transfer": TRANSFER, "root": ROOT, "wanted": b"\x05"}
    yield encoded("chunks 0 and 2", "bulk_request", good)
    yield encoded("32,768 chunks", "bulk_request", {**good, "wanted": b"\xff" * 4096})
    yield from refusals(
        "bulk_request",
        ("bounds", "32,769 chunks", {**good, "wanted": bytes(4096) + b"\x01"}),
        ("bounds", "no bits", {**good, "wanted": b""}),
        ("bounds", "no bit set", {**good, "wanted": bytes(4096)}),
        ("oversize", "4,225 bytes", bytes(4225)),
    )
    for status, size in (("ok", 1), ("ok", 2**35), ("unknown", 0)):
        response = {"status": status, "size": size}
        yield encoded(f"{size} bytes follow: {status}", "bulk_response", response)
    yield from refusals(
        "bulk_response",
        ("bounds", "ok, and nothing follows", {"status": "ok", "size": 0}),
        ("bounds", "busy, and something follows", {"status": "busy", "size": 1}),
        ("bounds", "more than 32 GiB follow", {"status": "ok", "size": 2**35 + 1}),
        ("schema", "a status of its own", {"status": "later", "size": 0}),
    )


def roots() -> Iterator[Vector]:
    """Yield roots of contents that are easy to make: zeros, and counting bytes."""
    for name, content, chunk_bytes in (
        ("one byte", b"\0", 4096),
        ("a chunk and a byte", bytes(4097), 4096),
        ("the same in one chunk", bytes(4097), 8192),
        ("0 to 255, 48 times, in three chunks", bytes(range(256)) * 48, 4096),
    ):
        pieces = [
            content[start : start + chunk_bytes] for start in range(0, len(content), chunk_bytes)
        ]
        hashes = b"".join(map(bulk.digest, pieces))
        manifest = BulkManifest(TRANSFER, len(content), chunk_bytes, hashes)
        given = {"size": len(content), "chunk_bytes": chunk_bytes, "hashes": hashes.hex()}
        yield derived(f"root of {name}", "bulk_root", given, bulk.root(manifest).hex())
