"""A stage that cannot be had: the crew is told, and the process that would have held it goes on."""

import contextlib
import threading
from types import SimpleNamespace

import msgspec
import pytest
import torch
import trio

from swarmnode.errors import ConfigError, DeviceError, PeerError, StateError
from swarmnode.stages.trainer import LESS, CrewTrainer, StageRunner, StageSession
from swarmnode.stages.wire import (
    NO_HASH,
    Assigned,
    Capacity,
    Copy,
    ModelCost,
    Offering,
    Part,
    Released,
    Resumed,
    Suspended,
    Taken,
)
from swarmnode.weights import local

CREW = b"c" * 32


def assigned_to(stage=0, step=0):
    return Assigned(
        CREW,
        b"l" * 32,
        stage,
        (9, 9),
        ("a", "b"),
        step,
        b"h" * 32 if step else NO_HASH,
        Taken(),
        "",
    )


class NoRecovery:
    def prepare(self, assigned):
        pass

    def progress(self):
        return 0

    def refused(self):
        return {"busy": 1}

    def forget(self):
        pass


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
    runner.thread.start()
    try:
        runner.receive(assigned_to())
        assert failed.wait(10)
        assert said[-1].reason == "not this one"
        runner.thread.check()
    finally:
        runner.thread.stop()


class Restoring(NoRecovery):
    """Everything is well until the weights are to be fetched."""

    def __init__(self, error):
        self.error = error

    def built(self, stage):
        pass

    @contextlib.asynccontextmanager
    async def open(self, assigned, stage):
        yield

    async def restore(self, stage, assigned, tell):
        tell("loading", "R2")
        raise self.error


def raising(error):
    def build(assigned):
        raise error

    return build, NoRecovery()


def restoring(error):
    return lambda assigned: SimpleNamespace(is_of=lambda other: False, worker=None), Restoring(
        error
    )


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
MISSHAPEN = RuntimeError("size mismatch\nand where")


@pytest.mark.parametrize("where", [raising, restoring])
@pytest.mark.parametrize(
    ("error", "reason", "short"),
    [
        (NO_MEMORY, "out of memory", 1),
        (MemoryError(), "out of memory", 1),
        (MISSHAPEN, "the device: size mismatch", 0),
    ],
)
def test_what_the_device_cannot_do_fails_the_stage_and_not_the_process(where, error, reason, short):
    said, lacked, failed = [], [], threading.Event()

    def send(status):
        said.append(status)
        if status.phase == "failed":
            failed.set()

    runner = StageRunner(*where(error), send, lambda what: None, lacked=lacked.append)
    runner.thread.start()
    try:
        assigned = assigned_to(step=5)
        runner.receive(assigned)
        assert failed.wait(10)
        assert (said[-1].reason, lacked, runner.stage) == (reason, [assigned] * short, None)
        runner.thread.check()
    finally:
        runner.thread.stop()


@pytest.mark.parametrize("where", [raising, restoring])
def test_a_defect_of_our_own_ends_the_process(where):
    runner = StageRunner(*where(ZeroDivisionError("a bug")), lambda status: None, lambda what: None)
    runner.thread.start()
    runner.receive(assigned_to(step=5))
    with pytest.raises(BaseExceptionGroup):
        runner.wait(lambda: None, 10)


COPY = Copy(b"l" * 32, 0, 9, 5, b"h" * 32, "disk", Taken(), b"")


def test_after_a_stage_that_did_not_fit_less_is_offered():
    sent = []
    cost = ModelCost(Part(1, 1), (Part(10, 1),) * 4, Part(2, 1))
    offering = Offering(b"m" * 32, Capacity(1000.0, 1.0), cost)
    node = SimpleNamespace(
        _offering=offering,
        _link=SimpleNamespace(send=sent.append),
        _recovery=SimpleNamespace(copies=lambda: (COPY,)),
    )
    seat = msgspec.structs.replace(assigned_to(1, 5), layers=(2, 2))
    for assigned, memory in (
        (msgspec.structs.replace(seat, layers=(9, 9)), 1000.0),
        (seat, LESS * 22.0),
        (seat, LESS * 22.0),
    ):
        CrewTrainer._lacked(node, assigned)
        assert node._offering.capacity.memory == pytest.approx(memory)
    CrewTrainer._offer(node, None)
    assert sent == [msgspec.structs.replace(node._offering, copies=(COPY,))]
    CrewTrainer._offer(
        node, SimpleNamespace(copy=lambda: msgspec.structs.replace(COPY, where="memory"))
    )
    assert [copy.where for copy in sent[1].copies] == ["memory", "disk"]


def test_a_stage_is_averaged_only_while_it_is_active_and_nobody_has_suspended_the_crew():
    runner = StageRunner(
        lambda assigned: None, NoRecovery(), lambda status: None, lambda what: None
    )
    runner._session = seat = StageSession(assigned_to(), phase="probation")
    seat.over.set()
    runner.thread.start()
    try:
        for phase, message, averages in (
            ("probation", Resumed(CREW), False),
            ("active", Resumed(CREW), True),
            ("active", Suspended("a member is in doubt"), False),
            ("active", Resumed(b"d" * 32), False),
            ("active", Resumed(CREW), True),
            ("failed", Resumed(CREW), False),
        ):
            seat.phase = phase
            runner.receive(message)
            runner.thread.call(trio.lowlevel.checkpoint)
            assert runner.wait(
                lambda averages=averages: runner.averages == averages and not runner._waiting, 10
            )
    finally:
        runner.thread.stop()


def test_a_suspended_stage_gives_nothing_away():
    got, refused = [], []
    averaging = SimpleNamespace(receive=got.append, refuse=refused.append)
    node = SimpleNamespace(
        _averaging=averaging, _runner=SimpleNamespace(active=True, averages=False)
    )
    away = [local.TakeSnapshot(b"s" * 16, 0, b""), local.WriteState()]
    for message in (*away, local.DropExchange(b"s" * 16)):
        CrewTrainer._about_weights(node, message)
    assert got == [local.DropExchange(b"s" * 16)]
    assert refused == away
    node._runner.averages = True
    for message in away:
        CrewTrainer._about_weights(node, message)
    assert got[1:] == away


def test_a_trainer_that_is_released_says_what_it_has_and_leads_nothing():
    offered = []
    runner = StageRunner(
        lambda assigned: None,
        NoRecovery(),
        lambda status: None,
        lambda what: None,
        offer=offered.append,
    )
    runner._session = session = StageSession(assigned_to(), phase="active")
    session.over.set()
    assert runner.leads() == b"l" * 32
    assert not runner.leads_no_more(b"l" * 32)
    assert runner.leads_no_more(b"m" * 32)
    runner.thread.start()
    try:
        runner.receive(Released("a member left"))
        assert runner.wait(lambda: offered == [None] and runner.status() is None, 10)
        assert runner.leads() is None
        assert not runner.leads_no_more(b"l" * 32), "between two crews nobody else leads"
    finally:
        runner.thread.stop()


class Waiting(Restoring):
    """A stage whose weights are on their way for ever."""

    def __init__(self):
        pass

    async def restore(self, stage, assigned, tell):
        await trio.sleep_forever()


def test_a_member_stays_after_the_last_step_until_the_crew_is_over_or_goes_on():
    """The head evaluates what the last step has made of the policy, and for that it needs every
    stage."""
    stage = SimpleNamespace(step=2, worker=None, is_of=lambda other: False)
    runner = StageRunner(lambda assigned: stage, Waiting(), lambda status: None, lambda what: None)
    assert not runner.finished(3), "no stage yet"
    runner.thread.start()
    try:
        runner.receive(assigned_to(stage=1, step=2))
        assert runner.wait(lambda: runner.stage, 10)
        assert not runner.finished(3)
        stage.step = 3
        assert not runner.finished(3), "the head may still want to evaluate"
        assert not runner.finished(0), "no limit"
        assert runner.finished(2), "the head goes on"
        runner.receive(Released("the head has ended"))
        assert runner.wait(lambda: runner.finished(3), 10)
        assert not runner.finished(4), "the next crew takes it"
    finally:
        runner.thread.stop()


def test_while_weights_arrive_the_crew_is_shown_progress():
    """It waits for a stage that is being restored as long as that makes progress."""

    class Arriving(NoRecovery):
        parts = 0

        def progress(self):
            self.parts += 1
            return self.parts

    runner = StageRunner(lambda assigned: None, Arriving(), lambda status: None, lambda what: None)
    runner._session = StageSession(assigned_to(step=3), phase="loading")
    assert [runner.status().progress for _ in range(3)] == [1, 2, 3]
    assert runner.status().step == 3
    assert runner.status().state_refused == {"busy": 1}
