"""Checks whether this node can take part in a swarm by its manifest. Pure, except for reading the
secret file.

The model itself is checked after the trainer has hashed it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from swarmnode import __version__, settings
from swarmnode.config import Config
from swarmnode.errors import ConfigError, Refused, Unavailable
from swarmnode.gguf import SMOLLM2, SMOLLM2_COMMAND, is_gguf, smollm2_is_installed
from swarmnode.model_defaults import EMBEDDED
from swarmnode.swarm.manifest import (
    AGREED_KEYS,
    chosen_model,
    commitment,
    members,
    settings_text,
    swarm_secret,
)
from swarmnode.tasks import owner_code
from swarmnode.tasks.registry import DATASET_NAME, ENVIRONMENT_NAME, REFUSED, TASKS, task_version
from swarmnode.wire import ids
from swarmnode.wire.manifest import VerifiedManifest
from swarmnode.wire.messages import Access, SwarmManifest, TaskEntry

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def can_honour(
    manifest: SwarmManifest, config: Config, peer: str = "", *, trains: bool = True
) -> list[str]:
    """Return the reasons why this node cannot take part, one sentence each; empty if it can.

    Args:
        manifest: the swarm's terms.
        config: configuration of this node.
        peer: its peer id; empty while unknown.
        trains: False skips tasks, settings and model.
    """
    problems = _version_problems(manifest.minimum_version)
    for name in manifest.protocols:
        if name not in ids.PROTOCOLS:
            problems.append(
                f"it requires the protocol {name}, which this version does not support:"
                " upgrade, or ask the founder for a successor"
            )
    if trains:
        for task in manifest.tasks:
            problems += task_problems(task)
            if ENVIRONMENT_NAME.fullmatch(task.id) and not (
                manifest.access.members or manifest.access.secret
            ):
                problems.append(
                    f"its task {task.id} is an environment by URL, which only a private swarm may"
                    " have"
                )
        for setting in manifest.settings:
            if setting.key not in AGREED_KEYS:
                problems.append(f"it sets {setting.key}, which this version does not know: upgrade")
                continue
            try:
                settings.replaced(config, {setting.key: json.loads(setting.value)}, "manifest")
            except (ValueError, RecursionError):
                problems.append(
                    f"it sets {setting.key} to {setting.value[:40]}, which this version does not"
                    " know: upgrade"
                )
            except ConfigError as error:
                problems.append(str(error))
        problems += _model_problems(manifest, config.policy.model)
    allowed = members(manifest)
    if allowed is not None and peer and peer not in allowed:
        problems.append(
            f"it is private and {peer} is not on its member list: send this peer id to the founder"
        )
    if manifest.access.secret:
        problems += _secret_problems(manifest.access, swarm_secret(config.node.data_dir))
    return problems


def refuse_if_any(problems: Sequence[str], opened: VerifiedManifest) -> None:
    """Raise Refused with all `problems` in one line, if there are any."""
    if problems:
        swarm = f"{opened.manifest.name!r} ({opened.swarm.hex()[:16]}…)"
        raise Refused(f"this node cannot honour the manifest of {swarm}: {'; '.join(problems)}")


def _version_problems(minimum: str) -> list[str]:
    try:
        if version_numbers(__version__) >= version_numbers(minimum):
            return []
    except ValueError:
        return [f"its minimum version {minimum!r} is not valid for this version: upgrade"]
    return [f"it needs swarmnode {minimum} or later, this is {__version__}: upgrade"]


def version_numbers(version: str) -> tuple[int, ...]:
    """Parse a version: `0.10.2` → (0, 10, 2, 0). Raises ValueError for anything but numbers with
    dots."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9}){0,3}", version):
        raise ValueError(version)
    numbers = [int(part) for part in version.split(".")]
    return tuple(numbers + [0] * (4 - len(numbers)))


def task_problems(task: TaskEntry) -> list[str]:
    if task.id in REFUSED:
        return [
            f"its task {task.id} is refused because {REFUSED[task.id]}: a peer could run code on"
            " this machine"
        ]
    if task.id not in TASKS and DATASET_NAME.fullmatch(task.id):
        return [
            f"its task {task.id} is a dataset that this node does not have: get it and name it in"
            f" task.datasets ({task.settings})"
        ]
    if task.id not in TASKS and ENVIRONMENT_NAME.fullmatch(task.id):
        return [
            f"its task {task.id} is an environment that this node does not have: run it and set its"
            f" URL in task.datasets ({task.settings})"
        ]
    if task.id not in TASKS and owner_code.NAME.fullmatch(task.id):
        return [
            f"its task {task.id} is a module of the founder: get it, read it, install it, and"
            " name it in task.modules"
        ]
    if task.id not in TASKS:
        return [f"its task {task.id} is unknown to this version: upgrade, or install its package"]
    try:
        version = task_version(task.id)
    except Unavailable as error:
        return [str(error)]
    if version == task.version:
        return []
    if TASKS[task.id].environment is not None:
        here = settings_text(task.id)
        return [
            f"its task {task.id} is an environment with other content: the swarm has"
            f" {task.settings}, this node has {here}"
        ]
    if TASKS[task.id].rows is not None:
        here = settings_text(task.id)
        return [
            f"its task {task.id} is a dataset with other rows or settings: the swarm has"
            f" {task.settings}, this node has {here}"
        ]
    if TASKS[task.id].source is not None:
        wanted = f"settings of the swarm {task.settings}, of this node {settings_text(task.id)}"
        return [
            f"its task {task.id} has version {task.version}, this node has {version}: get the"
            f" founder's exact files ({wanted})"
        ]
    if task.settings and (here := settings_text(task.id)) != task.settings:
        return [
            f"its task {task.id} has other settings: the swarm has {task.settings}, this node has"
            f" {here}: see task.settings"
        ]
    return [
        f"its task {task.id} has version {task.version}, this node has {version}: install the"
        " version of the swarm"
    ]


def _model_problems(manifest: SwarmManifest, own_model: str) -> list[str]:
    model = chosen_model(manifest, own_model)
    if model is None or model.name == EMBEDDED:
        return []
    if model.name == SMOLLM2:
        missing = f"its model {SMOLLM2} is not installed: {SMOLLM2_COMMAND}"
        return [] if smollm2_is_installed() else [missing]
    if _HUB_NAME.fullmatch(model.name) and not is_gguf(model.name):
        return []
    return [
        f"its model {model.name!r} is neither embedded nor on the Hub: set policy.model to a"
        " directory or GGUF file that holds it"
    ]


def _secret_problems(access: Access, secret: bytes | None) -> list[str]:
    if secret is None:
        return ["it is private: save its secret to a file and name it with --secret-file"]
    return (
        []
        if commitment(secret) == access.secret
        else ["the secret in this data directory belongs to another swarm"]
    )
