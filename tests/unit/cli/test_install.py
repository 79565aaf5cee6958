"""Without the extra `train`, training commands name what to install, and a bootstrap node runs."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from protocol.generate.frames import PEER
from swarmnode.install import install_command
from swarmnode.wire.messages import TaskEntry
from tests.support.manifests import founded

HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {
    "accelerate", "numpy", "peft", "reasoning_gym", "safetensors", "torch", "transformers", "yaml"
}


class Hiding:
    def find_spec(name, path=None, target=None):
        hidden = name.partition(".")[0] in HIDDEN
        return None if hidden else PathFinder.find_spec(name, path, target)

    def find_distributions(*context):
        found = PathFinder.find_distributions(*context)
        return (each for each in found if each.name.replace("-", "_") not in HIDDEN)


sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""A sitecustomize that hides the packages of `train` from each process of a node."""


@pytest.fixture
def base(tmp_path):
    """Return the environment variables of a base installation."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDE)
    root = str(Path(__file__).parents[3])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), root]),
        "XDG_CONFIG_HOME": str(tmp_path),
    }


def swarmnode(base, *arguments):
    command = [sys.executable, "-m", "swarmnode", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=base, check=False
    )


INVITE = f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}/swarm/{'0' * 64}"


@pytest.mark.parametrize(
    "command", [["run"], ["join", INVITE], ["init"], ["demo"], ["export", "out"]]
)
def test_training_commands_name_what_to_install(base, tmp_path, command):
    result = swarmnode(base, *command, "--data-dir", tmp_path / "node")
    assert result.returncode == 69
    assert result.stderr.count("\n") == 1
    assert "torch" in result.stderr
    assert install_command("train") in result.stderr
    assert not (tmp_path / "node").exists()


def test_doctor_names_what_to_install(base, tmp_path):
    result = swarmnode(
        base, "doctor", "--data-dir", tmp_path / "node", "--set", "http.port=0", "--json"
    )
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.returncode == 69
    assert checks["device"]["level"] == "fail"
    assert install_command("train") in checks["device"]["remedy"]
    assert checks["data directory"]["level"] == "ok"


@pytest.mark.slow
def test_a_bootstrap_node_runs_without_training_packages(base, tmp_path):
    manifest, data_dir = tmp_path / "m", tmp_path / "boot"
    # Neither task is installed.
    opened = founded(tasks=[TaskEntry(n, "0" * 16, "{}") for n in ("rg/gcd", "words:reverse")])
    manifest.write_bytes(opened.signed)
    command = [sys.executable, "-m", "swarmnode", "bootstrap", "--manifest", manifest]
    command += ["--data-dir", data_dir, "--set", "http.port=0"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=base)
    try:
        addresses = data_dir / "run" / "addresses.json"
        deadline = time.monotonic() + 60
        while not addresses.exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        url = json.loads(addresses.read_text())["http"]
        with urllib.request.urlopen(f"{url}/status?points=1", timeout=60) as answer:
            assert json.load(answer)["snapshot"]["node"]["swarm"] == opened.swarm.hex()
        status = swarmnode(base, "status", "--url", url)
        assert (status.returncode, status.stderr) == (0, "")
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
