"""The trainer with a real link, a real scorer and the embedded policy: learning, stop, resume."""

import itertools
import threading

import pytest
import trio

from swarmnode.config import Config
from swarmnode.process import Progress
from swarmnode.tasks.seeds import choose_task, task_seed
from swarmnode.trainer.loop import Trainer
from tests.support.network_side import ME, SWARM, NetworkSide, run_trainer

pytestmark = pytest.mark.slow


async def train(data_dir, network, sharing=True, held_out=8, **training):
    settings = {
        "node": {"data_dir": data_dir},
        "training": training,
        "task": {"held_out_per_task": held_out},
        "sharing": {"enabled": sharing},
    }
    await run_trainer(settings, network)


async def test_each_phase_is_reported_when_it_begins(tmp_path):
    """With 7 B parameters each phase takes minutes, and the status page must show it."""
    network = NetworkSide()
    await train(tmp_path, network, max_steps=2, eval_every=1)
    phases = [phase for phase, _ in itertools.groupby(report.phase for report in network.reports)]
    assert phases == [
        "loading",
        "evaluating",
        *["generating", "training", "evaluating"] * 2,
        "draining",
    ]


async def test_lone_trainer_learns_and_publishes_its_groups(tmp_path):
    network = NetworkSide()
    await train(tmp_path, network, max_steps=40, eval_every=40)
    last = network.reports[-1]
    assert last.step == 40
    assert last.reward_held_out > last.reward_held_out_start + 0.1
    assert (last.state_saved_step, last.state_due_at) == (40, None), "the end of a save is reported"
    assert last.own_groups_total == 40 * 8
    assert 0.97 * last.own_groups_total < len(network.published) <= last.own_groups_total, (
        "all but those in which a special token hides"
    )
    # of two fragments, after 25 steps of 50
    assert [(due.fragment, due.outer_step) for due in network.averaging] == [(0, 0)]
    # no partner was found for it
    assert last.weights.outer_step == last.weights.exchanges_total == 0
    sequences = [group.sequence for group in network.published]
    assert len(set(sequences)) == len(sequences)
    tasks = Config().task.names
    for group in network.published[:5]:
        assert group.task.id == choose_task(tasks, SWARM, ME, group.sequence)
        asked = task_seed(SWARM, ME, group.sequence, group.task.id)
        assert (group.task.seed, group.task.index) == asked
        assert len(group.rewards) == len(group.completions) == 8


async def test_restarted_trainer_repeats_no_question(tmp_path):
    first, second = NetworkSide(), NetworkSide()
    await train(tmp_path, first, max_steps=5)
    await train(tmp_path, second, max_steps=8)
    assert second.reports[0].step == second.reports[0].state_saved_step == 5
    assert second.reports[-1].step == 8
    assert second.reports[-1].reward_held_out_start == first.reports[-1].reward_held_out_start
    assert min(group.sequence for group in second.published) > max(
        group.sequence for group in first.published
    )


async def test_stop_ends_the_wait_for_the_identity(tmp_path):
    (tmp_path / "run").mkdir()
    trainer = Trainer(Config.model_validate({"node": {"data_dir": tmp_path}}), Progress())
    done = threading.Event()

    def run():
        trainer.run()
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, run)
        await trio.lowlevel.checkpoint()
        trainer.stop()
    assert done.is_set()
