"""How many groups a step's own experience is, with dynamic sampling and without."""

import pytest
import torch

from swarmnode.config import TrainingConfig
from swarmnode.policy.generate import GroupSample, Sampled
from swarmnode.tasks.client import Scored
from swarmnode.trainer.sampler import DYNAMIC_FACTOR, Sampler
from swarmnode.trainer.state import Counters

NAMES = ["rg/gcd"]


class Text:
    def hides(self, ids):
        return False


class Policy:
    """Every completion is two tokens."""

    text = Text()

    def generate(self, prompts, sampling, rng):
        one = Sampled([5, 1], [-0.5, -0.1], "5", "eos")
        return [GroupSample([2, 3], [one] * sampling.num_generations) for _ in prompts]


class Verdicts:
    """One question in `every` is answered rightly by some completions; the others by none."""

    def __init__(self, every):
        self.every, self.judged = every, 0

    def score_many(self, items):
        out = []
        for _, texts in items:
            self.judged += bool(texts)
            rewards = [1.0] + [0.0] * (len(texts) - 1) if texts and self.judged % self.every == 0 else [0.0] * len(texts)
            out.append(Scored("?", rewards))
        return out


def sampled(every, count=4, **training):
    counters = Counters(peer="12D3KooWme", swarm="00" * 32)
    sampler = Sampler(TrainingConfig(num_generations=2, **training), NAMES, Policy(), Verdicts(every), torch.Generator(), counters)
    return sampler(count), counters


def test_without_it_as_many_as_asked_are_sampled_and_all_are_trained_on():
    experience, counters = sampled(every=2)
    assert len(experience.groups) == len(experience.trained) == len(experience.messages) == counters.sequence == 4


@pytest.mark.parametrize("every", [1, 2, 3])
def test_dynamic_sampling_goes_on_until_as_many_carry_a_signal(every):
    experience, counters = sampled(every, options=["dynamic_sampling"])
    assert [group.rewards for group in experience.trained] == [[1.0, 0.0]] * 4
    assert len(experience.groups) == len(experience.messages) == counters.sequence == 4 * every
    assert experience.tokens == 4 * every * 2 * 2, "what was sampled in vain was sampled too"


def test_dynamic_sampling_gives_up_at_its_cap():
    experience, _ = sampled(every=8, options=["dynamic_sampling"])
    assert len(experience.groups) == 4 * DYNAMIC_FACTOR
    assert len(experience.trained) == 2


def test_dynamic_sampling_of_nothing_useful_trains_on_nothing_of_its_own():
    experience, _ = sampled(every=10**6, options=["dynamic_sampling"])
    assert experience.trained == []
    assert len(experience.groups) == 4 * DYNAMIC_FACTOR
