"""Bulk transfers between real hosts on loopback: both honest, or one that lies or stalls."""

import contextlib
import os
import tracemalloc

import pytest
import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.api import Declined
from swarmnode.p2p.bulk import BulkSource, FileSink, MemorySink
from swarmnode.p2p.stream_calls import LENGTH, frame, read_frame
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.messages import BulkManifest, BulkManifestResponse, BulkResponse
from tests.support.hosts import hosts
from tests.support.waiting import until

TRANSFER = b"t" * 32
KIB, MIB = 2**10, 2**20
CHUNK = 4 * KIB


def offer(server, size: int, chunk_bytes: int = CHUNK, **options) -> tuple[BulkSource, MemorySink]:
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


def framed(message) -> bytes:
    return frame(codec.encode(message))


def lie(liar, answer: bytes, *, then: str = "close") -> None:
    """Make `liar` send `answer` to every request for chunks, and then close or go silent."""

    async def on_stream(stream) -> None:
        await read_frame(stream, limits.BULK_REQUEST_BYTES)
        with contextlib.suppress(PeerError):  # the client resets the stream
            await stream.write(answer)
            if then == "silence":
                await trio.sleep_forever()
            await stream.close()

    liar.host.set_handler(ids.BULK_PROTOCOL, on_stream)


# -- claims about the content


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (BulkManifest(TRANSFER, 3 * CHUNK, CHUNK, bytes(64)), "bounds"),  # one hash missing
        (BulkManifest(TRANSFER, 2**50, CHUNK, bytes(96)), "bounds"),
        (BulkManifest(b"o" * 32, 3 * CHUNK, CHUNK, bytes(96)), "bounds"),  # of another transfer
        # valid, but not the agreed chunk size
        (BulkManifest(TRANSFER, 3 * CHUNK, CHUNK, bytes(96)), "bounds"),
        (b"\x84garbage", "schema"),
        (b"\x84\xa8transfer", "malformed"),
        (bytes(limits.BULK_MANIFEST_BYTES + 1), "bounds"),
    ],
)
async def test_rejects_a_false_manifest(tmp_path, manifest, reason):
    async def handler(peer: str, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return codec.encode(
            BulkManifestResponse(
                "ok", manifest if isinstance(manifest, bytes) else codec.encode(manifest)
            )
        )

    async with hosts(tmp_path, 2) as (server, client):
        server.requests.serve(
            ids.BULK_MANIFEST_PROTOCOL, handler, max_request_bytes=64, max_response_bytes=2**21
        )
        with pytest.raises(BadMessage, match=reason):
            await client.bulk.manifest(server.peer_id, TRANSFER, root=bytes(32))


async def test_wrong_chunk_is_rejected_and_earlier_chunks_stay(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        source, sink = offer(server, 8 * CHUNK)
        content = bytearray(b"".join(map(bytes, (source.chunk(index) for index in range(8)))))
        content[5 * CHUNK + 17] ^= 1
        lie(server, framed(BulkResponse("ok", source.size)) + bytes(content))
        with pytest.raises(BadMessage, match="hash"):
            await fetch(client, server, sink)
        assert {0, 1, 2, 3, 4}.isdisjoint(sink.missing())
        assert 5 in sink.missing()
        assert client.bulk.statistics().fetched == {"hash": 1}
        assert client.reputation.rejections(server.peer_id) == 1


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (framed(BulkResponse("ok", 8 * CHUNK + 1)), "malformed"),
        (framed(BulkResponse("ok", 2**35)), "malformed"),
        (LENGTH.pack(2**32 - 1), "malformed"),
        (LENGTH.pack(5) + b"\xff\xff\xff\xff\xff", "malformed"),
        (framed(BulkResponse("busy", 0)), "busy"),
        # and the rest never arrives
        (framed(BulkResponse("ok", 8 * CHUNK)) + bytes(3 * CHUNK), "hash"),
    ],
)
async def test_mismatched_answer_ends_the_request(tmp_path, answer, outcome):
    async with hosts(tmp_path, 2) as (server, client):
        _, sink = offer(server, 8 * CHUNK)
        lie(server, answer)
        with pytest.raises(PeerError):
            await fetch(client, server, sink)
        assert len(sink.missing()) == 8
        assert client.bulk.statistics().fetched == {outcome: 1}


async def test_does_not_read_beyond_the_announced_size(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        source, sink = offer(server, 8 * CHUNK)
        content = b"".join(map(bytes, (source.chunk(index) for index in range(8))))
        lie(server, framed(BulkResponse("ok", source.size)) + content + bytes(4 * MIB))
        await fetch(client, server, sink)
        assert bytes(sink.data) == content
        assert client.bulk.statistics().received_bytes == source.size
        await until(lambda: client.connected() == [server.peer_id])


# -- stopped peers


async def test_stalled_peer_costs_only_its_own_deadline(tmp_path):
    async with hosts(tmp_path, 3) as (server, client, other):
        source, sink = offer(server, 8 * CHUNK)
        _, theirs = offer(other, 8 * CHUNK)
        answer = framed(BulkResponse("ok", source.size)) + bytes(source.chunk(0)) + bytes(100)
        lie(server, answer, then="silence")
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_times_out, client, server, sink)
            await until(lambda: other.peer_id in client.connected())
            await fetch(client, other, theirs)
            assert theirs.complete
        assert trio.current_time() - began < 10
        assert sink.missing() == list(range(1, 8))
        assert client.bulk.statistics().fetched["timeout"] == 1
        assert client.reputation.rejections(server.peer_id) == 0  # slowness is not an offence


async def _times_out(client, server, sink) -> None:
    with pytest.raises(PeerTimeout):
        await fetch(client, server, sink, deadline=1.0)
