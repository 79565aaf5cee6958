"""Frames between the members of a crew, with their bounds, and the pure rules about them. No torch.

Protocol/04 describes these bytes. From top to bottom: activations, gradients, tokens and the step
commit; `Participant`, one stage's part in a step; descriptions of micro-batches and waves; `Fence`,
which drops frames of another crew, stage or step; errors of a device.

A frame's body length is computed from its header: no number that a peer sends is a size to
allocate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.wire import headed, strict
from swarmnode.wire import limits as caps
from swarmnode.wire.fields import (
    ANY_COUNTER,
    COUNTER,
    check_between,
    check_counter,
    check_fields,
    check_length,
    check_positive,
    check_rising,
)
from swarmnode.wire.limits import LOGPROB_SLACK

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
"""Maximum number of bytes that are written to a stream at a time."""
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
    """Maximum number of padded tokens of a micro-batch or of a wave's prompts."""


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
    check_header(frame, limits)
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
    return await read_message(stream, Frame, lambda frame: body_bytes(frame, limits))


MessageT = TypeVar("MessageT")


async def read_message(
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
    "entropy": _ANY,
    "tokens": _NOT_NEGATIVE,
    "weights": _NOT_NEGATIVE,
    "squares": _NOT_NEGATIVE,
    "squared_norm": _NOT_NEGATIVE,
    "clip": (0.0, 1.0),
    "learning_rate": _NOT_NEGATIVE,
}
"""Lowest and highest value of each number in a frame or state message, by field name."""


def check_header(header: FrameHeader, limits: FrameLimits) -> None:
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


# The description that travels with activations: token ids and lengths, and for training the inputs
# of the loss.


class LossInputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `rl.objectives.policy_loss` and `rl.corrections.importance_weights`."""

    sampler_logprobs: bytes
    """f32 per completion token."""
    advantages: bytes
    """f32 per completion."""
    weights: bytes
    """f32 per completion."""
    normalizer: float
    """Normaliser of the whole batch, > 0."""
    loss_type: Literal["dapo", "grpo", "dr_grpo"]


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
        """Number of packed rows (`stage_model.Packing`)."""
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
    """Maximum number of tokens of a completion."""
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
    for name, length in (("advantages", count), ("weights", count), ("sampler_logprobs", tokens)):
        read_f32(name, getattr(loss, name), length)
    check_positive("normalizer", loss.normalizer)


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
