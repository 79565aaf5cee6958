"""Catching up: which neighbour's state a node without one takes. Pure; no torch. `wire.envelope`
signs.

Replicas of a swarm are never equal, so neighbours cannot agree on hashes. They can agree on the
progress of the swarm: at least two neighbours claim to have reached the second highest of the
claimed outer steps, so a single liar cannot raise it. The state comes from a neighbour that claims
exactly this outer step. Its tensors must have the hashes of that neighbour's manifest, and it stays
on probation in the gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.weights.layout import Codec, Layout, payload_limit
from swarmnode.weights.rule import LARGEST_OUTER_STEP
from swarmnode.wire.fields import check_counter, check_length

ASK = 3
"""Number of neighbours that are asked."""
AGREE = 2
"""Number of neighbours that must have reached the outer step of the state."""
HASH_BYTES = 32
STATE_CODEC: Final[Codec] = "bfloat16"
"""Codec of a state. Its error is about as large as the difference between replicas late in
training. δ is not sent: a few outer steps restore it."""
WRITTEN_PER_SECOND: Final = 1e8
"""Least bytes per second that a trainer rounds, hashes and writes while it trains."""


def writing_seconds(layout: Layout) -> float:
    """Return the time that a neighbour needs to write a state of this layout, seconds."""
    return payload_limit(layout, STATE_CODEC) / WRITTEN_PER_SECOND


class TensorHash(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name and hash of one tensor."""

    name: str
    phi: bytes
    """32 bytes: SHA-256 of φ, bfloat16 little-endian."""


class StateManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="state"):
    """Description of a node's slow weights, sent in a signed envelope."""

    fingerprint: bytes
    """32 bytes."""
    outer_step: int
    created_at: int
    """Unix time, milliseconds."""
    tensors: list[TensorHash]
    """Sorted by name."""


def check_manifest(manifest: StateManifest, names: list[str]) -> None:
    """Check that a manifest lists exactly the tensors `names`, sorted, with hashes of the right
    length and counters in range.

    Raises:
        BadMessage: It does not (`bounds`).
    """
    check_length("fingerprint", manifest.fingerprint, HASH_BYTES)
    if [tensor.name for tensor in manifest.tensors] != sorted(names):
        raise BadMessage("bounds", "tensors")
    for tensor in manifest.tensors:
        check_length("phi", tensor.phi, HASH_BYTES)
    check_counter("outer_step", manifest.outer_step)
    check_counter("created_at", manifest.created_at)


def agreed_source(
    manifests: Mapping[str, StateManifest], fingerprint: bytes, agree: int = AGREE
) -> str | None:
    """Return the peer whose state should be taken, or None if fewer than `agree` compatible
    neighbours made a plausible claim.

    If several peers claim the agreed outer step, the lowest peer id is returned. The caller chooses
    at random which peers it asks.
    """
    plausible = {
        peer: m
        for peer, m in manifests.items()
        if m.fingerprint == fingerprint and m.outer_step <= LARGEST_OUTER_STEP
    }
    claims = sorted(((m.outer_step, peer) for peer, m in plausible.items()), reverse=True)
    if len(claims) < agree:
        return None
    step = claims[agree - 1][0]
    return min(peer for claimed, peer in claims if claimed == step)
