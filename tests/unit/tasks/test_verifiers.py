"""Verdicts on answers, and where an answer stands: what is right, what is not, and what a stranger may send.

pytest tests/unit/tasks/test_verifiers.py
"""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.tasks.answers import EXTRACTS, extract
from swarmnode.tasks.verifiers import VERIFIERS

RIGHT = [
    ("exact", " Paris\n", "Paris"),
    ("numeric", "42", "42"),
    ("numeric", "42.0", "42"),
    ("numeric", "1,234", "1234"),
    ("numeric", "$18.50", "18.5"),
    ("numeric", "-3", "\u22123"),
    ("numeric", "1/3", "0.3333333"),
    ("numeric", "12%", "12"),
    ("numeric", "12 km", "12 km."),
    ("numeric", "12", "12 km"),
    ("numeric", "1e3", "1000"),
    ("numeric", "72", "He sold 48 + 24 = 72.\n#### 72"),
    ("numeric", ".5", "0.5"),
    ("numeric", "so x = 7", "7"),
    ("choice", "B", "b"),
    ("choice", "(B)", "B"),
    ("choice", "B.", "B"),
    ("choice", "b)", "(B)"),
    ("set", "b, A", "a,b"),
    ("set", "{a; b}", "a\nb"),
    ("set", '["b", "a"]', "a, b"),
    ("set", "a, a, b", "a,b"),
    ("boxed", "\\frac{1}{2}", "\\dfrac{1}{2}"),
    ("boxed", "\\left( 3, 4 \\right)", "(3,4)"),
    ("boxed", "$12$", "12.0"),
    ("boxed", "0.5", "\\frac{1}{2}"),
    ("json", '{"b": [1, 2.0], "a": null}', '{"a":null,"b":[1.0,2]}'),
]
WRONG = [
    ("exact", "paris", "Paris"),
    ("exact", "", "Paris"),
    ("numeric", "43", "42"),
    ("numeric", "", "42"),
    ("numeric", "12 miles", "12 km"),
    ("numeric", "1000001", "1000000"),
    ("numeric", "0.334", "1/3"),
    ("numeric", "1/0", "1"),
    ("numeric", "nan", "1"),
    ("numeric", "inf", "1"),
    ("numeric", "1e9999", "1"),
    ("numeric", "9" * 4000, "9"),
    ("choice", "A", "B"),
    ("choice", "AB", "A"),
    ("choice", "A or B", "A"),
    ("choice", "", "A"),
    ("set", "a", "a,b"),
    ("set", "a,b,c", "a,b"),
    ("set", "", "a"),
    ("boxed", "\\frac{1}{3}", "\\frac{1}{2}"),
    ("boxed", "", "2"),
    ("json", "true", "1"),
    ("json", "{", "{}"),
    ("json", "[" * 4000, "[]"),
    ("json", "NaN", "1"),
    ("json", "9" * 4000, "9"),
]
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
GOLD = {"exact": "x", "numeric": "7", "choice": "A", "set": "a,b", "boxed": "\\frac{1}{2}", "json": "[1]"}


@pytest.mark.parametrize(("name", "answer", "gold"), RIGHT)
def test_right_answers(name, answer, gold):
    VERIFIERS[name].check(gold)
    assert VERIFIERS[name].reward(answer, gold) == 1.0


@pytest.mark.parametrize(("name", "answer", "gold"), WRONG)
def test_wrong_answers(name, answer, gold):
    assert VERIFIERS[name].reward(answer, gold) == 0.0


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("answer", HOSTILE)
def test_hostile_answers_are_wrong_at_once(name, answer):
    started = time.process_time()
    assert VERIFIERS[name].reward(answer, GOLD[name]) == 0.0
    assert time.process_time() - started < 0.2


@pytest.mark.parametrize("name", VERIFIERS)
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
        ("last_letter", "I think (C) is right", "C"),
        ("last_letter", "The answer: B.", "B"),
        ("last_letter", "no", ""),
        ("last_line", "one\ntwo\n\n", "two"),
        ("whole", " x ", " x "),
    ],
)
def test_where_an_answer_stands(how, text, found):
    assert extract(text, how) == found


def test_what_is_marked_comes_before_what_is_guessed():
    assert extract("<answer>1</answer> \\boxed{2} 3", "auto", "last_number") == "1"
    assert extract("\\boxed{2} and 3", "auto", "last_number") == "2"
    assert extract("2 and 3", "auto", "last_number") == "3"
    assert extract("2 and 3", "auto") == "2 and 3"


@pytest.mark.parametrize("how", [*EXTRACTS, "auto"])
@pytest.mark.parametrize(
    "text", ["\\boxed{" * 9000, "<answer>" * 8000, "</answer>" * 7000, "1" * 65536, "1,1" * 20000, "A" * 65536, "\n" * 65536, "-$" * 32768]
)
def test_searching_a_long_text_takes_no_time(how, text):
    started = time.process_time()
    extract(text, how, "last_number")
    assert time.process_time() - started < 0.2
