"""Packed arrays."""

import numpy as np
import pytest

from swarmnode.errors import BadMessage
from swarmnode.wire.tensors import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs


def test_ids_are_little_endian_u32():
    assert pack_ids([1, 2**32 - 1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    assert unpack_ids(pack_ids([1, 2**32 - 1])).tolist() == [1, 2**32 - 1]


def test_logprobs_are_little_endian_f32():
    assert pack_logprobs([-0.5]) == b"\x00\x00\x00\xbf"
    assert unpack_logprobs(b"\x00\x00\x00\xbf").tolist() == [-0.5]


def test_empty_array_packs_to_no_bytes():
    assert pack_ids([]) == pack_logprobs([]) == b""
    assert unpack_ids(b"").shape == unpack_logprobs(b"").shape == (0,)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_id_that_does_not_fit_is_refused(bad):
    with pytest.raises(OverflowError):
        pack_ids([bad])


@pytest.mark.parametrize("unpack", [unpack_ids, unpack_logprobs])
def test_fraction_of_an_item_is_a_bad_message(unpack):
    with pytest.raises(BadMessage) as caught:
        unpack(b"12345")
    assert caught.value.reason == "bounds"


def test_unpacked_array_is_a_read_only_view():
    with pytest.raises(ValueError):
        unpack_ids(pack_ids([1]))[0] = 2


def test_memory_layout_does_not_matter():
    logprobs = np.array([[-1.0, -2.0], [-3.0, -4.0]], dtype=">f8")
    assert pack_logprobs(logprobs[:, 0]) == pack_logprobs([-1.0, -3.0])
