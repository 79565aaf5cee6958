"""A rank that runs out of memory gets a smaller micro-batch. A rank that ends or hangs ends the
trainer with one line, and the next trainer continues from the saved state."""

import multiprocessing
import os
import signal

import pytest
import torch

from swarmnode.errors import DeviceError, RankLost
from swarmnode.rollouts.trainer.batch import assemble
from swarmnode.trainer import update
from swarmnode.trainer.rank_pool import RankPool
from swarmnode.trainer.rank_process import Ready, run_rank
from tests.support.network_side import train_alone
from tests.unit.trainer.test_ranks import Fixture, configured

pytestmark = pytest.mark.slow
TOKENS = 160


def small_rank(*arguments):
    """A rank on a device that holds TOKENS tokens of a pass with gradients."""
    real = update.completion_logprobs

    def limited(policy, batch, temperature):
        if batch.padded_tokens > TOKENS:
            raise RuntimeError("can't allocate memory")
        return real(policy, batch, temperature)

    update.completion_logprobs = limited
    run_rank(*arguments)


@pytest.fixture(scope="module")
def fixture():
    config = configured(2)
    devices = [torch.device("cpu")] * 2
    pool = RankPool(config, devices, entry=small_rank)
    fixture = Fixture(config, pool)
    yield fixture
    pool.close()


def test_the_smallest_device_bounds_every_ranks_micro_batches(fixture, groups):
    many = [*groups[:2] * 8, *groups[2:]]
    engine = fixture.engine()
    before = engine.statistics()
    found = engine.update(assemble(many, "grpo"))
    after = engine.statistics()
    assert found.stepped
    assert after.oom_retries > before.oom_retries
    assert after.micro_batch_tokens <= 2 * TOKENS
    weights = fixture.weights()
    fixture.engine(ranks=False).update(assemble(many, "grpo"))
    assert float((weights - fixture.weights(ranks=False)).abs().max()) < 1e-5


def test_a_rank_may_be_idle_for_hours(fixture, groups):
    engine = fixture.engine()
    fixture.pool._shared.beats.get_obj()[1] -= 10_000
    rows = [row for group in groups for row in group.rows]
    assert len(engine.score(rows, 1.0)) == len(rows)


def test_a_rank_that_hangs_is_named_within_its_deadline(fixture, groups):
    engine = fixture.engine()
    fixture.pool.silence_seconds = 2.0
    os.kill(fixture.pool._ranks[1].process.pid, signal.SIGSTOP)
    with pytest.raises(RankLost, match=r"^rank 1 \(cpu\) has made no progress for 2 seconds$"):
        engine.update(assemble(groups, "grpo"))
    fixture.pool.close()
    assert not ranks(), "it is ended all the same"


def test_rank_that_cannot_load_reports_one_line(fixture):
    config = configured(2, policy={"model": "/no/such/model"})
    pool = RankPool(config, [torch.device("cpu")] * 2)
    with pytest.raises(DeviceError, match=r"^rank 1: policy\.model '/no/such/model': no such dir"):
        pool.answers(Ready)
    pool.close()


async def train(data_dir, on_report=None, **training):
    """Run a trainer of two ranks to its end; return its reports."""
    policy = {"devices": 2, "threads": 1}
    try:
        return await train_alone(data_dir, on_report, policy=policy, save_every=1000, **training)
    except ExceptionGroup as lost:
        raise lost.exceptions[0] from None


def ranks():
    return [each for each in multiprocessing.active_children() if each.name.startswith("rank")]


async def test_killed_rank_ends_the_trainer_and_a_restart_resumes(tmp_path):
    def kill(trainer, report):
        if report.step == 2:
            for each in ranks():  # which reaps: the trainer's thread must be the only one later
                os.kill(each.pid, signal.SIGKILL)

    with pytest.raises(RankLost, match=r"^rank 1 \(cpu\) was killed by SIGKILL$") as told:
        await train(tmp_path, kill, max_steps=50)
    assert told.value.exit_code == 75
    assert not ranks()
    steps = []

    def drain(trainer, report):
        steps.append(report.step)
        assert report.device == "2 × cpu"
        if report.step >= steps[0] + 2:
            trainer.stop()

    await train(tmp_path, drain, max_steps=50)
    assert 2 <= steps[0] < 50, "it continues from the state that the first has saved"
    assert steps[-1] < 50, "it drains"
    assert not ranks()
