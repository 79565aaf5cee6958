"""A whole int8 copy of a crew's policy, to sample from, and how it is encoded. Torch.

    adapter         bfloat16, tensor after tensor: 2 bytes per weight
    whole weights   int8 codes of each matrix with their scales, else float32; XOR the base
                    model's, deflated: a value within half a step of its row's scale
                    costs almost nothing

Each body is complete, not a difference to an earlier body, so a lost body spoils no later one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from swarmnode.averaging.codecs import bfloat16_bits, bfloat16_values, to_bytes
from swarmnode.errors import BadMessage
from swarmnode.policy.model import base_model
from swarmnode.policy.quantised import MOST, Int8Matrix, quantise
from swarmnode.stages.wire import StageSpec
from swarmnode.weights.layout import Layout, TensorSpec, elements

if TYPE_CHECKING:
    from swarmnode.policy.model import Model

DEFLATE_LEVEL: Final = 1
"""Higher levels take several times as long and save a few percent, since most bytes are zero."""
DEFLATE_OVERHEAD_BYTES: Final = 1024
"""Bytes that deflate may add to data that it cannot shorten, beside a thousandth of the data."""

Tensors = Mapping[str, torch.Tensor]
BaseTensors = Callable[[str], torch.Tensor]
"""Name in the whole model → tensor of the base model."""
Parts = dict[str, tuple[torch.Tensor, ...]]
"""Name in the whole model → (codes, scales) of a matrix, else (tensor,)."""


def copied(spec: StageSpec, layout: Layout) -> Layout:
    """Return what a copy has of a stage: all that is trained; a tied embedding only of stage 0."""
    twice = spec.shares_embedding and spec.has_head
    return tuple(
        tensor for tensor in layout if not (twice and tensor.name.endswith("lm_head.weight"))
    )


def copy_bytes(layout: Layout, adapter: bool) -> int:
    """Return the exact length of an adapter's copy, or the greatest length of another copy."""
    if adapter:
        return 2 * elements(layout)
    plain = sum(_size(tensor) for tensor in layout)
    return plain + plain // 1000 + DEFLATE_OVERHEAD_BYTES


def _size(tensor: TensorSpec) -> int:
    return tensor.elements + 4 * tensor.shape[0] if len(tensor.shape) == 2 else 4 * tensor.elements


@torch.no_grad()
def encode_copy(
    spec: StageSpec, weights: Tensors, layout: Layout, base: BaseTensors | None
) -> bytes:
    """Encode `weights`, named as in the stage. `base` is None for an adapter."""
    if base is None:
        return b"".join(
            to_bytes(bfloat16_bits(weights[tensor.name].float()), "<i2") for tensor in layout
        )
    deflate = zlib.compressobj(DEFLATE_LEVEL)
    out = []
    for tensor in layout:
        before, scales = _base_bytes(base(spec.whole(tensor.name)))
        now, _ = _bytes(weights[tensor.name], scales)
        out.append(deflate.compress(np.bitwise_xor(now, before).tobytes()))
    return b"".join([*out, deflate.flush()])


def _base_bytes(tensor: torch.Tensor) -> tuple[np.ndarray, torch.Tensor | None]:
    return _bytes(tensor, None)


def _bytes(
    tensor: torch.Tensor, scales: torch.Tensor | None
) -> tuple[np.ndarray, torch.Tensor | None]:
    """Return the tensor's bytes, and the scales if it is a matrix."""
    if tensor.ndim != 2:
        return np.frombuffer(to_bytes(tensor.float(), "<f4"), np.uint8), None
    codes, chosen = quantise(tensor, None if scales is None else scales.to(tensor.device))
    return np.frombuffer(to_bytes(codes, "i1") + to_bytes(chosen, "<f4"), np.uint8), chosen


def decode_copy(
    spec: StageSpec, body: bytes | bytearray, layout: Layout, base: BaseTensors | None
) -> Parts:
    """Return the weights that `encode_copy` encoded, on the host.

    Raises:
        BadMessage: size, malformed, not_finite or bounds.
    """
    pieces: Iterator[bytes | memoryview] = (
        _split(body, layout) if base is None else _inflate(body, layout)
    )
    found: Parts = {}
    for tensor, piece in zip(layout, pieces, strict=True):
        name = spec.whole(tensor.name)
        if base is None:
            found[name] = (
                _finite(
                    bfloat16_values(torch.from_numpy(np.frombuffer(piece, "<i2").copy())).view(
                        tensor.shape
                    )
                ),
            )
            continue
        raw = np.bitwise_xor(np.frombuffer(piece, np.uint8), _base_bytes(base(name))[0])
        if len(tensor.shape) != 2:
            found[name] = (_finite(torch.from_numpy(raw.view("<f4").copy()).view(tensor.shape)),)
            continue
        codes = torch.from_numpy(raw[: tensor.elements].view("i1")).view(tensor.shape)
        scales = _finite(torch.from_numpy(raw[tensor.elements :].copy().view("<f4")))
        if bool((codes < -MOST).any()) or bool((scales < 0).any()):
            raise BadMessage("bounds", "not a quantised matrix")
        found[name] = (codes, scales)
    return found


def _split(body: bytes | bytearray, layout: Layout) -> Iterator[bytes | memoryview]:
    if len(body) != copy_bytes(layout, adapter=True):
        raise BadMessage(
            "size", f"{len(body)} bytes of an adapter of {copy_bytes(layout, adapter=True)}"
        )
    at = 0
    for tensor in layout:
        yield memoryview(body)[at : at + 2 * tensor.elements]
        at += 2 * tensor.elements


def _inflate(body: bytes | bytearray, layout: Layout) -> Iterator[bytes | memoryview]:
    """Yield the bytes of each tensor, never more than its length, whatever `body` holds."""
    stream, rest = zlib.decompressobj(), bytes(body)
    try:
        for tensor in layout:
            piece = stream.decompress(rest, _size(tensor))
            rest = stream.unconsumed_tail
            if len(piece) != _size(tensor):
                raise BadMessage(
                    "size", f"{len(piece)} bytes of {tensor.name}, which has {_size(tensor)}"
                )
            yield piece
        if stream.decompress(rest, 1) or not stream.eof or stream.unused_data:
            raise BadMessage("size", "more than a stage")
    except zlib.error as error:
        raise BadMessage("malformed", f"does not inflate: {error}") from None


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise BadMessage("not_finite", "weights")
    return tensor


@torch.no_grad()
def install(model: Model, parts: Parts) -> None:
    """Write `parts` into the copy that `policy.quantised.build_quantised` made of the model."""
    matrices = {
        name.replace(".base_layer", ""): m
        for name, m in base_model(model).named_modules()
        if isinstance(m, Int8Matrix)
    }
    others = {name.replace(".base_layer", ""): p for name, p in model.named_parameters()}
    for name, tensors in parts.items():
        owner, _, last = name.rpartition(".")
        if len(tensors) == 2:
            matrices[owner].codes.copy_(tensors[0])
            matrices[owner].scales.copy_(tensors[1])
        elif last == "bias" and owner in matrices:
            bias = matrices[owner].bias
            assert bias is not None
            bias.copy_(tensors[0])
        else:
            others[name].copy_(tensors[0])
