"""Messages between the network processes of a crew: canonical and bounded."""

import msgspec

from swarmnode.stages.crew_messages import (
    MAX_HELD_BLOCKS,
    MESSAGE_BYTES,
    REASON_BYTES,
    CrewMember,
    CrewRecord,
    HeldBlock,
    LeaveRequest,
    Offer,
    ProposeRequest,
    check_message,
)
from swarmnode.stages.stage_frames import MAX_STAGES
from swarmnode.wire import strict

RECORD = CrewRecord(b"l" * 32, b"m" * 32, 7, (CrewMember("a", 2), CrewMember("b", 3)), bytes(8))


def test_largest_messages_fit_their_bound():
    names = ["1" * 63 + str(number) for number in range(MAX_STAGES)]
    record = msgspec.structs.replace(
        RECORD, step=2**62, members=tuple(CrewMember(name, 1024) for name in names)
    )
    block = HeldBlock(b"l" * 32, (1024,) * 8, 7, 2**62, "neighbour")
    for message in (
        ProposeRequest(record),
        Offer(b"m" * 32, 1e30, 1e30, (block,) * MAX_HELD_BLOCKS),
        LeaveRequest(b"c" * 32, "r" * REASON_BYTES),
    ):
        assert len(strict.encode(message)) < MESSAGE_BYTES / 4
        check_message(message)
