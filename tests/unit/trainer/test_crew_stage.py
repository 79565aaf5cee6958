"""A stage through several crews: the steps from which it continues, its offers, and incomplete
steps."""

import threading
from functools import partial

import msgspec
import pytest
import torch
import trio
import trio.testing

from swarmnode.errors import PeerError
from swarmnode.policy.build_deep import write_deep_model
from swarmnode.policy.device import Placement
from swarmnode.stages.crew_messages import CrewEnd, CrewStart, StageAssignment, TrainerOffer
from swarmnode.stages.trainer import crew_model
from swarmnode.stages.trainer.links import CONNECT_SECONDS, connect
from swarmnode.stages.trainer.runner import StageRunner
from tests.support.crew_models import opened, recovery_of, stage_of
from tests.support.lost_stages import rows_of

CREW, LINEAGE = b"c" * 32, b"l" * 32


def assigned(crew=CREW, index=1, socket="", step=0):
    return StageAssignment(crew, LINEAGE, index, (1, 1), ("a", "b"), step, socket)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_deep_model(tmp_path_factory.mktemp("model"), layers=2, tied=False)
    with opened(policy={"model": str(path)}, training={"learning_rate": 0.01}) as found:
        yield found


def stage_at(model, step=0):
    return stage_of(model[1], assigned(step=step))


@pytest.fixture
def stage(model):
    stage = stage_at(model)
    stage.source = ""
    return stage


def weights(stage):
    return [p.detach().clone() for p in stage.runtime.parameters()]


def moved(stage, before):
    return max(
        float((p.detach() - b).abs().max())
        for p, b in zip(stage.runtime.parameters(), before, strict=True)
    )


async def take_step(stage, learning_rate=0.01):
    """One step with a gradient of ones."""
    for parameter in stage.runtime.parameters():
        parameter.grad = torch.ones_like(parameter)
    await stage.worker._take_step(1.0, learning_rate)
    stage.worker.participant.step += 1


@pytest.mark.parametrize(
    ("own", "crew", "follows"), [(5, 5, True), (5, 6, True), (5, 7, False), (5, 4, False)]
)
def test_stage_continues_up_to_one_step_behind(model, own, crew, follows):
    stage = stage_at(model, own)
    stage.source = "checkpoint"
    before = weights(stage)
    assert stage.continue_at(assigned(b"d" * 32, step=crew)) == follows
    assert stage.step == (crew if follows else own)
    assert moved(stage, before) == 0.0, "a step that is lacking is not repeated"
    if follows:
        worker = stage.begin(assigned(b"d" * 32, step=crew), {})
        assert (worker.participant.step, stage.step) == (crew, crew)


def test_another_stage_or_lineage_is_not_continued(stage):
    assert stage.continue_at(assigned(b"d" * 32))
    for other in (
        assigned(index=0),
        msgspec.structs.replace(assigned(), lineage=b"m" * 32),
        msgspec.structs.replace(assigned(), layers=(1, 2)),
    ):
        assert not stage.is_of(other)
        assert not stage.continue_at(other)


def offer_of(stage):
    held = stage.held_block()
    return held and (held.lineage, held.stage, held.step, held.where)


async def test_restored_weights_are_offered_and_own_after_a_step(model):
    assert offer_of(stage_at(model)) is None, "the base is on every disk"
    for source, where in (
        ("checkpoint", "memory"),
        ("neighbour", "neighbour"),
        ("base", "neighbour"),
        ("checkfree", "neighbour"),
    ):
        stage = stage_at(model, 7)
        assert offer_of(stage) is None
        assert not stage.continue_at(assigned(b"d" * 32, step=7)), "it still has the base's weights"
        stage.source = source
        assert offer_of(stage) == (LINEAGE, 1, 7, where)
        assert stage.continue_at(assigned(b"d" * 32, step=7))
        await take_step(stage)
        assert offer_of(stage) == (LINEAGE, 1, 8, "memory")


async def test_new_crew_drops_old_gradients_only(stage):
    await take_step(stage)
    optimizer = stage.worker.optimizer.adam
    for parameter in stage.runtime.parameters():
        parameter.grad = torch.ones_like(parameter)
    following = assigned(b"d" * 32, step=1)
    assert stage.continue_at(following)
    stage.begin(following, {})
    assert all(p.grad is None for p in stage.runtime.parameters())
    assert stage.worker.optimizer.adam is optimizer
    assert float(next(iter(optimizer.state.values()))["step"]) == 1


async def test_started_step_completes_after_the_crew_ended(stage):
    before, seen = weights(stage), []
    stage.optimizer.adam.register_step_pre_hook(
        lambda *_: seen.append(stage.optimizer.lock.locked())
    )
    with trio.CancelScope() as scope:
        scope.cancel()
        await take_step(stage)
    assert seen == [True], "nobody averages while the weights move"
    assert not stage.optimizer.lock.locked()
    assert moved(stage, before) == pytest.approx(0.01, rel=1e-3), "Adam's first step is the rate"


async def test_step_interval_is_respected(stage, model):
    before = weights(stage)
    await take_step(stage, learning_rate=1e6)
    assert moved(stage, before) == pytest.approx(model[0].training.learning_rate, rel=1e-2)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("size mismatch")]
)
def test_stage_with_a_failed_device_is_not_reused(model, tmp_path, error):
    config, crew = model
    said, offered, lacked, failed = [], [], [], threading.Event()

    def send(status):
        said.append(status)
        if status.phase == "failed":
            failed.set()

    def fails(*_):
        raise error

    recovery = recovery_of(config, crew, tmp_path)
    alone = msgspec.structs.replace(assigned(index=0), layers=(2,), members=("a",))
    runner = StageRunner(
        partial(stage_of, crew),
        recovery,
        send,
        lambda what: None,
        on_out_of_memory=lacked.append,
        offer=offered.append,
    )
    runner.start()
    try:
        runner.receive(alone)
        runner.receive(CrewStart(CREW))
        head = runner.wait(runner.head, 30)
        learn = lambda head: head.update(rows_of(1), config.training, 12.0, 0.01)
        assert runner.call_head(head, learn).refused is None
        runner.stage.optimizer.adam.register_step_pre_hook(fails)
        with pytest.raises(PeerError):  # at once, not after the head's deadline
            runner.call_head(head, learn)
        assert failed.wait(10)
        assert (runner.stage, said[-1].reason) == (None, f"half of a step: {error}")
        assert lacked == ([alone] if isinstance(error, torch.OutOfMemoryError) else [])
        runner.receive(CrewEnd("it failed"))
        assert runner.wait(lambda: offered == [None], 10), "no copy of it is offered"
    finally:
        runner.stop()
        recovery.close()
    assert [copy.step for copy in recovery.held_blocks()] == [1], "the last whole step is on disk"


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_stage_uses_the_device_setup_of_a_whole_policy(model, kind, monkeypatch):
    config, _ = model
    switched = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    monkeypatch.setattr(
        crew_model,
        "probe",
        lambda cfg: Placement(torch.device(kind), torch.float32, "for the test"),
    )
    monkeypatch.setattr(crew_model, "measure_speed", lambda placement: 1e9)
    monkeypatch.setattr(crew_model, "free_bytes", lambda device: 2**30)
    with crew_model.open_model(config) as crew:
        assert switched == ([False] if kind == "cuda" else [])
        assert isinstance(crew.trainer_offer, TrainerOffer)


async def test_missing_network_process_is_a_bounded_error(tmp_path, autojump_clock, monkeypatch):
    started = trio.current_time()
    with pytest.raises(PeerError):
        await connect(assigned(socket=str(tmp_path / "stages.sock")), 0, "frames")
    assert trio.current_time() - started == pytest.approx(CONNECT_SECONDS, abs=0.2)
