"""One stage as a model: split, forward, backward, cached decoding, loss and optimizer. Torch, no
network.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import trio
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)

from swarmnode.averaging.codecs import (
    bfloat16_bits,
    bfloat16_values,
    int8_from_bytes,
    int8_to_bytes,
    to_bytes,
)
from swarmnode.config import TrainingConfig
from swarmnode.errors import BadMessage, DeviceError, Incompatible, Unavailable
from swarmnode.policy.fingerprint import weight_files
from swarmnode.policy.footprint import logits_tokens
from swarmnode.policy.load import rename_checkpointing_flag
from swarmnode.policy.logprobs import Batch, checkpointed, collate, in_pieces, needs_checkpointing
from swarmnode.policy.model import cache_keyword
from swarmnode.rl.corrections import against_sampler, own_correction
from swarmnode.rl.objectives import WEIGHT_DECAY, Objective, policy_loss
from swarmnode.stages.wire import (
    ActivationCodec,
    Loss,
    MicroBatch,
    Questions,
    StagePart,
    StageSpec,
    activation_bytes,
    int8_block,
    is_device_error,
)
from swarmnode.wire.tensors import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs

if TYPE_CHECKING:
    from peft import PeftConfig


# Activations and gradients as bytes: float32, bfloat16, or int8 with a scale per 64 values of a
# token. A crew uses one activation codec in generation and training, because rounding is part of
# the policy. Error per hop: bfloat16 2⁻⁹ of the value; int8 1/254 of the largest value of its
# block.


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


# Keys and values of the waves in generation, by (session, policy fingerprint). A session belongs to
# one version of the policy; a dropped session starts again from token ids.


@dataclass(frozen=True)
class Prompts:
    """Q prompts padded on the left, each to be answered `num_generations` times."""

    ids: torch.Tensor
    """(Q, P)."""
    mask: torch.Tensor
    """(Q, P) 1 on tokens."""
    num_generations: int
    names: tuple[int, ...] = ()
    """(Q · num_generations,) what the completions are called; empty: 0, 1, …"""


@dataclass
class Session:
    fingerprint: bytes
    cache: DynamicCache
    rows: list[int]
    """(n,) which of the N completions are still being generated; ascending."""
    mask: torch.Tensor
    """(n, tokens so far)."""
    position: torch.Tensor
    """(n, 1) of the latest token."""


class Sessions:
    def __init__(self) -> None:
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self, session: bytes, fingerprint: bytes, cache: DynamicCache, prompts: Prompts
    ) -> None:
        """Keeps a prefilled cache of Q prompts, repeated for their completions. One that was open
        under this name is replaced."""
        cache.batch_repeat_interleave(prompts.num_generations)
        mask = prompts.mask.repeat_interleave(prompts.num_generations, 0)
        position = mask.sum(1, keepdim=True) - 1
        self._sessions[session] = Session(
            fingerprint, cache, list(prompts.names or range(len(mask))), mask, position
        )

    def step(self, session: bytes, fingerprint: bytes, rows: list[int]) -> Session:
        """The session, one token further, with `rows` only. Raises BadMessage: session (not open),
        fingerprint (another policy), rows."""
        kept = self._sessions.get(session)
        if kept is None:
            raise BadMessage("session", "not open here")
        if kept.fingerprint != fingerprint:
            raise BadMessage("fingerprint", "the session belongs to another policy")
        if rows != kept.rows:
            where = {row: i for i, row in enumerate(kept.rows)}
            if not rows or sorted(set(rows)) != rows or not where.keys() >= set(rows):
                raise BadMessage("rows", "not a rising choice of the rows that are left")
            index = torch.tensor([where[row] for row in rows])
            kept.cache.batch_select_indices(index)
            kept.mask, kept.position, kept.rows = kept.mask[index], kept.position[index], rows
        kept.mask = torch.cat([kept.mask, torch.ones_like(kept.position)], 1)
        kept.position = kept.position + 1
        return kept

    def drop(self, session: bytes) -> None:
        self._sessions.pop(session, None)

    def clear(self) -> None:
        """When the weights move, or the crew pauses."""
        self._sessions.clear()


# The tail's share of a step: from log-probabilities to the loss and the head's sums.


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
    """Loss to go backward from, and the sums of `Learnt`. logprobs, entropy (N, T)."""
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


# Packed rows of a micro-batch: one row per real token that has a successor, without padding.
#
#     padded here                                   packed on the wire, R rows
#     prompts      (Q, P)      padded on the left    tokens, one prompt after another
#     completions  (N, T − 1)  padded on the right   tokens but the last, one after another
#
# Each prompt runs once for its G completions, as in `policy.logprobs`. One row is one token, so
# quantisation does not depend on the batch.


@dataclass(frozen=True)
class Packing:
    """Where the rows of a batch are."""

    prompts: tuple[torch.Tensor, ...]
    """(row, column) of each prompt token."""
    completions: tuple[torch.Tensor, ...]
    """(row, column) of each completion token that has a successor."""
    shape: tuple[int, int, int, int]
    """Q, P, N, T."""

    @property
    def rows(self) -> int:
        return len(self.prompts[0]) + len(self.completions[0])

    def pack(self, prompts: torch.Tensor, completions: torch.Tensor | None) -> torch.Tensor:
        """(Q, P, H) and (N, T − 1, H), None where T is 1 → (R, H)."""
        head = prompts[self.prompts]
        return head if completions is None else torch.cat([head, completions[self.completions]])

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The inverse; zeros on padding."""
        questions, width, count, longest = self.shape
        head, tail = rows.split([len(self.prompts[0]), len(self.completions[0])])
        prompts = rows.new_zeros(questions, width, rows.shape[1]).index_put(self.prompts, head)
        if longest == 1:
            return prompts, None
        return prompts, rows.new_zeros(count, longest - 1, rows.shape[1]).index_put(
            self.completions, tail
        )


def packing(batch: Batch) -> Packing:
    prompts = batch.prompt_mask.nonzero(as_tuple=True)
    completions = batch.completion_mask[:, 1:].nonzero(as_tuple=True)
    (questions, width), (count, longest) = batch.prompt_ids.shape, batch.completion_ids.shape
    return Packing(prompts, completions, (questions, width, count, longest))


# The stage's computation: forward, backward by recomputation, cached steps of generation.
#
#     R rows of a packed micro-batch, H hidden size, V vocabulary
#     stage 0        token ids             → hidden (R, H)
#     body           hidden (R, H)         → hidden (R, H)
#     last stage     hidden (R, H)         → log-probabilities (N, T), or the next token's logits
#
# In a swapped run an end stage also runs its embedding, its layers or its head alone. A stage keeps
# inputs, not graphs: backward runs forward again with gradient (as hivemind and Petals do). Large
# models run completions one by one with checkpointed layers.

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probabilities (N, T), entropies (N, T)) → scalar."""


class StageRuntime:
    """One stage on this machine. `model` is as `load_stage` makes it; `dtype` what it computes in,
    float32 or bfloat16.

    Args:
        known_logits: takes the logits of all rows of the model and returns those of the tokens that
            the tokenizer has (`PolicyText.known_logits`).
    """

    def __init__(
        self,
        spec: StageSpec,
        model: Any,  # noqa: ANN401
        *,
        dtype: torch.dtype = torch.float32,
        known_logits: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
    ) -> None:
        self.spec = spec
        self.known_logits = known_logits
        self.model = model
        self._base = model.get_base_model() if hasattr(model, "get_base_model") else model
        """The transformers model; an adapter, if any, is in its layers."""
        self.dtype = dtype
        self.device = next(model.parameters()).device
        self.hidden_size = int(model.config.hidden_size)
        self.sessions = Sessions()
        self.worked = 0
        """Forwards, backwards and steps of decoding that were begun, and whatever else `works` was
        told."""
        self.tokens = 0
        """Tokens that were run forward: in training, for scores, in prompts and one by one."""
        self._layers: Any = None

    def works(self) -> None:
        """A sign that a piece of work goes on, for `policy.layers.report_layers`: of a real model
        one takes minutes on a CPU."""
        self.worked += 1

    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained ones."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def embedding(self) -> torch.nn.Parameter | None:
        """The tied tensor that the other end holds too, where it is trained; its gradient is half
        of the truth."""
        if not self.spec.shares_embedding:
            return None
        module = (
            self.model.get_input_embeddings()
            if self.spec.has_embedding
            else self.model.get_output_embeddings()
        )
        weight = module.weight
        assert isinstance(weight, torch.nn.Parameter)
        return weight if weight.requires_grad else None

    def run(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache | None = None,
        keep: int = 0,
        part: StagePart = "all",
    ) -> torch.Tensor:
        """Ids (N, L) on stage 0, else hidden states (N, L, H) → hidden states (N, L, H), or logits
        (N, keep or L, V) on the last stage. With `part` "layers" hidden states to hidden states on
        every stage.

        mask (N, everything up to and with L) is 1 on tokens; positions (N, L).
        """
        whole = part == "all"
        inputs = (
            {"inputs_embeds": x.to(self.model.dtype)} if x.is_floating_point() else {"input_ids": x}
        )
        if self.spec.has_head and whole:
            inputs["logits_to_keep"] = keep  # type: ignore[assignment]
        model = self.model if whole else self._without_ends()
        with self._autocast():
            output = model(
                **inputs,
                attention_mask=mask,
                position_ids=positions,
                use_cache=cache is not None,
                **{cache_keyword(self._base.__class__.forward): cache},
            )
        return self.known_logits(output.logits) if self.spec.has_head and whole else output.logits

    def _without_ends(self) -> Any:  # noqa: ANN401
        """The same layers in a model that lacks norm and head."""
        if self._layers is None:
            self._layers, inner = _shallow(self._base), _shallow(self._base.model)
            inner.norm = self._layers.lm_head = torch.nn.Identity()
            self._layers.model = inner
        return self._layers

    @property
    def _lora_rank(self) -> int:
        return max(
            (config.r for config in getattr(self.model, "peft_config", {}).values()), default=0
        )

    @torch.no_grad()
    def forward(
        self, batch: Batch, x: torch.Tensor | None, part: StagePart = "all"
    ) -> torch.Tensor:
        """`x` (R, H), None where token ids go in → (R, H) for the next stage. Not for the last
        stage's head."""
        self.worked += 1
        out = self.hidden(batch, x, part)
        self.tokens += len(out)
        return out

    def backward(
        self, batch: Batch, x: torch.Tensor | None, gradient: torch.Tensor, part: StagePart = "all"
    ) -> torch.Tensor | None:
        """Adds to the weights' gradients; `gradient` (R, H) of what `forward` gave → gradient of
        `x`, None on stage 0."""
        self.worked += 1
        inputs = None if x is None else x.detach().requires_grad_()
        hidden = self.hidden(batch, inputs, part)
        if hidden.requires_grad:  # not so on a stage 0 in which nothing is trained
            hidden.backward(gradient.to(hidden.device))
        return None if inputs is None else inputs.grad

    def learn(
        self,
        batch: Batch,
        x: torch.Tensor | None,
        temperature: float,
        loss: LossFunction,
        part: StagePart = "all",
    ) -> torch.Tensor | None:
        """Last stage: forward, loss and backward in one → gradient of `x`, None where this is the
        only stage."""
        self.worked += 2
        inputs = None if x is None else x.detach().requires_grad_()
        loss(*self.logprobs(batch, inputs, temperature, part)).backward()
        return None if inputs is None else inputs.grad

    @torch.no_grad()
    def score(
        self, batch: Batch, x: torch.Tensor | None, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Last stage, without gradient: log-probabilities and entropies, (N, T) each."""
        self.worked += 1
        return self.logprobs(batch, x, temperature)

    @torch.no_grad()
    def prefill(
        self, session: bytes, fingerprint: bytes, prompts: Prompts, x: torch.Tensor | None
    ) -> torch.Tensor:
        """Opens a session: `x` (prompt tokens, H), None on stage 0 → the same, or logits (Q, V) on
        the last stage."""
        self.worked += 1
        where = prompts.mask.nonzero(as_tuple=True)
        self.tokens += len(where[0])
        positions = (prompts.mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        padded = (
            prompts.ids
            if x is None
            else x.new_zeros(*prompts.mask.shape, x.shape[1]).index_put(where, x)
        )
        out = self.run(padded, prompts.mask, positions, cache, keep=1)
        self.sessions.open(session, fingerprint, cache, prompts)
        return out[:, -1] if self.spec.has_head else out[where].float()

    @torch.no_grad()
    def decode(
        self, session: bytes, fingerprint: bytes, rows: list[int], x: torch.Tensor
    ) -> torch.Tensor:
        """One token further for `rows` of the session: ids (n,) on stage 0, else (n, H) → (n, H),
        or logits (n, V) on the last stage.

        Rows that are left out are dropped from the cache for good. Raises BadMessage as
        `Sessions.step` does.
        """
        self.worked += 1
        self.tokens += len(rows)
        kept = self.sessions.step(session, fingerprint, rows)
        out = self.run(x[:, None], kept.mask, kept.position, kept.cache, keep=1)
        return out[:, -1] if self.spec.has_head else out[:, 0].float()

    def _autocast(self) -> AbstractContextManager:
        return (
            nullcontext()
            if self.dtype == torch.float32
            else torch.autocast(self.device.type, self.dtype)
        )

    def hidden(self, batch: Batch, x: torch.Tensor | None, part: StagePart = "all") -> torch.Tensor:
        """As `forward`, with gradient."""
        where = packing(batch)
        if part == "embed":
            embed = self.model.get_input_embeddings()
            with self._autocast():
                return where.pack(
                    embed(batch.prompt_ids), embed(batch.completion_ids[:, :-1])
                ).float()
        return where.pack(*self._both(batch, where, x, part)).float()

    def _both(
        self, batch: Batch, where: Packing, x: torch.Tensor | None, part: StagePart
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states of the prompts (Q, P, H) and of the completions (N, T − 1, H), None where T
        is 1."""
        prompts, later = (
            where.unpack(x) if x is not None else (batch.prompt_ids, batch.completion_ids[:, :-1])
        )
        if part == "head":
            return prompts, later
        if torch.is_grad_enabled() and needs_checkpointing(
            self._base, self.dtype, self._lora_rank, batch
        ):
            with checkpointed(self._base):
                return self._one_by_one(batch, prompts, later, part)
        return self._prompts_once(batch, prompts, later, part)

    def _one_by_one(
        self, batch: Batch, prompts: torch.Tensor, later: torch.Tensor | None, part: StagePart
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `_both`: each completion behind a prompt of its own, without a cache, so that layers
        can be run again in the backward pass."""
        first: dict[int, torch.Tensor] = {}
        rest = []
        for row, owner in enumerate(batch.prompt_of.tolist()):
            real, count = batch.prompt_mask[owner].bool(), int(batch.completion_mask[row].sum()) - 1
            asked = prompts[owner][real]
            # (L,) or (L, H)
            ids = asked if later is None else torch.cat([asked, later[row, :count]])
            positions = torch.arange(len(ids), device=ids.device)[None]
            out = self.run(ids[None], torch.ones_like(positions), positions, part=part)[0]  # (L, H)
            if owner not in first:
                padding = out.new_zeros(len(real) - len(asked), out.shape[1])
                first[owner] = torch.cat([padding, out[: len(asked)]])
            if later is not None:
                rest.append(
                    torch.cat(
                        [out[len(asked) :], out.new_zeros(later.shape[1] - count, out.shape[1])]
                    )
                )
        return torch.stack([first[owner] for owner in range(len(prompts))]), torch.stack(
            rest
        ) if rest else None

    def _prompts_once(
        self, batch: Batch, prompts: torch.Tensor, later: torch.Tensor | None, part: StagePart
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `_both`: prompts, then the completions on their keys and values."""
        positions = (batch.prompt_mask.cumsum(1) - 1).clamp(min=0)  # (Q, P)
        cache = DynamicCache(config=self.model.config)
        first = self.run(prompts, batch.prompt_mask, positions, cache, part=part)
        if batch.completion_ids.shape[1] == 1:
            return first, None
        assert later is not None
        owner = batch.prompt_of
        cache.batch_select_indices(owner.cpu())
        seen = torch.cat(
            [batch.prompt_mask[owner], batch.completion_mask[:, :-1].to(batch.prompt_mask.dtype)], 1
        )
        after = positions[owner, -1:] + 1 + torch.arange(later.shape[1], device=owner.device)
        return first, self.run(later, seen, after, cache, part=part)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            logits = self._base.lm_head(self._base.model.norm(hidden.to(self.model.dtype)))
        return self.known_logits(logits)

    def logprobs(
        self, batch: Batch, x: torch.Tensor | None, temperature: float, part: StagePart = "all"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `score`, with gradient."""
        where = packing(batch)
        self.tokens += where.rows
        first, later = self._both(batch, where, x, "head" if part == "head" else "layers")
        row = torch.arange(len(batch.completion_ids), device=first.device)
        column = torch.zeros_like(row)
        states = [first[:, -1][batch.prompt_of]]  # (N, H), they predict the first tokens
        if later is not None:
            states.append(later[where.completions])
            row = torch.cat([row, where.completions[0]])
            column = torch.cat([column, where.completions[1] + 1])
        piece = logits_tokens(self.model.config.vocab_size, self.device.type)
        chosen, spread = in_pieces(
            self._head, torch.cat(states), batch.completion_ids[row, column], temperature, piece
        )
        zeros = torch.zeros(batch.completion_ids.shape, device=chosen.device)
        return zeros.index_put((row, column), chosen), zeros.index_put((row, column), spread)


def _shallow(module: Any) -> Any:  # noqa: ANN401
    """A module of its own with the same parameters and, until they are replaced, the same parts."""
    new = copy.copy(module)
    new._modules = dict(module._modules)
    return new


# The stage's AdamW, which outlives crews, with its learning rate and the record of the last step.


@dataclass
class LrScale:
    """Learning rate of one stage relative to the crew's."""

    factor: float = 1.0
    warmup: int = 0
    """Steps over which it rises to the factor, because the optimizer is new."""
    taken: int = 0

    def next(self) -> float:
        self.taken += 1
        return self.factor * (1.0 if self.taken >= self.warmup else self.taken / self.warmup)


class StageOptimizer:
    """most: no step is taken with a higher learning rate."""

    def __init__(self, runtime: StageRuntime, most: float = math.inf) -> None:
        self.adam = make_adam(runtime)
        self.lr_scale = LrScale()
        self.squared_norm = 0.0
        """The last raw gradient's over the layers, before clipping: CheckFree weights this stage by
        it."""
        self.lock = threading.Lock()
        """Held while the weights move."""
        self.moving = trio.Lock()
        """Held from where a step is counted to where it is taken."""
        self._runtime = runtime
        self._most = most

    def measure(self) -> float | None:
        """Squared norm of the final gradients, to which the tail adds nothing for a tied embedding;
        None where it is not finite."""
        shared, index = self._runtime.embedding(), self._runtime.spec.index
        squared = layers = 0.0
        for name, parameter in self._runtime.model.named_parameters():
            if parameter.grad is not None and not (parameter is shared and index > 0):
                # the sum of squares is made on the host: MPS has no float64
                part = float(torch.linalg.vector_norm(parameter.grad.float())) ** 2
                squared += part
                layers += part if ".layers." in name else 0.0
        if not math.isfinite(squared):
            return None
        self.squared_norm = layers
        return squared

    def step(self, clip: float, learning_rate: float) -> bool:
        """Whether the learning rate was within the bound. Raises DeviceError where the device fails
        in the middle."""
        if self.adam is None:
            return True
        try:
            with self.lock:
                return self._move(self.adam, clip, learning_rate)
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            raise DeviceError(f"half of a step: {error}") from error

    def _move(self, adam: torch.optim.AdamW, clip: float, learning_rate: float) -> bool:
        for parameter in self._runtime.parameters():
            if parameter.grad is not None and clip < 1.0:
                parameter.grad.mul_(clip)
        own = self.lr_scale.next()
        rates = [learning_rate * (1.0 if group["shared"] else own) for group in adam.param_groups]
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = min(rate, self._most)
        adam.step()
        return max(rates) <= self._most


def make_adam(runtime: StageRuntime) -> torch.optim.AdamW | None:
    """The optimizer of what is trained here; None where that is nothing.

    A tied embedding goes at the crew's learning rate alone, or its two copies would part.
    """
    shared = runtime.embedding()
    own = [p for p in runtime.parameters() if p is not shared]
    groups = [
        {"params": params, "shared": ends}
        for params, ends in ((own, False), ([] if shared is None else [shared], True))
        if params
    ]
    return torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY) if groups else None


# The split: the model's own transformers class with a shorter configuration. A stage without the
# head has the identity in its place, so its `logits` are the hidden state for the next stage.


def stage_config(config: PretrainedConfig, spec: StageSpec) -> PretrainedConfig:
    """The whole model's config with this stage's layers only."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = spec.layers
    if getattr(config, "layer_types", None):  # which layers see a sliding window only
        own.layer_types = list(config.layer_types[spec.first : spec.last])
    own.tie_word_embeddings = spec.tied and spec.stages == 1
    return own


def build_stage(
    config: PretrainedConfig,
    spec: StageSpec,
    read: Callable[[str], torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The stage with weights `read(name in the whole model)`. Memory is taken for its own tensors
    only.

    Raises Incompatible when the weights do not have the shapes of `config`.
    """
    own = stage_config(config, spec)
    # shapes without memory: the ends that are cut off would be the largest tensors
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(own, dtype=dtype)
    cut_ends(model, spec)
    # buffers that no file holds
    model.model.rotary_emb = type(model.model.rotary_emb)(config=own).to(device)
    state = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and own.tie_word_embeddings:
            continue
        tensor = read(spec.whole(name))
        if tensor.shape != parameter.shape:
            raise Incompatible(
                f"{spec.whole(name)} is {tuple(tensor.shape)}, not {tuple(parameter.shape)}"
            )
        state[name] = tensor.to(device=device, dtype=dtype)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model.requires_grad_(True).eval()  # no dropout, as in `policy.load`


def cut_ends(model: PreTrainedModel, spec: StageSpec) -> None:
    """Whatever of embedding, norm and head is not this stage's is replaced by nothing."""
    if not spec.has_embedding:
        model.model.embed_tokens = nn.Identity()
    if not spec.has_head:
        model.model.norm = nn.Identity()
        model.lm_head = nn.Identity()


def load_stage(
    directory: Path,
    spec: StageSpec,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The stage from a model's directory; only its own tensors are read.

    Raises Unavailable when a tensor is not there or a file is damaged.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    return build_stage(config, spec, tensors_of(directory), dtype=dtype, device=device)


def tensors_of(directory: Path) -> Callable[[str], torch.Tensor]:
    """What reads one tensor of a model's directory, by its name. Raises Unavailable, then or now,
    where it is not there or damaged."""
    try:
        handles = [safe_open(file, framework="pt") for file in weight_files(directory)]
        where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118  (safe_open is no mapping)
    except SafetensorError as error:
        raise Unavailable(f"{directory} is damaged: {error}") from None

    def read(name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = where[name].get_tensor(name)
        except (SafetensorError, KeyError) as error:
            raise Unavailable(f"{directory}: no weights {name} ({error})") from None
        return tensor

    return read


def adapt(stage: PreTrainedModel, settings: PeftConfig) -> Any:  # noqa: ANN401
    """`stage` under a LoRA adapter of peft's `settings`: base frozen, adapter float32."""
    from peft import get_peft_model

    rename_checkpointing_flag(type(stage))
    return get_peft_model(stage, copy.deepcopy(settings)).eval()
