"""Held-out evaluation: its token budget and its counters."""

from types import SimpleNamespace

import pytest
import torch

from swarmnode.config import TaskConfig, TrainingConfig
from swarmnode.drops import TrainerDrops
from swarmnode.observe.samples import newest
from swarmnode.policy.generate import GroupSample, SampledCompletion
from swarmnode.tasks.client import Scored
from swarmnode.tasks.frames import ScorerFailed
from swarmnode.trainer import loop
from swarmnode.trainer.evaluate import Evaluation, evaluation_due, forget_other_questions
from swarmnode.trainer.state import Counters
from tests.support.network_side import run_trainer, train_alone

COST = 1500


@pytest.mark.parametrize("every", [0, 5, 10])
def test_evaluations_take_a_small_share_of_tokens_by_default(every):
    training = TrainingConfig(eval_every=every)
    # that of the start
    counters, times = Counters(tokens_total=COST, evaluation_tokens_total=COST), 0
    for step in range(1, 5001):
        counters.step = step
        counters.tokens_total += 230
        if size := evaluation_due(training, counters):
            times += 1
            cost = COST if size == "full" else COST // 4
            counters.reward_held_out_step = step
            counters.tokens_total += cost
            counters.evaluation_tokens_total += cost
            assert step % (every or 10) == 0
            assert size == "full" or not every
    assert times == 5000 // every if every else times >= 20
    share = counters.evaluation_tokens_total / counters.tokens_total
    assert share <= 0.06 if not every else share > 0.2


async def test_evaluations_are_delayed_and_counted(tmp_path):
    reports = []
    for name, every in (("usual", 0), ("unlimited", 2)):
        reports.append(
            await train_alone(tmp_path / name, held_out=16, max_steps=6, eval_every=every)
        )
    usual, unlimited = (each[-1] for each in reports)
    assert usual.evaluation_tokens_total > 0
    assert 1.75 < unlimited.evaluation_tokens_total / usual.evaluation_tokens_total < 2.25, (
        "one at the start and one at the end, and two more"
    )
    assert [each.reward_held_out_step for each in (usual, unlimited)] == [6, 6]
    assert {each.reward_held_out_step for each in reports[1]} == {None, 0, 2, 4, 6}
    assert usual.reward_held_out_start_error == reports[0][-1].reward_held_out_start_error > 0
    for directory in ("usual", "unlimited"):
        held_out = [each for each in newest(tmp_path / directory, 100) if each.held_out]
        assert {(each.task, each.prompt) for each in held_out} == {
            (held_out[0].task, held_out[0].prompt)
        }
        steps = [each.step for each in held_out]
        assert steps == ([6, 0] if directory == "usual" else [6, 4, 2, 0])
        assert all(len(each.completions) == 4 for each in held_out)
    assert usual.tokens_total > usual.evaluation_tokens_total + 6 * 8 * 8


@pytest.mark.parametrize(("seconds", "batches"), [(0.0, 1), (60.0, 2)])
async def test_the_policy_is_measured_when_the_node_stops(tmp_path, monkeypatch, seconds, batches):
    monkeypatch.setattr(loop, "STOP_SECONDS", seconds)
    settings = {
        "node": {"data_dir": tmp_path},
        "task": {"names": ["rg/gcd", "rg/lcm", "rg/chain_sum"], "held_out_per_task": 16},
    }

    def stop(trainer, report):
        if report.step == 3:
            trainer.stop()

    network = await run_trainer(settings, on_report=stop)
    last = network.reports[-1]
    assert last.reward_held_out_step == last.step == last.state_saved_step >= 3
    shown = [each.activity for each in network.reports if each.phase == "draining"]
    assert [f"evaluating {done} of 48" in shown for done in (0, 32)] == [True, batches == 2]


class Answers:
    """Answers each question with a number of tokens equal to the question's number."""

    def __init__(self):
        self.text = SimpleNamespace(fits=lambda prompt: True)
        self.statistics = lambda: SimpleNamespace(device="cpu")

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
    one = held_out([1.0, 0.0, 1.0, 0.0])
    assert (one.reward, one.error) == (0.5, None)


@pytest.mark.parametrize(("questions", "answers"), [(4, 4), (16, 4), (32, 2), (64, 1), (128, 1)])
def test_many_questions_have_one_answer_each(questions, answers):
    found = held_out(*[[1.0] * answers] * questions)
    assert len(found.completions) == answers
    assert (found.task, found.prompt) == ("rg/gcd", "?")


@pytest.mark.parametrize("questions", [4, 16, 64, 128])
def test_a_small_evaluation_is_small(questions):
    """From 64 questions on it was as large as a full one."""
    task = TaskConfig(names=["rg/gcd", "rg/lcm"], held_out_per_task=questions)
    evaluation = Evaluation(task, TrainingConfig(), Fixed([[1.0]] * 2 * questions))
    evaluation._scorer.by_question = [[0.25]] * 2 * min(questions, 16)
    found = evaluation(Answers(), Counters(), "small")
    assert (found.reward, len(found.completions)) == (0.25, 1)


def test_an_evaluation_may_end_with_a_part_of_every_task():
    """The first questions of one task would be no sample of all."""
    task = TaskConfig(names=["rg/gcd", "rg/lcm"], held_out_per_task=64)
    evaluation = Evaluation(task, TrainingConfig(), Fixed([[1.0]] * 128))
    evaluation._scorer.by_question = [[1.0], [0.0]] * 32
    batches = iter([False, True])
    found = evaluation(Answers(), Counters(), enough=lambda: next(batches))
    assert found.reward == 0.5, "two batches of 32 answers"
    assert found.error == pytest.approx(0.5 / 63**0.5)


def test_rewards_of_other_questions_are_forgotten():
    counters = Counters(reward_held_out=0.88, reward_held_out_start=0.1)
    forget_other_questions(counters, "easy")
    assert counters.reward_held_out_start == 0.1, "the state of an earlier version has no name"
    forget_other_questions(counters, "easy")
    assert (counters.reward_held_out, counters.reward_held_out_start) == (0.88, 0.1)
    forget_other_questions(counters, "hard")
    assert counters == Counters(held_out_questions="hard")


def test_questions_are_named_by_tasks_and_sampling():
    def name(training=None, **task):
        return Evaluation(TaskConfig(**task), training or TrainingConfig(), Silent()).questions

    easy = {"names": ["rg/gcd"], "held_out_per_task": 4}
    assert name(**easy) == name(**easy)
    others = [
        name(**easy | {"names": ["rg/lcm"]}),
        name(**easy | {"held_out_per_task": 8}),
        name(TrainingConfig(temperature=0.5), **easy),
        name(TrainingConfig(max_completion_length=7), **easy),
    ]
    assert len({name(**easy), *others}) == 5


class Silent:
    """A scorer without questions."""

    def score_many(self, items):
        return [ScorerFailed("silent")] * len(items)


def test_unscored_held_out_question_is_counted():
    task, drops = TaskConfig(names=["rg/gcd"], held_out_per_task=3), TrainerDrops().held_out
    scorer = Fixed([[1.0] * 4, [0.0] * 4, [1.0] * 4])
    evaluation = Evaluation(task, TrainingConfig(), scorer, drops)
    answered = scorer.score_many
    scorer.score_many = lambda items: [*answered(items)[:2], ScorerFailed("it was killed")]
    assert evaluation(Answers(), Counters()).reward == 0.5
    assert drops.statistics().dropped == {"no_question": 0, "not_scored": 1}
