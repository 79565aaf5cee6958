"""What the commands share: common options, and from options to a resolved configuration and a running node."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from swarmnode.errors import SwarmNodeError

if TYPE_CHECKING:
    from swarmnode.settings import Resolved

ConfigFile = Annotated[
    Path | None,
    Parameter(
        name=["--config", "-c"],
        help="TOML file. Without it, SWARMNODE_CONFIG or config.toml in the user's configuration directory.",
    ),
]
Setting = Annotated[
    list[str] | None,
    Parameter(name=["--set", "-s"], negative=(), help="key=value, any key of docs/configuration.md. May be repeated."),
]
DataDir = Annotated[
    Path | None,
    Parameter(name=["--data-dir", "-d"], help="Where this node keeps its identity and state. Short for --set node.data_dir=…"),
]
Peer = Annotated[
    list[str] | None,
    Parameter(name=["--peer", "-p"], negative=(), help="Multiaddr of a peer to join through, ending in /p2p/<peer id>. May be repeated."),
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="As JSON, for a script.")]
Url = Annotated[str, Parameter(name="--url")]
Flag = Annotated[bool, Parameter(negative=())]
Texts = Annotated[list[str] | None, Parameter(negative=())]


def run_resolved(resolved: Resolved, commands: Mapping[str, str] | None = None) -> int:
    """Run a node by the manifest that is chosen, if any, else by its configuration alone."""
    from swarmnode import membership, supervisor
    from swarmnode.observe import logs
    from swarmnode.tasks.client import prove_own
    from swarmnode.tasks.registry import check_names

    config = resolved.config
    check_names(config.task.names)
    prove_own(config.task.modules)
    logs.configure(config.log, "supervisor")
    agreed = membership.prepare(config)
    return supervisor.run(agreed, lambda: membership.refresh(config), commands or supervisor.COMMANDS)


def by_manifest(resolved: Resolved) -> Resolved:
    """What a node would run with: values of the manifest in place of what was set, and said to be from there."""
    from swarmnode import manifest_store
    from swarmnode.settings import Resolved

    try:
        agreed, changes = manifest_store.honoured(resolved.config)
    except SwarmNodeError as error:
        print(f"swarmnode: without the manifest: {error}", file=sys.stderr)
        return resolved
    return Resolved(agreed, {**resolved.origins, **{change.key: f"manifest {agreed.swarm.id[:16]}…" for change in changes}})


def say(told: Mapping[str, object], text: str, as_json: bool) -> int:
    """Print what a command did, for a script or for a person; the exit code of having done it."""
    print(json.dumps(told) if as_json else text)
    return 0


def quoted(value: object) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def load(
    config: Path | None, settings_: list[str] | None, data_dir: Path | None, peers: list[str] | None, *, tasks: bool = True
) -> Resolved:
    """The configuration of a command; its tasks are known then, those of the node's owner too, unless the command has nothing to do with
    them. Raises ConfigError."""
    from swarmnode import settings
    from swarmnode.tasks import registry

    overrides = list(settings_ or [])
    if data_dir is not None:
        overrides.append(f"node.data_dir={quoted(data_dir.absolute())}")
    if peers:
        overrides.append(f"network.initial_peers=[{', '.join(quoted(peer) for peer in peers)}]")
    resolved = settings.load(config, os.environ, overrides)
    if tasks:
        registry.install(resolved.config.task.modules, resolved.config.task.settings)
    return resolved
