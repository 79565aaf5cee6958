"""Two tasks without dependencies, for tests and first steps. Prompts and answers are printable
ASCII.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

VERSION = "1"
"""Part of the task version. Change it when a prompt, an answer or a reward below changes."""


Value = float | Mapping[str, float]
"""Reward of an answer, in [0, 1]: one number, or component name → number. The reward of components
is their weighted mean."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question, its right answer and its reward function."""

    prompt: str
    answer: str
    reward: Callable[[str], Value]
    arguments: tuple[str, ...] = ()
    """Names of the arguments that the owner's reward function receives."""
    row: str = ""
    """The dataset's row as JSON, shortened; empty for other tasks."""


def copy_item(seed: int, digits: int) -> Item:
    """Return a question such as `Copy 417:` with the answer `417`. Each correct digit earns partial
    credit, so that a random policy gets a signal.
    """
    answer = "".join(str(d) for d in _draw("copy", seed, digits))
    return Item(f"Copy {answer}:", answer, lambda text: _in_place(text, answer))


def sum_item(seed: int, terms: int) -> Item:
    """Return a question such as `3+4=` with the answer `7`. The reward is 1 or 0."""
    numbers = _draw("sum", seed, terms)
    answer = str(sum(numbers))
    return Item("+".join(map(str, numbers)) + "=", answer, lambda text: float(text == answer))


GENERATORS: dict[str, Callable[..., Item]] = {"copy": copy_item, "sum": sum_item}


def _draw(name: str, seed: int, count: int) -> list[int]:
    """Return `count` digits 0 to 9 (at most 32) derived from a hash. They do not depend on a
    library's random generator.
    """
    digest = hashlib.blake2b(f"swarmnode/builtin/{name}/{seed}".encode(), digest_size=64).digest()
    return [int.from_bytes(digest[2 * i : 2 * i + 2], "big") % 10 for i in range(count)]


def _in_place(text: str, answer: str) -> float:
    """Return the share of characters of `text` that are correct at their position. A surplus
    character costs as much as a wrong one.
    """
    hits = sum(a == b for a, b in zip(text, answer, strict=False))
    return hits / max(len(text), len(answer))
