"""The bytes of a stage's weights for a policy copy. Torch, no network.

    adapter         bfloat16, tensor after tensor: 2 bytes per weight
    whole weights   int8 codes of each matrix with their scales, else float32; XOR those of the base
                    model, deflated: a value that changed by less than half a step of its row's
                    scale costs almost nothing

Each body is complete and does not depend on an earlier body, so a lost body spoils no later one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from swarmnode.errors import BadMessage
from swarmnode.policy.model import base_model
from swarmnode.policy.quantised import MOST, Int8Matrix, quantise
from swarmnode.stages.specs import StageSpec
from swarmnode.weights.layout import Layout, TensorSpec, elements
from swarmnode.weights.trainer.codecs import bfloat16_bits, bfloat16_values, to_bytes

if TYPE_CHECKING:
    from swarmnode.policy.model import Model


DEFLATE_LEVEL: Final = 1
"""Level of compression. Higher levels take several times as long and save a few percent, because
most bytes are zero."""
DEFLATE_OVERHEAD_BYTES: Final = 1024
"""Deflate adds at most this and a thousandth of the data to data that it cannot shorten."""

Tensors = Mapping[str, torch.Tensor]
BaseTensors = Callable[[str], torch.Tensor]
"""Name in the whole model → tensor of the base model."""
CopyTensors = dict[str, tuple[torch.Tensor, ...]]
"""Name in the whole model → (codes, scales) of a matrix, else (tensor,)."""


def copied_layout(spec: StageSpec, layout: Layout) -> Layout:
    """Return the tensors of a stage in a policy copy: all trained ones, except a tied embedding at
    the last stage, which stage 0 sends."""
    twice = spec.shares_embedding and spec.has_head
    return tuple(
        tensor for tensor in layout if not (twice and tensor.name.endswith("lm_head.weight"))
    )


def copy_bytes(layout: Layout, adapter: bool) -> int:
    """Return the length of an encoded stage in bytes: exact for an adapter, else the greatest."""
    if adapter:
        return 2 * elements(layout)
    plain = sum(_plain_bytes(tensor) for tensor in layout)
    return plain + plain // 1000 + DEFLATE_OVERHEAD_BYTES


def _plain_bytes(tensor: TensorSpec) -> int:
    return tensor.elements + 4 * tensor.shape[0] if len(tensor.shape) == 2 else 4 * tensor.elements


@torch.no_grad()
def encode_copy(
    spec: StageSpec, weights: Tensors, layout: Layout, base: BaseTensors | None
) -> bytes:
    """Return the encoded weights of a stage.

    Args:
        weights: Tensors by local name.
        base: Reads a tensor of the base model; None for an adapter.
    """
    if base is None:
        return b"".join(
            to_bytes(bfloat16_bits(weights[tensor.name].float()), "<i2") for tensor in layout
        )
    deflate = zlib.compressobj(DEFLATE_LEVEL)
    out = []
    for tensor in layout:
        before, scales = _tensor_bytes(base(spec.whole_name(tensor.name)), None)
        now, _ = _tensor_bytes(weights[tensor.name], scales)
        out.append(deflate.compress(np.bitwise_xor(now, before).tobytes()))
    return b"".join([*out, deflate.flush()])


def _tensor_bytes(
    tensor: torch.Tensor, scales: torch.Tensor | None
) -> tuple[np.ndarray, torch.Tensor | None]:
    """Return (bytes of the tensor, scales or None if it is not a matrix).

    Args:
        scales: Scales of the base model's matrix; None to choose them.
    """
    if tensor.ndim != 2:
        return np.frombuffer(to_bytes(tensor.float(), "<f4"), np.uint8), None
    codes, chosen = quantise(tensor, None if scales is None else scales.to(tensor.device))
    return np.frombuffer(to_bytes(codes, "i1") + to_bytes(chosen, "<f4"), np.uint8), chosen


def decode_copy(
    spec: StageSpec, body: bytes | bytearray, layout: Layout, base: BaseTensors | None
) -> CopyTensors:
    """Return the weights that `encode_copy` encoded, in host memory.

    Args:
        base: Reads a tensor of the base model; None for an adapter.

    Raises:
        BadMessage: The reason is `size`, `malformed`, `not_finite` or `bounds`.
    """
    pieces: Iterator[bytes | memoryview] = (
        _split(body, layout) if base is None else _inflate(body, layout)
    )
    found: CopyTensors = {}
    for tensor, piece in zip(layout, pieces, strict=True):
        name = spec.whole_name(tensor.name)
        if base is None:
            bits = torch.from_numpy(np.frombuffer(piece, "<i2").copy())
            found[name] = (_finite(bfloat16_values(bits).view(tensor.shape)),)
            continue
        raw = np.bitwise_xor(np.frombuffer(piece, np.uint8), _tensor_bytes(base(name), None)[0])
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
    """Yield the bytes of each tensor. Inflate at most the length of the tensor, for any `body`.

    Raises:
        BadMessage: The reason is `size` or `malformed`.
    """
    stream, rest = zlib.decompressobj(), bytes(body)
    try:
        for tensor in layout:
            piece = stream.decompress(rest, _plain_bytes(tensor))
            rest = stream.unconsumed_tail
            if len(piece) != _plain_bytes(tensor):
                raise BadMessage(
                    "size", f"{len(piece)} bytes of {tensor.name}, which has {_plain_bytes(tensor)}"
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
def install_copy(model: Model, parts: CopyTensors) -> None:
    """Write `parts` into a model that `policy.quantised.build_quantised` made."""
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
