"""Packed arrays."""

import pytest

from swarmnode.errors import BadMessage
from swarmnode.wire.tensors import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs


def test_ids_are_little_endian_u32():
    assert pack_ids([1, 2**32 - 1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    assert unpack_ids(pack_ids([1, 2**32 - 1])).tolist() == [1, 2**32 - 1]


def test_logprobs_are_little_endian_f32():
    assert pack_logprobs([-0.5]) == b"\x00\x00\x00\xbf"
    assert unpack_logprobs(b"\x00\x00\x00\xbf").tolist() == [-0.5]


@pytest.mark.parametrize("unpack", [unpack_ids, unpack_logprobs])
def test_fraction_of_an_item_is_a_bad_message(unpack):
    with pytest.raises(BadMessage) as caught:
        unpack(b"12345")
    assert caught.value.reason == "bounds"
