"""`swarmnode export`: write the trainer's last saved policy as a directory that transformers loads.
A child process does the work; torch is not loaded here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from swarmnode.config import Config
from swarmnode.errors import ConfigError, DeviceError, Refused, StateError, Unavailable

CHILD = "swarmnode.trainer.export"
CHILD_ERRORS = {
    kind.exit_code: kind for kind in (StateError, ConfigError, Refused, DeviceError, Unavailable)
}


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
        raise CHILD_ERRORS.get(done.returncode, Unavailable)(
            lines[-1] if lines else f"export ended with {done.returncode}"
        )
    export_info: dict[str, object] = json.loads(lines[-1])
    return export_info
