"""Signed envelopes, peer ids and content ids.

A signature covers `u8 length of domain ‖ domain ‖ swarm id (32) ‖ u8 codec ‖ payload exactly as
sent`. The domain prevents the use of a signature for another purpose, the swarm id its replay in
another swarm. The codec byte prevents a forwarder from changing the codec, which would make the
signer look like a sender of garbage. Nothing is re-encoded for verification.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmnode.errors import BadMessage
from swarmnode.wire import ids, limits
from swarmnode.wire.codec import compress, decode, encode
from swarmnode.wire.messages import Codec, Envelope, RolloutGroup, Session, Summary

_CODECS: dict[Codec, bytes] = {"raw": b"\x00", "zstd": b"\x01"}

_KEY_PREFIX = bytes.fromhex("0024 0801 1220")
"""Identity multihash (code 0, 36 bytes) of the protobuf `PublicKey{Type: Ed25519, Data: 32 bytes}`:
libp2p peer-ids specification."""

SMALL_ORDER_KEYS = frozenset(
    bytes.fromhex(text)
    for text in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)
"""Encodings of the eight points whose order divides 8, with the sign bit cleared. Anyone can sign
for such a key: a fixed signature is valid for at least one in eight messages. OpenSSL accepts these
keys."""


@dataclass(frozen=True)
class Credentials:
    """Key and swarm id with which a node signs."""

    key: Ed25519PrivateKey
    swarm: bytes
    """Swarm id, 32 bytes."""

    @property
    def peer(self) -> str:
        """Peer id of the node."""
        return peer_id(self.key.public_key().public_bytes_raw())


def sign(
    payload: bytes,
    private_key: Ed25519PrivateKey,
    domain: bytes,
    swarm: bytes,
    codec: Codec = "raw",
) -> Envelope:
    """Return an envelope around `payload`, which the caller has already compressed with `codec`.
    `swarm` is the 32-byte swarm id."""
    signature = private_key.sign(_signed(payload, domain, swarm, codec))
    return Envelope(
        key=private_key.public_key().public_bytes_raw(),
        payload=payload,
        signature=signature,
        codec=codec,
    )


def verify(envelope: Envelope, domain: bytes, swarm: bytes) -> None:
    """Raise BadMessage("signature") unless `envelope.key` signed this payload for `domain` in
    `swarm`."""
    signed = _signed(envelope.payload, domain, swarm, envelope.codec)
    if not _is_signature(envelope.key, signed, envelope.signature):
        raise BadMessage("signature")


def seal(
    message: RolloutGroup, private_key: Ed25519PrivateKey, domain: bytes, swarm: bytes
) -> bytes:
    """Return a signed envelope around `message` as bytes, compressed if that makes it shorter."""
    payload = encode(message)
    compressed = compress(payload)
    if len(compressed) < len(payload):
        return encode(sign(compressed, private_key, domain, swarm, "zstd"))
    return encode(sign(payload, private_key, domain, swarm))


def open_raw(frame: bytes, domain: bytes, swarm: bytes, limit: int) -> Envelope:
    """Decode and verify the uncompressed envelope in `frame`, of at most `limit` bytes. Raises
    BadMessage with a reason of `codec.DECODE_REASONS`, or "signature"."""
    envelope = decode(frame, Envelope, limit)
    if envelope.codec != "raw":
        raise BadMessage("compression", "the payload of this envelope must not be compressed")
    verify(envelope, domain, swarm)
    return envelope


# -- sessions and summaries, which a peer that forwards them cannot forge


def seal_session(session: Session, private_key: Ed25519PrivateKey, swarm: bytes) -> bytes:
    """Return a signed session as bytes; `swarm` is the 32-byte swarm id."""
    return encode(sign(encode(session), private_key, ids.DOMAIN_SESSION, swarm))


def open_session(frame: bytes, swarm: bytes) -> tuple[str, Session]:
    """Return the signer's peer id and the session. Raises BadMessage with a reason of
    `codec.DECODE_REASONS`, or "signature"."""
    envelope = open_raw(frame, ids.DOMAIN_SESSION, swarm, limits.SIGNED_SESSION_BYTES)
    return peer_id(envelope.key), decode(envelope.payload, Session, limits.SIGNED_SESSION_BYTES)


def seal_summary(summary: Summary, private_key: Ed25519PrivateKey, swarm: bytes) -> bytes:
    """Return a signed summary as bytes; `swarm` is the 32-byte swarm id."""
    return encode(sign(encode(summary), private_key, ids.DOMAIN_SUMMARY, swarm))


def open_summary(frame: bytes, swarm: bytes) -> tuple[str, Summary]:
    """Return the signer's peer id and the summary. Raises BadMessage with a reason of
    `codec.DECODE_REASONS`, or "signature"."""
    envelope = open_raw(frame, ids.DOMAIN_SUMMARY, swarm, limits.SUMMARY_BYTES)
    return peer_id(envelope.key), decode(envelope.payload, Summary, limits.SUMMARY_BYTES)


# -- ids


@functools.lru_cache(4096)
def peer_id(key: bytes) -> str:
    """Return the libp2p peer id (base58, `12D3Koo…`) of a raw 32-byte Ed25519 public key."""
    return base58.b58encode(_KEY_PREFIX + key).decode()


def peer_key(peer: str) -> bytes | None:
    """Return the raw 32-byte Ed25519 public key in a peer id; None for other text and for a key of
    small order."""
    if len(peer) > limits.PEER_ID_BYTES:
        return None
    try:
        key = base58.b58decode(peer)[len(_KEY_PREFIX) :]
    except ValueError:
        return None
    canonical = len(key) == limits.KEY_BYTES and peer_id(key) == peer
    return key if canonical and not is_small_order(key) else None


def is_small_order(key: bytes) -> bool:
    """Return True if `key` (32 bytes) encodes a point of small order, which cannot serve as an
    identity."""
    return key[:-1] + bytes([key[-1] & 0x7F]) in SMALL_ORDER_KEYS


def _is_signature(key: bytes, data: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return not is_small_order(key)


def content_id(envelope: bytes) -> bytes:
    """Return the content id of an envelope: blake2b-256 of its bytes, 32 bytes."""
    return hashlib.blake2b(envelope, digest_size=limits.CONTENT_ID_BYTES).digest()


def _signed(payload: bytes, domain: bytes, swarm: bytes, codec: Codec) -> bytes:
    if len(swarm) != limits.SWARM_ID_BYTES:
        raise ValueError(f"a swarm id is {limits.SWARM_ID_BYTES} bytes")
    return b"".join((bytes([len(domain)]), domain, swarm, _CODECS[codec], payload))
