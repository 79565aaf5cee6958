"""The first message of a stage stream in pieces, too long or missing, and the largest messages of
a crew."""

import pytest

from swarmnode.errors import BadMessage, PeerError
from swarmnode.stages.crew_messages import (
    MAX_HELD_BLOCKS,
    MESSAGE_BYTES,
    OPEN_BYTES,
    REASON_BYTES,
    CrewMember,
    CrewRecord,
    HeldBlock,
    LeaveRequest,
    Offer,
    ProposeRequest,
    StreamOpen,
    StreamReady,
    check_message,
)
from swarmnode.stages.network.stream_proxy import (
    read_first,
    read_open,
    stream_refusal,
)
from swarmnode.stages.stage_frames import MAX_STAGES
from swarmnode.wire import headed, strict

CREW = b"c" * 32
OPEN = StreamOpen(CREW, 1, 2, "frames")


def test_streams_are_refused_without_a_crew():
    assert stream_refusal(None, "b", OPEN) == "crew"


class Pieces:
    """A stream that yields these pieces, and then its end."""

    def __init__(self, data, size):
        self.pieces = [data[i : i + size] for i in range(0, len(data), size)]
        self.left = b""
        self.asked = []

    async def receive(self):
        left, self.left = self.left, b""
        return left or (self.pieces.pop(0) if self.pieces else b"")

    async def receive_some(self, most):
        self.asked.append(most)
        data = b"".join(self.pieces)
        self.pieces = [data[most:]] if data[most:] else []
        return data[:most]

    def unread(self, data):
        self.left = data


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000])
async def test_bytes_after_the_first_message_stay_on_the_stream(size):
    stream = Pieces(headed.pack(OPEN) + b"and more", size)
    assert await read_first(stream, StreamOpen) == OPEN
    assert stream.left + b"".join(stream.pieces) == b"and more"


async def test_socket_is_not_read_beyond_the_first_message():
    opened = StreamOpen(CREW, 0, 1, "state")
    stream = Pieces(headed.pack(opened) + b"and more", 1000)
    assert await read_open(stream, StreamOpen) == opened
    assert b"".join(stream.pieces) == b"and more"
    assert await read_open(Pieces(b"", 1), StreamOpen) is None
    with pytest.raises(BadMessage, match="bytes"):
        await read_open(Pieces(headed.pack(opened)[:-1], 1), StreamOpen)


@pytest.mark.parametrize("length", [0, OPEN_BYTES + 1, 2**32 - 1])
async def test_impossible_length_is_refused_before_more_is_read(length):
    for read in (read_first, read_open):
        with pytest.raises(BadMessage) as caught:
            await read(Pieces(length.to_bytes(4, "big"), 4), StreamOpen)
        assert caught.value.reason == "oversize"


async def test_truncated_or_wrong_first_message_is_an_error():
    for data in (b"", headed.pack(OPEN)[:3], headed.pack(OPEN)[:-1]):
        with pytest.raises((PeerError, BadMessage)):
            await read_first(Pieces(data, 1000), StreamOpen)
    with pytest.raises(BadMessage):
        await read_first(Pieces(headed.pack(OPEN), 1000), StreamReady)


def test_largest_messages_fit_their_bound():
    names = ["1" * 63 + str(number) for number in range(MAX_STAGES)]
    members = tuple(CrewMember(name, 1024) for name in names)
    record = CrewRecord(b"l" * 32, b"m" * 32, 2**62, members, bytes(8))
    block = HeldBlock(b"l" * 32, (1024,) * 8, 7, 2**62, "neighbour")
    for message in (
        ProposeRequest(record),
        Offer(b"m" * 32, 1e30, 1e30, (block,) * MAX_HELD_BLOCKS),
        LeaveRequest(b"c" * 32, "r" * REASON_BYTES),
    ):
        assert len(strict.encode(message)) < MESSAGE_BYTES / 4
        check_message(message)
