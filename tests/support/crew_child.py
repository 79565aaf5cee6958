"""A crew trainer in a child process that a test can kill. It is forked from a server that has torch
loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from swarmnode.config import Config
from swarmnode.observe import logs
from swarmnode.process import Progress, die_with_parent, run_main
from swarmnode.stages.trainer import make_trainer
from tests.support import forked


def start(config: Config, log: Path) -> Any:
    """Start `python -m swarmnode.trainer` and return the process. Its output is appended to
    `log`."""
    process = forked.context.Process(target=main, args=(config.model_dump_json(), log), daemon=True)
    process.start()
    return process


def main(config: str, log: Path) -> None:
    die_with_parent()
    with open(log, "ab", buffering=0) as file:
        sys.stdout = sys.stderr = open(file.fileno(), "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process lives
        torch.set_num_threads(1)
        parsed = Config.model_validate_json(config)
        logs.configure(parsed.log, "trainer")

        def run() -> int:
            make_trainer(parsed, Progress()).run()
            return 0

        sys.exit(run_main("trainer", run))
