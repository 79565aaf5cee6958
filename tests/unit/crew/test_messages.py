"""Messages between the network processes of a crew: canonical and bounded."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import BadMessage
from swarmnode.stages.crew_messages import (
    MAX_HELD_BLOCKS,
    MESSAGE_BYTES,
    REASON_BYTES,
    AcceptAnswer,
    AliveAnswer,
    CrewMember,
    CrewRecord,
    Heartbeat,
    HeldBlock,
    LeaveRequest,
    MemberStatus,
    NotedAnswer,
    Offer,
    ProposeRequest,
    RefuseAnswer,
    check_message,
    crew_id,
    decode_answer,
    decode_request,
    encode_message,
)
from swarmnode.stages.specs import MAX_MEMBERS

RECORD = CrewRecord(b"l" * 32, b"m" * 32, 7, (CrewMember("a", 2), CrewMember("b", 3)), bytes(8))
BLOCK = HeldBlock(b"l" * 32, (2, 2), 0, 7, "memory")
REASONS = (None, "oversize", "malformed", "schema", "bounds", "not_finite")


def reason_of(decode, data):
    """None where it is a message."""
    try:
        decode(data)
    except BadMessage as error:
        return error.reason
    return None


REQUESTS = [
    Offer(b"m" * 32, 1e9, 1e12, (BLOCK,)),
    ProposeRequest(RECORD),
    Heartbeat(b"c" * 32, MemberStatus("active", 7, 9, 1)),
    LeaveRequest(b"c" * 32, "drained"),
]
ANSWERS = [
    NotedAnswer(),
    AcceptAnswer(b"c" * 32),
    RefuseAnswer("newer", b"c" * 32),
    AliveAnswer(b"c" * 32, MemberStatus("loading")),
]


@pytest.mark.parametrize(
    ("decode", "message"),
    [(decode_request, one) for one in REQUESTS] + [(decode_answer, one) for one in ANSWERS],
    ids=lambda one: type(one).__name__,
)
def test_message_survives_and_every_flipped_byte_has_a_reason(decode, message):
    data = encode_message(message)
    assert decode(data) == message
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]
        assert reason_of(decode, flipped) in REASONS


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_have_a_reason(data):
    for decode in (decode_request, decode_answer):
        assert reason_of(decode, data) in REASONS


def test_largest_messages_fit_their_bound():
    names = ["1" * 63 + str(number) for number in range(MAX_MEMBERS)]
    record = msgspec.structs.replace(
        RECORD, step=2**62, members=tuple(CrewMember(name, 1024) for name in names)
    )
    block = HeldBlock(b"l" * 32, (1024,) * 8, 7, 2**62, "neighbour")
    for message in (
        ProposeRequest(record),
        Offer(b"m" * 32, 1e30, 1e30, (block,) * MAX_HELD_BLOCKS),
        LeaveRequest(b"c" * 32, "r" * REASON_BYTES),
    ):
        assert len(encode_message(message)) < MESSAGE_BYTES / 4
        check_message(message)


def test_id_of_a_crew_covers_its_whole_record():
    others = [
        {"nonce": b"8" * 8},
        {"step": 8},
        {"lineage": b"x" * 32},
        {"model": b"x" * 32},
        {"members": (CrewMember("b", 2), CrewMember("a", 3))},
        {"members": (CrewMember("a", 3), CrewMember("b", 2))},
    ]
    ids = {crew_id(msgspec.structs.replace(RECORD, **changes)) for changes in others}
    assert len({*ids, crew_id(RECORD)}) == len(others) + 1
