"""The unit as systemd itself reads it, and what it promises about exit codes and time-outs against
the code."""

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
"""What `systemd-analyze security` gives it; 10 is no hardening at all. Network, user namespaces and
devices are the rest."""


class Ordered(dict):
    """configparser keeps the last of equal keys; systemd reads all of them."""

    def __setitem__(self, key, value):
        if isinstance(value, list) and key in self:
            self[key].extend(value)
        else:
            super().__setitem__(key, value)


def section(name):
    parser = configparser.RawConfigParser(dict_type=Ordered, strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(UNIT)
    return dict(parser[name])


@pytest.fixture
def installed(tmp_path):
    """The unit and its drop-ins with a program that exists on this machine: what is not there is an
    error to systemd."""
    for path in DIRECTORY.iterdir():
        inside = (
            tmp_path / "swarmnode.service.d" / path.name
            if path.suffix == ".conf"
            else tmp_path / path.name
        )
        inside.parent.mkdir(exist_ok=True)
        inside.write_text(path.read_text().replace("/opt/swarmnode/bin/swarmnode", sys.executable))
    return tmp_path / UNIT.name


@needs_systemd
def test_systemd_has_nothing_to_say_about_the_unit(installed):
    """Unknown keys leave the exit code at 0, so that any word on stderr fails."""
    result = subprocess.run(
        [ANALYZE, "verify", "--man=no", installed], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize("line", ["Restrt=always", "ProtectSystem=sometimes", "WatchdogSec=soon"])
def test_and_would_have_something_to_say_about_a_mistake(installed, line):
    installed.write_text(installed.read_text().replace("[Service]\n", f"[Service]\n{line}\n"))
    result = subprocess.run(
        [ANALYZE, "verify", "--man=no", installed], capture_output=True, text=True, check=False
    )
    assert line.split("=")[0] in result.stderr or line.split("=")[1] in result.stderr


@needs_systemd
def test_the_unit_is_as_locked_as_it_can_be(installed):
    result = subprocess.run(
        [ANALYZE, "security", "--offline=true", f"--threshold={int(EXPOSURE * 10)}", installed],
        capture_output=True,
        text=True,
        check=False,
    )
    exposure = re.search(r"exposure level for swarmnode.service: ([\d.]+)", result.stdout)
    assert exposure is not None, result.stderr
    assert float(exposure[1]) <= EXPOSURE
    assert result.returncode == 0


def test_what_a_restart_cannot_mend_is_not_restarted():
    assert {
        int(code) for code in section("Service")["RestartPreventExitStatus"].split()
    } == FINAL_CODES


def test_a_node_that_was_told_to_finish_stays_ended():
    """It ends with 0 (tests/swarm/test_node.py), which is no failure to systemd unless a unit says
    so."""
    service = section("Service")
    assert service["Restart"] == "on-failure"
    assert not {"RestartForceExitStatus", "SuccessExitStatus"} & service.keys()


def test_systemd_is_more_patient_than_the_supervisor():
    service = section("Service")
    assert int(service["WatchdogSec"]) > OVERDUE_SECONDS + 10 * NOTIFY_SECONDS
    assert int(service["TimeoutStopSec"]) > DRAIN_SECONDS + EXTEND_SECONDS / 3
    assert int(service["TimeoutStartSec"]) > EXTEND_SECONDS


def test_the_supervisor_survives_what_its_children_do():
    service = section("Service")
    assert service["Type"] == "notify"
    # a trainer that the kernel kills is started again by its supervisor
    assert service["OOMPolicy"] == "continue"
    # the first SIGTERM drains, and is for the supervisor alone
    assert service["KillMode"] == "mixed"


def test_the_commands_exist():
    programs = re.findall(
        r"^ExecStart=\S+ (\S+)$",
        UNIT.read_text() + (DIRECTORY / "bootstrap.conf").read_text(),
        re.MULTILINE,
    )
    assert set(programs) == {"run", "bootstrap"}
    assert all(app[name] is not None for name in programs)
