"""Sampled completions on their way to training and to peers."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from swarmnode.config import TrainingConfig
from swarmnode.drops import TrainerDrops
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.generate import GroupSample, SampledCompletion
from swarmnode.policy.text import PolicyText
from swarmnode.tasks.frames import Scored
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import Counters
from tools.build_tiny import build_tokenizer

PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"


NOTHING_HIDES = SimpleNamespace(hides=lambda ids: False)


def experience(texts, rewards, drops=None):
    """Return the experience of one question with the answers `texts` and their `rewards`."""
    completions = [SampledCompletion([1, 2], [-0.5, -0.5], text, "eos") for text in texts]
    return experience_of(NOTHING_HIDES, completions, rewards, [], drops)


def experience_of(text, completions, rewards, seen, drops=None):
    """Return the experience of one question; `seen` receives the scored texts."""

    def score_many(questions):
        seen.extend(texts for _, texts in questions if texts)
        return [Scored("ask", rewards if texts else []) for _, texts in questions]

    engine = SimpleNamespace(
        text=text,
        generation=lambda sampling, rng: Lockstep(
            lambda prompts, count: [GroupSample([3], completions)]
        ),
    )
    counters = Counters(peer=PEER, swarm="00" * 32)
    cfg, scorer = TrainingConfig(num_generations=len(completions)), SimpleNamespace()
    scorer.score_many = score_many
    drops = TrainerDrops() if drops is None else drops
    return Sampler(cfg, ["rg/gcd"], engine, scorer, torch.Generator(), counters, drops)(1)


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
