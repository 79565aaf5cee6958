"""A head's calls go on while what they ask for gets smaller, and end in one crew only after more
failures than cost a member its place."""

import threading
from dataclasses import replace

import pytest

from swarmnode.config import LoraSettings, TrainingConfig
from swarmnode.errors import PeerError
from swarmnode.stages.pipeline import PATIENCE, TOO_MUCH, CannotScore
from swarmnode.stages.trainer import CrewPolicy
from swarmnode.trainer.batch import TrainingGroup, assemble
from swarmnode.trainer.update import UpdateStatistics


class Model:
    """As much of a `CrewModel` as a call that never reaches one needs."""

    fingerprint = b"f" * 32
    lora = LoraSettings()

    @property
    def text(self):
        return self

    @property
    def policy(self):
        return self


class Crew:
    """A `StageRunner`, its thread and its head in one, whose calls fail in turn and then give
    `done`."""

    blamed = None
    stages = 3
    usable = True

    def __init__(self, *errors):
        self.errors = list(errors)
        self.thread = self

    def members(self):
        return ("a", "b")

    def head(self):
        return self

    def wait(self, what, seconds):
        return what()

    def leads_no_more(self, lineage):
        return False

    def call(self, work):
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def scored(*errors):
    policy = CrewPolicy(
        TrainingConfig(), Model(), Crew(*errors), b"l" * 32, threading.Event(), 60.0
    )
    return policy.score([([1], [2])], 1.0)


def test_what_is_asked_again_in_smaller_pieces_is_no_failure():
    halved = [CannotScore(TOO_MUCH, divisible=True)] * 14
    spoilt = [CannotScore(TOO_MUCH, divisible=False)] * PATIENCE
    assert scored(*halved, *spoilt) == "done"


@pytest.mark.parametrize(
    "error",
    [
        CannotScore(TOO_MUCH, divisible=False),
        CannotScore("frame", divisible=True),
        PeerError("gone"),
    ],
)
def test_what_fails_again_and_again_with_nobody_to_blame_ends(error):
    assert scored(*[error] * (Crew.stages * PATIENCE - 1)) == "done"
    with pytest.raises(PeerError):
        scored(*[error] * (Crew.stages * PATIENCE))


def test_peers_rows_that_stop_a_crew_s_step_are_left_out():
    policy = CrewPolicy(TrainingConfig(), Model(), Crew(), b"l" * 32, threading.Event(), 60.0)
    taken = []

    def learn(rows, indices, without, rate):
        taken.append((indices, without))
        return UpdateStatistics(stepped=not any(rows.external[i] for i in indices))

    policy._learn = learn
    own = TrainingGroup([([1], [2]), ([1], [3])], [[-1.0]] * 2, [1.0, 0.0], [1.0] * 2)
    done = policy.update(assemble([own, replace(own, peer="p")], "grpo"))
    assert done.stepped
    assert done.refused == {1: "no_gradient"}
    assert taken == [([0, 1, 2, 3], frozenset()), ([0, 1], frozenset({1}))]
