"""Verdicts on right, wrong and hostile answers, and the extraction of an answer."""

import itertools
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.tasks.answers import EXTRACTS, extract
from swarmnode.tasks.verifiers import VERIFIERS
from tests.support.verifier_cases import ANSWERS, CASES, REFUSED, SECTIONS

ALL = [(name, case) for name, cases in CASES.items() if name != "math" for case in cases]
"""The cases of `math` are judged in the sandbox (test_formulas.py)."""
NUMBERS = st.fractions(-2000, 2000, max_denominator=12) | st.integers(-(10**7), 10**7).map(Fraction)


def spellings_of(value: Fraction) -> list[str]:
    """Spellings of one number."""
    top, bottom, sign = abs(value.numerator), value.denominator, "-" * (value < 0)
    made = [
        f"{sign}{top}/{bottom}",
        f"{sign}\\frac{{{top}}}{{{bottom}}}",
        f"\\frac{{{sign}{top}}}{{{bottom}}}",
        f"$\\dfrac{{{sign}{top}}}{{{bottom}}}$",
        f"\\boxed{{{sign}{top}/{bottom}}}",
    ]
    if top > bottom > 1:
        made += [f"{sign}{top // bottom} {top % bottom}/{bottom}"]
        made += [f"{sign}{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}"]
    if bottom == 1:
        grouped = f"{sign}{top:,}"
        made += [str(value), f"{value}.0", f"{value}.", grouped, grouped.replace(",", "{,}")]
        made += [grouped.replace(",", " "), grouped.replace(",", "\\,"), f"{value}e0"]
        made += [str(value).replace("-", "\u2212"), str(value).translate(FULL_WIDTH)]
    return made


FULL_WIDTH = {ord("0") + digit: 0xFF10 + digit for digit in range(10)}
HOSTILE = [
    "",
    "\0",
    "\ud800",
    "[" * 4096,
    "{" * 4096,
    "(" * 4096,
    "1," * 2048,
    "\\boxed{" * 500,
    "9" * 4096,
    "1e999999999",
    "-" * 4096,
    "1/" * 2048,
    "\\frac{" * 600,
    "__import__('os').system('true')",
    "\u0661\u0662",
    "a," * 2048,
    '{"a":' * 800,
    "'" * 4096,
    "\\left" * 800,
    "$" * 4096,
]
GOLD = {
    "exact": "x",
    "numeric": "7",
    "choice": "A",
    "boxed": "\\frac{1}{2}",
    "json": "[1]",
}


@pytest.mark.parametrize(("name", "case"), ALL)
def test_equal_answers_are_right_and_others_wrong(name, case):
    verifier = VERIFIERS[name]
    verifier.check(case.gold)
    assert verifier.reward(case.gold, case.gold) == 1.0
    assert {each: verifier.reward(each, case.gold) for each in case.same} == dict.fromkeys(
        case.same, 1.0
    )
    assert {each: verifier.reward(each, case.gold) for each in case.other} == dict.fromkeys(
        case.other, 0.0
    )


@pytest.mark.parametrize("name", [name for name in CASES if name != "math"])
def test_no_spelling_of_a_right_answer_equals_another_one(name):
    """A bare number equals the same number with a unit, so "12" equals two of the cases."""
    for case, other in itertools.permutations(CASES[name], 2):
        for spelling in (case.gold, *case.same):
            if spelling != "12":
                assert VERIFIERS[name].reward(spelling, other.gold) == 0.0, (spelling, other.gold)


@given(st.lists(NUMBERS, min_size=2, max_size=2), st.integers(0, 99))
def test_numbers_equal_their_spellings_and_no_other_number(values, choice):
    """In every spelling of the list, a number is equal to itself and unequal to another."""
    spellings = [spellings_of(value) for value in values]
    for name in ("numeric", "boxed"):
        answer = spellings[0][choice % len(spellings[0])]
        for gold in spellings[0]:
            assert VERIFIERS[name].reward(answer, gold) == 1.0, (name, answer, gold)
        for gold in spellings[1]:
            same = values[0] == values[1]
            assert VERIFIERS[name].reward(answer, gold) == float(same), (name, answer, gold)


@pytest.mark.parametrize(("name", "gold", "why"), [*REFUSED, ("math", "x" * 500, "characters")])
def test_a_right_answer_that_cannot_be_read_is_refused_with_the_remedy(name, gold, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        VERIFIERS[name].check(gold)


def test_different_answers_of_competitions_never_match():
    """Right answers of the kind of MATH: none equals another, and each equals itself."""
    for one, other in itertools.product(ANSWERS, repeat=2):
        assert VERIFIERS["boxed"].reward(one, other) == float(one == other), (one, other)


def test_the_page_describes_every_verifier():
    assert SECTIONS.keys() == VERIFIERS.keys()
    assert all(VERIFIERS[name].guide in section for name, section in SECTIONS.items())


@pytest.mark.parametrize("name", GOLD)
@pytest.mark.parametrize("answer", HOSTILE)
def test_hostile_answers_are_wrong_at_once(name, answer):
    started = time.process_time()
    assert VERIFIERS[name].reward(answer, GOLD[name]) == 0.0
    assert time.process_time() - started < 0.2


@pytest.mark.parametrize("name", GOLD)
@given(answer=st.text(max_size=200))
def test_no_text_makes_a_verifier_raise(name, answer):
    assert VERIFIERS[name].reward(answer, GOLD[name]) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("how", "text", "found"),
    [
        ("tag", "so <answer> 4 </answer> and", "4"),
        ("tag", " as it is ", " as it is "),
        ("boxed", "first \\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("boxed", "\\boxed{1", ""),
        ("boxed", "nothing", ""),
        ("last_number", "3 apples and 4,000.5 pears.", "4,000.5"),
        ("last_number", "none", ""),
        ("last_number", "It costs $12.", "$12"),
        ("last_number", "so 4 + 9 = **13**.", "13"),
        ("last_number", "on 2024-05-17.", "2024-05-17"),
        ("last_number", "at 12:30", "12:30"),
        ("last_number", "it is 1 000 metres", "1 000"),
        ("last_number", "1 1/2 cups", "1 1/2"),
        ("last_number", "about 1.2 × 10^5 of them", "1.2 × 10^5"),
        ("last_number", "x = - 5", "- 5"),
        ("last_number", "10 - 3", "10 - 3"),
        ("last_number", "so 1 + 2 / 3.", "1 + 2 / 3"),
        ("last_number", "it is 2 / 3", "2 / 3"),
        ("last_number", "2 \\cdot 3", "2 \\cdot 3"),
        ("last_number", "10^ 5", "10^ 5"),
        ("last_number", "it is minus 3", "minus 3"),
        ("last_number", "3 \\pi", "3 \\pi"),
        ("last_number", "5 + x", "5 +"),
        ("last_number", "Ann - 5 apples", "5"),
        ("last_number", "* 5", "5"),
        ("last_number", "after 12 km.", "12 km"),
        ("last_number", "costs 5 million dollars", "5 million"),
        ("last_number", "$\\frac{ 3 }{ 4 }$.", "$\\frac{ 3 }{ 4 }$"),
        ("last_number", "the root is x^2", "x^2"),
        ("last_number", "the point (3, 5)", "(3, 5"),
        ("last_number", "f(5)", "f(5)"),
        ("last_number", "x<5", "x<5"),
        ("last_number", "<answer>13</answer>", "13"),
        ("last_number", "{'answer': 5}", "5"),
        ("last_letter", "I think (C) is right", "C"),
        ("last_letter", "The answer: B.", "B"),
        ("last_letter", "no", ""),
        ("last_letter", "The answer is B. I am sure", "B"),
        ("last_letter", "C. A cat is one.", "C"),
        ("last_letter", "A or B", "A or B"),
        ("last_letter", "(A), (B) and (C)", "A), (B) and (C"),
        ("last_letter", "It is B, not A.", "B"),
        ("last_letter", "It can't be B", ""),
        ("last_letter", "Neither A nor B", "A nor B"),
        ("last_letter", "B and C are wrong, so A", "A"),
        ("fenced", 'Here:\n```json\n{"a": 1}\n```\nDone.', '{"a": 1}'),
        ("fenced", "[1]", "[1]"),
        ("fenced", "```\n[1]\n```\n```python\n[2]\n```", "[2]"),
        ("last_line", "one\ntwo\n\n", "two"),
        ("whole", " x ", " x "),
    ],
)
def test_where_an_answer_stands(how, text, found):
    assert extract(text, how) == found


def test_only_letters_of_the_dataset_are_choices():
    text = "The answer is B. Thanks to X and Y"
    assert extract(text, "auto", "last_letter", "ABCD") == "B"
    assert extract(text, "last_letter") == "X and Y"


def test_marked_answer_has_priority_over_a_guess():
    assert extract("<answer>1</answer> \\boxed{2} 3", "auto", "last_number") == "1"
    assert extract("\\boxed{2} and 3", "auto", "last_number") == "2"
    assert extract("2 and 3", "auto", "last_number") == "3"
    assert extract("2 and 3", "auto") == "2 and 3"


@pytest.mark.parametrize("how", [*EXTRACTS, "auto"])
@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 9000,
        "<answer>" * 8000,
        "</answer>" * 7000,
        "1" * 65536,
        "1,1" * 20000,
        "A" * 65536,
        "\n" * 65536,
        "-$" * 32768,
    ],
)
def test_searching_a_long_text_takes_no_time(how, text):
    started = time.process_time()
    extract(text, how, "last_number")
    assert time.process_time() - started < 0.2
