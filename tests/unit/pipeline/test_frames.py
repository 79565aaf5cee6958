"""Frames go there and back; hostile bytes cost a BadMessage with a reason of the closed set, and
never more memory than an honest frame."""

import random

import msgspec
import numpy as np
import pytest
import torch
import trio
from trio.testing import memory_stream_pair

from swarmnode.errors import BadMessage
from swarmnode.stages import wire
from swarmnode.stages.model import decode, encode
from swarmnode.stages.wire import (
    FRAME_REASONS,
    BackwardFrame,
    CommitFrame,
    DecodeFrame,
    EmbeddingFrame,
    ForwardFrame,
    FrameLimits,
    LossInputs,
    MicroBatch,
    Place,
    ProposeFrame,
    WaveDescription,
    activation_bytes,
    body_bytes,
    read_frame,
    read_micro_batch,
    read_wave,
)
from swarmnode.wire import headed, strict
from swarmnode.wire.tensors import pack_ids, pack_logprobs

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


async def test_frames_go_there_and_back_one_after_the_other():
    left, right = memory_stream_pair()
    sent = [
        (BackwardFrame(PLACE, 5, "bfloat16", 3), bytes(range(48))),
        (ProposeFrame(PLACE, 2, (1, 4, 9)), b""),
        (DecodeFrame(PLACE, 7, "int8", 2), b"x" * (8 + 2 * 8 + 2 * 4)),
    ]
    for frame, body in sent:
        await left.send_all(headed.pack(frame, body))
    await left.aclose()
    assert [await read_frame(right, LIMITS) for _ in sent] == sent
    assert await read_frame(right, LIMITS) is None


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (BackwardFrame(PLACE, 5, "float32", 65), "bounds"),
        (BackwardFrame(PLACE, 5, "float32", 0), "bounds"),
        (BackwardFrame(PLACE, -1, "int8", 1), "bounds"),
        (BackwardFrame(Place(b"short", 0, 3), 5, "int8", 1), "bounds"),
        (BackwardFrame(Place(b"c" * 16, 0, -1), 5, "int8", 1), "bounds"),
        (BackwardFrame(Place(b"c" * 16, 64, 3), 5, "int8", 1), "bounds"),
        (ForwardFrame(PLACE, 5, "learn", "int8", 1, 10**9), "bounds"),
        (DecodeFrame(PLACE, -1, "int8", 1), "bounds"),
        (CommitFrame(PLACE, 1, float("nan"), 1.0), "not_finite"),
        (CommitFrame(PLACE, 1, 1.0, float("inf")), "not_finite"),
        (CommitFrame(PLACE, 1, -1.0, 1.0), "bounds"),
        (EmbeddingFrame(PLACE, 1, 40, 20), "bounds"),
        (ProposeFrame(PLACE, 1, ()), "bounds"),
        (ProposeFrame(PLACE, 1, (2, 2)), "bounds"),
        (ProposeFrame(PLACE, 1, (-1, 2)), "bounds"),
        (BackwardFrame(PLACE, 5, "pickle", 1), "schema"),
    ],
)
async def test_header_outside_bounds_is_refused_before_its_body(frame, reason):
    data = headed.pack(frame)
    assert await reason_of(data + b"\0" * 10_000) == (reason, len(data))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xff\xff\xff" + b"\0" * 100, "oversize"),
        (b"\0\0\0\0", "oversize"),
        (b"\0\0", "truncated"),
        (b"\0\0\0\x05abc", "truncated"),
        (b"\0\0\0\x01\xc1", "malformed"),
        (b"\0\0\0\x01\x90", "schema"),
        (headed.pack(BackwardFrame(PLACE, 5, "int8", 3), b"x" * 11), "truncated"),
    ],
)
async def test_bytes_that_are_no_frame(data, reason):
    assert (await reason_of(data))[0] == reason


async def test_a_second_encoding_and_an_unknown_field_are_refused():
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(ProposeFrame(PLACE, 2, (1,))))
    extra = msgspec.msgpack.encode({**fields, "more": 1})
    assert (await reason_of(len(extra).to_bytes(4, "big") + extra))[0] == "schema"
    kind, *others = fields.items()
    for order, reason in (([kind, *reversed(others)], "malformed"), ([*others, kind], "schema")):
        swapped = msgspec.msgpack.encode(dict(order))
        assert (await reason_of(len(swapped).to_bytes(4, "big") + swapped))[0] == reason


async def test_flipped_bytes_never_raise_anything_else():
    rng = random.Random(4)
    kinds = [
        (BackwardFrame(PLACE, 5, "int8", 2), b"y" * 24),
        (ProposeFrame(PLACE, 2, (1, 4)), b""),
        (CommitFrame(PLACE, 1, 1.0, 0.1), b""),
    ]
    honest = [headed.pack(frame, body) for frame, body in kinds]
    refused = 0
    for _ in range(3000):
        data = bytearray(rng.choice(honest))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        stream = Counting(bytes(data[: rng.randint(0, len(data))]))
        try:
            await read_frame(stream, LIMITS)
        except BadMessage as error:
            refused += error.reason in FRAME_REASONS
        assert stream.largest <= wire.HEADER_BYTES
    assert refused > 1000


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
    assert max(asked) == wire.CHUNK_BYTES


def micro(**keys) -> MicroBatch:
    numbers = (pack_logprobs([-1.0] * 4), pack_logprobs([1.0, -1.0]), pack_logprobs([1.0, 1.0]))
    loss = LossInputs(*numbers, 4.0, "dapo", 0.2, 0.28, None, (True, True), "tis", "token")
    fields = {
        "prompt_lengths": (3,),
        "prompt_ids": pack_ids([1, 2, 3]),
        "prompt_of": (0, 0),
        "completion_lengths": (1, 3),
        "completion_ids": pack_ids([4, 5, 6, 7]),
        "temperature": 1.0,
        "loss": loss,
    }
    changed = {k: v for k, v in keys.items() if k in fields}
    rest = {k: v for k, v in keys.items() if k not in fields}
    if rest:
        changed["loss"] = msgspec.structs.replace(loss, **rest)
    return MicroBatch(**{**fields, **changed})


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"prompt_ids": pack_ids([1, 2])}, "shape"),
        ({"completion_ids": pack_ids([4, 5, 6, 50])}, "bounds"),
        ({"prompt_of": (0, 1)}, "bounds"),
        ({"prompt_of": (0,)}, "bounds"),
        ({"completion_lengths": (0, 4)}, "bounds"),
        ({"prompt_lengths": ()}, "bounds"),
        ({"completion_lengths": (2, 3)}, "shape"),
        ({"completion_lengths": (2**62, 3)}, "bounds"),
        ({"temperature": 0.0}, "bounds"),
        ({"temperature": float("nan")}, "not_finite"),
        ({"loss": None}, "bounds"),
        ({"old_logprobs": pack_logprobs([1.0])}, "shape"),
        ({"advantages": pack_logprobs([1.0, float("inf")])}, "not_finite"),
        ({"normalizer": 0.0}, "bounds"),
        ({"sampled": (True,)}, "shape"),
        ({"epsilon": float("nan")}, "not_finite"),
        ({"loss_type": "other"}, "schema"),
        ({"prompt_ids": b"abc"}, "bounds"),
    ],
)
def test_a_micro_batch_that_is_not_what_it_says(keys, reason):
    assert read_micro_batch(strict.encode(micro()), 5, LIMITS, "learn") == micro()
    with pytest.raises(BadMessage) as caught:
        read_micro_batch(strict.encode(micro(**keys)), 5, LIMITS, "learn")
    assert caught.value.reason == reason
    assert reason in FRAME_REASONS


def test_padding_does_not_make_a_small_micro_batch_large():
    """63 completions of one token and one of 60: 124 tokens, thousands once padded."""
    lengths = (*[1] * 63, 60)
    ids = pack_ids([1] * sum(lengths))
    hostile = micro(completion_lengths=lengths, completion_ids=ids, prompt_of=(0,) * 64, loss=None)
    with pytest.raises(BadMessage, match="padded"):
        read_micro_batch(strict.encode(hostile), hostile.rows, LIMITS, "score")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"num_generations": 10**6}, "bounds"),
        ({"max_tokens": 0}, "bounds"),
        ({"max_tokens": 10**9}, "bounds"),
        ({"temperature": -1.0}, "bounds"),
        ({"top_p": 1.5}, "bounds"),
        ({"ids": pack_ids([1, 50])}, "bounds"),
        ({"ids": pack_ids([1])}, "shape"),
        ({"lengths": (1,)}, "shape"),
        ({"seed": -1}, "bounds"),
    ],
)
def test_invalid_wave_is_refused(keys, reason):
    fields = {
        "lengths": (2,),
        "ids": pack_ids([1, 2]),
        "num_generations": 2,
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 3,
    }
    assert read_wave(strict.encode(WaveDescription(**fields)), 2, LIMITS).total == 2
    with pytest.raises(BadMessage) as caught:
        read_wave(strict.encode(WaveDescription(**{**fields, **keys})), 2, LIMITS)
    assert caught.value.reason == reason


@pytest.mark.parametrize("hidden", [32, 64, 96, 128, 130])
def test_codecs_err_by_no_more_than_they_say(hidden):
    rows = (
        torch.randn(7, hidden, generator=torch.Generator().manual_seed(hidden))
        * torch.logspace(-3, 3, 7)[:, None]
    )
    block = wire.int8_block(hidden)
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


@pytest.mark.parametrize(
    ("codec", "body", "reason"),
    [
        ("float32", np.array([np.nan] * 8, "<f4").tobytes(), "not_finite"),
        ("bfloat16", b"\x80\x7f" * 8, "not_finite"),
        ("int8", np.array([np.inf], "<f4").tobytes() + b"\1" * 8, "not_finite"),
        ("int8", np.array([-1], "<f4").tobytes() + b"\1" * 8, "bounds"),
        ("int8", np.array([3e38], "<f4").tobytes() + b"\x7f" * 8, "not_finite"),
        ("int8", np.array([1], "<f4").tobytes() + b"\x80" * 8, "bounds"),
        ("float32", b"\0" * 31, "size"),
    ],
)
def test_bodies_that_are_no_activations(codec, body, reason):
    with pytest.raises(BadMessage) as caught:
        decode(body, 1, 8, codec)
    assert caught.value.reason == reason
    assert reason in FRAME_REASONS


def test_our_own_broken_stage_is_not_blamed_on_a_peer():
    with pytest.raises(ValueError, match="finite"):
        encode(torch.tensor([[float("nan")]]), "bfloat16")


def test_an_int8_body_is_half_of_a_bfloat16_one():
    frame = BackwardFrame(PLACE, 1, "int8", 64)
    wide = FrameLimits(hidden=1536, vocab=50, tokens=64)
    assert body_bytes(frame, wide) / body_bytes(
        msgspec.structs.replace(frame, codec="bfloat16"), wide
    ) == pytest.approx(0.53125)
