"""Real nodes with trainers, two behind masquerading routers and one public. All train on each
other's groups."""

import json

import pytest

from swarmnode.config import Config
from swarmnode.tasks.registry import task_version
from swarmnode.wire.manifest import swarm_id
from tests.support.nat_host import NatHost
from tests.support.nat_machine import Machine, tails
from tests.support.netns import Topology, missing
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.nat,
    pytest.mark.swarm,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]

SETTINGS = (
    "swarm.name=nat",
    "training.step_interval=0.5",
    "training.eval_every=1000",
    "training.groups_per_step=4",
    "weights.sync_every=4",
    "weights.fragments=1",
    "weights.partners=anyone",
)


def test_nodes_behind_routers_train_on_each_others_groups(tmp_path):
    """The public node does not relay, and the relay does not support rollouts. The routers allow no
    direct connection: groups of a and b travel by circuit or through the public node, weights by
    circuit only."""
    swarm = swarm_id("nat", {name: task_version(name) for name in Config().task.names}).hex()
    with Topology() as net:
        net.public("relay", "5.5.5.5")
        net.public("c", "5.5.5.6")
        net.behind_nat("a", "5.5.5.11")
        net.behind_nat("b", "5.5.5.12", "fully-random")
        relay = NatHost(
            net, "relay", tmp_path / "relay", swarm=swarm, listen_addrs=["/ip4/5.5.5.5/tcp/9000"]
        )
        known = f"network.initial_peers={json.dumps(relay.addrs)}"
        nodes = [Machine(net, name, tmp_path / name, "0.0.0.0", known, *SETTINGS) for name in "ab"]
        # otherwise it may become their relay
        off = (known, 'network.relay="off"')
        nodes.append(Machine(net, "c", tmp_path / "c", "5.5.5.6", *off, *SETTINGS))
        for node in nodes:
            node.start("run")
        peers = {
            node.name: wait_for(lambda node=node: node.peer, tails("it starts", [node]))
            for node in nodes
        }
        left = {
            (node.name, peers[other]) for node in nodes for other in peers if other != node.name
        }

        def all_used():
            for node in nodes:
                left.difference_update(
                    (node.name, peer) for peer, count in node.used().items() if count
                )
            return not left

        wait_for(all_used, tails("every node trains on groups of both others", nodes))
        wait_for(lambda: relay.do("stat")["nat"]["relay"]["reservations"] == 2, "a and b reserve")

        def carried():
            now = relay.do("stat")["nat"]["relay"]
            return now["circuits"] >= 1 and now["bytes"] > 20_000

        wait_for(carried, tails("a circuit carries groups", nodes))
        # The public node leaves: a and b are each other's only partners.
        net.kill_all("c")
        a, b = nodes[:2]
        pairs = lambda node: (node.snapshot() or {"weights": {"pairs": {}}})["weights"]["pairs"]
        wait_for(
            lambda: pairs(a).get(peers["b"]) and pairs(b).get(peers["a"]),
            tails("a and b exchange weights", [a, b]),
        )

        # The relay leaves too. Each node trains alone, and they meet again when it returns.
        net.kill_all("relay")
        wait_for(
            lambda: all(each.snapshot()["network"]["peers"]["outbound"] == 0 for each in (a, b)),
            "they lose each other",
        )
        alone = {each.name: each.steps() for each in (a, b)}
        wait_for(
            lambda: all(each.steps() >= alone[each.name] + 3 for each in (a, b)),
            "each trains alone",
        )
        before = {"a": a.used().get(peers["b"], 0), "b": b.used().get(peers["a"], 0)}
        relay = NatHost(
            net,
            "relay",
            tmp_path / "relay",
            swarm=swarm,
            listen_addrs=["/ip4/5.5.5.5/tcp/9000"],
            relay="server",
        )
        found = lambda: (
            a.used().get(peers["b"], 0) > before["a"] and b.used().get(peers["a"], 0) > before["b"]
        )
        wait_for(found, tails("they train on each other's groups again", [a, b]))
