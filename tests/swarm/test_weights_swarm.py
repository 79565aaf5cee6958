"""Three real nodes average, one of them killed and replaced by a node with an empty disk."""

import json
import shutil
import time

import pytest

from swarmnode.p2p import identity
from tests.support.forked_node import ForkedNode
from tests.support.waiting import free_port, wait_for
from tests.support.whole_crew import stop

pytestmark = [pytest.mark.swarm, pytest.mark.long, pytest.mark.timeout(900)]


def settings(number, port=0, known=()):
    return {
        "swarm": {"name": "weights"},
        "network": {"listen_addrs": [f"/ip4/127.0.0.1/tcp/{port}"], "mdns": False},
        "policy": {"threads": 1},
        "training": {
            "step_interval": 0.3,
            "eval_every": 50,
            "save_every": 0.0,
            "seed": number,
            "groups_per_step": 4,
        },
        "task": {"names": ["rg/chain_sum", "rg/spell_backward"], "held_out_per_task": 4},
        "sharing": {"enabled": False},
        "weights": {"sync_every": 4, "fragments": 1, "partners": "anyone"},
        "stages": {"trust": list(known)},
        "http": {"port": 0},
    }


def until(nodes, condition, what):
    def holds():
        for node in nodes:
            node.poll()
        return condition()

    wait_for(holds, lambda: (what, [node.status for node in nodes]), pause=1.0)


def peer_of(directory):
    directory.mkdir(mode=0o700, exist_ok=True)
    return identity.load_or_create(directory / "identity.key").peer_id


def adoptions(node):
    """Return the log lines about an adopted state."""
    lines = (json.loads(line) for line in node.log_file.read_text().splitlines() if line[0] == "{")
    return [line["event"] for line in lines if "adopted the state of" in line.get("event", "")]


def test_replicas_average_despite_death_and_join(tmp_path):
    port = free_port()
    first = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_of(tmp_path / 'node0')}"
    known = [peer_of(tmp_path / f"node{i}") for i in (0, 1)]
    nodes = [
        ForkedNode(f"node{i}", tmp_path / f"node{i}", settings(i, 0 if i else port))
        for i in range(3)
    ]
    try:
        for node in nodes:
            node.start([first] if node is not nodes[0] else [])
        late = time.monotonic() + 240
        for node in nodes:
            node.wait_for_address(late)
        averaged = lambda: all(node.averaging.exchanges_total >= 2 for node in nodes)
        until(nodes, averaged, "every node has averaged")
        nodes[2].kill()
        shutil.rmtree(tmp_path / "node2")
        nodes[2] = ForkedNode("node2", tmp_path / "node2", settings(2, known=known))
        nodes[2].start([first])
        until(nodes, lambda: nodes[2].report.step > 0, "the newcomer trains")
        (taken,) = adoptions(nodes[2])
        assert any(peer in taken for peer in known)
        assert nodes[2].averaging.outer_step > 0
        until(nodes, averaged, "the newcomer has averaged")
        assert all(not any(node.status.supervisor.restarts.values()) for node in nodes)
    finally:
        stop(nodes)
