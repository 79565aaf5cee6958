"""What the commands share: common options, and from options to a resolved configuration and a running node."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from swarmnode.errors import ConfigError, SwarmNodeError

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
Capacity = Annotated[
    str | None,
    Parameter(
        name="--stage-capacity",
        help="Memory that a stage of a crew may take here, e.g. 6GiB or a number of bytes. Short for --set stages.capacity=…",
    ),
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="As JSON, for a script.")]
Url = Annotated[str, Parameter(name="--url")]
Flag = Annotated[bool, Parameter(negative=())]
Texts = Annotated[list[str] | None, Parameter(negative=())]

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def run_resolved(resolved: Resolved, commands: Mapping[str, str] | None = None) -> int:
    """Run a node by the manifest that is chosen, if any, else by its configuration alone."""
    from swarmnode.daemon import supervisor
    from swarmnode.observe import logs
    from swarmnode.swarm import membership
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
    from swarmnode.settings import Resolved
    from swarmnode.swarm import manifest_store

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


def size_bytes(text: str) -> int:
    """`6GiB`, `500 MB` or `1048576` in bytes. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ConfigError(f"command line: {text!r} is not a size; write 6GiB, 500MB or a number of bytes")
    return int(float(found[1]) * UNITS[found[2].upper()])


def load(
    config: Path | None, settings_: list[str] | None, data_dir: Path | None, peers: list[str] | None, *, tasks: bool = True,
    stage_capacity: str | None = None,
) -> Resolved:  # fmt: skip
    """The configuration of a command; its tasks are known then, those of the node's owner too, unless the command has nothing to do with
    them. Raises ConfigError."""
    from swarmnode import settings
    from swarmnode.tasks import registry

    overrides = list(settings_ or [])
    if data_dir is not None:
        overrides.append(f"node.data_dir={quoted(data_dir.absolute())}")
    if peers:
        overrides.append(f"network.initial_peers=[{', '.join(quoted(peer) for peer in peers)}]")
    if stage_capacity is not None:
        overrides.append(f"stages.capacity={size_bytes(stage_capacity)}")
    resolved = settings.load(config, os.environ, overrides)
    if tasks:
        registry.install(resolved.config.task.modules, resolved.config.task.settings)
        registry.install_datasets(resolved.config.task.datasets, resolved.config.node.data_dir / registry.DATASETS)
    return resolved
