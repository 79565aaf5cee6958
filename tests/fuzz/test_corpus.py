"""Every target handles the vectors, the fuzzer's earlier findings, and a few thousand variations of
them.

`python -m tests.fuzz TARGET` runs a million coverage-guided executions; benchmarks/RESULTS.md has
the last results.
"""

import random

import pytest

from tests.fuzz.targets import TARGETS, seeds

VARIATIONS = 3000


@pytest.fixture(scope="module")
def corpus():
    return seeds()


def varied(rng, corpus):
    """Return a frame with bytes changed, cut, doubled, or continued by another frame."""
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
def test_target_raises_only_declared_errors(name, corpus):
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
    assert outcomes["answered"], "no input passes the first check, so the test proves nothing"
    if refusals:
        assert outcomes["refused"]
