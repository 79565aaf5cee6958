"""Thousands of schedules of faults: nobody commits twice, nobody waits for ever; and the checker sees what is wrong when something is."""

import os
import subprocess
import sys

import pytest

from swarmnode.crew import events as ev
from swarmnode.crew import messages, roster
from swarmnode.crew.control import CrewControl
from swarmnode.crew.roster import Acceptor
from tests.support.crew_history import History, Violation
from tests.support.nemesis import World, check

CHUNK = 250


@pytest.mark.parametrize("first", range(0, 5000, CHUNK))
def test_every_schedule_ends_and_keeps_every_invariant(first):
    steps = sum(check(seed, encode=seed % 25 == 0).counts.get("steps", 0) for seed in range(first, first + CHUNK))
    assert steps > 4 * CHUNK  # crews do take steps in between


def test_the_same_seed_is_the_same_history():
    for seed in (3, 77, 1234):
        assert check(seed).digest.digest() == check(seed).digest.digest()
    assert check(3).digest.digest() != check(4).digest.digest()


def test_a_seed_is_replayed_by_another_process():
    said = "from tests.support.nemesis import check; print([check(seed).digest.hexdigest() for seed in (6, 8, 26, 52)])"
    histories = {
        subprocess.run([sys.executable, "-c", said], env={**os.environ, "PYTHONHASHSEED": number}, check=True, capture_output=True).stdout
        for number in "12"
    }  # the order of a set of names is another one in each
    assert len(histories) == 1


def test_the_schedules_reach_what_they_are_for():
    counts: dict[str, int] = {}
    for seed in range(150):
        for what, count in check(seed).counts.items():
            counts[what] = counts.get(what, 0) + count
    wanted = {
        "founded", "running", "paused", "suspected", "refuted", "evicted", "claimed", "settled", "fenced", "dissolved", "released", "kill",
        "kill trainer", "stop", "cut", "drain", "took", "averaged", "neighbours", "everybody",
        "kill while loading", "kill while acknowledge", "kill while took", "kill while moved", "moved",
    }  # fmt: skip
    assert not wanted - counts.keys()


def accepts_old_epochs(fence, place, sender, step):
    return None if place.crew == fence.place.crew else "crew"


class VotesTwice(CrewControl):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        acceptor = self.acceptor
        prepare, propose = acceptor.prepare, acceptor.propose

        def forgetting(method):
            def forget_and_answer(message):
                acceptor.promised, acceptor.accepted_ballot, acceptor.accepted = 0, 0, None
                return method(message)

            return forget_and_answer

        acceptor.prepare, acceptor.propose = forgetting(prepare), forgetting(propose)


class SpeaksOfBoth(CrewControl):
    """Goes on voting in the crew whose witness it was, as one that forgot."""

    def _move(self):
        former, self.former = self.acceptor, None
        if former.chain:
            self.former = Acceptor(former.me, former._sign, self._verify)
            self.former.learn(former.chain)
        super()._move()

    def _received(self, peer, message):
        former = getattr(self, "former", None)
        if former is not None and isinstance(message, messages.Prepare) and message.crew == former.crew:
            self._do(ev.Answer(former.prepare(message)))
        else:
            super()._received(peer, message)


class NeverFences(CrewControl):
    def _check_lease(self):
        pass


class AveragesAlways(CrewControl):
    @property
    def may_average(self):
        return self.roster is not None and self.stage is not None


def first_violation(schedules, **options):
    for seed in schedules:
        try:
            check(seed, **options)
        except Violation as error:
            return str(error)
    return ""


def test_a_fence_that_lets_old_epochs_pass_is_found():
    found = first_violation(range(30, 230), fence_check=accepts_old_epochs)
    assert "two writers" in found
    assert "python -m tests.support.nemesis --seed" in found


def test_a_voter_that_votes_twice_is_found():
    assert "two records of epoch" in first_violation(range(360, 1500), control=VotesTwice)


def test_a_witness_that_votes_in_the_crew_that_it_left_is_found():
    assert "a say in a crew that it left" in first_violation(range(400), control=SpeaksOfBoth)


def test_half_of_the_voters_as_a_majority_is_found(monkeypatch):
    for module in (messages, roster):
        monkeypatch.setattr(module, "majority", lambda voters: max(1, voters // 2))
    assert "lawful votes" in first_violation(range(50))


def test_a_member_that_never_fences_itself_is_found():
    assert "after its lease" in first_violation(range(70, 1500), control=NeverFences)


def test_averaging_in_probation_is_found():
    assert "averages in" in first_violation(range(50), control=AveragesAlways)


def test_a_step_that_not_all_have_acknowledged_is_found(monkeypatch):
    from swarmnode.pipeline.commit import Coordinator

    acknowledged = Coordinator.acknowledged

    def first_is_enough(self, stage, attempt, refused, squared_norm):
        stages, self.stages = self.stages, max(1, self.stages - 1)
        try:
            return acknowledged(self, stage, attempt, refused, squared_norm)
        finally:
            self.stages = stages

    monkeypatch.setattr(Coordinator, "acknowledged", first_is_enough)
    assert first_violation(range(300))


def test_a_violation_names_its_seed():
    def broken(*arguments):
        raise RuntimeError("planted")

    with pytest.raises(Violation, match=r"seed 5 at .*planted\n  python -m tests.support.nemesis --seed 5"):
        check(5, control=broken)


def test_the_checker_knows_the_weights_of_a_run_without_failures():
    history = History()
    history.check_weight(1, 3, history.weight(1, 3), "x")
    with pytest.raises(Violation):
        history.check_weight(1, 3, history.weight(1, 2), "x")


def test_a_world_without_faults_just_runs():
    class Calm(World):
        def _plan_faults(self):
            self.loss = self.copies = 0.0
            self.quiet_from = 30.0

        def draw_sizes(self):
            return 3, 0

    counts = Calm(11).run().counts
    assert counts["steps"] > 10
    assert counts["founded"] == 1
    assert "paused" not in counts
