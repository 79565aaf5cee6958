"""The answer that a completion states, for questions with one short right answer.

Instruct models answer in a sentence: "7 − 2 equals 5.", "The answer is **5**.", "\\boxed{5}". One
place of a text counts, so several guesses earn no more than one. protocol/06-tasks.md specifies it.
"""

from __future__ import annotations

import re

from swarmnode.tasks.answers import TAIL, extract

VERSION = "2"
"""Part of the versions of the tasks that use this. Change it when a verdict below changes."""
_NUMBER = re.compile(r"(?a)-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")
_RIGHT_NUMBER = re.compile(r"(?a)-?\d+(?:/\d+)?")
_FRACTION = re.compile(r"(?a)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_MARKED = re.compile(r'"([^"]+)"|\*\*([^*]+)\*\*|`([^`]+)`')
_MARKUP = re.compile(r'\*\*|[`$"]|\\[()\[\]]')
_AROUND = ' .!,;:)]}*`"$\\'
_END = re.compile(r"(?a)[.!?]\s")
_CUE = re.compile(
    r"(?a)(?!^)=|:(?=\s|$)|"
    r"\b(?:(?:equals?|simplifies|amounts) to|is|are|has|have|equals|gets?|gives|makes)\b"
)
"""What stands before an answer."""
_DOUBT = re.compile(r"(?a)\b(?:not|or)\b|n't")
_BEHIND = re.compile(r"(?ai)$|\s*\(|[,;]?\s+(?!(?:and|to|x|times|plus|minus|divided)\b)(?=[a-z])")
"""What may stand behind a number: nothing, a bracket, or a word that does not continue a sum."""


def states(text: str, right: str) -> bool:
    """Return True if the text is the right answer, or its last sentence states it. If more
    than one word, such as a unit, stands behind the answer, the sentence must end. So an answer
    that rambles until it is cut is wrong.
    """
    if text == right:
        return True
    tail = text[-TAIL:].strip().replace("\u2212", "-")
    sentence = _END.split(tail.rpartition("\n")[2])[-1]
    box = extract(sentence, "boxed")
    line = _FRACTION.sub(r"\1/\2", box or sentence)
    if not re.search(r"\s", tail):  # no sentence: "=5" states nothing
        return _MARKUP.sub("", line).removesuffix(".") == right
    read = _stated_number if _RIGHT_NUMBER.fullmatch(right) else _stated_text
    stated, behind = read(line.strip(" .!"))
    if box:
        behind += sentence.rpartition(box)[2]
    ends = sentence.rstrip('*`"$ ').endswith((".", "!", ")"))
    return stated == right and (ends or len(behind.strip(_AROUND).split()) < 2)


def _stated_number(sentence: str) -> tuple[str | None, str]:
    """Return the number that a sentence states, and the text behind it: the number after its last
    cue, or its only number.
    """
    sentence = _MARKUP.sub(" ", sentence).strip(" .!")
    if _DOUBT.search(sentence):
        return None, ""
    *before, behind = _CUE.split(sentence)
    found = _NUMBER.match(behind := behind.strip())
    if before and found is not None and _BEHIND.match(behind, found.end()):
        return found[0].replace(",", ""), behind[found.end() :]
    numbers = [word.strip(",;:()") for word in sentence.split() if re.search("[0-9]", word)]
    if len(numbers) == 1 and _NUMBER.fullmatch(numbers[0]):
        return numbers[0].replace(",", ""), sentence.rpartition(numbers[0])[2]
    return None, ""


def _stated_text(sentence: str) -> tuple[str, str]:
    """Return the text that a sentence states, and the text behind it: its only marked text, or the
    text after its last cue.
    """
    marked = list(_MARKED.finditer(sentence))
    if len(marked) == 1:
        stated, behind = "".join(marked[0].groups("")), sentence[marked[0].end() :]
    else:
        stated, behind = _CUE.split(sentence)[-1], ""
    return _MARKUP.sub("", stated).strip(" .!"), behind
