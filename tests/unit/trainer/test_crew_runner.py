"""A runner through several crews: its reports, and the effect of failures on its stage."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
import trio

from swarmnode.errors import ConfigError, DeviceError, PeerError, Refused, StateError
from swarmnode.stages.crew_messages import (
    CrewEnd,
    CrewStart,
    StageAssignment,
    StageFault,
    StageStatus,
)
from swarmnode.stages.trainer import runner
from swarmnode.stages.trainer.crew_trainer import CrewTrainer
from swarmnode.stages.trainer.runner import StageRunner
from swarmnode.stages.trainer.stage import Stage
from swarmnode.weights import local

CREW, OTHER, LINEAGE = b"c" * 32, b"d" * 32, b"l" * 32


def assigned_to(stage=0, step=0, crew=CREW):
    return StageAssignment(crew, LINEAGE, stage, (9, 9), ("a", "b"), step, "")


class Worker:
    """A worker that runs until it is cancelled, or until `ends` raises."""

    usable = True
    fault = None

    def __init__(self, ends=trio.sleep_forever):
        self.ends = ends
        self.links = SimpleNamespace()

    async def run(self):
        await self.ends()


class FakeStage:
    def __init__(self, assigned, ends=trio.sleep_forever):
        self.assigned, self.step, self.source = assigned, assigned.step, None
        self.worker = Worker(ends)
        self.worker.participant = SimpleNamespace(step=assigned.step)
        self.index, self.layers, self.lineage = assigned.stage, assigned.layers, assigned.lineage
        self.meter = SimpleNamespace(waited_share=0.25, tokens_per_second=10.0, step_seconds=1.0)

    def is_of(self, assigned):
        return assigned.stage == self.index

    def continue_at(self, assigned):
        return self.is_of(assigned) and assigned.step in (self.step, self.step + 1)

    def begin(self, assigned, streams):
        return self.worker

    def progress(self):
        return 7

    def load(self):
        return 0

    def dropped(self):
        return {"step": 1}


class Recovery:
    """A recovery that restores from the neighbour, or raises."""

    peer = None

    def __init__(self, error=None):
        self.error = error
        self.forgotten = 0
        self.parts = 0

    def prepare(self, assigned):
        pass

    def stage_built(self, stage):
        pass

    @contextlib.asynccontextmanager
    async def open(self, assigned, stage):
        yield

    async def restore(self, stage, assigned, notify):
        notify("neighbour")
        if self.error is not None:
            raise self.error
        return "neighbour"

    def attach(self, assigned, worker):
        pass

    def progress(self):
        self.parts += 1
        return self.parts

    def status_fields(self, step):
        return {"checkpoint_step": step}

    def refused(self):
        return {"busy": 1}

    def fault(self):
        return None

    def forget(self):
        self.forgotten += 1


class Node:
    """A runner with all messages that it sent."""

    def __init__(self, build=FakeStage, recovery=None):
        self.sent, self.lacked, self.offered = [], [], []
        self.recovery = recovery or Recovery()
        self.runner = StageRunner(
            build,
            self.recovery,
            self.sent.append,
            lambda what, seconds=None: None,
            on_out_of_memory=self.lacked.append,
            offer=self.offered.append,
        )

    def until(self, true):
        assert self.runner.wait(true, 10)

    @property
    def statuses(self):
        return [m for m in self.sent if isinstance(m, StageStatus)]

    @property
    def faults(self):
        return [m for m in self.sent if isinstance(m, StageFault)]

    def phase(self, phase, crew=CREW):
        self.until(lambda: [(s.phase, s.crew) for s in self.statuses[-1:]] == [(phase, crew)])
        return self.statuses[-1]


@pytest.fixture
def node(monkeypatch):
    async def nobody(assigned, kind):
        return {}

    monkeypatch.setattr(runner, "connect_all", nobody)
    monkeypatch.setattr(runner, "STATUS_SECONDS", 0.02)
    nodes = []

    def start(*args, **named):
        nodes.append(Node(*args, **named))
        nodes[-1].runner.start()
        return nodes[-1]

    yield start
    for one in nodes:
        one.runner.stop()


def test_a_stage_is_built_restored_and_active(node):
    one = node()
    one.runner.receive(assigned_to(step=5))
    status = one.phase("active")
    assert (status.source, status.step) == ("neighbour", 5)
    assert (status.progress, status.bubble_share, status.checkpoint_step) == (7, 0.25, 5)
    assert (status.dropped, status.state_refused) == ({"step": 1}, {"busy": 1})
    assert status.source_seconds >= 0
    assert ("loading", "neighbour") in {(s.phase, s.source) for s in one.statuses}
    assert one.runner.stage.source == "neighbour"


def test_stage_in_memory_serves_the_next_crew(node):
    built = []
    one = node(lambda assigned: built.append(assigned) or FakeStage(assigned))
    one.runner.receive(assigned_to(step=5))
    one.phase("active")
    for crew, step, builds, source in (
        (OTHER, 5, 1, "memory"),
        (b"e" * 32, 6, 1, "memory"),
        (b"f" * 32, 9, 2, "neighbour"),
    ):
        one.runner.receive(assigned_to(step=step, crew=crew))
        assert one.phase("active", crew).source == source
        assert len(built) == builds


def test_stage_is_used_only_while_all_stages_are_active(node):
    one = node()
    one.runner.receive(CrewStart(CREW))
    one.runner.receive(assigned_to())
    one.phase("active")
    assert not one.runner.may_average, "a message from before this crew"
    for message, averages in (
        (CrewStart(CREW), True),
        (assigned_to(crew=OTHER), False),
        (CrewStart(CREW), False),
        (CrewStart(OTHER), True),
        (CrewEnd("a member left"), False),
        (CrewStart(OTHER), False),
    ):
        one.runner.receive(message)
        done = threading.Event()
        one.until(lambda averages=averages: one.runner.may_average == averages)
        one.runner.run_soon(done.set)
        assert done.wait(10)
        assert one.runner.may_average == averages


def test_stage_without_weights_is_rebuilt(node):
    built, ready = [], []
    one = node(lambda assigned: built.append(assigned) or RealFollow(assigned))
    one.runner._on_ready = ready.append
    one.recovery.open = lambda assigned, stage: forever()
    one.runner.receive(assigned_to())
    one.until(lambda: one.runner.stage)
    del one.recovery.open
    one.runner.receive(assigned_to(crew=OTHER))
    one.phase("active", OTHER)
    assert (len(built), len(ready)) == (2, 1)
    one.runner.receive(assigned_to(crew=b"e" * 32))
    one.phase("active", b"e" * 32)
    assert (len(built), len(ready)) == (2, 1)


class RealFollow(FakeStage):
    def continue_at(self, assigned):
        return Stage.continue_at(self, assigned)


def test_a_resumed_message_before_the_stage_is_active_counts(node):
    go = threading.Event()
    one = node(lambda assigned: go.wait(10) and FakeStage(assigned))
    one.runner.receive(assigned_to())
    one.runner.receive(CrewStart(CREW))
    one.phase("loading")
    assert not one.runner.may_average
    go.set()
    one.until(lambda: one.runner.may_average)


def test_released_trainer_offers_its_stage(node):
    one = node()
    one.runner.receive(assigned_to())
    one.phase("active")
    assert one.runner.led_lineage() == LINEAGE
    assert one.runner.members() == ("a", "b")
    assert not one.runner.lost_leadership(LINEAGE)
    assert one.runner.lost_leadership(b"m" * 32)
    stage = one.runner.stage
    one.runner.receive(CrewEnd("a member left"))
    one.until(lambda: one.offered == [stage] and one.runner.status() is None)
    assert (one.runner.led_lineage(), one.runner.members()) == (None, ())
    assert not one.runner.lost_leadership(LINEAGE), "between two crews nobody else leads"


@pytest.mark.parametrize("error", [ConfigError, DeviceError, StateError, Refused])
def test_failed_stage_build_is_reported(node, error):
    def build(assigned):
        raise error("not this one")

    one = node(build)
    one.runner.receive(assigned_to())
    assert one.phase("failed").reason == "not this one"
    assert one.phase("failed").load == 0, "there is nothing to do"
    assert (one.faults, one.lacked) == ([], [])


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
MISSHAPEN = RuntimeError("size mismatch\nand where")


def building(error):
    def build(assigned):
        raise error

    return build, Recovery()


def restoring(error):
    return FakeStage, Recovery(error)


def working(error):
    async def ends():
        raise error

    return lambda assigned: FakeStage(assigned, ends), Recovery()


@pytest.mark.parametrize("where", [building, restoring, working])
@pytest.mark.parametrize(
    ("error", "reason", "short"),
    [
        (NO_MEMORY, "out of memory", 1),
        (MemoryError(), "out of memory", 1),
        (MISSHAPEN, "the device: size mismatch", 0),
    ],
)
def test_device_failure_does_not_end_the_process(node, where, error, reason, short):
    one = node(*where(error))
    assigned = assigned_to(step=5)
    one.runner.receive(assigned)
    assert one.phase("failed").reason == reason
    assert (one.lacked, one.runner.stage) == ([assigned] * short, None)
    assert one.recovery.forgotten == 1, "half of a step is not saved"
    one.runner.receive(CrewEnd("a member failed"))
    one.until(lambda: one.offered == [None])


@pytest.mark.parametrize("where", [restoring, working])
def test_lost_peer_ends_only_its_crew(node, where):
    build, recovery = where(PeerError("stage 1 is gone"))
    one = node(build, recovery)
    one.runner.receive(assigned_to(step=5))
    one.until(lambda: one.faults)
    assert one.faults == [StageFault(CREW, 0, "stage 1 is gone")], "a stage strikes nobody for it"
    assert not one.runner.active
    stage, recovery.error = one.runner.stage, None
    assert stage is not None
    stage.worker.ends = trio.sleep_forever
    one.runner.receive(assigned_to(step=5, crew=OTHER))
    one.phase("active", OTHER)
    assert one.runner.stage is stage


def test_a_fault_that_the_worker_found_is_reported_once_per_crew(node):
    one = node()

    def after_more_statuses():
        said = len(one.statuses)
        one.until(lambda: len(one.statuses) > said + 3)
        return one.faults

    one.runner.receive(assigned_to())
    one.phase("active")
    one.runner.stage.worker.fault = (1, "not finite")
    one.until(lambda: one.faults)
    assert after_more_statuses() == [StageFault(CREW, 1, "not finite")]
    one.runner.receive(CrewEnd("a fault"))
    one.until(lambda: one.offered)
    one.recovery.open = lambda assigned, stage: forever()
    one.runner.receive(assigned_to(crew=OTHER))
    one.phase("loading", OTHER)
    assert len(after_more_statuses()) == 1, "that of the last crew is not reported again"
    del one.recovery.open
    one.runner.receive(assigned_to(crew=b"e" * 32))
    one.until(lambda: len(one.faults) == 2)


@contextlib.asynccontextmanager
async def forever():
    await trio.sleep_forever()
    yield


@pytest.mark.parametrize("where", [building, restoring, working])
def test_a_defect_of_our_own_ends_the_process(node, where):
    one = node(*where(ZeroDivisionError("a bug")))
    one.runner.receive(assigned_to(step=5))
    with pytest.raises(BaseExceptionGroup):
        one.runner.wait(lambda: None, 10)


def test_a_call_of_the_head_ends_with_its_crew(node, monkeypatch):
    monkeypatch.setattr(runner, "Head", Worker)
    one = node()
    one.runner.receive(assigned_to())
    one.runner.receive(CrewStart(CREW))
    head = one.runner.wait(one.runner.head, 10)

    async def answer(head):
        return "done"

    async def wait(head):
        one.runner.receive(CrewEnd("a member left"))
        await trio.sleep_forever()

    assert one.runner.call_head(head, answer) == "done"
    with pytest.raises(PeerError, match="has ended"):
        one.runner.call_head(head, wait)
    with pytest.raises(PeerError, match="has ended"):
        one.runner.call_head(head, answer)


def test_while_weights_arrive_the_crew_is_shown_progress(node):
    """The crew waits for a stage while its restoration makes progress."""
    one = node(FakeStage, Recovery())
    one.recovery.open = lambda assigned, stage: forever()
    one.runner.receive(assigned_to(step=3))
    one.until(lambda: len(one.statuses) > 5)
    assert {(s.phase, s.step, s.load) for s in one.statuses} == {("loading", 3, 1)}
    progress = [s.progress for s in one.statuses]
    assert progress == sorted(set(progress))


def test_member_stays_until_the_crew_ends(node):
    """The head evaluates the policy after the last step, and needs every stage for that."""
    one = node()
    assert not one.runner.finished(3), "no stage yet"
    one.runner.receive(assigned_to(stage=1, step=2))
    one.phase("active")
    stage = one.runner.stage
    assert not one.runner.finished(3)
    stage.step = 3
    assert not one.runner.finished(3), "the head may still evaluate"
    assert not one.runner.finished(0), "no limit"
    assert one.runner.finished(2), "the head continues"
    one.runner.receive(CrewEnd("the head has ended"))
    one.until(lambda: one.runner.finished(3))
    assert not one.runner.finished(4), "the next crew takes it"


def test_stage_of_a_stopped_crew_starts_no_exchange():
    got, refused = [], []
    averaging = SimpleNamespace(receive=got.append, refuse=refused.append)
    node = SimpleNamespace(
        _averaging=averaging, _runner=SimpleNamespace(active=True, may_average=False)
    )
    away = [local.TakeSnapshot(b"s" * 16, 0, b""), local.WriteState()]
    for message in (*away, local.DropSwap(b"s" * 16)):
        CrewTrainer._receive_weights(node, message)
    assert got == [local.DropSwap(b"s" * 16)]
    assert refused == away
    node._runner.may_average = True
    for message in away:
        CrewTrainer._receive_weights(node, message)
    assert got[1:] == away
