"""Bulk transfers between real hosts on loopback, both honest."""

import os
import tracemalloc

import pytest
import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import Declined
from swarmnode.p2p.bulk import BulkSource, FileSink, MemorySink
from tests.support.hosts import hosts
from tests.support.waiting import until

TRANSFER = b"t" * 32
KIB, MIB = 2**10, 2**20


def offer(
    server, size: int, chunk_bytes: int = 4 * KIB, **options
) -> tuple[BulkSource, MemorySink]:
    source = BulkSource(os.urandom(size), chunk_bytes=chunk_bytes)
    server.bulk.offer(TRANSFER, source, **options)
    return source, MemorySink(source.manifest(TRANSFER), limit=size)


def same(source: BulkSource, sink: MemorySink) -> bool:
    chunks = range(-(-source.size // source.chunk_bytes))
    return sink.complete and all(source.chunk(index) == sink.view(index) for index in chunks)


async def fetch(client, server, sink: MemorySink, deadline: float = 20.0) -> None:
    await client.bulk.fetch(server.peer_id, TRANSFER, sink.manifest, sink, deadline=deadline)


async def test_only_missing_chunks_are_sent(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        source, sink = offer(server, 64 * KIB)
        for index in (0, 3, 4, 15):
            sink.view(index)[:] = source.chunk(index)
            sink.accept(index)
        await fetch(client, server, sink)
        assert same(source, sink)
        assert client.bulk.statistics().received_bytes == 12 * 4 * KIB
        await fetch(client, server, sink)  # nothing is missing: no request
        assert client.bulk.statistics().fetched == {"ok": 1}


async def test_offer_is_fetched_by_its_audience_only(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        for audience in ([], [server.peer_id], [client.peer_id]):
            with pytest.raises(Declined, match="unknown"):
                await client.bulk.manifest(server.peer_id, TRANSFER)
            source, sink = offer(server, 8 * KIB, audience=audience)
        manifest = await client.bulk.manifest(server.peer_id, TRANSFER, root=source.root)
        assert manifest == sink.manifest
        with pytest.raises(BadMessage):
            await client.bulk.manifest(server.peer_id, TRANSFER, root=bytes(32))
        await fetch(client, server, sink)
        assert same(source, sink)
        server.bulk.withdraw(TRANSFER)
        with pytest.raises(Declined, match="unknown"):
            await fetch(client, server, MemorySink(manifest, limit=MIB))


async def test_cancelled_fetch_keeps_the_connection(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        source, sink = offer(server, 8 * MIB, MIB)
        for seconds in (0.0, 0.005, 0.02, 0.04):
            with trio.move_on_after(seconds):
                await fetch(client, server, sink)
            before = bytes(sink.data)
            await trio.sleep(0.02)
            assert bytes(sink.data) == before
            # the server notices the end a little later and is busy until then
            await until(lambda: server.bulk.statistics().serving == 0)
        await fetch(client, server, sink)
        assert same(source, sink)
        assert set(client.bulk.statistics().fetched) == {"ok", "cancelled"}
        assert client.peers.statistics().dials == 1  # never reconnected
        await until(
            lambda: server.bulk.statistics().serving == client.bulk.statistics().fetching == 0
        )


async def test_withdrawal_ends_running_uploads(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        source, sink = offer(server, 32 * MIB, MIB)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_expect_failure, client, server, sink)
            await until(lambda: len(sink.missing()) < 30, interval=0.001)
            server.bulk.withdraw(TRANSFER)
        await until(lambda: server.bulk.statistics().serving == 0)
        # counted once its stream is closed
        await until(lambda: server.bulk.statistics().served == {"withdrawn": 1})
        assert all(
            source.chunk(index) == sink.view(index)
            for index in set(range(32)) - set(sink.missing())
        )


async def _expect_failure(client, server, sink) -> None:
    with pytest.raises(PeerError):
        await fetch(client, server, sink)


async def test_sink_failure_does_not_blame_the_peer(tmp_path):
    class Full(MemorySink):
        def accept(self, index: int) -> None:
            raise OSError("no space left")

    async with hosts(tmp_path, 2) as (server, client):
        source, _ = offer(server, 8 * KIB)
        with pytest.raises(OSError, match="no space"):
            await fetch(client, server, Full(source.manifest(TRANSFER), limit=MIB))
        assert client.reputation.rejections(server.peer_id) == 0
        assert client.connected() == [server.peer_id]


async def test_from_file_to_file_memory_stays_small(tmp_path):
    size = 16 * MIB
    (tmp_path / "source").write_bytes(os.urandom(size))
    source = BulkSource.from_file(tmp_path / "source")
    async with hosts(tmp_path, 2) as (server, client):
        server.bulk.offer(TRANSFER, source)
        sink = FileSink(source.manifest(TRANSFER), tmp_path / "sink", limit=size)
        tracemalloc.start()
        try:
            await fetch(client, server, sink)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        sink.flush()
        assert (tmp_path / "sink").read_bytes() == (tmp_path / "source").read_bytes()
        assert peak < 11 * MIB, "more than Yamux's window of 8 MiB and a chunk at either end"
