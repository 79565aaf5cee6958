"""Encoding of tensors as payloads: int8, bfloat16 or float32 of the difference to an anchor. The
anchor is the base weights, which both sides have. The state for a new node is bfloat16 of the
weights themselves.

    codec       largest error of a value
    int8        1/254 of the largest difference in a block of 256
    bfloat16    2⁻⁹ of the difference

The difference to the base grows with every outer step. The change since the last outer step, which
the partner needs, does not. After 50 (200) outer steps, the error of int8 is 0.05 (0.1) of that
change. So the sender measures the error of its own payload and
uses the smallest codec that is exact enough (`encode_smallest`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from swarmnode.errors import BadMessage
from swarmnode.weights.layout import BLOCK, CODECS, Codec, Layout, TensorSpec
from swarmnode.weights.payload import Header, build, parse
from swarmnode.weights.trainer.outer import Tensors

ERROR_SHARE: Final = 0.1
"""Largest error of a payload, in units of its sender's change since the last outer step."""


@dataclass(frozen=True)
class Anchor:
    """The tensors that differences are relative to. Create it with `make_anchor`."""

    hash: bytes
    tensors: Tensors
    digests: Mapping[str, bytes]
    """SHA-256 of each tensor's bytes."""

    def of(self, names: Iterable[str]) -> Anchor:
        """Return the anchor of the tensors in `names`."""
        return Anchor(
            _joined({name: self.digests[name] for name in names}), self.tensors, self.digests
        )


def make_anchor(tensors: Mapping[str, torch.Tensor]) -> Anchor:
    """Return the anchor of float32 host tensors. Its hash is SHA-256 over the name and hash of each
    tensor, sorted by name."""
    digests = {
        name: hashlib.sha256(to_bytes(tensor, "<f4")).digest() for name, tensor in tensors.items()
    }
    return Anchor(_joined(digests), dict(tensors), digests)


def _joined(digests: Mapping[str, bytes]) -> bytes:
    joined = hashlib.sha256(b"swarmnode/anchor/1")
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
    """Return the payload of `layout`'s tensors in the smallest codec whose error is at most
    `ERROR_SHARE * change`, or else in float32.

    Args:
        tensors: float32 on the host.
        layout: The tensors to encode, in order.
        change: ‖θ − φ‖ of these tensors, the change since the last outer step.
        anchor: The base weights.
        fragment: Number of the fragment.
    """
    for codec in CODECS[:-1]:
        bodies = _bodies_within(tensors, layout, codec, anchor, ERROR_SHARE * change)
        if bodies is not None:
            return build(Header(codec, fragment, anchor.hash, layout), bodies)
    return b"".join(encode(tensors, layout, CODECS[-1], fragment=fragment, anchor=anchor))


def _bodies_within(
    tensors: Mapping[str, torch.Tensor],
    layout: Layout,
    codec: Codec,
    anchor: Anchor,
    error: float,
) -> list[bytes] | None:
    """Return the encoded tensors, or None if the norm of their total error exceeds `error` or a
    value is not finite."""
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
) -> Iterator[bytes]:
    """Yield the payload of `layout`'s tensors, in pieces of one tensor.

    Args:
        tensors: float32 on the host. They must not change before the last piece is yielded.
        layout: The tensors to encode, in order.
        codec: Encoding of the differences.
        fragment: Number of the fragment.
        anchor: The base weights; None to encode the weights themselves.

    Raises:
        ValueError: int8 without an anchor.
    """
    _check_anchor(codec, anchor)
    yield build(Header(codec, fragment, anchor.hash if anchor else b"", layout), [])
    for spec in layout:
        yield _body(_values(tensors, spec, anchor), codec)


def _values(
    tensors: Mapping[str, torch.Tensor], spec: TensorSpec, anchor: Anchor | None
) -> torch.Tensor:
    """Return the values to encode, (elements,) float32: difference to the anchor, or weights."""
    tensor = tensors[spec.name]
    return (tensor if anchor is None else tensor - anchor.tensors[spec.name]).reshape(-1)


def _body(flat: torch.Tensor, codec: Codec) -> bytes:
    match codec:
        case "int8":
            return int8_to_bytes(flat, BLOCK)
        case "bfloat16":
            return to_bytes(bfloat16_bits(flat), "<i2")
        case "float32":
            return to_bytes(flat, "<f4")


def _from_body(body: bytes | memoryview, elements: int, codec: Codec) -> torch.Tensor:
    """Decode the result of `_body` to (elements,) float32.

    Raises:
        BadMessage: not_finite or bounds. The length of `body` was checked by the caller.
    """
    match codec:
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
    """Decode a peer's payload to float32 host tensors of `layout`. The gate checks their values.

    Args:
        data: The payload.
        layout: The expected tensors, in order.
        codec: The expected codec; None if the sender chooses.
        fragment: The expected fragment.
        anchor: The base weights; None if the payload has weights instead of differences.

    Raises:
        BadMessage: As `payload.parse`, or not_finite or bounds in a quantised tensor.
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
        raise ValueError("int8 needs an anchor")


def bfloat16_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16 (nearest even); return its bits as int16 of the same shape."""
    return tensor.to(torch.bfloat16).view(torch.int16)


def bfloat16_values(bits: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of bfloat16 bits, int16 of the same shape."""
    return bits.view(torch.bfloat16).float()


def to_bytes(tensor: torch.Tensor, dtype: str) -> bytes:
    """Return the row-major bytes of a tensor. `dtype` is numpy's, such as `<f4`."""
    return tensor.detach().cpu().contiguous().numpy().astype(dtype, copy=False).tobytes()


def int8_blocks(flat: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise (elements,) float32 to int8, value = scale · q, q in −127 … 127.

    The error of a value is at most 1/254 of the largest magnitude in its block.

    Returns:
        Scales (⌈elements / block⌉,) float32, and q (elements,) int8.
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
    """Return the result of `int8_blocks` as bytes: all scales (f32), then all q."""
    scales, q = int8_blocks(flat, block)
    return to_bytes(scales, "<f4") + to_bytes(q, "i1")


def int8_from_bytes(body: bytes | memoryview, elements: int, block: int) -> torch.Tensor:
    """Decode the result of `int8_to_bytes` to (elements,) float32.

    Raises:
        BadMessage: not_finite or bounds. The length of `body` was checked by the caller.
    """
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
