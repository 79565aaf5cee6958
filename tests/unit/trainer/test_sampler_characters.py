"""What the policy sampled, on its way to training and to peers."""

from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from swarmnode.config import TrainingConfig
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.generate import GroupSample, Sampled
from swarmnode.tasks.frames import Scored
from swarmnode.trainer.questions import Questions
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import Counters

PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"


def experience(texts, rewards):
    """Of one question, to which the policy answers `texts`, which the scorer would give
    `rewards`."""
    completions = [Sampled([1, 2], [-0.5, -0.5], text, "eos") for text in texts]
    engine = SimpleNamespace(
        text=SimpleNamespace(hides=lambda ids: False),
        generation=lambda sampling, rng: Lockstep(lambda prompts: [GroupSample([3], completions)]),
    )
    scorer = SimpleNamespace(
        score_many=lambda questions: [
            Scored("ask", rewards if asked else []) for _, asked in questions
        ]
    )
    counters = Counters(peer=PEER, swarm="00" * 32)
    cfg, questions = TrainingConfig(num_generations=len(texts)), Questions(["rg/gcd"], counters)
    return Sampler(cfg, questions, engine, scorer, torch.Generator(), counters)(1)


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\x7f", "\u202e", "\ufffe"])
def test_one_control_character_costs_that_completion_and_not_its_group(character):
    with capture_logs() as said:
        found = experience(["4", f"4{character}", "5", "4\n\t"], [1.0, 1.0, 0.0, 1.0])
    (group,), (shared,) = found.groups, found.messages
    assert group.rewards == [1.0, 0.0, 0.0, 1.0], "the policy is trained away from it"
    assert [c.text for c in shared.completions] == ["4", "5", "4\n\t"]
    assert shared.rewards == [1.0, 0.0, 1.0]
    assert "control_characters" in str(said), "and its owner is told"


def test_a_group_of_which_one_completion_is_left_is_trained_on_and_not_shared():
    found = experience(["4", "4\x00", "5\x00"], [1.0, 1.0, 0.0])
    assert found.groups[0].rewards == [1.0, 0.0, 0.0]
    assert found.messages == []


def test_what_is_clean_is_shared_whole():
    with capture_logs() as said:
        found = experience(["4", "5"], [1.0, 0.0])
    assert [c.text for c in found.messages[0].completions] == ["4", "5"]
    assert "control_characters" not in str(said)
