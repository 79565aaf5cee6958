"""`benchmarks.hostile` at a small size: all goals are met, and missed if a defence is off."""

from unittest import mock

import pytest

from benchmarks.hostile import KINDS, LEARNING, Size, missed, network_case, play
from benchmarks.lib.adversaries import ADAPTIVE, ATTACKS, WAYS
from benchmarks.lib.simulator import single_thread
from swarmnode.config import PolicyConfig
from swarmnode.policy.load import load_policy
from swarmnode.rollouts.network import admission
from swarmnode.rollouts.trainer import judge
from swarmnode.tasks.client import Scorer
from tests.support.sim import hostile

UNJUDGED = {
    "surprise_check": mock.Mock(return_value=True),
    "burst_weight": mock.Mock(return_value=1.0),
    "_masked": lambda accepted, floor: accepted,
}
SMALL = Size(honest=2, rounds=2, eval_every=2, eval_questions=1)


@pytest.fixture(scope="module")
def swarm():
    """Yield three policies, the hostile node's last, and a scorer."""
    single_thread()
    policy = load_policy(PolicyConfig(devices="cpu", threads=1))
    with Scorer() as scorer:
        yield [policy.clone() for _ in range(3)], scorer


@pytest.mark.parametrize(
    ("attack", "where", "defence"),
    [
        ("informed", judge, UNJUDGED),
        ("hot", judge, UNJUDGED),
        ("forged", admission, {"check_seed": mock.Mock(return_value=True)}),
    ],
)
def test_an_attack_teaches_nothing_unless_its_defence_is_turned_off(swarm, attack, where, defence):
    policies, scorer = swarm
    result = play(attack, 25, policies, scorer, 0, SMALL)
    assert result["frames_sent"] > 8
    assert missed([result], []) == []
    with mock.patch.multiple(where, **defence):
        undefended = play(attack, 25, policies, scorer, 0, SMALL)
    assert "of its groups trained on" in "; ".join(missed([undefended], []))


def test_adaptive_attacker_passes_more_groups_without_judging(swarm):
    policies, scorer = swarm
    result = play("colluding", 25, policies, scorer, 0, SMALL)
    assert result["crashes"] == 0, result["first_crash"]
    assert {outcome for outcome in result["outcomes"] if outcome.startswith("drawn: ")} <= {
        "drawn: used"
    }
    with mock.patch.multiple(judge, **UNJUDGED):
        unjudged = play("colluding", 25, policies, scorer, 0, SMALL)
    assert unjudged["frames_sent"] > result["frames_sent"]
    assert unjudged["trained_on"] > result["trained_on"]


def test_every_attack_that_there_is_takes_part():
    assert set(LEARNING) == {*ATTACKS, *ADAPTIVE, *WAYS}
    assert KINDS == hostile.KINDS


def test_hostile_bytes_are_seen_and_nothing_breaks():
    silent, stolen = (network_case(attack, 25, 1, 3) for attack in ("silent", "stolen"))
    assert (silent["problem"], stolen["problem"]) == ("", "")
    assert stolen["wasted"] > 1.5 * silent["wasted"]
    assert stolen["used"] > 0
