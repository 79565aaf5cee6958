"""Number of sampled groups per step, with and without dynamic sampling."""

from types import SimpleNamespace

import pytest
import torch

from swarmnode.config import TrainingConfig
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.engine.protocol import FinishedRequest, GenerationStatistics
from swarmnode.policy.generate import GroupSample, SampledCompletion
from swarmnode.tasks.client import Scored
from swarmnode.trainer.sampler import DYNAMIC_FACTOR, MAX_LAG, Sampler
from swarmnode.trainer.state import Counters

NAMES = ["rg/gcd"]


class Text:
    def hides(self, ids):
        return False


class Policy:
    """Every completion is two tokens."""

    text = Text()

    def generation(self, sampling, rng):
        one = SampledCompletion([5, 1], [-0.5, -0.1], "5", "eos")
        return Lockstep(
            lambda prompts, count: [
                GroupSample([2, 3], [one] * sampling.num_generations) for _ in prompts
            ]
        )


class Verdicts:
    """A scorer: some completions of one question in `every` are right, and all others are wrong."""

    def __init__(self, every):
        self.every, self.judged = every, 0

    def score_many(self, items):
        out = []
        for _, texts in items:
            self.judged += bool(texts)
            rewards = (
                [1.0] + [0.0] * (len(texts) - 1)
                if texts and self.judged % self.every == 0
                else [0.0] * len(texts)
            )
            out.append(Scored("?", rewards))
        return out


class Slow:
    """Each call finishes one request, the newest first, so that the oldest grow old."""

    def __init__(self, size):
        self.size, self.waiting, self.since, self.most = size, {}, {}, 0

    def submit(self, request):
        self.waiting[request.number] = request
        self.most = max(self.most, len(self.waiting))

    def finished(self, version):
        for number in self.waiting:
            self.since.setdefault(number, version)
        number = max(self.waiting)
        del self.waiting[number]
        versions = [self.since[number], version]
        return [
            FinishedRequest(
                number,
                GroupSample(
                    [2], [SampledCompletion([5, 1], [-0.5, -0.1], "5", "eos", versions)] * self.size
                ),
            )
        ]

    def ahead(self, count):
        return count

    def statistics(self):
        oldest = min(
            (self.since[number] for number in self.waiting if number in self.since), default=None
        )
        return GenerationStatistics(len(self.waiting), oldest)


def sampled(every, count=4, **training):
    counters = Counters(peer="12D3KooWme", swarm="00" * 32)
    cfg, questions = TrainingConfig(num_generations=2, **training), NAMES
    sampler = Sampler(cfg, questions, Policy(), Verdicts(every), torch.Generator(), counters)
    return sampler(count), counters


def test_without_dynamic_sampling_all_groups_are_trained_on():
    experience, counters = sampled(every=2)
    assert (
        len(experience.groups)
        == len(experience.trained)
        == len(experience.messages)
        == counters.sequence
        == 4
    )


@pytest.mark.parametrize("every", [1, 2, 3])
def test_dynamic_sampling_continues_until_enough_are_useful(every):
    experience, counters = sampled(every, options=["dynamic_sampling"])
    assert [group.rewards for group in experience.trained] == [[1.0, 0.0]] * 4
    assert len(experience.groups) == len(experience.messages) == counters.sequence == 4 * every
    assert experience.tokens == 4 * every * 2 * 2, "tokens of useless groups count"


def test_dynamic_sampling_gives_up_at_its_cap():
    experience, _ = sampled(every=8, options=["dynamic_sampling"])
    assert len(experience.groups) == 4 * DYNAMIC_FACTOR
    assert len(experience.trained) == 2


def test_dynamic_sampling_without_useful_groups_trains_on_none():
    experience, _ = sampled(every=10**6, options=["dynamic_sampling"])
    assert experience.trained == []
    assert len(experience.groups) == 4 * DYNAMIC_FACTOR


def test_step_waits_for_groups_that_would_become_stale():
    counters, slow = Counters(peer="12D3KooWme", swarm="00" * 32), Slow(2)
    engine = SimpleNamespace(text=Text(), generation=lambda sampling, rng: slow)
    sampler = Sampler(
        TrainingConfig(num_generations=2),
        NAMES,
        engine,
        Verdicts(1),
        torch.Generator(),
        counters,
    )
    lags, learnt = [], []
    for version in range(12):
        counters.policy_version = version
        experience = sampler(4)
        assert len(experience.groups) == len(experience.messages) == 4
        assert [
            version - message.policy_version for message in experience.messages
        ] == experience.lags
        lags += experience.lags
        learnt += [message.sequence for message in experience.messages]
        assert slow.most <= 8, "the step's and as many ahead"
    assert 0 < max(lags) <= MAX_LAG
    assert lags[:4] == [0] * 4
    assert len(set(learnt)) == len(learnt)
    assert set(range(4)) <= set(learnt), "the oldest are used, not dropped"


def test_failed_questions_do_not_block_a_step():
    counters, slow = Counters(peer="12D3KooWme", swarm="00" * 32), Slow(2)
    engine = SimpleNamespace(text=Text(), generation=lambda sampling, rng: slow)
    mute = SimpleNamespace(score_many=lambda items: [ValueError("no such task") for _ in items])
    assert (
        Sampler(TrainingConfig(), NAMES, engine, mute, torch.Generator(), counters)(4).groups == []
    )
