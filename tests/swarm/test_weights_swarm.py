"""Four real nodes at four speeds, one of them Byzantine, one killed and replaced by another with an empty disk: replicas stay together."""

import itertools
import json
import shutil
import time

import numpy as np
import pytest
from safetensors import safe_open

from swarmnode.config import PolicyConfig
from swarmnode.demo.nodes import DemoNode, Liar
from swarmnode.policy.load import load_policy

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

OUTER_STEPS = 30
APART = 0.75
"""Largest distance of two replicas, relative to how far they have come from the start policy. Left alone it is about √2."""


def settings(number):
    return {
        "swarm": {"name": "weights"},
        "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
        "policy": {"threads": 1},
        "training": {"step_interval": (0.2, 0.3, 0.4, 0.3)[number], "eval_every": 50, "seed": number, "groups_per_step": 4},
        "task": {"names": ["rg/chain_sum", "rg/spell_backward"], "held_out_per_task": 4},
        "weights": {"sync_every": 3},
        "http": {"port": 0},
        "log": {"format": "json"},
        "supervisor": {"backoff_seconds": 0.1},
    }


def weights_of(node):
    with safe_open(node.directory / "trainer" / "state.safetensors", "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name.startswith("weights.")}  # noqa: SIM118


def norm(one, minus):
    return float(np.sqrt(sum(np.square(one[name] - minus[name]).sum(dtype=np.float64) for name in one)))


def until(condition, what, nodes, seconds=120.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for node in nodes:
            node.ask()
        if condition():
            return
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds} s: {what}: {[vars(node.view) for node in nodes]}")


def log_of(node, event):
    lines = (json.loads(line) for line in (node.directory / "node.log").read_text().splitlines() if line.startswith("{"))
    return [line for line in lines if event in line.get("event", "")]


def test_replicas_stay_together_through_a_death_a_birth_and_a_liar(tmp_path):
    nodes = [DemoNode(f"node{i}", tmp_path / f"node{i}", settings(i)) for i in range(3)]
    liar = Liar("liar", tmp_path / "liar", settings(3))
    try:
        nodes[0].start([])
        first = nodes[0].wait_for_address(time.monotonic() + 60)
        for node in nodes[1:]:
            node.start(first)
        liar.start([address for node in nodes for address in node.wait_for_address(time.monotonic() + 60)])
        until(lambda: all(node.view.outer_step >= 6 for node in nodes), "six outer steps everywhere", nodes)

        nodes[2].kill()
        shutil.rmtree(tmp_path / "node2")
        nodes[2] = DemoNode("node2", tmp_path / "node2", settings(2))
        nodes[2].start(first)
        until(lambda: nodes[2].view.step > 0, "the newcomer trains", nodes)
        taken = log_of(nodes[2], "took the state of")
        assert len(taken) == 1
        peers = [node.view.peer for node in nodes[:2]]
        assert any(peer in taken[0]["event"] for peer in peers)
        assert nodes[2].view.outer_step > 0

        until(lambda: all(node.view.outer_step >= OUTER_STEPS for node in nodes), "thirty outer steps", nodes)
        start = {f"weights.{name}": p.detach().numpy() for name, p in load_policy(PolicyConfig()).model.named_parameters()}
        replicas = [weights_of(node) for node in nodes]
        come = max(norm(replica, start) for replica in replicas)
        apart = [norm(one, other) for one, other in itertools.combinations(replicas, 2)]
        print(apart, come)
        assert max(apart) < APART * come
        for node in nodes:
            assert node.view.exchanges > 0
            assert node.view.restarts == 0
        refused = sum(sum(node.view.refused.values()) + node.view.rejected.get("malformed", 0) for node in nodes)
        assert refused > 0
        assert liar.alive()
    finally:
        liar.kill()
        for node in nodes:
            node.stop()
        for node in nodes:
            node.wait(20)
