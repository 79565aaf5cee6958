"""`swarmnode rollback`: which states of the trainer are kept, and going back to one of them. No
torch: only headers are read.

    trainer/state.safetensors              the last one
    trainer/weights.safetensors            weights and counters saved since (`trainer.state`)
    trainer/history/<slot>.safetensors     former ones, further and further apart
    (`trainer.checkpoints`)
    trainer/history/undone.safetensors     what the last rollback put aside: `swarmnode rollback` to
    its step takes it back
    trainer/damaged.safetensors            a last state that could not be used; a former one took
    its place

Numbers that peers have seen are never used again: a trainer that starts looks for the highest in
all of these files.
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
from swarmnode.files import held_data_dir, sync_directory

STATE = "state.safetensors"
WEIGHTS = "weights.safetensors"
HISTORY = "history"
UNDONE = "undone.safetensors"
DAMAGED = "damaged.safetensors"
HEADER_BYTES = 16 * 2**20
"""A longer header is not one of ours."""


class Numbers(msgspec.Struct):
    """Those of a trainer's counters that are shown or never used twice."""

    step: int = 0
    policy_version: int = 0
    sequence: int = 0
    reward_held_out: float | None = None


class Metadata(msgspec.Struct):
    counters: str


class Header(msgspec.Struct):
    metadata: Metadata = msgspec.field(name="__metadata__")


@dataclass(frozen=True)
class Kept:
    """One state on disk."""

    path: Path
    saved_at: float
    """Unix seconds."""
    numbers: Numbers


def states(trainer: Path) -> list[Kept]:
    """All states in the trainer's directory that can be read, newest first. What is damaged is left
    out."""
    return _readable(
        [trainer / STATE, trainer / WEIGHTS, *(trainer / HISTORY).glob("*.safetensors")]
    )


def numbers_used(trainer: Path) -> list[Numbers]:
    """The numbers in every file of the trainer's directory that can be read, the damaged one
    included: peers have seen them."""
    return [
        *(kept.numbers for kept in states(trainer)),
        *(kept.numbers for kept in _readable([trainer / DAMAGED])),
    ]


def former(trainer: Path) -> list[Path]:
    """Kept states to fall back to, newest first; not the one that the operator has rolled back."""
    found = []
    for path in (trainer / HISTORY).glob("*.safetensors"):
        with contextlib.suppress(OSError):
            if path.name != UNDONE:
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def replace_damaged(trainer: Path, kept: Path) -> None:
    """Make the state `kept` the last one, and keep the damaged one beside it. Raises
    Unavailable where the disk refuses."""
    try:
        (trainer / DAMAGED).unlink(missing_ok=True)
        os.link(trainer / STATE, trainer / DAMAGED)
        (trainer / WEIGHTS).unlink(missing_ok=True)
        _put_back(trainer, kept)
        sync_directory(trainer)
    except OSError as error:
        raise Unavailable(f"cannot put {kept} in place of {trainer / STATE}: {error}") from None


def _put_back(trainer: Path, kept: Path) -> None:
    """Give `kept` the name of the last state as well."""
    back = trainer / f".{STATE}.back"
    back.unlink(missing_ok=True)
    os.link(kept, back)
    os.replace(back, trainer / STATE)


def _readable(paths: Iterable[Path]) -> list[Kept]:
    found = []
    for path in paths:
        try:
            found.append(Kept(path, path.stat().st_mtime, _numbers(path)))
        except (OSError, ValueError, struct.error):  # msgspec's errors are ValueErrors
            continue
    return sorted(found, key=lambda kept: kept.saved_at, reverse=True)


def present(states: list[Kept]) -> Kept | None:
    """Return the state from which the trainer continues."""
    found = [kept for kept in states if kept.path.name in (STATE, WEIGHTS)]
    return max(found, key=lambda kept: (kept.numbers.step, kept.path.name == STATE), default=None)


def _numbers(path: Path) -> Numbers:
    """From the header of a safetensors file: its length, u64 little-endian, and JSON."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > HEADER_BYTES:
            raise ValueError("not a state")
        header = msgspec.json.decode(file.read(length), type=Header)
    return msgspec.json.decode(header.metadata.counters, type=Numbers)


def roll_back(data_dir: Path, step: int) -> Kept:
    """Make the newest former state of `step` the one that the trainer goes on from. The one it
    replaces is kept, in place of the last such.

    Raises Unavailable while a node runs with this directory, or where no such state is kept.
    """
    trainer = data_dir / "trainer"
    with held_data_dir(data_dir):
        former = [kept for kept in states(trainer) if kept.path.parent.name == HISTORY]
        chosen = next((kept for kept in former if kept.numbers.step == step), None)
        if chosen is None:
            known = ", ".join(str(kept.numbers.step) for kept in former) or "none"
            raise Unavailable(
                f"no former state of step {step} is kept in {trainer}; of these steps there is one:"
                f" {known}"
            )
        kept = trainer / f".{STATE}.kept"
        kept.unlink(missing_ok=True)
        os.link(chosen.path, kept)  # the next line may replace the chosen one
        if (trainer / STATE).exists():
            os.replace(trainer / STATE, trainer / HISTORY / UNDONE)
        (trainer / WEIGHTS).unlink(missing_ok=True)
        os.replace(kept, trainer / STATE)
        sync_directory(trainer / HISTORY)
        sync_directory(trainer)
    return chosen
