"""Swarm ids, and the manifest of a swarm as a signed message. protocol/01-identity-and-join.md is
normative for names, order and bounds.

    envelope { key: founder, payload: the manifest's bytes, signature, codec: raw }
                                └── blake2b-256 after the domain ──▶ swarm id

The swarm id proves the payload, and the payload proves the signature. A manifest with its envelope
has at most 64 KiB, so its lists are bounded twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import BadMessage
from swarmnode.wire import ids, limits
from swarmnode.wire.codec import decode, encode
from swarmnode.wire.envelope import sign, verify
from swarmnode.wire.messages import Envelope, RolloutGroup, RolloutRules, SwarmManifest


def manifest_id(payload: bytes) -> bytes:
    """Return the 32-byte swarm id of a manifest: blake2b-256 over domain and exact bytes."""
    return hashlib.blake2b(
        ids.DOMAIN_SWARM_MANIFEST + payload, digest_size=limits.SWARM_ID_BYTES
    ).digest()


def swarm_id(name: str, tasks: Mapping[str, str]) -> bytes:
    """Return the 32-byte id of a swarm without a manifest, called `name`, that trains on `tasks`
    (task id → task version).

    It is blake2b-256 over the domain and the msgpack of `[name, [[task id, version], …] by task id,
    [protocol id, …]]`, so that nodes that cannot use each other's rollouts are in different swarms.
    Raises ValueError without a name or a task.
    """
    if not 1 <= len(name.encode()) <= limits.SWARM_NAME_BYTES:
        raise ValueError(f"a swarm's name is 1 to {limits.SWARM_NAME_BYTES} bytes")
    if not tasks:
        raise ValueError("a swarm has at least one task")
    # UTF-8 order equals code point order, so every language sorts alike
    description = [
        name,
        sorted([task, version] for task, version in tasks.items()),
        sorted(ids.PROTOCOLS),
    ]
    return hashlib.blake2b(
        ids.DOMAIN_SWARM + msgspec.msgpack.encode(description), digest_size=limits.SWARM_ID_BYTES
    ).digest()


class VerifiedManifest(msgspec.Struct, frozen=True):
    """A manifest with a verified signature."""

    swarm: bytes
    """The swarm id of the manifest, 32 bytes."""
    manifest: SwarmManifest
    signed: bytes
    """The envelope as received, which is stored and forwarded."""


def seal_manifest(manifest: SwarmManifest, private_key: Ed25519PrivateKey) -> VerifiedManifest:
    """Sign `manifest` as its founder. Raises BadMessage if other nodes would reject it."""
    payload = encode(manifest)
    return open_manifest(
        encode(sign(payload, private_key, ids.DOMAIN_MANIFEST, manifest_id(payload)))
    )


def open_manifest(signed: bytes) -> VerifiedManifest:
    """Verify the manifest in a stranger's envelope. Raises BadMessage with a reason of
    `codec.DECODE_REASONS`, or "signature"."""
    envelope = decode(signed, Envelope, limits.MANIFEST_BYTES)
    if envelope.codec != "raw":
        raise BadMessage("compression", "a manifest is not compressed")
    swarm = manifest_id(envelope.payload)
    verify(envelope, ids.DOMAIN_MANIFEST, swarm)
    manifest = decode(envelope.payload, SwarmManifest, limits.MANIFEST_BYTES)
    if manifest.founder != envelope.key:
        raise BadMessage("signature", "not signed by the founder's key")
    return VerifiedManifest(swarm, manifest, signed)


def follows(successor: VerifiedManifest, manifest: VerifiedManifest) -> bool:
    """Return True if `successor` names `manifest` as its predecessor, has the same founder and is
    newer."""
    new, old = successor.manifest, manifest.manifest
    return (
        new.predecessor == manifest.swarm
        and new.founder == old.founder
        and new.created_at > old.created_at
    )


def meets_rules(
    group: RolloutGroup, rules: RolloutRules, models: Collection[tuple[bytes, bytes]]
) -> bool:
    """Return True if the manifest allows a group.

    Args:
        group: a verified group.
        rules: the manifest's rules.
        models: (fingerprint, tokenizer) of each allowed model; empty allows any.
    """
    return (
        rules.min_completions <= len(group.completions) <= rules.max_completions
        and group.sampling.max_tokens <= rules.max_tokens
        and (group.sampling.temperature, group.sampling.top_p) == (rules.temperature, rules.top_p)
        and (not models or (group.model, group.tokenizer) in models)
    )
