"""Messages to systemd, read from a socket like systemd's."""

import os
import signal
import socket

import pytest
import trio

from swarmnode import settings
from swarmnode.config import Config
from swarmnode.daemon import supervisor as module
from swarmnode.daemon.supervisor import Supervisor
from swarmnode.observe.systemd import Notifier
from tests.unit.daemon.test_supervisor import CHILD, FOREVER


class Manager:
    """Systemd's end of the socket."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.socket.setblocking(False)

    def received(self):
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


def test_ready_is_sent_once_after_loading(notifier, manager):
    notifier.beat({"network": "serving", "trainer": "loading torch"}, healthy=True)
    assert manager.received() == [
        "STATUS=network: serving, trainer: loading torch",
        "EXTEND_TIMEOUT_USEC=30000000",
        "WATCHDOG=1",
    ]
    notifier.beat({"network": "serving", "trainer": "training"}, healthy=True)
    assert manager.received() == [
        "STATUS=network: serving, trainer: training",
        "READY=1",
        "WATCHDOG=1",
    ]
    notifier.beat({"network": "serving", "trainer": "training"}, healthy=True)
    assert manager.received() == ["WATCHDOG=1"]
    for phase in ("down", "loading", "training"):
        notifier.beat({"network": "serving", "trainer": phase}, healthy=True)
    received = manager.received()
    assert not any(line.startswith(("READY", "EXTEND")) for line in received), "a restart"


def test_hanging_process_sends_no_watchdog_beat(notifier, manager):
    notifier.beat({"trainer": "loading"}, healthy=False)
    assert manager.received() == ["STATUS=trainer: loading"]


def test_drain_extends_the_stop_timeout(notifier, manager):
    notifier.stopping(20.0)
    assert manager.received() == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=50000000"]


def test_sends_nothing_without_systemd(tmp_path, notifier, manager):
    Notifier({}).beat({"trainer": "training"}, healthy=True)
    manager.socket.close()
    (tmp_path / "notify").unlink()
    notifier.beat({"trainer": "training"}, healthy=True)


def test_children_do_not_inherit_notify_socket():
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "7", "PATH": "/bin"}
    Notifier(environment)._socket.close()
    assert environment == {"PATH": "/bin"}


async def test_the_supervisor_reports_start_life_and_end(tmp_path, manager, monkeypatch):
    root = os.path.dirname(os.path.dirname(module.__file__))
    child = CHILD.format(path=root, name="network", marks=str(tmp_path), body=FOREVER)
    (tmp_path / "notified_child.py").write_text(child)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setattr(module, "NOTIFY_SECONDS", 0.02)
    config = Config.model_validate({"node": {"data_dir": tmp_path / "data"}})
    supervisor = Supervisor(
        config.node.data_dir, config.model_dump_json, {"network": "notified_child"}
    )
    received = []
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            while received.count("WATCHDOG=1") < 3 or "READY=1" not in received:
                received += manager.received()
                await trio.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)
    received += manager.received()
    assert received.index("READY=1") < received.index("STOPPING=1")
    assert "NOTIFY_SOCKET" not in os.environ


def test_state_directory_is_the_default_data_directory(tmp_path):
    environment = {"STATE_DIRECTORY": "/var/lib/swarmnode:/var/lib/other"}
    resolved = settings.load(None, environment)
    assert str(resolved.config.node.data_dir) == "/var/lib/swarmnode"
    assert resolved.origins["node.data_dir"] == "systemd STATE_DIRECTORY"
    other = settings.load(None, environment, ["node.data_dir=/elsewhere"]).config
    assert str(other.node.data_dir) == "/elsewhere"
