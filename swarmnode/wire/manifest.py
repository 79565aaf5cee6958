"""What a swarm agrees on, in one message: protocol/01-identity-and-join.md is normative for names,
order and bounds.

    envelope { key: founder, payload: the manifest's bytes, signature, codec: raw }
                                └── blake2b-256 with the domain in front ──▶ swarm id

Whoever has the swarm id can check the payload, whoever has the payload can check the signature. A
manifest is at most 64 KiB, envelope and all, so the lists in it are bounded twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import BadMessage
from swarmnode.wire import ids, limits
from swarmnode.wire.codec import decode, encode
from swarmnode.wire.envelope import sign, verify
from swarmnode.wire.messages import Envelope, RolloutGroup, RolloutRules, SwarmManifest


def manifest_id(payload: bytes) -> bytes:
    """The 32-byte swarm id of a manifest: blake2b-256 over domain string and exact bytes. One byte
    differs: another swarm."""
    return hashlib.blake2b(
        ids.DOMAIN_SWARM_MANIFEST + payload, digest_size=limits.SWARM_ID_BYTES
    ).digest()


class Opened(msgspec.Struct, frozen=True):
    """A manifest whose signature was checked."""

    swarm: bytes
    """32 bytes: the swarm id that follows from it."""
    manifest: SwarmManifest
    signed: bytes
    """The envelope as received, which is what is stored and passed on."""


def seal_manifest(manifest: SwarmManifest, private_key: Ed25519PrivateKey) -> Opened:
    """`manifest` signed by its founder. Raises BadMessage when a node that receives it would not
    take it."""
    payload = encode(manifest)
    return open_manifest(
        encode(sign(payload, private_key, ids.DOMAIN_MANIFEST, manifest_id(payload)))
    )


def open_manifest(signed: bytes) -> Opened:
    """The manifest in an envelope of a stranger. Raises BadMessage with a reason of
    `codec.DECODE_REASONS`, or "signature"."""
    envelope = decode(signed, Envelope, limits.MANIFEST_BYTES)
    if envelope.codec != "raw":
        raise BadMessage("compression", "a manifest is not compressed")
    swarm = manifest_id(envelope.payload)
    verify(envelope, ids.DOMAIN_MANIFEST, swarm)
    manifest = decode(envelope.payload, SwarmManifest, limits.MANIFEST_BYTES)
    if manifest.founder != envelope.key:
        raise BadMessage("signature", "signed by another key than the founder's")
    return Opened(swarm, manifest, signed)


def follows(successor: Opened, manifest: Opened) -> bool:
    """Whether `successor` is one of `manifest`: it names it, is by the same founder, and
    younger."""
    new, old = successor.manifest, manifest.manifest
    return (
        new.predecessor == manifest.swarm
        and new.founder == old.founder
        and new.created_at > old.created_at
    )


def is_allowed(
    group: RolloutGroup, rules: RolloutRules, models: Collection[tuple[bytes, bytes]]
) -> bool:
    """Whether a group is one that the manifest allows. `models`: (fingerprint, tokenizer) of each;
    empty: any."""
    return (
        rules.min_completions <= len(group.completions) <= rules.max_completions
        and group.sampling.max_tokens <= rules.max_tokens
        and (group.sampling.temperature, group.sampling.top_p) == (rules.temperature, rules.top_p)
        and (not models or (group.model, group.tokenizer) in models)
    )
