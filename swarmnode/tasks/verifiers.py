"""What an answer is worth, given the right one: `VERIFIERS[name](answer, gold)` is 1.0 or 0.0.
Nothing of an answer is ever executed.

`majority` needs no right answer: `votes(answers)` rewards the answer that most of a group share.

An answer is a stranger's text of at most 4 KiB and arrives here in the scorer's sandbox. Every
function is linear in it, and raises nothing but ValueError, LookupError, ArithmeticError or
RecursionError, which are 0 like a wrong answer. A dataset's own gold answers go through `check`
before anything is trained on them.
"""

from __future__ import annotations

import decimal
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from swarmnode.tasks import json_schema
from swarmnode.tasks.answers import NUMBER

RELATIVE_TOLERANCE = Decimal("1e-6")
"""How far two numbers that are not both whole may be apart: 1/3 and 0.333333 are equal, 1000000 and
1000001 are not."""
DIGITS = 100
"""A longer number is not looked at."""
NESTING = 32
MAJORITY = "majority"
"""The verifier that needs no right answers."""
_TRAPS = [decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow]
_CONTEXT = decimal.Context(prec=DIGITS + 10, Emax=9999, Emin=-9999, traps=_TRAPS)
_CHOICE = re.compile(r"[\s(\[]*([A-Za-z])[\s)\].:]*")
_FRACTION = re.compile(r"\\frac\{(\d{1,20})\}\{(\d{1,20})\}")
_LATEX_NOISE = (
    "\\left",
    "\\right",
    "\\!",
    "\\,",
    "\\;",
    "\\ ",
    "$",
    "\\%",
    "%",
    "\\text",
    "\\mathrm",
    "^\\circ",
    "^{\\circ}",
)


def exact(answer: str, gold: str) -> bool:
    """The same text, white space around it aside."""
    return answer.strip() == gold.strip()


def numeric(answer: str, gold: str) -> bool:
    """The same number: thousands separators, currency, fractions and per cent are read; a unit
    counts where both have one."""
    value, unit = quantity(answer)
    wanted, wanted_unit = quantity(gold)
    if unit and wanted_unit and unit != wanted_unit:
        return False
    if value == value.to_integral_value() and wanted == wanted.to_integral_value():
        return value == wanted
    return _CONTEXT.abs(_CONTEXT.subtract(value, wanted)) <= RELATIVE_TOLERANCE * max(
        abs(value), abs(wanted)
    )


def same_vote(answer: str, gold: str) -> bool:
    """The same number, or the same text, case and white space around it aside."""
    return ballot(answer) == ballot(gold)


def ballot(answer: str) -> str:
    """Return what an answer votes for, in one spelling: a number's value, or the text.

    Raises ValueError or ArithmeticError for an empty answer and for a number that is out of range.
    """
    text = answer.rpartition("####")[2].strip().casefold()  # as in `quantity`
    if not text:
        raise ValueError("there is nothing in it")
    if not NUMBER.fullmatch(text):
        return text
    value, unit = quantity(text)
    return f"{_CONTEXT.plus(value).normalize(_CONTEXT)}{unit}"


def votes(answers: Sequence[str | None]) -> list[float]:
    """Return 1.0 for each answer of a group that votes with most of it, and 0.0 for the others.

    Where two ballots lead together, nobody has won and all rewards are 0. The order of the answers
    does not count, so that every receiver computes the same.

    Source: TTRL (arXiv 2504.16084), majority voting as reward.

    Args:
        answers: (G,) None for one that is not looked at.
    """
    cast: list[str | None] = []
    for answer in answers:
        try:
            cast.append(ballot(answer) if answer is not None else None)
        except (ValueError, ArithmeticError):
            cast.append(None)
    leading = Counter(vote for vote in cast if vote is not None).most_common(2)
    if not leading or (len(leading) == 2 and leading[0][1] == leading[1][1]):
        return [0.0] * len(cast)
    return [float(vote == leading[0][0]) for vote in cast]


def choice(answer: str, gold: str) -> bool:
    """The same letter, in brackets, with a full stop, or alone."""
    return _letter(answer) == _letter(gold)


def members(answer: str, gold: str) -> bool:
    """The same set of things, separated by commas, semicolons or lines, or a JSON list; order and
    case do not count."""
    return _members(answer) == _members(gold)


def boxed(answer: str, gold: str) -> bool:
    """The same mathematics as far as spelling goes: equal after LaTeX's spacing and sizing are
    removed, or equal as numbers."""
    if _bare(answer) == _bare(gold):
        return True
    try:
        return numeric(_bare(answer), _bare(gold))
    except (ValueError, ArithmeticError):
        return False


def equal_json(answer: str, gold: str) -> bool:
    """The same JSON value. 1 and 1.0 are equal, 1 and true are not."""
    return _typed(_loads(answer)) == _typed(_loads(gold))


def fits_schema(answer: str, gold: str) -> bool:
    """JSON that is as the schema `gold` says."""
    return json_schema.valid(_loads(answer), _loads(gold))


def check_schema(gold: str) -> None:
    """Raises ValueError for a schema that no answer could be held against."""
    json_schema.check(_loads(gold))


@dataclass(frozen=True, slots=True)
class Verifier:
    """`verdict(answer, gold)`; `fallback`: where an answer stands when nothing marks it
    (`answers.extract`)."""

    verdict: Callable[[str, str], bool]
    fallback: str = "whole"
    check_gold: Callable[[str], None] | None = None
    """Raises ValueError, where `gold` is no answer itself."""

    def reward(self, answer: str, gold: str) -> float:
        """1.0 or 0.0; text that this verifier cannot read is wrong. Raises nothing."""
        try:
            return float(self.verdict(answer, gold))
        except (ValueError, LookupError, ArithmeticError, RecursionError):
            return 0.0

    def check(self, gold: str) -> None:
        """Raises ValueError when nothing could be right by `gold`: as an answer it does not even
        match itself, or it is no schema."""
        try:
            if self.check_gold is not None:
                self.check_gold(gold)
                return
            if self.verdict(gold, gold):
                return
        except (LookupError, ArithmeticError, RecursionError) as error:
            raise ValueError(str(error) or type(error).__name__) from None
        raise ValueError("it is not equal to itself")


VERIFIERS: dict[str, Verifier] = {
    "exact": Verifier(exact),
    "numeric": Verifier(numeric, "last_number"),
    "choice": Verifier(choice, "last_letter"),
    "set": Verifier(members),
    "boxed": Verifier(boxed, "boxed"),
    "json": Verifier(equal_json),
    "json_schema": Verifier(fits_schema, check_gold=check_schema),
    MAJORITY: Verifier(same_vote, "last_number"),
}
VERSION = "1"
"""Enters the task version: change it when a verdict above, or what `answers` finds, changes."""


def quantity(text: str) -> tuple[Decimal, str]:
    """The last number in a text and the unit behind it, "" if none. Raises ValueError without a
    number, or with one that is too long."""
    text = text.rpartition("####")[2].strip()  # how GSM8K marks the result of a worked solution
    matches = list(NUMBER.finditer(text))
    if not matches:
        raise ValueError("there is no number in it")
    match = matches[-1]
    number, behind = match[0], text[match.end() :].strip()
    unit = behind.rstrip(".").casefold()
    if "%" in number:
        unit = "%"
    plain = (
        number.replace(",", "").replace("$", "").replace(" ", "").replace("\u2212", "-").rstrip("%")
    )
    if len(plain) > DIGITS:
        raise ValueError("its number is too long")
    top, _, bottom = plain.partition("/")
    value = _CONTEXT.create_decimal(top)
    if bottom:
        value = _CONTEXT.divide(value, _CONTEXT.create_decimal(bottom))
    if not value.is_finite() or abs(value.adjusted()) > 9999:
        raise ValueError("its number is out of range")
    return value, unit if len(unit) <= 16 else ""


def _letter(text: str) -> str:
    match = _CHOICE.fullmatch(text)
    if match is None:
        raise ValueError("it is not one letter")
    return match[1].upper()


def _members(text: str) -> frozenset[str]:
    text = text.strip()
    if text.startswith("["):
        loaded = _loads(text)
        if isinstance(loaded, list):
            return frozenset(str(item).strip().casefold() for item in loaded)
    parts = text.strip("{}").replace(";", ",").replace("\n", ",").split(",")
    found = frozenset(part.strip().casefold() for part in parts if part.strip())
    if not found:
        raise ValueError("there is nothing in it")
    return found


def _bare(text: str) -> str:
    for noise in _LATEX_NOISE:
        text = text.replace(noise, "")
    text = "".join(text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").split()).rstrip(
        "."
    )
    return _FRACTION.sub(r"\1/\2", text)


def _loads(text: str) -> object:
    depth = deepest = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    if deepest > NESTING:
        raise ValueError(f"it is nested deeper than {NESTING}")
    return json.loads(text, parse_constant=_no_constant, parse_int=_bounded_int)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _bounded_int(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError("its number is too long")
    return int(text)


def _typed(value: object) -> object:
    """A value that compares as JSON does: true is not 1."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list):
        return [_typed(item) for item in value]
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    return value
