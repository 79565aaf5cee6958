"""Micro-batches and activations as bytes, and back. Torch, no network.

describe         describe a micro-batch for a frame; `make_batch` and `compute_loss` read it
encode, decode   activations as bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swarmnode.config import TrainingConfig
from swarmnode.errors import BadMessage
from swarmnode.policy.logprobs import Batch, collate
from swarmnode.policy.ways import Row
from swarmnode.rl.corrections import importance_weights
from swarmnode.rl.objectives import Objective, policy_loss
from swarmnode.stages.stage_frames import (
    ActivationCodec,
    LossInputs,
    MicroBatch,
    WaveDescription,
    activation_bytes,
    int8_block,
)
from swarmnode.stages.trainer.stage_model import Prompts
from swarmnode.weights.trainer.codecs import (
    bfloat16_bits,
    bfloat16_values,
    int8_from_bytes,
    int8_to_bytes,
    to_bytes,
)
from swarmnode.wire.tensors import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs

# Micro-batches: rows to learn from, their description in a frame, and their loss.


@dataclass(frozen=True)
class LearnRow:
    """One completion to learn from."""

    prompt_ids: list[int]
    completion_ids: list[int]
    sampler_logprobs: list[float]
    advantage: float
    weight: float = 1.0
    group: int = 0
    """Number of its group. Completions of one group share their prompt, and a micro-batch if they
    fit."""


def describe(
    rows: Sequence[tuple[list[int], list[int]]], temperature: float, loss: LossInputs | None = None
) -> MicroBatch:
    """Return the description of a micro-batch. Equal prompts become one, in the order of
    `policy.logprobs.collate`.

    Args:
        rows: (prompt ids, completion ids) of each completion.
        loss: Inputs of the loss; None for scores.
    """
    prompts: dict[tuple[int, ...], int] = {}
    owner = tuple(prompts.setdefault(tuple(prompt), len(prompts)) for prompt, _ in rows)
    return MicroBatch(
        prompt_lengths=tuple(map(len, prompts)),
        prompt_ids=pack_ids([i for prompt in prompts for i in prompt]),
        prompt_of=owner,
        completion_lengths=tuple(len(c) for _, c in rows),
        completion_ids=pack_ids([i for _, c in rows for i in c]),
        temperature=float(temperature),
        loss=loss,
    )


def describe_loss(rows: Sequence[LearnRow], cfg: TrainingConfig, normalizer: float) -> LossInputs:
    """Return the inputs of the loss for a description.

    Args:
        normalizer: Normaliser of the whole batch.
    """
    return LossInputs(
        sampler_logprobs=pack_logprobs([x for row in rows for x in row.sampler_logprobs]),
        advantages=pack_logprobs([row.advantage for row in rows]),
        weights=pack_logprobs([row.weight for row in rows]),
        normalizer=float(normalizer),
        loss_type=cfg.loss_type,
    )


def make_batch(work: MicroBatch, device: torch.device) -> Batch:
    """Return the padded batch of a checked description. Padding is token 0 and masked."""
    prompts = _ragged(unpack_ids(work.prompt_ids).tolist(), work.prompt_lengths)
    completions = _ragged(unpack_ids(work.completion_ids).tolist(), work.completion_lengths)
    return collate(
        [Row(prompts[owner], ids) for owner, ids in zip(work.prompt_of, completions, strict=True)],
        0,
        device,
    )


def make_prompts(description: WaveDescription, device: torch.device) -> Prompts:
    """Return the padded prompts of a checked description."""
    prompts = _ragged(unpack_ids(description.ids).tolist(), description.lengths)
    width = max(description.lengths)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return Prompts(ids, mask, description.num_generations)


def compute_loss(
    work: MicroBatch, batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, list[float]]:
    """Return the loss, and the sums of `LearntFrame`.

    Args:
        logprobs: (N, T).
        entropy: (N, T).
    """
    loss = work.loss
    assert loss is not None
    mask = batch.completion_mask
    sampler = torch.zeros(mask.shape).masked_scatter(
        mask.cpu(), torch.tensor(unpack_logprobs(loss.sampler_logprobs))
    )
    per_row = lambda data: torch.tensor(unpack_logprobs(data), device=logprobs.device)
    correction = importance_weights(logprobs, sampler.to(logprobs.device), mask)
    weights = per_row(loss.weights).unsqueeze(1) * correction
    value = policy_loss(
        logprobs,
        per_row(loss.advantages),
        mask,
        Objective(loss.loss_type),
        loss.normalizer,
        weights=weights,
    )
    sums = [
        value,
        (entropy * mask).sum(),
        mask.sum(),
        weights.sum(),
        weights.square().sum(),
    ]
    return value, [float(x.detach()) for x in sums]


def _ragged(flat: list, lengths: Sequence[int]) -> list[list]:
    out, start = [], 0
    for length in lengths:
        out.append(flat[start : start + length])
        start += length
    return out


# Activations and gradients as bytes: float32, bfloat16, or int8 with a scale per 64 values. A crew
# generates and trains with one activation codec, because rounding is part of the policy. Error per
# hop: bfloat16 2⁻⁹ of the value, int8 1/254 of the largest value of its block.


def encode(rows: torch.Tensor, codec: ActivationCodec) -> bytes:
    """Return activations (R, H) float32 as bytes.

    Raises:
        ValueError: A value is not finite.
    """
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
    """Return activations (rows, hidden), float32 in host memory.

    Raises:
        BadMessage: The reason is `size`, `bounds` or `not_finite`.
    """
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
