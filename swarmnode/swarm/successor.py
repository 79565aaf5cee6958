"""Successors of a manifest: which terms they keep, how they differ, and whether one is pending."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from swarmnode.swarm.manifest import AGREED_KEYS
from swarmnode.wire.messages import ModelRef, SwarmManifest

DRAFT_KEYS = (
    *AGREED_KEYS,
    "policy.model",
    "policy.revision",
    "sharing.groups_per_second",
    "swarm.name",
    "task.names",
    "training.max_completion_length",
    "training.num_generations",
    "training.temperature",
    "training.top_p",
)
"""Configuration keys that a manifest is drafted from."""


class SuccessorStatistics(msgspec.Struct, frozen=True):
    """A known successor that this node has not adopted; the operator decides."""

    swarm: str = ""
    """Swarm id in hex; empty if none is pending."""
    name: str = ""
    problems: list[str] = []
    """Reasons why this node cannot follow it with its configuration; empty if it can."""
    waiting: int = 0
    """1 if a successor is pending."""


def successor_addresses(before: SwarmManifest, peer: str, own: list[str]) -> list[str]:
    """Return the bootstrap addresses of a manifest, with those of the founder `peer` replaced by
    its current addresses `own`."""
    founder_addresses = [
        address for address in before.bootstrap if address.rpartition("/p2p/")[2] == peer
    ]
    others = [address for address in before.bootstrap if address not in founder_addresses]
    return [*(own if founder_addresses else []), *others]


def differences(before: SwarmManifest, after: SwarmManifest) -> list[str]:
    """Return one line per difference in the order of a manifest's fields, without signing time and
    signature."""
    was, now = _described(before), _described(after)
    return [
        f"+ {what}: {now[what]}"
        if what not in was
        else f"- {what}: {was[what]}"
        if what not in now
        else f"~ {what}: {was[what]} → {now[what]}"
        for what in dict.fromkeys([*was, *now])
        if was.get(what) != now.get(what)
    ]


def _described(manifest: SwarmManifest) -> Mapping[str, str]:
    rules = {
        f"rollouts.{name}": str(value)
        for name, value in msgspec.to_builtins(manifest.rollouts).items()
    }
    return {
        "name": repr(manifest.name),
        "minimum version": manifest.minimum_version,
        **{f"protocol {name}": "required" for name in manifest.protocols},
        **(
            {f"model {model.name}": _model(model) for model in manifest.models} or {"models": "any"}
        ),
        **{
            f"task {task.id}": (
                f"version {task.version}{f' {task.settings}' if task.settings != '{}' else ''}"
            )
            for task in manifest.tasks
        },
        **rules,
        **{setting.key: setting.value for setting in manifest.settings},
        **{f"bootstrap {address}": "named" for address in manifest.bootstrap},
        **({f"member {peer}": "allowed" for peer in manifest.access.members} or {"members": "any"}),
        "secret": f"needed ({manifest.access.secret.hex()[:16]}…)"
        if manifest.access.secret
        else "none",
    }


def _model(model: ModelRef) -> str:
    return (
        f"{model.revision[:16] + ' ' if model.revision else ''}{model.fingerprint.hex()[:16]}…,"
        f" tokenizer {model.tokenizer.hex()[:8]}…"
    )
