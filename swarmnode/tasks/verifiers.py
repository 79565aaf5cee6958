"""Verifiers: `VERIFIERS[name](answer, gold)` returns the reward of an answer given the right
answer, 1.0 or 0.0. An answer is never executed.

A verifier reads the whole answer and the whole gold answer. It does not search in them; that is
done before, by `answers.extract`. An answer that cannot be read completely is wrong, and a gold
answer that cannot be read completely is refused with a remedy.

An answer is a peer's text of at most 4 KiB; verifiers run in the scorer's sandbox. Every function
but `math` takes linear time. They raise only ValueError, LookupError, ArithmeticError or
RecursionError, which have the reward 0 like a wrong answer. `check` tests a dataset's gold answers
before any training, outside of the sandbox; it does not load the library of `math`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from swarmnode.tasks import quantities
from swarmnode.tasks.answers import extract
from swarmnode.tasks.quantities import DIGITS, Quantity

NESTING = 32
FORMULA_CHARACTERS = 400
"""Maximum length of a formula for `math`."""
FORMULA_NESTING = 12
_NO_FORMULA = re.compile(
    r"(?<![\\A-Za-z])(?<!begin\{)(?<!end\{)(?!sqrt|infinity)[A-Za-z]{3,}|(?<!_)[0-9]\s+[0-9]|(?<![0-9.])0[0-9]|[0-9]\s*_"
    r"|'|\\prime|\^\s*\{?\s*(?:T(?![a-z])|\\top|\\dagger)|\.[0-9]*\.|[^\x20-\x7e°×πθ∞≤≥≠√∪∩±]|\\(?:text|mathrm|mbox|operatorname)"
)
_AND = re.compile(r"\s*,?\s?(?:\\text\{\s?(?:and|or)\s?\}|\b(?:and|or)\b)\s?")
_TEXT_UNIT = re.compile(
    r"\\(?:text|textrm|mathrm|mbox)\s?\{\s*([A-Za-z]+\.?(?:/[a-z]+)?)\s*\}(\^\{?[23]\}?)?$"
)
_TEXT_WORD = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{[^{}]*[A-Za-z]{2}")
_GROUPED = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!)(?=[0-9]{3}(?![0-9]))")
_THOUSANDS = re.compile(r"^-?[1-9][0-9]{0,2}(?:,[0-9]{3})+$")
_RELATION = re.compile(r"[=<>]|\\(?:in|[lg]eq?)(?![a-z])")
_LETTER = re.compile(r"[A-Za-z]")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+|\S", re.DOTALL)
_BRACED = re.compile(r"\{\s?([0-9]+|[A-Za-z]|\\[A-Za-z]+)\s?\}")
_ARGUMENT = re.compile(r"(\^|_|\\sqrt(?![A-Za-z])|\\frac(?:\{[^{}]*\})?)\s?([0-9])")
_SPELLINGS = {
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\leq": "\\le",
    "\\geq": "\\ge",
    "\\neq": "\\ne",
    "\\cdot": "×",
    "*": "×",
    "≤": "\\le",
    "≥": "\\ge",
    "≠": "\\ne",
    "π": "\\pi",
    "∞": "\\infty",
}
_MISREAD = re.compile(r"==|\\approx|\\equiv|(?<![A-Za-z\\])E(?![A-Za-z])")
"""Signs that the library reads as = and as the number e."""


def exact(answer: str, gold: str) -> bool:
    """Compare texts in Unicode's composed form (NFC) without surrounding white space."""
    return _compose(answer).strip() == _compose(gold).strip()


def numeric(answer: str, gold: str) -> bool:
    """Compare numbers (`quantities`). Units are compared if both have one."""
    return read_number(answer).equals(read_number(gold))


def read_number(text: str) -> Quantity:
    """Read a whole text as a number, or what follows GSM8K's mark ####. Raises ValueError."""
    return quantities.parse(text.rpartition("####")[2])


def choice(answer: str, gold: str) -> bool:
    """Compare single letters; each may be in brackets or have a full stop."""
    return read_letter(answer) == read_letter(gold)


def boxed(answer: str, gold: str) -> bool:
    """Compare LaTeX: the same number, or the same symbols in the same order. Spacing, sizes and
    needless braces do not matter. Units in \\text are compared if both have one.
    """
    number, wanted = _try_number(answer), _try_number(gold)
    if number is not None and wanted is not None:
        return number.equals(wanted)
    (formula, unit), (right, right_unit) = _split_unit(answer), _split_unit(gold)
    return (not unit or not right_unit or unit == right_unit) and symbols(formula) == symbols(right)


def math(answer: str, gold: str) -> bool:
    """Compare formulas by math-verify: equal by `boxed`, or equal as sets, intervals, matrices,
    equations and expressions. Two numbers are compared by `numeric` alone.
    """
    if boxed(answer, gold):
        return True
    if _try_number(answer) is not None and _try_number(gold) is not None:
        return False
    from swarmnode.tasks import formulas

    (formula, unit), (right, right_unit) = read_formula(answer), read_formula(gold)
    if unit and right_unit and unit != right_unit:
        return False
    shapes = {_shape(formula), _shape(right)} - {None}
    if len(shapes) > 1:
        return False  # to the library (1,2) is an interval, and equals the set 1,2
    if set(_MISREAD.findall(formula)) != set(_MISREAD.findall(right)):
        return False
    return formulas.equal(formula, right)


def read_formula(text: str) -> tuple[str, str]:
    """Return (formula, unit) in the spelling that `formulas` reads. Raises ValueError for text that
    the library would read as something else: words as products of letters, 1 2 as 3, 05 as 5,
    1011_2 as 1011.
    """
    text, unit = _split_unit(text)
    if _TEXT_WORD.search(text := _AND.sub(",", text)):
        raise ValueError("it has words")
    text = quantities.plain(_GROUPED.sub("", text))
    if not 0 < len(text) <= FORMULA_CHARACTERS:
        raise ValueError(f"a formula has 1 to {FORMULA_CHARACTERS} characters")
    if no_formula := _NO_FORMULA.search(text):
        raise ValueError(f"{no_formula[0]!r} is not part of a formula")
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > FORMULA_NESTING:
        raise ValueError(f"it is nested deeper than {FORMULA_NESTING}")
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text), unit


def check_formula(gold: str) -> None:
    """Raise ValueError if `gold` cannot be compared. The library is not loaded for it."""
    symbols(gold)
    if len(gold) > FORMULA_CHARACTERS:
        raise ValueError(
            f"it has more than {FORMULA_CHARACTERS} characters: give the final answer alone"
        )


def symbols(text: str) -> list[str]:
    """Return the symbols of a formula in one spelling. Raises ValueError without a symbol."""
    text = quantities.plain(_compose(text))
    if "\\boxed" in text:
        raise ValueError("it has text around \\boxed: give the final answer alone")
    for _ in range(2):  # the second argument of \\frac follows the first one
        text = _ARGUMENT.sub(r"\1{\2}", text)
    found = _TOKEN.findall(_BRACED.sub(r" \1 ", text))
    if not found:
        raise ValueError("it is empty")
    return [_SPELLINGS.get(symbol, symbol) for symbol in found]


def _split_unit(text: str) -> tuple[str, str]:
    """Return (formula, unit) of a text that ends with a unit in \\text; the unit may be empty."""
    text = quantities.unwrap(text.strip().rstrip(".,;:"))
    match = _TEXT_UNIT.search(text)
    if match is None or not text[: match.start()].strip():
        return text, ""
    return text[: match.start()], quantities.parse(f"1 {match[1]}{match[2] or ''}").unit


def _shape(formula: str) -> str | None:
    """Return the brackets around a tuple or an interval, empty for a set; None if it is neither."""
    if "," not in formula or _RELATION.search(formula):
        return None
    ends = formula[0] + formula[-1]
    return ends if ends[0] in "([" and ends[1] in ")]" else ""


def _try_number(text: str) -> Quantity | None:
    """Read a formula as a number. A single letter outside of \\text is a variable, not a unit."""
    try:
        number = read_number(text)
    except ValueError:
        return None
    return None if _LETTER.fullmatch(number.unit) and "\\" not in text else number


def equal_json(answer: str, gold: str) -> bool:
    """Compare JSON values: 1 equals 1.0, and 1 does not equal true. Decimals are exact."""
    return _equal_values(_load_json(answer), _load_json(gold))


def _equal_values(one: object, other: object) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal_values, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            _equal_values(item, other[name]) for name, item in one.items()
        )
    return one == other


@dataclass(frozen=True, slots=True)
class Verifier:
    """A verifier.

    Attributes:
        verdict: (answer, gold) → True if the answer is right.
        fallback: Extraction method for a text without a marked answer (`answers.extract`).
    """

    verdict: Callable[[str, str], bool]
    guide: str
    """What it compares, for docs/verifiers.md."""
    fallback: str = "whole"
    check_gold: Callable[[str], None] | None = None
    """Check of `gold` that raises ValueError, in place of comparing `gold` with itself."""

    def reward(self, answer: str, gold: str) -> float:
        """Return 1.0 or 0.0; text that this verifier cannot read is wrong. Raises nothing."""
        try:
            return float(self.verdict(answer, gold))
        except (ValueError, LookupError, ArithmeticError, RecursionError):
            return 0.0

    def check(self, gold: str) -> None:
        """Raise ValueError if no answer could be right."""
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
    "exact": Verifier(
        exact, "The same text without white space around it, in Unicode's composed form (NFC)."
    ),
    "numeric": Verifier(
        numeric,
        "The same number. Units are compared if both have one, and `%` is a unit. Decimals are"
        " exact, but one of at least six digits may be the rounding of a fraction. The text after"
        " `####` counts (GSM8K).",
        "last_number",
    ),
    "choice": Verifier(
        choice,
        "The same letter. A completion is searched for the letters that are right answers of the"
        " dataset; the words A and I, and what follows `not` or `n't`, are skipped.",
        "last_letter",
    ),
    "boxed": Verifier(
        boxed,
        "The same number as by `numeric`, or the same LaTeX symbols in the same order. Spacing,"
        " sizes and needless braces do not matter.",
        "boxed",
    ),
    "math": Verifier(
        math,
        "As `boxed`, or the same formula, set, interval, matrix or equation by math-verify. It"
        " needs Linux with seccomp, and the exact library versions of the extra `math`. An answer"
        " of more than 400 characters, or that takes half a second of CPU time, is wrong. A median"
        " comparison takes 4 ms; a scorer takes 1.6 s of CPU more to start, and 55 MB.",
        "boxed",
        check_gold=check_formula,
    ),
    "json": Verifier(equal_json, "The same JSON value. Decimals are exact.", "fenced"),
}
VERSION = "2"
"""Part of the task version. Change it when a verdict above changes."""


def read_letter(text: str) -> str:
    """Return the one letter of a choice. Raises ValueError."""
    letter = quantities.plain(text).strip(" ()[].:*\n")
    if not _LETTER.fullmatch(letter):
        raise ValueError("it is not one letter: write the letter alone, such as B")
    return letter.upper()


def _compose(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _load_json(text: str) -> object:
    """Parse JSON that may be in a ``` block. Texts are in Unicode's composed form."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = extract(text, "fenced")
    depth = deepest = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    if deepest > NESTING:
        raise ValueError(f"it is nested deeper than {NESTING}")
    loaded = json.loads(
        text,
        parse_constant=_no_constant,
        parse_int=_bounded_int,
        parse_float=Decimal,
        object_pairs_hook=_unique_keys,
    )
    return _compose_all(loaded)


def _compose_all(value: object) -> object:
    if isinstance(value, str):
        return _compose(value)
    if isinstance(value, list):
        return [_compose_all(item) for item in value]
    if isinstance(value, dict):
        return {_compose(name): _compose_all(item) for name, item in value.items()}
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("one of its keys occurs twice")
    return made


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _bounded_int(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError("its number is too long")
    return int(text)
