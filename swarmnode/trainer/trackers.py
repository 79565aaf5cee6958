"""Measurements of steps to TensorBoard, W&B or trackio, through accelerate's trackers:
`log.trackers`.

What they are told is what a line of steps.jsonl has, and the settings that decide how it is
trained; no address, no peer and no text. A tracker that fails, at the start or later, is a line in
the log and is done without: training goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

log = structlog.get_logger("swarmnode.trainer")
PROJECT = "swarmnode"
WANDB_LEAVES_OUT = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "host": "",
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""What W&B takes by itself is more than anybody was told: all that is printed (a log with addresses
and peers), the machine, its packages, the repository of the working directory."""


class Trackers:
    """All that are set. name: the node's, for the run; told: settings by their keys."""

    def __init__(
        self, names: Sequence[str], data_dir: Path, name: str, told: Mapping[str, object]
    ) -> None:
        self._open: dict[str, GeneralTracker] = {}
        for each in names:
            self._try(each, functools.partial(self._start, each, data_dir, name, told))

    def _start(self, kind: str, data_dir: Path, name: str, told: Mapping[str, object]) -> None:
        PartialState(cpu=True)  # the trackers of W&B and trackio cannot be started before it
        made = LOGGER_TYPE_TO_CLASS[kind]
        folder = data_dir / "log"
        if made.requires_logging_directory:
            tracker = made(PROJECT, logging_dir=str(folder / kind))
        else:
            its = {"dir": str(folder), "settings": WANDB_LEAVES_OUT} if kind == "wandb" else {}
            tracker = made(PROJECT, **({"name": name} if name else {}), **its)
        if hasattr(tracker, "start"):  # accelerate before 1.8 starts it when it is made
            tracker.start()
        tracker.store_init_configuration(dict(told))
        self._open[kind] = tracker

    def step(self, number: int, measured: Mapping[str, object]) -> None:
        """What a step has measured: numbers by name, and tables of numbers."""
        values = flat(measured)
        for kind, tracker in list(self._open.items()):
            self._try(kind, functools.partial(tracker.log, values, step=number))

    def close(self) -> None:
        for kind, tracker in list(self._open.items()):
            self._try(kind, tracker.finish)
        self._open.clear()

    def _try(self, kind: str, do: Callable[[], object]) -> None:
        try:
            do()
        except Exception as error:  # somebody else's library, and often somebody else's server  # noqa: BLE001
            self._open.pop(kind, None)
            why = " ".join(str(error).split())[:300] or type(error).__name__
            log.warning("a tracker failed; going on without it", tracker=kind, error=why)


def flat(measured: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    """Numbers by name; what is in a table has the table's name in front, e.g.
    reward_by_task/rg/gcd."""
    found: dict[str, float] = {}
    for name, value in measured.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + name] = value
    return found
