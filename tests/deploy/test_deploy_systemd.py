"""The unit as systemd reads it, and its exit codes and timeouts compared with the code."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode.cli import app
from swarmnode.daemon.supervisor import NOTIFY_SECONDS, OVERDUE_SECONDS
from swarmnode.daemon.watchdog import DRAIN_SECONDS, FINAL_CODES
from swarmnode.observe.systemd import EXTEND_SECONDS

DIRECTORY = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT = DIRECTORY / "swarmnode.service"
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
EXPOSURE = 2.4
"""Score of `systemd-analyze security`; 10 means no hardening. The rest is network, user namespaces
and devices."""


def section(name):
    """Return the last value of each key of a section."""
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(UNIT)
    return dict(parser[name])


@pytest.fixture
def installed(tmp_path):
    """Return the unit and its drop-ins with an existing program. systemd rejects a missing one."""
    for path in DIRECTORY.iterdir():
        drop_in = "swarmnode.service.d" if path.suffix == ".conf" else ""
        inside = tmp_path / drop_in / path.name
        inside.parent.mkdir(exist_ok=True)
        inside.write_text(path.read_text().replace("/opt/swarmnode/bin/swarmnode", sys.executable))
    return tmp_path / UNIT.name


@needs_systemd
def test_systemd_accepts_the_unit(installed):
    """Unknown keys leave the exit code at 0, so any output on stderr fails."""
    command = [ANALYZE, "verify", "--man=no", installed]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "")


@needs_systemd
def test_unit_is_sandboxed(installed):
    command = [
        ANALYZE,
        "security",
        "--offline=true",
        f"--threshold={int(EXPOSURE * 10)}",
        installed,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    exposure = re.search(r"exposure level for swarmnode.service: ([\d.]+)", result.stdout)
    assert exposure is not None, result.stderr
    assert float(exposure[1]) <= EXPOSURE
    assert result.returncode == 0


def test_permanent_failures_are_not_restarted():
    codes = section("Service")["RestartPreventExitStatus"].split()
    assert set(map(int, codes)) == FINAL_CODES


def test_finished_node_is_not_restarted():
    """It ends with 0 (tests/swarm/test_node.py), which systemd counts as success by default."""
    service = section("Service")
    assert service["Restart"] == "on-failure"
    assert not {"RestartForceExitStatus", "SuccessExitStatus"} & service.keys()


def test_systemd_timeouts_exceed_the_supervisor_timeouts():
    service = section("Service")
    assert int(service["WatchdogSec"]) > OVERDUE_SECONDS + 10 * NOTIFY_SECONDS
    assert int(service["TimeoutStopSec"]) > DRAIN_SECONDS + EXTEND_SECONDS / 3
    assert int(service["TimeoutStartSec"]) > EXTEND_SECONDS


def test_supervisor_survives_failures_of_its_children():
    service = section("Service")
    assert service["Type"] == "notify"
    # the supervisor restarts a trainer that the kernel kills
    assert service["OOMPolicy"] == "continue"
    # only the supervisor gets the first SIGTERM, which drains
    assert service["KillMode"] == "mixed"


def test_the_commands_exist():
    text = UNIT.read_text() + (DIRECTORY / "bootstrap.conf").read_text()
    programs = re.findall(r"^ExecStart=\S+ (\S+)$", text, re.MULTILINE)
    assert set(programs) == {"run", "bootstrap"}
    assert all(app[name] is not None for name in programs)
