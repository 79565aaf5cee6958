"""Where the answer stands in a completion. Runs on strangers' text outside the sandbox: searches,
never a pattern that can backtrack.

tag           what the last <answer>…</answer> holds, else the whole text as it is
boxed         what the last \\boxed{…} holds, else nothing
last_number   the last number of the text's last 4,096 characters, else nothing
last_letter   the last capital letter that stands alone there (a choice), else nothing
last_line     the last line that is not empty
whole         all of it
auto          tag, else boxed, else what suits the verifier: last_number, last_letter, or the whole
text
"""

from __future__ import annotations

import re
from typing import Literal, get_args

Extract = Literal["tag", "boxed", "last_number", "last_letter", "last_line", "whole"]
EXTRACTS: tuple[str, ...] = get_args(Extract)
TAIL = 4096
"""Characters at the end of a text in which a number, a letter or a box is looked for."""
NUMBER = re.compile(
    r"[-+\u2212]?(?:\$\s?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4})?(?:/\d+)?%?"
)
"""A number as people write it: sign, currency, thousands, decimals, exponent, fraction, per cent.
No two parts match the same character."""
_LETTER = re.compile(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])")
_BOX = "\\boxed{"


def answer_of(text: str) -> str:
    """The answer in a completion: what the last `<answer>…</answer>` holds, without white space
    around it, or else the whole text as it is.

    Small policies answer outright; instruction-tuned ones think first and mark the answer, as
    reasoning-gym's own prompts ask them to.
    """
    tagged = _tag(text)
    return text if tagged is None else tagged


def has_tail(text: str, how: str) -> bool:
    """Return True if something follows the answer in `text`, found as `how` says.

    Text after an answer changes no reward, so strangers could teach it (docs/security.md)."""
    if how == "tag":
        return _tag(text) is not None and not text.endswith("</answer>")
    if how == "boxed":
        return not text.endswith("}")
    if how == "auto":
        marked = next((mark for mark in ("</answer>", _BOX) if mark in text), "")
        return bool(marked) and has_tail(text, "boxed" if marked == _BOX else "tag")
    if how in ("last_number", "last_letter"):
        return not text.endswith(extract(text, how))
    return how == "last_line" and text != text.rstrip()


def extract(text: str, how: str, fallback: str = "whole") -> str:
    """The answer in `text`, found as `how` says (see the head of this file); `fallback` is what
    `auto` ends with."""
    if how == "auto":
        marked = _tag(text)
        if marked is None:
            marked = _boxed(text)
        return extract(text, fallback) if marked is None else marked
    if how == "tag":
        return answer_of(text)
    if how == "boxed":
        return _boxed(text) or ""
    if how == "last_number":
        return _last(NUMBER, text[-TAIL:])
    if how == "last_letter":
        return _last(_LETTER, text[-TAIL:])
    if how == "last_line":
        return text.rstrip().rpartition("\n")[2].strip()
    return text


def _tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def _boxed(text: str) -> str | None:
    """What the last `\\boxed{…}` holds, braces inside it balanced; None where there is none, or it
    does not end."""
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


def _last(pattern: re.Pattern[str], text: str) -> str:
    found = ""
    for match in pattern.finditer(text):
        found = match[0]
    return found
