"""Every target answers or refuses the vectors, what the fuzzer found before, and a few thousand
variations of them.

The million executions that coverage guides are `python -m tests.fuzz TARGET`: benchmarks/RESULTS.md
has the last ones.
"""

import random

import pytest

from tests.fuzz.targets import TARGETS, seeds

VARIATIONS = 3000


@pytest.fixture(scope="module")
def corpus():
    return seeds()


def varied(rng, corpus):
    """A frame with bytes changed, cut, doubled, or continued by another's."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randint(1, 20)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 20)]
            case _:
                data[at:] = rng.choice(corpus)[at:]
    return bytes(data)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_target_answers_or_refuses(name, corpus):
    make, refusals = TARGETS[name]
    feed = make()
    rng = random.Random(name)
    outcomes = {"answered": 0, "refused": 0}
    for data in [*corpus, *(varied(rng, corpus) for _ in range(VARIATIONS))]:
        try:
            feed(data)
            outcomes["answered"] += 1
        except refusals:
            outcomes["refused"] += 1
    assert outcomes["answered"], "nothing gets past the first check, so nothing was shown"
    if refusals:
        assert outcomes["refused"]
