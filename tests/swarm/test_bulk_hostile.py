"""Bulk transfers with peers that lie, stall, die, flood and forge, over real sockets."""

import contextlib
import os
import socket
import ssl
import struct

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from libp2p.security.tls.certificate import generate_self_signed_cert

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p import identity, reputation
from swarmnode.p2p.bulk import BulkSource, Declined, MemorySink, listener, serving
from swarmnode.p2p.conversations import LENGTH, frame, read_frame
from swarmnode.p2p.library.certificates import Contexts
from swarmnode.wire import bulk, codec, ids, limits
from swarmnode.wire.messages import (
    BulkManifest,
    BulkManifestResponse,
    BulkRequest,
    BulkResponse,
    BulkSocketRequest,
    BulkSocketResponse,
)
from tests.support.hosts import host, hosts
from tests.support.waiting import until

TRANSFER = b"t" * 32
KIB, MIB = 2**10, 2**20
CHUNK = 4 * KIB
PATHS = pytest.mark.parametrize("path", ["stream", "socket"])


def framed(message) -> bytes:
    return frame(codec.encode(message))


def honest(server, chunks: int = 8, chunk_bytes: int = CHUNK) -> tuple[BulkSource, MemorySink]:
    source = BulkSource(os.urandom(chunks * chunk_bytes), chunk_bytes=chunk_bytes)
    server.bulk.offer(TRANSFER, source)
    return source, MemorySink(source.manifest(TRANSFER), limit=source.size)


async def fetch(client, server, sink, deadline: float = 20.0, path=None) -> None:
    await client.bulk.fetch(
        server.peer_id, TRANSFER, sink.manifest, sink, deadline=deadline, path=path
    )


@contextlib.asynccontextmanager
async def liar(directory, liar_host, answer: bytes, *, then: str = "close"):
    """`liar_host` sends `answer` to whoever asks for chunks, on both paths, and then closes or goes
    silent."""

    async def on_stream(stream) -> None:
        await read_frame(stream, limits.BULK_REQUEST_BYTES)
        with contextlib.suppress(PeerError):  # the client resets when it has seen enough
            await stream.write(answer)
            if then == "silence":
                await trio.sleep_forever()
            await stream.close()

    async def on_socket(tcp: trio.SocketStream) -> None:
        stream = trio.SSLStream(tcp, contexts.server, server_side=True, https_compatible=True)
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await stream.receive_some(1)
            await stream.send_all(answer)
            if then == "silence":
                await trio.sleep_forever()
            await tcp.aclose()

    async def on_token(peer: str, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return codec.encode(BulkSocketResponse("ok", port, bytes(32)))

    contexts = Contexts(identity.load_or_create(directory / "identity.key").key_pair)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    liar_host.host.set_handler(ids.BULK_PROTOCOL, on_stream)
    liar_host.requests.serve(
        ids.BULK_SOCKET_PROTOCOL, on_token, max_request_bytes=128, max_response_bytes=96
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, on_socket, listeners)
        yield
        nursery.cancel_scope.cancel()


# -- what is said of the content


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (BulkManifest(TRANSFER, 3 * CHUNK, CHUNK, bytes(64)), "bounds"),  # a hash too few
        (BulkManifest(TRANSFER, 2**50, CHUNK, bytes(96)), "bounds"),
        (BulkManifest(b"o" * 32, 3 * CHUNK, CHUNK, bytes(96)), "bounds"),  # of another transfer
        # sound, but not what was agreed on
        (BulkManifest(TRANSFER, 3 * CHUNK, CHUNK, bytes(96)), "bounds"),
        (b"\x84garbage", "schema"),
        (b"\x84\xa8transfer", "malformed"),
        (bytes(limits.BULK_MANIFEST_BYTES + 1), "bounds"),
    ],
)
async def test_a_manifest_that_lies_is_refused(tmp_path, manifest, reason):
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


@PATHS
async def test_a_wrong_chunk_is_not_accepted_and_what_came_before_it_stays(tmp_path, path):
    async with hosts(tmp_path, 2) as (server, client):
        source, sink = honest(server)
        content = bytearray(b"".join(map(bytes, (source.chunk(index) for index in range(8)))))
        content[5 * CHUNK + 17] ^= 1
        async with liar(
            tmp_path / "0", server, framed(BulkResponse("ok", source.size)) + bytes(content)
        ):
            with pytest.raises(BadMessage, match="hash"):
                await fetch(client, server, sink, path=path)
        assert {0, 1, 2, 3, 4}.isdisjoint(sink.missing())
        assert 5 in sink.missing()
        assert client.bulk.statistics().fetched[path] == {"hash": 1}
        assert client.reputation.rejections(server.peer_id) == 1


@PATHS
@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (framed(BulkResponse("ok", 8 * CHUNK + 1)), "malformed"),
        (framed(BulkResponse("ok", 2**35)), "malformed"),
        (LENGTH.pack(2**32 - 1), "malformed"),
        (LENGTH.pack(5) + b"\xff\xff\xff\xff\xff", "malformed"),
        (framed(BulkResponse("busy", 0)), "busy"),
        # and the rest never comes
        (framed(BulkResponse("ok", 8 * CHUNK)) + bytes(3 * CHUNK), "hash"),
    ],
)
async def test_an_answer_that_does_not_fit_the_request_ends_it(tmp_path, path, answer, outcome):
    async with hosts(tmp_path, 2) as (server, client):
        _, sink = honest(server)
        async with liar(tmp_path / "0", server, answer):
            with pytest.raises(PeerError):
                await fetch(client, server, sink, path=path if outcome != "malformed" else "stream")
        assert len(sink.missing()) == 8
        assert (
            client.bulk.statistics().fetched[path if outcome == "hash" else "stream"].get(outcome)
            == 1
        )


async def test_more_than_was_announced_is_not_read(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        for path in ("stream", "socket"):
            source, sink = honest(server)
            content = b"".join(map(bytes, (source.chunk(index) for index in range(8))))
            async with liar(
                tmp_path / "0",
                server,
                framed(BulkResponse("ok", source.size)) + content + bytes(4 * MIB),
            ):
                await fetch(client, server, sink, path=path)
            assert bytes(sink.data) == content
            assert client.bulk.statistics().received_bytes[path] == source.size
        await until(lambda: client.connected() == [server.peer_id])


# -- peers that stop


@PATHS
async def test_a_peer_that_stalls_costs_the_deadline_and_nothing_of_others(tmp_path, path):
    async with hosts(tmp_path, 3) as (server, client, other):
        source, sink = honest(server)
        _, theirs = honest(other)
        answer = framed(BulkResponse("ok", source.size)) + bytes(source.chunk(0)) + bytes(100)
        async with liar(tmp_path / "0", server, answer, then="silence"):
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_times_out, client, server, sink, path)
                await until(lambda: other.peer_id in client.connected())
                await fetch(client, other, theirs)
                assert theirs.complete
            assert trio.current_time() - began < 10
        assert sink.missing() == list(range(1, 8))
        assert client.bulk.statistics().fetched[path]["timeout"] == 1
        assert client.reputation.rejections(server.peer_id) == 0  # slowness proves nothing


async def _times_out(client, server, sink, path) -> None:
    with pytest.raises(PeerTimeout):
        await fetch(client, server, sink, deadline=1.0, path=path)


@PATHS
async def test_after_a_death_in_the_middle_only_the_rest_comes_from_elsewhere(tmp_path, path):
    async with hosts(tmp_path, 3) as (dying, client, other):
        source, sink = honest(dying)
        other.bulk.offer(TRANSFER, source)
        await until(lambda: other.peer_id in client.connected())
        partial = (
            framed(BulkResponse("ok", source.size))
            + b"".join(bytes(source.chunk(index)) for index in range(3))
            + bytes(5)
        )
        async with liar(tmp_path / "0", dying, partial):
            with pytest.raises(PeerError):
                await fetch(client, dying, sink, path=path)
        assert sink.missing() == [3, 4, 5, 6, 7]
        before = client.bulk.statistics().received_bytes[path]
        await fetch(client, other, sink, path=path)
        assert sink.complete
        assert client.bulk.statistics().received_bytes[path] - before == 5 * CHUNK


@PATHS
async def test_a_reader_that_does_not_read_gives_its_slot_back(tmp_path, monkeypatch, path):
    monkeypatch.setattr(serving, "STALL_SECONDS", 0.5)
    async with hosts(tmp_path, 2) as (server, client):
        source, sink = honest(server, 32, MIB)
        request = BulkRequest(TRANSFER, source.root, bulk.pack_wanted(range(32), 32))
        async with contextlib.AsyncExitStack() as stack:
            if path == "stream":
                stream = await client.host.open_stream(server.peer_id, ids.BULK_PROTOCOL)
                stack.push_async_callback(stream.reset)
                await stream.write(framed(request))
            else:
                connection = await call(stack, server, client, tmp_path / "1")
                await connection.send_all(
                    await token(client, server, source.root) + framed(request)
                )
            await until(lambda: server.bulk.statistics().serving == 1)
            await until(lambda: server.bulk.statistics().serving == 0)
        assert server.bulk.statistics().served[path] == {"stalled": 1}
        monkeypatch.undo()
        await fetch(client, server, sink)
        assert sink.complete


# -- peers that flood


async def test_a_hundred_transfers_at_once_leave_room_for_others(tmp_path):
    async with hosts(tmp_path, 3) as (server, greedy, client):
        source, sink = honest(server, 16, MIB)
        await until(lambda: server.peer_id in client.connected())
        most = 0
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(
                    _grab, greedy, server, framed(BulkRequest(TRANSFER, source.root, b"\xff\xff"))
                )
            await until(lambda: server.bulk.statistics().serving == serving.SERVING_PER_PEER)
            await fetch(client, server, sink, path="stream")
            most = max(most, server.bulk.statistics().serving)
            assert sink.complete
            nursery.cancel_scope.cancel()
        assert most <= serving.SERVING_PER_PEER + 1
        assert server.bulk.statistics().served["stream"]["busy"] >= 90


async def _grab(greedy, server, request: bytes) -> None:
    """Asks, and reads nothing."""
    with contextlib.suppress(PeerError):
        stream = await greedy.host.open_stream(server.peer_id, ids.BULK_PROTOCOL)
        await stream.write(request)
        await trio.sleep_forever()


async def test_garbage_and_silence_on_the_port_keep_nobody_else_out(tmp_path, monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.5)
    async with hosts(tmp_path, 2) as (server, client):
        _, sink = honest(server)
        port = server.bulk.statistics().port
        async with contextlib.AsyncExitStack() as stack:
            for number in range(30):
                tcp = await trio.open_tcp_stream("127.0.0.1", port, local_address="127.0.0.2")
                await stack.enter_async_context(tcp)
                with contextlib.suppress(trio.BrokenResourceError):
                    await tcp.send_all(
                        [
                            os.urandom(300),
                            b"\x16\x03\x01\xff\xff",
                            b"GET / HTTP/1.1\r\n\r\n",
                            b"\0",
                        ][number % 4]
                    )
            await fetch(client, server, sink, path="socket")  # from another address
            assert sink.complete
            await until(lambda: server.bulk.threads.borrowed_tokens == 0)
        outcomes = server.bulk.statistics().handshakes
        assert outcomes["crowded"] > 0
        assert outcomes["refused"] + outcomes["late"] + outcomes["crowded"] == 30
        assert outcomes["ok"] == 1


async def test_handshakes_under_way_are_bounded_over_all_addresses(tmp_path):
    async with hosts(tmp_path, 1) as (server,), contextlib.AsyncExitStack() as stack:
        port = server.bulk.statistics().port
        for number in range(listener.HANDSHAKES + 8):
            source = f"127.0.0.{10 + number // 3}"
            await stack.enter_async_context(
                await trio.open_tcp_stream("127.0.0.1", port, local_address=source)
            )
        await until(lambda: server.bulk.statistics().handshakes.get("crowded") == 8)
        assert server.bulk.threads.borrowed_tokens == listener.HANDSHAKES


# -- peers that are somebody else


async def call(
    stack, server, client, directory=None, context: ssl.SSLContext | None = None
) -> trio.SSLStream:
    """A TLS connection to the server's port, with the certificate of the node in `directory`, or
    what `context` has."""
    tcp = await trio.open_tcp_stream("127.0.0.1", server.bulk.statistics().port)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
    context = (
        context or Contexts(identity.load_or_create(directory / "identity.key").key_pair).client
    )
    stream = trio.SSLStream(tcp, context, https_compatible=True)
    stack.callback(tcp.socket.close)
    return stream


async def token(client, server, root: bytes) -> bytes:
    answer = await client.requests.request(
        server.peer_id,
        ids.BULK_SOCKET_PROTOCOL,
        codec.encode(BulkSocketRequest(TRANSFER, root)),
        deadline=10,
        max_response_bytes=96,
    )
    return codec.decode(answer, BulkSocketResponse, 96).token


async def answered(connection: trio.SSLStream, data: bytes) -> bool:
    """Whether the server says anything."""
    try:
        await connection.send_all(data)
        return bool(await connection.receive_some(1))
    except trio.BrokenResourceError:
        return False


def anonymous() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def self_signed(tmp_path) -> ssl.SSLContext:
    """A certificate that is sound and says nothing of a peer id."""
    key, certificate = generate_self_signed_cert()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    pem = private + certificate.public_bytes(Encoding.PEM)
    (tmp_path / "pem").write_bytes(pem)
    context = anonymous()
    context.load_cert_chain(tmp_path / "pem")
    return context


@pytest.mark.parametrize(
    "who", ["the peer itself", "nobody", "another peer", "a certificate without a peer id"]
)
async def test_a_token_is_worth_nothing_in_other_hands(tmp_path, who):
    async with hosts(tmp_path, 2) as (server, client), contextlib.AsyncExitStack() as stack:
        source, _ = honest(server)
        await token(client, server, source.root)  # so that the listener waits for this peer
        good = await token(client, server, source.root)
        context = {
            "the peer itself": None,
            "nobody": anonymous(),
            "another peer": Contexts(
                identity.from_key(Ed25519PrivateKey.generate()).key_pair
            ).client,
            "a certificate without a peer id": self_signed(tmp_path),
        }[who]
        connection = await call(stack, server, client, tmp_path / "1", context)
        request = good + framed(BulkRequest(TRANSFER, source.root, b"\xff"))
        assert await answered(connection, request) == (who == "the peer itself")
        outcome = "ok" if who == "the peer itself" else "refused"
        await until(lambda: server.bulk.statistics().handshakes.get(outcome) == 1)


@pytest.mark.parametrize("kind", ["replayed", "invented", "of another transfer", "cut short"])
async def test_a_token_that_is_not_good_gets_no_answer(tmp_path, kind):
    async with hosts(tmp_path, 2) as (server, client), contextlib.AsyncExitStack() as stack:
        source, _ = honest(server)
        other = b"o" * 32
        server.bulk.offer(other, source)
        first, second = [await token(client, server, source.root) for _ in range(2)]
        request = framed(BulkRequest(TRANSFER, source.root, b"\x01"))
        connection = await call(stack, server, client, tmp_path / "1")
        if kind == "replayed":
            assert await answered(connection, first + request)
            connection = await call(stack, server, client, tmp_path / "1")
        data = {
            "replayed": first + request,
            "invented": bytes(32) + request,
            "of another transfer": second + framed(BulkRequest(other, source.root, b"\x01")),
            "cut short": second + LENGTH.pack(limits.BULK_REQUEST_BYTES + 1),
        }[kind]
        assert not await answered(connection, data)


async def test_a_port_behind_which_another_peer_answers_is_not_used(tmp_path):
    """The server names a port at which somebody else, with a sound certificate, listens."""
    async with hosts(tmp_path, 2) as (server, client), host(tmp_path / "else") as elsewhere:
        source, sink = honest(server)

        async def handler(peer: str, data: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            return codec.encode(
                BulkSocketResponse("ok", elsewhere.bulk.statistics().port, bytes(32))
            )

        server.requests.serve(
            ids.BULK_SOCKET_PROTOCOL, handler, max_request_bytes=128, max_response_bytes=96
        )
        with pytest.raises(PeerError, match="handshake"):
            await fetch(client, server, sink, path="socket")
        await fetch(client, server, sink)  # by stream
        assert bytes(sink.data) == b"".join(bytes(source.chunk(index)) for index in range(8))
        assert client.bulk.statistics().fallbacks == {"handshake": 1}


async def test_a_greylisted_peer_gets_nothing_on_either_path(tmp_path):
    async with hosts(tmp_path, 2) as (server, client):
        _, sink = honest(server)
        server.reputation.rejected(
            client.peer_id, "test", trio.current_time(), cost=-reputation.GREYLIST + 1
        )
        assert not server.welcome(client.peer_id)
        for path in ("stream", "socket"):
            with pytest.raises(PeerError) as caught:
                await fetch(client, server, sink, deadline=3, path=path)
            assert not isinstance(caught.value, Declined)
        assert server.bulk.statistics().served["stream"] == {"unwelcome": 1}
        assert len(sink.missing()) == 8
