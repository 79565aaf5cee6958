"""Whom to ask first. The same answer on both ends of an edge, another one every epoch, and not for
anybody to choose."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

BUCKET_SECONDS = 60.0
"""An edge keeps its rank so long. Clocks that differ cost a few mutual first choices, nothing
else."""

_DOMAIN = b"swarmnode/pairing/1"


def epoch_bucket(unix_seconds: float, seconds: float = BUCKET_SECONDS) -> int:
    """Number of the epoch, at least 0."""
    return max(0, int(unix_seconds // seconds))


def edge_rank(bucket: int, one: str, other: str, swarm: bytes) -> bytes:
    """16 bytes that order edges; symmetric in the two peer ids. swarm: 32-byte swarm id."""
    low, high = sorted((one.encode(), other.encode()))
    content = _DOMAIN + bucket.to_bytes(8, "big") + len(low).to_bytes(2, "big") + low + high + swarm
    return hashlib.blake2b(content, digest_size=16).digest()


def partner_order(own: str, candidates: Iterable[str], bucket: int, swarm: bytes) -> list[str]:
    """`candidates` without `own` and duplicates, lowest edge first.

    An edge that is lowest for both its ends is proposed by both at once and always pairs. A peer
    could mint identities until one ranks low for a victim, but only for one epoch at a time, and
    what it gains is one exchange, which the gate bounds.
    """
    return sorted(set(candidates) - {own}, key=lambda peer: edge_rank(bucket, own, peer, swarm))
