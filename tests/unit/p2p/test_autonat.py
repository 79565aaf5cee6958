"""Reachability: votes, dial-backs over loopback, and refused dial-backs."""

import logging

import pytest
from libp2p.host.autonat.pb import autonat_pb2 as pb
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.errors import PeerError
from swarmnode.p2p.addresses import PRIVATE, PUBLIC, parse
from swarmnode.p2p.autonat import AUTONAT, MAX_VOTES, VOTE_SECONDS, Votes
from swarmnode.p2p.stream_calls import read_message, run_on_new_stream, write_message
from tests.support.hosts import host, hosts
from tests.support.waiting import until


def port_of(network):
    return parse(network.listen_addrs[0])[0].port


def listens_at(network, port):
    """Make the reachability check use `port` although the host listens on loopback only."""
    network.nat.reach.ports = [port]


async def test_dialled_back_node_is_public(tmp_path):
    async with hosts(tmp_path, 2) as (a, b):
        listens_at(a, port_of(a))
        await a.nat.reach.check(b.peer_id)
        reach = a.statistics().nat.reach
        assert reach.verdict == "public"
        assert (a.nat.reach.votes(), reach.observed) == ((1, 0), "127.0.0.1")
        assert b.statistics().nat.reach.dial_backs == {"ok": 1, "unreachable": 0, "refused": 0}
        assert a.connected() == [b.peer_id]
        assert a.statistics().nat.relay.serving  # role auto


async def test_unreachable_port_is_private_and_seeks_relays(tmp_path, caplog):
    async with hosts(tmp_path, 3) as (a, b, c):
        await until(
            lambda: (
                len(a.connected()) == 2 and all(a.nat.address_of(peer.peer_id) for peer in (b, c))
            )
        )
        listens_at(a, 1)
        with caplog.at_level(logging.WARNING, "swarmnode"):
            for peer in (b, c):
                await a.nat.reach.check(peer.peer_id)
        assert a.nat.reach.verdict == "private"
        assert sum("port 1 " in line for line in caplog.messages) == 1
        await until(lambda: a.statistics().nat.client.refused)  # neither of them is a relay
        b.nat.relay.serve(True)
        a.nat.client.wake()
        # at the latest when its back-off is over
        await until(lambda: a.statistics().nat.client.relays == [b.peer_id])


async def test_another_peer_at_the_port_is_unreachable(tmp_path):
    async with hosts(tmp_path, 2) as (a, b), host(tmp_path / "c") as c:
        listens_at(a, port_of(c))
        await a.nat.reach.check(b.peer_id)
        assert a.nat.reach.verdict == "private"


async def test_ok_without_arrival_does_not_count(tmp_path):
    async with hosts(tmp_path, 2) as (a, b):

        async def lie(stream, request):
            return pb.Message.OK, None

        b.nat.dial_back.dial_back = lie
        listens_at(a, port_of(a))
        await a.nat.reach.check(b.peer_id)
        assert a.nat.reach.verdict == "private"


async def test_only_the_observed_address_is_dialled_back(tmp_path):
    async with hosts(tmp_path, 2) as (a, b):
        dialled = []

        async def reaches(peer, address):
            dialled.append(str(address))
            return False

        b.nat.dial_back.reaches = reaches
        reported = [f"/ip4/9.9.9.9/tcp/{port}" for port in (7001, 7001, 7002, 7003)]

        async def ask(stream):
            info = pb.Message.PeerInfo(
                id=ID.from_string(a.peer_id).to_bytes(),
                addrs=[Multiaddr(each).to_bytes() for each in reported],
            )
            await write_message(
                stream, pb.Message(type=pb.Message.DIAL, dial=pb.Message.Dial(peer=info))
            )
            return (await read_message(stream, pb.Message)).dialResponse.status

        for expected in (pb.Message.E_DIAL_ERROR, pb.Message.E_DIAL_REFUSED):
            assert (await run_on_new_stream(a.host, b.peer_id, AUTONAT, ask, deadline=5.0))[
                0
            ] == expected
        assert dialled == ["/ip4/127.0.0.1/tcp/7001", "/ip4/127.0.0.1/tcp/7002"]


async def test_dial_back_needs_a_direct_connection(tmp_path):
    """The address of a relayed peer is unknown."""
    async with hosts(tmp_path, 2) as (a, b):
        (connection,) = b.host.library.get_network().get_connections(ID.from_string(a.peer_id))
        connection.muxed_conn.get_remote_address = lambda: None
        listens_at(a, port_of(a))
        await a.nat.reach.check(b.peer_id)
        assert a.nat.reach.verdict == "unknown"
        assert b.statistics().nat.reach.dial_backs["refused"] == 1


@pytest.mark.parametrize(
    "garbage", [b"\x00", b"\x02\x08\x00", b"\x05\xff\xff\xff\xff\xff", b"\x80\x80\x80\x80\x01"]
)
async def test_garbage_is_answered_or_reset(tmp_path, garbage):
    async with hosts(tmp_path, 2) as (a, b):

        async def talk(stream):
            await stream.write(garbage)
            await stream.finish()
            return (await read_message(stream, pb.Message)).dialResponse.status

        try:
            status, _ = await run_on_new_stream(a.host, b.peer_id, AUTONAT, talk, deadline=5.0)
            assert status == pb.Message.E_BAD_REQUEST
        except PeerError:
            assert b.connected() == [a.peer_id]


# -- pure


def test_a_majority_decides_and_a_tie_changes_nothing():
    votes = Votes()
    assert votes.verdict(0.0) == "unknown"
    assert votes.verdict(0.0, "public") == "public"
    for peer, reachable, before, verdict in (
        ("a", True, "unknown", "public"),
        ("b", False, "public", "public"),
        ("b", False, "private", "private"),
        ("c", False, "public", "private"),
        ("c", True, "private", "public"),
    ):
        votes.vote(peer, reachable, PUBLIC, 0.0)
        assert votes.verdict(0.0, before) == verdict


def test_votes_with_the_widest_scope_count():
    votes = Votes()
    votes.vote("a", True, PRIVATE, 0.0)
    votes.vote("b", True, PRIVATE, 0.0)
    assert votes.verdict(0.0) == "public"
    votes.vote("c", False, PUBLIC, 0.0)
    assert votes.verdict(0.0) == "private"


def test_votes_age_and_are_bounded():
    votes = Votes()
    for number in range(100):
        votes.vote(f"p{number}", True, PUBLIC, float(number))
    assert votes.counts(100.0) == (MAX_VOTES, 0)
    assert votes.verdict(100.0 + VOTE_SECONDS) == "unknown"
