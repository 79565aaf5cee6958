"""What stands against taking part in a swarm: its manifest against this node. Pure, but for the
secret, which is a file.

Whether the model on disk is the manifest's shows when the trainer has hashed it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from swarmnode import __version__, settings
from swarmnode.config import Config
from swarmnode.errors import ConfigError, Refused, Unavailable
from swarmnode.swarm.manifest import (
    AGREED,
    chosen_model,
    commitment,
    members,
    settings_text,
    swarm_secret,
)
from swarmnode.tasks import own
from swarmnode.tasks.registry import DATASET_NAME, ENVIRONMENT_NAME, REFUSED, TASKS, task_version
from swarmnode.wire import ids
from swarmnode.wire.manifest import Opened
from swarmnode.wire.messages import Access, SwarmManifest, TaskEntry

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def can_honour(
    manifest: SwarmManifest, config: Config, peer: str = "", *, trains: bool = True
) -> list[str]:
    """Why this node cannot take part: one sentence each, empty when it can.

    peer: its peer id, "" if not known yet; trains: it does, so that tasks, settings and model have
    to be those of the swarm.
    """
    problems = _version_problems(manifest.minimum_version)
    for name in manifest.protocols:
        if name not in ids.SPOKEN:
            problems.append(
                f"its members speak {name}, this version of swarmnode does not: upgrade"
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
            if setting.key not in AGREED:
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
            f"it is private and {peer} is not on its list of members: send the founder this peer id"
        )
    if manifest.access.secret:
        problems += _secret_problems(manifest.access, swarm_secret(config.node.data_dir))
    return problems


def refuse_if_any(problems: Sequence[str], opened: Opened) -> None:
    """Raises Refused with `problems` in one line, if there are any."""
    if problems:
        swarm = f"{opened.manifest.name!r} ({opened.swarm.hex()[:16]}…)"
        raise Refused(f"this node cannot honour the manifest of {swarm}: {'; '.join(problems)}")


def _version_problems(minimum: str) -> list[str]:
    try:
        if version_numbers(__version__) >= version_numbers(minimum):
            return []
    except ValueError:
        return [
            f"its minimum version {minimum!r} is not one that this version understands: upgrade"
        ]
    return [f"it needs swarmnode {minimum} or later, this is {__version__}: upgrade"]


def version_numbers(version: str) -> tuple[int, ...]:
    """`0.10.2` → (0, 10, 2). Raises ValueError for anything but numbers with dots."""
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
            f"its task {task.id} is a dataset, which this node lacks: get it and name it in"
            f" task.datasets ({task.settings})"
        ]
    if task.id not in TASKS and ENVIRONMENT_NAME.fullmatch(task.id):
        return [
            f"its task {task.id} is an environment, which this node lacks: run it and name its URL"
            f" in task.datasets ({task.settings})"
        ]
    if task.id not in TASKS and own.NAME.fullmatch(task.id):
        return [
            f"its task {task.id} is its founder's own: get that module, read it, install it, and"
            " name it in task.modules"
        ]
    if task.id not in TASKS:
        return [
            f"its task {task.id} is not one of this version's: upgrade, or install what provides it"
        ]
    try:
        version = task_version(task.id)
    except Unavailable as error:
        return [str(error)]
    if version == task.version:
        return []
    if TASKS[task.id].environment is not None:
        here = settings_text(task.id)
        return [
            f"its task {task.id} is an environment that asks otherwise: the swarm's is"
            f" {task.settings}, here it is {here}"
        ]
    if TASKS[task.id].rows is not None:
        here = settings_text(task.id)
        return [
            f"its task {task.id} is a dataset with other rows or settings: the swarm's is"
            f" {task.settings}, here it is {here}"
        ]
    if TASKS[task.id].source is not None:
        wanted = (
            f"the swarm's has the settings {task.settings}, here they are {settings_text(task.id)}"
        )
        return [
            f"its task {task.id} has version {task.version}, here {version}: get the founder's"
            f" files, to the byte ({wanted})"
        ]
    if task.settings and (here := settings_text(task.id)) != task.settings:
        return [
            f"its task {task.id} has other settings: the swarm's are {task.settings}, here they are"
            f" {here}: see task.settings"
        ]
    return [
        f"its task {task.id} has version {task.version}, here it has {version}: install the swarm's"
        " version"
    ]


def _model_problems(manifest: SwarmManifest, own_model: str) -> list[str]:
    model = chosen_model(manifest, own_model)
    if model is None or model.name == "embedded" or _HUB_NAME.fullmatch(model.name):
        return []
    return [
        f"its model {model.name!r} is neither embedded nor on the Hub: set policy.model to a"
        " directory that holds it"
    ]


def _secret_problems(access: Access, secret: bytes | None) -> list[str]:
    if secret is None:
        return ["it is private: put its secret into a file and name it with --secret-file"]
    return (
        [] if commitment(secret) == access.secret else ["the swarm secret here is another swarm's"]
    )
