"""Bulk transfers with peers that lie, stall, die, flood and forge, over real connections."""

import contextlib
import os

import pytest
import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.bulk import BulkSource, MemorySink
from swarmnode.p2p.stream_calls import LENGTH, frame, read_frame
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.messages import BulkManifest, BulkManifestResponse, BulkResponse
from tests.support.hosts import hosts
from tests.support.waiting import until

TRANSFER = b"t" * 32
KIB, MIB = 2**10, 2**20
CHUNK = 4 * KIB


def framed(message) -> bytes:
    return frame(codec.encode(message))


def honest(server, chunks: int = 8, chunk_bytes: int = CHUNK) -> tuple[BulkSource, MemorySink]:
    source = BulkSource(os.urandom(chunks * chunk_bytes), chunk_bytes=chunk_bytes)
    server.bulk.offer(TRANSFER, source)
    return source, MemorySink(source.manifest(TRANSFER), limit=source.size)


async def fetch(client, server, sink, deadline: float = 20.0) -> None:
    await client.bulk.fetch(server.peer_id, TRANSFER, sink.manifest, sink, deadline=deadline)


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
        source, sink = honest(server)
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
        _, sink = honest(server)
        lie(server, answer)
        with pytest.raises(PeerError):
            await fetch(client, server, sink)
        assert len(sink.missing()) == 8
        assert client.bulk.statistics().fetched == {outcome: 1}


async def test_does_not_read_beyond_the_announced_size(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        source, sink = honest(server)
        content = b"".join(map(bytes, (source.chunk(index) for index in range(8))))
        lie(server, framed(BulkResponse("ok", source.size)) + content + bytes(4 * MIB))
        await fetch(client, server, sink)
        assert bytes(sink.data) == content
        assert client.bulk.statistics().received_bytes == source.size
        await until(lambda: client.connected() == [server.peer_id])


# -- stopped peers


async def test_stalled_peer_costs_only_its_own_deadline(tmp_path):
    async with hosts(tmp_path, 3) as (server, client, other):
        source, sink = honest(server)
        _, theirs = honest(other)
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
