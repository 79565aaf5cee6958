"""What stays of a stage between two crews: the step that was prepared, the numbers that another
stage needs for it, and nothing else."""

import threading

import msgspec
import pytest
import torch
import trio
import trio.testing

from swarmnode.config import Config
from swarmnode.errors import DeviceError, PeerError
from swarmnode.policy.build_deep import write_deep_model
from swarmnode.policy.device import Placement
from swarmnode.stages import trainer
from swarmnode.stages.trainer import (
    JOURNALS,
    Gate,
    GatedStream,
    Stage,
    StageRecovery,
    StageRunner,
    connect,
    recovery_settings,
)
from swarmnode.stages.transfer import Journal, find_journals
from swarmnode.stages.wire import NO_HASH, Assigned, Released, Resumed, StepAnswer, Taken
from tests.support.crew_models import opened
from tests.support.lost_stages import rows_of

CREW, LINEAGE = b"c" * 32, b"l" * 32


def assigned(crew=CREW, index=1, socket="", step=0, hash=NO_HASH, taken=Taken()):  # noqa: B008
    return Assigned(crew, LINEAGE, index, (1, 1), ("a", "b"), step, hash, taken, socket)


def after(stage, crew=b"d" * 32, attempt=3, clip=1.0, learning_rate=0.01):
    """The next crew, which goes on after the step that `stage` has prepared."""
    return assigned(
        crew,
        step=stage.step + 1,
        hash=stage.worker.participant.next_hash,
        taken=Taken(attempt, clip, learning_rate),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    path = write_deep_model(tmp_path_factory.mktemp("model"), layers=2, tied=False)
    config = Config.model_validate(
        {
            "policy": {"model": str(path), "device": "cpu"},
            "stages": {"mode": "always"},
            "training": {"learning_rate": 0.01},
        }
    )
    with opened(config) as crew:
        yield config, crew


@pytest.fixture
def stage(model):
    _, crew = model
    return Stage(assigned(), crew.build((1, 1), 1), crew.settings(), crew.limits())


def prepare(stage, attempt=3):
    """It has a gradient of ones, and has acknowledged the step."""
    for parameter in stage.runtime.parameters():
        parameter.grad = torch.ones_like(parameter)
    stage.worker.participant.accumulated(1)
    assert stage.worker.participant.propose(stage.step, attempt, [1]) == "prepare"
    assert isinstance(stage.worker.participant.prepared(attempt, 1.0, 0.0), StepAnswer)
    assert stage.worker.participant.phase == "prepared"


def copy(stage):
    return [p.detach().clone() for p in stage.runtime.parameters()]


def moved(stage, before):
    return max(
        float((p.detach() - b).abs().max())
        for p, b in zip(stage.runtime.parameters(), before, strict=True)
    )


async def test_a_prepared_step_that_others_took_is_taken_with_their_numbers(stage):
    prepare(stage)
    before, following = copy(stage), after(stage, clip=0.5)
    assert stage.copy() is None  # of the base there is nothing to tell
    assert await stage.follow(following)
    assert (stage.step, stage.worker.participant.hash) == (1, following.hash)
    # Adam's first step is the learning rate
    assert moved(stage, before) == pytest.approx(0.01, rel=1e-3)
    assert stage.worker.optimizer.last_commit == Taken(3, 0.5, 0.01)
    again = stage.begin(following, {})
    assert (again.participant.step, again.participant.hash) == (1, following.hash)
    kept = stage.copy()
    assert (kept.lineage, kept.layers, kept.step, kept.hash, kept.taken, kept.next) == (
        LINEAGE,
        (1, 2),
        1,
        following.hash,
        Taken(3, 0.5, 0.01),
        b"",
    )


async def test_a_prepared_step_is_said_to_be_ready(stage):
    prepare(stage)
    await stage.follow(after(stage))
    stage.begin(assigned(b"d" * 32, step=1, hash=stage.worker.participant.hash), {})
    prepare(stage, attempt=4)
    assert stage.copy().next == stage.worker.participant.next_hash != b""


async def test_unrestored_weights_are_not_offered_before_a_step(
    model,
):
    _, crew = model
    at = assigned(step=7, hash=b"h" * 32)
    stage = Stage(at, crew.build((1, 1), 1), crew.settings(), crew.limits())
    assert stage.copy() is None
    assert not await stage.follow(assigned(b"d" * 32, step=7, hash=b"h" * 32)), (
        "its crew ended while it was restored: it has the base's"
    )
    stage.source = "R2"
    assert stage.copy().where == "neighbour"
    assert await stage.follow(assigned(b"d" * 32, step=7, hash=b"h" * 32))
    prepare(stage)
    await stage.follow(after(stage))
    assert stage.copy().where == "memory"
    stage = Stage(at, crew.build((1, 1), 1), crew.settings(), crew.limits())
    stage.source = "R0"
    assert stage.copy().where == "memory", "from its own journal"


async def test_a_prepared_step_that_nobody_took_is_dropped(stage):
    prepare(stage)
    before = copy(stage)
    assert await stage.follow(assigned(b"d" * 32))
    worker = stage.begin(assigned(b"d" * 32), {})
    assert moved(stage, before) == 0.0
    assert all(p.grad is None for p in stage.runtime.parameters())
    assert worker.participant.phase == "open"


@pytest.mark.parametrize(("step", "digest"), [(2, b"x" * 32), (1, b"y" * 32)])
async def test_a_step_that_was_not_prepared_cannot_be_followed(stage, step, digest):
    prepare(stage, attempt=3)
    before = copy(stage)
    assert not await stage.follow(assigned(b"d" * 32, step=step, hash=digest))
    assert moved(stage, before) == 0.0


async def test_the_optimizer_goes_on_in_the_next_crew_and_holds_the_lock_while_it_moves_weights(
    stage,
):
    prepare(stage)
    following = after(stage)
    await stage.follow(following)
    optimizer, seen = stage.worker.optimizer.adam, []
    stage.begin(following, {})
    assert stage.worker.optimizer.adam is optimizer
    assert float(next(iter(optimizer.state.values()))["step"]) == 1
    optimizer.register_step_pre_hook(lambda *_: seen.append(stage.optimizer.lock.locked()))
    prepare(stage)
    await stage.follow(after(stage, b"e" * 32))
    assert seen == [True]
    assert not stage.optimizer.lock.locked()
    assert float(next(iter(optimizer.state.values()))["step"]) == 2


async def test_a_step_that_is_counted_is_taken_even_if_the_crew_ends_meanwhile(stage):
    prepare(stage)
    before = copy(stage)
    with trio.CancelScope() as scope:
        scope.cancel()
        await stage.follow(after(stage))
    assert stage.step == 1
    assert moved(stage, before) > 0.0


def no_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


async def test_a_device_failure_frees_the_lock_and_stores_no_half_step(stage, tmp_path):
    journal = Journal(tmp_path, LINEAGE, stage.runtime.spec, every=4)
    for attempt in (3, 4):
        prepare(stage, attempt)
        await stage.follow(after(stage, attempt=attempt))
    journal.note(stage.worker)  # none of every four
    # whose worker is another one
    stage.begin(assigned(b"d" * 32, step=2, hash=stage.worker.participant.hash), {})
    prepare(stage, 5)
    stage.worker.optimizer.adam.register_step_pre_hook(no_memory)
    with pytest.raises(DeviceError, match="half of a step"):
        await stage.follow(after(stage, attempt=5))
    assert not stage.optimizer.lock.locked()
    journal.finish()
    assert journal.step is None


async def test_a_journal_is_not_written_of_a_step_that_is_under_way(stage, tmp_path):
    """The trainer ends and does not wait for it any longer."""
    journal = Journal(tmp_path, LINEAGE, stage.runtime.spec, every=4)
    prepare(stage)
    await stage.follow(after(stage))
    journal.note(stage.worker)
    prepare(stage, 4)
    begun, go = threading.Event(), threading.Event()
    stage.worker.optimizer.adam.register_step_pre_hook(
        lambda *_: (begun.set(), go.wait(10), None)[-1]
    )
    following = after(stage, attempt=4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.follow, following)
        await trio.to_thread.run_sync(begun.wait, 10)
        ends = threading.Thread(target=journal.finish)
        ends.start()
        go.set()
    await trio.to_thread.run_sync(ends.join, 10)
    assert (stage.step, journal.step) == (2, None)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("size mismatch")]
)
def test_a_stage_whose_device_failed_in_the_middle_of_a_step_is_nobody_s(model, tmp_path, error):
    config, crew = model
    said, offered, lacked, gone = [], [], [], threading.Event()

    def send(status):
        said.append(status)
        if status.phase == "failed":
            gone.set()

    def fails(*_):
        raise error

    recovery = StageRecovery(tmp_path, recovery_settings(config.stages, crew.run), crew)
    alone = msgspec.structs.replace(assigned(index=0), layers=(2,), members=("a",))
    runner = StageRunner(
        lambda seat: Stage(
            seat, crew.build(seat.layers, seat.stage), crew.settings(), crew.limits()
        ),
        recovery,
        send,
        lambda what: None,
        lacked=lacked.append,
        offer=offered.append,
    )
    runner.thread.start()
    try:
        runner.receive(alone)
        runner.receive(Resumed(CREW))
        head = runner.wait(runner.head, 30)
        learn = lambda: head.update(rows_of(1), config.training, 12.0, 0.01)
        assert runner.thread.call(learn).refused is None
        whole = head.participant.hash
        runner.stage.optimizer.adam.register_step_pre_hook(fails)
        with pytest.raises(PeerError):  # at once, and not after two minutes
            runner.thread.call(learn)
        assert gone.wait(10)
        assert (runner.stage, said[-1].reason) == (None, f"half of a step: {error}")
        assert lacked == ([alone] if isinstance(error, torch.OutOfMemoryError) else [])
        runner.receive(Released("it failed"))
        assert runner.wait(lambda: offered == [None], 10), (
            "no copy of it is offered, and none is gone on with"
        )
    finally:
        runner.thread.stop()
        recovery.close()
    assert [(one.step, one.hash) for one in find_journals(tmp_path / JOURNALS)] == [(1, whole)]


async def test_no_step_is_taken_faster_than_this_node_is_configured_for(stage, model):
    prepare(stage)
    before = copy(stage)
    await stage.follow(after(stage, learning_rate=1e6))
    assert moved(stage, before) == pytest.approx(model[0].training.learning_rate, rel=1e-2)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_stage_is_set_up_as_a_whole_policy_is(model, kind, monkeypatch):
    config, _ = model
    switched = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    monkeypatch.setattr(
        trainer,
        "probe",
        lambda cfg: Placement(torch.device(kind), torch.float32, "for the test"),
    )
    monkeypatch.setattr(trainer, "measure_speed", lambda placement: 1e9)
    monkeypatch.setattr(trainer, "free_bytes", lambda device: 2**30)
    with opened(config):
        assert switched == ([False] if kind == "cuda" else [])


def test_another_stage_or_lineage_is_another_stage(stage):
    assert stage.is_of(assigned(b"d" * 32))
    assert not stage.is_of(assigned(index=0))
    assert not stage.is_of(msgspec.structs.replace(assigned(), lineage=b"m" * 32))
    assert not stage.is_of(msgspec.structs.replace(assigned(), layers=(1, 2)))


async def test_nothing_is_read_while_the_gate_is_shut(autojump_clock):
    ours, theirs = trio.testing.memory_stream_pair()
    gate = Gate()
    stream = GatedStream(ours, gate)
    await theirs.send_all(b"before")
    assert await stream.receive_some() == b"before"
    gate.shut()
    await theirs.send_all(b"after")
    with trio.move_on_after(5) as waited:
        await stream.receive_some()
    assert waited.cancelled_caught
    gate.let()
    assert await stream.receive_some() == b"after"


async def test_a_network_process_that_is_away_is_an_error_within_its_bound(
    tmp_path, autojump_clock, monkeypatch
):
    started = trio.current_time()
    with pytest.raises(PeerError):
        await connect(assigned(socket=str(tmp_path / "stages.sock")), 0, "frames")
    assert trio.current_time() - started == pytest.approx(trainer.CONNECT_SECONDS, abs=0.2)


def test_a_head_knows_how_long_the_others_wait_for_its_steps(model):
    _, crew = model
    head = Stage(
        msgspec.structs.replace(assigned(index=0), step_seconds=5000.0),
        crew.build((1, 1), 0),
        crew.settings(),
        crew.limits(),
    )
    assert head.worker.search.patience == 4000.0
