"""Measurements of steps to TensorBoard, W&B or trackio, through accelerate's trackers:
`log.trackers`.

A tracker receives the content of a line of steps.jsonl and the settings of policy, training and
weights; no address, no peer and no text. If a tracker fails, the failure is logged, and training
continues without it.
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
WANDB_SETTINGS = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "host": "",
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""Settings that disable what W&B collects by default: printed text (a log with addresses and
peers), the machine, its packages, and the repository of the working directory."""


class Trackers:
    """The configured trackers.

    Args:
        names: Trackers of `log.trackers`.
        name: The node's name, which becomes the name of the run.
        settings: Settings by their keys.
    """

    def __init__(
        self, names: Sequence[str], data_dir: Path, name: str, settings: Mapping[str, object]
    ) -> None:
        self._open: dict[str, GeneralTracker] = {}
        for each in names:
            self._try(each, functools.partial(self._start, each, data_dir, name, settings))

    def _start(self, kind: str, data_dir: Path, name: str, settings: Mapping[str, object]) -> None:
        PartialState(cpu=True)  # the trackers of W&B and trackio need it
        made = LOGGER_TYPE_TO_CLASS[kind]
        folder = data_dir / "log"
        if made.requires_logging_directory:
            tracker = made(PROJECT, logging_dir=str(folder / kind))
        else:
            extra = {"dir": str(folder), "settings": WANDB_SETTINGS} if kind == "wandb" else {}
            tracker = made(PROJECT, **({"name": name} if name else {}), **extra)
        if hasattr(tracker, "start"):  # accelerate before 1.8 starts it in the constructor
            tracker.start()
        tracker.store_init_configuration(dict(settings))
        self._open[kind] = tracker

    def step(self, number: int, measured: Mapping[str, object]) -> None:
        """Send the measurements of a step.

        Args:
            number: Number of the step.
            measured: Numbers by name, and tables of numbers.
        """
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
        except Exception as error:  # any error of a tracker's library or server  # noqa: BLE001
            self._open.pop(kind, None)
            why = " ".join(str(error).split())[:300] or type(error).__name__
            log.warning("tracker failed, continuing without it", tracker=kind, error=why)


def flat(measured: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    """Return numbers by name. The entries of a table have the table's name as a prefix, for example
    reward_by_task/rg/gcd."""
    found: dict[str, float] = {}
    for name, value in measured.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + name] = value
    return found
