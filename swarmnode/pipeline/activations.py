"""Activations and their gradients as bytes: float32, bfloat16, or int8 with a scale for every 64
values of a token.

One codec for a crew, in generation as in training: the log-probabilities that a wave records must
be those that training computes again, and rounding at every hop is part of the policy. Gradients
have a codec of their own, because nothing has to reproduce them.

Error of a value, one hop: bfloat16 2⁻⁹ of itself; int8 1/254 of the largest of its block. Blocks
never cross tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from swarmnode.averaging.codecs import (
    bfloat16_bits,
    bfloat16_values,
    int8_from_bytes,
    int8_to_bytes,
    to_bytes,
)
from swarmnode.errors import BadMessage
from swarmnode.pipeline.frames import ActivationCodec, activation_bytes, int8_block


def encode(rows: torch.Tensor, codec: ActivationCodec) -> bytes:
    """(R, H) float32, any device. Raises ValueError when a value is not finite: then our own stage
    is broken."""
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("an activation is not finite")
    if codec == "float32":
        return to_bytes(rows, "<f4")
    if codec == "bfloat16":
        return to_bytes(bfloat16_bits(rows), "<i2")
    return int8_to_bytes(rows.reshape(-1), int8_block(rows.shape[1]))


def decode(
    body: bytes | memoryview, rows: int, hidden: int, codec: ActivationCodec
) -> torch.Tensor:
    """(rows, hidden) float32 on the host. Raises BadMessage: size, bounds, not_finite."""
    if len(body) != activation_bytes(codec, rows, hidden):
        raise BadMessage("size", f"{len(body)} bytes of {codec} for {rows} × {hidden}")
    if codec == "float32":
        flat = torch.from_numpy(np.frombuffer(body, "<f4").copy())
    elif codec == "bfloat16":
        flat = bfloat16_values(torch.from_numpy(np.frombuffer(body, "<i2").copy()))
    else:
        flat = int8_from_bytes(body, rows * hidden, int8_block(hidden))
    if not bool(torch.isfinite(flat).all()):
        raise BadMessage("not_finite", "activations")
    return flat.view(rows, hidden)
