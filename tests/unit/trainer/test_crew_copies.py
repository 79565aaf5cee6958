"""Uses of a head's copy of the whole policy. The crew has one stage, whose steps the test takes."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
import trio

from swarmnode.policy.generate import Sampling
from swarmnode.policy.micro import MicroBatcher, RowTooLarge
from swarmnode.stages.stage_frames import Fence, Place
from swarmnode.stages.trainer import local_stage
from swarmnode.stages.trainer.links import Links
from swarmnode.stages.trainer.local_stage import LocalStage
from swarmnode.stages.trainer.pipeline import StageWorker, run_in_thread
from swarmnode.stages.trainer.policy_copy import MAX_AGE, PolicyCopy
from swarmnode.stages.trainer.stage_checkpoints import (
    CheckpointStore,
    Recorder,
    RecoverySettings,
    trained_layout,
)
from swarmnode.stages.trainer.stage_model import tensor_reader
from swarmnode.stages.trainer.state_exchange import StateExchange
from tests.support.crew import run_inline
from tests.support.crew_models import opened
from tests.support.waiting import until

CREW = b"c" * 16
PROMPTS = ["What is 3 + 4?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with opened(node={"data_dir": tmp_path_factory.mktemp("node")}) as (_, crew_model):
        yield crew_model


class One:
    """The only member of a crew, with its end of no streams."""

    def __init__(self, model):
        layers = (model.config.num_hidden_layers,)
        runtime = copy.deepcopy(model.build(layers, 0))
        fence, settings = Fence(Place(CREW, 0, 0), 1), RecoverySettings()
        layouts = (trained_layout(runtime.model),)
        store = CheckpointStore(model.directory / "unused")
        recorder = Recorder(runtime.spec, settings, layouts, store)
        stage = LocalStage(
            runtime,
            model.limits(),
            layouts,
            "float32",
            recorder,
            store,
            base=tensor_reader(model.directory),
        )
        self.peer, self.layers = StateExchange(stage, fence, {}, run_in_thread), layers
        self.worker = StageWorker(
            runtime, Links(0, {}, model.limits()), fence, model.settings(), run_inline
        )
        self.peer.attach(self.worker, 0)
        self.copy = PolicyCopy(model, lambda: self.peer, 4096)

    def at(self, step, by=0.0):
        """Set the crew's step, and add `by` to its weights."""
        self.worker.participant.step = step
        with torch.no_grad():
            for parameter in self.worker.runtime.parameters():
                parameter += by
        return step

    def sample(self, step):
        return self.copy.sample(step, PROMPTS, Sampling(4, 8), torch.Generator().manual_seed(1))

    async def refetched(self, at, never=None):
        """Fetch until the copy is at a step, and at no time at `never`."""
        with trio.fail_after(60):
            while not self.copy.is_at(at):
                assert never is None or not self.copy.is_at(never)
                self.copy.start_fetch(self.layers, at)
                await trio.lowlevel.checkpoint()

    async def followed(self, at):
        self.copy.start_fetch(self.layers, at)
        await until(lambda: self.copy.is_at(at))


@pytest.fixture
async def one(model):
    made = One(model)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.peer.run)
        await trio.testing.wait_all_tasks_blocked()
        yield made
        nursery.cancel_scope.cancel()


def ids(samples):
    return [c.ids for sample in samples for c in sample.completions]


async def test_copy_starts_as_the_base_and_expires(one):
    assert one.copy.status_fields(0) == {}, "nothing is built before it is needed"
    first = ids(one.sample(0))
    assert ids(one.sample(MAX_AGE)) == first
    assert one.sample(MAX_AGE + 1) is None
    assert one.copy.status_fields(MAX_AGE + 1) == {"copy_age_steps": MAX_AGE + 1}
    await one.followed(one.at(MAX_AGE + 1, by=0.05))
    assert ids(one.sample(MAX_AGE + 1)) != first
    assert one.copy.status_fields(MAX_AGE + 1)["copy_age_steps"] == 0


async def test_lost_steps_are_fetched_again(one):
    one.sample(0)
    await one.followed(one.at(6, by=0.05))
    ahead = ids(one.sample(6))
    assert one.sample(3) is None, "the crew began again at 3"
    await one.followed(one.at(3, by=-0.05))
    assert ids(one.sample(3)) != ahead


@pytest.mark.parametrize("apart", [0, 1])
async def test_stages_of_different_steps_are_not_one_copy(model, nursery, apart):
    async def policy_copy(spec):
        return 100, 5 + apart * spec.index, {}

    exchange = SimpleNamespace(
        channel=SimpleNamespace(spawn=lambda fetch: nursery.start_soon(fetch) or True),
        fetch=SimpleNamespace(policy_copy=policy_copy),
    )
    copy = PolicyCopy(model, lambda: exchange, 4096)
    copy.sample(0, PROMPTS, Sampling(1, 1), torch.Generator())
    copy.start_fetch((1, model.config.num_hidden_layers - 1), 5)
    await trio.testing.wait_all_tasks_blocked()
    assert [copy.is_at(5), copy.is_at(6)] == [not apart, False]


async def test_late_fetch_is_not_written_to_the_next_copy(one):
    first, read = ids(one.sample(0)), one.peer.stage.base
    reading, on = threading.Event(), threading.Event()
    one.peer.stage.base = lambda name: reading.set() or (on.wait(30) and read(name))
    one.copy.start_fetch(one.layers, asked := one.at(2, by=0.05))
    await trio.to_thread.run_sync(reading.wait)
    one.copy.release()
    assert ids(one.sample(0)) == first, "the base again"
    on.set()
    later = one.at(3)
    await one.refetched(later, never=asked)


async def test_numbers_that_are_not_finite_are_the_stages_matter(one):
    one.sample(0)
    with torch.no_grad():
        one.worker.runtime.model.model.norm.weight.mul_(1e38)
    await one.followed(one.at(1))
    assert one.sample(1) is None
    assert one.copy.is_at(1), "it was put in"


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("an operator"), MemoryError()],
)
async def test_refresh_that_does_not_fit_is_skipped(one, monkeypatch, error):
    first, failed = ids(one.sample(0)), []

    def fails(*args):
        failed.append(1)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(local_stage, "encode_copy", fails)
        at = one.at(1, by=0.05)
        one.copy.start_fetch(one.layers, at)
        await until(lambda: failed)
        await trio.testing.wait_all_tasks_blocked()
        assert ids(one.sample(1)) == first, "the copy is as it was"
    await one.refetched(at)
    assert ids(one.sample(1)) != first


async def test_copy_is_dropped_if_samples_do_not_fit(one, monkeypatch):
    one.sample(0)
    tried = []

    def generate(*args):
        tried.append(1)
        raise RowTooLarge(0, 4096)

    monkeypatch.setattr(MicroBatcher, "generate", generate)
    assert one.sample(0) is None
    assert one.copy.status_fields(0) == {}, "its memory is free"
    assert one.sample(0) is None
    assert len(tried) == 1, "it is not built again"
