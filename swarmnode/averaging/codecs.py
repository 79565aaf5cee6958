"""Tensors to payloads and back: int4, int8, bfloat16 or float32 of the difference to an anchor, the
base weights, which both sides have. A newcomer's state is bfloat16 of the weights themselves.

    int4        1/14 of the largest difference in a block of 64
    int8        1/254 of the largest difference in a block of 256
    bfloat16    2⁻⁹ of each difference

is what a value errs by at most. The difference to the base grows with every outer step, and what a
partner is to learn, the change since the last one, does not: int4 errs by 0.76 of an interval's
change after 50 outer steps and by 1.5 after 200, int8 by 0.05 and 0.1. So whoever encodes measures
its own error and takes the smallest codec that suffices (`encode_smallest`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from swarmnode.averaging.outer import Tensors
from swarmnode.errors import BadMessage
from swarmnode.weights.layout import BLOCK, CODECS, SMALL_BLOCK, Codec, Layout, TensorSpec
from swarmnode.weights.payload import Header, TensorHeader, build, checksum, parse

ERROR_SHARE: Final = 0.1
"""Largest error of a payload, in units of what its sender has learnt since its last outer step."""


@dataclass(frozen=True)
class Anchor:
    """What differences are relative to. Make it with `make_anchor`."""

    hash: bytes
    tensors: Tensors
    digests: Mapping[str, bytes]
    """SHA-256 of each tensor's bytes."""

    def of(self, names: Iterable[str]) -> Anchor:
        """The anchor of some of its tensors."""
        return Anchor(
            _joined({name: self.digests[name] for name in names}), self.tensors, self.digests
        )


def make_anchor(tensors: Mapping[str, torch.Tensor]) -> Anchor:
    """float32 host tensors → an anchor; its hash is SHA-256 over name and hash of each, by name."""
    digests = {
        name: hashlib.sha256(to_bytes(tensor, "<f4")).digest() for name, tensor in tensors.items()
    }
    return Anchor(_joined(digests), dict(tensors), digests)


def _joined(digests: Mapping[str, bytes]) -> bytes:
    joined = hashlib.sha256(b"swarmnode/anchor/2")
    for name in sorted(digests):
        joined.update(len(name.encode()).to_bytes(2, "big") + name.encode() + digests[name])
    return joined.digest()


def encode_smallest(
    tensors: Mapping[str, torch.Tensor],
    layout: Layout,
    change: float,
    *,
    anchor: Anchor,
    fragment: int = 0,
) -> bytes:
    """Return the payload of `layout`'s tensors in the smallest codec that errs by at most
    ERROR_SHARE of `change`, or else in float32.

    Args:
        tensors: float32 on the host.
        change: ‖θ − φ‖ of these tensors, what was learnt since the last outer step.
    """
    for codec in CODECS[:-1]:
        bodies = _bodies_within(tensors, layout, codec, anchor, ERROR_SHARE * change)
        if bodies is not None:
            return _payload(layout, codec, fragment, anchor, bodies)
    return encode(tensors, layout, CODECS[-1], fragment=fragment, anchor=anchor)


def _bodies_within(
    tensors: Mapping[str, torch.Tensor],
    layout: Layout,
    codec: Codec,
    anchor: Anchor,
    error: float,
) -> list[bytes] | None:
    """Return the encoded tensors, or None as soon as they err by more than `error` together."""
    bodies, squared = [], 0.0
    for spec in layout:
        values = _values(tensors, spec, anchor)
        if not bool(values.isfinite().all()):
            return None
        body = _body(values, codec)
        wrong = _from_body(body, spec.elements, codec) - values
        squared += float(wrong.square().sum(dtype=torch.float64))
        if squared > error**2:
            return None
        bodies.append(body)
    return bodies


def encode(
    tensors: Mapping[str, torch.Tensor],
    layout: Layout,
    codec: Codec,
    *,
    fragment: int = 0,
    anchor: Anchor | None = None,
) -> bytes:
    """The payload of `layout`'s tensors, which are float32 on the host. Raises ValueError for int4
    or int8 without an anchor."""
    _check_anchor(codec, anchor)
    bodies = [_body(_values(tensors, spec, anchor), codec) for spec in layout]
    return _payload(layout, codec, fragment, anchor, bodies)


def encoded(tensors: Mapping[str, torch.Tensor], layout: Layout, codec: Codec) -> Iterator[bytes]:
    """What `encode` gives without an anchor, a tensor at a time. Each is encoded twice, since the
    header has the checksums of all; none may change until the last piece is taken."""
    _check_anchor(codec, None)
    heads = [_head(spec, _body(_values(tensors, spec, None), codec)) for spec in layout]
    yield build(Header(codec, 0, 0, b"", heads), [])
    for spec in layout:
        yield _body(_values(tensors, spec, None), codec)


def _payload(
    layout: Layout, codec: Codec, fragment: int, anchor: Anchor | None, bodies: list[bytes]
) -> bytes:
    heads = [_head(spec, body) for spec, body in zip(layout, bodies, strict=True)]
    return build(Header(codec, fragment, 0, anchor.hash if anchor else b"", heads), bodies)


def _head(spec: TensorSpec, body: bytes) -> TensorHeader:
    return TensorHeader(spec.name, spec.shape, spec.dtype, len(body), checksum(body))


def _values(
    tensors: Mapping[str, torch.Tensor], spec: TensorSpec, anchor: Anchor | None
) -> torch.Tensor:
    """(elements,) float32: the difference to the anchor, or the weights."""
    tensor = tensors[spec.name]
    return (tensor if anchor is None else tensor - anchor.tensors[spec.name]).reshape(-1)


def _body(flat: torch.Tensor, codec: Codec) -> bytes:
    match codec:
        case "int4":
            return int4_to_bytes(flat)
        case "int8":
            return int8_to_bytes(flat, BLOCK)
        case "bfloat16":
            return to_bytes(bfloat16_bits(flat), "<i2")
        case "float32":
            return to_bytes(flat, "<f4")


def _from_body(body: bytes | memoryview, elements: int, codec: Codec) -> torch.Tensor:
    """(elements,) float32 from `_body`; the length of `body` was checked. Raises BadMessage."""
    match codec:
        case "int4":
            return int4_from_bytes(body, elements)
        case "int8":
            return int8_from_bytes(body, elements, BLOCK)
        case "bfloat16":
            return bfloat16_values(torch.from_numpy(np.frombuffer(body, "<i2").copy()))
        case "float32":
            return torch.from_numpy(np.frombuffer(body, "<f4").copy())


def decode(
    data: bytes | memoryview,
    layout: Layout,
    codec: Codec | None = None,
    *,
    fragment: int = 0,
    anchor: Anchor | None = None,
) -> Tensors:
    """float32 host tensors of `layout` from a peer's payload. Whether their values make sense is
    the gate's question.

    Args:
        codec: None where the sender chooses.

    Raises:
        BadMessage: As `payload.parse`, or not_finite or bounds for a quantiser.
        ValueError: As `encode`.
    """
    _check_anchor(codec, anchor)
    codec, bodies = parse(
        data, layout, codec, fragment=fragment, anchor=anchor.hash if anchor else b""
    )
    tensors = {}
    for spec, body in zip(layout, bodies, strict=True):
        flat = _from_body(body, spec.elements, codec)
        if anchor is not None:
            flat += anchor.tensors[spec.name].reshape(-1)
        tensors[spec.name] = flat.reshape(spec.shape)
    return tensors


def _check_anchor(codec: Codec | None, anchor: Anchor | None) -> None:
    if anchor is None and codec not in ("bfloat16", "float32"):
        raise ValueError("int4 and int8 are of the difference to an anchor")


def bfloat16_bits(tensor: torch.Tensor) -> torch.Tensor:
    """float32 → bfloat16, rounded to nearest even, as int16 of the same shape."""
    return tensor.to(torch.bfloat16).view(torch.int16)


def bfloat16_values(bits: torch.Tensor) -> torch.Tensor:
    """int16 bits → float32 of the same shape."""
    return bits.view(torch.bfloat16).float()


def to_bytes(tensor: torch.Tensor, dtype: str) -> bytes:
    """Row-major little-endian bytes; dtype as numpy writes it, e.g. `<f4`."""
    return tensor.detach().cpu().contiguous().numpy().astype(dtype, copy=False).tobytes()


def int8_blocks(flat: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(elements,) float32 → one float32 scale per `block` elements, and int8 (elements,): value =
    scale · q, q in −127 … 127.

    A value errs by at most 1/254 of the largest magnitude in its block.
    """
    blocks = -(-flat.numel() // block)
    padded = torch.zeros(blocks * block, device=flat.device)
    padded[: flat.numel()] = flat
    padded = padded.view(blocks, block)
    scales = padded.abs().amax(1) / 127  # (blocks,)
    q = (
        torch.where(scales[:, None] > 0, padded / scales[:, None], 0.0)
        .round()
        .clamp(-127, 127)
        .to(torch.int8)
    )
    return scales, q.view(-1)[: flat.numel()]


def int8_to_bytes(flat: torch.Tensor, block: int) -> bytes:
    """`int8_blocks` as bytes: all scales, f32, then all values."""
    scales, q = int8_blocks(flat, block)
    return to_bytes(scales, "<f4") + to_bytes(q, "i1")


def int8_from_bytes(body: bytes | memoryview, elements: int, block: int) -> torch.Tensor:
    """(elements,) float32 from `int8_to_bytes`; the length of `body` was checked by the caller.
    Raises BadMessage."""
    blocks = -(-elements // block)
    scales = torch.from_numpy(np.frombuffer(body[: 4 * blocks], "<f4").copy())
    if not bool(torch.isfinite(scales).all()):
        raise BadMessage("not_finite", "scale")
    if bool((scales < 0).any()):
        raise BadMessage("bounds", "scale")
    q = np.frombuffer(body[4 * blocks :], "i1")
    if q.min() < -127:
        raise BadMessage("bounds", "−128 is not a quantised value")
    padded = torch.zeros(blocks * block)
    padded[:elements] = torch.from_numpy(q.astype(np.float32))
    return (padded.view(blocks, block) * scales[:, None]).view(-1)[:elements]


def int4_to_bytes(flat: torch.Tensor) -> bytes:
    """(elements,) float32 → a bfloat16 scale per SMALL_BLOCK elements, then two values a byte, the
    first in the lower half: 8 + q, q in −7 … 7, 8 where there is none.

    A value errs by at most 1/14 of the largest magnitude in its block, and 2⁻⁹ of itself: the scale
    is rounded before it is used.
    """
    blocks = -(-flat.numel() // SMALL_BLOCK)
    padded = torch.zeros(blocks * SMALL_BLOCK)
    padded[: flat.numel()] = flat
    padded = padded.view(blocks, SMALL_BLOCK)
    bits = bfloat16_bits(padded.abs().amax(1) / 7)
    scales = bfloat16_values(bits)[:, None]
    q = (
        torch.where(scales > 0, padded / scales, 0.0)
        .round()
        .clamp(-7, 7)
        .add(8)
        .to(torch.uint8)
        .view(-1)
    )
    pairs = q[: 2 * -(-flat.numel() // 2)].view(-1, 2)
    return to_bytes(bits, "<i2") + to_bytes(pairs[:, 0] | pairs[:, 1] << 4, "u1")


def int4_from_bytes(body: bytes | memoryview, elements: int) -> torch.Tensor:
    """(elements,) float32 from `int4_to_bytes`; the length of `body` was checked by the caller.
    Raises BadMessage."""
    blocks = -(-elements // SMALL_BLOCK)
    scales = bfloat16_values(torch.from_numpy(np.frombuffer(body[: 2 * blocks], "<i2").copy()))
    if not bool(torch.isfinite(scales).all()):
        raise BadMessage("not_finite", "scale")
    if bool((scales < 0).any()):
        raise BadMessage("bounds", "scale")
    pairs = np.frombuffer(body[2 * blocks :], "u1")
    q = np.stack([pairs & 15, pairs >> 4], 1).reshape(-1)
    if q.min() < 1 or (q[elements:] != 8).any():
        raise BadMessage("bounds", "no quantised value")
    padded = torch.zeros(blocks * SMALL_BLOCK)
    padded[:elements] = torch.from_numpy(q[:elements].astype(np.float32) - 8)
    return (padded.view(blocks, SMALL_BLOCK) * scales[:, None]).view(-1)[:elements]
