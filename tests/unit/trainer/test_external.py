"""When a step asks for others' groups."""

from types import SimpleNamespace

from swarmnode.config import SharingConfig
from swarmnode.rollouts.groups import Judged
from swarmnode.trainer.external import ExternalGroups


class Link:
    """Notes what it is asked in which order."""

    def __init__(self):
        self.calls = []

    def request_external(self, count, policy_version, per_peer):
        self.calls.append(("request", count, policy_version, per_peer))

    def send(self, message):
        self.calls.append(("send", message))

    def take_external(self, seconds):
        self.calls.append(("take", seconds > 0))
        return [], 3


def external(room, **sharing):
    seen = []
    plan = SimpleNamespace(external_room=room, groups=8, arrived=lambda *counts: seen.append(counts))
    link = Link()
    return ExternalGroups(link, None, plan, SharingConfig(**sharing), 1.0), link, seen


def test_a_step_that_has_sampled_asks_first_publishes_meanwhile_and_takes_what_came():
    groups, link, seen = external(room=6)
    own = [Judged("a", "used"), Judged("b", "used")]  # anything that can be sent
    judgement = groups.exchange(own, policy_version=7)
    assert link.calls == [("request", 9, 7, 3), ("send", own[0]), ("send", own[1]), ("take", True)]
    assert (judgement.outcomes, judgement.accepted, seen) == ([], [], [(3, 0, 0)])


def test_a_step_without_room_asks_nobody_and_one_that_does_not_share_publishes_nothing():
    groups, link, _ = external(room=0, enabled=False)
    groups.exchange([Judged("a", "used")], policy_version=7)
    assert link.calls == []
