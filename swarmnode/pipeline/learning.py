"""The tail's share of a step: from log-probabilities to the loss and the head's sums; and batches
to descriptions and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmnode.config import TrainingConfig
from swarmnode.pipeline.sessions import Prompts
from swarmnode.pipeline.work import Loss, MicroBatch, Questions
from swarmnode.policy.logprobs import Batch, collate
from swarmnode.rl.corrections import against_sampler, own_correction
from swarmnode.rl.objectives import Objective, policy_loss
from swarmnode.wire.tensors import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs


@dataclass(frozen=True)
class LearnRow:
    """One completion to learn from."""

    prompt_ids: list[int]
    completion_ids: list[int]
    old_logprobs: list[float]
    advantage: float
    weight: float = 1.0
    group: int = 0
    """Completions of one group go into one micro-batch where it can hold them, and share its
    prompt."""
    sampled: bool = False
    """`old_logprobs` are of what sampled it, and corrected for."""


def describe(
    rows: Sequence[tuple[list[int], list[int]]], temperature: float, loss: Loss | None = None
) -> MicroBatch:
    """(prompt ids, completion ids) as a frame carries them; equal prompts become one, in
    `policy.logprobs.collate`'s order."""
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


def describe_loss(rows: Sequence[LearnRow], cfg: TrainingConfig, normalizer: float) -> Loss:
    objective, (correction, level) = Objective.of(cfg), own_correction(cfg.options)
    return Loss(
        old_logprobs=pack_logprobs([x for row in rows for x in row.old_logprobs]),
        advantages=pack_logprobs([row.advantage for row in rows]),
        weights=pack_logprobs([row.weight for row in rows]),
        normalizer=float(normalizer),
        loss_type=cfg.loss_type,
        epsilon=objective.epsilon,
        epsilon_high=objective.epsilon_high,
        delta=objective.delta,
        sampled=tuple(row.sampled for row in rows),
        correction=correction,
        level=level,
    )


def batch_of(work: MicroBatch, device: torch.device) -> Batch:
    """The padded batch that `work`, checked, describes. Padding is token 0: masked everywhere."""
    prompts = _ragged(unpack_ids(work.prompt_ids).tolist(), work.prompt_lengths)
    completions = _ragged(unpack_ids(work.completion_ids).tolist(), work.completion_lengths)
    return collate(
        [(prompts[owner], ids) for owner, ids in zip(work.prompt_of, completions, strict=True)],
        0,
        device,
    )


def prompts_of(questions: Questions, device: torch.device) -> Prompts:
    prompts = _ragged(unpack_ids(questions.ids).tolist(), questions.lengths)
    width = max(questions.lengths)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return Prompts(ids, mask, questions.num_generations, questions.names)


def loss_of(
    work: MicroBatch, batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, list[float]]:
    """Loss to go backward from, and the sums of `frames.Learnt`. logprobs, entropy (N, T)."""
    loss = work.loss
    assert loss is not None
    mask = batch.completion_mask
    per_token = lambda data: (
        torch.zeros(mask.shape)
        .masked_scatter(mask.cpu(), torch.tensor(unpack_logprobs(data)))
        .to(logprobs.device)
    )
    per_row = lambda data: torch.tensor(unpack_logprobs(data), device=logprobs.device)
    objective = Objective(
        loss.loss_type, epsilon=loss.epsilon, epsilon_high=loss.epsilon_high, delta=loss.delta
    )
    sampled = torch.tensor(loss.sampled, device=logprobs.device)
    old, weights = against_sampler(
        logprobs,
        per_token(loss.old_logprobs),
        sampled,
        per_row(loss.weights),
        mask,
        loss.correction,
        loss.level,
    )
    out = policy_loss(
        logprobs, old, per_row(loss.advantages), mask, objective, loss.normalizer, weights=weights
    )
    tokens = out.tokens.detach()
    sums = [
        out.loss,
        out.clip_fraction * tokens,
        (entropy * mask).sum(),
        tokens,
        weights.sum(),
        weights.square().sum(),
    ]
    return out.loss, [float(x.detach()) for x in sums]


def _ragged(flat: list, lengths: Sequence[int]) -> list[list]:
    out, start = [], 0
    for length in lengths:
        out.append(flat[start : start + length])
        start += length
    return out
