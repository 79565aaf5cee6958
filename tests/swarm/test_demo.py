"""`swarmnode demo` with a liar and a killed node. `make fresh` runs the one with a real model."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(900)]


def demo(tmp_path, *arguments):
    command = [
        sys.executable,
        "-m",
        "swarmnode",
        "demo",
        "--http-port",
        "0",
        "--data-dir",
        str(tmp_path / "demo"),
        *arguments,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=880, env={**os.environ, "COLUMNS": "200"}
    )


def test_learns_with_a_liar_and_a_killed_node(tmp_path):
    result = demo(tmp_path, "--byzantine", "1", "--kill", "1", "--minutes", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    for line in (
        "node0: held-out reward",
        "node1: held-out reward",
        "node2: held-out reward",
        "node0: rejected groups:",
        "node2: killed at step",
        "the swarm learned",
    ):
        assert line in result.stdout
    assert "FAIL" not in result.stdout
