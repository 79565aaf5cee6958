"""The manifest protocol, `/swarmnode/manifest/1`: a manifest is asked for by its swarm id, so that
no peer can pass off another.

we ─ swarm id ─▶ peer        before we belong to any swarm
we ◀─ the signed manifest and a successor, if there is one ─ peer
id equal? ─ signature valid? ─ successor: same founder, later, names it ─▶ Found
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from swarmnode.errors import BadMessage, Incompatible
from swarmnode.p2p.api import Requests
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.manifest import Opened, follows, open_manifest
from swarmnode.wire.messages import ManifestRequest, ManifestResponse

DEADLINE = 10.0
CONCURRENT = 8

Lookup = Callable[[bytes], tuple[bytes, bytes]]
"""Swarm id → (signed manifest, signed successor), each empty when there is none."""


@dataclasses.dataclass(frozen=True)
class Found:
    manifest: Opened
    successor: Opened | None


def serve(requests: Requests, lookup: Lookup) -> None:
    """Answers other nodes from `lookup`."""

    async def answer(peer: str, data: bytes) -> bytes:
        request = codec.decode(data, ManifestRequest, limits.MANIFEST_REQUEST_BYTES)
        return codec.encode(ManifestResponse(*lookup(request.swarm)))

    requests.serve(
        ids.MANIFEST_PROTOCOL,
        answer,
        max_request_bytes=limits.MANIFEST_REQUEST_BYTES,
        max_response_bytes=limits.MANIFEST_RESPONSE_BYTES,
        concurrent=CONCURRENT,
        per_peer=2,
        deadline=DEADLINE,
    )


async def fetch(requests: Requests, peer: str, swarm: bytes) -> Found:
    """The manifest of `swarm` from a connected peer, verified, with its successor if the peer knows
    one.

    Raises Incompatible if the peer does not have it, BadMessage if it sent something else,
    PeerTimeout or PeerError if nothing.
    """
    request = codec.encode(ManifestRequest(swarm))
    data = await requests.request(
        peer,
        ids.MANIFEST_PROTOCOL,
        request,
        deadline=DEADLINE,
        max_response_bytes=limits.MANIFEST_RESPONSE_BYTES,
    )
    response = codec.decode(data, ManifestResponse, limits.MANIFEST_RESPONSE_BYTES)
    if not response.manifest:
        raise Incompatible(f"the peer does not have the manifest of swarm {swarm.hex()}")
    manifest = open_manifest(response.manifest)
    if manifest.swarm != swarm:
        raise BadMessage(
            "mismatch", f"a manifest that hashes to {manifest.swarm.hex()}, not to {swarm.hex()}"
        )
    if not response.successor:
        return Found(manifest, None)
    successor = open_manifest(response.successor)
    if not follows(successor, manifest):
        raise BadMessage("mismatch", "a successor that does not follow")
    return Found(manifest, successor)
