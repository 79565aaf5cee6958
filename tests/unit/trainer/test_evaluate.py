"""Held-out evaluation: its token budget and its counters."""

from types import SimpleNamespace

import pytest
import torch
import trio

from swarmnode.config import Config, TaskConfig, TrainingConfig
from swarmnode.drops import TrainerDrops
from swarmnode.link.server import LinkServer
from swarmnode.policy.generate import GroupSample, SampledCompletion
from swarmnode.process import Progress
from swarmnode.tasks.client import Scored
from swarmnode.tasks.frames import ScorerFailed
from swarmnode.trainer.evaluate import Evaluation, HeldOutReward, evaluation_due
from swarmnode.trainer.loop import Trainer
from swarmnode.trainer.state import Counters
from tests.support.network_side import NetworkSide

COST = 1500


@pytest.mark.parametrize("every", [0, 5, 10])
def test_evaluations_take_a_small_share_of_tokens_by_default(every):
    training = TrainingConfig(eval_every=every)
    # that of the start
    counters, times = Counters(tokens_total=COST, evaluation_tokens_total=COST), 0
    for step in range(1, 5001):
        counters.step = step
        counters.tokens_total += 230
        if evaluation_due(training, counters):
            times += 1
            counters.tokens_total += COST
            counters.evaluation_tokens_total += COST
            assert step % (every or 10) == 0
    assert times == 5000 // every if every else times >= 20
    share = counters.evaluation_tokens_total / counters.tokens_total
    assert share <= 0.06 if not every else share > 0.2


async def test_evaluations_are_delayed_and_counted(tmp_path):
    torch.set_num_threads(1)
    reports = []
    for name, every in (("usual", 0), ("unlimited", 2)):
        directory = tmp_path / name
        (directory / "run").mkdir(parents=True)
        network = NetworkSide()
        config = Config.model_validate(
            {
                "node": {"data_dir": directory},
                "weights": {"rule": "off"},
                "training": {"max_steps": 6, "eval_every": every},
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


class Answers:
    """Answers each question with a number of tokens equal to the question's number."""

    def __init__(self):
        self.text = SimpleNamespace(fits=lambda prompt: True)

    def random_generator(self, seed):
        return torch.Generator()

    def generate(self, prompts, sampling, rng):
        return [
            GroupSample(
                [1], [SampledCompletion([2], [-0.1], "x", "eos")] * sampling.num_generations
            )
            for _ in prompts
        ]

    def remember(self, rewarded, own):
        pass


class Fixed:
    """A scorer that gives each question the rewards of `by_question`."""

    def __init__(self, by_question):
        self.by_question = by_question

    def score_many(self, items):
        return [
            Scored("?", rewards if texts else [])
            for rewards, (_, texts) in zip(self.by_question, items, strict=True)
        ]


def held_out(*by_question):
    task = TaskConfig(names=["rg/gcd"], held_out_per_task=len(by_question))
    evaluation = Evaluation(task, TrainingConfig(), Fixed(by_question))
    return evaluation(Answers(), Counters())


def test_held_out_error_is_over_questions():
    """Four completions of one question are not four independent measurements."""
    found = held_out([1.0] * 4, [0.0] * 4, [1.0, 1.0, 0.0, 0.0], [0.5] * 4)
    assert found.reward == pytest.approx(0.5)
    means = torch.tensor([1.0, 0.0, 0.5, 0.5])
    assert found.error == pytest.approx(float(means.std()) / 2)


def test_one_question_has_no_error():
    assert held_out([1.0, 0.0, 1.0, 0.0]) == HeldOutReward(0.5, None)


def test_unscored_held_out_question_is_counted():
    task, drops = TaskConfig(names=["rg/gcd"], held_out_per_task=3), TrainerDrops().held_out
    scorer = Fixed([[1.0] * 4, [0.0] * 4, [1.0] * 4])
    evaluation = Evaluation(task, TrainingConfig(), scorer, drops)
    answered = scorer.score_many
    scorer.score_many = lambda items: [*answered(items)[:2], ScorerFailed("it was killed")]
    assert evaluation(Answers(), Counters()).reward == 0.5
    assert drops.statistics().dropped == {"no_question": 0, "not_scored": 1}
