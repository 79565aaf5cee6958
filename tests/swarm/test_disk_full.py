"""A real node whose data directory has no byte left: it trains on, says that it does not save, restarts what dies, and loses nothing."""

import json
import signal
import socket
import time
import urllib.request

import psutil
import pytest

from swarmnode.demo.nodes import DemoNode
from tests.support.small_disk import fill, mounted, needs_mount

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(900), needs_mount]

SETTINGS = {
    "swarm": {"name": "full"},
    "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
    "policy": {"threads": 1},
    "training": {"step_interval": 0.2, "eval_every": 1000, "groups_per_step": 2, "save_every": 0.0},
    "task": {"names": ["builtin/copy"]},
    "weights": {"join_seconds": 1.0},
}


def command_of(process):
    """Its arguments; none for one that has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "disk", "12m") as directory:
        yield directory


def until(condition, what, seconds=240.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what()}")


def test_with_a_full_disk_training_goes_on_and_nothing_is_lost(small_disk, tmp_path):
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    node = DemoNode("full", small_disk / "data", {**SETTINGS, "http": {"port": port}})
    node.directory = tmp_path  # its log goes elsewhere, its data directory is on the small disk
    data = small_disk / "data"

    def report():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status?points=1", timeout=5) as answer:
                return json.load(answer)["snapshot"]["trainer"]["report"]
        except OSError:
            return None

    def log():
        return (tmp_path / "node.log").read_text(errors="replace")

    def reached(field, least):
        return lambda: (now := report()) and now[field] >= least and now

    try:
        node.start([])
        until(reached("state_saved_step", 3), lambda: log()[-1500:])
        kept = {name: (data / name).read_bytes() for name in ("identity.key", "port")}
        fill(small_disk)
        full = until(lambda: "state not saved" in log() and report(), lambda: log()[-1500:])
        until(reached("step", full["step"] + 10), lambda: log()[-1500:])
        now = until(report, lambda: log()[-1500:])
        saved = now["state_saved_step"]
        assert now["step"] - saved >= 10

        for module in ("swarmnode.trainer", "swarmnode.daemon.node"):  # both die and come back without a byte to write
            family = psutil.Process(node.pid).children()
            next(child for child in family if module in command_of(child)).send_signal(signal.SIGKILL)
        until(lambda: log().count("restarting") >= 2 and '"restored"' in log(), lambda: log()[-1500:])
        back = until(reached("step", saved + 1), lambda: log()[-3000:])
        assert back["state_saved_step"] <= saved
        assert {name: (data / name).read_bytes() for name in kept} == kept

        (small_disk / "filler").unlink()
        until(reached("state_saved_step", back["step"]), lambda: log()[-1500:])
    finally:
        node.stop()
        node.wait(120)
    assert node.exit_code() == 0
    assert {name: (data / name).read_bytes() for name in kept} == kept
    assert (data / "peers.json").stat().st_size > 0
