"""Numbers with units, read completely: text that is not one number is refused with a remedy.

A number is written as 1234, 1,234 or 1 234, 12.5, .5, 1.2e3, 1.2 × 10^3, 3/4, 1 3/4, 10^5, or with
LaTeX's \\frac; with a sign, a currency, one of the words hundred to trillion, and a unit. Fractions
keep values exact. All patterns take linear time on the at most `CHARACTERS` characters of a text.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from math import inf

CHARACTERS = 256
"""Maximum length of a number with its unit. A longer text is not read."""
DIGITS, POWER_DIGITS = 100, 1000
"""Maximum number of digits of a number, and of a power. Larger ones are not read, because their
exact values would take time."""
SHORT_DIGITS, FLOAT_DIGITS = 6, 15
"""A decimal of at least SHORT_DIGITS digits may be the rounding of a fraction or of a decimal with
at least FLOAT_DIGITS digits, which is a computer's float."""

SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_UNIT_SYMBOLS = (
    "m cm mm km nm in ft yd mi g kg mg lb oz t s ms h hr min d L l ml mL cl V W kW A J kJ N Pa kPa"
    " Hz kHz MHz GHz eV mol C F K Ω B kB KB MB GB TB bit °C °F pt dB rad mph km/h m/s m/s^2"
    " m^2 m^3 cm^2 cm^3 mm^2 mm^3 km^2 ft^2 ft^3 deg pct"
)
UNITS = frozenset(_UNIT_SYMBOLS.split())
"""Units of one or two letters, or that may follow a number without a space. A single letter without
a space is a variable: neither 2x nor 2t is the number 2."""
_SAME_UNIT = {
    "percent": "%",
    "per cent": "%",
    "percentage": "%",
    "pct": "%",
    "degree": "°",
    "deg": "°",
    "dollar": "$",
    "usd": "$",
    "euro": "€",
    "eur": "€",
    "pound sterling": "£",
    "cent": "¢",
}
_OTHER_WORDS = (
    "and or to than plus minus times over of by am pm bc ad bce ce squared cubed factorial mod"
    " jan feb mar apr may jun jul aug sep sept oct nov dec january february march april june july"
    " august september october november december below"
)
_NOT_UNITS = frozenset(_OTHER_WORDS.split())
"""Words that make a text more than one number with a unit: lists, ranges, times and dates."""

_PLAIN = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?"
_INSIDE = rf"\{{\s*([-+]?{_PLAIN})\s*\}}"
_FRAC = rf"\\frac\s*(?:{_INSIDE}|([0-9]))\s*(?:{_INSIDE}|([0-9]))"
_EXPONENT = r"\^\s*(?:\{\s*([-+]?[0-9]{1,4})\s*\}|\(?([-+]?[0-9]{1,4})\)?)"
_FORMS = tuple(
    re.compile(pattern + r"(?P<rest>(?!\s*(?:[0-9.,^]|/\s*[0-9])).*)", re.DOTALL)
    for pattern in (
        rf"([0-9]+)\s*{_FRAC}",
        _FRAC,
        r"([0-9]+) +([0-9]+)/([0-9]+)",
        rf"({_PLAIN}) ?/ ?({_PLAIN})",
        rf"({_PLAIN})\s*(?:×|[xX*](?= ?10\b))\s*10\s*{_EXPONENT}",
        rf"({_PLAIN}){_EXPONENT}",
        rf"({_PLAIN})(?:[eE]([-+]?[0-9]{{1,4}}))?",
    )
)
_SCIENTIFIC, _POWER, _DECIMAL = _FORMS[-3:]
_START = re.compile(r"([-+]?)\s?([$€£¥₹]?)\s?([-+]?)\s?")
_NAME = re.compile(r"\\?[A-Za-z]+(?:_?[0-9]|_\{[0-9]+\}|\([a-z]\))?")
_SYMBOLS = "%‰°$€£¥₹¢"
_WORD = r"[^\W\d_]+\.?(?:['’][a-z]+)?(?:\^[23])?"
_UNIT = re.compile(rf"[{_SYMBOLS}]?(?:[ /]?{_WORD}(?:[ /·-]{_WORD})*)?")
_WRAPS = (
    ("**", "**"),
    ("`", "`"),
    ('"', '"'),
    ("$$", "$$"),
    ("$", "$"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("\\boxed{", "}"),
)
_REPLACED = (
    (re.compile(r"[\u00a0\u2000-\u200a\u202f\u205f\u3000\t]"), " "),
    (re.compile(r"[\u2212\ufe63\u2010\u2011]"), "-"),
    (re.compile(r"[\uff01-\uff5e]"), lambda m: chr(ord(m[0]) - 0xFEE0)),  # full-width forms
    (
        re.compile(r"[\u00bc-\u00be\u2150-\u215e]"),  # such as ½
        lambda m: " " + unicodedata.normalize("NFKC", m[0]),
    ),
    (
        re.compile(r"[\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+"),  # superscripts
        lambda m: "^" + unicodedata.normalize("NFKC", m[0]).replace("\u2212", "-"),
    ),
    (re.compile(r"\u2044"), "/"),
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"(?<!\\)\\(?:[,;: ]|quad\b|qquad\b)|~"), " "),
    (re.compile(r"\\!|\\(?:left|right)(?![a-z])|\\displaystyle\b"), ""),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])|\u22c5|\u00b7(?= ?10\b)"), "×"),
    (re.compile(r"\^\s?\{?\s?\\circ\s?\}?|\\degree\b|\u00ba"), "°"),
    (re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{([^{}]*)\}"), r" \1 "),
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and its unit.

    Attributes:
        digits: Number of significant digits; infinite for a fraction or a power.
        step: Value of one unit in the last digit.
        unit: "" without a unit.
        name: Name before an equals sign, such as x; "" without one.
    """

    value: Fraction
    digits: float
    step: Fraction
    unit: str
    name: str = ""

    def equals(self, other: Quantity) -> bool:
        """Return True for the same number and, if both have one, the same unit and the same name.

        Decimals with few digits are equal only if their values are. A decimal of at least 6 digits
        equals a fraction that rounds to it: 0.333333 is 1/3. An integer is no rounding.
        """
        for mine, yours in ((self.unit, other.unit), (self.name, other.name)):
            if mine and yours and mine != yours:
                return False
        return self.value == other.value or self._rounds(other) or other._rounds(self)

    def _rounds(self, longer: Quantity) -> bool:
        """Return True if this is a rounding of `longer`."""
        if longer.digits < FLOAT_DIGITS or self.digits == inf or self.step >= 1:
            return False
        allowed = abs(longer.value) / 10 ** (FLOAT_DIGITS - 1)
        if self.digits >= SHORT_DIGITS:
            allowed = max(allowed, self.step)
        return abs(self.value - longer.value) < allowed


def plain(text: str) -> str:
    """Return a text with one spelling of signs, digits, spaces and LaTeX, outside of delimiters
    such as $…$ and \\boxed{…}.
    """
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)  # type: ignore[arg-type]
    return unwrap(text.strip().rstrip(".,;:?").strip())


def unwrap(text: str) -> str:
    """Return a formula without the delimiters around it: $…$, \\(…\\), \\[…\\], \\boxed{…}."""
    text = text.strip()
    for start, end in _WRAPS:
        inside = text[len(start) : -len(end)]
        if (
            text.startswith(start)
            and text.endswith(end)
            and len(text) > len(start + end)
            and (start[-1] not in "${" or (start[0] == "$" and "$" not in inside))
        ):
            return unwrap(inside)
        if start == "\\boxed{" and text.startswith(start) and _closes_at_end(text, len(start)):
            return unwrap(inside)
    return text


def _closes_at_end(text: str, at: int) -> bool:
    """Return True if the brace before `at` is closed by the last character."""
    depth = 1
    for place in range(at, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return place == len(text) - 1
    return False


def parse(text: str) -> Quantity:
    """Parse a whole text as one number with an optional unit. What stands before the last equals
    sign is a calculation or a name, such as "2 + 2 = 4" or "x = 4".

    Raises:
        ValueError: It is not one number; the message has the remedy.
    """
    text = text.strip()
    if len(text) > 16 * CHARACTERS:
        raise ValueError("it is too long for a number")
    text = plain(text)
    before, equals, after = text.rpartition("=")
    if equals:
        if re.search(r"[,;<>≠≤≥]|[!:]\s*$|\b(?:or|and|not)\b|\\[ngl]eq?", before):
            raise ValueError("it is more than one number")
        if before.strip() and not all(_may_equal(side, after) for side in before.split("=")):
            raise ValueError("its sides are not equal")
        text = after.strip()
    if len(text) > CHARACTERS:
        raise ValueError("it is too long for a number")
    start = _START.match(text)
    assert start is not None
    number, rest = _read(text[start.end() :])
    if number is None or (start[1] and start[3]):
        raise ValueError(explain(text))
    value, digits, step = number
    scale, unit = _read_unit(rest)
    if unit is None:
        raise ValueError(explain(text))
    if start[2] and unit != start[2]:
        unit = f"{start[2]} {unit}".strip()
    sign = -1 if "-" in (start[1], start[3]) else 1
    name = before.strip() if _NAME.fullmatch(before.strip()) else ""
    return Quantity(sign * value * scale, digits, step * scale, unit, name)


def _may_equal(side: str, value: str) -> bool:
    """Return True unless the side of an equation is empty or another number than `value` in the
    same unit. `value` may be rounded."""
    try:
        one, other = parse(side), parse(value)
        return (
            one.unit != other.unit
            or one.value == other.value
            or abs(one.value - other.value) < other.step
        )
    except ValueError:
        return bool(side.strip())  # a calculation or a name


def explain(text: str) -> str:
    """Return why a text is not one number, with the remedy."""
    if not re.search("[0-9]", text):
        return "there is no number in it"
    if re.search(r"\d,\d{1,2}(?!\d)|(?<!\d)0,\d", text) and text[0] not in "([{":
        return "it has a decimal comma or wrong thousands separators: write it as 3.14 or 1,234"
    if re.search(r"\d[-/.]\d+[-/.]\d|\d:\d", text):
        return "it is a date, a time or a version, not a number: use the verifier exact"
    if re.search(r"\d\s*(?:-|–|to\b)\s*\d", text):
        return "it is a range, not a number: use the verifier exact"
    return "it is not one number: write the number alone, or use the verifier boxed, math or exact"


_Number = tuple[Fraction, float, Fraction]
"""Value, digits, step."""


def _read(text: str) -> tuple[_Number | None, str]:
    """Return the number at the start of a text, and the rest."""
    for form in _FORMS:
        match = form.match(text)
        if match is None:
            continue
        groups = [group for group in match.groups()[:-1] if group is not None]
        if all(any(map(str.isdigit, group)) for group in groups):
            return _value(form, groups), match["rest"]
    return None, text


def _value(form: re.Pattern[str], groups: list[str]) -> _Number:
    first, digits, step = _read_decimal(groups[0])
    if form in (_DECIMAL, _SCIENTIFIC):
        power = _raise(Fraction(10), int(groups[1])) if len(groups) > 1 else Fraction(1)
        return first * power, digits, step * power
    if form is _POWER:
        return _raise(first, int(groups[1])), inf, Fraction(0)
    top, bottom = (_read_decimal(group)[0] for group in groups[-2:])
    if not bottom:
        raise ValueError("it divides by zero")
    return (first if len(groups) > 2 else 0) + top / bottom, inf, Fraction(0)


def _read_decimal(text: str) -> _Number:
    text = text.replace(",", "").replace(" ", "")
    figures = text.lstrip("+-").replace(".", "")
    if len(figures) > DIGITS:
        raise ValueError("its number is too long")
    return Fraction(text), len(figures.lstrip("0")), Fraction(1, 10 ** len(text.partition(".")[2]))


def _raise(base: Fraction, exponent: int) -> Fraction:
    if len(str(base)) * abs(exponent) > POWER_DIGITS:
        raise ValueError("its number is out of range")
    return base**exponent


def _read_unit(rest: str) -> tuple[int, str | None]:
    """Return (factor of a word such as million, unit in one spelling); None if it is not a unit."""
    text, scale = rest.strip(), 1
    word = text.partition(" ")[0].casefold()
    if word in SCALES:
        scale, text = SCALES[word], text[len(word) :].strip()
    if not text:
        return scale, ""
    words = re.findall(r"[^\W\d_]+", text)
    first = re.split(r"[ /]", text)[0]
    if (
        len(text) > 48
        or _UNIT.fullmatch(text) is None
        or _NOT_UNITS.intersection(map(str.casefold, words))
        or not (
            text[0] in _SYMBOLS
            or (first in UNITS and (len(first) > 1 or rest[0] == " "))
            or (rest[0] in " /" and len(words[0]) > 2)
        )
    ):
        return scale, None
    unit = (text if len(text) <= 3 else text.casefold()).rstrip(".").replace("° ", "°")
    if len(unit) > 3 and unit.endswith("s") and not unit.endswith("ss"):
        unit = unit[:-1]
    return scale, _SAME_UNIT.get(unit.casefold(), unit)
