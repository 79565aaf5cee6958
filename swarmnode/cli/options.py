"""What the commands share: their common options, and the way from options to a resolved
configuration."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from swarmnode import environment
from swarmnode.errors import ConfigError, Unavailable
from swarmnode.files import check_format
from swarmnode.install import install_command

if TYPE_CHECKING:
    from swarmnode.settings import Resolved


@Parameter(name="*")
@dataclass(frozen=True)
class NodeOptions:
    """Which node a command is about, and how it is configured."""

    config: Annotated[
        Path | None,
        Parameter(
            name=["--config", "-c"],
            help=(
                "TOML file. Without it, SWARMNODE_CONFIG or config.toml in the user's configuration"
                " directory."
            ),
        ),
    ] = None
    set_: Annotated[
        list[str] | None,
        Parameter(
            name=["--set", "-s"],
            negative=(),
            help="key=value, any key of docs/configuration.md, or an entry of a table:"
            """ 'task.settings."games:guess".turns=6'. May be repeated.""",
        ),
    ] = None
    data_dir: Annotated[
        Path | None,
        Parameter(
            name=["--data-dir", "-d"],
            help="Where this node keeps its identity and state. Short for --set node.data_dir=…",
        ),
    ] = None


NODE = NodeOptions()
Peer = Annotated[
    list[str] | None,
    Parameter(
        name=["--peer", "-p"],
        negative=(),
        help="Multiaddr of a peer to join through, ending in /p2p/<peer id>. May be repeated.",
    ),
]
Capacity = Annotated[
    str | None,
    Parameter(
        name="--stage-capacity",
        help=(
            "Memory that a stage of a crew may take here, e.g. 6GiB or a number of bytes. Short for"
            " --set stages.capacity=…"
        ),
    ),
]
SecretFile = Annotated[
    Path | None, Parameter(help="A private swarm's secret. It is copied into the data directory.")
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="As JSON, for a script.")]
Flag = Annotated[bool, Parameter(negative=())]
Texts = Annotated[list[str] | None, Parameter(negative=())]

UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
TRAINER = {
    "accelerate": "accelerate",
    "numpy": "numpy",
    "peft": "peft",
    "reasoning_gym": "reasoning-gym",
    "safetensors": "safetensors",
    "torch": "torch",
    "transformers": "transformers",
    "yaml": "pyyaml",
}
"""What the extra `train` brings, by the module to import: a bootstrap node does without."""


def load(
    node: NodeOptions,
    *,
    peers: list[str] | None = None,
    stage_capacity: str | None = None,
    tasks: bool = True,
    recipe: str | None = None,
) -> Resolved:
    """The configuration of a command; its tasks are known then, those of the node's owner too,
    unless the command has nothing to do with them. Raises ConfigError; StateError for a data
    directory of a newer version."""
    from swarmnode import settings
    from swarmnode.tasks import registry

    overrides = list(node.set_ or [])
    if node.data_dir is not None:
        overrides.append(f"node.data_dir={quoted(node.data_dir.absolute())}")
    if peers:
        overrides.append(f"network.initial_peers=[{', '.join(quoted(peer) for peer in peers)}]")
    if stage_capacity is not None:
        overrides.append(f"stages.capacity={size_bytes(stage_capacity)}")
    resolved = settings.load(node.config, os.environ, overrides, recipe)
    environment.provide_directories(resolved.config.node.data_dir)
    check_format(resolved.config.node.data_dir)
    if tasks:
        task = resolved.config.task
        registry.install(task.modules, task.settings, task.names)
        registry.install_datasets(task.datasets, resolved.config.node.data_dir / registry.DATASETS)
    return resolved


def keep_said(data_dir: Path, node: NodeOptions) -> None:
    """What was given with --set need not be typed again: the data directory keeps it. Raises
    Unavailable."""
    from swarmnode import settings

    if node.set_:
        settings.keep(data_dir, node.set_)


def needs_trainer(command: str) -> None:
    """Raises Unavailable, saying what to install, where packages are missing that only training
    needs."""
    missing = [
        package for module, package in TRAINER.items() if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise Unavailable(
            f"{command} needs {', '.join(missing)}: {install_command('train')} (`swarmnode"
            " bootstrap` does without)"
        )


def say(told: Mapping[str, object], text: str, as_json: bool) -> int:
    """Print what a command did, for a script or for a person; the exit code of having done it."""
    print(json.dumps(told) if as_json else text)
    return 0


def quoted(value: object) -> str:
    """A text as TOML has it."""
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def size_bytes(text: str) -> int:
    """`6GiB`, `500 MB` or `1048576` in bytes. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ConfigError(
            f"command line: {text!r} is not a size; write 6GiB, 500MB or a number of bytes"
        )
    count = int(float(found[1]) * UNITS[found[2].upper()])
    if not found[2] and 0 < count < UNITS["MB"]:
        raise ConfigError(
            f"command line: {text} is {count} bytes; write {text}GB or {text}GiB if that is meant"
        )
    return count
