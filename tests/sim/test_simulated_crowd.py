"""Thirty slow identities among four honest nodes: the groups that these train on."""

import pytest

from tests.support.sim.crowd import count


@pytest.fixture(scope="module")
def usual():
    return count("", 1, seed=1)


@pytest.mark.parametrize(("kind", "addresses"), [("hanger", 30), ("late", 1), ("staller", 1)])
def test_slow_crowd_takes_few_groups(usual, kind, addresses):
    crowded = count(kind, addresses, seed=1)
    assert crowded.groups >= 0.9 * usual.groups
    assert crowded.listing <= 2 * usual.listing
    assert crowded.newcomer <= 120.0
