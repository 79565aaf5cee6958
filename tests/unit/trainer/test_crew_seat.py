"""A seat that cannot be taken: the crew is told, and the process that would have sat there goes on."""

import threading
from types import SimpleNamespace

import pytest
import trio

from swarmnode.errors import ConfigError, DeviceError, PeerError, StateError
from swarmnode.stages.local import Assigned, Resumed, Suspended
from swarmnode.trainer.crew import CrewTrainer
from swarmnode.trainer.crew_seat import Seat, Sitting
from swarmnode.weights import local


class NoRecovery:
    def journal(self, assigned):
        return None


@pytest.mark.parametrize("error", [ConfigError, DeviceError, StateError, PeerError])
def test_a_stage_that_cannot_be_built_is_said_to_have_failed(error):
    said, failed = [], threading.Event()

    def send(status):
        said.append(status)
        if status.phase == "failed":
            failed.set()

    def build(assigned):
        raise error("not this one")

    sitting = Sitting(build, NoRecovery(), send, lambda what: None)
    sitting.start()
    try:
        sitting.receive(Assigned(b"c" * 32, 1, 0, (1, 1), (9, 9), ("a", "b"), 0, True, False, ""))
        assert failed.wait(10)
        assert said[-1].reason == "not this one"
        sitting.check()
    finally:
        sitting.stop()


def test_a_stage_is_averaged_only_while_it_is_active_and_nobody_has_suspended_the_crew():
    sitting = Sitting(lambda assigned: None, NoRecovery(), lambda status: None, lambda what: None)
    sitting._seat = seat = Seat(Assigned(b"c" * 32, 1, 0, (1, 1), (9, 9), ("a", "b"), 0, True, False, ""), phase="probation")
    seat.over.set()
    sitting.start()
    try:
        for phase, message, averages in (
            ("probation", Resumed(1), False), ("active", Resumed(1), True), ("active", Suspended("a member is in doubt"), False),
            ("active", Resumed(0), False), ("active", Resumed(1), True), ("failed", Resumed(1), False),
        ):  # fmt: skip
            seat.phase = phase
            sitting.receive(message)
            sitting.call(trio.lowlevel.checkpoint)
            assert sitting.wait(lambda averages=averages: sitting.averages == averages and not sitting._waiting, 10)
    finally:
        sitting.stop()


def test_a_suspended_stage_gives_nothing_away():
    got = []
    node = SimpleNamespace(_averaging=SimpleNamespace(receive=got.append), _sitting=SimpleNamespace(active=True, averages=False))
    away = [local.TakeSnapshot(b"s" * 16, 0), local.WriteState()]
    for message in (*away, local.DropExchange(b"s" * 16)):
        CrewTrainer._about_weights(node, message)
    assert got == [local.DropExchange(b"s" * 16)]
    node._sitting.averages = True
    for message in away:
        CrewTrainer._about_weights(node, message)
    assert got[1:] == away
