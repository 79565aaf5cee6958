"""Real nodes with trainers, two behind masquerading routers and one public. All train on each
other's groups."""

import json
import os
import subprocess
import sys

import pytest

from swarmnode.config import Config
from swarmnode.demo.nodes import to_toml
from swarmnode.tasks.registry import task_version
from swarmnode.wire.manifest import swarm_id
from tests.support.nat_process import NatHost, wait_until
from tests.support.netns import Topology, missing

pytestmark = [
    pytest.mark.nat,
    pytest.mark.swarm,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]

SETTINGS = {
    "swarm": {"name": "nat"},
    "policy": {"threads": 1},
    "training": {"step_interval": 0.5, "eval_every": 1000, "groups_per_step": 4},
    "http": {"port": 9464},
    "weights": {"sync_every": 4, "fragments": 1, "partners": "anyone"},
}


class Node:
    """A node in its namespace, where its status page is reachable."""

    def __init__(self, net, name, directory, network):
        self.net, self.name, self.directory = net, name, directory
        directory.mkdir(mode=0o700)
        config = directory / "nat.toml"
        config.write_text(
            to_toml(
                {
                    **SETTINGS,
                    "node": {"data_dir": str(directory), "name": name},
                    "network": {"mdns": False, **network},
                }
            )
        )
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("SWARMNODE_")
        } | {"HF_HUB_OFFLINE": "1"}
        with open(directory / "node.log", "ab") as log:
            command = [sys.executable, "-m", "swarmnode", "run", "--config", str(config)]
            self.process = net.spawn(
                name, command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def address(self):
        path = self.directory / "run" / "addresses.json"
        return wait_until(
            lambda: path.exists() and json.loads(path.read_bytes()),
            f"{self.name} starts: {self.log()[-800:]}",
            240.0,
        )

    def snapshot(self):
        """Return the snapshot, or None while there is none."""
        text = self.net.get(self.name, "http://127.0.0.1:9464/status?points=1")
        return json.loads(text)["snapshot"] if text else None

    def report(self):
        view = self.snapshot()
        return (view["trainer"]["report"] if view else None) or {"peers_used": {}, "step": 0}

    def peers_used(self):
        """Return groups trained on, by peer."""
        return self.report()["peers_used"]

    def averaged_with(self, peer):
        """Return True if weights went both ways."""
        view = self.snapshot()
        return bool(view) and view["weights"]["pairs"].get(peer, 0) > 0

    def log(self):
        return (self.directory / "node.log").read_text(errors="replace")


def test_nodes_behind_routers_train_on_each_others_groups(tmp_path):
    """The public node does not relay, and the relay does not support rollouts. The routers allow no
    direct connection: groups of a and b travel by circuit or through the public node, weights by
    circuit only."""
    swarm = swarm_id(
        SETTINGS["swarm"]["name"], {name: task_version(name) for name in Config().task.names}
    ).hex()
    with Topology() as net:
        net.public("relay", "5.5.5.5")
        net.public("c", "5.5.5.6")
        net.behind_nat("a", "5.5.5.11")
        net.behind_nat("b", "5.5.5.12", "fully-random")
        relay = NatHost(
            net, "relay", tmp_path / "relay", swarm=swarm, listen_addrs=["/ip4/5.5.5.5/tcp/9000"]
        )
        private = {"listen_addrs": ["/ip4/0.0.0.0/tcp/9100"], "initial_peers": relay.addrs}
        nodes = [Node(net, name, tmp_path / name, private) for name in ("a", "b")]
        # otherwise it may become their relay
        public = {
            "listen_addrs": ["/ip4/5.5.5.6/tcp/9000"],
            "initial_peers": relay.addrs,
            "relay": "off",
        }
        nodes.append(Node(net, "c", tmp_path / "c", public))
        peers = {node.name: node.address()["peer"] for node in nodes}
        left = {
            (node.name, peers[other]) for node in nodes for other in peers if other != node.name
        }

        def all_used():
            for node in nodes:
                left.difference_update(
                    (node.name, peer) for peer, count in node.peers_used().items() if count
                )
            return not left

        try:
            wait_until(all_used, "every node trains on groups of both others", 240.0)
        except AssertionError:
            raise AssertionError(
                f"missing: {left}; {[node.log()[-1500:] for node in nodes]}"
            ) from None
        wait_until(lambda: relay.do("stat")["nat"]["relay"]["reservations"] == 2, "a and b reserve")

        def carried():
            now = relay.do("stat")["nat"]["relay"]
            return now["circuits"] >= 1 and now["bytes"] > 20_000

        try:
            wait_until(carried, "a circuit carries groups", 240.0)
        except AssertionError:
            raise AssertionError(
                f"{relay.do('stat')} {[node.log()[-1500:] for node in nodes]}"
            ) from None
        # The public node leaves: a and b are each other's only partners.
        net.kill_all("c")
        a, b = nodes[:2]
        try:
            wait_until(
                lambda: a.averaged_with(peers["b"]) and b.averaged_with(peers["a"]),
                "a and b exchange weights",
                240.0,
            )
        except AssertionError:
            swaps = [each.snapshot()["weights"] for each in (a, b)]
            raise AssertionError(f"{swaps} {[each.log()[-3000:] for each in (a, b)]}") from None

        # The relay leaves too. Each node trains alone, and they meet again when it returns.
        net.kill_all("relay")
        wait_until(
            lambda: all(each.snapshot()["network"]["peers"]["outbound"] == 0 for each in (a, b)),
            "they lose each other",
            240.0,
        )
        alone = {each.name: each.report()["step"] for each in (a, b)}
        wait_until(
            lambda: all(each.report()["step"] >= alone[each.name] + 3 for each in (a, b)),
            "each trains alone",
            240.0,
        )
        before = {"a": a.peers_used().get(peers["b"], 0), "b": b.peers_used().get(peers["a"], 0)}
        relay = NatHost(
            net,
            "relay",
            tmp_path / "relay",
            swarm=swarm,
            listen_addrs=["/ip4/5.5.5.5/tcp/9000"],
            relay="server",
        )
        found = lambda: (
            a.peers_used().get(peers["b"], 0) > before["a"]
            and b.peers_used().get(peers["a"], 0) > before["b"]
        )
        try:
            wait_until(found, "they train on each other's groups again", 240.0)
        except AssertionError:
            raise AssertionError(f"{[node.log()[-1500:] for node in (a, b)]}") from None
