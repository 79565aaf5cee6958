"""Silence of members, measured by the clock of a process that may itself be slow."""

from swarmnode.stages.network.crew import OTHER_BYTES_SECONDS
from swarmnode.stages.network.crew_state import ClockTick, Phase
from tests.unit.crew.test_control import SETTINGS, running


def test_other_bytes_are_signs_of_life_for_a_minute():
    node = running()
    node.wait(OTHER_BYTES_SECONDS + SETTINGS.gone_seconds - 1, heard=["a"])
    assert node.state.phase == Phase.RUNNING
    node.wait(1.5, heard=["a"])
    assert node.state.crew is None


def test_process_that_slept_waits_for_its_peers_first():
    node = running()
    node.handle(ClockTick())
    node.now += 60.0
    node.handle(ClockTick())
    assert node.state.phase == Phase.RUNNING
    node.receive_heartbeats("a")
    node.wait(5.0, alive=["a"])
    assert node.state.phase == Phase.RUNNING


def test_process_that_slept_soon_detects_a_lost_member():
    node = running()
    node.handle(ClockTick())
    node.now += 60.0
    node.handle(ClockTick())
    woke = node.now
    while node.state.crew is not None:
        node.wait(0.5)
    assert node.now - woke < SETTINGS.gone_seconds


def test_slow_process_waits_longer_by_its_lag():
    node = running()
    for _ in range(9):  # ticks come every second instead of every half
        node.now += 2 * SETTINGS.tick_seconds
        node.handle(ClockTick())
    assert node.state.lag == 2.0
    assert node.state.phase == Phase.RUNNING, "nine seconds of silence"
    for _ in range(18):
        node.now += 2 * SETTINGS.tick_seconds
        node.handle(ClockTick())
    assert node.state.crew is None
