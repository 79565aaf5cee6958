"""Failure detection: silence of members by our own slow clock, and a trainer that hangs."""

import pytest

from swarmnode.stages import wire
from swarmnode.stages.crew import OTHER_BYTES_SECONDS, Phase
from swarmnode.stages.service import HANG_FACTOR, HANG_SECONDS, MIN_STEP_DURATIONS, HangDetector
from tests.unit.crew.test_control import SETTINGS, running


def test_other_bytes_are_signs_of_life_for_a_minute():
    node = running()
    node.waits(OTHER_BYTES_SECONDS + SETTINGS.suspect_seconds - 1, heard=["a"])
    assert node.state.phase == Phase.RUNNING
    node.waits(1.5, heard=["a"])
    assert node.state.phase == Phase.PAUSED


def test_process_that_slept_suspects_nobody_at_once():
    node = running()
    node.does(wire.ClockTick())
    node.now += 60.0
    node.does(wire.ClockTick())
    assert node.state.phase == Phase.RUNNING
    node.beats("a")
    node.waits(5.0, alive=["a"])
    assert node.state.phase == Phase.RUNNING
    assert not node.notes("suspected")


def test_process_that_slept_finds_out_soon_who_is_gone():
    node = running()
    node.does(wire.ClockTick())
    node.now += 60.0
    node.does(wire.ClockTick())
    woke = node.now
    while node.state.crew is not None:
        node.waits(0.5)
    assert node.now - woke < SETTINGS.suspect_seconds


def test_slow_process_waits_longer_by_its_lag():
    node = running()
    for _ in range(9):  # ticks come every second instead of every half
        node.now += 2 * SETTINGS.tick_seconds
        node.does(wire.ClockTick())
    assert node.state.lag == 2.0
    assert node.state.phase == Phase.RUNNING, "nine seconds of silence"
    for _ in range(4):
        node.now += 2 * SETTINGS.tick_seconds
        node.does(wire.ClockTick())
    assert node.state.phase == Phase.PAUSED


def stepping(seconds, steps=MIN_STEP_DURATIONS + 1):
    progress = HangDetector()
    for step in range(steps):
        progress.report(step, step, 1, step * seconds)
    return progress, (steps - 1) * seconds


def test_trainer_without_progress_and_with_work_in_hand_hangs():
    progress, last = stepping(6.0)
    assert not progress.stalled(last + HANG_FACTOR * 6.0 - 0.1)
    assert progress.stalled(last + HANG_FACTOR * 6.0 + 0.1)
    progress.report(MIN_STEP_DURATIONS, MIN_STEP_DURATIONS, 0, last + 30.0)
    assert not progress.stalled(last + 31.0), "it has no work"
    progress.restart()
    assert not progress.stalled(last + 1000.0)


def test_short_steps_have_a_floor_and_unknown_steps_no_deadline():
    progress, last = stepping(0.1)
    assert not progress.stalled(last + HANG_SECONDS - 0.1)
    assert progress.stalled(last + HANG_SECONDS + 0.1)
    progress, last = stepping(0.1, steps=2)
    assert not progress.stalled(last + 1000.0)


@pytest.mark.parametrize("steps", [1, 4])
def test_steps_between_two_reports_share_their_time(steps):
    progress = HangDetector()
    for number in range(MIN_STEP_DURATIONS + 1):
        progress.report(number * steps, number, 1, number * 20.0)
    last = MIN_STEP_DURATIONS * 20.0
    assert progress.stalled(last + HANG_FACTOR * 20.0 / steps + HANG_SECONDS)
    assert not progress.stalled(last + max(HANG_SECONDS, HANG_FACTOR * 20.0 / steps) - 0.1)
