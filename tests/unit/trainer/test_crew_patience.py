"""How long a head waits for its crew: for as long as there is one, and not for ever where there is
none."""

import threading
from types import SimpleNamespace

import pytest
import torch

from swarmnode.config import TrainingConfig
from swarmnode.errors import PeerTimeout
from swarmnode.stages import trainer
from swarmnode.stages.trainer import CrewPolicy

LINEAGE = b"l" * 32


class Runner:
    """Of a crew that is together after so many seconds, and there for so many. clock: moved by
    waiting."""

    def __init__(self, together, there, clock):
        self.together, self.there, self.clock = together, there, clock

    def wait(self, what, seconds):
        self.clock[0] += seconds
        return what()

    def head(self):
        return (
            SimpleNamespace(participant=SimpleNamespace(step=7))
            if self.clock[0] >= self.together
            else None
        )

    def leads(self):
        return LINEAGE if self.clock[0] < self.there else None

    def leads_no_more(self, lineage):
        return False


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(trainer.time, "monotonic", lambda: now[0])
    return now


def engine(runner):
    model = SimpleNamespace(
        text=SimpleNamespace(fingerprint=bytes(32)),
        policy=SimpleNamespace(lora=SimpleNamespace(r=0)),
    )
    return CrewPolicy(TrainingConfig(), model, runner, LINEAGE, threading.Event(), 600.0)


def test_a_stage_may_take_an_hour_to_come_back(clock, tmp_path):
    assert engine(Runner(3600.0, 1e9, clock)).restore(tmp_path, torch.Generator()).step == 7
    assert clock[0] >= 3600.0


def test_where_there_is_no_crew_any_more_it_is_not_waited_for_ever(clock, tmp_path):
    with pytest.raises(PeerTimeout, match="not together"):
        engine(Runner(1e9, 1000.0, clock)).restore(tmp_path, torch.Generator())
    assert 1600.0 <= clock[0] < 1700.0
