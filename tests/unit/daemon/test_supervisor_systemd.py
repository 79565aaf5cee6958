"""What systemd is told, read from a socket as systemd would."""

import os
import signal
import socket
import textwrap

import pytest
import trio

from swarmnode import settings
from swarmnode.config import Config
from swarmnode.daemon import supervisor as module
from swarmnode.daemon.supervisor import Supervisor
from swarmnode.observe.systemd import Notifier


class Manager:
    """Systemd's end of the socket."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.socket.setblocking(False)

    def heard(self):
        lines = []
        while True:
            try:
                lines += self.socket.recv(4096).decode().split("\n")
            except BlockingIOError:
                return lines


@pytest.fixture
def manager(tmp_path):
    found = Manager(str(tmp_path / "notify"))
    yield found
    found.socket.close()


@pytest.fixture
def notifier(tmp_path, manager):
    made = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "60000000"})
    yield made
    made._socket.close()


def test_ready_once_and_not_before_every_process_is_past_loading(notifier, manager):
    notifier.beat({"network": "serving", "trainer": "loading torch"}, well=True)
    assert manager.heard() == [
        "STATUS=network: serving, trainer: loading torch",
        "EXTEND_TIMEOUT_USEC=30000000",
        "WATCHDOG=1",
    ]
    notifier.beat({"network": "serving", "trainer": "training"}, well=True)
    assert manager.heard() == [
        "STATUS=network: serving, trainer: training",
        "READY=1",
        "WATCHDOG=1",
    ]
    notifier.beat({"network": "serving", "trainer": "training"}, well=True)
    assert manager.heard() == ["WATCHDOG=1"]


def test_a_node_without_trainer_is_ready_when_its_network_serves(notifier, manager):
    notifier.beat({"network": "serving"}, well=True)
    assert "READY=1" in manager.heard()


def test_a_restart_after_ready_neither_repeats_it_nor_asks_for_time(notifier, manager):
    notifier.beat({"trainer": "training"}, well=True)
    manager.heard()
    notifier.beat({"trainer": "down"}, well=True)
    notifier.beat({"trainer": "loading"}, well=True)
    notifier.beat({"trainer": "training"}, well=True)
    heard = manager.heard()
    assert "READY=1" not in heard
    assert not any(line.startswith("EXTEND") for line in heard)


def test_a_hang_is_neither_fed_nor_extended(notifier, manager):
    notifier.beat({"trainer": "loading"}, well=False)
    assert manager.heard() == ["STATUS=trainer: loading"]


def test_the_drain_asks_for_its_time(notifier, manager):
    notifier.stopping(20.0)
    assert manager.heard() == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=50000000"]


def test_without_systemd_or_with_one_that_went_away_nothing_happens(tmp_path, notifier, manager):
    Notifier({}).beat({"trainer": "training"}, well=True)
    manager.socket.close()
    (tmp_path / "notify").unlink()
    notifier.beat({"trainer": "training"}, well=True)


def test_what_there_was_no_room_for_is_said_again(notifier, manager):
    while notifier._send("WATCHDOG=1"):
        pass  # nobody reads: the socket holds a handful
    notifier.beat({"network": "serving"}, well=True)
    manager.heard()
    notifier.beat({"network": "serving"}, well=True)
    assert manager.heard() == ["STATUS=network: serving", "READY=1", "WATCHDOG=1"]


def test_children_inherit_nothing_of_it():
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "7", "PATH": "/bin"}
    Notifier(environment)._socket.close()
    assert environment == {"PATH": "/bin"}


def test_an_abstract_socket_is_reached():
    name = f"\0swarmnode-test-{os.getpid()}"
    manager = Manager(name)
    notifier = Notifier({"NOTIFY_SOCKET": "@" + name[1:]})
    notifier.beat({"network": "serving"}, well=True)
    assert "READY=1" in manager.heard()
    manager.socket.close()
    notifier._socket.close()


async def test_the_supervisor_reports_start_life_and_end(tmp_path, manager, monkeypatch):
    child = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {os.path.dirname(os.path.dirname(module.__file__))!r})
        from swarmnode.process import Progress, die_with_parent
        die_with_parent()
        progress = Progress()
        while True:
            progress("training", 0.01)
            time.sleep(0.02)
    """)
    (tmp_path / "notified_child.py").write_text(child)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setattr(module, "NOTIFY_SECONDS", 0.02)
    config = Config.model_validate({"node": {"data_dir": tmp_path / "data"}})
    supervisor = Supervisor(
        config.node.data_dir,
        config.model_dump_json,
        {"network": "notified_child"},
    )
    heard = []
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            while heard.count("WATCHDOG=1") < 3 or "READY=1" not in heard:
                heard += manager.heard()
                await trio.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)
    heard += manager.heard()
    assert heard.index("READY=1") < heard.index("STOPPING=1")
    assert "NOTIFY_SOCKET" not in os.environ


def test_the_state_directory_of_a_unit_is_the_default_data_directory(tmp_path):
    environment = {"STATE_DIRECTORY": "/var/lib/swarmnode:/var/lib/other"}
    resolved = settings.load(None, environment)
    assert str(resolved.config.node.data_dir) == "/var/lib/swarmnode"
    assert resolved.origins["node.data_dir"] == "systemd STATE_DIRECTORY"
    assert (
        str(settings.load(None, environment, ["node.data_dir=/elsewhere"]).config.node.data_dir)
        == "/elsewhere"
    )
