"""Real hosts finding and finding again: exchange, the book, outages."""

import pytest
import trio

from swarmnode.p2p import turnover
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.messages import PeerAddresses, PeersRequest, PeersResponse
from tests.support.hosts import echo, host, hosts
from tests.support.waiting import until

pytestmark = pytest.mark.slow

NAME = "/test/echo/1"
OTHER = bytes([7]) * 32


async def test_nodes_that_share_a_bootstrap_peer_find_each_other(tmp_path):
    async with hosts(tmp_path, 4) as networks:
        await until(lambda: all(len(network.connected()) == 3 for network in networks))
        assert sum(network.statistics().exchange["learned"] for network in networks) >= 3


async def test_a_full_bootstrap_peer_lets_newcomers_in_and_they_find_others(tmp_path, monkeypatch):
    monkeypatch.setattr(turnover, "SETTLED_SECONDS", 0.5)
    # the first has places for half of them
    async with hosts(tmp_path, 8, max_connections=4) as networks:
        met = {network.peer_id: set() for network in networks}

        def all_met_others():
            for network in networks:
                met[network.peer_id] |= set(network.connected())
            return all(others - {networks[0].peer_id} for others in met.values())

        await until(all_met_others)
        assert networks[0].statistics().peers.dropped["full"] > 0


async def test_nodes_of_different_swarms_do_not(tmp_path):
    async with host(tmp_path / "a") as a, host(tmp_path / "b", initial_peers=a.listen_addrs) as b:
        async with host(tmp_path / "c", initial_peers=a.listen_addrs, swarm=OTHER) as c:
            await until(
                lambda: (
                    c.statistics().exchange["other_swarm"]
                    == a.statistics().exchange["other_swarm"]
                    == 1
                )
            )
            assert set(c.connected()) == {a.peer_id}
            assert b.peers.get(c.peer_id) is None


async def test_a_stranger_to_the_swarm_is_told_of_nobody(tmp_path):
    async with hosts(tmp_path, 3) as (a, b, c):
        await until(lambda: all(len(network.connected()) == 2 for network in (a, b, c)))
        for swarm, told in ((bytes(32), {c.peer_id}), (OTHER, set())):
            data, limit = codec.encode(PeersRequest(swarm, [])), limits.PEERS_RESPONSE_BYTES
            answer = await b.requests.request(
                a.peer_id, ids.PEERS_PROTOCOL, data, deadline=5.0, max_response_bytes=limit
            )
            assert {each.peer for each in codec.decode(answer, PeersResponse, limit).peers} == told


async def test_a_bootstrap_peer_that_restarts_is_found_again_and_answers(tmp_path):
    async with host(tmp_path / "a") as a:
        known = a.listen_addrs
    async with (
        host(tmp_path / "b", initial_peers=known) as b,
        host(tmp_path / "c", initial_peers=known) as c,
    ):
        async with host(tmp_path / "a"):
            await until(lambda: len(b.connected()) == len(c.connected()) == 2)
        # they still have each other
        await until(lambda: len(b.connected()) == len(c.connected()) == 1)
        failures = b.statistics().peers.dial_failures
        # about two seconds without it
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


async def test_the_last_node_left_goes_on_and_takes_back_who_returns(tmp_path):
    async with host(tmp_path / "a") as a:
        async with (
            host(tmp_path / "b", initial_peers=a.listen_addrs) as b,
            host(tmp_path / "c", initial_peers=a.listen_addrs),
        ):
            await until(lambda: len(a.connected()) == len(b.connected()) == 2)
        await until(lambda: a.connected() == [])
        # it looks for them itself, by what they told
        await until(lambda: a.statistics().peers.dial_failures >= 2)
        async with host(tmp_path / "b"):  # without a bootstrap list, at its old port
            await until(lambda: len(a.connected()) == 1)


async def test_the_book_replaces_a_bootstrap_peer_that_is_gone(tmp_path):
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


async def test_a_liar_in_the_peer_exchange_costs_a_few_dials_only(tmp_path):
    """It claims addresses of others, of nobody, of us, and too many; an honest node keeps what it
    may dial and stays connected."""
    async with hosts(tmp_path, 2) as (honest, liar):

        async def lie(peer: str, data: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            told = [
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
            return codec.encode(PeersResponse(bytes(32), told))

        liar.requests.serve(
            ids.PEERS_PROTOCOL, lie, max_request_bytes=9999, max_response_bytes=99999
        )
        before = honest.statistics().peers.known
        await honest.discovery.exchange.ask(liar.peer_id)
        assert honest.statistics().peers.known == before
        assert honest.statistics().exchange["malformed"] == 2
        assert honest.statistics().exchange["out_of_reach"] == 3


async def test_a_peer_is_believed_its_port_but_not_somebody_elses_address(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        await until(lambda: server.peers.get(client.peer_id).addresses != [])
        server.peers.get(client.peer_id).addresses.clear()
        good = ["/ip4/0.0.0.0/tcp/7001", "/ip4/127.0.0.1/tcp/7002"]
        bad = ["/ip4/8.8.8.8/tcp/53", "/dns4/victim.example/tcp/80", "/ip4/127.0.0.1/tcp/0"]
        data, limit = codec.encode(PeersRequest(bytes(32), bad + good)), limits.PEERS_RESPONSE_BYTES
        await client.requests.request(
            server.peer_id, ids.PEERS_PROTOCOL, data, deadline=5.0, max_response_bytes=limit
        )
        assert server.peers.get(client.peer_id).addresses == [
            "/ip4/127.0.0.1/tcp/7001",
            "/ip4/127.0.0.1/tcp/7002",
        ]


async def test_a_peer_that_asks_for_peers_all_the_time_is_refused_and_kept(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        for _ in range(20):
            await client.discovery.exchange.ask(server.peer_id)
        served = server.statistics().requests.served[ids.PEERS_PROTOCOL]
        assert served["ok"] <= 6
        assert served["failed"] >= 14
        assert server.connected() == [client.peer_id]
