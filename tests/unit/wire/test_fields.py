"""Every check of a single value on both sides of its bounds."""

import math

import pytest

from swarmnode.errors import BadMessage
from swarmnode.wire import fields
from swarmnode.wire.fields import COUNTER
from swarmnode.wire.tensors import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs

NAN, INF = math.nan, math.inf


def reason(check, *arguments):
    """Return the reason for which `check` refuses; None if it accepts."""
    try:
        check(*arguments)
    except BadMessage as error:
        return error.reason
    return None


@pytest.mark.parametrize(
    ("check", "bounds", "good", "bad"),
    [
        (fields.check_length, (3,), [b"abc"], [b"", b"ab", b"abcd"]),
        (fields.check_between, (2, 5), [2, 5, 3.5], [1, 6, 5.01]),
        (fields.check_positive, (4.0,), [1e-300, 4.0], [0.0, -1.0, 4.01]),
        (fields.check_positive, (), [1e300], [0, -1e-300]),
        (fields.check_counter, (), [0, COUNTER], [-1, COUNTER + 1]),
        (fields.check_finite, (), [0, 1.5, True], []),
        (fields.check_name, (3,), ["a", "!~a"], ["", "abcd", "a b", "a\x7f", "ä", "\n"]),
        (
            fields.check_text,
            (1, 4),
            ["a", "abcd", "ää", " ~\xa0"],
            ["", "abcde", "äää", "a\n", "\x1f", "\x7f", "\x9f", "\ud800"],
        ),
        (fields.check_text, (0, 0), [""], ["a"]),
        (fields.check_rising, (1, 3), [[1], [1, 2], "abc"], [[], [1, 1], [2, 1], [1, 2, 3, 4]]),
    ],
)
def test_both_sides_of_each_bound(check, bounds, good, bad):
    assert [reason(check, "x", value, *bounds) for value in good] == [None] * len(good)
    assert [reason(check, "x", value, *bounds) for value in bad] == ["bounds"] * len(bad)


@pytest.mark.parametrize(
    ("check", "bounds"),
    [
        (fields.check_between, (0, INF)),
        (fields.check_positive, ()),
        (fields.check_positive, (1,)),
        (fields.check_finite, ()),
    ],
)
def test_nan_and_infinity_are_not_finite(check, bounds):
    assert [reason(check, "x", value, *bounds) for value in (NAN, INF, -INF)] == ["not_finite"] * 3


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
