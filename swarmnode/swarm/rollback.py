"""`swarmnode rollback`: list the stored trainer states and return to one of them. Reads only
headers, without torch.

    trainer/state.safetensors              the last state
    trainer/history/<slot>.safetensors     earlier states (`trainer.checkpoints`)
    trainer/history/undone.safetensors     state that the last rollback replaced; rolling
                                           back to its step restores it
    trainer/damaged.safetensors            a damaged last state that an earlier one replaced

Sequence numbers that peers have seen are never reused: a starting trainer continues above the
highest number in all of these files.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swarmnode.errors import Unavailable
from swarmnode.files import locked_data_dir, sync_directory

STATE = "state.safetensors"
HISTORY = "history"
UNDONE = "undone.safetensors"
DAMAGED = "damaged.safetensors"
HEADER_BYTES = 16 * 2**20
"""Limit for a header; a longer one is not from this trainer."""


class StateCounters(msgspec.Struct):
    """Counters of a trainer that are displayed or must not be reused."""

    step: int = 0
    policy_version: int = 0
    sequence: int = 0
    reward_held_out: float | None = None
    reward_held_out_step: int | None = None


class Metadata(msgspec.Struct):
    counters: str


class Header(msgspec.Struct):
    metadata: Metadata = msgspec.field(name="__metadata__")


@dataclass(frozen=True)
class StoredState:
    """A stored state."""

    path: Path
    saved_at: float
    """Unix time in seconds."""
    counters: StateCounters


def list_states(trainer: Path) -> list[StoredState]:
    """Return all readable states in the trainer's directory, newest first."""
    return _read_states([trainer / STATE, *(trainer / HISTORY).glob("*.safetensors")])


def used_counters(trainer: Path) -> list[StateCounters]:
    """Return the counters in every readable file of the trainer's directory, including the damaged
    state, because peers have seen them."""
    return [
        *(kept.counters for kept in list_states(trainer)),
        *(kept.counters for kept in _read_states([trainer / DAMAGED])),
    ]


def earlier_states(trainer: Path) -> list[Path]:
    """Return the earlier states to fall back to, newest first, without the one that the operator
    has rolled back."""
    found = []
    for path in (trainer / HISTORY).glob("*.safetensors"):
        with contextlib.suppress(OSError):
            if path.name != UNDONE:
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def replace_damaged(trainer: Path, kept: Path) -> None:
    """Replace the damaged last state by `kept`, and keep a copy of the damaged one. Raises
    Unavailable if the disk cannot be written."""
    try:
        (trainer / DAMAGED).unlink(missing_ok=True)
        os.link(trainer / STATE, trainer / DAMAGED)
        _link_as_last(trainer, kept)
        sync_directory(trainer)
    except OSError as error:
        raise Unavailable(f"cannot replace {trainer / STATE} by {kept}: {error}") from None


def _link_as_last(trainer: Path, kept: Path) -> None:
    """Link `kept` under the name of the last state."""
    back = trainer / f".{STATE}.back"
    back.unlink(missing_ok=True)
    os.link(kept, back)
    os.replace(back, trainer / STATE)


def _read_states(paths: Iterable[Path]) -> list[StoredState]:
    found = []
    for path in paths:
        try:
            found.append(StoredState(path, path.stat().st_mtime, _read_counters(path)))
        except (OSError, ValueError, struct.error):  # msgspec's errors are ValueErrors
            continue
    return sorted(found, key=lambda kept: kept.saved_at, reverse=True)


def current_state(states: list[StoredState]) -> StoredState | None:
    """Return the state from which the trainer continues."""
    return next((kept for kept in states if kept.path.name == STATE), None)


def _read_counters(path: Path) -> StateCounters:
    """Read the counters from the header of a safetensors file: u64 little-endian length, then
    JSON."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > HEADER_BYTES:
            raise ValueError("not a trainer state")
        header = msgspec.json.decode(file.read(length), type=Header)
    return msgspec.json.decode(header.metadata.counters, type=StateCounters)


def roll_back(data_dir: Path, step: int) -> StoredState:
    """Make the newest earlier state of `step` the last one. The replaced state is kept, in place of
    an earlier replaced one.

    Raises:
        Unavailable: a node is running with this directory, or there is no state of this step.
    """
    trainer = data_dir / "trainer"
    with locked_data_dir(data_dir):
        former = [kept for kept in list_states(trainer) if kept.path.parent.name == HISTORY]
        chosen = next((kept for kept in former if kept.counters.step == step), None)
        if chosen is None:
            known = ", ".join(str(kept.counters.step) for kept in former) or "none"
            raise Unavailable(f"no state of step {step} in {trainer}; available steps: {known}")
        kept = trainer / f".{STATE}.kept"
        kept.unlink(missing_ok=True)
        os.link(chosen.path, kept)  # the next line may replace the chosen file
        if (trainer / STATE).exists():
            os.replace(trainer / STATE, trainer / HISTORY / UNDONE)
        os.replace(kept, trainer / STATE)
        sync_directory(trainer / HISTORY)
        sync_directory(trainer)
    return chosen
