"""Suspicion: quick where something broke, slow where it is only quiet, and never of everybody
because we were asleep."""

import math
import random

import pytest
from msgspec.structs import replace

from swarmnode.stages import crew
from swarmnode.stages.crew import LEAST, STALL_FLOOR_SECONDS, Progress, Signs, phi, slowness_at


def beating(signs, until, rng=None):
    now = signs.last_seen
    while now < until:
        now += 1.0 if rng is None else rng.uniform(0.8, 1.2)
        signs = signs.seen(now)
    return signs


def silent_until_overdue(signs):
    now = signs.last_seen
    while not signs.overdue(now, 1.0):
        now += 0.1
        assert now - signs.last_seen < 60
    return now - signs.last_seen


def test_phi_is_the_logarithm_of_the_tail():
    assert phi(1.0, 1.0, 1.0) == pytest.approx(math.log10(2))
    assert phi(1.0 + 5.612, 1.0, 1.0) == pytest.approx(8.0, abs=0.01)
    assert phi(1e6, 1.0, 1.0) == 300.0


@pytest.mark.parametrize("rng", [None, random.Random(1)])
def test_silence_is_suspected_after_six_or_seven_seconds_however_regular_the_beat_was(rng):
    assert 5.5 < silent_until_overdue(beating(Signs(0.0), 100.0, rng)) < 7.5


def test_one_that_was_never_heard_is_given_as_long():
    assert 5.5 < silent_until_overdue(Signs(0.0)) < 7.5


def test_one_of_which_bytes_come_is_alive_and_not_for_ever():
    signs = beating(Signs(0.0), 20.0)
    for second in range(21, 80):
        signs = signs.heard(float(second))
        assert not signs.overdue(second + 1.0, 1.0), second
    heard = signs.heard(200.0)
    assert heard.silent_seconds(200.0, 1.0) == pytest.approx(200.0 - 80.0)
    assert heard.overdue(200.0, 1.0)
    assert heard.mean == signs.mean, "how regular its heartbeats are is another matter"
    assert heard.heard(150.0) == heard


def test_what_came_before_a_connection_ended_does_not_bring_it_back():
    signs = replace(beating(Signs(0.0), 20.0), gone_since=20.0, suspected=True)
    assert signs.heard(19.5).gone_since == 20.0
    assert signs.heard(20.5).gone_since is None


def test_an_answer_right_after_a_heartbeat_is_no_interval_but_a_sign_of_life():
    signs = beating(Signs(0.0), 20.0)
    answered = replace(signs, suspected=True).seen(signs.last_seen + 0.05)
    assert (answered.count, answered.last_seen, answered.suspected) == (
        signs.count,
        signs.last_seen,
        False,
    )


def test_an_irregular_peer_is_given_longer():
    rng, signs, now = random.Random(2), Signs(0.0), 0.0
    for _ in range(100):
        now += rng.choice((0.5, 4.0))
        signs = signs.seen(now)
    assert silent_until_overdue(signs) > 10.0


def test_who_slept_does_not_suspect_the_others_before_hearing_them():
    # stopped for 40 seconds, and resumed
    signs, slowness, last, now = beating(Signs(0.0), 20.0), 1.0, 20.0, 60.0
    slowness = slowness_at(slowness, last, now, 0.5)
    assert not signs.overdue(now, slowness)
    assert signs.silent_seconds(now, slowness) < 1.0
    while not signs.overdue(now, slowness):  # and if nothing comes, it is gone after all
        last, now = now, now + 0.5
        slowness = slowness_at(slowness, last, now, 0.5)
    assert 62 < now < 66


def test_false_suspicions_are_as_rare_as_measured(monkeypatch):
    """A heartbeat a second with 0.2 % Pareto stalls: the floor of a second is what keeps them
    apart."""
    rng, suspected = random.Random(3), {}
    gaps = [
        1.0 + rng.gauss(0, 0.02) + (rng.paretovariate(1.1) if rng.random() < 0.002 else 0.0)
        for _ in range(20_000)
    ]
    for floor in (0.1, 1.0):
        monkeypatch.setattr(crew, "FLOOR_SECONDS", floor)
        signs, now, count = Signs(0.0), 0.0, 0
        for gap in gaps:
            count += signs.overdue(now + gap - 1e-6, 1.0)
            now += gap
            signs = signs.seen(now)
        suspected[floor] = count
    assert suspected[1.0] * 3 < suspected[0.1]


def test_no_progress_with_work_in_hand_is_a_failure():
    progress = Progress(4.0)
    now = 0.0
    for step in range(LEAST + 2):
        progress.report(step, step, 1, now)
        now += 6.0
    assert progress.slow_step_seconds == pytest.approx(6.0)
    last = now - 6.0
    assert not progress.stalled(last + 23.9)
    assert progress.stalled(last + 24.1)
    progress.report(step, step, 0, last + 24.2)  # idle is no failure
    assert not progress.stalled(last + 30.0)
    progress.restart()
    assert not progress.stalled(last + 1000.0)


def test_the_slow_step_is_the_second_longest_of_a_hundred():
    progress, now = Progress(4.0), 0.0
    for step, seconds in enumerate([0.0, *random.Random(1).sample(range(1, 101), 100)]):
        now += seconds
        progress.report(step, step, 1, now)
    assert progress.slow_step_seconds == pytest.approx(99.0)
    # two steps between reports: each took half of it, and the oldest step is forgotten
    progress.report(102, 102, 1, now + 1000.0)
    assert progress.slow_step_seconds >= 99.0


def test_short_steps_have_a_floor_and_unknown_ones_no_deadline():
    progress = Progress(4.0)
    progress.report(0, 0, 1, 0.0)
    assert not progress.stalled(1000.0)
    for step in range(1, 20):
        progress.report(step, step, 1, step * 0.1)
    assert not progress.stalled(1.9 + STALL_FLOOR_SECONDS - 0.1)
    assert progress.stalled(1.9 + STALL_FLOOR_SECONDS + 0.1)
