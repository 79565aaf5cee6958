"""Options that commands share, and functions that load the configuration and print results."""

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
    """Options that select and configure a node."""

    config: Annotated[
        Path | None,
        Parameter(
            name=["--config", "-c"],
            help=(
                "TOML file; by default SWARMNODE_CONFIG, or config.toml in the user's configuration"
                " directory."
            ),
        ),
    ] = None
    set_: Annotated[
        list[str] | None,
        Parameter(
            name=["--set", "-s"],
            negative=(),
            help="key=value with a key of docs/configuration.md, or an entry of a table:"
            """ 'task.settings."games:guess".turns=6'. May be repeated.""",
        ),
    ] = None
    data_dir: Annotated[
        Path | None,
        Parameter(
            name=["--data-dir", "-d"],
            help="Directory of the node's identity and state. Short for --set node.data_dir=…",
        ),
    ] = None


NODE = NodeOptions()
Peer = Annotated[
    list[str] | None,
    Parameter(
        name=["--peer", "-p"],
        negative=(),
        help="Multiaddr of a bootstrap peer, ending in /p2p/<peer id>. May be repeated.",
    ),
]
Capacity = Annotated[
    str | None,
    Parameter(
        name="--stage-capacity",
        help=(
            "Memory for a stage of a crew, e.g. 6GiB or a number of bytes. Short for --set"
            " stages.capacity=…"
        ),
    ),
]
SecretFile = Annotated[
    Path | None,
    Parameter(
        help="File with the secret of a private swarm. It is copied into the data directory."
    ),
]
LAN_ADDRESS = 'network.listen_addrs=["/ip4/0.0.0.0/tcp/0"]'
Lan = Annotated[
    bool,
    Parameter(
        name="--lan",
        negative=(),
        help=f"Listen on all interfaces. Nodes in one local network then find each other. Short for"
        f" --set '{LAN_ADDRESS}'",
    ),
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")]
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
TRAINER_PACKAGES = {
    "accelerate": "accelerate",
    "numpy": "numpy",
    "peft": "peft",
    "reasoning_gym": "reasoning-gym",
    "safetensors": "safetensors",
    "torch": "torch",
    "transformers": "transformers",
    "yaml": "pyyaml",
}
"""Module to import → package, for the packages of the extra `train`."""


def load(
    node: NodeOptions,
    *,
    peers: list[str] | None = None,
    stage_capacity: str | None = None,
    tasks: bool = True,
    recipe: str | None = None,
) -> Resolved:
    """Load the configuration of a command and register its tasks.

    Args:
        tasks: False for a command that needs no tasks.

    Raises:
        ConfigError: The configuration is invalid.
        StateError: A newer version of swarmnode has written the data directory.
    """
    from swarmnode import settings
    from swarmnode.tasks import registry

    overrides = list(node.set_ or [])
    if node.data_dir is not None:
        overrides.append(f"node.data_dir={toml_string(node.data_dir.absolute())}")
    if peers:
        overrides.append(f"network.initial_peers=[{', '.join(map(toml_string, peers))}]")
    if stage_capacity is not None:
        overrides.append(f"stages.capacity={parse_size(stage_capacity)}")
    resolved = settings.load(node.config, os.environ, overrides, recipe)
    environment.provide_directories(resolved.config.node.data_dir)
    check_format(resolved.config.node.data_dir)
    if tasks:
        task = resolved.config.task
        registry.install(task.modules, task.settings, task.names)
        registry.install_datasets(task.datasets, resolved.config.node.data_dir / registry.DATASETS)
    return resolved


def on_lan(node: NodeOptions, lan: bool) -> NodeOptions:
    """Return the options, with the setting of `--lan` if `lan` is True. `--set` overrides it."""
    if not lan:
        return node
    return NodeOptions(node.config, [LAN_ADDRESS, *(node.set_ or [])], node.data_dir)


def load_data_dir(node: NodeOptions) -> Path:
    """Return the data directory of a command that needs no tasks."""
    return load(node, tasks=False).config.node.data_dir


def save_overrides(data_dir: Path, node: NodeOptions) -> None:
    """Save the settings of `--set` in the data directory.

    Raises:
        Unavailable: The file cannot be written.
    """
    from swarmnode import settings

    if node.set_:
        settings.save(data_dir, node.set_)


def require_trainer(command: str) -> None:
    """Raise Unavailable if packages for training are missing. A bootstrap node does not need
    them."""
    missing = [
        package
        for module, package in TRAINER_PACKAGES.items()
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise Unavailable(
            f"{command} needs {', '.join(missing)}: {install_command('train')} (`swarmnode"
            " bootstrap` does not need them)"
        )


def print_result(result: Mapping[str, object], text: str, as_json: bool) -> int:
    """Print the result of a command as JSON or as text, and return exit code 0."""
    print(json.dumps(result) if as_json else text)
    return 0


def toml_string(value: object) -> str:
    """Return a value as a TOML string."""
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def parse_size(text: str) -> int:
    """Return the number of bytes in `6GiB`, `500 MB` or `1048576`.

    Raises:
        ConfigError: `text` is not a size, or a small number without a unit.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ConfigError(
            f"command line: {text!r} is not a size; write 6GiB, 500MB or a number of bytes"
        )
    count = int(float(found[1]) * UNITS[found[2].upper()])
    if not found[2] and 0 < count < UNITS["MB"]:
        raise ConfigError(
            f"command line: {text} means {count} bytes; write {text}GB or {text}GiB for more"
        )
    return count
