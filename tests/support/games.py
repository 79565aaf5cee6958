"""Games of several turns for tests, each in a module of its own as a user writes one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.tasks import registry
from swarmnode.tasks.client import Scorer
from tests.support.registered import tasks_restored

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


WALK = "walk_of_mine:walk"
WALK_TURNS = 3
WALK_SOURCE = """
def walk(seed: int):
    seen = []

    def step(action: str):
        seen.append(len(action))
        return f"{sum(seen)} + {len(seen)}", seen[-1] % 7 / 18, len(seen) == 3

    return "Calculate 10 + 8.", step
"""


@contextlib.contextmanager
def _installed(
    directory: Path, source: str, task: str, settings: dict[str, object]
) -> Iterator[None]:
    """Install a game for this process and its scorers."""
    (directory / f"{task.partition(':')[0]}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch, tasks_restored():
        patch.syspath_prepend(str(directory))
        registry.install([task], {task: settings})
        yield


@contextlib.contextmanager
def guessing_game(directory: Path) -> Iterator[str]:
    """Install the game and yield its task id.

    The reward of an episode is 1 for the secret, 0.25 for the action "0", and 0 after TURNS other
    actions.
    """
    with _installed(directory, SOURCE, GUESS, {"turns": TURNS, "high": HIGH}):
        yield GUESS


@contextlib.contextmanager
def walking_game(directory: Path) -> Iterator[Scorer]:
    """Install a game whose reward differs between the episodes of any policy, and yield a scorer of
    it. An episode has three actions, and its reward depends on their lengths."""
    with _installed(directory, WALK_SOURCE, WALK, {"turns": WALK_TURNS}), Scorer() as scorer:
        yield scorer
