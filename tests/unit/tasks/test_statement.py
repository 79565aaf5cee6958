"""Which completions state the right answer."""

import time

import pytest

from swarmnode.tasks.statement import states

STATED = {
    "5": [
        "5",
        "5.",
        "**5**",
        "$5$",
        "\\boxed{5}",
        "So it is $\\boxed{5}$, as shown.",
        "7 \u2212 2 equals 5.",
        "7 - 2 = 5",
        "7 - 2 = 5 apples.",
        "The answer is 5.",
        "The answer is **5**.",
        "**Answer:** 5",
        "Let me think. 4 is too small.\n\nThe final answer is: 5.",
        "The GCD is 5, because 5 divides both.",
        "There are 5 primes between 3 and 14 (inclusive).",
        "There are 5 legs in total.",
        'The letter "s" appears 5 times.',
        "Anna has 3 apples and gets 2 more, so she has 5 apples.",
        "The answer is 5 in base-3.",
        "5 (binary)",
        "x = 5\n",
        "5 apples",
        "3 + 2 = 5 apples",
    ],
    "-3": ["4 - 7 = \u22123", "The answer is -3."],
    "1024": ["The sum is 1,024."],
    "5/7": ["20/28 = 5/7", "20/28 simplifies to 5/7.", "The result is $\\frac{5}{7}$."],
    "eert": [
        "eert.",
        '"eert"',
        "**eert**",
        'The word "tree" spelled backward is "eert."',
        "Backward: eert",
        "**eert** is the word spelled backward.",
    ],
    "THAT NEWS MUST GO": [
        "The decrypted text is:\n\nTHAT NEWS MUST GO",
        "The decrypted text is THAT NEWS MUST GO.",
    ],
    "0 2 0 0 0 1 0 0 0": ["The counts are 0 2 0 0 0 1 0 0 0."],
}
NOT_STATED = {
    "5": [
        "",
        "=5",
        "+5",
        "05",
        "5a",
        "5/",
        "5.0",
        "-5",
        "5 6",
        "1 2 3 4 5",
        "5 or 6",
        "The answer is 5 or 6.",
        "The answer is not 5.",
        "The answer isn't 5",
        "The answer is 5, 6",
        "The answer is 5 x 2",
        "The answer is 5. No, it is 6.",
        "The answer is 5.\nIt is 6.",
        "\\boxed{5} \\boxed{6}",
        "between 5 and 9",
        "The LCM of 1 and 5",
        "5 + 0",
        "3 + 2",
        "5 if x else 2",
        "The answer is 5, an example of how we cannot divide by",
        "The answer is 5 (which is",
        "5 is a number that",
        "So it is $\\boxed{5}$, as we",
        "\\boxed{5}\nIn this example, we.",
    ],
    "eert": [
        "**eert** is a word which",
        "tree eert",
        '"eert" and "tree"',
        "e-e-r-t",
        "EERT",
        "eertx",
        "It is eert tree",
    ],
    "5/7": ["10/14", "The result is 5/ 7", "It is 5/7/1"],
}


@pytest.mark.parametrize(("right", "text"), [(r, t) for r, ts in STATED.items() for t in ts])
def test_a_right_answer_earns(right, text):
    assert states(text, right)


@pytest.mark.parametrize(("right", "text"), [(r, t) for r, ts in NOT_STATED.items() for t in ts])
def test_several_guesses_and_other_notations_earn_nothing(right, text):
    assert not states(text, right)


@pytest.mark.parametrize(
    "unit", ['"', "`", "**", "*", "\\frac{1", "1,", "1/", "\\boxed{", " ", ". ", "is ", "- ", "é"]
)
def test_a_hostile_text_takes_linear_time(unit):
    before = time.process_time()
    for right in ("5", "eert"):
        states(unit * 30_000 + " x", right)
    assert time.process_time() - before < 1.0
