"""Verifiers: `VERIFIERS[name](answer, gold)` returns the reward of an answer given the right
answer, 1.0 or 0.0. An answer is never executed.

`majority` needs no right answer: `votes(answers)` rewards the most frequent answer of a group.

An answer is a peer's text of at most 4 KiB; verifiers run in the scorer's sandbox. Every function
takes linear time and raises only ValueError, LookupError, ArithmeticError or RecursionError, which
have the reward 0 like a wrong answer. `check` tests a dataset's gold answers before any training.
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
"""Tolerance for two numbers that are not both whole: 1/3 and 0.333333 are equal, 1000000 and
1000001 are not."""
DIGITS = 100
"""Maximum number of digits of a number. A longer one is not read."""
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
    """Compare texts without surrounding white space."""
    return answer.strip() == gold.strip()


def numeric(answer: str, gold: str) -> bool:
    """Compare numbers. Thousands separators, currency, fractions and per cent signs are understood.
    Units are compared if both have one.
    """
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
    """Compare numbers, or texts without case and surrounding white space."""
    return ballot(answer) == ballot(gold)


def ballot(answer: str) -> str:
    """Return the vote of an answer in one spelling: a number's value, or the text.

    Raises:
        ValueError, ArithmeticError: The answer is empty, or its number is out of range.
    """
    text = answer.rpartition("####")[2].strip().casefold()  # as in `quantity`
    if not text:
        raise ValueError("it is empty")
    if not NUMBER.fullmatch(text):
        return text
    value, unit = quantity(text)
    return f"{_CONTEXT.plus(value).normalize(_CONTEXT)}{unit}"


def votes(answers: Sequence[str | None]) -> list[float]:
    """Return 1.0 for each answer of a group with the most frequent vote, and 0.0 for the others.

    If two votes tie for the lead, all rewards are 0. The order of the answers does not matter, so
    every receiver computes the same rewards.

    Source: TTRL (arXiv 2504.16084), majority voting as reward.

    Args:
        answers: (G,) Answers; None for an answer that is not judged.
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
    """Compare single letters; each may be in brackets or have a full stop."""
    return _parse_letter(answer) == _parse_letter(gold)


def members(answer: str, gold: str) -> bool:
    """Compare sets of items: separated by commas, semicolons or lines, or a JSON list. Order and
    case do not matter.
    """
    return _parse_members(answer) == _parse_members(gold)


def boxed(answer: str, gold: str) -> bool:
    """Compare LaTeX: equal after removal of spacing and sizing commands, or equal as numbers."""
    if _strip_latex(answer) == _strip_latex(gold):
        return True
    try:
        return numeric(_strip_latex(answer), _strip_latex(gold))
    except (ValueError, ArithmeticError):
        return False


def equal_json(answer: str, gold: str) -> bool:
    """Compare JSON values: 1 equals 1.0, and 1 does not equal true."""
    return json_schema.equal(_load_json(answer), _load_json(gold))


def fits_schema(answer: str, gold: str) -> bool:
    """Return True if the answer is JSON that is valid by the schema `gold`."""
    return json_schema.valid(_load_json(answer), _load_json(gold))


def check_schema(gold: str) -> None:
    """Raise ValueError if `gold` is not a supported schema."""
    json_schema.check(_load_json(gold))


@dataclass(frozen=True, slots=True)
class Verifier:
    """A verifier.

    Attributes:
        verdict: (answer, gold) → True if the answer is right.
        fallback: Extraction method for a text without a marked answer (`answers.extract`).
    """

    verdict: Callable[[str, str], bool]
    fallback: str = "whole"
    check_gold: Callable[[str], None] | None = None
    """Check of `gold` that raises ValueError, if `gold` is not itself a right answer."""

    def reward(self, answer: str, gold: str) -> float:
        """Return 1.0 or 0.0; text that this verifier cannot read is wrong. Raises nothing."""
        try:
            return float(self.verdict(answer, gold))
        except (ValueError, LookupError, ArithmeticError, RecursionError):
            return 0.0

    def check(self, gold: str) -> None:
        """Raise ValueError if no answer could be right: `gold` does not match itself, or is not a
        schema.
        """
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
"""Part of the task version. Change it when a verdict above, or the result of `answers`, changes."""


def quantity(text: str) -> tuple[Decimal, str]:
    """Return the last number in a text and the unit after it, "" without a unit. Raises ValueError
    if there is no number, or if it is too long or out of range.
    """
    text = text.rpartition("####")[2].strip()  # GSM8K's mark of the final result
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


def _parse_letter(text: str) -> str:
    match = _CHOICE.fullmatch(text)
    if match is None:
        raise ValueError("it is not one letter")
    return match[1].upper()


def _parse_members(text: str) -> frozenset[str]:
    text = text.strip()
    if text.startswith("["):
        loaded = _load_json(text)
        if isinstance(loaded, list):
            return frozenset(str(item).strip().casefold() for item in loaded)
    parts = text.strip("{}").replace(";", ",").replace("\n", ",").split(",")
    found = frozenset(part.strip().casefold() for part in parts if part.strip())
    if not found:
        raise ValueError("it is empty")
    return found


def _strip_latex(text: str) -> str:
    for noise in _LATEX_NOISE:
        text = text.replace(noise, "")
    text = "".join(text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").split()).rstrip(
        "."
    )
    return _FRACTION.sub(r"\1/\2", text)


def _load_json(text: str) -> object:
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
