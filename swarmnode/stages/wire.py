"""Every message, frame and record of a crew, with its bounds, and the pure rules about them. No
torch.

Protocol/04 describes these bytes. The sections of this file, from top to bottom:

    frames           activations, gradients, tokens and the step commit, between trainers
    step commit      `Participant`: one stage's part in a step
    routes           the order in which a micro-batch visits the stages
    stage specs      which layers and tensors belong to a stage
    descriptions     micro-batches and waves, as frames carry them
    fence            drops frames of another crew, stage or step
    model cost       memory and work of a stage: the input of the plan in `crew.py`
    crew record      the immutable record of a crew, and the blocks that a node holds
    trainer link     messages between this node's trainer and its network process
    crew messages    requests and answers between network processes
    streams          the first messages of a stage stream
    state messages   checkpoints and other bodies, between trainers

A frame's body length is computed from its header: no number that a peer sends is a size to
allocate.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

import msgspec
import trio

from swarmnode.errors import BadMessage, ConfigError, PeerError, Refused
from swarmnode.p2p.api import PeerStream
from swarmnode.weights.layout import Layout, elements
from swarmnode.wire import headed, strict
from swarmnode.wire import limits as caps
from swarmnode.wire.fields import (
    ANY_COUNTER,
    COUNTER,
    check_between,
    check_counter,
    check_fields,
    check_length,
    check_name,
    check_positive,
    check_rising,
)
from swarmnode.wire.limits import LOGPROB_SLACK, PEER_ID_BYTES

if TYPE_CHECKING:  # a base installation has no numpy
    import numpy as np
    from numpy.typing import NDArray

# Frames between members. A class is named after its `type` on the wire.
#
#     u32be header length ‖ header (canonical msgpack, tagged by `type`) ‖ body
#
# The body's length follows from the header and is checked before a byte of it is read. `Fence`
# drops frames of an earlier crew or step.

FRAME_REASONS: Final = (
    "oversize",
    "malformed",
    "schema",
    "bounds",
    "not_finite",
    "shape",
    "size",
    "truncated",
)
"""Every reason with which frames, their bodies and descriptions raise BadMessage."""
HEADER_BYTES: Final = caps.STAGE_HEADER_BYTES
CHUNK_BYTES: Final = 1024 * 1024
"""Most bytes that are written to a stream at a time."""
CREW_BYTES: Final = caps.CREW_PREFIX_BYTES
MAX_MICRO_BATCHES: Final = caps.MICRO_BATCHES
MAX_STAGES: Final = caps.STAGES
ABOUT_ITEM_BYTES: Final = caps.STAGE_ABOUT_ITEM_BYTES
INT8_BLOCK: Final = caps.STAGE_ACTIVATION_BLOCK

ActivationCodec = Literal["float32", "bfloat16", "int8"]
Purpose = Literal["learn", "score"]
RefusalReason = Literal["device", "not_finite"]
"""Reason of a stage that refuses a piece of work that its neighbour sent correctly. `device`: its
own device cannot compute it, for example because memory runs out. `not_finite`: its own result is
not finite."""


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Origin of a frame: crew, sending stage and its committed steps. `Fence` checks it."""

    crew: bytes
    """The first 16 bytes of the crew's id."""
    stage: int
    """Stage of the sender."""
    step: int
    """Number of steps that the sender has committed."""


class FrameHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Fields that every frame has."""

    place: Place


class ForwardFrame(FrameHeader, frozen=True, tag="forward"):
    """Stage → next stage of the route. Body: description (`MicroBatch`) ‖ activations."""

    micro_batch: int
    """Number that the head assigned. The head uses each number once in a crew."""
    purpose: Purpose
    codec: ActivationCodec
    rows: int
    """Number of activations: packed tokens of prompts and completions."""
    about: int
    """Length of the description in bytes."""


class BackwardFrame(FrameHeader, frozen=True, tag="backward"):
    """Stage → previous stage of the route. Body: gradient of the activations that `ForwardFrame`
    brought."""

    micro_batch: int
    codec: ActivationCodec
    rows: int
    """As in `ForwardFrame`."""


class LearntFrame(FrameHeader, frozen=True, tag="learnt"):
    """Last stage → head: sums over one micro-batch's trained tokens."""

    micro_batch: int
    loss: float
    clipped: float
    entropy: float
    tokens: float
    weights: float
    """Sum of the tokens' weights."""
    squares: float
    """Sum of the weights' squares."""


class ScoresFrame(FrameHeader, frozen=True, tag="scores"):
    """Last stage → head. Body: log-probability of each completion token, completion after
    completion, float32; then entropies."""

    micro_batch: int
    rows: int
    """Number of completion tokens."""


class PrefillFrame(FrameHeader, frozen=True, tag="prefill"):
    """Stage i → i + 1: start a wave. Body: `WaveDescription` ‖ activations."""

    wave: int
    """Number that the head assigned, as for micro-batches."""
    codec: ActivationCodec
    rows: int
    """Number of activations: packed tokens of the prompts."""
    about: int


class DecodeFrame(FrameHeader, frozen=True, tag="decode"):
    """Stage i → i + 1: run one more token of each completion. Body: numbers of the completions in
    the wave, u32 each ‖ activations."""

    wave: int
    codec: ActivationCodec
    rows: int
    """Number of completions, each with one activation."""


class TokensFrame(FrameHeader, frozen=True, tag="tokens"):
    """Last stage → head. Body: a token id for each unfinished completion, u32 ‖ their
    log-probabilities, float32."""

    wave: int
    rows: int
    """Number of unfinished completions."""


class DropFrame(FrameHeader, frozen=True, tag="drop"):
    """Head → all: a wave has ended, its caches can be dropped."""

    wave: int


class FailedFrame(FrameHeader, frozen=True, tag="failed"):
    """Any stage → head: it refuses this micro-batch or wave."""

    number: int
    """Number of the micro-batch or wave."""
    reason: RefusalReason


class EmbeddingFrame(FrameHeader, frozen=True, tag="embedding"):
    """Head ↔ last stage. Body: rows first … first + rows − 1 of a tied embedding's gradient,
    float32."""

    attempt: int
    first: int
    """First row of the embedding."""
    rows: int
    """Number of rows of the embedding."""


class ProposeFrame(FrameHeader, frozen=True, tag="propose"):
    """Head → all, before the micro-batches: the step consists of exactly these."""

    attempt: int
    micro_batches: tuple[int, ...]


class AcknowledgeFrame(FrameHeader, frozen=True, tag="acknowledge"):
    """Any stage → head: it has the gradients of all micro-batches of the step, or refuses it."""

    attempt: int
    refused: RefusalReason | None
    """None if the stage does not refuse the step."""
    squared_norm: float
    """Squared norm of this stage's gradient before clipping. Only the head counts a tied
    embedding."""


class CommitFrame(FrameHeader, frozen=True, tag="commit"):
    """Head → all, once every stage has acknowledged: take the step."""

    attempt: int
    clip: float
    """Factor for all gradients, at most 1."""
    learning_rate: float


class AbortFrame(FrameHeader, frozen=True, tag="abort"):
    """Head → all, at the first refusal: drop the gradients of this attempt."""

    attempt: int


class DoneFrame(FrameHeader, frozen=True, tag="done"):
    """Any stage → head: it has taken the step."""

    attempt: int


ComputeFrame = (
    ForwardFrame
    | BackwardFrame
    | LearntFrame
    | ScoresFrame
    | PrefillFrame
    | DecodeFrame
    | TokensFrame
    | DropFrame
    | FailedFrame
)
ControlFrame = (
    EmbeddingFrame | ProposeFrame | AcknowledgeFrame | CommitFrame | AbortFrame | DoneFrame
)
Frame = ComputeFrame | ControlFrame


class FrameLimits(msgspec.Struct, frozen=True):
    """Sizes that bound the frames of a crew."""

    hidden: int
    """Number of values in one token's activation."""
    vocab: int
    """Number of token ids."""
    tokens: int
    """Most padded tokens of a micro-batch or of a wave's prompts."""
    waves: int = caps.STAGE_WAITING
    """Most waves in flight."""


def int8_block(hidden: int) -> int:
    """Return the number of values that share a scale: the largest divisor of `hidden` up to 64."""
    return max(size for size in range(1, INT8_BLOCK + 1) if hidden % size == 0)


def activation_bytes(codec: ActivationCodec, rows: int, hidden: int) -> int:
    """Return the exact length of activations (rows, hidden) in bytes."""
    if codec == "int8":
        return rows * hidden + 4 * rows * (hidden // int8_block(hidden))
    return rows * hidden * (4 if codec == "float32" else 2)


def body_bytes(frame: Frame, limits: FrameLimits) -> int:
    """Return the exact length of the body after this header.

    Raises:
        BadMessage: bounds or not_finite, if a field is outside `limits`.
    """
    _check_header(frame, limits)
    if isinstance(frame, EmbeddingFrame):
        check_between("first", frame.first, 0, limits.vocab - frame.rows)
    if isinstance(frame, ProposeFrame):
        check_rising("micro_batches", frame.micro_batches, 1, MAX_MICRO_BATCHES)
        check_counter("micro_batches", frame.micro_batches[0])
        check_counter("micro_batches", frame.micro_batches[-1])
    match frame:
        case ForwardFrame() | PrefillFrame():
            return frame.about + activation_bytes(frame.codec, frame.rows, limits.hidden)
        case BackwardFrame():
            return activation_bytes(frame.codec, frame.rows, limits.hidden)
        case DecodeFrame():
            return 4 * frame.rows + activation_bytes(frame.codec, frame.rows, limits.hidden)
        case ScoresFrame() | TokensFrame():
            return 8 * frame.rows
        case EmbeddingFrame():
            return 4 * frame.rows * limits.hidden
        case _:
            return 0


async def read_frame(stream: headed.Reader, limits: FrameLimits) -> tuple[Frame, bytes] | None:
    """Return the next frame and its body; None at the end of the stream.

    Raises:
        BadMessage: one of FRAME_REASONS.
    """
    return await _read_message(stream, Frame, lambda frame: body_bytes(frame, limits))


MessageT = TypeVar("MessageT")


async def _read_message(
    stream: headed.Reader,
    kind: Any,  # noqa: ANN401
    length: Callable[[MessageT], int],
) -> tuple[MessageT, bytes] | None:
    """Return the next message of type `kind` and its body of `length(message)` bytes; None at the
    end of the stream. `length` also checks the message."""
    message: MessageT | None = await headed.read_header(
        stream, lambda data: strict.decode(data, kind), HEADER_BYTES
    )
    if message is None:
        return None
    return message, await headed.read_exactly(stream, length(message)) or b""


_ANY: Final = (-math.inf, math.inf)
_NOT_NEGATIVE: Final = (0.0, math.inf)
_HEADER_RANGES: Final = {
    **dict.fromkeys(("micro_batch", "wave", "number", "attempt"), ANY_COUNTER),
    **dict.fromkeys(("request", "step", "size", "at", "checkpoint", "ends"), ANY_COUNTER),
    "length": (1, CHUNK_BYTES),
    "of": (0, MAX_STAGES - 1),
    "loss": _ANY,
    "clipped": _ANY,
    "entropy": _ANY,
    "tokens": _NOT_NEGATIVE,
    "weights": _NOT_NEGATIVE,
    "squares": _NOT_NEGATIVE,
    "squared_norm": _NOT_NEGATIVE,
    "clip": (0.0, 1.0),
    "learning_rate": _NOT_NEGATIVE,
}
"""Lowest and highest value of each number in a frame or state message, by field name."""


def _check_header(header: Frame | AnyStateMessage, limits: FrameLimits) -> None:
    """Check the fields that are checked alike in all frames and state messages.

    Raises:
        BadMessage: The reason is `bounds` or `not_finite`.
    """
    check_length("crew", header.place.crew, CREW_BYTES)
    check_between("stage", header.place.stage, 0, MAX_STAGES - 1)
    check_counter("step", header.place.step)
    about = ABOUT_ITEM_BYTES * (limits.tokens + 16)
    ranges = {"rows": (1, limits.tokens), "about": (1, about), **_HEADER_RANGES}
    check_fields(header, {}, ranges)


# Step commit. Every message arrives once and in order: streams are reliable, and a lost stream ends
# the crew.
#
#     head:    Propose(attempt, set) ──▶ all         take the step of exactly these micro-batches
#     stage:   Acknowledge ──▶ head                  with the norm of its gradient, or a refusal
#     head:    Commit ──▶ all, once all have acknowledged; Abort ──▶ all at the first refusal
#     stage:   optimizer step, Done ──▶ head         Abort: gradients are dropped, weights stay
#
# The head starts nothing new before every stage is done. Attempts number the proposals of one crew.


class Participant:
    """One stage's part in the step commit: which gradients are still missing, and the decision."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        """Number of committed steps."""
        self.attempt = 0
        """Number of the latest proposal."""
        self.acknowledged = False
        """True from the acknowledgement of a proposal until its commit or abort."""
        self.newest = -1
        """Highest micro-batch number of all proposals. Each proposal has higher numbers than the
        one before."""
        self._missing: set[int] | None = None
        """Micro-batches of the proposal without a gradient; None without a proposal."""

    @property
    def accumulating(self) -> bool:
        """True while there is a proposal that is neither acknowledged nor decided."""
        return self._missing is not None and not self.acknowledged

    @property
    def complete(self) -> bool:
        """True if all gradients of such a proposal have arrived."""
        return self.accumulating and not self._missing

    def propose(self, attempt: int, micro_batches: Iterable[int]) -> None:
        """Start a step that consists of `micro_batches`.

        Raises:
            BadMessage: A correct head would not send this proposal now (`bounds`).
        """
        if self._missing is not None or attempt <= self.attempt:
            raise BadMessage("bounds", f"attempt {attempt} proposed after {self.attempt}")
        self.attempt, self._missing = attempt, set(micro_batches)
        self.newest = max(self.newest, *self._missing)

    def may_accumulate(self, micro_batch: int) -> bool:
        """Return True if the proposal has this micro-batch and its gradient is still missing."""
        return self._missing is not None and micro_batch in self._missing

    def record_gradient(self, micro_batch: int) -> None:
        """Record that the gradient of `micro_batch` has arrived.

        Raises:
            KeyError: unless `may_accumulate(micro_batch)`.
        """
        (self._missing or set()).remove(micro_batch)

    def commit(self, attempt: int) -> None:
        """Count the step. The caller takes it.

        Raises:
            BadMessage: The attempt is not acknowledged (`bounds`).
        """
        if not self.acknowledged or attempt != self.attempt:
            raise BadMessage("bounds", f"commit of attempt {attempt}, which is not acknowledged")
        self.step += 1
        self.clear()

    def abort(self, attempt: int) -> None:
        """Forget the proposal. The caller drops the gradients.

        Raises:
            BadMessage: There is no such proposal (`bounds`).
        """
        if self._missing is None or attempt != self.attempt:
            raise BadMessage("bounds", f"abort of attempt {attempt}, which is not proposed")
        self.clear()

    def clear(self) -> None:
        """Forget the proposal, if there is one."""
        self.acknowledged, self._missing = False, None


# The order in which a micro-batch visits the stages:
#
#     plain      0 → 1 → … → S − 1
#     swapped    0: embedding → 1 → 0: layers → 2 → … → S − 1: layers → S − 2 → S − 1: norm and head
#                (CheckFree+, arXiv 2506.15461 §3.3)
#
# In a swapped run the micro-batch number's parity picks the route.

StagePart = Literal["all", "embed", "layers", "head"]
"""Part of a stage that a hop runs. `all`: its embedding if it has one, its layers, and its norm and
head if it has them."""


@dataclass(frozen=True)
class Hop:
    """One visit of a micro-batch to a stage."""

    stage: int
    part: StagePart


Route = tuple[Hop, ...]


def plain_route(stages: int) -> Route:
    """Return the route that visits all stages in order."""
    return tuple(Hop(stage, "all") for stage in range(stages))


def swapped_order(stages: int) -> tuple[int, ...]:
    """Return the order of the stages' layers for half of the micro-batches (CheckFree+).

    Raises:
        Refused: there are fewer than four stages, so the exchanged pairs would overlap.
    """
    if stages < 4:
        raise Refused("swapped stages need at least four")
    return (1, 0, *range(2, stages - 2), stages - 1, stages - 2)


def swapped_route(stages: int) -> Route:
    """Return the route of every other micro-batch in a swapped run (CheckFree+).

    Raises:
        Refused: there are fewer than four stages.
    """
    return (
        Hop(0, "embed"),
        *(Hop(stage, "layers") for stage in swapped_order(stages)),
        Hop(stages - 1, "head"),
    )


class Routes:
    """Routes of one crew.

    Args:
        swap: True for a swapped run (CheckFree+).

    Raises:
        Refused: a swapped run has fewer than four stages.
    """

    def __init__(self, stages: int, swap: bool) -> None:
        self._plain = plain_route(stages)
        self._swapped = swapped_route(stages) if swap else self._plain

    def route(self, micro_batch: int, purpose: Purpose = "learn") -> Route:
        """Return the route of a micro-batch. Only training is swapped: generation and scores use
        the plain order."""
        return self._swapped if purpose == "learn" and micro_batch % 2 else self._plain


def forward_hop(route: Route, sender: int, stage: int) -> int | None:
    """Return the index of the hop of `route` that starts with a forward from `sender` to `stage`;
    None if there is none. The head sends the first forward to itself."""
    if sender == stage == route[0].stage:
        return 0
    return next(
        (
            i
            for i in range(1, len(route))
            if (route[i - 1].stage, route[i].stage) == (sender, stage)
        ),
        None,
    )


def backward_hop(route: Route, sender: int, stage: int) -> int | None:
    """Return the index of the hop of `route` at `stage` whose gradient comes from `sender`; None if
    there is none."""
    return next(
        (
            i
            for i in range(len(route) - 1)
            if (route[i].stage, route[i + 1].stage) == (stage, sender)
        ),
        None,
    )


# The layers, embedding, norm and head of each stage, and their tensor names in the whole model.


class ModelConfig(Protocol):
    """Fields that are read from a model's transformers configuration."""

    num_hidden_layers: int
    tie_word_embeddings: bool


@dataclass(frozen=True)
class StageSpec:
    """One stage of a model: layers first … last − 1."""

    index: int
    """Number of the stage; 0 is the head of the crew."""
    stages: int
    """Number of stages of the model."""
    first: int
    last: int
    tied: bool
    """True if the output matrix is the embedding. Both ends hold it, and their gradients are
    summed."""

    @property
    def layers(self) -> int:
        return self.last - self.first

    @property
    def has_embedding(self) -> bool:
        return self.index == 0

    @property
    def has_head(self) -> bool:
        """True if the stage has the output matrix, and the norm before it."""
        return self.index == self.stages - 1

    @property
    def shares_embedding(self) -> bool:
        """True if this stage and another one hold the same tied tensor."""
        return self.tied and self.stages > 1 and (self.has_embedding or self.has_head)

    def local_name(self, name: str) -> str | None:
        """Return the name in this stage of the whole model's tensor `name`; None if this stage does
        not hold it.

        Args:
            name: As in transformers, with or without peft's prefix.

        Raises:
            ValueError: `name` belongs to no layer, embedding, norm or head.
        """
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            layer = int(parts[at])
            if not self.first <= layer < self.last:
                return None
            return ".".join([*parts[:at], str(layer - self.first), *parts[at + 1 :]])
        if "embed_tokens" in parts:
            if self.has_embedding:
                return name
            return (
                name.replace("model.embed_tokens.", "lm_head.")
                if self.has_head and self.tied
                else None
            )
        if "lm_head" in parts or "norm" in parts:
            return name if self.has_head else None
        raise ValueError(f"{name!r} is of no layer, embedding, norm or head")

    def whole_name(self, name: str) -> str:
        """Return the name in the whole model of this stage's tensor `name`, as inverse of
        `local_name`."""
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            return ".".join([*parts[:at], str(int(parts[at]) + self.first), *parts[at + 1 :]])
        if "lm_head" in parts and self.tied:
            return name.replace("lm_head.", "model.embed_tokens.")
        return name


def stage_specs(config: ModelConfig, layers: Sequence[int]) -> tuple[StageSpec, ...]:
    """Return the stages of a model; stage i has `layers[i]` layers.

    `model.check_split` checks that the model can be split.

    Args:
        config: The model's transformers configuration.

    Raises:
        ConfigError: a stage is empty, or the numbers do not add up to the model's layers.
    """
    if not layers or min(layers) < 1 or sum(layers) != config.num_hidden_layers:
        raise ConfigError(
            f"stages of {list(layers)} layers do not make the model's {config.num_hidden_layers}"
        )
    ends = list(accumulate(layers))
    tied = bool(config.tie_word_embeddings)
    return tuple(
        StageSpec(i, len(layers), end - count, end, tied)
        for i, (count, end) in enumerate(zip(layers, ends, strict=True))
    )


# The description that travels with activations: token ids and lengths, and for training the inputs
# of the loss.


class LossInputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `rl.objectives.policy_loss` and `rl.corrections.against_sampler`."""

    old_logprobs: bytes
    """f32 per completion token: recorded by the sampler, or computed by the policy before the
    step."""
    advantages: bytes
    """f32 per completion."""
    weights: bytes
    """f32 per completion."""
    normalizer: float
    """Normaliser of the whole batch, > 0."""
    loss_type: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"]
    epsilon: float
    epsilon_high: float
    delta: float | None
    sampled: tuple[bool, ...]
    """Per completion: True if its sampler recorded `old_logprobs`."""
    correction: Literal["tis", "mis", "icepop"]
    level: Literal["token", "sequence"]


class MicroBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of N completions of Q prompts."""

    prompt_lengths: tuple[int, ...]
    """(Q,) lengths in tokens."""
    prompt_ids: bytes
    """u32 token ids, prompt after prompt."""
    prompt_of: tuple[int, ...]
    """(N,) index of each completion's prompt."""
    completion_lengths: tuple[int, ...]
    """(N,) lengths in tokens."""
    completion_ids: bytes
    """u32 token ids, completion after completion."""
    temperature: float
    loss: LossInputs | None
    """None for a micro-batch that is only scored."""

    @property
    def rows(self) -> int:
        """Number of packed rows (`model.Packing`)."""
        return (
            sum(self.prompt_lengths) + sum(self.completion_lengths) - len(self.completion_lengths)
        )


class WaveDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a wave: Q prompts, each with `num_generations` completions. Completion i
    belongs to prompt i // num_generations."""

    lengths: tuple[int, ...]
    """(Q,) lengths of the prompts in tokens."""
    ids: bytes
    """u32 token ids, prompt after prompt."""
    num_generations: int
    max_tokens: int
    """Most tokens of a completion."""
    temperature: float
    """0 is greedy."""
    top_p: float
    seed: int
    """A token is drawn by (seed, position, completion)."""

    @property
    def total(self) -> int:
        """Number of completions."""
        return len(self.lengths) * self.num_generations


def read_micro_batch(data: bytes, rows: int, limits: FrameLimits, purpose: str) -> MicroBatch:
    """Decode and check the description of `rows` packed rows.

    Raises:
        BadMessage: The reason is `malformed`, `schema`, `bounds`, `shape` or `not_finite`.
    """
    batch: MicroBatch = strict.decode(data, MicroBatch)
    count = len(batch.completion_lengths)
    _check_lengths(batch.prompt_lengths, limits)
    _check_lengths(batch.completion_lengths, limits)
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
    _check_ids(batch.prompt_ids, sum(batch.prompt_lengths), limits)
    ends = list(accumulate(4 * length for length in batch.prompt_lengths))
    if len({batch.prompt_ids[a:b] for a, b in pairwise([0, *ends])}) != len(ends):
        raise BadMessage("bounds", "a prompt is there twice")
    _check_ids(batch.completion_ids, sum(batch.completion_lengths), limits)
    check_positive("temperature", batch.temperature)
    if (batch.loss is None) != (purpose == "score"):
        raise BadMessage("bounds", "a loss comes with `learn` and only with it")
    if batch.loss is not None:
        _check_loss(batch.loss, count, sum(batch.completion_lengths))
    return batch


def read_wave(data: bytes, rows: int, limits: FrameLimits) -> WaveDescription:
    """Decode and check the description of a wave with `rows` prompt tokens.

    Raises:
        BadMessage: The reason is `malformed`, `schema`, `bounds`, `shape` or `not_finite`.
    """
    wave: WaveDescription = strict.decode(data, WaveDescription)
    _check_lengths(wave.lengths, limits)
    if (
        not 1 <= wave.num_generations <= limits.tokens
        or not 1 <= wave.max_tokens <= limits.tokens
        or not 0 <= wave.seed <= COUNTER
    ):
        raise BadMessage("bounds", "a wave's numbers")
    if wave.total * (max(wave.lengths) + wave.max_tokens) > limits.tokens:
        raise BadMessage("bounds", "a wave's tokens")
    if sum(wave.lengths) != rows:
        raise BadMessage("shape", f"{rows} rows for {sum(wave.lengths)} tokens")
    _check_ids(wave.ids, rows, limits)
    if wave.temperature != 0:
        check_positive("temperature", wave.temperature)
    check_positive("top_p", wave.top_p, 1)
    return wave


def read_tokens(body: bytes, rows: int, limits: FrameLimits) -> tuple[list[int], list[float]]:
    """Decode the body of `TokensFrame`: (rows,) token ids and (rows,) log-probabilities.

    Raises:
        BadMessage: The reason is `shape`, `bounds` or `not_finite`.
    """
    import numpy as np

    from swarmnode.wire.tensors import unpack_ids

    _check_ids(body[: 4 * rows], rows, limits)
    logprobs = read_f32("log-probabilities", body[4 * rows :], rows)
    if (logprobs > LOGPROB_SLACK).any():
        raise BadMessage("bounds", "a log-probability above 0")
    # adding 0.0 turns −0.0 into 0.0
    return unpack_ids(body[: 4 * rows]).tolist(), (np.minimum(logprobs, 0.0) + 0.0).tolist()


def read_scores(body: bytes, rows: int) -> tuple[list[float], list[float]]:
    """Decode the body of `ScoresFrame`: (rows,) log-probabilities and (rows,) entropies.

    Raises:
        BadMessage: The reason is `shape`, `bounds` or `not_finite`.
    """
    values = read_f32("scores", body, 2 * rows)
    return values[:rows].tolist(), values[rows:].tolist()


def read_f32(name: str, data: bytes, count: int) -> NDArray[np.float32]:
    """Decode (count,) finite float32 values; `name` is for error messages.

    Raises:
        BadMessage: shape, not_finite; bounds if `data` is not a whole number of floats.
    """
    import numpy as np

    from swarmnode.wire.tensors import unpack_logprobs

    values = unpack_logprobs(data)
    if len(values) != count:
        raise BadMessage("shape", f"{name} has {len(values)} values, not {count}")
    if not np.isfinite(values).all():
        raise BadMessage("not_finite", name)
    return values


def _check_loss(loss: LossInputs, count: int, tokens: int) -> None:
    if len(loss.sampled) != count:
        raise BadMessage("shape", f"sampled has {len(loss.sampled)} values, not {count}")
    for name, length in (("advantages", count), ("weights", count), ("old_logprobs", tokens)):
        read_f32(name, getattr(loss, name), length)
    for name in ("normalizer", "epsilon", "epsilon_high", "delta"):
        if getattr(loss, name) is not None:
            check_positive(name, getattr(loss, name))


def _check_lengths(lengths: tuple[int, ...], limits: FrameLimits) -> None:
    if not 1 <= len(lengths) <= limits.tokens or min(lengths) < 1 or max(lengths) > limits.tokens:
        raise BadMessage("bounds", "lengths")


def _check_ids(data: bytes, count: int, limits: FrameLimits) -> None:
    from swarmnode.wire.tensors import unpack_ids

    ids = unpack_ids(data)
    if len(ids) != count:
        raise BadMessage("shape", f"{len(ids)} ids for {count} tokens")
    if ids.max() >= limits.vocab:
        raise BadMessage("bounds", "a token id")


# The fence: drop frames of another crew, stage or step.

FENCE_REASONS: Final = ("crew", "stage", "step", "newer")
"""Reasons for which a frame is dropped. `newer`: the sender has taken more steps than this
stage."""


class Fence:
    """Decides which frames a stage handles in one crew. Each crew has a new fence.

    Args:
        place: This stage's place at the start of the crew.
        stages: Number of stages of the crew.
    """

    def __init__(self, place: Place, stages: int) -> None:
        self.place = place
        self._stages = stages
        self.dropped: Counter[str] = Counter()
        """Number of dropped frames, by FENCE_REASONS."""

    def check(self, place: Place, sender: int, step: int | None) -> str | None:
        """Count a frame to drop and return one of FENCE_REASONS; return None for a frame to handle.

        Args:
            place: The frame's.
            sender: The stage at the other end of the stream.
            step: Steps that this stage has taken. None for frames of the step commit: while a step
                is taken, stages are one step apart, and attempts order these frames.
        """
        reason = self._reason(place, sender, step)
        if reason:
            self.dropped[reason] += 1
        return reason

    def _reason(self, place: Place, sender: int, step: int | None) -> str | None:
        if place.crew != self.place.crew:
            return "crew"
        if place.stage != sender or not 0 <= sender < self._stages:
            return "stage"
        if step is None or place.step == step:
            return None
        return "step" if place.step < step else "newer"


# Errors that a peer's work may legitimately cause on this node's device: too little memory, or
# sizes that torch cannot compute.

DEVICE_REASON: Final = "device"
"""Reason under which such an error is counted."""
LOST_DEVICE_ERROR: Final = "AcceleratorError"
"""Name of torch's error for a lost device context, which only a new process can replace."""


def is_device_error(error: BaseException) -> bool:
    """Return True if memory ran out, or if torch could not compute a piece of work.

    These are MemoryError, RuntimeError itself, and torch's subclasses of RuntimeError. Excluded are
    a lost device, and subclasses of RuntimeError that Python and trio define.
    """
    kind = type(error)
    if kind is RuntimeError or isinstance(error, MemoryError):
        return True
    return (
        isinstance(error, RuntimeError)
        and kind.__module__.split(".")[0] == "torch"
        and kind.__name__ != LOST_DEVICE_ERROR
    )


# Cost of a model's parts and capacity of members: the input of the plan in `crew.py`.

MAX_MEMBERS: Final = 8
"""Most members of one crew."""


@dataclass(frozen=True)
class PartCost:
    """Cost of one layer, of the embedding or of the head, for the node that holds it."""

    memory: float
    """Bytes of weights, gradients, optimizer, activations, and the cache of the waves in flight."""
    work: float
    """Number of weights that each token is multiplied with."""


@dataclass(frozen=True)
class ModelCost:
    """Costs of all parts of a model."""

    embedding: PartCost
    layers: tuple[PartCost, ...]
    head: PartCost
    """Norm and head; with tied embeddings it holds the embedding a second time."""
    stage: float = 0.0
    """Further bytes that every stage needs, for the layer that is being computed."""


@dataclass(frozen=True)
class Capacity:
    """Memory and speed of a node."""

    memory: float
    """Bytes for a stage."""
    speed: float
    """Floating-point operations per second, > 0. Only ratios count."""


def stage_memory(model: ModelCost, layers: Sequence[int], stage: int) -> float:
    """Return the bytes that a node needs to hold `stage`.

    Args:
        layers: Number of layers of each stage.
    """
    start = sum(layers[:stage])
    ends = [model.embedding] * (stage == 0) + [model.head] * (stage == len(layers) - 1)
    parts = [*model.layers[start : start + layers[stage]], *ends]
    return model.stage + sum(part.memory for part in parts)


# The crew record: immutable. Its hash is the crew's id.
#
#     lineage      32 random bytes, drawn when training leaves the base; later crews keep them
#     step         (lineage, number): steps that were committed since the base
#     held block   the layers of one stage of (lineage, step), in a node's memory or on its disk

HASH_BYTES: Final = 32
NONCE_BYTES: Final = 8
MAX_LAYERS: Final = 1024
MAX_HELD_BLOCKS: Final = 4 * MAX_MEMBERS
"""Most held blocks in one offer."""
RECORD_DOMAIN: Final = b"swarmnode/crew-record/1"
MAX_AMOUNT: Final = 1e30
"""The largest memory or speed that a peer may claim."""

BlockLocation = Literal["memory", "disk", "neighbour"]
"""Where a held block is: in the trainer's memory (`memory`), or in the node's own checkpoint
(`disk`). `neighbour`: a block that this node did not train, either a checkpoint that another member
sent, or a stage in memory that was restored from another source than its own checkpoint and has
taken no step here."""


class CrewMember(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Holder of a stage."""

    peer: str
    """Peer id."""
    layers: int
    """Number of layers of its stage."""


class CrewRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a crew. Records with equal hashes describe the same crew."""

    lineage: bytes
    """32 bytes."""
    model: bytes
    """32 bytes: hash of the base weights and of the settings that all members share
    (`stages.trainer.crew_terms`)."""
    step: int
    """Number of committed steps that the crew continues from; 0 is the base."""
    members: tuple[CrewMember, ...]
    """Members in the order of their stages."""
    nonce: bytes
    """8 random bytes, because the same members may form another crew at the same step."""


class HeldBlock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stage's block of layers, at one step of a lineage, that a node has in memory or on disk."""

    lineage: bytes
    layers: tuple[int, ...]
    """Number of layers of each stage of the crew that trained it."""
    stage: int
    step: int
    where: BlockLocation


def crew_id(record: CrewRecord) -> bytes:
    """Return the crew's id, 32 bytes. Frames carry the first 16."""
    return hashlib.blake2b(RECORD_DOMAIN + strict.encode(record), digest_size=HASH_BYTES).digest()


def member_peers(record: CrewRecord) -> tuple[str, ...]:
    """Return the members' peer ids by stage."""
    return tuple(member.peer for member in record.members)


# Messages between trainer and network process:
#
#     trainer                                           network process
#     TrainerOffer   free memory and blocks held     ─▶ offered to peers
#                    build and restore the stage     ◀─ StageAssignment  a crew has formed
#     StageStatus    loading, active, failed         ─▶ heartbeats
#                    start work                      ◀─ CrewStart        all stages are active
#     StageFault     this crew cannot continue       ─▶ the crew ends; strike for the stage's holder
#                    stop; weights stay in memory    ◀─ CrewEnd          the crew has ended
#
# Either side may restart at any moment. A trainer that connects sends TrainerOffer if it is in no
# crew, and StageStatus if it is.

StagePhase = Literal["loading", "active", "failed"]
"""`active`: the stage can take the next step. `failed`: its weights cannot be restored from any
source, or its device failed."""
SOURCES: Final = ("", "memory", "checkpoint", "neighbour", "base", "checkfree", "checkfree+")
"""Sources of a stage's weights. `neighbour`: a checkpoint that another node trained, whoever stores
it. Empty while the stage loads, and for a crew that starts at step 0."""


class TrainerOffer(msgspec.Struct, frozen=True, tag="stages_offering"):
    """Offer of a trainer that works in no crew. It is sent at every connection, after CrewEnd once
    the trainer has stopped, and whenever a value changes."""

    model: bytes
    """32 bytes, as in `CrewRecord`."""
    capacity: Capacity
    cost: ModelCost
    """Costs of the whole model, from which the node plans crews."""
    held_blocks: tuple[HeldBlock, ...] = ()
    """Blocks that the node has in memory and on disk."""


class StageStatus(msgspec.Struct, frozen=True, tag="stages_status"):
    """State of the trainer's stage, sent at every change and each second. None means not
    measured."""

    crew: bytes
    stage: int
    phase: StagePhase
    step: int = 0
    """Committed steps."""
    progress: int = 0
    """Number that grows with each frame, micro-batch and step. If it is constant while the trainer
    has work, the trainer hangs."""
    source: str = ""
    """One of SOURCES."""
    source_seconds: float | None = None
    """Seconds from StageAssignment until the stage had weights from that source."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint of this stage that a neighbour stores."""
    checkpoint_age_steps: int | None = None
    """Steps of this stage that the loss of its node and disk would cost: all of them while no
    neighbour stores a checkpoint. None in a crew of one."""
    copy_age_steps: int | None = None
    """Steps by which the policy copy that this node samples from is behind its crew."""
    copy_bytes: int | None = None
    """Bytes received for the last refresh of the policy copy."""
    bubble_share: float | None = None
    """Share of the last step in which this stage waited."""
    tokens_per_second: float | None = None
    reason: str = ""
    """Cause of the stage's failure, as text for the operator."""
    load: int = 0
    """Number of pieces of work that the stage has received and not finished."""
    dropped: dict[str, int] = {}
    """Frames that this trainer process dropped, by FENCE_REASONS and FRAME_REASONS."""
    state_refused: dict[str, int] = {}
    """Bad messages and refused requests on state streams in this crew, by reason."""


class StageFault(msgspec.Struct, frozen=True, tag="stages_fault"):
    """Report that this crew cannot continue. Every trainer sends it from its own observation."""

    crew: bytes
    stage: int | None
    """Stage that failed. None if a deadline of the head expired and the head does not know which
    stage missed it."""
    reason: str


class StageAssignment(msgspec.Struct, frozen=True, tag="stages_assigned"):
    """Stage that the trainer is to hold in a new crew. It replaces an earlier assignment."""

    crew: bytes
    """32 bytes. Frames carry the first 16."""
    lineage: bytes
    stage: int
    layers: tuple[int, ...]
    """Number of layers of each stage: the input of `stage_specs`."""
    members: tuple[str, ...]
    """Peer id of each stage's holder."""
    step: int
    """Number of committed steps that the crew continues from; 0 is the base model."""
    socket: str
    """Path of the Unix socket for streams to the other stages."""


class CrewStart(msgspec.Struct, frozen=True, tag="stages_started"):
    """Order to start work: all stages are active."""

    crew: bytes


class CrewEnd(msgspec.Struct, frozen=True, tag="stages_released"):
    """End of the crew. Weights stay in memory and on disk, for the next crew."""

    reason: str


FromTrainer = TrainerOffer | StageStatus | StageFault
ToTrainer = StageAssignment | CrewStart | CrewEnd


# Crew messages between network processes:
#
#     request      answer
#     Offer        Noted                  free memory, and the blocks held
#     Propose      Accept | Refuse        an invitation to a crew
#     Heartbeat    Alive | Refuse         every second; proves that the sender is in that crew
#     Leave        Noted
#
# One message is one frame of the request protocol, canonical msgpack with the tag `type` first, at
# most MESSAGE_BYTES. Every value is checked before use. The connection authenticates the sender.

MESSAGE_BYTES: Final = 16 * 1024
REASON_BYTES: Final = 128

CrewRefusal = Literal["busy", "crew", "model", "room", "newer", "trust", "struck", "record"]
"""Reason of a node that refuses a proposal or a heartbeat:

    busy     it has no trainer, is in a crew, or forms one
    crew     it is not in that crew
    model    it trains another model
    room     the stage does not fit its memory
    newer    the record would discard its steps, and it has not waited long enough for another crew
    trust    its operator excludes a member
    struck   a member is excluded by a strike, and a crew is possible without that member
    record   the record does not name this node, or not the proposer
"""


class MemberStatus(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """State of the sender's stage in the crew that the message names."""

    phase: StagePhase = "loading"
    step: int = 0
    """Committed steps."""
    progress: int = 0
    """Number that grows with each piece of work."""
    load: int = 0
    """Number of pieces of work that the stage has received and not finished."""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="offer"):
    """Offer of a node without a crew to hold a stage. It is sent to all connected peers when it
    changes, and every `offer_seconds`."""

    model: bytes
    """32 bytes, as in `CrewRecord`."""
    memory: float
    """Bytes for a stage. 0 withdraws the offer: the sender is in a crew, or has no trainer."""
    speed: float
    """As in `Capacity`."""
    held_blocks: tuple[HeldBlock, ...] = ()


class ProposeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="propose"):
    """Invitation to the crew of `record`."""

    record: CrewRecord


class AcceptAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accept"):
    """Answer to ProposeRequest: the sender is a member from now on, and sends heartbeats."""

    crew: bytes


class RefuseAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refuse"):
    """Answer to ProposeRequest or Heartbeat: the sender is not in that crew."""

    reason: CrewRefusal
    crew: bytes = bytes(HASH_BYTES)


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="heartbeat"):
    """Sign of life of a member, sent every second to each other member."""

    crew: bytes
    status: MemberStatus


class AliveAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="alive"):
    """Answer to Heartbeat, with the sender's own status."""

    crew: bytes
    status: MemberStatus


class LeaveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="leave"):
    """Report that the sender has left this crew."""

    crew: bytes
    reason: str = ""


class NotedAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="noted"):
    """Receipt for Offer and LeaveRequest."""


CrewRequest = Offer | ProposeRequest | Heartbeat | LeaveRequest
CrewAnswer = NotedAnswer | AcceptAnswer | RefuseAnswer | AliveAnswer
CrewMessage = CrewRequest | CrewAnswer


def encode_message(message: CrewMessage) -> bytes:
    """Return the bytes of a crew message."""
    return strict.encode(message)


def decode_request(data: bytes) -> CrewRequest:
    """Decode and check a request.

    Raises:
        BadMessage: The reason is `oversize`, `malformed`, `schema`, `bounds` or `not_finite`.
    """
    message: CrewRequest = strict.decode(data, CrewRequest, MESSAGE_BYTES)
    check_message(message)
    return message


def decode_answer(data: bytes) -> CrewAnswer:
    """Decode and check an answer.

    Raises:
        BadMessage: The reason is `oversize`, `malformed`, `schema`, `bounds` or `not_finite`.
    """
    message: CrewAnswer = strict.decode(data, CrewAnswer, MESSAGE_BYTES)
    check_message(message)
    return message


_MESSAGE_LENGTHS: Final = {
    **dict.fromkeys(("crew", "model", "lineage"), HASH_BYTES),
    "nonce": NONCE_BYTES,
}
_MESSAGE_RANGES: Final = {
    **dict.fromkeys(("step", "progress", "load"), ANY_COUNTER),
    **dict.fromkeys(("memory", "speed"), (0.0, MAX_AMOUNT)),
}


def check_message(message: CrewMessage) -> None:
    """Check the values of a crew message.

    Raises:
        BadMessage: The reason is `bounds` or `not_finite`.
    """
    check_fields(message, _MESSAGE_LENGTHS, _MESSAGE_RANGES)
    match message:
        case Offer():
            check_between("held_blocks", len(message.held_blocks), 0, MAX_HELD_BLOCKS)
            for held in message.held_blocks:
                check_fields(held, _MESSAGE_LENGTHS, _MESSAGE_RANGES)
                check_between("layers", len(held.layers), 1, MAX_MEMBERS)
                check_between("stage", held.stage, 0, len(held.layers) - 1)
                for count in held.layers:
                    check_between("layers", count, 1, MAX_LAYERS)
        case ProposeRequest():
            record = message.record
            check_fields(record, _MESSAGE_LENGTHS, _MESSAGE_RANGES)
            check_between("members", len(record.members), 1, MAX_MEMBERS)
            for member in record.members:
                check_name("peer", member.peer, PEER_ID_BYTES)
                check_between("layers", member.layers, 1, MAX_LAYERS)
            if len(set(member_peers(record))) != len(record.members):
                raise BadMessage("bounds", "a peer twice")
        case Heartbeat() | AliveAnswer():
            check_fields(message.status, {}, _MESSAGE_RANGES)
        case LeaveRequest():
            check_between("reason", len(message.reason), 0, REASON_BYTES)
            if not all(" " <= character <= "~" for character in message.reason):
                raise BadMessage("bounds", "reason")


# The first messages of a stage stream, each `u32be length ‖ canonical msgpack`. The rest of the
# stream belongs to the trainers.

OPEN_BYTES: Final = 512
"""Most bytes of an encoded SocketOpen, StreamOpen or StreamReady."""
STREAM_REFUSALS: Final = ("malformed", "timeout", "crew", "stage", "peer")
"""Reasons for which an incoming stream is reset."""
StreamKind = Literal["frames", "state"]
"""`frames`: activations and the step commit. `state`: checkpoints."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


class SocketOpen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer → network process on the Unix socket: the first and only message of a connection.

    The connection then carries the stream to the trainer of `stage`, both ways. The network process
    closes it when the stream is lost, when the crew ends, and when the trainer opens the same
    stream again.
    """

    crew: bytes
    stage: int
    """The other stage."""
    kind: StreamKind


class StreamOpen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dialler → acceptor: the first message of a stream."""

    crew: bytes
    from_stage: int
    to_stage: int
    kind: StreamKind


class StreamReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Acceptor → dialler: the acceptor's trainer has opened its end."""

    crew: bytes


@dataclass(frozen=True)
class StreamPeers:
    """Peers between which the streams of a crew run."""

    crew: bytes
    stage: int
    """Stage of this node."""
    members: tuple[str, ...]
    """Peer id of each stage's holder."""


def socket_file(data_dir: Path) -> Path:
    """Return the Unix socket that `service.StreamProxy` listens on."""
    return data_dir / "run" / "stages.sock"


def stream_refusal(peers: StreamPeers | None, peer: str, opened: StreamOpen) -> str:
    """Return one of STREAM_REFUSALS for a stream that `peer` opened; empty if it is accepted.
    `peers` is None while this node is in no crew."""
    if peers is None or opened.crew != peers.crew:
        return "crew"
    if opened.to_stage != peers.stage or not 0 <= opened.from_stage < peers.stage:
        return "stage"
    return "" if peers.members[opened.from_stage] == peer else "peer"


async def read_first(stream: PeerStream, kind: type[StructT]) -> StructT:
    """Return the first message on a stream. Bytes behind it stay in the stream.

    Raises:
        BadMessage: The reason is `oversize`, `malformed` or `schema`.
        PeerError: the stream ended.
    """
    data = b""
    end = 4
    while len(data) < end or end == 4:
        more = await stream.receive()
        if not more:
            raise PeerError("the stream ended before its first message")
        data += more
        if end == 4 and len(data) >= 4:
            length = int.from_bytes(data[:4], "big")
            if not 0 < length <= OPEN_BYTES:
                raise BadMessage("oversize", f"a first message of {length} bytes")
            end = 4 + length
    stream.unread(data[end:])
    message: StructT = strict.decode(data[4:end], kind)
    return message


async def close_streams(streams: Mapping[int, trio.abc.Stream]) -> None:
    """Close the streams to all stages, also in a cancelled task."""
    with trio.CancelScope(shield=True):
        for stream in streams.values():
            await trio.aclose_forcefully(stream)


async def read_open(unix: trio.SocketStream) -> SocketOpen | None:
    """Return the first message of a trainer's connection; None if the trainer sent nothing.

    Raises:
        BadMessage: The reason is `oversize`, `malformed`, `schema` or `truncated`.
        trio.BrokenResourceError, trio.ClosedResourceError: the socket failed.
    """
    opened: SocketOpen | None = await headed.read_header(
        unix, lambda data: strict.decode(data, SocketOpen), OPEN_BYTES
    )
    return opened


# State messages between trainers:
#
#     u32be header length ‖ header (canonical msgpack, tagged by `type`) ‖ body of a Chunk or a Run
#
#     Ask ──▶ Inventory                bodies that the receiver has for the sender's stage
#     Want ──▶ Have, Chunk … | Lack    a body of a stage, from a given byte on
#     Run ──▶ Have, Chunk … | Lack     activations in, activations or log-probabilities out
#     Announce ──▶                     the sender has a new checkpoint. A member that stores it
#                                      answers with Want, and sends Stored when it is on disk
#
# A body arrives only on request. Its length follows from the model or has a cap, and a different
# `size` is refused before allocation. A chunk has at most 1 MiB. A body is used only after its hash
# matches. A class is named after its `type` on the wire.

STATE_REASONS: Final = (
    "oversize",
    "malformed",
    "schema",
    "bounds",
    "size",
    "hash",
    "not_finite",
    "shape",
    "truncated",
)
"""Every reason with which a state stream's messages and bodies raise BadMessage."""
STATE_REFUSALS: Final = (*STATE_REASONS, "busy", "failed")
"""STATE_REASONS, and two more. `busy`: a member sent too many requests at a time. `failed`: this
node's disk or device failed at a request."""
ROOT_BYTES: Final = 32
StateForm = Literal["full", "small", "plain"]
"""full: float32 weights with AdamW's moments and counts. small: bfloat16 weights. plain: float32
weights."""
StatePhase = Literal["starting", "restoring", "ready"]
"""starting: it is not known yet whether the stage has weights. restoring: it has none. ready: it
has its weights."""
BodyKind = Literal["checkpoint", "layers", "tied", "ends", "copy", "output"]
SharedBody = Literal["checkpoint", "ends"]
"""Bodies of a stage that other members store."""
RequestedBody = Literal["checkpoint", "layers", "tied", "ends", "copy"]
LackReason = Literal["none", "loading", "refused", "busy", "failed"]


class StateMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Fields that every state message has."""

    place: Place
    request: int
    """Number that the requester chose; answers repeat it. 0 in messages without an answer."""


class AskMessage(StateMessage, frozen=True, tag="ask"):
    """Query for the bodies that the receiver has for the sender's stage."""


class InventoryMessage(StateMessage, frozen=True, tag="inventory"):
    """Answer to AskMessage. A field is None if the sender has no such body."""

    phase: StatePhase
    """Phase of the sender's stage."""
    checkpoint: int | None
    """Committed steps in the stored checkpoint of the asking stage."""
    ends: int | None
    """Committed steps in the stored embedding, or norm and head, of the asking stage."""


class WantMessage(StateMessage, frozen=True, tag="want"):
    """Request for a body."""

    what: RequestedBody
    of: int
    """Stage that the body belongs to: the sender's or the receiver's."""
    at: int
    """First byte to send. Above 0 only for a checkpoint, to resume a transfer."""
    root: bytes
    """Hash of the body that is resumed, 32 bytes; empty if `at` is 0. If the receiver has another
    body by now, it sends that one from its first byte."""


class RunMessage(StateMessage, frozen=True, tag="run"):
    """Request to run a micro-batch. Body: a description (`MicroBatch`) ‖ activations."""

    codec: ActivationCodec | None
    """None for the first stage, which takes no activations."""
    rows: int
    about: int
    """Length of the description in bytes."""


class HaveMessage(StateMessage, frozen=True, tag="have"):
    """Answer to WantMessage and RunMessage. Chunks with the requested bytes of the body follow."""

    what: BodyKind
    step: int
    """Committed steps in the body."""
    size: int
    """Length of the whole body in bytes."""
    root: bytes
    """32 bytes: blake2b of the whole body."""
    squared_norm: float = 0.0
    """Squared norm of the last gradient of the stage's layers before clipping: CheckFree's
    weight."""


class ChunkMessage(StateMessage, frozen=True, tag="chunk"):
    """Bytes `at` … `at + length − 1` of a body."""

    at: int
    length: int


class LackMessage(StateMessage, frozen=True, tag="lack"):
    """Answer to WantMessage and RunMessage: the sender sends no body."""

    reason: LackReason


class AnnounceMessage(StateMessage, frozen=True, tag="announce"):
    """Announcement of a new body that other members store."""

    what: SharedBody
    step: int
    """Committed steps in the body."""


class StoredMessage(StateMessage, frozen=True, tag="stored"):
    """Report that the receiver's checkpoint of this step is on the sender's disk."""

    step: int


StateAnswer = InventoryMessage | HaveMessage | ChunkMessage | LackMessage
AnyStateMessage = (
    AskMessage | WantMessage | RunMessage | AnnounceMessage | StoredMessage | StateAnswer
)


def hash_body(body: bytes | bytearray | memoryview) -> bytes:
    """Return the hash of a body, 32 bytes."""
    return hashlib.blake2b(body, digest_size=ROOT_BYTES).digest()


def state_bytes(layout: Layout, form: StateForm) -> int:
    """Return the length of a state in bytes. The full form has a float32 count for each tensor."""
    per_value = {"full": 12, "small": 2, "plain": 4}[form]
    return per_value * elements(layout) + (4 * len(layout) if form == "full" else 0)


def pack_state(message: AnyStateMessage, body: bytes | memoryview = b"") -> bytes:
    """Return the bytes of a state message and its body."""
    return headed.pack(message, body)


async def read_state(
    stream: headed.Reader, limits: FrameLimits
) -> tuple[AnyStateMessage, bytes] | None:
    """Return the next state message and its body; None at the end of the stream.

    Raises:
        BadMessage: The reason is `oversize`, `malformed`, `schema`, `bounds`, `not_finite` or
            `truncated`.
    """
    return await _read_message(
        stream, AnyStateMessage, lambda message: _state_body_bytes(message, limits)
    )


def _state_body_bytes(message: AnyStateMessage, limits: FrameLimits) -> int:
    """Return the exact length of the body after this header.

    Raises:
        BadMessage: The reason is `bounds` or `not_finite`.
    """
    _check_header(message, limits)
    match message:
        case WantMessage():
            if message.at and message.what != "checkpoint":
                raise BadMessage("bounds", f"a part of {message.what}")
            check_length("root", message.root, ROOT_BYTES if message.at else 0)
        case HaveMessage():
            check_length("root", message.root, ROOT_BYTES)
        case ChunkMessage():
            return message.length
        case RunMessage():
            codec, rows = message.codec, message.rows
            return message.about + (activation_bytes(codec, rows, limits.hidden) if codec else 0)
    return 0
