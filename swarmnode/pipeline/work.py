"""What a frame's activations belong to: token ids, lengths, and at the tail what the loss needs. No
torch.

It travels with the activations, so that a frame is all that anybody with the stage's weights needs
to go on: no stage has to have heard of a micro-batch before.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarmnode.errors import BadMessage
from swarmnode.pipeline.frames import FrameLimits
from swarmnode.wire import strict
from swarmnode.wire.fields import COUNTER, check_positive, check_rising
from swarmnode.wire.limits import LOGPROB_SLACK
from swarmnode.wire.tensors import unpack_ids, unpack_logprobs


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `rl.objectives.policy_loss` and `rl.corrections.against_sampler`, see there."""

    old_logprobs: bytes
    """f32 per completion token: as recorded, by who sampled it or by the policy of before."""
    advantages: bytes
    """f32 per completion."""
    weights: bytes
    """f32 per completion."""
    normalizer: float
    """The whole batch's, > 0."""
    loss_type: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"]
    epsilon: float
    epsilon_high: float
    delta: float | None
    sampled: tuple[bool, ...]
    """Per completion: whether `old_logprobs` are its sampler's."""
    correction: Literal["tis", "mis", "icepop"]
    level: Literal["token", "sequence"]


class MicroBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """N completions of Q prompts."""

    prompt_lengths: tuple[int, ...]
    """(Q,)."""
    prompt_ids: bytes
    """u32, prompt after prompt."""
    prompt_of: tuple[int, ...]
    """(N,)."""
    completion_lengths: tuple[int, ...]
    """(N,)."""
    completion_ids: bytes
    temperature: float
    loss: Loss | None
    """None where only scores are wanted."""

    @property
    def rows(self) -> int:
        """Packed rows, as `packing` lays them out."""
        return (
            sum(self.prompt_lengths) + sum(self.completion_lengths) - len(self.completion_lengths)
        )


class Questions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wave: Q prompts, or the completions so far of a wave that is begun again; each goes on
    `num_generations` times."""

    lengths: tuple[int, ...]
    """(Q,)."""
    ids: bytes
    """u32, prompt after prompt."""
    num_generations: int
    names: tuple[int, ...]
    """(Q · num_generations,) rising: which completions of the wave these are."""
    total: int
    """Completions that the wave began with."""
    position: int
    """Tokens that each of them has already."""
    max_tokens: int
    """And will have at most."""
    temperature: float
    """0 is greedy."""
    top_p: float
    seed: int
    """The wave's: a token is drawn by (seed, position, completion), so that beginning again draws
    the same."""


def read_micro_batch(data: bytes, rows: int, limits: FrameLimits, purpose: str) -> MicroBatch:
    """The description of `rows` packed rows. Raises BadMessage: malformed, schema, bounds, shape,
    not_finite."""
    batch: MicroBatch = strict.decode(data, MicroBatch)
    count = len(batch.completion_lengths)
    _lengths(batch.prompt_lengths, limits)
    _lengths(batch.completion_lengths, limits)
    padded = len(batch.prompt_lengths) * max(batch.prompt_lengths) + count * (
        max(batch.prompt_lengths) + max(batch.completion_lengths)
    )
    # a row is at most L long and N · L ≤ tokens, so Q · P ≤ tokens and N · (P + T) ≤ 2 tokens
    if padded > 3 * limits.tokens:
        raise BadMessage("bounds", f"{padded} padded tokens")
    if (
        len(batch.prompt_of) != count
        or min(batch.prompt_of) < 0
        or max(batch.prompt_of) >= len(batch.prompt_lengths)
    ):
        raise BadMessage("bounds", "prompt_of")
    if list(dict.fromkeys(batch.prompt_of)) != list(range(len(batch.prompt_lengths))):
        raise BadMessage("bounds", "prompts are not in the order of their completions")
    if batch.rows != rows:
        raise BadMessage("shape", f"{rows} rows for {batch.rows} tokens")
    _ids(batch.prompt_ids, sum(batch.prompt_lengths), limits)
    ends = list(accumulate(4 * length for length in batch.prompt_lengths))
    if len({batch.prompt_ids[a:b] for a, b in pairwise([0, *ends])}) != len(ends):
        raise BadMessage("bounds", "a prompt is there twice")
    _ids(batch.completion_ids, sum(batch.completion_lengths), limits)
    check_positive("temperature", batch.temperature)
    if (batch.loss is None) != (purpose == "score"):
        raise BadMessage("bounds", "a loss comes with `learn` and only with it")
    if batch.loss is not None:
        _check_loss(batch.loss, count, sum(batch.completion_lengths))
    return batch


def read_questions(data: bytes, rows: int, limits: FrameLimits) -> Questions:
    """The description of `rows` prompt tokens. Raises BadMessage: malformed, schema, bounds, shape,
    not_finite."""
    q: Questions = strict.decode(data, Questions)
    _lengths(q.lengths, limits)
    count = len(q.lengths) * q.num_generations
    if (
        not 1 <= q.num_generations <= limits.tokens
        or not 0 <= q.position < q.max_tokens <= limits.tokens
        or not 0 <= q.seed <= COUNTER
    ):
        raise BadMessage("bounds", "a wave's numbers")
    if (
        not count <= q.total <= limits.tokens
        or q.total * (max(q.lengths) + q.max_tokens - q.position) > limits.tokens
    ):
        raise BadMessage("bounds", "a wave's tokens")
    check_rising("names", q.names, count, count)
    if q.names[0] < 0 or q.names[-1] >= q.total:
        raise BadMessage("bounds", "names")
    if sum(q.lengths) != rows:
        raise BadMessage("shape", f"{rows} rows for {sum(q.lengths)} tokens")
    _ids(q.ids, rows, limits)
    if q.temperature != 0:
        check_positive("temperature", q.temperature)
    check_positive("top_p", q.top_p, 1)
    return q


def read_tokens(body: bytes, rows: int, limits: FrameLimits) -> tuple[list[int], list[float]]:
    """(rows,) token ids and their log-probabilities, the body of `Tokens`. Raises BadMessage:
    shape, bounds, not_finite."""
    _ids(body[: 4 * rows], rows, limits)
    logprobs = read_f32("log-probabilities", body[4 * rows :], rows)
    if (logprobs > LOGPROB_SLACK).any():
        raise BadMessage("bounds", "a log-probability above 0")
    # and no zero below zero
    return unpack_ids(body[: 4 * rows]).tolist(), (np.minimum(logprobs, 0.0) + 0.0).tolist()


def read_scores(body: bytes, rows: int) -> tuple[list[float], list[float]]:
    """(rows,) log-probabilities and entropies, the body of `Scores`. Raises BadMessage: shape,
    bounds, not_finite."""
    values = read_f32("scores", body, 2 * rows)
    return values[:rows].tolist(), values[rows:].tolist()


def read_f32(name: str, data: bytes, count: int) -> NDArray[np.float32]:
    """(count,), all finite. Raises BadMessage: shape, not_finite; bounds where `data` is no whole
    number of floats."""
    values = unpack_logprobs(data)
    if len(values) != count:
        raise BadMessage("shape", f"{name} has {len(values)} values, not {count}")
    if not np.isfinite(values).all():
        raise BadMessage("not_finite", name)
    return values


def _check_loss(loss: Loss, count: int, tokens: int) -> None:
    if len(loss.sampled) != count:
        raise BadMessage("shape", f"sampled has {len(loss.sampled)} values, not {count}")
    for name, length in (("advantages", count), ("weights", count), ("old_logprobs", tokens)):
        read_f32(name, getattr(loss, name), length)
    for name in ("normalizer", "epsilon", "epsilon_high", "delta"):
        if getattr(loss, name) is not None:
            check_positive(name, getattr(loss, name))


def _lengths(lengths: tuple[int, ...], limits: FrameLimits) -> None:
    if not 1 <= len(lengths) <= limits.tokens or min(lengths) < 1 or max(lengths) > limits.tokens:
        raise BadMessage("bounds", "lengths")


def _ids(data: bytes, count: int, limits: FrameLimits) -> None:
    ids = unpack_ids(data)
    if len(ids) != count:
        raise BadMessage("shape", f"{len(ids)} ids for {count} tokens")
    if ids.max() >= limits.vocab:
        raise BadMessage("bounds", "a token id")
