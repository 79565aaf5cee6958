"""A game of several turns for tests, in a module of its own as a user writes one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.tasks import registry

GUESS = "guessing_of_mine:guess"
TURNS = 4
"""Maximum number of guesses in an episode."""
HIGH = 5
SOURCE = """
import random

def guess(seed: int, high: int = 5):
    secret = random.Random(seed).randint(1, high)

    def step(action: str):
        if action == "burn":
            while True:
                pass
        if action == "shout":
            return "x" * 100_000, 0.0, False
        if action == str(secret):
            return "right", 1.0, True
        if action == "0":
            return "you give up", 0.25, True
        return ("higher" if action < str(secret) else "lower"), 0.0, False

    return f"I am thinking of a number from 1 to {high}.", step
"""


@contextlib.contextmanager
def guessing_game(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install the game for this process and its scorers, and yield its task id.

    The reward of an episode is 1 for the secret, 0.25 for the action "0", and 0 after TURNS other
    actions.
    """
    (directory / "guessing_of_mine.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(directory))
    before = dict(registry.TASKS)
    registry.install([GUESS], {GUESS: {"turns": TURNS, "high": HIGH}})
    try:
        yield GUESS
    finally:
        registry._TASKS.clear()
        registry._TASKS.update(before)
        registry.task_version.cache_clear()
