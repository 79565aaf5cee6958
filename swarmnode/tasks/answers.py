"""Extraction of the answer from a completion.

This runs on peers' text outside the sandbox. It searches for fixed strings and uses only patterns
that cannot backtrack.

tag           content of the last <answer>…</answer>, or the whole text without one
boxed         content of the last \\boxed{…}, or nothing
last_number   last number in the last 4,096 characters, or nothing
last_letter   last single capital letter in the last 4,096 characters (a choice), or nothing
last_line     last line that is not empty
whole         the whole text
auto          tag, then boxed, then the verifier's fallback: last_number, last_letter or whole
"""

from __future__ import annotations

import re
from typing import Literal, get_args

Extract = Literal["tag", "boxed", "last_number", "last_letter", "last_line", "whole"]
EXTRACTS: tuple[str, ...] = get_args(Extract)
TAIL = 4096
"""Characters at the end of a text that are searched for a number, a letter or a box."""
NUMBER = re.compile(
    r"[-+\u2212]?(?:\$\s?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4})?(?:/\d+)?%?"
)
"""A number with an optional sign, currency, thousands separators, decimals, exponent, fraction and
per cent sign. No two parts match the same character."""
_LETTER = re.compile(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])")
_BOX = "\\boxed{"


def find_answer(text: str) -> str:
    """Return the content of the last `<answer>…</answer>` without surrounding white space, or the
    whole text without a tag.

    A small policy may answer directly. An instruction-tuned policy reasons first and marks its
    answer, as reasoning-gym's prompts ask.
    """
    tagged = _find_tag(text)
    return text if tagged is None else tagged


def has_text_after(text: str, how: str) -> bool:
    """Return True if text follows the answer that `extract(text, how)` finds.

    Text after an answer changes no reward, so peers could teach it unnoticed (docs/security.md).
    """
    if how == "tag":
        return _find_tag(text) is not None and not text.endswith("</answer>")
    if how == "boxed":
        return not text.endswith("}")
    if how == "auto":
        marked = next((mark for mark in ("</answer>", _BOX) if mark in text), "")
        return bool(marked) and has_text_after(text, "boxed" if marked == _BOX else "tag")
    if how in ("last_number", "last_letter"):
        return not text.endswith(extract(text, how))
    return how == "last_line" and text != text.rstrip()


def extract(text: str, how: str, fallback: str = "whole") -> str:
    """Return the answer in `text`.

    Args:
        how: Extraction method of the list at the head of this file.
        fallback: Method that `auto` uses for a text without a marked answer.
    """
    if how == "auto":
        marked = _find_tag(text)
        if marked is None:
            marked = _find_box(text)
        return extract(text, fallback) if marked is None else marked
    if how == "tag":
        return find_answer(text)
    if how == "boxed":
        return _find_box(text) or ""
    if how == "last_number":
        return _find_last(NUMBER, text[-TAIL:])
    if how == "last_letter":
        return _find_last(_LETTER, text[-TAIL:])
    if how == "last_line":
        return text.rstrip().rpartition("\n")[2].strip()
    return text


def _find_tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def _find_box(text: str) -> str | None:
    """Return the content of the last `\\boxed{…}` with balanced braces. Return None if there is no
    box or the box does not end.
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for at, character in enumerate(text[start : start + TAIL], start):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:at].strip()
    return None


def _find_last(pattern: re.Pattern[str], text: str) -> str:
    found = ""
    for match in pattern.finditer(text):
        found = match[0]
    return found
