"""Requests between two real hosts on loopback."""

import pytest
import trio
from libp2p.peer.id import ID

from swarmnode.errors import PeerError, PeerTimeout
from swarmnode.p2p import requests
from tests.support.hosts import ECHO, LIMITS, ask, host, hosts, serve_echo
from tests.support.waiting import until, wait_connected


def streams(network, peer: str) -> int:
    """Count the open application streams between `network` and `peer`."""
    kept = [
        each.get_streams()
        for each in network.host.library.get_network().get_connections(ID.from_string(peer))
    ]
    return sum(1 for each in kept for stream in each if stream.get_protocol() == ECHO)


async def test_response_is_whole_and_streams_are_closed(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        serve_echo(server)
        for data in (b"", b"x", bytes(range(256)) * 4096):
            assert await ask(client, server.peer_id, data) == data
        assert client.requests.statistics().requests[ECHO] == {"ok": 3}
        await until(lambda: server.requests.statistics().served[ECHO] == {"ok": 3})
        await until(lambda: streams(client, server.peer_id) == streams(server, client.peer_id) == 0)


async def test_cancelled_request_keeps_the_connection(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        # on a busy machine none of those cancelled may be over
        serve_echo(server, per_peer=8)
        data = bytes(1 << 20)
        for delay in (0.0, 0.001, 0.002, 0.004, 0.008, 0.016):
            with trio.move_on_after(delay):
                await ask(client, server.peer_id, data)
        assert await ask(client, server.peer_id, data) == data
        await until(lambda: client.requests.statistics().in_flight == 0)
        assert client.peers.statistics().dials == 1  # never reconnected


async def test_silent_streams_do_not_block_other_peers(tmp_path):
    async with hosts(tmp_path, 6) as (server, *silent, client):
        serve_echo(server, concurrent=8)
        for each in silent:
            for _ in range(2):
                await each.host.open_stream(server.peer_id, ECHO)
            await until(lambda each=each: streams(server, each.peer_id) == 2)
        assert await ask(client, server.peer_id) == b"x"
        await until(lambda: server.requests.statistics().serving == 0)


async def test_urgent_request_skips_the_slots(tmp_path):
    go = trio.Event()

    async def slow(peer: str, data: bytes) -> bytes:
        if data == b"slow":
            await go.wait()
        return data

    async with hosts(tmp_path, 2) as (server, client):
        server.requests.serve(ECHO, slow, **LIMITS, concurrent=1000, per_peer=1000)
        options = {"deadline": 20.0, "max_response_bytes": 9}

        async def fetch():
            await client.requests.request(server.peer_id, ECHO, b"slow", **options)

        async with trio.open_nursery() as nursery:
            for _ in range(2 * requests.OUTBOUND_PER_PEER):
                nursery.start_soon(fetch)
            await until(
                lambda: client.requests.statistics().in_flight == requests.OUTBOUND_PER_PEER
            )
            with pytest.raises(PeerTimeout):
                await ask(client, server.peer_id, deadline=0.5)
            assert (
                await client.requests.request(server.peer_id, ECHO, b"x", **options, urgent=True)
                == b"x"
            )
            go.set()


async def test_dying_peer_is_an_immediate_peer_error(tmp_path):
    async def never(peer: str, data: bytes) -> bytes:
        return await trio.sleep_forever()

    async with host(tmp_path / "client") as client, trio.open_nursery() as nursery:
        async with host(tmp_path / "server", initial_peers=client.listen_addrs) as server:
            server.requests.serve(ECHO, never, **LIMITS)
            await wait_connected(client)
            failed = trio.Event()

            async def one() -> None:
                with pytest.raises(PeerError):
                    await ask(client, server.peer_id, deadline=60.0)
                failed.set()

            nursery.start_soon(one)
            await until(lambda: server.requests.statistics().serving == 1)
        with trio.fail_after(60):
            await failed.wait()
