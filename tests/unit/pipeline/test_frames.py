"""Hostile bytes cost a BadMessage with a reason of the closed set, and never more memory than an
honest frame."""

import pytest
import torch
import trio
from trio.testing import memory_stream_pair

from swarmnode.errors import BadMessage
from swarmnode.stages.stage_frames import (
    CHUNK_BYTES,
    FRAME_REASONS,
    BackwardFrame,
    CommitFrame,
    ForwardFrame,
    FrameLimits,
    MicroBatch,
    Place,
    ProposeFrame,
    activation_bytes,
    int8_block,
    read_frame,
    read_micro_batch,
)
from swarmnode.stages.trainer.stage_batches import decode, encode
from swarmnode.wire import headed, strict
from swarmnode.wire.tensors import pack_ids

LIMITS = FrameLimits(hidden=8, vocab=50, tokens=64)
PLACE = Place(b"c" * 16, 0, 3)


class Counting:
    """A stream that records the sizes of its reads."""

    def __init__(self, data: bytes) -> None:
        self.data, self.asked, self.largest = data, 0, 0

    async def receive_some(self, max_bytes=None):
        self.asked += max_bytes
        self.largest = max(self.largest, max_bytes)
        some, self.data = self.data[:max_bytes], self.data[max_bytes:]
        return some


async def reason_of(data: bytes) -> tuple[str, int]:
    stream = Counting(data)
    with pytest.raises(BadMessage) as caught:
        await read_frame(stream, LIMITS)
    assert caught.value.reason in FRAME_REASONS
    return caught.value.reason, stream.asked


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (BackwardFrame(PLACE, 5, "float32", 65), "bounds"),
        (ForwardFrame(PLACE, 5, "learn", "int8", 1, 10**9), "bounds"),
        (CommitFrame(PLACE, 1, float("nan"), 1.0), "not_finite"),
        (ProposeFrame(PLACE, 1, ()), "bounds"),
        (BackwardFrame(PLACE, 5, "pickle", 1), "schema"),
    ],
)
async def test_header_outside_bounds_is_refused_before_its_body(frame, reason):
    data = headed.pack(frame)
    assert await reason_of(data + b"\0" * 10_000) == (reason, len(data))


async def test_a_body_is_read_in_chunks(autojump_clock):
    limits = FrameLimits(hidden=1024, vocab=50, tokens=1024)
    left, right = memory_stream_pair()
    body = bytes(activation_bytes("bfloat16", 1024, 1024))
    asked = []
    receive = right.receive_some
    right.receive_some = lambda n=None: asked.append(n) or receive(n)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            left.send_all, headed.pack(BackwardFrame(PLACE, 1, "bfloat16", 1024), body)
        )
        assert (await read_frame(right, limits))[1] == body
    assert max(asked) == CHUNK_BYTES


def test_padding_does_not_make_a_small_micro_batch_large():
    """63 completions of one token and one of 60: 124 tokens, thousands once padded."""
    lengths = (*[1] * 63, 60)
    ids = pack_ids([1] * sum(lengths))
    hostile = MicroBatch((3,), pack_ids([1, 2, 3]), (0,) * 64, lengths, ids, 1.0, None)
    with pytest.raises(BadMessage, match="padded"):
        read_micro_batch(strict.encode(hostile), hostile.rows, LIMITS, "score")


@pytest.mark.parametrize("hidden", [32, 96, 130])
def test_codecs_err_by_no_more_than_they_say(hidden):
    rows = (
        torch.randn(7, hidden, generator=torch.Generator().manual_seed(hidden))
        * torch.logspace(-3, 3, 7)[:, None]
    )
    block = int8_block(hidden)
    assert hidden % block == 0
    assert torch.equal(decode(encode(rows, "float32"), 7, hidden, "float32"), rows)
    assert bool(
        (
            (decode(encode(rows, "bfloat16"), 7, hidden, "bfloat16") - rows).abs()
            <= rows.abs() * 2**-8
        ).all()
    )
    back = decode(encode(rows, "int8"), 7, hidden, "int8").view(7, -1, block)
    largest = rows.view(7, -1, block).abs().amax(-1, keepdim=True)
    assert bool(((back - rows.view(7, -1, block)).abs() <= largest / 254 * 1.001).all())


def test_quantisation_does_not_depend_on_the_batch():
    rows = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    together = decode(encode(rows, "int8"), 5, 96, "int8")
    assert all(
        torch.equal(decode(encode(rows[i : i + 1], "int8"), 1, 96, "int8")[0], together[i])
        for i in range(5)
    )


def test_our_own_broken_stage_is_not_blamed_on_a_peer():
    with pytest.raises(ValueError, match="finite"):
        encode(torch.tensor([[float("nan")]]), "bfloat16")
