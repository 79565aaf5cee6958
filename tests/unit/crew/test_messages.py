"""What goes between the network processes of a crew: canonical, bounded, signed; and nothing else
is a message."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import BadMessage
from swarmnode.stages import wire
from swarmnode.stages.wire import (
    COPIES,
    MEMBERS,
    NO_HASH,
    Copy,
    Founded,
    Member,
    Record,
    Signed,
    Taken,
    check_founded,
    crew_id,
    member_bytes,
    stage_of,
)
from tests.support.crew_trainer import named_keys

RECORD = Record(
    b"l" * 32,
    b"m" * 32,
    b"p" * 32,
    7,
    Taken(2, 0.5, 1e-3),
    (Member("a", 2), Member("b", 3)),
    bytes(8),
)
COPY = Copy(b"l" * 32, 0, 2, 7, b"p" * 32, "memory", Taken(), b"")
VERIFY = named_keys("")[1]


def signed(record: Record, *names: str) -> Founded:
    return Founded(
        record,
        tuple(Signed(name, named_keys(name)[0](member_bytes(crew_id(record)))) for name in names),
    )


REASONS = (None, "oversize", "malformed", "schema", "bounds", "not_finite")


def reason_of(decode, data):
    """None where it is a message."""
    try:
        decode(data)
    except BadMessage as error:
        return error.reason
    return None


MESSAGES = [
    wire.Offer(b"m" * 32, 1e9, 1e12, 0.01, (COPY,)),
    wire.Propose(RECORD),
    signed(RECORD, "a", "b"),
    wire.Heartbeat(b"c" * 32, wire.Status("active", 7, 9)),
    wire.Leave(b"c" * 32, "drained"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_request_survives_and_every_flipped_byte_is_a_message_or_a_reason(message):
    data = wire.encode_message(message)
    assert wire.decode_request(data) == message
    for at in range(len(data)):
        assert (
            reason_of(wire.decode_request, data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
            in REASONS
        )


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_a_reason(data):
    for decode in (wire.decode_request, wire.decode_answer):
        assert reason_of(decode, data) in REASONS


def test_the_largest_messages_fit_their_bound():
    name = "1" * 64
    record = msgspec.structs.replace(
        RECORD, members=tuple(Member(name[:-1] + str(n), 1) for n in range(MEMBERS))
    )
    founded = Founded(record, tuple(Signed(member.peer, bytes(64)) for member in record.members))
    copy = msgspec.structs.replace(
        COPY, next=b"n" * 32, first=1000, last=1024, step=2**62, where="neighbour"
    )
    for message in (
        founded,
        wire.Propose(record),
        wire.Offer(b"m" * 32, 1e30, 1e30, 1e30, (copy,) * COPIES),
    ):
        assert len(wire.encode_message(message)) < wire.MESSAGE_BYTES / 4
        wire.check_message(message)


@pytest.mark.parametrize(
    "changes",
    [
        {"members": ()},
        {"members": (Member("a", 1),) * 2},
        {"members": tuple(Member(f"p{n}", 1) for n in range(MEMBERS + 1))},
        {"members": (Member("", 1),)},
        {"members": (Member("a", 0),)},
        {"step": 0},
        {"previous": NO_HASH},
        {"step": -1},
        {"nonce": b""},
        {"lineage": b"l"},
        {"taken": Taken(0, 1.5, 0.0)},
        {"taken": Taken(0, 1.0, float("nan"))},
    ],
)
def test_a_record_that_is_none_is_refused(changes):
    with pytest.raises(BadMessage):
        wire.check_message(wire.Propose(msgspec.structs.replace(RECORD, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"first": 2},
        {"last": 5000},
        {"step": 0},
        {"hash": NO_HASH},
        {"next": b"n"},
        {"taken": Taken(-1)},
        {"lineage": b""},
    ],
)
def test_a_copy_that_is_none_is_refused(changes):
    with pytest.raises(BadMessage):
        wire.check_message(
            wire.Offer(b"m" * 32, 1.0, 1.0, 0.0, (msgspec.structs.replace(COPY, **changes),))
        )


def test_a_crew_is_signed_by_each_of_its_members_in_order_and_by_nobody_else():
    check_founded(signed(RECORD, "a", "b"), VERIFY)
    for names in (("a",), ("b", "a"), ("a", "b", "b"), ("a", "x")):
        with pytest.raises(BadMessage) as caught:
            check_founded(signed(RECORD, *names), VERIFY)
        assert caught.value.reason == "signature"
    again = msgspec.structs.replace(RECORD, nonce=b"8" * 8)
    with pytest.raises(BadMessage):
        check_founded(Founded(again, signed(RECORD, "a", "b").signatures), VERIFY)


def test_a_signature_is_of_the_record_that_was_asked_for():
    sign = named_keys("a")[0]
    good = wire.Signature(crew_id(RECORD), sign(member_bytes(crew_id(RECORD))))
    wire.check_signature(RECORD, "a", good, VERIFY)
    other = msgspec.structs.replace(RECORD, step=8)
    for record, peer in ((other, "a"), (RECORD, "b")):
        with pytest.raises(BadMessage):
            wire.check_signature(record, peer, good, VERIFY)


def test_who_holds_which_stage():
    assert [stage_of(RECORD, peer) for peer in ("a", "b", "c")] == [0, 1, None]
