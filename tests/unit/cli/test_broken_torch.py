"""A torch whose import fails ends a command at once, with one line that names cause and remedy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MISSING_LIBRARY = "raise OSError('libcudart.so.13: cannot open shared object file')"
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def broken(tmp_path):
    """Return a function that runs a command of swarmnode where `import torch` runs `code`."""

    def swarmnode(code, *arguments):
        package = tmp_path / "site" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(code)
        path = os.pathsep.join([str(package.parent), str(ROOT)])
        command = [sys.executable, "-m", "swarmnode", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": path, "XDG_CONFIG_HOME": str(tmp_path)}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    return swarmnode


def plain(lines):
    """Return the lines that are not JSON, which are for a person."""
    return [line for line in lines.splitlines() if not line.startswith("{")]


@pytest.mark.parametrize(
    ("code", "cause", "remedy"),
    [
        (MISSING_LIBRARY, "libcudart.so.13: cannot open", "pip install --force-reinstall torch"),
        (CRASH, "SIGILL", "processor"),
    ],
)
def test_run_ends_at_the_first_start_of_the_trainer(broken, tmp_path, code, cause, remedy):
    options = ["--set", "http.port=0", "--set", "network.mdns=false"]
    result = broken(code, "run", "--data-dir", tmp_path / "node", *options)
    assert result.returncode == 69
    (line,) = plain(result.stderr)
    assert result.stderr.endswith(f"{line}\n")
    assert cause in line
    assert remedy in line
    written = json.loads((tmp_path / "node" / "run" / "supervisor.json").read_text())
    assert written["restarts"]["trainer"] == 0


@pytest.mark.parametrize(
    ("command", "code", "cause"),
    [
        (["demo"], CRASH, "SIGILL"),
        (["export", "out"], MISSING_LIBRARY, "OSError: libcudart.so.13"),
        (["eval", "embedded"], MISSING_LIBRARY, "OSError: libcudart.so.13"),
        (["init", "--name", "evening"], MISSING_LIBRARY, "libcudart.so.13"),
    ],
)
def test_other_commands_end_before_anything_starts(broken, tmp_path, command, code, cause):
    result = broken(code, *command, "--data-dir", tmp_path / "node")
    assert result.returncode == 69
    (line,) = plain(result.stderr)
    assert cause in line
    assert "pip install --force-reinstall torch" in line
    assert command[0] == "init" or not (tmp_path / "node").exists()


def test_doctor_advises_to_install_torch_again(broken, tmp_path):
    options = ["--set", "http.port=0", "--json"]
    result = broken(MISSING_LIBRARY, "doctor", "--data-dir", tmp_path / "node", *options)
    assert result.returncode == 69
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert "libcudart.so.13" in checks["device"]["text"]
    assert "pip install --force-reinstall torch" in checks["device"]["remedy"]


def test_join_reports_the_unreachable_peer_before_torch(broken, tmp_path):
    peer = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
    invite = f"/ip4/127.0.0.1/tcp/1/p2p/{peer}/swarm/{'0' * 64}"
    result = broken(MISSING_LIBRARY, "join", invite, "--data-dir", tmp_path / "node")
    assert result.returncode == 69
    assert "127.0.0.1" in plain(result.stderr)[-1]
