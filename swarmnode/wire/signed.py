"""Signed sessions and summaries, which a peer that forwards them cannot forge.

Sessions reveal two processes with the same key (protocol/01, section 9); summaries describe nodes
for display (section 10).
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.wire import ids, limits
from swarmnode.wire.codec import decode, encode
from swarmnode.wire.envelope import open_raw, peer_id, sign
from swarmnode.wire.messages import Session, Summary


def seal_session(session: Session, private_key: Ed25519PrivateKey, swarm: bytes) -> bytes:
    """Return a signed session as bytes; `swarm` is the 32-byte swarm id."""
    return encode(sign(encode(session), private_key, ids.DOMAIN_SESSION, swarm))


def open_session(frame: bytes, swarm: bytes) -> tuple[str, Session]:
    """Return the signer's peer id and the session. Raises BadMessage with a reason of
    `codec.DECODE_REASONS`, or "signature"."""
    envelope = open_raw(frame, ids.DOMAIN_SESSION, swarm, limits.SESSION_REQUEST_BYTES)
    return peer_id(envelope.key), decode(envelope.payload, Session, limits.SESSION_REQUEST_BYTES)


def seal_summary(summary: Summary, private_key: Ed25519PrivateKey, swarm: bytes) -> bytes:
    """Return a signed summary as bytes; `swarm` is the 32-byte swarm id."""
    return encode(sign(encode(summary), private_key, ids.DOMAIN_SUMMARY, swarm))


def open_summary(frame: bytes, swarm: bytes) -> tuple[str, Summary]:
    """Return the signer's peer id and the summary. Raises BadMessage with a reason of
    `codec.DECODE_REASONS`, or "signature"."""
    envelope = open_raw(frame, ids.DOMAIN_SUMMARY, swarm, limits.SUMMARY_BYTES)
    return peer_id(envelope.key), decode(envelope.payload, Summary, limits.SUMMARY_BYTES)
