"""Real nodes: supervisor, network process, trainer and scorers, over real sockets on loopback."""

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from swarmnode.demo.nodes import DemoNode
from tests.support.waiting import status, wait_for
from tests.support.whole_crew import child_of, start, stop, trainer_of

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(900)]

FAST = {
    "swarm": {"name": "test"},
    "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
    "policy": {"threads": 1},
    "training": {"step_interval": 1.0, "eval_every": 20, "save_every": 0.0},
    "http": {"port": 0},
}


def get(node, path):
    with urllib.request.urlopen(node.url + path, timeout=5) as answer:
        return answer.read().decode()


def trained_on_peers(node):
    node.poll()
    return node.report.external_groups_total > 0


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    """Two nodes; the second joins through the first."""
    directory = tmp_path_factory.mktemp("swarm")
    nodes = [
        DemoNode(
            f"node{i}",
            directory / f"node{i}",
            {**FAST, "training": {**FAST["training"], "seed": i}},
        )
        for i in range(2)
    ]
    try:
        start(nodes, 240)
        for node in nodes:
            wait_for(
                lambda node=node: trained_on_peers(node),
                f"{node.name} trains on its peer's groups: {node.last_log_line()}",
            )
        yield nodes
    finally:
        stop(nodes)


def test_nodes_train_on_each_others_groups(swarm):
    first, second = (status(node) for node in swarm)
    assert first["trainer"]["report"]["peers_used"].keys() == {second["node"]["peer"]}
    assert second["trainer"]["report"]["peers_used"].keys() == {first["node"]["peer"]}
    assert first["rollouts"]["published"] > 0
    assert first["rollouts"]["admission"]["admitted"] > 0
    assert not any(first["rollouts"]["admission"]["rejected"].values())


def test_the_network_process_never_loads_torch(swarm):
    def maps(module):
        return Path(f"/proc/{child_of(swarm[0], module).pid}/maps").read_text()

    assert "libtorch" not in maps("swarmnode.daemon.node")
    assert "libtorch" in maps("swarmnode.trainer")


def run_command(node, *command):
    """Return what a command prints for the operator of the running node."""
    command = [sys.executable, "-m", "swarmnode", *command, "-d", str(node.directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_pause_outlives_the_trainer_and_states_its_reason(swarm):
    node = swarm[1]
    resting = lambda: (
        (s := status(node))
        and s["trainer"]["connected"]
        and s["trainer"]["report"]["phase"] == "paused"
        and s
    )
    assert run_command(node, "pause").returncode == 0
    before = wait_for(resting, "the trainer rests")
    trainer_of(node).kill()
    wait_for(
        lambda: (
            status(node)["supervisor"]["restarts"]["trainer"]
            > before["supervisor"]["restarts"]["trainer"]
        ),
        "it was killed",
    )
    again = wait_for(resting, "the next trainer rests too")
    assert again["trainer"]["report"]["step"] <= before["trainer"]["report"]["step"]
    shown = run_command(node, "status").stdout
    assert "paused by its owner" in " ".join(shown.split())
    assert 'swarmnode_budget_paused{reason="owner"} 1.0' in get(node, "/metrics")
    assert again["network"]["peers"]["connected"] == 1, "it stays connected"
    assert run_command(node, "resume").returncode == 0
    wait_for(
        lambda: status(node)["trainer"]["report"]["step"] > again["trainer"]["report"]["step"],
        "the node continues",
    )
    steps, samples = (
        (node.directory / "log" / f"{name}.jsonl").read_text().splitlines()
        for name in ("steps", "samples")
    )
    assert json.loads(steps[0])["step"] == 1, "includes the steps of the earlier trainer"
    assert json.loads(steps[-1])["step"] > again["trainer"]["report"]["step"]
    assert json.loads(samples[-1])["completions"]


def test_sigterm_drains_in_time_and_a_restart_resumes(swarm):
    node = swarm[0]
    before = status(node)
    began = time.monotonic()
    stop([node])
    assert node.exit_code() == 0
    assert time.monotonic() - began < 25
    node.start([])  # its peer book has the other node
    after = wait_for(
        lambda: (
            (s := status(node))
            and s["trainer"]["report"]
            and s["network"]["peers"]["connected"]
            and s
        ),
        "a restarted node finds its peer by its address book",
    )
    assert after["node"]["peer"] == before["node"]["peer"]
    assert after["trainer"]["report"]["step"] >= before["trainer"]["report"]["step"]
