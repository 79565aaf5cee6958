"""The bookkeeping of benchmarks.checkfree: paired forks, and stages that are really lost."""

import math

import pytest
import torch

from benchmarks.checkfree import (
    METHODS,
    PLACES,
    compare,
    exact,
    follow,
    fork,
    grow,
)
from benchmarks.lib.staged import VOCABULARY, WINDOW, Corpus, Staged, build

MARKS = (0, 3)
TRUNK = 52


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus():
    """Counting upwards, at one of three speeds."""
    stream = torch.cat([torch.arange(0, 4000, pace) % VOCABULARY for pace in (1, 2, 3)])
    return Corpus(stream, torch.stack([stream[s : s + WINDOW + 1] for s in range(0, 7000, 900)]))


@pytest.fixture(scope="module")
def trunk(corpus):
    torch.set_num_threads(1)
    return grow(Staged(build(0), 4e-3), corpus, 0, TRUNK)


def rows_of(trunk, corpus, place, *names):
    wanted = [(place, name, METHODS[name]) for name in names]
    rows = compare(trunk, corpus, 0, TRUNK, MARKS, wanted)
    return {row["method"]: row for row in rows}


def test_control_repeats_itself(trunk, corpus):
    trunk.staged.roll_back(trunk.checkpoint)
    once = follow(trunk, corpus, 0, TRUNK, MARKS)
    trunk.staged.roll_back(trunk.checkpoint)
    assert follow(trunk, corpus, 0, TRUNK, MARKS) == once


@pytest.mark.parametrize("place", PLACES)
def test_exact_recovery_costs_nothing_and_random_does(trunk, corpus, place):
    rows = rows_of(trunk, corpus, place, "exact, with Adam", "random")
    exact, random = rows["exact, with Adam"], rows["random"]
    assert exact["jump"] == exact["kl"] == 0.0
    assert exact["gap"] == {3: 0.0}
    assert random["jump"] > 0.0
    assert random["kl"] > 0.0


def test_a_lost_stage_is_gone(trunk, corpus):
    staged = trunk.staged
    staged.roll_back(trunk.checkpoint)
    staged.lose(3)
    assert math.isnan(staged.measure(corpus.held_out))
    fork(trunk, (3,), exact)
    assert math.isfinite(staged.measure(corpus.held_out))
