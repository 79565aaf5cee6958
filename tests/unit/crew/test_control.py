"""One failure at a time, told from beginning to end: how long it takes, who holds what afterwards, and why it ends where it ends."""

import pytest

from swarmnode.crew import events as ev
from swarmnode.crew import local
from tests.support.crew_story import Story, reset


def story(stages, spares=0):
    return Story(stages, spares).running()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_trainer_that_restarts_has_its_stage_within_a_second_and_nothing_else_moves(stage):
    world = story(3, 1)
    victim = next(n for n in world.nodes.values() if n.control.stage == stage)
    before, step = world.holders(), world.step()
    world.kill_trainer(victim.name, 3.0)
    world.until(lambda: victim.trainer is not None)
    claimed = world.until(lambda: victim.trainer is not None and victim.trainer.assigned is not None)
    assert claimed < 0.6  # five messages, whatever the timers
    world.until(world.everybody_runs)
    assert world.holders() == {**before, victim.name: 2}
    recovery = world.until(lambda: world.step() > step) + claimed
    assert recovery < 5.0


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_node_that_restarts_claims_its_own_stage_without_waiting_for_an_eviction(stage, remembers):
    world = story(3)
    victim = next(n for n in world.nodes.values() if n.control.stage == stage)
    step = world.step()
    reset(world, victim.name, back=2.0, remembers=remembers)
    assert world.until(world.everybody_runs) < 9.0
    assert world.holders()[victim.name] == 2
    assert "evicted" not in world.history.counts
    world.until(lambda: world.step() > step)
    assert all(node.trainer.exact for node in world.nodes.values())  # its journal


def test_a_warm_spare_takes_over_a_dead_node_within_ten_seconds():
    world = story(3, 1)
    spare = next(n.name for n in world.nodes.values() if n.control.stage is None)
    victim = next(n.name for n in world.nodes.values() if n.control.stage == 1)
    step = world.step()
    reset(world, victim)
    assert world.until(lambda: world.everybody_runs() and world.step() > step) < 10.0
    assert world.holders()[spare] == 2
    assert victim not in world.holders()


def test_a_silent_node_is_suspected_before_it_is_evicted_and_comes_back_as_a_spare():
    world = story(3, 1)
    victim = next(n for n in world.nodes.values() if n.control.stage == 1)
    victim.stopped_until = world.now + 40.0
    others = [n for n in world.nodes.values() if n is not victim and n.control.stage is not None]
    paused = world.until(lambda: not any(n.control.running for n in others))
    assert 5.0 < paused < 11.0
    recovered = world.until(lambda: all(n.control.running for n in others))
    assert 12.0 < paused + recovered < 22.0
    world.until(lambda: victim.control.roster is None and victim.stopped_until < world.now)
    assert world.everybody_runs()
    world.wait(8.0)
    assert others[0].control.statistics().offers == 1


def test_a_short_pause_costs_no_seat():
    world = story(3, 1)
    before = world.holders()
    victim = next(n for n in world.nodes.values() if n.control.stage == 1)
    victim.stopped_until = world.now + 9.0
    world.until(lambda: not world.everybody_runs(), 20.0)
    world.until(world.everybody_runs, 20.0)
    assert world.holders() == before


def test_when_the_head_is_gone_the_lowest_stage_that_is_left_proposes():
    world = story(4, 1)
    head = world.head().name
    second = next(n.name for n in world.nodes.values() if n.control.stage == 1)
    claims = world.nodes[second].control.statistics().notes["claimed"]
    reset(world, head)
    world.until(world.everybody_runs)
    assert world.nodes[second].control.statistics().notes["claimed"] == claims + 1
    assert head not in world.holders()


def test_two_neighbours_with_their_memory_come_back_and_without_a_majority_nothing_is_decided_before():
    world = story(4)
    victims = [next(n.name for n in world.nodes.values() if n.control.stage == i) for i in (1, 2)]
    for name in victims:
        reset(world, name, back=4.0)
    epoch = world.head().control.roster.epoch
    world.wait(3.0)
    assert world.head().control.roster.epoch == epoch
    world.until(world.everybody_runs)
    assert {world.holders()[name] for name in victims} == {2}


def test_everybody_at_once_goes_on_from_journals():
    world = story(3)
    step = world.step()
    for name in world.nodes:
        reset(world, name, back=1.0)
    world.until(lambda: world.everybody_runs() and world.step() > step)
    assert set(world.holders().values()) == {2}
    assert all(node.trainer.exact for node in world.nodes.values())


def test_everybody_at_once_without_memory_founds_another_crew():
    world = story(3)
    crew = world.head().control.acceptor.crew
    for name in world.nodes:
        reset(world, name, back=1.0, remembers=False)
    world.until(world.everybody_runs)
    assert world.head().control.acceptor.crew != crew


def test_two_members_go_on_with_a_witness_and_end_without_one():
    world = story(2, 1)
    assert len(world.head().control.roster.witnesses) == 1
    reset(world, world.head().name)
    world.until(world.everybody_runs)

    world = story(2)
    alive, gone = (next(n for n in world.nodes.values() if n.control.stage == i) for i in (0, 1))
    reset(world, gone.name)
    ended = world.until(lambda: alive.control.roster is None, 80.0)
    assert ended < world.settings.wait_seconds + 15.0
    assert alive.control.statistics().notes["dissolved"] == 1
    assert alive.trainer.assigned is None  # released


def test_a_vacancy_that_nobody_takes_ends_the_crew_for_all_with_a_reason():
    world = story(3)
    reset(world, next(n.name for n in world.nodes.values() if n.control.stage == 1))
    reasons = []
    note = world.history.note

    def listen(now, what, *details):
        reasons.append(what)
        note(now, what, *details)

    world.history.note = listen
    world.until(lambda: all(n.control is None or n.control.roster is None for n in world.nodes.values()), 80.0)
    assert reasons.count("dissolved") == 2


def test_leaving_politely_hands_the_stage_over_at_once():
    world = story(3, 1)
    leaver = next(n for n in world.nodes.values() if n.control.stage == 1)
    world.event(leaver.name, leaver.life, ev.Drain("asked to"))
    assert world.until(lambda: leaver.control.roster is None) < 1.0
    world.until(world.everybody_runs)
    assert leaver.name not in world.holders()
    world.wait(10.0)
    assert leaver.control.roster is None  # and stays away


def test_leaving_a_crew_that_cannot_answer_takes_a_bounded_time():
    world = story(2)
    leaver, other = (next(n for n in world.nodes.values() if n.control.stage == i) for i in (0, 1))
    other.control, other.trainer = None, None
    world.event(leaver.name, leaver.life, ev.Drain("asked to"))
    assert world.until(lambda: leaver.control.roster is None) < 13.0


def test_two_spares_want_one_vacancy_and_one_gets_it():
    world = story(3, 2)
    reset(world, next(n.name for n in world.nodes.values() if n.control.stage == 2))
    world.until(world.everybody_runs)
    assert sum(n.control is not None and n.control.stage is not None for n in world.nodes.values()) == 3
    assert max(world.holders().values()) == 2


def test_broken_streams_make_a_new_roster_and_lose_nobody():
    world = story(3)
    before, epoch, step = world.holders(), world.head().control.roster.epoch, world.step()
    a, b = (next(n.name for n in world.nodes.values() if n.control.stage == i) for i in (0, 1))
    world._stream_breaks(a, b, epoch)
    assert not world.everybody_runs()
    assert world.until(world.everybody_runs) < 5.0
    assert world.holders() == before
    assert world.head().control.roster.epoch == epoch + 1
    world.until(lambda: world.step() > step)


def test_a_trainer_that_hangs_is_restarted():
    world = story(2)
    victim = next(n for n in world.nodes.values() if n.control.stage == 1)
    trainer = victim.trainer
    world.wait(10.0)
    trainer.world = _Deaf(world, trainer)
    world.until(lambda: victim.trainer is not trainer, 60.0)
    assert world.history.counts["stalled"] == 1
    world.until(world.everybody_runs)


class _Deaf:
    """What a trainer that hangs does to the world: nothing, with work in hand."""

    def __init__(self, world, trainer):
        self._world, self._trainer, self._progress = world, trainer, trainer.progress
        world.after(1.0, self._tell)

    def _tell(self):
        world, trainer = self._world, self._trainer
        node = world.nodes[trainer.node]
        if node.trainer is trainer:
            a, step = trainer.assigned, trainer.participant.step
            status = local.StageStatus(a.crew, a.roster_epoch, a.stage, "active", step, self._progress, load=1)
            world.event(node.name, node.life, ev.TrainerStatus(status))
            world.after(1.0, self._tell)

    def __getattr__(self, name):
        if name in ("now", "rng", "history", "step_seconds", "fence_check"):
            return getattr(self._world, name)
        return lambda *arguments, **options: None


def test_statistics_say_who_holds_what():
    world = story(2, 1)
    world.wait(5.0)
    said = world.head().control.statistics()
    assert (said.state, said.stage, said.fenced, said.standing_seconds) == ("running", 0, False, 0.0)
    assert [slot.state for slot in said.slots] == ["active", "active"]
    assert said.slots[1].step >= 1
    assert set(said.notes) == set(ev.NOTES)
    witness = next(n for n in world.nodes.values() if n.control.stage is None)
    assert witness.control.statistics().stage is None
    assert witness.control.statistics().crew == said.crew
    assert (witness.control.statistics().state, witness.control.statistics().standing_seconds) == ("running", 0.0)  # as it hears
    world.kill_trainer(world.head().name, 30.0)
    world.wait(5.0)
    assert witness.control.statistics().state != "running"
    assert 3.0 < witness.control.statistics().standing_seconds < 6.0


def test_a_lease_that_is_over_is_over_before_any_event_says_so():
    world = story(3)
    node = world.head()
    now = world.now * node.rate + node.offset
    assert node.control.may_average
    assert node.control.within_lease(now)
    assert not node.control.within_lease(now + world.settings.lease_seconds / 2 + 1)


def test_members_of_a_crew_that_has_taken_steps_do_not_wait_for_each_other():
    world = story(3)
    control = world.head().control
    others = [name for name in world.nodes if world.nodes[name].control is not control]
    for number in range(5):
        control._patience.never_ran((f"s{number}",), 0.0)
    assert control._patience.waits("s0", 1.0)
    assert not any(control._patience.waits(name, 1.0) for name in others)
