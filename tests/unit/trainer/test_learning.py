"""The verdict on whether a run learns."""

import itertools

import pytest

from swarmnode import settings
from swarmnode.trainer.learning import LearningWatch

ALONE = ("policy.model=smollm2", "policy.lora.r=16", "weights.rule=off")
NOISE = [0.05, 0.0, 0.2, 0.0, 0.1]
"""Rewards of five steps that repeat; their mean is 0.07."""


def watch(*printed, fresh=True):
    printed = printed or ALONE
    config = settings.load(overrides=printed).config
    found = LearningWatch(config)
    found.start(fresh)
    return found


def verdicts(watch, rewards, *, entropy=2.0, cut=0.0):
    return [watch.observe([reward], cut, entropy, stepped=True) for reward in rewards]


def flat(steps, mean=0.0):
    return [mean + reward for reward in itertools.islice(itertools.cycle(NOISE), steps)]


def test_unmoved_reward_is_reported_after_twenty_steps():
    found = verdicts(watch(), flat(25))
    assert [each.kind for each in found] == [""] * 19 + ["unmoved"] * 6
    assert "0.07 in the first 5, 0.07 in the latest 10" in found[19].text
    assert "set training.learning_rate to 0.001, or ask easier questions" in found[19].text


@pytest.mark.parametrize(
    "rewards",
    [[reward + 0.02 * step for step, reward in enumerate(flat(40))], [0.95, 1.0] * 15],
    ids=["rising", "solved"],
)
def test_rising_reward_and_a_solved_task_are_not_reported(rewards):
    assert {each.kind for each in verdicts(watch(), rewards)} == {""}


def test_report_ends_when_the_reward_rises():
    run = watch()
    assert verdicts(run, flat(20))[-1].kind == "unmoved"
    assert verdicts(run, flat(10, mean=0.4))[-1].kind == ""


@pytest.mark.parametrize(
    ("rate", "advised"), [("1e-5", "3e-05"), ("7e-4", "0.001"), ("1e-3", None), ("17e-4", None)]
)
def test_advised_rate_stays_below_the_warning(rate, advised):
    run = watch(*ALONE, f"training.learning_rate={rate}")
    text = verdicts(run, flat(20))[-1].text
    assert ("set training.learning_rate" in text) == (advised is not None)
    assert advised is None or f"training.learning_rate to {advised}," in text


def test_a_start_that_is_not_known_is_not_judged():
    assert verdicts(watch(fresh=False), flat(30))[-1].kind == ""
    assert verdicts(watch("policy.model=embedded"), flat(30))[-1].kind == ""


def test_only_steps_with_an_update_count():
    run = watch()
    for reward in flat(60):
        found = run.observe([reward], 0.0, None, stepped=False)
    assert found.kind == ""
    assert verdicts(run, flat(19))[-1].kind == ""
    assert verdicts(run, flat(1))[-1].kind == "unmoved"


def test_collapse_is_reported_with_its_signs():
    run = watch(*ALONE, "training.learning_rate=2e-3")
    verdicts(run, [0.5, 0.8, 0.6, 0.7, 0.9] * 3)
    fallen = verdicts(run, [0.1, 0.0, 0.2, 0.1, 0.0] * 2, entropy=0.3, cut=1.0)
    assert fallen[0].kind == ""
    assert fallen[-1].kind == "collapsed"
    assert "from 0.70 to 0.08" in fallen[-1].text
    assert "entropy 2.00 then and 0.30 now, 100% of the answers cut" in fallen[-1].text
    assert "set training.learning_rate to 0.0005" in fallen[-1].text


def test_noise_is_no_collapse():
    run = watch(fresh=False)
    verdicts(run, [0.5, 0.9, 0.2, 0.7, 0.3] * 2)
    assert verdicts(run, [0.3, 0.6, 0.1, 0.4, 0.2] * 4)[-1].kind == ""
