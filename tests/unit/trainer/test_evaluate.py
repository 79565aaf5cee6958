"""Held-out evaluation: a budget of sampled tokens, and all of them counted."""

import pytest
import torch
import trio

from swarmnode.config import Config, TrainingConfig
from swarmnode.link.server import LinkServer
from swarmnode.process import Progress
from swarmnode.trainer.evaluate import evaluation_due
from swarmnode.trainer.loop import Trainer
from swarmnode.trainer.state import Counters
from tests.support.network_side import NetworkSide

COST = 1500


@pytest.mark.parametrize(("budget", "most"), [(0.05, 0.06), (0.5, 0.51), (1.0, 1.0)])
def test_evaluations_keep_to_their_share_of_all_tokens(budget, most):
    training = TrainingConfig(eval_every=10, eval_budget=budget)
    # that of the start
    counters, times = Counters(tokens_total=COST, evaluation_tokens_total=COST), 0
    for step in range(1, 5001):
        counters.step = step
        counters.tokens_total += 230
        if evaluation_due(training, counters):
            times += 1
            counters.tokens_total += COST
            counters.evaluation_tokens_total += COST
            assert step % 10 == 0
    assert times >= 20
    assert counters.evaluation_tokens_total / counters.tokens_total <= most
    if budget == 1.0:
        assert times == 500


async def test_evaluations_are_put_off_and_counted(tmp_path):
    torch.set_num_threads(1)
    reports = []
    for name, budget in (("usual", 0.05), ("unlimited", 1.0)):
        directory = tmp_path / name
        (directory / "run").mkdir(parents=True)
        network = NetworkSide()
        config = Config.model_validate(
            {
                "node": {"data_dir": directory},
                "weights": {"rule": "off"},
                "training": {"max_steps": 6, "eval_every": 2, "eval_budget": budget},
            }
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(LinkServer(directory, network).run)
            await trio.to_thread.run_sync(Trainer(config, Progress()).run)
            nursery.cancel_scope.cancel()
        reports.append(network.reports)
    usual, unlimited = (each[-1] for each in reports)
    assert usual.evaluation_tokens_total > 0
    assert 3.5 < unlimited.evaluation_tokens_total / usual.evaluation_tokens_total < 4.5, (
        "one at the start, and three more"
    )
    assert usual.tokens_total > usual.evaluation_tokens_total + 6 * 8 * 8
