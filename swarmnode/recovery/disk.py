"""A state as one safetensors file, replaced whole or not at all. Torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarmnode.errors import StateError
from swarmnode.files import held, sync_directory
from swarmnode.pipeline.commit import Taken

About = Mapping[str, object]
"""What is said with the tensors: JSON."""


@dataclass(frozen=True)
class OnDisk:
    """What is here of some layers of a lineage, whoever's stage they are."""

    lineage: bytes
    first: int
    last: int
    """Layers first … last − 1."""
    step: int
    hash: bytes
    taken: Taken = field(default_factory=Taken)
    """How that step was taken, where it was taken here."""


def save(path: Path, tensors: Mapping[str, torch.Tensor], about: About) -> None:
    """Temporary name, sync, rename. The directory is made (0700) if need be. Raises OSError; the
    old file is then untouched."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(temporary(path.name))
    try:
        save_file(dict(tensors), unfinished, metadata={"about": json.dumps(about)})
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (SafetensorError, OSError) as error:
        # on a full disk, half a state would take the room of what is small
        unfinished.unlink(missing_ok=True)
        raise OSError(str(error)) from None
    sync_directory(path.parent)


def temporary(name: str) -> str:
    """What a file is called until it is whole; a process that was killed leaves it."""
    return f".{name}.tmp"


def read_about(path: Path) -> About | None:
    """What was said with the tensors; None without a file. Raises StateError for one that is
    damaged."""
    return None if not path.exists() else _open(path, lambda file: {})[1]


def load(path: Path) -> tuple[dict[str, torch.Tensor], About]:
    """(tensors, what was said with them). Raises StateError for a file that is damaged or not
    there."""
    return _open(path, lambda file: {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a mapping


def _open(
    path: Path, read: Callable[[safe_open], dict[str, torch.Tensor]]
) -> tuple[dict[str, torch.Tensor], About]:
    try:
        with held(path) as name, safe_open(name, "pt", device="cpu") as file:
            about = json.loads((file.metadata() or {})["about"])
            if not isinstance(about, dict):
                raise ValueError("no description")
            return read(file), about
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise StateError(f"{path} is damaged: {error}") from None
