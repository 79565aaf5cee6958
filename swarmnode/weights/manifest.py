"""Catching up: which neighbour's state a node without one takes. Pure, no torch; signing is
`wire.envelope`'s.

Replicas of a gossip swarm are never equal, so neighbours cannot agree on hashes. What they can
agree on is how far the swarm has come: the second highest of the claimed outer steps is one that at
least two claim to have reached, and a single liar cannot raise it. The state then comes from the
neighbour that claims just that, is held to the hashes of that neighbour's own manifest, and stays
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
"""Neighbours to ask."""
AGREE = 2
HASH_BYTES = 32
STATE_CODEC: Final[Codec] = "bfloat16"
"""What slow weights travel in to a newcomer: it errs by about what late replicas differ by. δ is
not sent: it has grown again after a few outer steps."""

WRITTEN_PER_SECOND: Final = 1e8
"""Bytes of slow weights that a trainer rounds, hashes and writes beside its work, at least."""


def writing_seconds(layout: Layout) -> float:
    """How much longer than that of a small policy a neighbour's answer may take, because it has to
    be written first."""
    return payload_limit(layout, STATE_CODEC) / WRITTEN_PER_SECOND


class TensorHash(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    phi: bytes
    """32 bytes: SHA-256 of φ, bfloat16 little-endian."""


class StateManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="state"):
    """A node's description of its slow weights; it travels signed."""

    fingerprint: bytes
    """32 bytes."""
    outer_step: int
    created_at: int
    """Unix time, milliseconds."""
    tensors: list[TensorHash]
    """Sorted by name."""


def check_manifest(manifest: StateManifest, names: list[str]) -> None:
    """Raises BadMessage("bounds") unless `manifest` speaks of exactly our tensors, sorted, with
    whole hashes and a counter in range."""
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
    """The peer to take the state from, or None where fewer than `agree` compatible neighbours made
    a plausible claim.

    Among several at the agreed step the lowest peer id; who is asked is the caller's random choice.
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
