"""Games of `benchmarks.episodes` in the two forms that an operator writes: a function of the seed
that returns the first text and a step function, or a class whose methods are tools."""

from __future__ import annotations

import random
from collections.abc import Callable

Step = Callable[[str], tuple[str, float, bool]]

LAKE = ("SFFF", "FHFH", "FFFH", "HFFG")
"""Gymnasium's map of FrozenLake-v1, 4x4."""
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def frozen_lake(seed: int) -> tuple[str, Step]:
    """Return FrozenLake-v1 without slipping, which is equal for every seed."""
    row = column = 0

    def shown() -> str:
        lines = [list(line) for line in LAKE]
        lines[row][column] = "Y"
        return "\n".join(map("".join, lines))

    def step(action: str) -> tuple[str, float, bool]:
        nonlocal row, column
        move = MOVES.get(action.strip())
        if move is None:
            return "no move", 0.0, False
        row = min(3, max(0, row + move[0]))
        column = min(3, max(0, column + move[1]))
        cell = LAKE[row][column]
        if cell == "H":
            return "a hole", 0.0, True
        if cell == "G":
            return "the goal", 1.0, True
        return shown(), 0.0, False

    return f"Cross the lake.\n{shown()}", step


class Guess:
    """A number of two digits, one guess, and a tool that returns the number, in the form of TRL's
    `environment_factory`. A player wins if it calls the tool and guesses the returned number."""

    def reset(self, seed: int, **row: object) -> str:
        self._secret, self._guessed = random.Random(seed).randint(10, 99), 0
        return "Guess a number."

    def look(self) -> int:
        """Look at the number."""
        return self._secret

    def guess(self, number: int) -> str:
        """Guess the number. The first guess counts.

        Args:
            number: The guess.
        """
        self._guessed = self._guessed or number
        return "right" if self._guessed == self._secret else "wrong"

    def get_reward(self) -> float:
        return float(self._guessed == self._secret)
