"""What a person reads afterwards, in `<data_dir>/log`: a line of JSON per step, and what the policy answered in it.

    steps.jsonl      every measurement of a step, as the status page has it, with reward by task
    samples.jsonl    the first group of the step: its prompt, and up to four completions with their rewards

Bounded: a file that is full is put aside as `.jsonl.1`, and the one put aside before it is gone. A full disk costs lines, nothing else.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from swarmnode.link.messages import Report
from swarmnode.observe.logfile import FileHandler, log_file
from swarmnode.rollouts.groups import OwnGroup

STEPS_BYTES = 8 * 2**20
"""About ten thousand steps, and as many again in the file that was put aside."""
SAMPLES_BYTES = 8 * 2**20
COMPLETIONS = 4
TEXT = 4000
"""Characters of a prompt or completion that are kept."""
LEFT_OUT = ("peers_used", "weights", "reward_errors", "last_reward_error", "phase")
"""Fields of a report that are of no one step."""


class Records:
    """Writes both files. Nothing here raises for what the disk does."""

    def __init__(self, data_dir: Path) -> None:
        self._steps = _file(data_dir, "steps", STEPS_BYTES)
        self._samples = _file(data_dir, "samples", SAMPLES_BYTES)

    def step(self, at: float, report: Report) -> None:
        """A step has ended. `at`: Unix seconds."""
        measured = {name: value for name, value in msgspec.to_builtins(report).items() if name not in (*LEFT_OUT, "type")}
        _write(self._steps, {"at": round(at, 3), **measured})

    def sample(self, at: float, step: int, prompt: str, group: OwnGroup) -> None:
        """What the policy answered to one question of a step. The first completions, not the best: what it does, not what it can."""
        rewards = dict(enumerate(group.rewards))
        completions = [
            {"text": completion.text[:TEXT], "tokens": completion.tokens, "finish": completion.finish, "reward": rewards.get(number)}
            for number, completion in enumerate(group.completions[:COMPLETIONS])
        ]
        about = {"at": round(at, 3), "step": step, "policy_version": group.policy_version, "task": group.task.id}
        _write(self._samples, {**about, "prompt": prompt[:TEXT], "completions": completions})

    def close(self) -> None:
        for file in (self._steps, self._samples):
            if file is not None:
                file.close()


def _file(data_dir: Path, name: str, most: int) -> FileHandler | None:
    """None where the directory cannot be had."""
    try:
        return FileHandler(log_file(data_dir, name), most)
    except OSError:
        return None


def _write(file: FileHandler | None, line: dict[str, object]) -> None:
    if file is not None:
        file.emit(logging.makeLogRecord({"msg": msgspec.json.encode(line).decode()}))
