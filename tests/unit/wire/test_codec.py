"""Decoding: results, refusals, and that only BadMessage is raised."""

import msgspec
import pytest
import zstandard

from protocol.generate import frames
from swarmnode.errors import BadMessage
from swarmnode.wire import codec, limits
from swarmnode.wire.listings import GroupResponse, GroupsResponse
from swarmnode.wire.messages import Envelope

GROUP = codec.decode_payload(Envelope(key=b"", payload=frames.pack(frames.GROUP), signature=b""))


def reason_of(function, *arguments) -> str:
    with pytest.raises(BadMessage) as caught:
        function(*arguments)
    return caught.value.reason


@pytest.mark.parametrize("size", [0, 1, 100, 2**17, limits.GROUP_BYTES])
def test_compression_round_trips(size):
    data = bytes(range(256)) * (size // 256) + b"\x07" * (size % 256)
    assert codec.decompress(codec.compress(data), size) == data


def test_compression_declares_size_and_small_window():
    parameters = zstandard.get_frame_parameters(codec.compress(bytes(limits.GROUP_BYTES)))
    assert parameters.content_size == limits.GROUP_BYTES
    assert parameters.window_size <= limits.ZSTD_WINDOW_BYTES


def test_own_groups_pass_the_same_checks():
    one = msgspec.structs.replace(GROUP, completions=GROUP.completions[:1])
    assert reason_of(codec.check_message, one) == "bounds"
    assert codec.check_message(GROUP) is None


def test_lone_surrogate_is_rejected_before_signing():
    broken = msgspec.structs.replace(GROUP.completions[0], text="\ud800")
    assert (
        reason_of(codec.check_message, msgspec.structs.replace(GROUP, completions=[broken, broken]))
        == "bounds"
    )


def test_largest_response_fits_its_limit():
    largest = GroupResponse("ok", bytes(limits.GROUP_BYTES - limits.PULLED + 1))
    others = [GroupResponse("ok", b"1")] * (limits.PULLED - 1)
    response = GroupsResponse([largest, *others])
    frame = codec.encode(response)
    assert codec.decode(frame, GroupsResponse, limits.GROUPS_RESPONSE_BYTES) == response
