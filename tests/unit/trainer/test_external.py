"""Requests for peers' groups, and the number of own groups that a step then samples."""

from types import SimpleNamespace

import pytest

from swarmnode.config import SharingConfig
from swarmnode.rl.split import AdaptiveSplit
from swarmnode.rollouts.trainer.batch import TrainingGroup
from swarmnode.rollouts.trainer.judge import Judgement
from swarmnode.rollouts.trainer.quota import ENOUGH_ANSWERS
from swarmnode.trainer import external as module
from swarmnode.trainer.external import ExternalGroups
from swarmnode.wire.tensors import pack_ids
from tests.support.groups import external_group


class Link:
    """A link that records its calls in order. `answers` are the groups of each call; later calls
    return none."""

    def __init__(self, *answers):
        self.calls = []
        self._answers = iter(answers)

    def request_external(self, count, policy_version, per_peer):
        self.calls.append(("request", count, policy_version, per_peer))

    def send(self, message):
        self.calls.append(("send", message))

    def take_external(self, seconds):
        self.calls.append(("take", seconds > 0))
        return next(self._answers, [])


def external(room, *answers, **sharing):
    split = SimpleNamespace(external_room=room, batch=8, observe=lambda used: None)
    link = Link(*answers)
    return ExternalGroups(
        link, SimpleNamespace(text=None, score=None), split, SharingConfig(**sharing), 1.0
    ), link


def own_group():
    """Return an own group with the fields that sharing uses."""
    completions = [SimpleNamespace(token_ids=pack_ids([n, 9])) for n in range(2)]
    return SimpleNamespace(
        task=SimpleNamespace(id="t"), rewards=[0.0, 1.0], completions=completions
    )


def test_step_publishes_then_requests_and_takes_groups():
    groups, link = external(room=6)
    own = [own_group(), own_group()]
    groups.publish(own)
    judgement = groups.pull(policy_version=7)
    assert link.calls == [("send", own[0]), ("send", own[1]), ("request", 9, 7, 3), ("take", True)]
    assert (judgement.outcomes, judgement.accepted) == ([], [])


def test_quota_knows_which_own_answers_were_rewarded():
    groups, _ = external(room=0)
    groups.publish([own_group()] * ENOUGH_ANSWERS)
    taken = lambda first: sum(groups.quota.takes("t", [first, 9]) for _ in range(40))
    assert taken(1) == 40, "as in own rewarded answers"
    assert taken(0) < 10


def test_full_step_without_sharing_makes_no_calls():
    groups, link = external(room=0, enabled=False)
    groups.publish([own_group()])
    groups.pull(policy_version=7)
    assert link.calls == []


def only_the_honest(groups, *_, quota, rescore, budget):
    """A judge that accepts only the groups of `honest` peers."""
    judged = Judgement(
        outcomes=[
            (group, "used" if group.peer.startswith("honest") else "surprise") for group in groups
        ]
    )
    ours = [group for group, outcome in judged.outcomes if outcome == "used"]
    judged.accepted = [
        TrainingGroup([([1], [2])] * 2, [[-1.0]] * 2, group.rewards, [1.0] * 2, group.peer)
        for group in ours
    ]
    return judged


@pytest.fixture
def _judged(monkeypatch):
    monkeypatch.setattr(module, "judge", only_the_honest)


def drawn(*peers):
    return [external_group(peer, number) for number, peer in enumerate(peers)]


@pytest.mark.usefixtures("_judged")
def test_step_replaces_refused_groups_once():
    groups, link = external(
        6, drawn(*"abcdefg", "honest", "honest2"), drawn("honest3", "a", "honest4", "b", "c", "d")
    )
    judgement = groups.pull(policy_version=7)
    assert link.calls == [
        ("request", 9, 7, 3),
        ("take", True),
        ("request", 6, 7, 3),
        ("take", True),
    ]
    assert [group.peer for group in judgement.accepted] == [
        "honest",
        "honest2",
        "honest3",
        "honest4",
    ]


@pytest.mark.usefixtures("_judged")
@pytest.mark.parametrize(("refused", "sampled"), [({}, 5), ({1: "too_large"}, 6)])
def test_own_sampling_falls_with_used_groups_only(refused, sampled):
    arrive = [
        *drawn("honest", "honest", "honest2", *"abcdefgh"),
        external_group("honest3", 20, rewards=[1.0, 1.0]),
    ]
    split = AdaptiveSplit(8)
    link = Link(*[arrive, []] * 20)
    groups = ExternalGroups(
        link, SimpleNamespace(text=None, score=None), split, SharingConfig(), 1.0
    )
    for _ in range(20):
        judgement = groups.pull(policy_version=0)
        assert len(judgement.accepted) == 4
        groups.learnt(judgement, refused)
    assert split.own_groups == sampled
