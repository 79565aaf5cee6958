"""Verdicts on right, wrong and hostile answers, and the extraction of an answer."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.tasks import json_schema
from swarmnode.tasks.answers import EXTRACTS, extract
from swarmnode.tasks.verifiers import VERIFIERS, votes

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
PEOPLE = [
    ('{"name": "Ada", "age": 36}', 1.0),
    ('{"name": "Ada", "age": 36.0, "tags": ["a", 1.0, null], "extra": true}', 1.0),
    ('{"name": "Ada", "age": 199, "extra": null}', 1.0),
    ('{"name": "", "age": 36}', 0.0),
    ('{"name": "Ada"}', 0.0),
    ('{"name": "Ada", "age": 36.5}', 0.0),
    ('{"name": "Ada", "age": true}', 0.0),
    ('{"name": "Ada", "age": -1}', 0.0),
    ('{"name": "Ada", "age": 200}', 0.0),
    ('{"name": "Ada", "age": 36, "height": 1}', 0.0),
    ('{"name": "Ada", "age": 36, "tags": [true]}', 0.0),
    ('{"name": "Ada", "age": 36, "tags": ["a", "a", "a", "a"]}', 0.0),
    ('{"name": "Ada", "age": 36, "extra": 3}', 0.0),
    ('{"name": "Ada", "age": 36, "extra": "x"}', 0.0),
    ("[]", 0.0),
    ("null", 0.0),
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
SCHEMA = """{"type": "object", "required": ["name", "age"], "additionalProperties": false,
  "title": "A person", "properties": {
  "name": {"type": "string", "minLength": 1, "maxLength": 20},
  "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 200},
  "tags": {"type": "array", "items": {"enum": ["a", 1, null]}, "maxItems": 3},
  "extra": {"anyOf": [{"type": "boolean"}, {"type": ["number", "null"], "not": {"const": 3}}]}}}"""
GOLD = {
    "exact": "x",
    "numeric": "7",
    "choice": "A",
    "set": "a,b",
    "boxed": "\\frac{1}{2}",
    "json": "[1]",
    "json_schema": SCHEMA,
    "majority": "7",
}


@pytest.mark.parametrize(("name", "answer", "gold"), RIGHT)
def test_right_answers(name, answer, gold):
    VERIFIERS[name].check(gold)
    assert VERIFIERS[name].reward(answer, gold) == 1.0


@pytest.mark.parametrize(("answer", "reward"), PEOPLE)
def test_an_answer_that_is_as_a_schema_says(answer, reward):
    VERIFIERS["json_schema"].check(SCHEMA)
    assert VERIFIERS["json_schema"].reward(answer, SCHEMA) == reward
    jsonschema = pytest.importorskip("jsonschema")
    assert jsonschema.Draft202012Validator(json.loads(SCHEMA)).is_valid(json.loads(answer)) == bool(
        reward
    )


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([1.0, 0.5, -2.0])
    | st.sampled_from(["", "a", "bb"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=6,
)
SMALL = st.integers(0, 3)


def _schemas(inner):
    return st.fixed_dictionaries(
        {},
        optional={
            "items": inner,
            "additionalProperties": inner,
            "not": inner,
            "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=3),
            "required": st.lists(st.sampled_from("ab"), unique=True),
            "minItems": SMALL,
            "maxProperties": SMALL,
        },
    )


LEAVES = st.booleans() | st.fixed_dictionaries(
    {},
    optional={
        "type": (
            st.sampled_from(json_schema.TYPES)
            | st.lists(st.sampled_from(json_schema.TYPES), min_size=1, unique=True)
        ),
        "const": VALUES,
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "minimum": SMALL,
        "exclusiveMaximum": SMALL,
        "maxLength": SMALL,
        "minLength": SMALL,
    },
)


@given(schema=st.recursive(LEAVES, _schemas, max_leaves=5), value=VALUES)
def test_verdicts_are_those_of_the_library_that_everybody_uses(schema, value):
    jsonschema = pytest.importorskip("jsonschema")
    json_schema.check(schema)
    assert json_schema.valid(value, schema) == jsonschema.Draft202012Validator(schema).is_valid(
        value
    )


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ('{"pattern": "(a+)+$"}', "'pattern', which is not supported"),
        (
            '{"properties": {"a": {"$ref": "https://example.org/a"}}}',
            r"'\$ref', which is not supported",
        ),
        ('{"type": "text"}', "type is 'text'"),
        ('{"required": "a"}', "not a list of names"),
        ('{"enum": []}', "not a list"),
        ('{"anyOf": [{"minimum": true}]}', "not a number"),
        ("[]", "a JSON object"),
        ("4", "a JSON object"),
        ("{", "Expecting"),
    ],
)
def test_unknown_schema_keyword_is_refused(schema, says):
    with pytest.raises(ValueError, match=says):
        VERIFIERS["json_schema"].check(schema)


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
    ("answers", "rewards"),
    [
        (["7", "7.0", "$7", "8"], [1, 1, 1, 0]),
        (["7", "8", "8", "7"], [0, 0, 0, 0]),
        (["Paris ", "paris", "Rome", None, ""], [1, 1, 0, 0, 0]),
        (["7", None, ""], [1, 0, 0]),
        (["-0", "0", "1e-3", "0.001", "1/1000"], [0, 0, 1, 1, 1]),
        (["50%", "0.5", "50%"], [1, 0, 1]),
        ([None, ""], [0, 0]),
        ([], []),
    ],
)
def test_a_vote_rewards_the_one_answer_that_leads(answers, rewards):
    assert votes(answers) == rewards
    assert votes(answers[::-1]) == rewards[::-1]


@given(answers=st.lists(st.none() | st.text(max_size=40), max_size=8))
def test_no_text_makes_a_vote_raise(answers):
    rewards = votes(answers)
    assert len(rewards) == len(answers)
    assert set(rewards) <= {0.0, 1.0}


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
