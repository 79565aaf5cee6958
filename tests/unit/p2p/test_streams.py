"""Long-lived streams between two real hosts: integrity, waiting, cancellation, limits."""

import contextlib

import pytest
import trio

from swarmnode.errors import PeerError, PeerTimeout
from swarmnode.p2p import network as network_module
from swarmnode.p2p import streams as streams_module
from swarmnode.p2p.guards import yamux
from swarmnode.p2p.library.streams import Stream
from tests.support.hosts import ask, hosts, serve_echo
from tests.support.waiting import still, until

PROTOCOL = "/test/stream/1"


@contextlib.asynccontextmanager
async def joined(directory, *, per_peer=4):
    """Open two hosts and a stream between them: (server, client, server's end, client's end)."""
    arrived = []
    async with hosts(directory, 2) as (server, client):
        server.streams.serve(PROTOCOL, arrived.append, concurrent=8, per_peer=per_peer)
        local = await client.streams.open(server.peer_id, PROTOCOL, deadline=5)
        await local.send(b"hello")
        await until(lambda: arrived)
        assert await arrived[0].receive() == b"hello"
        yield server, client, arrived[0], local


async def drain(stream, count):
    data = bytearray()
    while len(data) < count and (more := await stream.receive()):
        data += more
    return bytes(data)


async def receive_for_ever(stream):
    while True:
        await stream.receive()


async def send_for_ever(stream, data):
    while True:
        await stream.send(data)


async def test_both_directions_run_and_end_separately(tmp_path):
    async with joined(tmp_path) as (server, client, remote, local):
        there, back = bytes(range(256)) * 4096, bytes(reversed(range(256))) * 4096
        got = {}

        async def send(stream, data):
            for at in range(0, len(data), 100_000):
                await stream.send(data[at : at + 100_000])
            stream.finish()

        async def receive(name, stream, count):
            got[name] = await drain(stream, count)
            assert await stream.receive() == b""

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, local, there)
            nursery.start_soon(send, remote, back)
            nursery.start_soon(receive, "there", remote, len(there))
            nursery.start_soon(receive, "back", local, len(back))
        assert got == {"there": there, "back": back}
        with trio.fail_after(60):
            await local.closed.wait()
            await remote.closed.wait()
        await until(
            lambda: client.streams.statistics().open == server.streams.statistics().open == 0
        )
        assert local.sent == remote.received == len(there) + 5


async def test_slow_receiver_blocks_only_its_stream(tmp_path, monkeypatch):
    """Longer than WINDOW_STALL_SECONDS, so the stream must raise its own patience."""
    monkeypatch.setattr(yamux, "WINDOW_STALL_SECONDS", 0.2)
    async with joined(tmp_path) as (server, client, remote, local):
        serve_echo(server)
        data = bytes(64) * 2**14  # 1 MiB, 32 times: far beyond the window
        async with trio.open_nursery() as nursery:

            async def send():
                for _ in range(32):
                    await local.send(data)
                local.finish()

            nursery.start_soon(send)
            await until(lambda: local.sent > 0)
            assert await still(lambda: local.sent) < 16 * 2**20
            assert await ask(client, server.peer_id, deadline=20) == b"x"
            assert len(await drain(remote, 32 * len(data))) == 32 * len(data)


async def test_a_cancelled_receive_loses_nothing(tmp_path):
    async with joined(tmp_path) as (_, _, remote, local):
        data = bytes(range(256)) * 8192
        got = bytearray()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(local.send, data)
            with trio.fail_after(60):
                while len(got) < len(data):
                    with trio.move_on_after(0.001):
                        got += await remote.receive()
        assert got == data


async def test_reset_reaches_both_ends(tmp_path):
    async with joined(tmp_path) as (_, _, remote, local):
        local.reset("had enough")
        with trio.fail_after(60):
            with pytest.raises(PeerError):
                await remote.receive()
            with pytest.raises(PeerError, match="had enough"):
                await local.receive()
            with pytest.raises(PeerError):
                await local.send(b"more")
            await local.closed.wait()
            await remote.closed.wait()


async def test_lost_peer_breaks_the_stream(tmp_path):
    async with joined(tmp_path) as (server, client, remote, local):
        client.disconnect(server.peer_id)
        with trio.fail_after(60):
            with pytest.raises(PeerError):
                await receive_for_ever(remote)
            with pytest.raises(PeerError):
                await send_for_ever(local, b"x")


async def test_stalled_stream_is_reset(tmp_path, monkeypatch):
    monkeypatch.setattr(streams_module, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(streams_module, "WATCH_SECONDS", 0.02)
    async with joined(tmp_path) as (_, client, remote, local):
        looks, is_gone = [], Stream.is_gone
        monkeypatch.setattr(
            Stream,
            "is_gone",
            property(lambda stream: looks.append(trio.current_time()) or is_gone.fget(stream)),
        )
        # watched for long, and idle is not stalled
        await until(lambda: len(looks) > 2 and looks[-1] - looks[0] > 2 * 0.3)
        await local.send(b"still there")
        assert await remote.receive() == b"still there"
        with trio.fail_after(60), pytest.raises(PeerError, match="nothing moved"):
            await send_for_ever(local, bytes(2**20))
        await until(lambda: client.streams.statistics().stalled == 1)


async def test_excess_streams_are_refused_at_once(tmp_path):
    async with joined(tmp_path, per_peer=1) as (server, client, remote, local):
        # before or after both have agreed on a protocol
        with trio.fail_after(60), pytest.raises(PeerError):
            await (await client.streams.open(server.peer_id, PROTOCOL, deadline=5)).receive()
        assert server.streams.statistics().refused == {"busy": 1}
        local.finish()
        remote.finish()
        with trio.fail_after(60):
            while await remote.receive():
                pass
            while await local.receive():
                pass
            await remote.closed.wait()
        await until(lambda: server.streams.statistics().open == 0)
        third = await client.streams.open(server.peer_id, PROTOCOL, deadline=5)
        await third.send(b"now")
        await until(lambda: server.streams.statistics().accepted == {PROTOCOL: 2})


async def test_opening_to_an_unknown_peer_fails(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        with pytest.raises(PeerError):
            await client.streams.open(
                "12D3KooWGC6TvWhfagpX6wvJHxYvKpPzAkRjHhkQsbnNkzDDpwU3", PROTOCOL, deadline=5
            )
        with pytest.raises(PeerError):
            await client.streams.open(server.peer_id, "/test/unknown/1", deadline=5)
        with pytest.raises(PeerTimeout):
            await client.streams.open(server.peer_id, PROTOCOL, deadline=0.0)


async def test_pinned_peer_is_redialled_and_not_pruned(tmp_path, monkeypatch):
    monkeypatch.setattr(network_module, "TARGET_PEERS", 1)
    async with hosts(tmp_path, 2) as (server, client):
        client.pin([server.peer_id, "not a peer id", client.peer_id])
        tags = client.host.library.get_network().tag_store
        assert [each.to_base58() for each in tags.get_protected_peers()] == [server.peer_id]
        client.disconnect(server.peer_id)
        await until(lambda: not client.connected())
        await until(lambda: client.connected() == [server.peer_id])
        client.pin([])
        assert not tags.get_protected_peers()
