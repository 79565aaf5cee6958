"""Lazy negotiation: one round trip, and a clean error if the peer does not support the protocol."""

import contextlib

import pytest
import trio

from swarmnode.errors import Incompatible, PeerError
from swarmnode.p2p.library.errors import StreamEnd
from swarmnode.p2p.library.streams import MULTISTREAM, Stream
from tests.support.hosts import ECHO, ask, host, serve_echo
from tests.support.waiting import until, wait_connected


def knows(client, server) -> bool:
    """Return True if `server` is known to support ECHO."""
    from libp2p.peer.id import ID

    return bool(
        client.host.library.get_peerstore().supports_protocols(
            ID.from_string(server.peer_id), [ECHO]
        )
    )


@contextlib.asynccontextmanager
async def acquainted(directory):
    """Open two hosts; the second knows the protocols of the first."""
    async with host(directory / "server") as server:
        serve_echo(server)
        async with host(directory / "client", initial_peers=[server.listen_addrs[0]]) as client:
            with trio.fail_after(60):
                await wait_connected(client, 1)
                await until(lambda: knows(client, server))
            yield server, client


def watched(stream, recorded):
    """Record the reads and writes of the library's streams in `recorded`."""
    read, write = stream.read, stream.write

    async def reading(n=None):
        data = await read(n)
        recorded.append(("read", bytes(data)))
        return data

    async def writing(data):
        recorded.append(("write", bytes(data)))
        await write(data)

    stream.read, stream.write = reading, writing


async def test_proposal_and_data_are_sent_together(tmp_path, monkeypatch):
    recorded: list[tuple[str, bytes]] = []
    begin = Stream.__init__

    def watching(self, stream, proposed=""):
        if proposed == ECHO:  # skip the hosts' own requests
            watched(stream, recorded)
        begin(self, stream, proposed)

    async with acquainted(tmp_path) as (server, client):
        monkeypatch.setattr(Stream, "__init__", watching)
        assert await ask(client, server.peer_id, b"question") == b"question"
        ways = [way for way, _ in recorded]
        assert ways[0] == "write"
        assert "write" not in ways[1:], "one round trip"
        assert MULTISTREAM.encode() in recorded[0][1]
        assert recorded[0][1].endswith(b"question")
        for data in (b"", bytes(range(256)) * 4096):
            assert await ask(client, server.peer_id, data) == data
        assert client.requests.statistics().requests[ECHO] == {"ok": 3}


async def test_dropped_protocol_is_reported_and_connection_stays(tmp_path):
    async with acquainted(tmp_path) as (server, client):
        server.host.remove_handler(ECHO)
        for data in (b"x", b"\xff" * 1000, bytes(70_000)):  # which it takes for names of protocols
            with pytest.raises((Incompatible, StreamEnd)):  # its reset may come before it is read
                await ask(client, server.peer_id, data)
        serve_echo(server)
        assert await ask(client, server.peer_id) == b"x"
        assert client.peers.statistics().dials == 1  # never reconnected
        assert server.reputation.score(client.peer_id, trio.current_time()) == 0.0


@pytest.mark.parametrize(
    "answer",
    [b"\x14/multistream/2.0.0\n", b"\x00", b"\xff\xff\xff\xff\x7f", b"\x03na\n", b"\x05lies\n"],
)
async def test_wrong_negotiation_is_a_peer_error(answer):
    class Odd:
        """A library stream on which the peer sends `answer` and ends."""

        left = bytearray(answer)

        def __init__(self):
            self.muxed_conn = self.peer_id = self

        def to_base58(self):
            return "peer"

        async def write(self, data):
            await trio.lowlevel.checkpoint()

        async def read(self, n):
            await trio.lowlevel.checkpoint()
            assert n <= 128
            if not self.left:
                raise EOFError
            data, self.left = bytes(self.left[:n]), self.left[n:]
            return data

    stream = Stream(Odd(), ECHO)
    await stream.write(b"x")
    with pytest.raises(PeerError):
        await stream.read()
