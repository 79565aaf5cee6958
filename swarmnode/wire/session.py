"""One run of one process under a key, signed: how two processes with the same key are found out (protocol/01, section 9)."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import BadMessage
from swarmnode.wire import ids, limits
from swarmnode.wire.codec import decode, encode
from swarmnode.wire.envelope import peer_id, sign, verify
from swarmnode.wire.messages import Envelope, Session


def seal_session(session: Session, private_key: Ed25519PrivateKey, swarm: bytes) -> bytes:
    """The bytes of a signed session; `swarm` is the 32-byte swarm id."""
    return encode(sign(encode(session), private_key, ids.DOMAIN_SESSION, swarm))


def open_session(frame: bytes, swarm: bytes) -> tuple[str, Session]:
    """The peer id that signed it, and the session. Raises BadMessage with a reason of `codec.DECODE_REASONS`, or "signature"."""
    envelope = decode(frame, Envelope, limits.SESSION_REQUEST_BYTES)
    if envelope.codec != "raw":
        raise BadMessage("compression", "a session is not compressed")
    verify(envelope, ids.DOMAIN_SESSION, swarm)
    return peer_id(envelope.key), decode(envelope.payload, Session, limits.SESSION_REQUEST_BYTES)
