"""Each way in which a running node restarts its processes because it wants to: whole nodes move to
a successor of their manifest, and a network process that has grown too large starts again."""

import json
import os
import subprocess
import sys
import time

import pytest

from swarmnode import cli
from tests.support.chaos.nodes import INSIDE, changed_environment
from tests.support.forked_node import ForkedNode
from tests.support.waiting import status, wait_for
from tests.support.whole_crew import child_of, stop
from tests.swarm.test_join import FAST

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]


def settings(**swarm):
    training = {"step_interval": 0.5, "eval_every": 50, "temperature": 0.9, "save_every": 60.0}
    return {**FAST, "training": training, "swarm": {"name": "moves", **swarm}}


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "swarmnode", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(node):
    """Return the step of the trainer in the present swarm; 0 while it has not reported."""
    report = status(node)["trainer"]["report"]
    return report["step"] if report else 0


def restored_step(node):
    """Return the step at which the second trainer continued; -1 before."""
    log = (node.directory / "log" / "trainer.jsonl").read_text().splitlines()
    steps_found = [line["step"] for line in map(json.loads, log) if line["event"] == "restored"]
    return steps_found[0] if steps_found else -1


def has_moved(node, swarm):
    """Return True if both processes belong to `swarm` and train."""
    return status(node)["node"]["swarm"] == swarm and steps(node) > restored_step(node) >= 0


def test_nodes_move_to_a_successor_and_continue(tmp_path, capsys):
    """The founder by `init --successor`, one member by `manifest follow`, one by policy."""
    founder = ForkedNode("a", tmp_path / "a", settings())
    asks = ForkedNode("b", tmp_path / "b", settings())
    follows = ForkedNode("c", tmp_path / "c", settings(follow="founder"))
    nodes = [founder, asks, follows]
    assert cli.run(["init", "--config", str(founder.config_file)]) == 0
    capsys.readouterr()
    try:
        founder.start([])
        address = founder.wait_for_address(time.monotonic() + 180)
        invite = f"{address[0]}/swarm/{status(founder)['node']['swarm']}"
        for node in (asks, follows):
            assert cli.run(["join", invite, "--no-run", "--config", str(node.config_file)]) == 0
            node.start(address)
        for node in nodes:
            node.wait_for_address(time.monotonic() + 180)
            wait_for(lambda node=node: steps(node) > 3, f"it trains: {node.last_log_line()}")
        before = {node.name: steps(node) for node in nodes}

        directory = ("-d", str(founder.directory))
        command("init", "--successor", "--yes", "--set", "training.temperature=0.8", *directory)
        wait_for(
            lambda: status(founder)["node"]["swarm"] not in invite,
            f"the founder moves: {founder.last_log_line()}",
        )
        swarm = status(founder)["node"]["swarm"]
        for node in (asks, follows):  # a new process asks its peers at once, not in ten minutes
            child_of(node, "swarmnode.daemon.node").kill()
        for node in (founder, follows):
            wait_for(
                lambda node=node: has_moved(node, swarm),
                f"{node.name} trains with the successor: {node.last_log_line()}",
            )
        wait_for(lambda: status(asks)["successor"]["waiting"], "the other member is asked")
        assert status(asks)["node"]["swarm"] in invite
        command("manifest", "follow", "-d", str(asks.directory))
        wait_for(
            lambda: has_moved(asks, swarm), f"b trains with the successor: {asks.last_log_line()}"
        )
        for node in nodes:
            restarts = status(node)["supervisor"]["restarts"]
            assert restarts["trainer"] == 1, node.name
            # A node that moved before it was killed has one restart, the others two.
            assert restarts["network"] in ({1} if node is founder else {1, 2}), node.name
            # The trainer saved before it ended, although the next save was due after a minute.
            assert restored_step(node) >= before[node.name]
    finally:
        stop(nodes, 60)
    assert [node.exit_code() for node in nodes] == [0, 0, 0]


def test_network_process_above_its_memory_limit_is_restarted(tmp_path):
    node, grow = ForkedNode("a", tmp_path / "a", settings()), tmp_path / "grow"
    try:
        with changed_environment(PYTHONPATH=f"{INSIDE}:{os.getcwd()}", GROW_FILE=str(grow)):
            node.start([])
        node.wait_for_address(time.monotonic() + 180)
        wait_for(lambda: steps(node) > 1, f"it trains: {node.last_log_line()}")
        grow.touch()
        wait_for(
            lambda: status(node)["supervisor"]["restarts"]["network"] == 1,
            f"the network process restarts: {node.last_log_line()}",
        )
        step = steps(node)
        wait_for(lambda: steps(node) > step, f"it trains: {node.last_log_line()}")
        assert status(node)["supervisor"]["restarts"]["trainer"] == 0
        log = (node.directory / "log" / "network.jsonl").read_text()
        assert "the network process uses 1" in log
    finally:
        stop([node], 60)
    assert node.exit_code() == 0
