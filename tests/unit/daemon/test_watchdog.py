"""Decisions of the watchdog with injected time."""

import random

import pytest

from swarmnode.daemon.watchdog import DEFECT, EndNode, Restart, Watchdog
from swarmnode.process import RESTART_CODE


@pytest.fixture
def watchdog(monkeypatch):
    monkeypatch.setattr("swarmnode.daemon.watchdog.CRASH_LIMIT", 3)
    monkeypatch.setattr("swarmnode.daemon.watchdog.STALL_FLOOR_SECONDS", 10)
    monkeypatch.setattr("swarmnode.daemon.watchdog.STARTUP_SECONDS", 100)
    dog = Watchdog("trainer", random.Random(0))
    dog.started(0.0)
    return dog


def test_deadline_is_startup_floor_or_four_times_p99(watchdog):
    assert watchdog.deadline() == 100
    watchdog.progressed(5.0, None, "loading model")
    assert watchdog.deadline() == 105
    watchdog.progressed(6.0, None, "generating")
    assert watchdog.deadline() == 16
    for _ in range(100):
        watchdog.progressed(7.0, 5.0, "training")
    assert watchdog.deadline() == 7 + 20
    watchdog.progressed(8.0, float("nan"), "training")
    assert watchdog.deadline() == 8 + 20


def test_reloading_process_gets_the_startup_deadline(watchdog):
    watchdog.progressed(5.0, None, "loading model")
    watchdog.progressed(6.0, 1.0, "training")
    watchdog.exited(7.0, -9)
    watchdog.started(8.0)
    assert watchdog.deadline() == 108
    watchdog.progressed(9.0, None, "loading model")
    assert watchdog.deadline() == 109
    assert not watchdog.past_loading
    watchdog.progressed(60.0, None, "training")
    assert (watchdog.past_loading, watchdog.restarts) == (True, 1)
    assert watchdog.deadline() == 70
    watchdog.progressed(61.0, None, "loading a stage")
    assert watchdog.deadline() == 71


def test_backoff_grows_until_the_node_ends(watchdog):
    watchdog.progressed(1.0, 1.0, "training")
    first = watchdog.exited(2.0, -9)
    assert isinstance(first, Restart)
    assert 0.25 <= first.after_seconds <= 0.5
    watchdog.started(3.0)
    second = watchdog.exited(4.0, 1)
    assert isinstance(second, Restart)
    assert 0.5 <= second.after_seconds <= 1
    watchdog.started(6.0)
    verdict = watchdog.exited(7.0, 1)
    assert verdict == EndNode(75, "trainer ended 3 times within 300 s")


def test_crashes_outside_the_window_do_not_count(watchdog):
    for at in (0.0, 301.0, 602.0, 903.0):
        watchdog.started(at)
        assert isinstance(watchdog.exited(at + 0.5, -9), Restart)


@pytest.mark.parametrize(
    ("code", "ran", "ends"),
    [(78, True, True), (77, True, True), (69, False, True), (69, True, False), (75, False, True)],
)
def test_exit_codes_that_end_the_node(watchdog, code, ran, ends):
    watchdog.progressed(1.0, None, "training" if ran else "loading policy")
    verdict = watchdog.exited(2.0, code)
    assert isinstance(verdict, EndNode) == ends
    if ends:
        assert verdict.exit_code == code


def test_wish_to_be_restarted_is_no_crash(watchdog):
    for at in range(0, 40, 2):
        watchdog.started(at)
        watchdog.progressed(at + 1.0, 1.0, "training")
        assert watchdog.exited(at + 1.5, RESTART_CODE) == Restart(0.0)
    assert watchdog.restarts == 20


def test_wish_of_a_process_that_never_worked_counts_as_a_crash(watchdog):
    verdicts = []
    for at in (0.0, 10.0, 20.0):
        watchdog.started(at)
        verdicts.append(watchdog.exited(at + 1.0, RESTART_CODE))
    assert verdicts[1].after_seconds > 0
    assert isinstance(verdicts[2], EndNode)


ERROR = "crashed error=RuntimeError: The size of tensor a (131) must match 128 at 0x7f12ab"


def crashes(dog, causes, code=1, step_seconds=None, apart=1000.0):
    """Return the decisions for consecutive crashes, far enough apart for the breaker."""
    verdicts = []
    for number, cause in enumerate(causes):
        dog.started(number * apart)
        dog.progressed(number * apart + 1.0, step_seconds, "training")
        verdicts.append(dog.exited((number + 1) * apart - 1.0, code, cause))
    return verdicts


def test_the_same_exception_three_times_ends_the_node(watchdog):
    other = ERROR.replace("131", "140").replace("0x7f12ab", "0x7f9900")
    *restarts, end = crashes(watchdog, [ERROR, other, ERROR])
    assert all(isinstance(verdict, Restart) for verdict in restarts)
    assert isinstance(end, EndNode)
    assert end.exit_code == DEFECT


@pytest.mark.parametrize(
    ("causes", "code", "step_seconds"),
    [
        ([ERROR, "crashed error=KeyError: 'x'", ERROR, "another"], 1, None),
        (["", "", "", ""], 1, None),
        ([ERROR] * 4, -9, None),
        ([ERROR] * 4, 75, None),
        ([ERROR] * 4, 1, 2.0),
    ],
    ids=["different", "unknown", "killed", "device", "steps for minutes in between"],
)
def test_other_crashes_are_restarted(watchdog, causes, code, step_seconds):
    verdicts = crashes(watchdog, causes, code, step_seconds)
    assert all(isinstance(verdict, Restart) for verdict in verdicts)


def test_local_error_keeps_its_exit_code(watchdog):
    assert crashes(watchdog, ["policy.model 'x' cannot be trained"] * 3, 69)[-1] == EndNode(
        69, "trainer ended 3 times by the same error"
    )
