"""The joining example of README.md, command by command: `init` on a public machine, `join` from two
machines behind routers."""

import time

import pytest

from tests.support.nat_machine import Machine, tails
from tests.support.netns import Topology, missing
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.nat,
    pytest.mark.swarm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]

JOINED_SECONDS = 240.0


def use_each_other(machines, more_than=()):
    """Return True if each has trained on groups of every other, beyond the counts in `more_than`,
    {name: {peer: count}}."""
    before = dict(more_than)
    view = {machine.name: machine.snapshot() for machine in machines}
    if not all(view.values()):
        return False
    peers = {name: snapshot["node"]["peer"] for name, snapshot in view.items()}
    used = {
        name: (snapshot["trainer"]["report"] or {}).get("peers_used", {})
        for name, snapshot in view.items()
    }
    return all(
        used[one].get(peer, 0) > before.get(one, {}).get(peer, 0)
        for one in view
        for other, peer in peers.items()
        if one != other
    )


def test_swarm_behind_routers_survives_loss_of_the_founder(tmp_path):
    with Topology() as net:
        net.public("f", "5.5.5.5")
        net.behind_nat("a", "5.5.5.11")
        net.behind_nat("b", "5.5.5.12")
        founder = Machine(net, "f", tmp_path / "f", "5.5.5.5")
        a, b = (
            Machine(net, "a", tmp_path / "a", "0.0.0.0"),
            Machine(net, "b", tmp_path / "b", "0.0.0.0"),
        )
        everybody = [founder, a, b]

        invite = founder.command("init", "--name", "evening")
        assert invite.startswith("/ip4/5.5.5.5/tcp/9512/p2p/12D3Koo")
        founder.start("run")
        wait_for(lambda: founder.peer, "the founder runs", 240.0)

        joined = time.monotonic()
        for machine in (a, b):
            machine.start("join", invite)
        wait_for(
            lambda: use_each_other(everybody),
            tails("all three train on groups of both others", everybody),
            JOINED_SECONDS,
        )
        assert time.monotonic() - joined < JOINED_SECONDS
        assert {machine.snapshot()["node"]["swarm"] for machine in everybody} == {
            invite.rpartition("/")[2]
        }

        # The founder, which is also bootstrap peer and relay, loses power. The hole is punched, so
        # the other two continue with each other.
        of_founder = founder.used()
        net.kill_all("f")
        before = {machine.name: machine.used() for machine in (a, b)}
        steps = [machine.steps() for machine in (a, b)]
        wait_for(
            lambda: use_each_other([a, b], before),
            tails("the two continue without the founder", [a, b]),
        )
        stepped = lambda: all(
            machine.steps() > step for machine, step in zip((a, b), steps, strict=True)
        )
        wait_for(stepped, tails("the two take steps without the founder", [a, b]))

        # A member loses power and restarts with `run`. Only the other member behind a router is
        # there, until the founder returns.
        before = {"f": of_founder, "a": a.used(), "b": b.used()}
        peer = b.peer
        net.kill_all("b")
        founder.start("run")
        b.start("run")
        wait_for(
            lambda: b.peer == peer and use_each_other(everybody, before),
            tails("all three are back", everybody),
        )
