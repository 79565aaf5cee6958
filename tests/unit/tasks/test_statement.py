"""Which completions state the right answer."""

import time

import pytest

from swarmnode.tasks.statement import states


@pytest.mark.parametrize(
    "unit", ['"', "`", "**", "*", "\\frac{1", "1,", "1/", "\\boxed{", " ", ". ", "is ", "- ", "é"]
)
def test_a_hostile_text_takes_linear_time(unit):
    before = time.process_time()
    for right in ("5", "eert"):
        states(unit * 30_000 + " x", right)
    assert time.process_time() - before < 1.0
