"""Deadlines of inbound and outbound requests on a fake clock, with hanging streams."""

from collections import Counter

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from swarmnode.errors import PeerError, PeerTimeout
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.requests import (
    OUTBOUND,
    READ_SECONDS,
    READING_PER_PEER,
    WRITE_SECONDS,
    Libp2pRequests,
)
from swarmnode.p2p.stream_calls import frame
from swarmnode.wire import ids
from tests.support.hosts import echo

PEER, *OTHERS = (ID.from_pubkey(create_new_key_pair().public_key).to_base58() for _ in range(5))
LIMITS = {"max_request_bytes": 1 << 20, "max_response_bytes": 1 << 20}


class Stuck:
    """A library stream on a connection whose peer stopped reading: every operation hangs, including
    reset."""

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


class InboundStream:
    """A library stream of `peer`: it sends `unread` and takes `seconds` to read a response."""

    def __init__(self, peer: str, unread: bytes = b"", seconds: float = 0.0) -> None:
        self.muxed_stream = self.muxed_conn = self.conn = self
        self.peer_id = ID.from_string(peer)
        self.unread = unread
        self.seconds = seconds
        self.written = b""
        self.ended = trio.Event()

    async def read(self, n: int) -> bytes:
        if not self.unread:
            await self.ended.wait()
            raise ConnectionResetError
        data, self.unread = self.unread[:n], self.unread[n:]
        return data

    async def write(self, data: bytes) -> None:
        with trio.move_on_after(self.seconds):
            await self.ended.wait()
            raise ConnectionResetError
        self.written += data

    async def close(self) -> None:
        self.ended.set()
        await trio.lowlevel.checkpoint()

    reset = close


class Library:
    """A library host that is connected with every peer."""

    def __init__(self, stream: Stuck | None = None) -> None:
        self.stream = stream

    def set_stream_handler(self, protocol: str, handler: object) -> None:
        self.opened = handler

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
async def test_caller_returns_at_the_deadline(autojump_clock, nursery, where):
    stream = Stuck(where)
    requests = Libp2pRequests(Host(Library(stream), nursery))
    start = trio.current_time()
    with pytest.raises(PeerTimeout):
        await requests.request(PEER, "/x/1", b"x", deadline=3.0, max_response_bytes=10)
    assert trio.current_time() - start == pytest.approx(3.0)
    await trio.sleep(1.0)
    assert stream.resets == (where != "open")
    nursery.cancel_scope.cancel()


async def test_response_counts_even_if_closing_hangs(autojump_clock, nursery):
    requests = Libp2pRequests(Host(Library(Stuck("close")), nursery))
    assert await requests.request(PEER, "/x/1", b"x", deadline=3.0, max_response_bytes=10) == b""
    nursery.cancel_scope.cancel()


async def test_hanging_greetings_do_not_delay_other_protocols(autojump_clock, nursery):
    class Newcomers(Library):
        async def new_stream(self, peer: object, protocols: list) -> Stuck:
            await trio.lowlevel.checkpoint()
            return Stuck("read" if ids.NEIGHBOURS_PROTOCOL in protocols else "")

    requests = Libp2pRequests(Host(Newcomers(), nursery))

    async def greet(peer: str) -> None:
        with pytest.raises(PeerTimeout):
            await requests.request(
                peer, ids.NEIGHBOURS_PROTOCOL, b"x", deadline=10.0, max_response_bytes=10
            )

    for _ in range(OUTBOUND):
        nursery.start_soon(greet, ID.from_pubkey(create_new_key_pair().public_key).to_base58())
    await trio.testing.wait_all_tasks_blocked()
    assert requests.statistics().in_flight == OUTBOUND
    start = trio.current_time()
    assert (
        await requests.request(PEER, ids.GROUPS_PROTOCOL, b"x", deadline=3.0, max_response_bytes=10)
        == b""
    )
    assert trio.current_time() - start < 1.0
    nursery.cancel_scope.cancel()


async def test_every_library_error_is_a_peer_error(autojump_clock, nursery):
    class Broken(Library):
        async def new_stream(self, peer: object, protocols: list) -> Stuck:
            await trio.lowlevel.checkpoint()
            raise KeyError("inside the library")

    with pytest.raises(PeerError, match="inside the library"):
        await Libp2pRequests(Host(Broken(Stuck("")), nursery)).request(
            PEER, "/x/1", b"x", deadline=3.0, max_response_bytes=10
        )
    nursery.cancel_scope.cancel()


# ---- inbound -------------------------------------------------------------------------------------


async def large(peer: str, data: bytes) -> bytes:
    await trio.lowlevel.checkpoint()
    return bytes(1 << 20)


def served(requests) -> dict[str, int]:
    return requests.statistics().served.get("/x/1", {})


async def test_arriving_requests_per_peer_are_limited(autojump_clock, nursery):
    library = Library()
    requests = Libp2pRequests(Host(library, nursery))
    requests.serve("/x/1", echo, **LIMITS)
    began = trio.current_time()
    async with trio.open_nursery() as requesters:
        for _ in range(READING_PER_PEER + 4):
            requesters.start_soon(library.opened, InboundStream(OTHERS[0], frame(b"question")[:-1]))
        await trio.testing.wait_all_tasks_blocked()
        assert served(requests) == {"busy": 4}
    assert trio.current_time() - began == pytest.approx(READ_SECONDS)
    assert served(requests) == {"busy": 4, "timeout": READING_PER_PEER}
    nursery.cancel_scope.cancel()


async def test_unread_responses_leave_slots_for_others(autojump_clock, nursery):
    library = Library()
    requests = Libp2pRequests(Host(library, nursery))
    requests.serve("/x/1", large, **LIMITS, concurrent=8)
    given = Counter[bool]()

    async def greedy(peer: str) -> None:
        while True:
            await library.opened(InboundStream(peer, frame(b"all of it"), seconds=1e9))
            await trio.sleep(1.0)

    for peer in OTHERS:
        for _ in range(2):
            nursery.start_soon(greedy, peer)
    await trio.sleep(60.0)
    for _ in range(720):
        await trio.sleep(5.0)
        asked = InboundStream(PEER, frame(b"one of it"), seconds=0.5)
        await library.opened(asked)
        given[bool(asked.written)] += 1
    assert given[True] > 700
    nursery.cancel_scope.cancel()


async def test_slow_line_does_not_count_as_slow_peer(autojump_clock, nursery):
    library = Library()
    requests = Libp2pRequests(Host(library, nursery))
    requests.serve("/x/1", echo, **LIMITS, concurrent=4, per_peer=4)
    for seconds in (0.9 * WRITE_SECONDS, 1.1 * WRITE_SECONDS):
        for _ in range(2):
            async with trio.open_nursery() as requesters:
                for _ in range(4):
                    requesters.start_soon(
                        library.opened, InboundStream(PEER, frame(b"heartbeat"), seconds)
                    )
    assert served(requests) == {"ok": 8, "timeout": 5, "busy": 3}
    nursery.cancel_scope.cancel()
