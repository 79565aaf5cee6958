"""Payloads: errors and sizes of the codecs. Hostile bytes only raise BadMessage with a known
reason."""

import math
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import torch

from swarmnode.errors import BadMessage
from swarmnode.weights.layout import BLOCK, body_bytes, elements, make_layout, payload_limit
from swarmnode.weights.payload import Header, build
from swarmnode.weights.trainer import codecs
from swarmnode.weights.trainer.codecs import ERROR_SHARE, decode, encode_smallest, make_anchor
from swarmnode.weights.trainer.payload_files import PayloadFiles
from swarmnode.wire import strict

REASONS = (
    "oversize",
    "malformed",
    "schema",
    "codec",
    "fragment",
    "shape",
    "size",
    "anchor",
    "bounds",
    "not_finite",
)
LAYOUT = make_layout(
    [("w", (30, 20), "float32"), ("a.bias", (7,), "float32"), ("scalar", (), "float32")]
)


def tensors(seed=0, scale=1.0):
    rng = torch.Generator().manual_seed(seed)
    return {s.name: scale * torch.randn(s.shape, generator=rng) for s in LAYOUT}


def encode(*args, **options):
    return b"".join(codecs.encode(*args, **options))


def header_of(payload):
    return strict.decode(payload[4 : 4 + int.from_bytes(payload[:4], "big")], Header)


def reheaded(payload, **changes):
    """The payload with another header."""
    header = header_of(payload)
    start = 4 + int.from_bytes(payload[:4], "big")
    return build(msgspec.structs.replace(header, **changes), [payload[start:]])


def with_tensor(payload, index=0, **changes):
    heads = list(header_of(payload).tensors)
    heads[index] = msgspec.structs.replace(heads[index], **changes)
    return reheaded(payload, tensors=tuple(heads))


def with_body(payload, index, body):
    """The payload with another body."""
    header = header_of(payload)
    start = 4 + int.from_bytes(payload[:4], "big")
    bodies = []
    for tensor in header.tensors:
        length = body_bytes(tensor, header.codec)
        bodies.append(payload[start : start + length])
        start += length
    bodies[index] = body
    return build(header, bodies)


def reason(data, codec="bfloat16", **options):
    with pytest.raises(BadMessage) as error:
        decode(data, LAYOUT, codec, **options)
    assert error.value.reason in REASONS
    return error.value.reason


def test_int8_error_is_bounded():
    anchor = make_anchor(tensors(1, scale=100.0))
    sent = {n: t + 0.01 * tensors(2)[n] for n, t in anchor.tensors.items()}
    got = decode(encode(sent, LAYOUT, "int8", anchor=anchor), LAYOUT, "int8", anchor=anchor)
    for n in sent:
        largest = (sent[n] - anchor.tensors[n]).abs().max()
        # and the rounding of float32 at 100
        assert (got[n] - sent[n]).abs().max() <= largest / 254 + 1e-5
    # of the weights themselves it would err by a hundred times as much as the replicas differ
    assert (sent["w"] - anchor.tensors["w"]).abs().max() < 100 * 3 / 254


@pytest.mark.parametrize(
    ("codec", "per_element"), [("float32", 4.0), ("bfloat16", 2.0), ("int8", 1 + 4 / BLOCK)]
)
def test_a_payload_costs_what_its_codec_says(codec, per_element):
    layout = make_layout([("w", (64, 1024), "float32")])
    sent = {"w": torch.randn(64, 1024)}
    payload = encode(sent, layout, codec, anchor=make_anchor({"w": torch.zeros(64, 1024)}))
    assert len(payload) == pytest.approx(per_element * elements(layout), rel=0.005)
    assert len(payload) <= payload_limit(layout, codec) <= payload_limit(layout)


@pytest.mark.parametrize(("codec", "bits"), [("float32", 24), ("bfloat16", 8)])
def test_bfloat16_error_is_relative_to_the_difference(codec, bits):
    anchor = make_anchor(tensors(1))
    sent = {n: t + 1e-3 * tensors(2)[n] for n, t in anchor.tensors.items()}
    got = decode(encode(sent, LAYOUT, codec, anchor=anchor), LAYOUT, anchor=anchor)
    for n, t in sent.items():
        difference = (t - anchor.tensors[n]).abs()
        # and the rounding of float32 at weights of about 1
        assert bool(((got[n] - t).abs() <= difference * 2.0**-bits + 6e-7).all())


def wandered(outer_steps, seed=0):
    """Base weights, weights after `steps` nearly independent outer steps, and the norm of the last
    one."""
    rng = torch.Generator().manual_seed(seed)
    base = {"w": torch.randn(64, 1024, generator=rng)}
    steps = 1e-3 * torch.randn(outer_steps, 64, 1024, generator=rng)
    return make_anchor(base), {"w": base["w"] + steps.sum(0)}, float(steps[-1].norm())


WIDE = make_layout([("w", (64, 1024), "float32")])


@pytest.mark.parametrize(
    ("outer_steps", "factor", "codec"),
    [
        (1, 1.0, "int8"),
        (50, 1.0, "int8"),
        (200, 0.8, "bfloat16"),
        (200, 1.2, "int8"),
        (50, 1e-4, "float32"),
        (50, 0.0, "float32"),
    ],
)
def test_selects_the_smallest_codec_within_the_error_bound(outer_steps, factor, codec):
    anchor, sent, change = wandered(outer_steps)
    payload = encode_smallest(sent, WIDE, factor * change, anchor=anchor)
    assert header_of(payload).codec == codec
    assert len(payload) == len(encode(sent, WIDE, codec, anchor=anchor))
    got = decode(payload, WIDE, anchor=anchor)
    assert float((got["w"] - sent["w"]).norm()) <= max(ERROR_SHARE * factor * change, 1e-4)


def test_our_own_broken_weights_are_sent_as_they_are():
    """The partner's gate refuses them; the codec must not end the trainer."""
    anchor, sent, change = wandered(1)
    sent["w"][0, 0] = math.nan
    payload = encode_smallest(sent, WIDE, change, anchor=anchor)
    assert bool(decode(payload, WIDE, anchor=anchor)["w"].isnan().any())


def test_another_anchor_is_noticed():
    mine, theirs = make_anchor(tensors(1)), make_anchor(tensors(2))
    assert mine.hash != theirs.hash
    payload = encode(tensors(), LAYOUT, "int8", anchor=theirs)
    assert reason(payload, "int8", anchor=mine) == "anchor"


def test_every_lie_in_a_header_is_refused_by_name():
    good = encode(tensors(), LAYOUT, "bfloat16", fragment=2)
    assert decode(good, LAYOUT, "bfloat16", fragment=2)
    check = lambda data: reason(data, fragment=2)
    assert reason(good) == "fragment"
    assert check(reheaded(good, codec="float32")) == "codec"
    assert check(reheaded(good, anchor=bytes(32))) == "anchor"
    assert check(reheaded(good, codec="patch")) == "schema"
    assert check(with_tensor(good, name="other")) == "shape"
    assert check(reheaded(good, tensors=header_of(good).tensors[:2])) == "shape"
    assert check(reheaded(good, tensors=header_of(good).tensors[::-1])) == "shape"
    assert check(with_tensor(good, 2, shape=(20, 30))) == "shape"
    assert check(with_tensor(good, 2, shape=(2**62, 2**62))) == "shape"
    assert check(with_tensor(good, dtype="float16")) == "shape"


def test_every_lie_about_length_is_refused():
    good = encode(tensors(), LAYOUT, "bfloat16")
    assert reason(good + b"\0") == "size"
    assert reason(good[:-1]) == "size"
    assert reason(good + bytes(10_000)) == "oversize"
    assert reason(b"") == "malformed"
    assert reason(b"\xff\xff\xff\xff" + good[4:]) == "oversize"
    assert reason((1000).to_bytes(4, "big") + bytes(30)) in ("malformed", "oversize")
    assert reason(good[:20]) == "malformed"


def test_a_header_has_one_encoding_only():
    good = encode(tensors(), LAYOUT, "bfloat16")
    header = msgspec.to_builtins(header_of(good), builtin_types=(bytes,))
    body = good[4 + int.from_bytes(good[:4], "big") :]
    rebuilt = lambda h: (
        (head := msgspec.msgpack.encode(h)) and len(head).to_bytes(4, "big") + head + body
    )
    assert rebuilt(header) == good
    assert reason(rebuilt(dict(reversed(header.items())))) == "malformed"
    assert reason(rebuilt({**header, "more": 1})) == "schema"
    assert reason(rebuilt({**header, "codec": "pickle"})) == "schema"


def test_a_hostile_quantiser_is_refused():
    anchor = make_anchor(tensors(1))
    good = encode(tensors(), LAYOUT, "int8", anchor=anchor)
    # a.bias: one block of 7
    body = lambda scale, q: torch.tensor([scale]).numpy().tobytes() + bytes([q]) * 7
    check = lambda scale, q=1: reason(with_body(good, 0, body(scale, q)), "int8", anchor=anchor)
    assert check(float("nan")) == "not_finite"
    assert check(float("inf")) == "not_finite"
    assert check(-1.0) == "bounds"
    assert check(1.0, 0x80) == "bounds"
    assert decode(with_body(good, 0, body(1.0, 0x7F)), LAYOUT, "int8", anchor=anchor)


def test_writing_a_state_needs_memory_of_one_tensor(tmp_path):
    """Bytes of Python and numpy at the peak, for few and for many tensors of a quarter of a million
    values."""
    files = PayloadFiles(tmp_path)

    def peak(count):
        state = {f"{number:02}": torch.full((512, 512), float(number)) for number in range(count)}
        layout = make_layout((name, t.shape, "float32") for name, t in state.items())
        tracemalloc.start()
        try:
            written = files.write(codecs.encode(state, layout, "bfloat16"))
            return tracemalloc.get_traced_memory()[1], Path(written).stat().st_size
        finally:
            tracemalloc.stop()

    peak(1)  # whatever is imported or kept from the first time on
    (few, small), (many, large) = peak(2), peak(32)
    assert large > 15 * small
    assert large > 32 * 2 * 512 * 512
    assert many < few + 2**18, "a quarter of one more tensor"
    assert few < 2**21, "a tensor of half a MiB, encoded and on its way"
