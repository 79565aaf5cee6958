"""Vectors of bulk transfers, for `vectors.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.generate.frames import Vector, accepted, derived, pack, refusals, rejected
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

    def taken(name: str, **fields: Any) -> Vector:
        return accepted(name, "bulk_manifest", pack({**good, **fields}), {**good, **fields})

    def refused(reason: str, name: str, **fields: Any) -> Vector:
        return rejected(reason, name, pack({**good, **fields}), "bulk_manifest")

    yield taken("two chunks and a byte")
    yield taken("a single byte", size=1, hashes=bytes(32))
    yield taken("smallest chunks", size=8192, chunk_bytes=4096, hashes=bytes(64))
    yield refused("bounds", "nothing", size=0, hashes=b"")
    yield refused("bounds", "less than nothing", size=-1, hashes=b"")
    yield refused(
        "bounds", "a byte more than 32 GiB", size=32_768 * MIB + 1, hashes=bytes(32 * 32_768)
    )
    yield refused("bounds", "a chunk of 4095 bytes", chunk_bytes=4095)
    yield refused("bounds", "a chunk of a byte more than 1 MiB", chunk_bytes=MIB + 1)
    yield refused("bounds", "chunks of nothing", chunk_bytes=0)
    yield refused("bounds", "a hash too many", hashes=bytes(128))
    yield rejected("oversize", "1,048,705 bytes", bytes(1_048_705), "bulk_manifest")

    request = {"transfer": TRANSFER}
    yield accepted("a request for a manifest", "bulk_manifest_request", pack(request), request)
    yield rejected("oversize", "a request of 65 bytes", bytes(65), "bulk_manifest_request")
    for response in (
        {"status": "ok", "manifest": pack(good)},
        {"status": "unknown", "manifest": b""},
        {"status": "busy", "manifest": b""},
    ):
        yield accepted(
            f"a manifest's response: {response['status']}",
            "bulk_manifest_response",
            pack(response),
            response,
        )
    yield from refusals(
        "bulk_manifest_response",
        ("bounds", "ok without a manifest", pack({"status": "ok", "manifest": b""})),
        ("bounds", "unknown with a manifest", pack({"status": "unknown", "manifest": b"\0"})),
    )
    too_long = {"status": "ok", "manifest": bytes(1_048_705)}
    yield rejected(
        "bounds",
        "a manifest of 1,048,705 bytes in a response",
        pack(too_long),
        "bulk_manifest_response",
    )


def _requests() -> Iterator[Vector]:
    good: dict[str, Any] = {"transfer": TRANSFER, "root": ROOT, "wanted": b"\x05"}
    yield accepted("chunks 0 and 2", "bulk_request", pack(good), good)
    most = {**good, "wanted": b"\xff" * 4096}
    yield accepted("32,768 chunks", "bulk_request", pack(most), most)
    yield rejected(
        "bounds", "32,769 chunks", pack({**good, "wanted": bytes(4096) + b"\x01"}), "bulk_request"
    )
    yield rejected("bounds", "no bits", pack({**good, "wanted": b""}), "bulk_request")
    yield rejected("bounds", "no bit set", pack({**good, "wanted": bytes(4096)}), "bulk_request")
    yield rejected("oversize", "4,225 bytes", bytes(4225), "bulk_request")
    for response in (
        {"status": "ok", "size": 1},
        {"status": "ok", "size": 2**35},
        {"status": "unknown", "size": 0},
    ):
        yield accepted(
            f"{response['size']} bytes follow: {response['status']}",
            "bulk_response",
            pack(response),
            response,
        )
    yield from refusals(
        "bulk_response",
        ("bounds", "ok, and nothing follows", pack({"status": "ok", "size": 0})),
        ("bounds", "busy, and something follows", pack({"status": "busy", "size": 1})),
        ("bounds", "more than 32 GiB follow", pack({"status": "ok", "size": 2**35 + 1})),
        ("schema", "a status of its own", pack({"status": "later", "size": 0})),
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
