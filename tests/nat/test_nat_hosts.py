"""Two hosts behind masquerading routers and a public relay, in network namespaces: which
connections work, and which survive the relay."""

import contextlib
import json
import sys

import pytest

from swarmnode.doctor.checks import DialBackFacts
from tests.support.nat_host import NatHost
from tests.support.netns import Topology, missing
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.nat,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]

RELAY = {"listen_addrs": ["/ip4/5.5.5.5/tcp/9000"], "relay": "server"}
MEBIBYTE = 2**20


@contextlib.contextmanager
def swarm(tmp_path, kinds, **settings):
    """Yield (the network, start the relay, relay, a, b): two hosts behind routers of these kinds,
    connected through the running relay."""
    with Topology() as net:
        net.public("relay", "5.5.5.5")
        for name, outside, kind in (("a", "5.5.5.11", kinds[0]), ("b", "5.5.5.12", kinds[1])):
            net.behind_nat(name, outside, kind)

        relays = []  # a host runs while it is referenced

        def start_relay():
            relays.append(NatHost(net, "relay", tmp_path / "relay", **RELAY))
            return relays[-1]

        relay = start_relay()
        nodes = {
            "listen_addrs": ["/ip4/0.0.0.0/tcp/9100"],
            "initial_peers": relay.addrs,
            **settings,
        }
        a, b = (NatHost(net, name, tmp_path / name, **nodes) for name in ("a", "b"))
        wait_for(lambda: a.sees(b) and b.sees(a), "they find each other through the relay")
        yield net, start_relay, relay, a, b


def exchange(a, b):
    """Send requests of 1 MiB with their answers, both ways."""
    for one, other in ((a, b), (b, a)):
        carried = lambda one=one, other=other: (
            one.do("request", peer=other.peer, bytes=MEBIBYTE).get("same") is True
        )
        # Retry: the first request may use a connection that is already dead.
        wait_for(carried, "1 MiB arrives")


def test_unreachable_hosts_detect_it_and_reserve_a_relay(tmp_path):
    with swarm(tmp_path, ("preserving", "fully-random"), hole_punching=False) as (
        _,
        _,
        relay,
        a,
        b,
    ):
        for host in (a, b):
            nat = host.do("stat")["nat"]
            assert nat["reach"]["verdict"] == "private"
            assert nat["client"]["relays"] == [relay.peer]
            assert (
                host.log().count("port 9100 is not reachable from outside: running outbound-only")
                == 1
            )
        reach = relay.do("stat")["nat"]["reach"]
        assert reach["verdict"] == "public"
        assert a.do("stat")["nat"]["reach"]["observed"] == "5.5.5.11"
        assert a.sees(b) == b.sees(a) == "relayed"
        exchange(a, b)


def test_punched_connection_outlives_the_relay(tmp_path):
    with swarm(tmp_path, ("preserving", "preserving")) as (_, _, relay, a, b):
        wait_for(lambda: a.sees(b) == b.sees(a) == "direct", "the hole is punched")
        wait_for(
            lambda: relay.do("stat")["nat"]["relay"]["circuits"] == 0, "the circuit is given up"
        )
        exchange(a, b)
        relay.kill()
        wait_for(lambda: relay.peer not in a.do("stat")["connected"], "the relay is missed")
        assert a.sees(b) == b.sees(a) == "direct"
        exchange(a, b)


def test_random_ports_keep_hosts_on_the_relay(tmp_path):
    with swarm(tmp_path, ("preserving", "fully-random")) as (_, start_relay, relay, a, b):
        exchange(a, b)
        wait_for(
            lambda: sum(each.do("stat")["nat"]["punch"]["failed"] for each in (a, b)) == 1,
            "punching is given up",
        )
        assert a.sees(b) == b.sees(a) == "relayed"
        relay.kill()
        wait_for(lambda: not a.sees(b) and not b.sees(a), "they lose each other")
        start_relay()
        wait_for(lambda: a.sees(b) == b.sees(a) == "relayed", "they find each other again")
        exchange(a, b)


def test_doctor_reports_the_nat_class(tmp_path):
    def probe(net, name):
        asked = {
            "addresses": relay.addrs,
            "swarm": "09" * 32,
            "listen": ["/ip4/0.0.0.0/tcp/9100"],
            "relay": "auto",
        }
        command = [sys.executable, "-m", "swarmnode.p2p.reach"]
        done = net.run(
            name, command, input=json.dumps(asked), capture_output=True, text=True, timeout=240
        )
        diagnosis = json.loads(done.stdout.splitlines()[-1])
        assert [row["outcome"] for row in diagnosis["peers"]] == ["ok"]
        return DialBackFacts(**diagnosis["dial_back"])

    with Topology() as net:
        net.public("relay", "5.5.5.5")
        net.public("open", "5.5.5.6")
        net.behind_nat("closed", "5.5.5.11")
        relay = NatHost(net, "relay", tmp_path / "relay", **RELAY)
        assert probe(net, "closed") == DialBackFacts("private", "5.5.5.11", 1)
        assert probe(net, "open") == DialBackFacts("public", "5.5.5.6", 0)


def test_nodes_recover_when_the_router_changes_its_address(tmp_path):
    with swarm(tmp_path, ("preserving", "fully-random")) as (net, _, relay, a, b):
        exchange(a, b)
        assert a.do("stat")["nat"]["reach"]["observed"] == "5.5.5.11"
        net.move("a", "5.5.5.21")
        wait_for(
            lambda: a.do("stat")["nat"]["reach"]["observed"] == "5.5.5.21",
            "peers see the new address",
            400.0,
        )
        wait_for(
            lambda: relay.peer in a.do("stat")["connected"] and a.sees(b) and b.sees(a),
            "they find each other again",
            400.0,
        )

        # A side that has not noticed yet uses a dead connection.
        def answered(one, other):
            return one.do("request", peer=other.peer, bytes=1000).get("same") is True

        wait_for(
            lambda: answered(a, b) and answered(b, a), "no connection of before is left", 400.0
        )
        exchange(a, b)


def test_ipv6_only_hosts_find_each_other(tmp_path):
    with Topology() as net:
        for name, number in (("a", 1), ("b", 2), ("c", 3)):
            net.public(name, f"2a01:4f8:1:2::{number}")
        listen = lambda number: {"listen_addrs": [f"/ip6/2a01:4f8:1:2::{number}/tcp/9000"]}
        b = NatHost(net, "b", tmp_path / "b", **listen(2))
        a, c = (
            NatHost(net, name, tmp_path / name, initial_peers=b.addrs, **listen(number))
            for name, number in (("a", 1), ("c", 3))
        )
        wait_for(lambda: a.sees(c) == c.sees(a) == "direct", "a and c hear of each other from b")
        exchange(a, c)
        wait_for(lambda: a.do("stat")["nat"]["reach"]["verdict"] == "public", "a is dialled back")
        assert a.do("stat")["nat"]["reach"]["observed"] == "2a01:4f8:1:2::1"
