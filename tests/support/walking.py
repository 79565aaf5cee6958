"""A game whose reward differs between the episodes of any policy, in a module of its own as a user
writes one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.tasks import registry
from swarmnode.tasks.client import Scorer

WALK = "walk_of_mine:walk"
TURNS = 3
SOURCE = """
def walk(seed: int):
    seen = []

    def step(action: str):
        seen.append(len(action))
        return f"{sum(seen)} + {len(seen)}", seen[-1] % 7 / 18, len(seen) == 3

    return "Calculate 10 + 8.", step
"""


@contextlib.contextmanager
def walking_game(directory: Path) -> Iterator[Scorer]:
    """Install the game for this process and give a scorer of it. An episode has three actions, and
    its reward depends on their lengths."""
    (directory / "walk_of_mine.py").write_text(SOURCE)
    before = dict(registry.TASKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        registry.install([WALK], {WALK: {"turns": TURNS}})
        with Scorer() as scorer:
            yield scorer
    registry._TASKS.clear()
    registry._TASKS.update(before)
    registry.task_version.cache_clear()
