"""Manifests without a model: signed by a known key, over two builtin tasks."""

from __future__ import annotations

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.generate.frames import KEY
from swarmnode.config import Config
from swarmnode.swarm import manifest
from swarmnode.wire.manifest import VerifiedManifest, seal_manifest
from swarmnode.wire.messages import ModelRef

CONFIG = Config.model_validate(
    {"swarm": {"name": "test"}, "task": {"names": ["builtin/copy", "builtin/sum"]}}
)
MODEL = ModelRef("embedded", "", b"\x11" * 32, b"\x22" * 32)
CREATED_AT = 1_790_000_000_000


def founded(
    key: Ed25519PrivateKey = KEY, config: Config = CONFIG, **changes: object
) -> VerifiedManifest:
    """Return a manifest of `config`. changes: terms, or else fields of the manifest."""
    given = {
        name: changes.pop(name)
        for name in ("created_at", "secret", "completions")
        if name in changes
    }
    terms = manifest.Terms(**{"created_at": CREATED_AT, **given})  # type: ignore[arg-type]
    models = changes.pop("models", [MODEL])
    drafted = manifest.draft(config, key.public_key().public_bytes_raw(), models, terms)  # type: ignore[arg-type]
    return seal_manifest(msgspec.structs.replace(drafted, **changes), key)


def succeeding(
    before: VerifiedManifest, key: Ed25519PrivateKey = KEY, later: int = 1, **changes: object
) -> VerifiedManifest:
    """Return a successor of `before`, signed `later` milliseconds after it."""
    return founded(
        key, predecessor=before.swarm, created_at=before.manifest.created_at + later, **changes
    )
