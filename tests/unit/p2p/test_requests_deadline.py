"""The caller's deadline on a fake clock, with streams that hang in ways a real peer can bring about."""

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from swarmnode.errors import PeerError, PeerTimeout
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.requests import OUTBOUND_PER_PEER, Libp2pRequests

PEER = ID.from_pubkey(create_new_key_pair().public_key).to_base58()


class Stuck:
    """A stream of the library's, on a connection whose peer stopped reading: every operation waits, reset included."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.muxed_stream = self
        self.muxed_conn = self.conn = self
        self.peer_id = ID.from_string(PEER)
        self.resets = 0

    async def wait(self, what: str, result: object = None) -> object:
        await trio.sleep(1e6 if what == self.where else 0)
        return result

    async def write(self, data: bytes) -> None:
        await self.wait("write")

    async def read(self, n: int) -> bytes:
        return await self.wait("read", bytes(n))

    async def close(self) -> None:
        await self.wait("close")

    async def reset(self) -> None:
        self.resets += 1
        await trio.sleep(1000.0)


class Library:
    """A host of the library's, connected with everybody."""

    def __init__(self, stream: Stuck) -> None:
        self.stream = stream

    def get_id(self) -> ID:
        return ID.from_pubkey(create_new_key_pair().public_key)

    def get_network(self) -> "Library":
        return self

    def get_peerstore(self) -> "Library":
        return self

    def supports_protocols(self, peer: object, protocols: list) -> list:
        return []

    def get_connections(self, peer: object) -> list:
        return [self]

    async def new_stream(self, peer: object, protocols: list) -> Stuck:
        await self.stream.wait("open")
        return self.stream


@pytest.mark.parametrize("where", ["open", "write", "read"])
async def test_the_caller_is_back_on_time_wherever_the_peer_hangs(autojump_clock, nursery, where):
    stream = Stuck(where)
    requests = Libp2pRequests(Host(Library(stream), nursery))
    start = trio.current_time()
    with pytest.raises(PeerTimeout):
        await requests.request(PEER, "/x/1", b"x", deadline=3.0, max_response_bytes=10)
    assert trio.current_time() - start == pytest.approx(3.0)
    await trio.sleep(1.0)
    assert stream.resets == (where != "open")
    nursery.cancel_scope.cancel()


async def test_an_answer_in_time_counts_even_if_closing_hangs(autojump_clock, nursery):
    requests = Libp2pRequests(Host(Library(Stuck("close")), nursery))
    assert await requests.request(PEER, "/x/1", b"x", deadline=3.0, max_response_bytes=10) == b""
    nursery.cancel_scope.cancel()


async def test_waiting_for_a_turn_counts_against_the_deadline(autojump_clock, nursery):
    requests = Libp2pRequests(Host(Library(Stuck("read")), nursery))
    late = []

    async def one() -> None:
        with pytest.raises(PeerTimeout):
            await requests.request(PEER, "/x/1", b"x", deadline=3.0, max_response_bytes=10)
        late.append(trio.current_time())

    start = trio.current_time()
    async with trio.open_nursery() as callers:
        for _ in range(3 * OUTBOUND_PER_PEER):
            callers.start_soon(one)
    assert max(late) - start < 3.1
    nursery.cancel_scope.cancel()


async def test_whatever_the_library_raises_is_a_peer_error(autojump_clock, nursery):
    class Broken(Library):
        async def new_stream(self, peer: object, protocols: list) -> Stuck:
            await trio.lowlevel.checkpoint()
            raise KeyError("inside the library")

    with pytest.raises(PeerError, match="inside the library"):
        await Libp2pRequests(Host(Broken(Stuck("")), nursery)).request(PEER, "/x/1", b"x", deadline=3.0, max_response_bytes=10)
    nursery.cancel_scope.cancel()
