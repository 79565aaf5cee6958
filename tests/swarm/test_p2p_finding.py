"""Real hosts find each other, also after outages: neighbours, address book."""

import pytest
import trio

from swarmnode.p2p import turnover
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.messages import NeighboursRequest, NeighboursResponse, PeerAddresses
from tests.support.hosts import echo, host, hosts
from tests.support.waiting import until

pytestmark = pytest.mark.slow

NAME = "/test/echo/1"
OTHER = bytes([7]) * 32


async def ask(one, other, request):
    """Return the answer of `other` to a request of `one`."""
    limit = limits.NEIGHBOURS_RESPONSE_BYTES
    data = await one.requests.request(
        other.peer_id,
        ids.NEIGHBOURS_PROTOCOL,
        codec.encode(request),
        deadline=5.0,
        max_response_bytes=limit,
    )
    return codec.decode(data, NeighboursResponse, limit)


async def test_full_bootstrap_peer_admits_new_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(turnover, "SETTLED_SECONDS", 0.5)
    # The first host has room for half of the nodes.
    async with hosts(tmp_path, 8, max_connections=4) as networks:
        met = {network.peer_id: set() for network in networks}

        def all_met_others():
            for network in networks:
                met[network.peer_id] |= set(network.connected())
            return all(others - {networks[0].peer_id} for others in met.values())

        await until(all_met_others)
        assert networks[0].statistics().peers.dropped["full"] > 0


async def test_nodes_of_different_swarms_do_not_connect(tmp_path):
    async with host(tmp_path / "a") as a, host(tmp_path / "b", initial_peers=a.listen_addrs) as b:
        async with host(tmp_path / "c", initial_peers=a.listen_addrs, swarm=OTHER) as c:
            await until(
                lambda: all(each.statistics().reported_addresses["other_swarm"] for each in (a, c))
            )
            assert set(c.connected()) == {a.peer_id}
            assert b.peers.get(c.peer_id) is None


async def test_stranger_gets_no_addresses(tmp_path):
    async with hosts(tmp_path, 3) as (a, b, c):
        await until(lambda: all(len(network.connected()) == 2 for network in (a, b, c)))
        for swarm, expected in ((bytes(32), {c.peer_id}), (OTHER, set())):
            answer = await ask(b, a, NeighboursRequest(swarm, [], b"", b"", 0))
            assert {each.peer for each in answer.peers} == expected


async def test_restarted_bootstrap_peer_is_found_again(tmp_path):
    async with host(tmp_path / "a") as a:
        known = a.listen_addrs
    async with (
        host(tmp_path / "b", initial_peers=known) as b,
        host(tmp_path / "c", initial_peers=known) as c,
    ):
        async with host(tmp_path / "a"):
            await until(lambda: len(b.connected()) == len(c.connected()) == 2)
        # They are still connected with each other.
        await until(lambda: len(b.connected()) == len(c.connected()) == 1)
        failures = b.statistics().peers.dial_failures
        # About two seconds without it.
        await until(lambda: b.statistics().peers.dial_failures >= failures + 2)
        start = trio.current_time()
        async with host(tmp_path / "a") as a:
            assert a.listen_addrs == known
            await until(lambda: len(a.connected()) == 2)
            assert trio.current_time() - start < 10.0
            a.requests.serve(NAME, echo, max_request_bytes=64, max_response_bytes=64)
            for each in (b, c):
                answer = await each.requests.request(
                    a.peer_id, NAME, b"hello again", deadline=30.0, max_response_bytes=64
                )
                assert answer == b"hello again"


async def test_address_book_replaces_a_lost_bootstrap_peer(tmp_path):
    async with host(tmp_path / "a") as a:
        known = a.listen_addrs
        async with (
            host(tmp_path / "b", initial_peers=known) as b,
            host(tmp_path / "c", initial_peers=known) as c,
        ):
            await until(lambda: len(b.connected()) == len(c.connected()) == 2)
    async with host(tmp_path / "b") as b, host(tmp_path / "c") as c:
        await until(lambda: b.connected() == [c.peer_id])
        assert b.statistics().peers.known_by_source["book"] >= 1


async def test_false_addresses_cost_few_dials(tmp_path):
    """The hostile peer claims addresses of others, of no node, of the honest node, and too many.
    The honest node keeps valid ones and stays connected."""
    async with hosts(tmp_path, 2) as (honest, liar):

        async def lie(peer: str, data: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            addresses = [
                PeerAddresses(honest.peer_id, ["/ip4/127.0.0.1/tcp/1"]),
                PeerAddresses("12D3KooWnonsense", ["/ip4/127.0.0.1/tcp/1"]),
                PeerAddresses(
                    liar.peer_id,
                    [
                        "/dns4/localhost/tcp/22",
                        "/ip4/0.0.0.0/tcp/22",
                        "/ip4/169.254.169.254/tcp/80",
                        "x",
                    ],
                ),
            ]
            return codec.encode(NeighboursResponse(bytes(32), addresses, [], [], b""))

        liar.requests.serve(
            ids.NEIGHBOURS_PROTOCOL, lie, max_request_bytes=9999, max_response_bytes=99999
        )
        before = honest.statistics().peers.known
        await honest.neighbours.ask(liar.peer_id)
        assert honest.statistics().peers.known == before
        assert honest.statistics().reported_addresses["malformed"] == 2
        assert honest.statistics().reported_addresses["out_of_reach"] == 3


async def test_accepts_a_claimed_port_but_no_foreign_address(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        await until(lambda: server.peers.get(client.peer_id).addresses != [])
        server.peers.get(client.peer_id).addresses.clear()
        good = ["/ip4/0.0.0.0/tcp/7001", "/ip4/127.0.0.1/tcp/7002"]
        bad = ["/ip4/8.8.8.8/tcp/53", "/dns4/victim.example/tcp/80", "/ip4/127.0.0.1/tcp/0"]
        await ask(client, server, NeighboursRequest(bytes(32), bad + good, b"", b"", 0))
        assert server.peers.get(client.peer_id).addresses == [
            "/ip4/127.0.0.1/tcp/7001",
            "/ip4/127.0.0.1/tcp/7002",
        ]
