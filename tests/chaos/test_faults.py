"""The parts of a fault schedule: the cable, the order of the faults, and the detection of
problems."""

import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.support.cable import Cable
from tests.support.chaos import nodes, schedule
from tests.support.chaos.faults import FAULTS


@pytest.fixture
def echo():
    """Yield the port of an echo server on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(conversation):
            with conversation:
                try:
                    while data := conversation.recv(65536):
                        conversation.sendall(data)
                except OSError:
                    pass

        def accept():
            while True:
                try:
                    conversation, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(conversation,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cable(echo):
    cable = Cable(echo)
    yield cable
    cable.close()


def call(cable):
    return socket.create_connection(("127.0.0.1", cable.port), timeout=60)


def exactly(conversation, size):
    data = b""
    while len(data) < size:
        data += conversation.recv(size - len(data))
    return data


def ended(conversation):
    try:
        return conversation.recv(1) == b""
    except ConnectionError:
        return True


def test_cable_carries_bytes_both_ways(cable):
    data = bytes(range(256)) * 2000
    with call(cable) as conversation:
        sender = threading.Thread(target=conversation.sendall, args=(data,))
        sender.start()
        assert exactly(conversation, len(data)) == data
        sender.join()
    for how in (lambda: cable.slow(0.05, 1e6), cable.repair):
        how()
        with call(cable) as conversation:
            conversation.sendall(b"hello")
            assert exactly(conversation, 5) == b"hello"


def test_cut_cable_resets_old_and_new_connections(cable):
    with call(cable) as conversation:
        conversation.sendall(b"x")
        assert exactly(conversation, 1) == b"x"
        cable.cut()
        with pytest.raises(ConnectionResetError):
            conversation.recv(1)
    with call(cable) as later:
        assert ended(later)


def test_held_cable_delivers_after_repair(cable):
    with call(cable) as conversation:
        conversation.sendall(b"x")
        assert exactly(conversation, 1) == b"x"
        cable.hold()
        conversation.sendall(b"held")
        conversation.settimeout(0.1)
        with pytest.raises(TimeoutError):
            conversation.recv(1)
        conversation.settimeout(60)
        cable.repair()
        assert exactly(conversation, 4) == b"held"


def test_garbled_cable_flips_one_bit(cable):
    with call(cable) as conversation:
        conversation.sendall(b"x")
        assert exactly(conversation, 1) == b"x"
        assert cable.garble() == 1
        conversation.sendall(b"aa")
        assert exactly(conversation, 2) == b"a`"
        conversation.sendall(b"aa")
        assert exactly(conversation, 2) == b"aa"


def test_seed_orders_every_possible_fault():
    long = schedule.drawn(7, True, True)
    assert sorted(fault.name for fault in long) == sorted(fault.name for fault in FAULTS)
    assert long == schedule.drawn(7, True, True)
    assert long != schedule.drawn(8, True, True)
    assert not any(fault.needs_mount for fault in schedule.drawn(7, True, False))
    assert not any(fault.long for fault in schedule.drawn(7, False, True))


def at(**fields):
    return schedule.NodeReport(
        **{
            "step": 9,
            "saved": 9,
            "used": 5,
            "connected": 1,
            "works": True,
            "restarts": {},
            **fields,
        }
    )


def test_node_is_whole_after_progress_and_a_save():
    before = at(step=8, used=4)
    assert schedule.is_whole(at(), before, 1)
    for worse in (
        {"step": 8},
        {"used": 4},
        {"saved": 7},
        {"connected": 0},
        {"connected": 2},
        {"works": False},
    ):
        assert not schedule.is_whole(at(**worse), before, 1), worse
    assert not schedule.is_whole(None, before, 1)


def test_unexplained_error_is_a_problem():
    lines = [
        {"level": "info", "event": "step"},
        {"level": "error", "event": "state not saved: No space left on device"},
        {"level": "warning", "event": "odd", "exception": "Traceback"},
        {"level": "error", "event": "Traceback (most recent call last):"},
    ]
    assert len(schedule.errors(lines, ())) == 3
    assert [line for line in schedule.errors(lines, ("not saved",)) if "not saved" in line] == []
    assert len(schedule.errors(lines, ("not saved",))) == 2


def test_process_hooks_set_the_clock_and_count_tasks(tmp_path):
    (tmp_path / "skew").write_text("3600")
    environment = {
        "PYTHONPATH": str(nodes.INSIDE),
        "SKEW_FILE": str(tmp_path / "skew"),
        "TASKS_DIR": str(tmp_path),
    }
    program = (
        "import time, trio, os; trio.run(trio.sleep, 0.01); print(os.getpid(), time.time(),"
        " time.time_ns())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    pid, seconds, nanoseconds = printed.split()
    assert 3590 < float(seconds) - time.time() < 3660
    assert 3590 < int(nanoseconds) / 1e9 - time.time() < 3660
    assert int((tmp_path / pid).read_text()) >= 1
