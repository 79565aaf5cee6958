"""Two tasks with no dependency, for tests and for first steps. Prompts and answers are printable
ASCII."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

VERSION = "1"
"""Enters the task version: change it when a prompt, an answer or a reward below changes."""


Value = float | Mapping[str, float]
"""What an answer is worth, in [0, 1]: one number, or components by name, of which the reward is the
weighted mean."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question, its answer, and how an answer is judged."""

    prompt: str
    answer: str
    reward: Callable[[str], Value]
    arguments: tuple[str, ...] = ()
    """Names of what an owner's reward function is given."""
    votes: Callable[[Sequence[str | None]], list[float]] | None = None
    """Rewards of a whole group, in place of `reward`, where each depends on the others."""


def copy_item(seed: int, digits: int) -> Item:
    """`Copy 417:` asks for `417`. Partial credit for every digit in its place, so that even a
    random policy gets a signal."""
    answer = "".join(str(d) for d in _draw("copy", seed, digits))
    return Item(f"Copy {answer}:", answer, lambda text: _in_place(text, answer))


def sum_item(seed: int, terms: int) -> Item:
    """`3+4=` asks for `7`. All or nothing."""
    numbers = _draw("sum", seed, terms)
    answer = str(sum(numbers))
    return Item("+".join(map(str, numbers)) + "=", answer, lambda text: float(text == answer))


GENERATORS: dict[str, Callable[..., Item]] = {"copy": copy_item, "sum": sum_item}


def _draw(name: str, seed: int, count: int) -> list[int]:
    """`count` digits 0 to 9 (at most 32) from a hash, so that they do not depend on a library's
    random generator."""
    digest = hashlib.blake2b(f"swarmnode/builtin/{name}/{seed}".encode(), digest_size=64).digest()
    return [int.from_bytes(digest[2 * i : 2 * i + 2], "big") % 10 for i in range(count)]


def _in_place(text: str, answer: str) -> float:
    """Share of characters that are right and in their place; characters too many cost as much as
    wrong ones."""
    hits = sum(a == b for a, b in zip(text, answer, strict=False))
    return hits / max(len(text), len(answer))
