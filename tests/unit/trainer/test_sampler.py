"""Sampled groups of a step, with and without dynamic sampling, and their completions on the way to
training and to peers."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from swarmnode.config import TrainingConfig
from swarmnode.drops import TrainerDrops
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.engine.protocol import FinishedRequest, GenerationStatistics
from swarmnode.policy.generate import GroupSample, SampledCompletion
from swarmnode.policy.text import PolicyText
from swarmnode.tasks.client import Scored
from swarmnode.trainer.sampler import DYNAMIC_FACTOR, MAX_LAG, Sampler
from swarmnode.trainer.state import Counters
from tools.build_tiny import build_tokenizer

HIDES_NOTHING = SimpleNamespace(hides=lambda ids: False)
ONE = SampledCompletion([5, 1], [-0.5, -0.1], "5", "eos")


def lockstep(completions):
    """An engine that answers every question with these completions."""
    return Lockstep(lambda prompts, count: [GroupSample([2, 3], completions) for _ in prompts])


def sampler_of(engine, scorer, drops=None, *, text=HIDES_NOTHING, generations=2, **training):
    policy = SimpleNamespace(text=text, generation=lambda sampling, rng: engine)
    counters = Counters(peer="12D3KooWme", swarm="00" * 32)
    cfg = TrainingConfig(num_generations=generations, **training)
    return Sampler(cfg, ["rg/gcd"], policy, scorer, torch.Generator(), counters, drops), counters


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
            FinishedRequest(number, GroupSample([2], [replace(ONE, versions=versions)] * self.size))
        ]

    def ahead(self, count):
        return count

    def statistics(self):
        oldest = min(
            (self.since[number] for number in self.waiting if number in self.since), default=None
        )
        return GenerationStatistics(len(self.waiting), oldest)


def sampled(every, count=4, **training):
    sampler, counters = sampler_of(lockstep([ONE] * 2), Verdicts(every), **training)
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


@pytest.mark.parametrize(("every", "useful"), [(8, 2), (10**6, 0)])
def test_dynamic_sampling_gives_up_at_its_cap(every, useful):
    experience, _ = sampled(every, options=["dynamic_sampling"])
    assert len(experience.groups) == 4 * DYNAMIC_FACTOR
    assert len(experience.trained) == useful


def test_step_waits_for_groups_that_would_become_stale():
    slow = Slow(2)
    sampler, counters = sampler_of(slow, Verdicts(1))
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
    mute = SimpleNamespace(score_many=lambda items: [ValueError("no such task") for _ in items])
    sampler, _ = sampler_of(Slow(2), mute)
    assert sampler(4).groups == []


# ---- completions on their way to training and to peers -------------------------------------------


def experience(texts, rewards, drops=None):
    """Return the experience of one question with the answers `texts` and their `rewards`."""
    completions = [SampledCompletion([1, 2], [-0.5, -0.5], text, "eos") for text in texts]
    return experience_of(HIDES_NOTHING, completions, rewards, [], drops)


def experience_of(text, completions, rewards, seen, drops=None):
    """Return the experience of one question; `seen` receives the scored texts."""

    def score_many(questions):
        seen.extend(texts for _, texts in questions if texts)
        return [Scored("ask", rewards if texts else []) for _, texts in questions]

    scorer = SimpleNamespace(score_many=score_many)
    generations = len(completions)
    made = sampler_of(lockstep(completions), scorer, drops, text=text, generations=generations)
    return made[0](1)


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\x7f", "\u202e", "\ufffe"])
def test_control_character_excludes_only_its_completion(character):
    with capture_logs() as said:
        found = experience(["4", f"4{character}", "5", "4\n\t"], [1.0, 1.0, 0.0, 1.0])
    (group,), (shared,) = found.groups, found.messages
    assert group.rewards == [1.0, 0.0, 0.0, 1.0], "the policy is trained away from it"
    assert [c.text for c in shared.completions] == ["4", "5", "4\n\t"]
    assert shared.rewards == [1.0, 0.0, 1.0]
    assert [line["reason"] for line in said if "reason" in line] == ["charset"], (
        "the operator sees it"
    )


def test_group_with_one_remaining_completion_is_not_shared():
    drops = TrainerDrops()
    found = experience(["4", "4\x00", "5\x00"], [1.0, 1.0, 0.0], drops)
    assert found.groups[0].rewards == [1.0, 0.0, 0.0]
    assert found.messages == []
    assert +Counter(drops.group.statistics().dropped) == {"charset": 1}


HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")


@pytest.fixture(scope="module")
def text():
    """A tokenizer whose special tokens open channels, as gpt-oss has it."""
    tokenizer = build_tokenizer({"analysis", "final", "assistant"})
    tokenizer.add_special_tokens({"additional_special_tokens": list(HARMONY)})
    eos = tokenizer.eos_token_id
    return PolicyText(tokenizer, b"", b"", eos, frozenset({eos}), 0, len(tokenizer))


def answered(text, answers, seen, drops=None):
    """Return the experience of one question with these answers, of which the first is right."""
    completions = []
    for answer in answers:
        ids = text.tokenizer(answer, add_special_tokens=False)["input_ids"]
        completions.append(SampledCompletion(ids, [-0.5] * len(ids), text.decode(ids), "eos"))
    return experience_of(text, completions, [1.0, *[0.0] * (len(answers) - 1)], seen, drops)


CHANNELS = (
    "<|channel|>analysis<|message|>3+4<|end|><|start|>assistant<|channel|>final<|message|>{}<eos>"
)


def test_a_reward_and_peers_get_special_tokens_as_text(text):
    seen, drops = [], TrainerDrops()
    found = answered(text, [CHANNELS.format(7), CHANNELS.format(8)], seen, drops)
    expected = [CHANNELS.format(n).removesuffix("<eos>") for n in (7, 8)]
    assert seen == [expected]
    assert [c.text for c in found.messages[0].completions] == expected
    assert drops.group.statistics().kept == 1
    assert not any(drops.group.statistics().dropped.values())


@pytest.mark.parametrize("hidden", ["<pad>", "<unk>"])
def test_a_token_without_text_costs_that_completion(text, hidden):
    with capture_logs() as said:
        found = answered(text, ["7<eos>", f"7{hidden}<eos>", "8<eos>"], [])
    assert [c.text for c in found.messages[0].completions] == ["7", "8"]
    assert len(found.groups[0].rows) == 3
    assert [line["reason"] for line in said if "reason" in line] == ["special_ids"]


def test_a_group_that_cannot_be_shared_is_counted(text):
    drops = TrainerDrops()
    found = answered(text, ["7<pad><eos>", "8<pad><eos>", "9<eos>"], [], drops)
    assert found.messages == []
    assert +Counter(drops.group.statistics().dropped) == {"special_ids": 1}
