"""Every message, frame and record of a crew, with its bounds, and the pure rules about them. No
torch.

Frames carry activations between stages, crew messages form a crew, state messages carry
checkpoints. A frame's body length is computed from its header: no number that a peer sends is a
size to allocate.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

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

# Frames between members:
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
"""Written to a stream at a time, at most."""
CREW_BYTES: Final = caps.CREW_PREFIX_BYTES
SESSION_BYTES: Final = caps.WAVE_BYTES
FINGERPRINT_BYTES: Final = caps.FINGERPRINT_BYTES
MAX_MICRO_BATCHES: Final = caps.MICRO_BATCHES
MAX_STAGES: Final = caps.STAGES
ABOUT_ITEM_BYTES: Final = caps.STAGE_ABOUT_ITEM_BYTES
INT8_BLOCK: Final = caps.STAGE_ACTIVATION_BLOCK

ActivationCodec = Literal["float32", "bfloat16", "int8"]
Purpose = Literal["learn", "score"]
RefusalReason = Literal["device", "not_finite", "session"]
"""Why a stage refuses a piece of work that its neighbour sent correctly. `device`: its own device
cannot compute it, as when memory runs out. `not_finite`: its own result is not finite. `session`:
the wave's cache is not here."""


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where in a crew's life a frame belongs: its fencing tokens."""

    crew: bytes
    stage: int
    """The sender's."""
    step: int
    """Committed steps at the sender."""


class FrameHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    place: Place


class ForwardFrame(FrameHeader, frozen=True, tag="forward"):
    """Stage → next stage of the route. Body: description (`MicroBatch`) ‖ activations."""

    micro_batch: int
    """Number that the head gives; never used twice in one crew."""
    purpose: Purpose
    codec: ActivationCodec
    rows: int
    about: int
    """Bytes of the description."""


class BackwardFrame(FrameHeader, frozen=True, tag="backward"):
    """Stage → previous stage of the route. Body: gradient of the activations that `ForwardFrame`
    brought."""

    micro_batch: int
    codec: ActivationCodec
    rows: int


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
    """Completion tokens."""


class PrefillFrame(FrameHeader, frozen=True, tag="prefill"):
    """Stage i → i + 1: a wave begins. Body: `WaveDescription` ‖ activations."""

    session: bytes
    fingerprint: bytes
    codec: ActivationCodec
    rows: int
    about: int


class DecodeFrame(FrameHeader, frozen=True, tag="decode"):
    """Stage i → i + 1: one token further. Body: names of the completions, u32 each ‖
    activations."""

    session: bytes
    fingerprint: bytes
    codec: ActivationCodec
    rows: int


class TokensFrame(FrameHeader, frozen=True, tag="tokens"):
    """Last stage → head. Body: a token id for each unfinished completion, u32 ‖ their
    log-probabilities, float32."""

    session: bytes
    rows: int


class DropFrame(FrameHeader, frozen=True, tag="drop"):
    """Head → all: a wave has ended."""

    session: bytes


class LostFrame(FrameHeader, frozen=True, tag="lost"):
    """Any stage → head: it refuses this wave; the head begins it again from token ids."""

    session: bytes
    reason: RefusalReason


class FailedFrame(FrameHeader, frozen=True, tag="failed"):
    """Any stage → head: it refuses this micro-batch."""

    micro_batch: int
    reason: RefusalReason


class EmbeddingFrame(FrameHeader, frozen=True, tag="embedding"):
    """Head ↔ last stage: rows first … first + rows − 1 of a tied embedding's gradient,
    float32."""

    attempt: int
    first: int
    rows: int


class ProposeFrame(FrameHeader, frozen=True, tag="propose"):
    """Head → all, before the work itself: the step consists of exactly these micro-batches."""

    attempt: int
    micro_batches: tuple[int, ...]


class AcknowledgeFrame(FrameHeader, frozen=True, tag="acknowledge"):
    """Any stage → head: the gradients of exactly these micro-batches are here, or a refusal."""

    attempt: int
    refused: RefusalReason | None
    squared_norm: float
    """Of this stage's raw gradient, before clipping; only the head counts a tied embedding."""


class CommitFrame(FrameHeader, frozen=True, tag="commit"):
    """Head → all, once every stage has acknowledged: take the step."""

    attempt: int
    norm: float
    """Of the whole policy's raw gradient."""
    clip: float
    learning_rate: float


class AbortFrame(FrameHeader, frozen=True, tag="abort"):
    """Head → all, at the first refusal: drop the gradients of this attempt."""

    attempt: int


class DoneFrame(FrameHeader, frozen=True, tag="done"):
    """Any stage → head: the step is taken here."""

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
    | LostFrame
    | FailedFrame
)
ControlFrame = (
    EmbeddingFrame | ProposeFrame | AcknowledgeFrame | CommitFrame | AbortFrame | DoneFrame
)
Frame = ComputeFrame | ControlFrame


class FrameLimits(msgspec.Struct, frozen=True):
    """What a crew's model and settings allow; nothing larger is received."""

    hidden: int
    """Values of one token's activation."""
    vocab: int
    tokens: int
    """Padded tokens of a micro-batch or of a wave's prompts, at most."""
    sessions: int = caps.STAGE_WAITING
    """Waves in flight, at most."""


def int8_block(hidden: int) -> int:
    """Values that share a scale: 64, or the largest divisor of a hidden size that 64 does not
    divide."""
    return max(size for size in range(1, INT8_BLOCK + 1) if hidden % size == 0)


def activation_bytes(codec: ActivationCodec, rows: int, hidden: int) -> int:
    """How long (rows, hidden) values are, exactly."""
    if codec == "int8":
        return rows * hidden + 4 * rows * (hidden // int8_block(hidden))
    return rows * hidden * (4 if codec == "float32" else 2)


def body_bytes(frame: Frame, limits: FrameLimits) -> int:
    """Exactly how long the body after this header is. Raises BadMessage: bounds, not_finite, where
    a field is outside `limits`."""
    _check_frame(frame, limits)
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


def policy_fingerprint(base: bytes, place: Place, codec: ActivationCodec) -> bytes:
    """32 bytes: of the policy that all stages of a crew together are. `base`: 32 bytes, of the one
    that training began with."""
    parts = base + place.crew + place.step.to_bytes(8, "big") + codec.encode()
    return hashlib.blake2b(parts, digest_size=FINGERPRINT_BYTES).digest()


async def read_frame(stream: headed.Reader, limits: FrameLimits) -> tuple[Frame, bytes] | None:
    """The next frame and its body; None at the end of the stream. Raises BadMessage with a reason
    of FRAME_REASONS."""
    frame: Frame | None = await headed.read_header(
        stream, lambda data: strict.decode(data, Frame), HEADER_BYTES
    )
    if frame is None:
        return None
    return frame, await headed.read_exactly(stream, body_bytes(frame, limits)) or b""


_FRAME_LENGTHS: Final = {"session": SESSION_BYTES, "fingerprint": FINGERPRINT_BYTES}
_COUNTERS: Final = dict.fromkeys(("micro_batch", "attempt"), ANY_COUNTER)
_ANY: Final = (-math.inf, math.inf)
_NOT_NEGATIVE: Final = (0.0, math.inf)
_FRAME_RANGES: Final = {
    "loss": _ANY,
    "clipped": _ANY,
    "entropy": _ANY,
    "tokens": _NOT_NEGATIVE,
    "weights": _NOT_NEGATIVE,
    "squares": _NOT_NEGATIVE,
    "squared_norm": _NOT_NEGATIVE,
    "norm": _NOT_NEGATIVE,
    "clip": (0.0, 1.0),
    "learning_rate": _NOT_NEGATIVE,
}


def check_place(place: Place) -> None:
    """Raises BadMessage("bounds")."""
    check_length("crew", place.crew, CREW_BYTES)
    check_between("stage", place.stage, 0, MAX_STAGES - 1)
    check_counter("step", place.step)


def _check_frame(frame: Frame, limits: FrameLimits) -> None:
    check_place(frame.place)
    about = ABOUT_ITEM_BYTES * (limits.tokens + 16)
    ranges = {"rows": (1, limits.tokens), "about": (1, about), **_COUNTERS}
    check_fields(frame, _FRAME_LENGTHS, {**ranges, **_FRAME_RANGES})
    if isinstance(frame, EmbeddingFrame):
        check_between("first", frame.first, 0, limits.vocab - frame.rows)
    if isinstance(frame, ProposeFrame):
        check_rising("micro_batches", frame.micro_batches, 1, MAX_MICRO_BATCHES)
        check_counter("micro_batches", frame.micro_batches[0])
        check_counter("micro_batches", frame.micro_batches[-1])


# Step commit. Every message arrives once and in order: streams are reliable, and a lost stream ends
# the crew.
#
#     head:    ProposeStep(attempt, set) ──▶ all     take the step of exactly these micro-batches
#     stage:   Acknowledge ──▶ head                  with the norm of its gradient, or a refusal
#     head:    Commit ──▶ all, once all have acknowledged; Abort ──▶ all at the first refusal
#     stage:   optimizer step, Done ──▶ head         Abort: gradients are dropped, weights stay
#
# The head begins nothing new before every stage is done. Attempts number the proposals of one crew.


class Participant:
    """One stage's part in the step commit: which gradients are still missing, and the decision.

    `propose`, `commit` and `abort` raise BadMessage("bounds") where no correct head sends them.
    """

    def __init__(self, step: int = 0) -> None:
        self.step = step
        """Committed steps."""
        self.attempt = 0
        """Of the latest proposal."""
        self.prepared = False
        """Whether the proposal is acknowledged and undecided."""
        self.newest = -1
        """Highest micro-batch number of all proposals. Numbers rise from one to the next."""
        self._missing: set[int] | None = None
        """Micro-batches of the proposal without a gradient; None without a proposal."""

    @property
    def proposed(self) -> bool:
        """Whether there is a proposal that is neither acknowledged nor decided."""
        return self._missing is not None and not self.prepared

    @property
    def complete(self) -> bool:
        """Whether all gradients of such a proposal are here."""
        return self.proposed and not self._missing

    def propose(self, attempt: int, micro_batches: Iterable[int]) -> None:
        if self._missing is not None or attempt <= self.attempt:
            raise BadMessage("bounds", f"attempt {attempt} proposed after {self.attempt}")
        self.attempt, self._missing = attempt, set(micro_batches)
        self.newest = max(self.newest, *self._missing)

    def may_accumulate(self, micro_batch: int) -> bool:
        """Return True if the proposal has this micro-batch and its gradient is not here yet."""
        return self._missing is not None and micro_batch in self._missing

    def accumulated(self, micro_batch: int) -> None:
        """Count the gradient of `micro_batch`. Raises KeyError unless `may_accumulate`."""
        (self._missing or set()).remove(micro_batch)

    def commit(self, attempt: int) -> None:
        """Count the step. The caller takes it."""
        if not self.prepared or attempt != self.attempt:
            raise BadMessage("bounds", f"commit of attempt {attempt}, which is not prepared")
        self.step += 1
        self.clear()

    def abort(self, attempt: int) -> None:
        """Forget the proposal. The caller drops the gradients."""
        if self._missing is None or attempt != self.attempt:
            raise BadMessage("bounds", f"abort of attempt {attempt}, which is not proposed")
        self.clear()

    def clear(self) -> None:
        self.prepared, self._missing = False, None


# The order in which a micro-batch visits the stages:
#
#     plain      0 → 1 → … → S − 1
#     swapped    0: embedding → 1 → 0: layers → 2 → … → S − 1: layers → S − 2 → S − 1: norm and head
#                (CheckFree+, arXiv 2506.15461 §3.3)
#
# In a swapped run the micro-batch number's parity picks the route.

StagePart = Literal["all", "embed", "layers", "head"]
"""What of a stage a hop runs. `all`: whatever it has."""


@dataclass(frozen=True)
class Hop:
    stage: int
    part: StagePart


Route = tuple[Hop, ...]


def plain_route(stages: int) -> Route:
    return tuple(Hop(stage, "all") for stage in range(stages))


def swapped_order(stages: int) -> tuple[int, ...]:
    """CheckFree+: the order of the stages' layers for half of the micro-batches.

    Raises Refused for fewer than four stages: the pairs would overlap.
    """
    if stages < 4:
        raise Refused("swapped stages need at least four")
    return (1, 0, *range(2, stages - 2), stages - 1, stages - 2)


def swapped_route(stages: int) -> Route:
    """Raises Refused as `swapped_order` does."""
    return (
        Hop(0, "embed"),
        *(Hop(stage, "layers") for stage in swapped_order(stages)),
        Hop(stages - 1, "head"),
    )


class Routes:
    """The routes of one crew. `swap` makes it a swapped run; raises Refused then for fewer than
    four stages."""

    def __init__(self, stages: int, swap: bool) -> None:
        self._plain = plain_route(stages)
        self._swapped = swapped_route(stages) if swap else self._plain

    def of(self, micro_batch: int, purpose: Literal["learn", "score"] = "learn") -> Route:
        """Only training is swapped: what is generated and scored is the plain policy."""
        return self._swapped if purpose == "learn" and micro_batch % 2 else self._plain


def forward_hop(route: Route, sender: int, stage: int) -> int | None:
    """Which hop of `route` a forward from `sender` to `stage` begins; None for none. The head sends
    itself the first."""
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
    """Which hop of `route` a gradient from `sender` to `stage` ends; None for none."""
    return next(
        (
            i
            for i in range(len(route) - 1)
            if (route[i].stage, route[i + 1].stage) == (stage, sender)
        ),
        None,
    )


# The layers, embedding, norm and head of each stage, and their tensor names in the whole model.


class ModelShape(Protocol):
    """What is needed of transformers' configuration of a model."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool


@dataclass(frozen=True)
class StageSpec:
    """One stage of `stages`: layers first … last − 1 of the whole model."""

    index: int
    """0 is the head of the crew, stages − 1 its tail."""
    stages: int
    first: int
    last: int
    tied: bool
    """The model's head is its embedding; then both ends hold it, and their gradients are summed."""

    @property
    def layers(self) -> int:
        return self.last - self.first

    @property
    def has_embedding(self) -> bool:
        return self.index == 0

    @property
    def has_head(self) -> bool:
        """And the norm before it."""
        return self.index == self.stages - 1

    @property
    def shares_embedding(self) -> bool:
        """Whether this stage and another one hold the same tied tensor."""
        return self.tied and self.stages > 1 and (self.has_embedding or self.has_head)

    def local(self, name: str) -> str | None:
        """Name in this stage of the whole model's tensor `name`; None where this stage does not
        hold it.

        Names are transformers', with or without peft's prefix. Raises ValueError for one that
        belongs to no stage.
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

    def whole(self, name: str) -> str:
        """Name in the whole model of this stage's tensor `name`: the inverse of `local`."""
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            return ".".join([*parts[:at], str(int(parts[at]) + self.first), *parts[at + 1 :]])
        if "lm_head" in parts and self.tied:
            return name.replace("lm_head.", "model.embed_tokens.")
        return name


def stage_specs(config: ModelShape, layers: Sequence[int]) -> tuple[StageSpec, ...]:
    """The stages of a model with transformers config `config`, stage i with `layers[i]` of its
    layers.

    Raises ConfigError for an empty stage, or layers that are not the model's. That the model can be
    split is for `model.check_split` to say.
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


# The description that travels with activations: token ids, lengths, and at the tail the loss's
# inputs.


class LossInputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    loss: LossInputs | None
    """None where only scores are wanted."""

    @property
    def rows(self) -> int:
        """Packed rows, as `Packing` lays them out."""
        return (
            sum(self.prompt_lengths) + sum(self.completion_lengths) - len(self.completion_lengths)
        )


class WaveDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    """The description of `rows` prompt tokens. Raises BadMessage: malformed, schema, bounds, shape,
    not_finite."""
    q: WaveDescription = strict.decode(data, WaveDescription)
    _check_lengths(q.lengths, limits)
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
    _check_ids(q.ids, rows, limits)
    if q.temperature != 0:
        check_positive("temperature", q.temperature)
    check_positive("top_p", q.top_p, 1)
    return q


def read_tokens(body: bytes, rows: int, limits: FrameLimits) -> tuple[list[int], list[float]]:
    """(rows,) token ids and their log-probabilities, the body of `TokensFrame`. Raises BadMessage:
    shape, bounds, not_finite."""
    import numpy as np

    from swarmnode.wire.tensors import unpack_ids

    _check_ids(body[: 4 * rows], rows, limits)
    logprobs = read_f32("log-probabilities", body[4 * rows :], rows)
    if (logprobs > LOGPROB_SLACK).any():
        raise BadMessage("bounds", "a log-probability above 0")
    # and no zero below zero
    return unpack_ids(body[: 4 * rows]).tolist(), (np.minimum(logprobs, 0.0) + 0.0).tolist()


def read_scores(body: bytes, rows: int) -> tuple[list[float], list[float]]:
    """(rows,) log-probabilities and entropies, the body of `ScoresFrame`. Raises BadMessage: shape,
    bounds, not_finite."""
    values = read_f32("scores", body, 2 * rows)
    return values[:rows].tolist(), values[rows:].tolist()


def read_f32(name: str, data: bytes, count: int) -> NDArray[np.float32]:
    """(count,), all finite. Raises BadMessage: shape, not_finite; bounds where `data` is no whole
    number of floats."""
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


# The fence: drop frames of another crew, stage or step. A new crew makes a new fence.

FENCE_REASONS: Final = ("crew", "stage", "step", "newer")
"""Why a frame is dropped. `newer`: its step is ahead of ours: we missed something."""


class Fence:
    """For one member of a crew of `stages`; a new crew makes a new fence."""

    def __init__(self, place: Place, stages: int) -> None:
        self.place = place
        self._stages = stages
        self.dropped: Counter[str] = Counter()
        """By FENCE_REASONS."""

    def check(self, place: Place, sender: int, step: int | None) -> str | None:
        """Why a frame that came from stage `sender` is to be dropped while we are at `step`; None
        where it counts.

        `step` is None for frames of the step commit, which attempts order: the stages are a step
        apart while one is taken.
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


# Failures of a peer's work that are no defect of this node: memory, and what torch cannot compute.

DEVICE_REASON: Final = "device"
"""The reason that such a failure is counted under."""
LOST_DEVICE_ERROR: Final = "AcceleratorError"
"""torch's, by its name: the device's context is gone, and nothing but a new process helps."""


def is_device_error(error: BaseException) -> bool:
    """Whether memory ran out, or torch could not compute what it was asked for: RuntimeError
    itself, and torch's own kinds of it.

    Not so for any other kind of error, those that Python and trio derive from RuntimeError among
    them, and not when the device is lost.
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
"""The most members of one crew."""


@dataclass(frozen=True)
class PartCost:
    """Cost of one layer, the embedding or the head for its holder."""

    memory: float
    """Bytes: weights, gradients, optimizer, activations, and the cache of the waves in flight."""
    work: float
    """Of a micro-batch, forward and backward, in the unit of `Capacity.speed`."""


@dataclass(frozen=True)
class ModelCost:
    embedding: PartCost
    layers: tuple[PartCost, ...]
    head: PartCost
    """Norm and head; with tied embeddings it holds the embedding a second time."""
    batch_bytes: float = 0.0
    """Bytes that a stage sends of a micro-batch: activations and gradients."""
    stage: float = 0.0
    """Further bytes that any stage needs, for the layer that is being computed."""
    batches: float = 1.0
    """Micro-batches of a step."""
    crossings: float = 0.0
    """Times per micro-batch that all stages wait for the way through all of them and back: once for
    each sampled token, and while the pipeline fills and drains."""


@dataclass(frozen=True)
class Capacity:
    """Memory and speed of a member."""

    memory: float
    """Bytes."""
    speed: float
    """Work per second, > 0."""
    hop_seconds: float = 0.0
    """Time to send one micro-batch's activations, measured by the network process."""


def stage_memory(model: ModelCost, layers: Sequence[int], stage: int) -> float:
    """Return the bytes that the holder of `stage` of these blocks needs."""
    return model.stage + sum(part.memory for part in stage_parts(model, layers, stage))


def stage_parts(model: ModelCost, layers: Sequence[int], stage: int) -> list[PartCost]:
    """Return the parts of the model in `stage` of these blocks."""
    start = sum(layers[:stage])
    ends = [model.embedding] * (stage == 0) + [model.head] * (stage == len(layers) - 1)
    return [*model.layers[start : start + layers[stage]], *ends]


def model_cost(
    config: ModelShape,
    *,
    batch_tokens: int,
    cached_tokens: int,
    weight_bytes: int = 4,
    trained_bytes: int = 12,
) -> ModelCost:
    """Estimate for a transformers config before anything is measured. Work is in floating-point
    operations.

    `batch_tokens` of a micro-batch; `cached_tokens` in all waves together (2 bytes per key and
    value); `trained_bytes` per weight for gradient and optimizer, 0 for a frozen base. Forward,
    recomputed forward and backward are 8 operations per weight and token.
    """
    width, head = (
        config.hidden_size,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )
    keys = config.num_key_value_heads * head
    layer = (
        2 * width * config.num_attention_heads * head
        + 2 * width * keys
        + 3 * width * config.intermediate_size
        + 2 * width
    )
    vocabulary = config.vocab_size * width
    each = weight_bytes + trained_bytes
    layers = PartCost(layer * each + 2 * 2 * keys * cached_tokens, 8.0 * layer * batch_tokens)
    return ModelCost(
        embedding=PartCost(vocabulary * each, 0.0),
        layers=(layers,) * config.num_hidden_layers,
        head=PartCost(vocabulary * each, 8.0 * vocabulary * batch_tokens),
    )


# The crew record: immutable. Its hash is the crew's id.
#
#     lineage      drawn when training leaves the base; later crews of the same policy keep it
#     step         (lineage, number): steps that were committed since the base
#     copy         a node has layers first … last − 1 of (lineage, step)

HASH_BYTES: Final = 32
NONCE_BYTES: Final = 8
MAX_LAYERS: Final = 1024
MAX_HELD_BLOCKS: Final = 4 * MAX_MEMBERS
"""The most copies in one offer."""
RECORD_DOMAIN: Final = b"swarmnode/crew-record/3"
MAX_AMOUNT: Final = 1e30
"""The largest memory or speed that a peer may claim."""

BlockLocation = Literal["memory", "disk", "neighbour"]
"""Where a copy is: in the trainer's memory, in this node's own checkpoint, or in a checkpoint that
this node stores for a ring neighbour."""


class CrewMember(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The holder of a stage."""

    peer: str
    layers: int


class CrewRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A crew. Two records are one crew if their hashes are equal."""

    lineage: bytes
    """32 bytes."""
    model: bytes
    """32 bytes: the base weights, and the settings that members must have alike
    (`trainer.crew_terms`)."""
    step: int
    """Committed steps that the crew continues from; 0 is the base."""
    members: tuple[CrewMember, ...]
    """By stage; their blocks of layers follow each other."""
    nonce: bytes
    """8 random bytes: the same members may form another crew at the same step."""


class HeldBlock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block of layers that the sender has."""

    lineage: bytes
    first: int
    last: int
    """Layers first … last − 1."""
    step: int
    where: BlockLocation

    @property
    def layers(self) -> tuple[int, int]:
        return self.first, self.last


def crew_id(record: CrewRecord) -> bytes:
    """Return the crew's id, 32 bytes. Frames carry the first 16."""
    return hashlib.blake2b(RECORD_DOMAIN + strict.encode(record), digest_size=HASH_BYTES).digest()


def member_peers(record: CrewRecord) -> tuple[str, ...]:
    """Return the members' peer ids by stage."""
    return tuple(member.peer for member in record.members)


# Messages between trainer and network process:
#
#     trainer                                        network process
#     Offering      free memory and copies held   ─▶ offered to peers
#                   build and restore the stage   ◀─ Assigned      a crew with this node was founded
#     StageStatus   loading, active, failed       ─▶ heartbeats
#                   drop work in progress, wait   ◀─ Suspended     a member is suspected
#                   start or continue             ◀─ Resumed       all stages are active
#     StageFault    this crew cannot continue     ─▶ the crew ends; a strike for the stage's holder
#                   stop; weights stay in memory  ◀─ Released      the crew has ended
#
# Either side may restart at any moment. A trainer that connects sends Offering when it is in no
# crew, and StageStatus when it is.

StagePhase = Literal["loading", "active", "failed"]
"""`active`: the stage can take the next step. `failed`: no source of its weights is left."""
SOURCES: Final = ("", "memory", "checkpoint", "neighbour", "base", "checkfree", "checkfree+")
"""Where a stage's weights came from; empty until it has them."""


class TrainerOffer(msgspec.Struct, frozen=True, tag="stages_offering"):
    """Sent by a trainer that works in no crew: at every connection, once it has stopped after
    Released, and whenever a number changes."""

    model: bytes
    """32 bytes, as in `CrewRecord`."""
    capacity: Capacity
    cost: ModelCost
    """Of the whole model: every node can plan a crew."""
    held_blocks: tuple[HeldBlock, ...] = ()


class StageStatus(msgspec.Struct, frozen=True, tag="stages_status"):
    """Sent at every change, and each second while there is a stage. None means not measured."""

    crew: bytes
    stage: int
    phase: StagePhase
    step: int = 0
    """Committed steps."""
    progress: int = 0
    """Grows with each frame, micro-batch and step. A trainer with work in hand and a constant
    progress hangs."""
    source: str = ""
    """One of SOURCES."""
    source_seconds: float | None = None
    """From Assigned to the stage being loaded from that source."""
    checkpoint_step: int | None = None
    """The step of the newest checkpoint of this stage that a neighbour stores."""
    checkpoint_age_steps: int | None = None
    """Steps of this stage that are lost with its node: all of them while no neighbour has a
    checkpoint. None in a crew of one."""
    copy_age_steps: int | None = None
    """Steps by which the whole copy that this node samples from is behind its crew."""
    copy_bytes: int | None = None
    """Bytes received for its last refresh."""
    gate_kl: float | None = None
    """Nats per token, of the gate after the last recovery."""
    bubble_share: float | None = None
    """The share of the last step in which this stage waited."""
    tokens_per_second: float | None = None
    reason: str = ""
    """Why it failed, for people."""
    load: int = 0
    """Pieces of work in hand."""
    dropped: dict[str, int] = {}
    """Dropped frames by FENCE_REASONS and FRAME_REASONS; of this trainer process."""
    state_refused: dict[str, int] = {}
    """Bad messages and refused requests on state streams, by reason; in this crew."""


class StageFault(msgspec.Struct, frozen=True, tag="stages_fault"):
    """This crew cannot continue. Every trainer sends it from its own observation."""

    crew: bytes
    stage: int | None
    """The stage that failed. None where a deadline of the head expired and the head does not know
    which stage missed it."""
    reason: str


class StageAssignment(msgspec.Struct, frozen=True, tag="stages_assigned"):
    """A crew with this node in it: hold this stage. Replaces the assignment before."""

    crew: bytes
    """32 bytes. Frames carry the first 16."""
    lineage: bytes
    stage: int
    layers: tuple[int, ...]
    """The layers of every stage: the input of `stage_specs`."""
    members: tuple[str, ...]
    """The peer id of each stage's holder."""
    step: int
    """Committed steps that the crew continues from; 0 is the base model."""
    socket: str
    """Path of the Unix socket for streams to the other stages."""
    step_seconds: float = 300.0
    """A step that takes longer has failed."""


class CrewPause(msgspec.Struct, frozen=True, tag="stages_suspended"):
    """Pause: start nothing. Weights, optimizer and streams stay."""

    reason: str


class CrewResume(msgspec.Struct, frozen=True, tag="stages_resumed"):
    crew: bytes


class CrewEnd(msgspec.Struct, frozen=True, tag="stages_released"):
    """The crew is over. Memory and disk stay, for the next one."""

    reason: str


FromTrainer = TrainerOffer | StageStatus | StageFault
ToTrainer = StageAssignment | CrewPause | CrewResume | CrewEnd


# Crew messages between network processes:
#
#     request      answer
#     Offer        Noted                  free memory and the copies held
#     Propose      Accept | Refuse        an invitation to a crew
#     Heartbeat    Alive | Refuse         every second; proves that the sender is in that crew
#     Leave        Noted
#
# One message is one frame of the request protocol, canonical msgpack with the tag `type` first, at
# most MESSAGE_BYTES. Every value is checked before use. The connection authenticates the sender.

MESSAGE_BYTES: Final = 16 * 1024
REASON_BYTES: Final = 128

CrewRefusal = Literal["busy", "crew", "model", "room", "newer", "trust", "struck", "record"]
"""`busy`: the sender is in a crew, or forms one. `crew`: it is not in that crew. `model`: it trains
another. `room`: the stage does not fit its memory. `newer`: the record would discard its steps, and
it has not waited long enough. `trust`: its operator excludes a member. `struck`: a member has a
strike, and a crew is possible without that member. `record`: the record does not name the receiver,
or not the proposer."""


class MemberStatus(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sender's stage in the crew that the message names."""

    phase: StagePhase = "loading"
    step: int = 0
    """Committed steps."""
    progress: int = 0
    """Grows with each piece of work."""
    load: int = 0
    """Pieces of work in hand."""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="offer"):
    """Sent to all connected peers, at once when it changes, and again every few seconds."""

    model: bytes
    memory: float
    """Bytes for a stage; 0 withdraws the offer: the sender is in a crew, or has no trainer."""
    speed: float
    """Work per second, see `Capacity`."""
    hop_seconds: float
    held_blocks: tuple[HeldBlock, ...] = msgspec.field(default=(), name="copies")


class ProposeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="propose"):
    record: CrewRecord


class AcceptAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accept"):
    """The sender is a member from now on, and sends heartbeats."""

    crew: bytes


class RefuseAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refuse"):
    reason: CrewRefusal
    crew: bytes = bytes(HASH_BYTES)


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="heartbeat"):
    crew: bytes
    status: MemberStatus


class AliveAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="alive"):
    """Answer to a heartbeat, with the sender's own status."""

    crew: bytes
    status: MemberStatus


class LeaveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="leave"):
    """The sender has left this crew."""

    crew: bytes
    reason: str = ""


class NotedAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="noted"):
    """The message arrived."""


CrewRequest = Offer | ProposeRequest | Heartbeat | LeaveRequest
CrewAnswer = NotedAnswer | AcceptAnswer | RefuseAnswer | AliveAnswer
CrewMessage = CrewRequest | CrewAnswer


def encode_message(message: CrewMessage) -> bytes:
    return strict.encode(message)


def decode_request(data: bytes) -> CrewRequest:
    """Raises BadMessage: oversize, malformed, schema, bounds or not_finite."""
    message: CrewRequest = strict.decode(data, CrewRequest, MESSAGE_BYTES)
    check_message(message)
    return message


def decode_answer(data: bytes) -> CrewAnswer:
    """Raises BadMessage as `decode_request` does."""
    message: CrewAnswer = strict.decode(data, CrewAnswer, MESSAGE_BYTES)
    check_message(message)
    return message


_MESSAGE_LENGTHS: Final = {
    **dict.fromkeys(("crew", "model", "lineage"), HASH_BYTES),
    "nonce": NONCE_BYTES,
}
_MESSAGE_RANGES: Final = {
    **dict.fromkeys(("step", "progress", "load"), ANY_COUNTER),
    **dict.fromkeys(("memory", "speed", "hop_seconds"), (0.0, MAX_AMOUNT)),
    "first": (0, MAX_LAYERS - 1),
    "last": (1, MAX_LAYERS),
}


def check_message(message: CrewMessage) -> None:
    """Raises BadMessage("bounds") or BadMessage("not_finite") where a value is not allowed."""
    check_fields(message, _MESSAGE_LENGTHS, _MESSAGE_RANGES)
    match message:
        case Offer():
            check_between("copies", len(message.held_blocks), 0, MAX_HELD_BLOCKS)
            for held in message.held_blocks:
                check_fields(held, _MESSAGE_LENGTHS, _MESSAGE_RANGES)
                if held.first >= held.last:
                    raise BadMessage("bounds", "a copy of no layers")
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


# Settings, events and actions of crew control (`crew.py`). Each Received gets exactly one
# SendAnswer. Actions run in order.


class MembershipSettings(msgspec.Struct, frozen=True):
    """Seconds, where the name has no other unit."""

    stages: int = 0
    """The number of stages of a crew that starts from the base; 0 is as many as is fastest."""
    lost_seconds: float = 120.0
    """A node that has taken steps starts from the base after this time without a crew."""
    tick_seconds: float = 0.5
    heartbeat_seconds: float = 1.0
    offer_seconds: float = 10.0
    """Between two equal offers to a peer; an offer expires after three times this."""
    gather_seconds: float = 3.0
    """A crew that starts from the base is proposed this time after the last new offer, at most
    three times this after it became possible."""
    turn_seconds: float = 3.0
    """The member of rank r proposes after r times this."""
    exact_seconds: float = 12.0
    """A crew that discards steps is proposed after this time: their holder may be restarting."""
    join_seconds: float = 6.0
    """Deadline for the first heartbeat of every member of a crew that forms."""
    suspect_seconds: float = 6.0
    """Silence of a member that pauses the crew."""
    gone_seconds: float = 13.0
    """Silence of a member that ends the crew."""
    prepare_seconds: float = 300.0
    """Deadline for progress of a stage that is being restored."""
    restore_bytes_per_second: float = 1e6
    """The deadline of the whole restoration is prepare_seconds and its memory at this rate."""
    step_seconds: float = 120.0
    """The least deadline of a step."""
    strike_seconds: float = 10.0
    """Plans exclude a peer with n strikes for this times 2^n, at most an hour."""
    most_peers: int = 64
    """Peers whose offers are stored."""


class ClockTick(msgspec.Struct, frozen=True):
    """Sent every `tick_seconds`; its lateness measures the lag of this process."""

    heard: Mapping[str, float] = {}
    """Member → when bytes of any kind last came from it."""


class RequestReceived(msgspec.Struct, frozen=True):
    """A request of an authenticated peer, decoded by `decode_request`."""

    peer: str
    message: CrewRequest


class RequestFinished(msgspec.Struct, frozen=True):
    """The outcome of a Send. `answer` is None for a timeout, a refused dial or a bad answer."""

    peer: str
    request: CrewRequest
    answer: CrewAnswer | None
    seconds: float = 0.0
    """From the request to its outcome."""


class GarbageReceived(msgspec.Struct, frozen=True):
    """`peer` sent bytes that are no crew message."""

    peer: str


class StreamLost(msgspec.Struct, frozen=True):
    """A stage stream to `peer` in this crew broke or was reset, but not by us."""

    peer: str
    crew: bytes


class PeerDisconnected(msgspec.Struct, frozen=True):
    """The last connection to `peer` is down."""

    peer: str


class PeerConnected(msgspec.Struct, frozen=True):
    """`peer` is connected; also sent for each connected peer at the start."""

    peer: str


class TrainerDisconnected(msgspec.Struct, frozen=True):
    """The trainer's connection ended."""


class DrainStarted(msgspec.Struct, frozen=True):
    """This node stops in order: it holds and offers nothing more."""

    reason: str


TrainerEvent = FromTrainer | TrainerDisconnected
PeerEvent = (
    RequestReceived
    | RequestFinished
    | GarbageReceived
    | StreamLost
    | PeerDisconnected
    | PeerConnected
)
Event = ClockTick | PeerEvent | TrainerEvent | DrainStarted


class SendAnswer(msgspec.Struct, frozen=True):
    """The answer to the Received just handled."""

    message: CrewAnswer


class SendRequest(msgspec.Struct, frozen=True):
    """Send this request; its outcome comes as Answered. Requests do not wait for each other."""

    peer: str
    message: CrewRequest


class Note(msgspec.Struct, frozen=True):
    """For logs and metrics: `what` is one of NOTES."""

    what: str
    detail: str = ""


NOTES = (
    "proposed",
    "founded",
    "running",
    "paused",
    "suspected",
    "refuted",
    "broken",
    "refused",
    "struck",
    "behind",
)
"""`refuted`: a false suspicion. `broken`: the end of a crew. `refused`: a proposal failed.
`struck`: a peer got a strike. `behind`: a former member is not in the next crew."""

Action = SendAnswer | SendRequest | ToTrainer | Note
"""Stage streams belong to the crew of the last Assigned (its `socket` is empty, the service fills
it in); after Released there are none."""


# The first messages of a stage stream, each `u32be length ‖ canonical msgpack`. The rest of the
# stream belongs to the trainers.

OPEN_BYTES: Final = 512
"""The most bytes of an encoded Open, StreamOpen or StreamReady."""
STREAM_REFUSALS: Final = ("malformed", "timeout", "crew", "stage", "peer")
"""Why an incoming stream is reset."""
StreamKind = Literal["frames", "state"]
"""What a stream is for."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


class SocketOpen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer → network on the Unix socket, the only message of a connection. The stream to the
    trainer of `stage` follows, both ways. The network process closes the connection when the stream
    is lost, when the crew ends, and when the trainer opens the same again."""

    crew: bytes
    stage: int
    """The other stage."""
    kind: StreamKind


class StreamOpen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dialler → acceptor, the first message of a stream."""

    crew: bytes
    from_stage: int
    to_stage: int
    kind: StreamKind


class StreamReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Acceptor → dialler: its trainer is there."""

    crew: bytes


@dataclass(frozen=True)
class StreamPeers:
    """A crew as far as streams are concerned, seen from one of its stages."""

    crew: bytes
    stage: int
    """Ours."""
    members: tuple[str, ...]
    """Peer id by stage."""


def socket_file(data_dir: Path) -> Path:
    """Return the Unix socket that `service.StreamProxy` listens on."""
    return data_dir / "run" / "stages.sock"


def stream_refusal(peers: StreamPeers | None, peer: str, opened: StreamOpen) -> str:
    """Return why a stream that `peer` opened is refused, of REFUSALS; empty if it is taken."""
    if peers is None or opened.crew != peers.crew:
        return "crew"
    if opened.to_stage != peers.stage or not 0 <= opened.from_stage < peers.stage:
        return "stage"
    return "" if peers.members[opened.from_stage] == peer else "peer"


async def read_first(stream: PeerStream, kind: type[StructT]) -> StructT:
    """Return the first message on a stream; what follows it stays there. Raises BadMessage,
    PeerError."""
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


async def read_open(unix: trio.SocketStream) -> SocketOpen | None:
    """Return None when the trainer sent nothing. Raises BadMessage, and what the socket raises."""
    opened: SocketOpen | None = await headed.read_header(
        unix, lambda data: strict.decode(data, SocketOpen), OPEN_BYTES
    )
    return opened


# State messages between trainers:
#
#     u32be header length ‖ header (canonical msgpack, tagged by `type`) ‖ body of a Chunk or a Run
#
#     Ask ──▶ Holds                    what a member has for the asker's stage
#     Want ──▶ Have, Chunk … | Lack    a body of a stage, from a byte on
#     Run ──▶ Have, Chunk … | Lack     activations in, activations or log-probabilities out
#     Made ──▶                         a new checkpoint exists; its keeper sends Want, then Kept
#
# No body arrives unrequested. Its length follows from the model or has a cap, and a different
# `size` is refused before allocation. A chunk has at most 1 MiB; a body is used only after its hash
# matches.

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
STATE_REFUSALS: Final = (*STATE_REASONS, "busy", "failed", "repeated", "gate")
"""STATE_REASONS and what is counted beside them: `busy`, too many requests at a time; `failed`, our
disk or device could not do what was asked; `repeated`, one body too often; `gate`, our stage was
restored from a source that failed the gate, because no source passed."""
ROOT_BYTES: Final = 32
StateForm = Literal["exact", "small", "plain"]
"""exact: float32 with AdamW's moments and counts. small: bfloat16, and plain: float32, without."""
StatePhase = Literal["starting", "restoring", "candidate", "ready"]
"""starting: not known yet whether the stage has its weights. restoring: it has none. candidate: its
weights are being judged, and it runs micro-batches with them. ready: its weights are in order."""
BodyKind = Literal["checkpoint", "layers", "tied", "ends", "probes", "copy", "output"]
SharedBody = Literal["checkpoint", "ends", "probes"]
"""Bodies that other members keep of a stage."""
RequestedBody = Literal["checkpoint", "layers", "tied", "ends", "probes", "copy"]
LackReason = Literal["none", "loading", "refused", "busy", "failed"]


class StateMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    place: Place
    request: int
    """Number that the requester chose; answers repeat it. 0 in Made and Kept."""


class AskMessage(StateMessage, frozen=True, tag="ask"):
    """What do you have for my stage?"""


class HoldsMessage(StateMessage, frozen=True, tag="holds"):
    """Answer to Ask. None where there is nothing."""

    phase: StatePhase
    """Of the answering stage."""
    checkpoint: int | None
    """Committed steps in the checkpoint of the asker's stage."""
    ends: int | None
    """Committed steps in the copy of the asker's embedding, or norm and head."""
    probes: int | None
    """Committed steps when the newest probe was computed."""


class WantMessage(StateMessage, frozen=True, tag="want"):
    what: RequestedBody
    of: int
    """Stage whose body it is: the asker's or the asked."""
    at: int
    """First byte; above 0 of a checkpoint only, to resume a transfer."""
    root: bytes
    """32 bytes, the hash of the body that is resumed, if `at` is above 0; otherwise empty. Another
    body is sent from its first byte."""


class RunMessage(StateMessage, frozen=True, tag="run"):
    """Body: a description (`MicroBatch`) ‖ activations."""

    codec: ActivationCodec | None
    """None for the first stage, which takes no activations."""
    rows: int
    about: int
    """Bytes of the description."""


class HaveMessage(StateMessage, frozen=True, tag="have"):
    """The body has `size` bytes; those from the requested byte on follow in chunks."""

    what: BodyKind
    step: int
    """Committed steps in it."""
    size: int
    root: bytes
    """32 bytes: blake2b of the whole body."""
    squared_norm: float = 0.0
    """Squared norm of the stage's last raw gradient over its layers: CheckFree's weight."""


class ChunkMessage(StateMessage, frozen=True, tag="chunk"):
    at: int
    length: int


class LackMessage(StateMessage, frozen=True, tag="lack"):
    reason: LackReason


class MadeMessage(StateMessage, frozen=True, tag="made"):
    """The sender has a new body for others to keep."""

    what: SharedBody
    step: int
    """Committed steps in it."""


class KeptMessage(StateMessage, frozen=True, tag="kept"):
    """The receiver's checkpoint of this step is on the sender's disk."""

    step: int


StateAnswer = HoldsMessage | HaveMessage | ChunkMessage | LackMessage
AnyStateMessage = AskMessage | WantMessage | RunMessage | MadeMessage | KeptMessage | StateAnswer


class GateProbe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A micro-batch that was trained on, and the policy's log-probabilities before that step."""

    micro_batch: int
    step: int
    """Committed steps when it was computed."""
    rows: int
    about: bytes
    """`MicroBatch`."""
    logprobs: bytes
    """f32 for each completion token."""


def hash_body(body: bytes | bytearray | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=ROOT_BYTES).digest()


def state_bytes(layout: Layout, form: StateForm) -> int:
    """Return the length of a state. The exact form has a float32 count for each tensor."""
    per_value = {"exact": 12, "small": 2, "plain": 4}[form]
    return per_value * elements(layout) + (4 * len(layout) if form == "exact" else 0)


def pack_state(message: AnyStateMessage, body: bytes | memoryview = b"") -> bytes:
    return headed.pack(message, body)


async def read_state(
    stream: headed.Reader, limits: FrameLimits
) -> tuple[AnyStateMessage, bytes] | None:
    """Return the next message and its body; None at the end.

    Raises:
        BadMessage: oversize, malformed, schema, bounds, truncated.
    """
    message: AnyStateMessage | None = await headed.read_header(
        stream, lambda data: strict.decode(data, AnyStateMessage), HEADER_BYTES
    )
    if message is None:
        return None
    _check_state_message(message, limits)
    size = 0
    if isinstance(message, ChunkMessage):
        size = message.length
    elif isinstance(message, RunMessage):
        size = message.about + (
            activation_bytes(message.codec, message.rows, limits.hidden)
            if message.codec is not None
            else 0
        )
    return message, await headed.read_exactly(stream, size) or b""


_STATE_RANGES: Final = {
    **dict.fromkeys(("request", "step", "size", "at", "checkpoint", "ends", "probes"), ANY_COUNTER),
    "length": (1, CHUNK_BYTES),
    "of": (0, MAX_STAGES - 1),
}


def _check_state_message(message: AnyStateMessage, limits: FrameLimits) -> None:
    check_place(message.place)
    check_fields(
        message,
        {},
        {
            **_STATE_RANGES,
            "rows": (1, limits.tokens),
            "about": (1, ABOUT_ITEM_BYTES * (limits.tokens + 16)),
        },
    )
    if isinstance(message, WantMessage):
        if message.at and message.what != "checkpoint":
            raise BadMessage("bounds", f"a part of {message.what}")
        check_length("root", message.root, ROOT_BYTES if message.at else 0)
    if isinstance(message, HaveMessage):
        check_length("root", message.root, ROOT_BYTES)
        check_between("squared_norm", message.squared_norm, 0.0, math.inf)
