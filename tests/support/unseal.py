"""The group in an envelope, in one call."""

from __future__ import annotations

from swarmnode.wire import limits
from swarmnode.wire.codec import decode, decode_payload
from swarmnode.wire.envelope import verify
from swarmnode.wire.messages import Envelope, RolloutGroup


def unseal(frame: bytes, domain: bytes, swarm: bytes, limit: int) -> tuple[Envelope, RolloutGroup]:
    """Decode and verify the envelope in `frame`, of at most `limit` bytes, then decode its group.

    Raises:
        BadMessage: The reason is one of `codec.DECODE_REASONS`, or `signature`.
    """
    envelope = decode(frame, Envelope, limit)
    verify(envelope, domain, swarm)
    return envelope, decode_payload(envelope, limits.GROUP_BYTES)
