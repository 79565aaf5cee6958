"""The manifest protocol, `/swarmnode/manifest/1`: fetch a manifest by its swarm id.

    this node ─ swarm id ─▶ peer                     before it belongs to any swarm
    this node ◀─ signed manifest, signed successor ─ peer
    id equal? ─ signature valid? ─ successor: same founder, later, names the manifest ─▶ Found

The swarm id is the hash of the manifest, so no peer can substitute another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from swarmnode.errors import BadMessage, Incompatible
from swarmnode.p2p.api import Requests
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.manifest import VerifiedManifest, follows, open_manifest
from swarmnode.wire.messages import ManifestRequest, ManifestResponse

DEADLINE = 10.0
CONCURRENT = 8

Lookup = Callable[[bytes], tuple[bytes, bytes]]
"""Swarm id → (signed manifest, signed successor); each is empty if there is none."""


@dataclasses.dataclass(frozen=True)
class FetchedManifest:
    """A verified manifest and its successor, if the peer knows one."""

    manifest: VerifiedManifest
    successor: VerifiedManifest | None


def serve(requests: Requests, lookup: Lookup) -> None:
    """Answer other nodes from `lookup`."""

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


async def fetch(requests: Requests, peer: str, swarm: bytes) -> FetchedManifest:
    """Fetch and verify the manifest of `swarm` and its successor from a connected peer.

    Raises:
        Incompatible: the peer does not have it.
        BadMessage: the peer sent something else.
        PeerTimeout: the deadline passed.
        PeerError: any other failure.
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
        return FetchedManifest(manifest, None)
    successor = open_manifest(response.successor)
    if not follows(successor, manifest):
        raise BadMessage("mismatch", "a successor that does not follow")
    return FetchedManifest(manifest, successor)
