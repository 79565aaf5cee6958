"""Suspicion: quick where something broke, slow where it is only quiet, and never of everybody because we were asleep."""

import math
import random

import pytest

from swarmnode.crew.detector import LEAST_STEPS, STALL_FLOOR_SECONDS, Detector, Progress, phi


def beating(detector, until, peer="p", interval=1.0, rng=None):
    now = 0.0
    while now < until:
        now += interval if rng is None else interval * rng.uniform(0.8, 1.2)
        detector.heard(peer, now)
    return now


def silent_until_suspected(detector, now, peer="p"):
    start = now
    while not detector.suspects(peer):
        now += 0.1
        detector.newly_suspected(now)
        assert now - start < 60
    return now - start


def test_phi_is_the_logarithm_of_the_tail():
    assert phi(1.0, 1.0, 1.0) == pytest.approx(math.log10(2))
    assert phi(1.0 + 5.612, 1.0, 1.0) == pytest.approx(8.0, abs=0.01)
    assert phi(1e6, 1.0, 1.0) == 300.0


def test_silence_is_suspected_after_six_or_seven_seconds_however_regular_the_beat_was():
    for rng in (None, random.Random(1)):
        detector = Detector(1.0, 0.5)
        detector.watch(["p"], 0.0)
        now = beating(detector, 100.0, rng=rng)
        assert 5.5 < silent_until_suspected(detector, now) < 7.5


def test_one_that_was_never_heard_is_given_as_long():
    detector = Detector(1.0, 0.5)
    detector.watch(["p"], 0.0)
    assert 5.5 < silent_until_suspected(detector, 0.0) < 7.5


def test_an_answer_right_after_a_heartbeat_is_no_interval():
    detector = Detector(10.0, 0.5)
    detector.watch(["p"], 0.0)
    for beat in range(1, 20):
        detector.heard("p", 10.0 * beat)
        detector.heard("p", 10.0 * beat + 0.9)
    assert silent_until_suspected(detector, 190.0) == pytest.approx(20.0, abs=0.2)  # not before two heartbeats are missing
    assert detector.phi("p", 205.0) == pytest.approx(phi(15.0, 10.0, 1.0), rel=1e-3)


def test_an_irregular_peer_is_given_longer():
    detector = Detector(1.0, 0.5)
    detector.watch(["p"], 0.0)
    now = 0.0
    for i in range(60):
        now += 8.0 if i % 6 == 0 else 1.0
        detector.heard("p", now)
    assert silent_until_suspected(detector, now) > 12


def test_what_broke_is_suspected_at_once_and_a_sign_of_life_refutes_it():
    detector = Detector(1.0, 0.5)
    detector.watch(["p", "q"], 0.0)
    assert detector.broke("p")
    assert not detector.broke("p")
    assert detector.suspects("p")
    assert not detector.suspects("q")
    assert detector.heard("p", 1.2)
    assert not detector.suspects("p")
    assert (detector.statistics().suspected, detector.statistics().refuted) == (1, 1)
    assert not detector.broke("stranger")
    assert not detector.heard("stranger", 2.0)
    assert detector.silent_seconds("stranger", 9.0) == 0.0


def test_who_slept_does_not_suspect_the_others_before_hearing_them():
    detector = Detector(1.0, 0.5)
    detector.watch(["p"], 0.0)
    now = 0.0
    while now < 20:
        now += 0.5
        detector.tick(now)
        detector.heard("p", now)
    now += 40.0  # stopped, and resumed
    detector.tick(now)
    assert detector.newly_suspected(now) == []
    assert detector.silent_seconds("p", now) < 1.0
    while not detector.suspects("p"):  # and if nothing comes, it is gone after all
        now += 0.5
        detector.tick(now)
        detector.newly_suspected(now)
    assert 65 > now > 62


def test_false_suspicions_are_as_rare_as_measured():
    """A heartbeat a second with 0.02 % Pareto stalls, ten node-days in small: the floor of a second is what keeps them apart."""
    rng, suspected = random.Random(3), {}
    gaps = [1.0 + rng.gauss(0, 0.02) + (rng.paretovariate(1.1) if rng.random() < 0.002 else 0.0) for _ in range(20_000)]
    for floor in (0.1, 1.0):
        detector = Detector(1.0, 0.5, floor_seconds=floor)
        detector.watch(["p"], 0.0)
        now = 0.0
        for gap in gaps:
            detector.newly_suspected(now + gap - 1e-6)
            now += gap
            detector.heard("p", now)
        suspected[floor] = detector.statistics().suspected
        assert detector.statistics().refuted == suspected[floor]
    assert suspected[1.0] * 3 < suspected[0.1]


def test_no_progress_with_work_in_hand_is_a_failure():
    progress = Progress(4.0)
    now = 0.0
    for step in range(LEAST_STEPS + 2):
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
    progress.report(102, 102, 1, now + 1000.0)  # two steps between reports: each took half of it, and the oldest step is forgotten
    assert progress.slow_step_seconds >= 99.0


def test_short_steps_have_a_floor_and_unknown_ones_no_deadline():
    progress = Progress(4.0)
    progress.report(0, 0, 1, 0.0)
    assert not progress.stalled(1000.0)
    for step in range(1, 20):
        progress.report(step, step, 1, step * 0.1)
    assert not progress.stalled(1.9 + STALL_FLOOR_SECONDS - 0.1)
    assert progress.stalled(1.9 + STALL_FLOOR_SECONDS + 0.1)
