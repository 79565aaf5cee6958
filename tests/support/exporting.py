"""Run `python -m swarmnode.trainer.export` in this process."""

from __future__ import annotations

from pathlib import Path

from swarmnode.config import Config
from swarmnode.trainer import export as child


def export(config: Config, target: Path, merge: bool) -> child.ExportRecord:
    return child.export(config.policy, config.node.data_dir / "trainer", target, merge)
