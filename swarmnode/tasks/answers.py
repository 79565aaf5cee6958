"""Extraction of the answer from a completion.

This runs on peers' text outside the sandbox. It searches for fixed strings and uses only patterns
that cannot backtrack.

tag           content of the last <answer>…</answer>, or the whole text without one
boxed         content of the last \\boxed{…}, or nothing
last_number   last word with a digit in the last 4,096 characters, with a unit after it, or nothing
last_letter   last choice (a single capital letter) in the last 4,096 characters, or nothing
last_line     last line that is not empty
fenced        content of the last ``` block, or the whole text without one
whole         the whole text
auto          tag, then boxed, then the verifier's fallback: one of the methods above

An extraction finds the place of an answer. The verifier then reads all of it, so a word such as
"x^2" or "2024-05-17" is found as it is and equals no number.
"""

from __future__ import annotations

import itertools
import re
from typing import Literal, get_args

from swarmnode.tasks.quantities import CHARACTERS, SCALES, UNITS

VERSION = "2"
"""Part of the task version where the extraction can be set. Change it when a result of `extract`
changes."""
Extract = Literal["tag", "boxed", "last_number", "last_letter", "last_line", "fenced", "whole"]
EXTRACTS: tuple[str, ...] = get_args(Extract)
TAIL = 4096
"""Characters at the end of a text that are searched for a number, a letter or a box."""
_WORD = re.compile(r"(?:(?<=[A-Za-z}^_])\{[^{}]*\}|(?<=[0-9]):(?=[0-9])|[^\s=≈:])+")
"""A word: text between white space, equals signs and colons. A group of LaTeX may contain them."""
_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9_-]{0,30}/?>")
_DIGIT = re.compile(r"[0-9\uff10-\uff19]")
_AROUND = "*_`\"'“”‘’«»#<>~"
_SIGNS, _SPACES = ("-", "\u2212"), (" ", "\u00a0", "\u2009", "\u202f")
_PARTS = (
    (re.compile(r"[-+\u2212$€£]*\d{1,3}"), re.compile(r"\d{3}(?!\d)")),  # 1 000
    (re.compile(r"[-+\u2212$]*\d+"), re.compile(r"\d+/\d|\\[dtc]?frac")),  # 1 1/2
    (re.compile(r"×|x|\*|·|\\times|\\cdot"), re.compile(r"10")),  # × 10^5
    (re.compile(r"[-+\u2212\d.,$]+"), re.compile(r"(?:×|x|\*|·|\\times|\\cdot) 10")),
)
"""Patterns of a word and of what follows it in the same number."""
_UNIT_WORDS = {*map(str.casefold, UNITS), *SCALES, "%", "\\%", "percent", "degrees", "dollars"}
_LETTER = re.compile(r"(?<![A-Za-z0-9'’_\\])([A-Z])(?![A-Za-z0-9'’_])")
_WORD_AFTER = re.compile(r" (?!(?:is|was|or|and|nor|as|because|since)\b)[a-z]")
_DENIED = re.compile(r"(?:\bnot|n['’]t)(?: be)?[\s(\[*]+$")
_JOINED = re.compile(
    r"[\s()\[\].*]*(?:[,/&]|\b(?:n?or|and)\b)[\s()\[\].*]*(?:\b(?:or|and)\b[\s(\[*]*)?"
)
_OPERATION = re.compile(
    r"(?:(?:[0-9)}\]πθ]|(?<![^\s=(])(?:[A-Za-z]|pi)|\\[a-z]+) ?"
    r"(?:[-+\u2212×*·/÷^]|\\(?:cdot|times|div))|\\sqrt|√|\b(?:minus|negative|plus|times)) $"
)
"""End of a text before a number that is an operand, such as 2 + or minus: no answer alone."""
_FACTOR = re.compile(
    r" (?:\\(?:pi|sqrt|cdot|times|div|theta)|[π√θ+×·÷]|[xyznk](?![A-Za-z])"
    r"|[-*/] ?[b-zB-HJ-Z\\](?![A-Za-z]))"
)
"""Text after a number that continues a formula."""
_TUPLE = re.compile(r"[(\[][-+\u2212.\d\s]{1,40},[-+\u2212.,\d\s]{0,80}$")
"""Beginning of a tuple or an interval, in which a number alone is no answer."""
_LANGUAGE = re.compile(r"[A-Za-z0-9_+-]*(?=\s)")
_BOX = "\\boxed{"


def find_answer(text: str) -> str:
    """Return the content of the last `<answer>…</answer>` without surrounding white space, or the
    whole text without a tag.

    A small policy may answer directly. An instruction-tuned policy reasons first and marks its
    answer, as reasoning-gym's prompts ask.
    """
    tagged = _find_tag(text)
    return text if tagged is None else tagged


def has_text_after(text: str, how: str, fallback: str = "whole", choices: str = "") -> bool:
    """Return True if text follows the answer that `extract` finds with the same arguments.

    Text after an answer changes no reward, so peers could teach it unnoticed (docs/security.md).
    """
    if how == "tag":
        return _find_tag(text) is not None and not text.endswith("</answer>")
    if how == "boxed":
        return not text.endswith("}")
    if how == "auto":
        marked = next((mark for mark in ("</answer>", _BOX) if mark in text), "")
        found = {"": fallback, _BOX: "boxed"}.get(marked, "tag")
        return has_text_after(text, found, choices=choices)
    if how in ("last_number", "last_letter"):
        return not text.endswith(extract(text, how, choices=choices))
    if how == "fenced":
        return "```" in text and not text.endswith("```")
    return how == "last_line" and text != text.rstrip()


def extract(text: str, how: str, fallback: str = "whole", choices: str = "") -> str:
    """Return the answer in `text`.

    Args:
        how: Extraction method of the list at the head of this file.
        fallback: Method that `auto` uses for a text without a marked answer.
        choices: Letters that `last_letter` looks for; empty for all.
    """
    if how == "auto":
        marked = _find_tag(text)
        if marked is None:
            marked = _find_box(text)
        return extract(text, fallback, choices=choices) if marked is None else marked
    if how == "tag":
        return find_answer(text)
    if how == "boxed":
        return _find_box(text) or ""
    if how == "last_number":
        return _find_number(text[-TAIL:])
    if how == "last_letter":
        return _find_letter(text[-TAIL:], choices)
    if how == "fenced":
        return _find_block(text)
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


def _find_number(text: str) -> str:
    """Return the last word with a digit, without quotes and punctuation around it, or "". Words of
    the same number are included, such as 1 000, 1 1/2, 1.2 × 10^5, - 5, 12 km and 3 million.
    """
    text = _TAG.sub(lambda tag: " " * len(tag[0]), text)
    words = [match.span() for match in _WORD.finditer(text)]
    last = next((i for i in reversed(range(len(words))) if _DIGIT.search(text, *words[i])), None)
    if last is None:
        return ""
    start, end = _trim(text, *words[last])
    first = last
    while first > 0 and text[words[first - 1][1] : words[first][0]] in _SPACES:
        before, here = text[slice(*words[first - 1])].lstrip(_AROUND + "(["), text[start:end]
        if not any(left.fullmatch(before) and right.match(here) for left, right in _PARTS) and not (
            before in _SIGNS and (first == 1 or text[words[first - 1][0] - 2] in "=≈:")
        ):
            break
        first -= 1
        start = _trim(text, *words[first])[0]
    if last + 1 < len(words) and text[end : words[last + 1][0]].strip(" ") == "":
        after = _trim(text, *words[last + 1])
        if text[slice(*after)].casefold() in _UNIT_WORDS:
            end = after[1]
    while operation := _OPERATION.search(text, max(0, start - 32), start):
        start = next(at for at, _ in reversed(words) if at <= operation.start())
    if factor := _FACTOR.match(text, end):
        end = factor.end()
    if tuple_before := _TUPLE.search(text[:start]):
        return text[tuple_before.start() : end]
    return text[start:end]


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the place of a word without the quotes, punctuation and brackets around it. A word
    that is too long for a number stays as it is.
    """
    while start < end <= start + CHARACTERS:
        word = text[start:end]
        balanced = all(word.count(left) == word.count(right) for left, right in ("()", "[]", "{}"))
        wrapped = word[0] in "([{" and word[-1] in ")]}" and not re.search(r"[)\]}].", word)
        if word[0] in _AROUND or (word[0] in "([{" and (wrapped or not balanced)):
            start += 1
        elif (
            word[-1] in _AROUND + ".,;:!?\\"
            or (word[-1] in ")]}" and not balanced)
            or (word[-1] == "$" and word.count("$") == 1)
        ):
            end -= 1
        else:
            break
    return start, end


def _find_letter(text: str, choices: str) -> str:
    """Return the last choice in a text, or "". Choices that are joined, such as "A or B", are
    returned together and are no answer. The words "A" and "I", and what follows "not", are skipped.
    """
    found = [
        match
        for match in _LETTER.finditer(text)
        if match[0] in (choices or match[0])
        and not (match[0] in "AI" and _WORD_AFTER.match(text, match.end()))
        and not _DENIED.search(text, max(0, match.start() - 12), match.start())
    ]
    if not found:
        return ""
    start = found[-1].start()
    for before, match in itertools.pairwise(reversed(found)):
        if not _JOINED.fullmatch(text, match.end(), before.start()):
            break
        start = match.start()
    return text[start : found[-1].end()]


def _find_block(text: str) -> str:
    """Return the content of the last ``` block without the name of its language, or the text."""
    end = text.rfind("```")
    start = text.rfind("```", 0, max(end, 0))
    if start < 0:
        return text
    return _LANGUAGE.sub("", text[start + 3 : end], count=1).strip()
