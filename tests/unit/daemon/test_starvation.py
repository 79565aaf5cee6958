"""Starvation of real processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from swarmnode.daemon.starvation import Starvation, processor_waits, waits_for_disk

READY = "import time; print(end='x', flush=True); end = time.monotonic() + 120\n"
"""The program ends by itself if the test run is killed."""
SPIN = READY + "while time.monotonic() < end: pass"
SLEEP = READY + "time.sleep(120)"
THREAD = (
    "import threading, time; threading.Thread(target=exec, args=('while True: pass',),"
    " daemon=True).start()\n" + SLEEP
)
VFORK = READY + "import ctypes; libc = ctypes.CDLL(None)\nif libc.vfork() == 0: libc.sleep(120)"
GONE = 2**22 + 1
"""An unused process id: Linux ends at 2**22."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it")


@pytest.fixture
def on_one_processor():
    """Start Python programs that share one processor."""
    children = []
    processor = {min(os.sched_getaffinity(0))}

    def start(code):
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        assert child.stdout.read(1) == b"x"
        os.sched_setaffinity(child.pid, processor)
        children.append(child)
        return child.pid

    yield start
    for child in children:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("code", [SPIN, THREAD])
def test_processor_wait_of_any_thread_counts(on_one_processor, code):
    starvation = Starvation(on_one_processor(code), 0.0)
    on_one_processor(SPIN)
    until(lambda: starvation.since("first", 0.0) > 1.0)
    assert starvation.since("second", 0.0) < 0.5, (
        "what was waited before the last look counts no more"
    )
    until(lambda: starvation.since("second", 0.0) > 1.0)


def test_sleeping_process_is_not_starved(on_one_processor):
    hung, busy = Starvation(on_one_processor(SLEEP), 0.0), Starvation(on_one_processor(SPIN), 0.0)
    on_one_processor(SPIN)
    until(lambda: busy.since(1, 0.0) > 1.0)
    assert hung.since(1, 0.0) < 0.5


def test_missed_measurements_count_as_starvation():
    starvation = Starvation(GONE, 0.0)
    assert [starvation.due(at) for at in (0.25, 0.75, 1.0)] == [False, False, True]
    assert [starvation.since(None, at) for at in (1.0, 2.25, 4.0, 40.0, 41.0)] == [
        0.0,
        0.0,
        0.0,
        36.0,
        36.0,
    ]
    assert starvation.since("progress", 42.0) == 0.0


def test_who_waits_for_a_disk_cannot_help_it(monkeypatch):
    starvation = Starvation(GONE, 0.0)
    monkeypatch.setattr("swarmnode.daemon.starvation.waits_for_disk", lambda pid: True)
    assert [starvation.since(None, at) for at in (1.0, 2.0, 3.0)] == [1.0, 2.0, 3.0]
    monkeypatch.undo()
    assert starvation.since(None, 4.0) == 3.0


def test_disk_wait_is_detected(on_one_processor):
    """A parent waits in state D after vfork until its child starts, which needs no broken disk."""
    pid = on_one_processor(SLEEP)
    assert not waits_for_disk(pid)
    forked = on_one_processor(VFORK)
    until(lambda: waits_for_disk(forked))


def test_a_process_that_is_gone_has_waited_for_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert processor_waits(child.pid) == {}
    assert not waits_for_disk(child.pid)
