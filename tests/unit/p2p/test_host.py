"""Opening, closing and refusing connections with real sockets on loopback."""

import socket
from functools import partial

import pytest
import trio

from swarmnode.errors import ConfigError, StateError, Unavailable
from swarmnode.p2p import identity, turnover
from swarmnode.p2p.bulk import BulkSource
from swarmnode.p2p.stream_calls import frame
from swarmnode.wire import codec, ids
from swarmnode.wire.messages import BulkRequest
from tests.support.hosts import ask, host, hosts, serve_echo
from tests.support.waiting import until, wait_connected


def port_of(network) -> int:
    return int(network.listen_addrs[0].split("/")[4])


async def test_the_port_is_chosen_once_and_kept(tmp_path):
    async with host(tmp_path) as network:
        first = port_of(network)
    assert (tmp_path / "port").read_text() == f"{first}\n"
    async with host(tmp_path) as network:
        assert port_of(network) == first


async def test_port_in_use_is_unavailable(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"port {port} .*; set network\.listen_addrs"):
            async with host(tmp_path, listen_addrs=[f"/ip4/127.0.0.1/tcp/{port}"]):
                pytest.fail("listens on a port that is taken")


async def test_foreign_address_is_announced_not_listened_on(tmp_path):
    remedy = (
        r"not an address of this machine; listen on /ip4/0\.0\.0\.0/tcp/9512, and name this one in"
        r" network\.announce_addrs"
    )
    with pytest.raises(Unavailable, match=remedy):
        async with host(tmp_path, listen_addrs=["/ip4/192.0.2.1/tcp/9512"]):
            pytest.fail("listens on an address of another machine")


@pytest.mark.parametrize("text", ["", "x", "70000", "0", "-1", "4001 4002"])
async def test_a_damaged_port_file_is_a_state_error(tmp_path, text):
    (tmp_path / "port").write_text(text)
    with pytest.raises(StateError, match="port"):
        async with host(tmp_path):
            pytest.fail("started")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"listen_addrs": ["/ip4/127.0.0.1/udp/1"]}, "network.listen_addrs"),
        ({"listen_addrs": ["/dns4/localhost/tcp/1"]}, "network.listen_addrs"),
        ({"listen_addrs": []}, "network.listen_addrs"),
        ({"announce_addrs": ["127.0.0.1:4001"]}, "network.announce_addrs"),
        ({"initial_peers": ["/ip4/127.0.0.1/tcp/1"]}, "/p2p/<peer id>"),
        ({"initial_peers": ["/ip4/127.0.0.1/tcp/1/p2p/x"]}, "network.initial_peers"),
    ],
)
async def test_invalid_address_is_one_configuration_error(tmp_path, settings, named):
    with pytest.raises(ConfigError, match=named) as caught:
        async with host(tmp_path, **settings):
            pytest.fail("started")
    assert "\n" not in str(caught.value)


async def test_announced_addresses_replace_listen_addresses(tmp_path):
    async with host(tmp_path, announce_addrs=["/dns4/node.example.org/tcp/4001"]) as network:
        assert network.listen_addrs == [f"/dns4/node.example.org/tcp/4001/p2p/{network.peer_id}"]


async def test_names_of_the_hosts_file_are_found(tmp_path):
    async with host(tmp_path / "a") as a:
        named = a.listen_addrs[0].replace("/ip4/127.0.0.1/", "/dns4/localhost/")
        async with host(tmp_path / "b", initial_peers=[named]) as b:
            await wait_connected(b, 1)


async def test_own_bootstrap_address_is_accepted(tmp_path):
    async with host(tmp_path) as network:
        own = network.listen_addrs[0]
    async with host(tmp_path, initial_peers=[own]) as network:
        assert network.statistics().peers.known == 0


async def test_wrong_key_at_a_bootstrap_address_is_rejected(tmp_path):
    other = identity.load_or_create(tmp_path / "other.key").peer_id
    async with host(tmp_path / "a") as a:
        wrong = a.listen_addrs[0].replace(a.peer_id, other)
        async with host(tmp_path / "b", initial_peers=[wrong]) as b:
            await until(lambda: b.statistics().peers.dial_failures >= 1)
            assert b.connected() == []


async def test_connections_are_bounded(tmp_path):
    async with host(tmp_path / "server", max_connections=2) as server:
        async with trio.open_nursery() as nursery:
            started = []

            async def client(index: int) -> None:
                async with host(
                    tmp_path / str(index), initial_peers=server.listen_addrs
                ) as network:
                    started.append(network)
                    await trio.sleep_forever()

            for index in range(5):
                nursery.start_soon(client, index)
            await until(
                lambda: (
                    len(started) == 5
                    and all(
                        each.statistics().peers.dials >= 2 or each.connected() for each in started
                    )
                )
            )
            assert 1 <= len(server.connected()) <= 2
            nursery.cancel_scope.cancel()


async def test_full_bootstrap_peer_admits_new_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(turnover, "SETTLED_SECONDS", 0.5)
    # The first host has room for half of the nodes.
    async with hosts(tmp_path, 8, max_connections=4) as networks:
        first, met = networks[0], {network.peer_id: set() for network in networks}

        def all_met_others():
            for network in networks:
                met[network.peer_id] |= set(network.connected())
            return all(others - {first.peer_id} for others in met.values())

        await until(all_met_others)
        assert first.statistics().peers.dropped["full"] > 0


async def test_last_received_is_the_time_of_the_last_bytes(tmp_path):
    async with hosts(tmp_path, 2) as (one, other):
        serve_echo(other)
        began = trio.current_time()
        await trio.sleep(0.05)
        await ask(one, other.peer_id)
        for network, peer in ((one, other.peer_id), (other, one.peer_id)):
            assert began + 0.04 < network.last_received(peer) <= trio.current_time()
        assert one.last_received("12D3KooWNobody") is None


async def test_ban_during_handshake_closes_the_connection(tmp_path):
    async with host(tmp_path / "a") as a, host(tmp_path / "b", initial_peers=a.listen_addrs) as b:
        await wait_connected(a)  # the end that dialled knows a moment later
        b.rejected(a.peer_id, "reward", cost=1000.0)
        await until(
            lambda: b.statistics().peers.dials == 1 and a.connected() == b.connected() == []
        )


async def test_the_book_is_saved_when_the_block_is_cancelled(tmp_path):
    async with host(tmp_path / "a") as a:
        with trio.CancelScope() as scope:
            async with host(tmp_path / "b", initial_peers=a.listen_addrs) as b:
                await wait_connected(b)
                scope.cancel()
                await trio.sleep_forever()
    assert a.peer_id in (tmp_path / "b" / "peers.json").read_text()


def link(network, peer):
    """Return the `PeerLink` of a connection, from which `turnover` decides."""
    return next(
        each for each in network.connections.links(lambda peer: False) if each.peer == peer.peer_id
    )


async def test_own_streams_do_not_keep_an_inbound_peer(tmp_path):
    async def never(peer: str, data: bytes) -> bytes:
        return await trio.sleep_forever()

    pings = 0

    async def ping_for_ever(stream):
        nonlocal pings
        while True:
            await stream.write(bytes(32))
            await stream.read_exactly(32)
            pings += 1

    async with hosts(tmp_path, 2) as (server, guest), trio.open_nursery() as nursery:
        limits = {"max_request_bytes": 9, "max_response_bytes": 9}
        for network in (server, guest):
            network.requests.serve("/test/never/1", never, **limits)
        for protocol in (ids.NEIGHBOURS_PROTOCOL, ids.BULK_PROTOCOL, "/test/never/1"):
            await guest.host.open_stream(server.peer_id, protocol)
        nursery.start_soon(
            ping_for_ever, await guest.host.open_stream(server.peer_id, "/ipfs/ping/1.0.0")
        )
        with trio.move_on_after(15.0):  # by then the requests of the server itself have ended
            await until(lambda: pings and link(server, guest).spare)
        assert link(server, guest).spare
        assert link(server, guest).inbound

        never_answered = partial(ask, protocol="/test/never/1", deadline=60.0)
        nursery.start_soon(never_answered, server, guest.peer_id)
        await until(lambda: guest.requests.statistics().serving)
        assert not link(server, guest).spare
        nursery.cancel_scope.cancel()


async def test_inbound_peer_with_granted_transfer_is_kept(tmp_path):
    async with hosts(tmp_path, 2) as (server, guest):
        source = BulkSource(bytes(1 << 20), chunk_bytes=1 << 20)
        server.bulk.offer(bytes(32), source)
        await until(lambda: link(server, guest).spare)
        stream = await guest.host.open_stream(server.peer_id, ids.BULK_PROTOCOL)
        await stream.write(frame(codec.encode(BulkRequest(bytes(32), source.root, b"\x01"))))
        await until(lambda: server.bulk.statistics().serving)
        assert not link(server, guest).spare
        await stream.reset()
        await until(lambda: link(server, guest).spare)


async def test_bytes_are_counted_by_protocol_and_direction(tmp_path):
    async def answer(peer: str, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return bytes(3000)

    async with hosts(tmp_path, 2) as (server, client):
        server.requests.serve("/test/1", answer, max_request_bytes=1000, max_response_bytes=3000)
        await ask(client, server.peer_id, bytes(1000), protocol="/test/1")
        await until(lambda: server.statistics().traffic.sent.get("/test/1") == 3004)
        assert (
            client.statistics().traffic.sent["/test/1"]
            == server.statistics().traffic.received["/test/1"]
            == 1004
        )
        assert client.statistics().traffic.received["/test/1"] == 3004
