"""`swarmnode export`: write the trainer's last saved policy as a directory that transformers loads.
A child process does the work; torch is not loaded here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from swarmnode import settings
from swarmnode.config import Config, TaskConfig
from swarmnode.errors import BY_EXIT_CODE, Unavailable
from swarmnode.files import PUBLIC_FILE, write_file
from swarmnode.swarm.card import FILE, CardTask, card
from swarmnode.swarm.manifest import settings_text
from swarmnode.tasks.registry import task_version

CHILD = "swarmnode.trainer.export"
CARD_SETTINGS = (
    "policy.lora.r",
    "training.advantage",
    "training.learning_rate",
    "training.loss_type",
    "training.max_completion_length",
    "training.num_generations",
    "training.options",
    "training.temperature",
    "training.top_p",
)
"""Settings that a model card lists."""


def export(config: Config, directory: Path, merge: bool) -> dict[str, object]:
    """Write the saved policy to `directory`, completely or not at all. The node may keep running.

    Args:
        config: configuration of the node.
        directory: a missing or empty directory.
        merge: with LoRA, write full weights instead of an adapter.

    Returns:
        The content of swarmnode.json in the export.

    Raises:
        Unavailable: there is no state, or the directory is not empty or cannot be written.
        StateError: the state belongs to another model.
    """
    target = directory.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Unavailable(f"{target} exists and is not an empty directory; name another")
    done = subprocess.run(
        [sys.executable, "-m", CHILD, str(target), *(["--merge"] if merge else [])],
        input=config.model_dump_json().encode(),
        stdout=subprocess.PIPE,  # its log goes to stderr
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    if done.returncode != 0 or not lines:
        raise BY_EXIT_CODE.get(done.returncode, Unavailable)(
            lines[-1] if lines else f"export ended with {done.returncode}"
        )
    export_info: dict[str, object] = json.loads(lines[-1])
    terms = {key: settings.value(config, key) for key in CARD_SETTINGS}
    text = card(export_info, card_tasks(config.task), terms)
    write_file(target / FILE, text.encode(), PUBLIC_FILE)
    return export_info


def card_tasks(tasks: TaskConfig) -> list[CardTask]:
    """Return the tasks of a configuration for a model card."""
    hub = {
        name: dataset.source
        for name, dataset in tasks.datasets.items()
        if dataset.revision is not None
    }
    return [
        CardTask(name, task_version(name), settings_text(name), hub.get(name, ""))
        for name in tasks.names
    ]
