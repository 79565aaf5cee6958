"""A seat that cannot be taken: the crew is told, and the process that would have sat there goes on."""

import contextlib
import threading
from types import SimpleNamespace

import msgspec
import pytest
import torch
import trio

from swarmnode.crew.local import Assigned, Offering, Released, Resumed, Settled, Suspended
from swarmnode.crew.plan import Capacity, ModelCost, Part
from swarmnode.errors import ConfigError, DeviceError, PeerError, StateError
from swarmnode.trainer.crew.run import LESS, CrewTrainer
from swarmnode.trainer.crew.runner import StageRunner, StageSession
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

    runner = StageRunner(build, NoRecovery(), send, lambda what: None)
    runner.start()
    try:
        runner.receive(Assigned(b"c" * 32, 1, 0, (1, 1), (9, 9), ("a", "b"), 0, True, False, ""))
        assert failed.wait(10)
        assert said[-1].reason == "not this one"
        runner.check()
    finally:
        runner.stop()


class Restoring(NoRecovery):
    """Everything is well until the weights are to be fetched."""

    def __init__(self, error):
        self.error = error

    def built(self, stage):
        pass

    @contextlib.asynccontextmanager
    async def open(self, assigned, stage, step):
        yield

    async def restore(self, stage, step, tell):
        tell("loading", "R2")
        raise self.error


def raising(error):
    def build(assigned):
        raise error

    return build, NoRecovery()


def restoring(error):
    return lambda assigned: SimpleNamespace(is_of=lambda other: False, member=None), Restoring(error)


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
MISSHAPEN = RuntimeError("size mismatch\nand where")


@pytest.mark.parametrize("where", [raising, restoring])
@pytest.mark.parametrize(
    ("error", "reason", "short"),
    [(NO_MEMORY, "out of memory", 1), (MemoryError(), "out of memory", 1), (MISSHAPEN, "the device: size mismatch", 0)],
)
def test_what_the_device_cannot_do_fails_the_seat_and_not_the_process(where, error, reason, short):
    said, lacked, failed = [], [], threading.Event()

    def send(status):
        said.append(status)
        if status.phase == "failed":
            failed.set()

    runner = StageRunner(*where(error), send, lambda what: None, lacked=lacked.append)
    runner.start()
    try:
        assigned = Assigned(b"c" * 32, 2, 0, (1, 1), (9, 9), ("a", "b"), 5, False, False, "")
        runner.receive(assigned)
        runner.receive(Settled(2, 5))
        assert failed.wait(10)
        assert (said[-1].reason, lacked, runner.stage) == (reason, [assigned] * short, None)
        runner.check()
    finally:
        runner.stop()


@pytest.mark.parametrize("where", [raising, restoring])
def test_a_defect_of_our_own_ends_the_process(where):
    runner = StageRunner(*where(ZeroDivisionError("a bug")), lambda status: None, lambda what: None)
    runner.start()
    runner.receive(Assigned(b"c" * 32, 2, 0, (1, 1), (9, 9), ("a", "b"), 5, False, False, ""))
    runner.receive(Settled(2, 5))
    with pytest.raises(BaseExceptionGroup):
        runner.wait(lambda: None, 10)


def test_after_a_stage_that_did_not_fit_less_is_offered():
    sent = []
    cost = ModelCost(Part(1, 1), (Part(10, 1),) * 4, Part(2, 1))
    offering = Offering(b"m" * 32, Capacity(1000.0, 1.0), cost)
    node = SimpleNamespace(
        _offering=offering, _link=SimpleNamespace(send=sent.append), _runner=SimpleNamespace(receive=lambda message: None)
    )
    seat = Assigned(b"c" * 32, 2, 1, (1, 1), (2, 2), ("a", "b"), 5, False, False, "")
    for assigned, memory in ((msgspec.structs.replace(seat, layers=(9, 9)), 1000.0), (seat, LESS * 22.0), (seat, LESS * 22.0)):
        CrewTrainer._lacked(node, assigned)
        assert node._offering.capacity.memory == pytest.approx(memory)
    CrewTrainer._about_crew(node, Released("dissolved"))
    assert sent == [node._offering]


def test_a_stage_is_averaged_only_while_it_is_active_and_nobody_has_suspended_the_crew():
    runner = StageRunner(lambda assigned: None, NoRecovery(), lambda status: None, lambda what: None)
    runner._session = seat = StageSession(Assigned(b"c" * 32, 1, 0, (1, 1), (9, 9), ("a", "b"), 0, True, False, ""), phase="probation")
    seat.over.set()
    runner.start()
    try:
        for phase, message, averages in (
            ("probation", Resumed(1), False), ("active", Resumed(1), True), ("active", Suspended("a member is in doubt"), False),
            ("active", Resumed(0), False), ("active", Resumed(1), True), ("failed", Resumed(1), False),
        ):  # fmt: skip
            seat.phase = phase
            runner.receive(message)
            runner.call(trio.lowlevel.checkpoint)
            assert runner.wait(lambda averages=averages: runner.averages == averages and not runner._waiting, 10)
    finally:
        runner.stop()


def test_a_suspended_stage_gives_nothing_away():
    got = []
    node = SimpleNamespace(_averaging=SimpleNamespace(receive=got.append), _runner=SimpleNamespace(active=True, averages=False))
    away = [local.TakeSnapshot(b"s" * 16, 0), local.WriteState()]
    for message in (*away, local.DropExchange(b"s" * 16)):
        CrewTrainer._about_weights(node, message)
    assert got == [local.DropExchange(b"s" * 16)]
    node._runner.averages = True
    for message in away:
        CrewTrainer._about_weights(node, message)
    assert got[1:] == away
