"""Every message, frame and record of a crew, with its bounds, and the pure rules about them. No
torch.

Frames carry activations between stages, crew messages form a crew, state messages carry
checkpoints. A frame's body length is computed from its header: no number that a peer sends is a
size to allocate.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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
from swarmnode.wire.limits import LOGPROB_SLACK, PEER_ID_BYTES, SIGNATURE_BYTES

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
DESCRIPTION_BYTES: Final = caps.DESCRIPTION_BYTES
MICRO_BATCHES: Final = caps.MICRO_BATCHES
STAGES: Final = caps.STAGES
ABOUT_ITEM_BYTES: Final = caps.STAGE_ABOUT_ITEM_BYTES
INT8_BLOCK: Final = caps.STAGE_ACTIVATION_BLOCK

ActivationCodec = Literal["float32", "bfloat16", "int8"]
Purpose = Literal["learn", "score"]
RefusalReason = Literal[
    "micro_batches",
    "not_finite",
    "attempt",
    "timeout",
    "session",
    "fingerprint",
    "rows",
    "frame",
    "gone",
    "device",
]
"""`frame`: what came is not what it has to be, or not now. `device`: ours cannot do it, as when
memory runs out."""


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where in a crew's life a frame belongs: its fencing tokens."""

    crew: bytes
    stage: int
    """The sender's."""
    step: int
    """Committed steps at the sender."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    place: Place


class Forward(Header, frozen=True, tag="forward"):
    """Stage i → i + 1. Body: description of the micro-batch (`work.MicroBatch`) ‖ activations."""

    micro_batch: int
    purpose: Purpose
    codec: ActivationCodec
    rows: int
    about: int
    """Bytes of the description."""


class Backward(Header, frozen=True, tag="backward"):
    """Stage i → i − 1. Body: gradient of what `Forward` brought."""

    micro_batch: int
    codec: ActivationCodec
    rows: int


class Learnt(Header, frozen=True, tag="learnt"):
    """Tail → head: sums over one micro-batch's trained tokens."""

    micro_batch: int
    loss: float
    clipped: float
    entropy: float
    tokens: float
    weights: float
    """What the tokens weigh."""
    squares: float
    """The squares of that."""


class Scores(Header, frozen=True, tag="scores"):
    """Tail → head. Body: log-probability of each completion token, completion after completion,
    f32; then entropies."""

    micro_batch: int
    rows: int
    """Completion tokens."""


class Prefill(Header, frozen=True, tag="prefill"):
    """Stage i → i + 1. Body: `work.Questions` ‖ activations."""

    session: bytes
    fingerprint: bytes
    codec: ActivationCodec
    rows: int
    about: int


class Decode(Header, frozen=True, tag="decode"):
    """Stage i → i + 1: one token further. Body: which completions, u32 each ‖ activations."""

    session: bytes
    fingerprint: bytes
    codec: ActivationCodec
    rows: int


class Tokens(Header, frozen=True, tag="tokens"):
    """Tail → head. Body: a token id for each completion that is left, u32 ‖ their
    log-probabilities, f32."""

    session: bytes
    rows: int


class Drop(Header, frozen=True, tag="drop"):
    """Head → all: a wave is over."""

    session: bytes


class Lost(Header, frozen=True, tag="lost"):
    """Any → head: this wave cannot go on here; begin it again from token ids."""

    session: bytes
    reason: RefusalReason
    source: int
    """The stage whose frame it was that could not be used; the sender's own, where it is its own
    matter."""


class Failed(Header, frozen=True, tag="failed"):
    """Any → head: this micro-batch cannot go on here."""

    micro_batch: int
    reason: RefusalReason
    source: int
    """As in `Lost`."""


class Locate(Header, frozen=True, tag="locate"):
    """Head → all: how far is this piece of work? It is answered at once, whatever is being
    computed."""

    piece: bytes
    """A wave's session, or a micro-batch's number in as many bytes, big-endian."""


class Located(Header, frozen=True, tag="located"):
    """Any → head."""

    piece: bytes
    arrived: int
    """Times that it came from another stage."""
    sent: int
    """Times that it was sent to another stage, or put in the queue of one that does not read."""
    full: bool
    """The queue of one of them is so long that nothing new is begun which would go there."""
    worked: int
    """Grows while the sender computes, layer by layer, and while it sends."""


class Embedding(Header, frozen=True, tag="embedding"):
    """Head ↔ tail: rows first … first + rows − 1 of a tied embedding's gradient, float32."""

    attempt: int
    first: int
    rows: int


class ProposeStep(Header, frozen=True, tag="propose"):
    """Head → all, before the work itself: what the step is made of. Body: the hash of each
    micro-batch's description."""

    attempt: int
    micro_batches: tuple[int, ...]


class Acknowledge(Header, frozen=True, tag="acknowledge"):
    """Any → head: gradients of exactly these are here, or why not."""

    attempt: int
    refused: RefusalReason | None
    squared_norm: float
    """This stage's raw gradient's, before any clipping; only the head counts a tied embedding."""


class Commit(Header, frozen=True, tag="commit"):
    attempt: int
    norm: float
    """The whole policy's raw gradient's."""
    clip: float
    learning_rate: float


class Abort(Header, frozen=True, tag="abort"):
    """Head → all: drop the gradients of this attempt."""

    attempt: int
    reason: RefusalReason


class Done(Header, frozen=True, tag="done"):
    """Any → head: the step is taken here."""

    attempt: int


Compute = Forward | Backward | Learnt | Scores | Prefill | Decode | Tokens | Drop | Lost | Failed
Control = Embedding | ProposeStep | Acknowledge | Commit | Abort | Done | Locate | Located
Frame = Compute | Control


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
        case Forward() | Prefill():
            return frame.about + activation_bytes(frame.codec, frame.rows, limits.hidden)
        case Backward():
            return activation_bytes(frame.codec, frame.rows, limits.hidden)
        case Decode():
            return 4 * frame.rows + activation_bytes(frame.codec, frame.rows, limits.hidden)
        case Scores() | Tokens():
            return 8 * frame.rows
        case Embedding():
            return 4 * frame.rows * limits.hidden
        case ProposeStep():
            return DESCRIPTION_BYTES * len(frame.micro_batches)
        case _:
            return 0


def description_hash(about: bytes) -> bytes:
    """16 bytes: by which a stage knows that a micro-batch's description is the head's."""
    return hashlib.blake2b(about, digest_size=DESCRIPTION_BYTES).digest()


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


_FRAME_LENGTHS: Final = {
    "session": SESSION_BYTES,
    "piece": SESSION_BYTES,
    "fingerprint": FINGERPRINT_BYTES,
}
_COUNTERS: Final = dict.fromkeys(
    ("micro_batch", "attempt", "arrived", "sent", "worked"), ANY_COUNTER
)
_ANY: Final = (-math.inf, math.inf)
_NOT_NEGATIVE: Final = (0.0, math.inf)
_AMOUNTS: Final = {
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
    check_between("stage", place.stage, 0, STAGES - 1)
    check_counter("step", place.step)


def _check_frame(frame: Frame, limits: FrameLimits) -> None:
    check_place(frame.place)
    about = ABOUT_ITEM_BYTES * (limits.tokens + 16)
    ranges = {
        "rows": (1, limits.tokens),
        "about": (1, about),
        "source": (0, STAGES - 1),
        **_COUNTERS,
    }
    check_fields(frame, _FRAME_LENGTHS, {**ranges, **_AMOUNTS})
    if isinstance(frame, Embedding):
        check_between("first", frame.first, 0, limits.vocab - frame.rows)
    if isinstance(frame, ProposeStep):
        check_rising("micro_batches", frame.micro_batches, 1, MICRO_BATCHES)
        check_counter("micro_batches", frame.micro_batches[0])
        check_counter("micro_batches", frame.micro_batches[-1])


# Step commit, two pure state machines:
#
#     head:    propose(set) ──▶ all stages        take the step of exactly these micro-batches
#     stage:   acknowledge ──▶ head               prepared: it waits for the decision; or a refusal
#     head:    commit ──▶ all after all acknowledged; abort ──▶ all at the first refusal or timeout
#     stage:   optimizer step, done ──▶ head      abort: gradients are dropped, weights stay
#
# The head takes its own step at the first `done`. When a head dies, the survivors decide alone: a
# step that any of them took is taken by all that prepared it. Attempts number the tries of one
# step; messages of a lower attempt are ignored. Every message may arrive twice.

Phase = Literal["open", "preparing", "prepared"]
HASH_BYTES: Final = 32
NO_HASH: Final = bytes(HASH_BYTES)
"""The step hash of the base: no step was taken."""
STEP_DOMAIN: Final = b"swarmnode/crew-step/1"
DECISION_SECONDS: Final = 30.0
"""A stage that has prepared and heard nothing for so long acknowledges again."""


class Taken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the last step was taken: what a stage that has prepared for it needs to take it too."""

    attempt: int = 0
    clip: float = 1.0
    learning_rate: float = 0.0


def step_hash(
    before: bytes, crew: bytes, step: int, attempt: int, micro_batches: Iterable[int]
) -> bytes:
    """32 bytes: what the weights are after `step` steps, the last of which took these micro-batches
    in this attempt of this crew.

    `crew`: 16 bytes, as in `Place`. `before`: the hash one step earlier.
    """
    numbers = b"".join(n.to_bytes(8, "big") for n in (step, attempt, *sorted(micro_batches)))
    return hashlib.blake2b(STEP_DOMAIN + before + crew + numbers, digest_size=HASH_BYTES).digest()


# What a stage does next.
Next = Literal["prepare", "take", "confirm"]
"""`prepare`: bring the gradients into their final form (sum a tied embedding's halves, measure the
norm), then call `prepared`. `take`: optimizer step, then send `done`. `confirm`: send `done` again,
this commit was taken before."""


@dataclass(frozen=True)
class StepAnswer:
    """Send an acknowledgement."""

    attempt: int
    refused: RefusalReason | None
    squared_norm: float = 0.0


class Participant:
    """One stage's side. `hash`: the step hash of what it begins with; `crew`: as in `step_hash`."""

    def __init__(self, step: int = 0, hash: bytes = NO_HASH, crew: bytes = b"") -> None:
        self.step = step
        """Steps taken."""
        self.hash = hash
        self.crew = crew
        self.phase: Phase = "open"
        self.attempt = 0
        self._have: set[int] = set()
        self._wanted: set[int] = set()
        """What was proposed and is not all here."""
        self.lost = False
        """Gradients were here, or on their way, and will not come again in this attempt."""
        self._norm = 0.0
        self._since = 0.0

    def may_accumulate(self, micro_batch: int) -> bool:
        """Whether the gradient of `micro_batch` may be added now: never twice, and never once a
        proposal is being answered."""
        return self.phase == "open" and micro_batch not in self._have

    def accumulated(self, micro_batch: int) -> None:
        """Its gradient was added. Raises ValueError where it must not have been."""
        if not self.may_accumulate(micro_batch):
            raise ValueError(f"micro-batch {micro_batch} must not be added")
        self._have.add(micro_batch)

    def propose(
        self, step: int, attempt: int, micro_batches: Iterable[int]
    ) -> Next | StepAnswer | None:
        if step < self.step:
            return "confirm" if step == self.step - 1 and attempt == self.attempt else None
        if step > self.step or attempt < self.attempt:
            return StepAnswer(attempt, "attempt") if attempt >= self.attempt else None
        if attempt == self.attempt and self.phase != "open":
            return StepAnswer(attempt, None, self._norm) if self.phase == "prepared" else None
        self.attempt, wanted = attempt, set(micro_batches)
        if self._have == wanted:
            self.phase = "preparing"
            return "prepare"
        if self.lost or self.phase != "open" or not self._have <= wanted:
            return StepAnswer(attempt, "micro_batches")
        self._wanted = wanted
        return None

    def complete(self) -> Next | StepAnswer | None:
        """To be asked after each gradient: whether it was the last of those that were proposed.
        What has not come is not refused: whoever let a gradient through before it had one would
        have us blamed."""
        if self.phase != "open" or not self._wanted or self._have < self._wanted:
            return None
        if self._have != self._wanted:
            self._wanted = set()
            return StepAnswer(self.attempt, "micro_batches")
        self.phase = "preparing"
        return "prepare"

    def prepared(self, attempt: int, squared_norm: float | None, now: float) -> StepAnswer | None:
        """Gradients are final; `squared_norm` is None where they are not finite. None where the
        attempt is over."""
        if self.phase != "preparing" or attempt != self.attempt:
            return None
        if squared_norm is None:
            self.phase, self._wanted = "open", set()
            return StepAnswer(attempt, "not_finite")
        self.phase, self._norm, self._since = "prepared", squared_norm, now
        return StepAnswer(attempt, None, squared_norm)

    def commit(self, step: int, attempt: int) -> Next | None:
        if step == self.step - 1 and attempt == self.attempt:
            return "confirm"
        if step != self.step or attempt != self.attempt or self.phase != "prepared":
            return None
        self.hash = self._hash_after()
        self._clear()
        self.step += 1
        return "take"

    def abort(self, step: int, attempt: int) -> bool:
        """Whether the gradients are to be zeroed."""
        if step != self.step or attempt < self.attempt:
            return False
        self.attempt = attempt
        self._clear()
        return True

    def lose(self) -> bool:
        """Whether the gradients may be dropped without a decision, e.g. because a neighbour is
        gone; then they count as dropped.

        What was prepared has to stay: others may have taken the step already.
        """
        if self.phase == "prepared":
            return False
        lost = bool(self._have or self._wanted) or self.lost
        self._clear()
        self.lost = lost
        return True

    @property
    def next_hash(self) -> bytes:
        """The step hash after the step that it has prepared for; empty where it has not."""
        return self._hash_after() if self.phase == "prepared" else b""

    def _hash_after(self) -> bytes:
        return step_hash(self.hash, self.crew, self.step + 1, self.attempt, self._have)

    def tick(self, now: float) -> StepAnswer | None:
        """Asks again for a decision that does not come."""
        if self.phase != "prepared" or now - self._since < DECISION_SECONDS:
            return None
        self._since = now
        return StepAnswer(self.attempt, None, self._norm)

    def _clear(self) -> None:
        self.phase = "open"
        self._have.clear()
        self._wanted, self.lost = set(), False


# What the head does next.
@dataclass(frozen=True)
class Decided:
    """Send commit, or abort with the reason, to `stages`: all, or the one that asks again."""

    attempt: int
    refused: RefusalReason | None
    squared_norm: float
    """The whole policy's; 0 for an abort."""
    stages: tuple[int, ...]


@dataclass
class Coordinator:
    """The head's side: one proposal at a time."""

    stages: int
    attempt: int = 0
    norms: dict[int, float] = field(default_factory=dict)
    """Squared norms of the present attempt, by stage."""
    decision: Decided | None = None
    """For all stages, of the present attempt or of the last one: they may ask again for it whatever
    is done since."""
    _done: set[int] = field(default_factory=set)
    _open: bool = False

    def begin(self) -> int:
        """Number of a new attempt. Raises ValueError while one is undecided."""
        if self._open:
            raise ValueError("a proposal is undecided")
        self.attempt += 1
        self.norms.clear()
        self._done.clear()
        self.decision, self._open = None, True
        return self.attempt

    def acknowledged(
        self, stage: int, attempt: int, refused: RefusalReason | None, squared_norm: float
    ) -> Decided | None:
        """A decision for all where this one makes it; the old decision for a stage that asks
        again."""
        if attempt != self.attempt or not 0 <= stage < self.stages:
            return None
        if self.decision is not None:
            return Decided(attempt, self.decision.refused, self.decision.squared_norm, (stage,))
        if not self._open:
            return None
        if refused is not None:
            return self._decide(refused)
        self.norms[stage] = squared_norm
        return self._decide(None) if len(self.norms) == self.stages else None

    @property
    def silent(self) -> frozenset[int]:
        """Stages that have not acknowledged the present attempt."""
        return frozenset(range(self.stages)) - self.norms.keys()

    @property
    def unfinished(self) -> frozenset[int]:
        """Stages that have not said that they took the step of the present attempt."""
        return frozenset(range(self.stages)) - self._done

    @property
    def over(self) -> bool:
        """Whether the present attempt is aborted, or all stages have said that they took the
        step."""
        return self.decision is not None and (
            self.decision.refused is not None or not self.unfinished
        )

    def give_up(self, reason: RefusalReason) -> Decided | None:
        """Abort, where nothing is decided yet."""
        return self._decide(reason) if self._open else None

    def done(self, stage: int, attempt: int) -> bool:
        """Whether the head may now take its own step: the first other stage has. A head without
        others commits alone."""
        if attempt != self.attempt or self.decision is None or self.decision.refused is not None:
            return False
        first = not self._done - {0} and stage != 0
        self._done.add(stage)
        return first

    def _decide(self, refused: RefusalReason | None) -> Decided:
        self._open = False
        norm = sum(self.norms.values()) if refused is None else 0.0
        self.decision = Decided(self.attempt, refused, norm, tuple(range(self.stages)))
        return self.decision


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


def plain(stages: int) -> Route:
    return tuple(Hop(stage, "all") for stage in range(stages))


def swapped_order(stages: int) -> tuple[int, ...]:
    """CheckFree+: the order of the stages' layers for half of the micro-batches.

    Raises Refused for fewer than four stages: the pairs would overlap.
    """
    if stages < 4:
        raise Refused("swapped stages need at least four")
    return (1, 0, *range(2, stages - 2), stages - 1, stages - 2)


def swapped(stages: int) -> Route:
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
        self._plain = plain(stages)
        self._swapped = swapped(stages) if swap else self._plain

    def of(self, micro_batch: int, purpose: Literal["learn", "score"] = "learn") -> Route:
        """Only training is swapped: what is generated and scored is the plain policy."""
        return self._swapped if purpose == "learn" and micro_batch % 2 else self._plain


def arriving(route: Route, sender: int, stage: int) -> int | None:
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


def returning(route: Route, sender: int, stage: int) -> int | None:
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
        """Packed rows, as `Packing` lays them out."""
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
    import numpy as np

    from swarmnode.wire.tensors import unpack_ids

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
    import numpy as np

    from swarmnode.wire.tensors import unpack_logprobs

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

        `step` is None for frames of the commit itself, which `Coordinator` orders by step and
        attempt: they are about being a step apart.
        """
        reason = self._reason(place, sender, step)
        if reason:
            self.dropped[reason] += 1
        return reason

    def passes(self, place: Place, sender: int, step: int) -> bool:
        """What `check` would say, without counting."""
        return self._reason(place, sender, step) is None

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


# The plan: contiguous blocks of layers that minimise the slowest stage's time within the members'
# memory. Dynamic programming over sets of at most eight members; the least bound is found by
# halving.

MEMBERS: Final = 8
"""Members considered for one crew, at most."""


@dataclass(frozen=True)
class Part:
    """What one layer, the embedding or the head costs whoever holds it."""

    memory: float
    """Bytes: weights, gradients, optimizer, the cache of its share of the waves in flight, and what
    a micro-batch leaves in it."""
    work: float
    """What a micro-batch takes, forward and backward; in units of which a member does `speed` per
    second."""


@dataclass(frozen=True)
class ModelCost:
    embedding: Part
    layers: tuple[Part, ...]
    head: Part
    """Norm and head; with tied embeddings it holds the embedding a second time."""
    batch_bytes: float = 0.0
    """What a stage sends of a micro-batch: activations to the next one, gradients to the one
    before."""
    stage: float = 0.0
    """Bytes that any stage needs besides, however many layers it holds: while one of them is
    computed."""
    batches: float = 1.0
    """Micro-batches of a step."""
    crossings: float = 0.0
    """How often, for each micro-batch of a step, everybody waits for the way through all stages and
    back: once for each token that is sampled, and while the pipeline fills and drains."""


@dataclass(frozen=True)
class Capacity:
    """What a member can do."""

    memory: float
    """Bytes it can give."""
    speed: float
    """Work per second, > 0."""
    hop_seconds: float = 0.0
    """What it takes to send one micro-batch's activations on, where work does not hide it; measured
    by the network process."""


@dataclass(frozen=True)
class Plan:
    members: tuple[int, ...]
    """Which member is stage 0, 1, …"""
    layers: tuple[int, ...]
    """How many layers each of them holds."""
    slowest_seconds: float
    """What a micro-batch takes in the slowest stage."""


def stage_memory(model: ModelCost, layers: Sequence[int], stage: int) -> float:
    """Bytes that whoever holds `stage` of these blocks needs."""
    return model.stage + sum(part.memory for part in _parts(model, layers, stage))


def stage_work(model: ModelCost, layers: Sequence[int], stage: int) -> float:
    """What all micro-batches of a step take in `stage` of these blocks."""
    return model.batches * sum(part.work for part in _parts(model, layers, stage))


def _parts(model: ModelCost, layers: Sequence[int], stage: int) -> list[Part]:
    start = sum(layers[:stage])
    ends = [model.embedding] * (stage == 0) + [model.head] * (stage == len(layers) - 1)
    return [*model.layers[start : start + layers[stage]], *ends]


def make_plan(model: ModelCost, members: Sequence[Capacity], stages: int = 0) -> Plan:
    """The fastest plan; among equals the one with the fewest stages, then the one that uses earlier
    members. Deterministic.

    `stages` asks for exactly so many; 0 for as many as is fastest. Asked for a number, it is the
    fastest where layers cost alike.

    Raises Refused when no crew of these members can hold the model, ValueError for more than
    MEMBERS.
    """
    if len(members) > MEMBERS:
        raise ValueError(f"at most {MEMBERS} members")
    search = _Search(model, members)
    found = search.within(sys.float_info.max, stages)
    if found is None:
        need = model.stage + model.embedding.memory + search.memory[-1] + model.head.memory
        have = sum(member.memory for member in members)
        raise Refused(
            f"{len(members)} members with {have:.3g} bytes together cannot hold the model's"
            f" {need:.3g} in blocks of layers"
        )
    too_fast = 0.0  # nothing is known to be faster than this
    while (
        better := search.within(math.nextafter(found.slowest_seconds, -1.0), stages)
    ) is not None:
        found = better
        middle = too_fast + (found.slowest_seconds - too_fast) / 2
        if (better := search.within(middle, stages)) is None:
            too_fast = middle
        else:
            found = better
    return search.earliest(found)


@lru_cache(maxsize=8)
def plan_apart(
    model: ModelCost,
    members: tuple[Capacity, ...],
    apart: tuple[tuple[float, ...], ...],
    stages: int = 0,
) -> Plan:
    """As `make_plan`, of members that are `apart[i][j]` seconds, one way; the nearest to us come
    first.

    Each further member makes the slowest stage faster and the way through all of them longer: as
    many as make a step fastest. Their order is the one, of those no slower, with the shortest way.
    Raises as `make_plan` does.
    """
    if not any(any(row) for row in apart):
        return make_plan(model, members, stages)
    best: tuple[float, Plan] | None = None
    for count in range(max(1, stages), len(members) + 1):
        try:
            plan, way = _nearest(model, members, make_plan(model, members[:count], stages), apart)
        except Refused:
            if best is None and count == len(members):
                raise
            continue
        seconds = plan.slowest_seconds + model.crossings * way
        if best is None or seconds < best[0]:
            best = seconds, plan
    return best[1] if best is not None else make_plan(model, members, stages)


def _nearest(
    model: ModelCost, members: Sequence[Capacity], plan: Plan, apart: Sequence[Sequence[float]]
) -> tuple[Plan, float]:
    """The order of the plan's members with the shortest way, none of whose stages is slower than
    its slowest; the blocks stay as they are, since crews that are cut alike can average. And the
    seconds of that way, once through all of them and back to the first."""
    search, chosen, bound = _Search(model, members), plan.members, plan.slowest_seconds
    blocks = [*pairwise(accumulate((0, *plan.layers)))]

    def way(order: Sequence[int]) -> float:
        return sum(apart[one][other] for one, other in pairwise(order))

    # (those placed, the last of them) → the shortest order
    ends: dict[tuple[int, int], tuple[int, ...]] = {}
    for used in range(1, 1 << len(chosen)):
        for number, index in enumerate(chosen):
            if used >> number & 1 and search.seconds(index, *blocks[used.bit_count() - 1]) <= bound:
                rest = used & ~(1 << number)
                before = (
                    [(*ends[rest, other], index) for other in chosen if (rest, other) in ends]
                    if rest
                    else [(index,)]
                )
                if before:
                    ends[used, index] = min(before, key=way)
    order = min(
        [chosen, *(order for (used, _), order in ends.items() if used == (1 << len(chosen)) - 1)],
        key=way,
    )
    return Plan(order, plan.layers, bound), way(order) + apart[order[-1]][order[0]]


class _Search:
    """Plans none of whose stages takes longer than a bound: of a set of members, only how far they
    reach counts, and further is always better. So a search is at most MEMBERS · 2^MEMBERS steps,
    whatever the model."""

    def __init__(self, model: ModelCost, members: Sequence[Capacity]) -> None:
        self.model, self.members, self.count = model, members, len(model.layers)
        self.memory = [0.0, *accumulate(part.memory for part in model.layers)]
        self.work = [0.0, *accumulate(part.work for part in model.layers)]

    def within(self, bound: float, stages: int) -> Plan | None:
        """The plan with the fewest stages, then of the earliest members. `stages`: exactly so many;
        0 for any number."""
        reach = [-1] * (1 << len(self.members))
        reach[0] = 0
        fewest = len(self.members) + 1
        for used, start in enumerate(reach):
            placed = used.bit_count() + 1
            if start < 0 or placed >= fewest or (stages and placed > stages):
                continue
            for index in range(len(self.members)):
                if used >> index & 1:
                    continue
                if stages in (0, placed) and self.seconds(index, start, self.count) <= bound:
                    fewest = placed
                    break
                end = self._reach(index, start, self.count - max(1, stages - placed), bound)
                if end > start:
                    reach[used | 1 << index] = max(end, reach[used | 1 << index])
        if fewest > len(self.members):
            return None
        order = self._order(0, 0, fewest, bound, set())
        assert order is not None
        ends = self.ends(order, bound)
        assert ends is not None
        blocks = [*pairwise((0, *ends))]
        slowest = max(
            self.seconds(index, *block) for index, block in zip(order, blocks, strict=True)
        )
        return Plan(order, tuple(end - start for start, end in blocks), slowest)

    def seconds(self, index: int, start: int, end: int) -> float:
        """What a micro-batch takes in layers [start, end) at this member; infinite where they do
        not fit."""
        member, last = self.members[index], end == self.count
        memory, work = (
            self.model.stage + self.memory[end] - self.memory[start],
            self.work[end] - self.work[start],
        )
        if start == 0:
            memory, work = memory + self.model.embedding.memory, work + self.model.embedding.work
        if last:
            memory, work = memory + self.model.head.memory, work + self.model.head.work
        return (
            math.inf
            if memory > member.memory
            else work / member.speed + (0.0 if last else member.hop_seconds)
        )

    def _reach(self, index: int, start: int, most: int, bound: float) -> int:
        """How far this member can go on from `start`, at most to `most`, which is not the end;
        `start` where it cannot take a layer."""
        member, first = self.members[index], self.model.embedding if start == 0 else Part(0.0, 0.0)
        room = self.memory[start] + member.memory - self.model.stage - first.memory
        time = self.work[start] + (bound - member.hop_seconds) * member.speed - first.work
        end = min(bisect.bisect_right(self.memory, room), bisect.bisect_right(self.work, time)) - 1
        end = max(start, min(end, most))  # but for rounding
        while end < most and self.seconds(index, start, end + 1) <= bound:
            end += 1
        while end > start and self.seconds(index, start, end) > bound:
            end -= 1
        return end

    def _order(
        self, used: int, start: int, left: int, bound: float, dead: set[tuple[int, int]]
    ) -> tuple[int, ...] | None:
        """`left` members that hold what is left from `start` on, the earliest; None without."""
        if (used, start) in dead:
            return None
        for index in range(len(self.members)):
            if used >> index & 1:
                continue
            if left == 1:
                if self.seconds(index, start, self.count) <= bound:
                    return (index,)
                continue
            end = self._reach(index, start, self.count - left + 1, bound)
            rest = (
                self._order(used | 1 << index, end, left - 1, bound, dead) if end > start else None
            )
            if rest is not None:
                return (index, *rest)
        dead.add((used, start))
        return None

    def ends(self, order: tuple[int, ...], bound: float, start: int = 0) -> tuple[int, ...] | None:
        """Where each of these stops when each takes as much as it can, from `start` on; None where
        that does not hold the rest."""
        ends = [start]
        for position, index in enumerate(order[:-1]):
            ends.append(self._reach(index, ends[-1], self.count - len(order) + position + 1, bound))
            if ends[-1] <= ends[-2]:
                return None
        if not ends[-1] < self.count or self.seconds(order[-1], ends[-1], self.count) > bound:
            return None
        return (*ends[1:], self.count)

    def earliest(self, plan: Plan) -> Plan:
        """As fast as `make_plan`, with as little as can be in its first stages."""
        order, bound, cuts = plan.members, plan.slowest_seconds, [0]
        for position in range(1, len(order)):
            start, rest = cuts[-1], order[position:]
            fits = (
                e
                for e in range(start + 1, self.count)
                if self.seconds(order[position - 1], start, e) <= bound
            )
            cuts.append(next(e for e in fits if self.ends(rest, bound, e) is not None))
        return Plan(
            order, tuple(after - before for before, after in pairwise((*cuts, self.count))), bound
        )


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
    layers = Part(layer * each + 2 * 2 * keys * cached_tokens, 8.0 * layer * batch_tokens)
    return ModelCost(
        embedding=Part(vocabulary * each, 0.0),
        layers=(layers,) * config.num_hidden_layers,
        head=Part(vocabulary * each, 8.0 * vocabulary * batch_tokens),
    )


# The crew record: immutable, signed by every member; the layers of each and the step it continues
# from.
#
#     lineage      drawn when training leaves the base; every later crew of the same policy keeps it
#     step hash    H(step hash before, crew, step, attempt, micro-batches)
#     copy         a node has layers first … last − 1 of (lineage, step, step hash)
#
# Two continuations of one crew share the lineage and differ in the step hash.

NONCE_BYTES: Final = 8
LAYERS: Final = 1024
COPIES: Final = 4 * MEMBERS
"""In one offer, at most."""
RECORD_DOMAIN: Final = b"swarmnode/crew-record/2"
MEMBER_DOMAIN: Final = b"swarmnode/crew-member/1"
NO_CREW: Final = bytes(HASH_BYTES)

Where = Literal["memory", "disk", "neighbour"]
"""Where a copy is: in the trainer's memory, in this node's own journal, or kept here for a ring
neighbour."""


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The holder of a stage."""

    peer: str
    layers: int


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A crew. Two records are one crew if their hashes are equal."""

    lineage: bytes
    """32 bytes."""
    model: bytes
    """32 bytes: the base weights, and what members must have alike, codecs included
    (`trainer.crew.model.crew_terms`)."""
    previous: bytes
    """32 bytes: the step hash that it goes on from; NO_HASH where training begins."""
    step: int
    """Committed steps in that."""
    taken: Taken
    members: tuple[Member, ...]
    """The members by stage: their blocks of layers follow each other."""
    nonce: bytes
    """8 random bytes of the proposer: the same members may found another crew at the same step."""


class Copy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block of layers that the sender has."""

    lineage: bytes
    first: int
    last: int
    """Layers first … last − 1."""
    step: int
    hash: bytes
    """The step hash."""
    where: Where
    taken: Taken
    """How `hash` came about."""
    next: bytes
    """The hash after one more step, where the sender has prepared for it and would take it; empty
    otherwise."""

    @property
    def layers(self) -> tuple[int, int]:
        return self.first, self.last


class Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    peer: str
    signature: bytes


class Founded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="founded"):
    """A record with the signature of each of its members: a crew."""

    record: Record
    signatures: tuple[Signed, ...]
    """In the order of stages."""


Verify = Callable[[str, bytes, bytes], bool]
"""(peer, data, signature) → whether it is that peer's."""


def crew_id(record: Record) -> bytes:
    """32 bytes. Frames carry the first 16."""
    return hashlib.blake2b(RECORD_DOMAIN + strict.encode(record), digest_size=HASH_BYTES).digest()


def member_bytes(crew: bytes) -> bytes:
    """What a member signs."""
    return MEMBER_DOMAIN + crew


def peers_of(record: Record) -> tuple[str, ...]:
    """The members' peer ids by stage."""
    return tuple(member.peer for member in record.members)


def stage_of(record: Record, peer: str) -> int | None:
    """The stage that `peer` holds; None where it is no member."""
    return next((stage for stage, member in enumerate(record.members) if member.peer == peer), None)


def check_founded(founded: Founded, verify: Verify) -> None:
    """Whether each member has signed. Raises BadMessage("signature")."""
    if tuple(signed.peer for signed in founded.signatures) != peers_of(founded.record):
        raise BadMessage(
            "signature", "not the members' signatures, each once and in the order of stages"
        )
    data = member_bytes(crew_id(founded.record))
    for signed in founded.signatures:
        if not verify(signed.peer, data, signed.signature):
            raise BadMessage("signature", f"of {signed.peer}")


_RECORD_LENGTHS: Final = {
    "lineage": HASH_BYTES,
    "model": HASH_BYTES,
    "previous": HASH_BYTES,
    "hash": HASH_BYTES,
    "nonce": NONCE_BYTES,
}
_RECORD_RANGES: Final = {"step": ANY_COUNTER, "first": (0, LAYERS - 1), "last": (1, LAYERS)}
AMOUNT: Final = 1e30
"""The largest memory, speed or learning rate that anybody may claim."""


def check_record(record: Record) -> None:
    """Raises BadMessage("bounds"), BadMessage("not_finite")."""
    check_fields(record, _RECORD_LENGTHS, _RECORD_RANGES)
    check_taken(record.taken)
    if (record.step == 0) != (record.previous == NO_HASH):
        raise BadMessage("bounds", "training begins at step 0, and only there")
    check_between("members", len(record.members), 1, MEMBERS)
    for member in record.members:
        check_name("peer", member.peer, PEER_ID_BYTES)
        check_between("layers", member.layers, 1, LAYERS)
    if len(set(peers_of(record))) != len(record.members):
        raise BadMessage("bounds", "a peer twice")


def check_signed(signatures: tuple[Signed, ...]) -> None:
    """Raises BadMessage("bounds")."""
    check_between("signatures", len(signatures), 1, MEMBERS)
    for signed in signatures:
        check_name("peer", signed.peer, PEER_ID_BYTES)
        check_length("signature", signed.signature, SIGNATURE_BYTES)


def check_copies(copies: tuple[Copy, ...]) -> None:
    """Raises BadMessage("bounds"), BadMessage("not_finite")."""
    check_between("copies", len(copies), 0, COPIES)
    for copy in copies:
        check_fields(copy, _RECORD_LENGTHS, _RECORD_RANGES)
        check_taken(copy.taken)
        check_length("next", copy.next, HASH_BYTES if copy.next else 0)
        if copy.first >= copy.last or (copy.step == 0) != (copy.hash == NO_HASH):
            raise BadMessage("bounds", "a copy of nothing")


def check_taken(taken: Taken) -> None:
    """Raises BadMessage("bounds"), BadMessage("not_finite")."""
    check_counter("attempt", taken.attempt)
    check_between("clip", taken.clip, 0, 1)
    check_between("learning_rate", taken.learning_rate, 0, AMOUNT)


# Messages between trainer and network process:
#
#     trainer                                        network process
#     Offering      free memory and copies held   ─▶ offered to peers
#                   build and restore the stage   ◀─ Assigned      a crew with this node was founded
#     StageStatus   loading, probation, active, … ─▶ heartbeats
#                   drop work in progress, wait   ◀─ Suspended     a member is suspected
#                   start or continue             ◀─ Resumed       all stages are active
#     Blames        stages that spoil steps       ─▶ their holders are left out
#                   stop; weights stay in memory  ◀─ Released      the crew has ended
#
# Either side may restart at any moment. A trainer that connects sends Offering when it is in no
# crew, and StageStatus when it is.

StagePhase = Literal["loading", "probation", "active", "failed"]
RUNGS = ("", "R0", "R1", "R2", "R3", "R4", "R5", "R6")
"""Where a stage's weights came from; empty for a founding member, who has the base model's."""


def socket_file(data_dir: Path) -> Path:
    """The Unix socket that `service.StreamProxy` listens on."""
    return data_dir / "run" / "stages.sock"


# ---- trainer → network ---------------------------------------------------------------------------


class Offering(msgspec.Struct, frozen=True, tag="stages_offering"):
    """Sent by a trainer that works in no crew: at every connection, once it has stopped after
    Released, and whenever a number changes."""

    model: bytes
    """32 bytes: which weights, and what a crew that trains them must have alike
    (`trainer.crew.model.crew_terms`)."""
    capacity: Capacity
    cost: ModelCost
    """What the model's parts cost, so that whoever founds a crew can plan it."""
    copies: tuple[Copy, ...] = ()


class StageStatus(msgspec.Struct, frozen=True, tag="stages_status"):
    """At every change, and each second while there is a stage. None means not measured (yet)."""

    crew: bytes
    """32 bytes."""
    stage: int
    phase: StagePhase
    step: int = 0
    """Committed steps."""
    progress: int = 0
    """Counts anything that was done: frames handled, micro-batches, steps. One that stands still is
    a trainer that hangs."""
    rung: str = ""
    """One of RUNGS."""
    rung_seconds: float | None = None
    """From Assigned to the stage being loaded by that rung."""
    shadow_step: int | None = None
    """The step of the newest copy that a neighbour has of this stage."""
    shadow_age_steps: int | None = None
    """Steps that its loss would cost where only shadows are left: all of them while nobody has a
    copy. None in a crew of one."""
    copy_age_steps: int | None = None
    """Steps by which the whole copy that this node samples from is behind its crew; None where
    there is none."""
    copy_bytes: int | None = None
    """What came for its last refresh."""
    probe_kl: float | None = None
    """Nats per token, of the gate after the last recovery."""
    bubble_share: float | None = None
    """The share of the last step in which this stage waited."""
    tokens_per_second: float | None = None
    reason: str = ""
    """Why it failed, for people."""
    load: int = 0
    """Pieces of work in hand: nothing done while there are some is a trainer that hangs."""
    dropped: dict[str, int] = {}
    """Frames that counted for nothing, by FENCE_REASONS and FRAME_REASONS; of this trainer
    process."""
    state_refused: dict[str, int] = {}
    """What others sent on state streams that is not what it has to be, and what they asked for and
    did not get, by reason; in this crew."""


class Blames(msgspec.Struct, frozen=True, tag="stages_blames"):
    """The head's trainer: steps fail again and again, and always because of this stage, or of one
    of these that contradict each other."""

    crew: bytes
    stages: tuple[int, ...]
    reason: str
    seconds: float = 0.0
    """For how long it has been spoiling steps, among others that were taken."""
    beside: tuple[int, ...] = ()
    """Stages that contradict these: all of them are bad, if these are not."""


# ---- network → trainer ---------------------------------------------------------------------------


class Assigned(msgspec.Struct, frozen=True, tag="stages_assigned"):
    """A crew with this node in it: hold this stage. A later one replaces an earlier one, and its
    streams are others."""

    crew: bytes
    """32 bytes. Frames carry the first 16."""
    lineage: bytes
    """32 bytes."""
    stage: int
    layers: tuple[int, ...]
    """The layers of every stage: what `stage_specs` wants."""
    members: tuple[str, ...]
    """Peer id that holds each stage."""
    step: int
    """Committed steps that the crew goes on from; 0 is the base model."""
    hash: bytes
    """32 bytes: the step hash of these."""
    taken: Taken
    """How the last of them was taken: a stage in memory that has prepared for it takes it now."""
    socket: str
    """Path of the Unix socket for streams to the other stages."""
    step_seconds: float = 900.0
    """So long the crew may take no step until its other members give up its head."""


class Suspended(msgspec.Struct, frozen=True, tag="stages_suspended"):
    """Pause: begin nothing. Weights, optimizer and streams stay."""

    reason: str


class Resumed(msgspec.Struct, frozen=True, tag="stages_resumed"):
    crew: bytes


class Released(msgspec.Struct, frozen=True, tag="stages_released"):
    """The crew is over. What is in memory and on disk stays, for the next one."""

    reason: str


# ---- over the Unix socket of `service.StreamProxy` -----------------------------------------------

Kind = Literal["frames", "state"]
"""What a stream is for."""


class Open(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer → network, the first and only message of a connection: `u32be length ‖ msgpack`. What
    follows is the stream itself, both ways, to the trainer of `stage`; until that has opened its
    own end, what is written waits. The network process closes the connection when the stream is
    lost, when there is a newer crew, and when somebody opens the same again."""

    crew: bytes
    stage: int
    """The other one's."""
    kind: Kind


FromTrainer = Offering | StageStatus | Blames
ToTrainer = Assigned | Suspended | Resumed | Released


# Crew messages between network processes:
#
#     request      answer
#     Offer        Noted                  free memory and the copies held
#     Propose      Signature | Refuse     an invitation to a crew
#     Founded      Noted | Refuse         all have signed
#     Heartbeat    Alive | Refuse         every second
#     Leave        Noted
#
# One message is one frame of the request protocol, canonical msgpack with the tag `type` first, at
# most MESSAGE_BYTES. Every value is checked before use.

MESSAGE_BYTES: Final = 64 * 1024
REASON_BYTES: Final = 128
WITHOUT: Final = 16
"""Peers that one offer names, at most."""

MemberPhase = Literal["absent", "loading", "probation", "active", "failed"]
"""How a stage is at its holder. `absent`: the trainer is gone, its network process is there.
`active`: it could take the next step. `failed`: no source of its weights is left."""
Refusal = Literal["busy", "crew", "trust", "model", "behind", "record"]
"""`busy`: promised to another proposer. `crew`: in a crew that works, or not in that one. `trust`:
not with one of those. `model`: we train another. `behind`: what we have is newer, and may still be
founded from. `record`: it does not name us, or its proposer."""


class Status(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the sender's stage is doing in the crew that the message names."""

    phase: MemberPhase = "absent"
    step: int = 0
    """Steps taken."""
    progress: int = 0
    """Grows with each piece of work done."""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="offer"):
    """Said to everybody connected, at once when it changes, and again every few seconds while it
    holds."""

    model: bytes
    memory: float
    """Bytes that a stage may take; 0 takes the offer back: the sender is in a crew, or has no
    trainer."""
    speed: float
    """Work per second, see `Capacity`."""
    hop_seconds: float
    copies: tuple[Copy, ...] = ()
    without: tuple[str, ...] = ()
    """Peers with whom the sender would not be in a crew now."""


class Propose(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="propose"):
    record: Record


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="signature"):
    crew: bytes
    signature: bytes


class Refuse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refuse"):
    reason: Refusal
    crew: bytes = NO_CREW
    """The crew that it is about."""


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="heartbeat"):
    crew: bytes
    status: Status


class Alive(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="alive"):
    """Answer to a heartbeat, with the answerer's own status."""

    crew: bytes
    status: Status


class Leave(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="leave"):
    """The sender holds nothing of this crew from now on."""

    crew: bytes
    reason: str = ""
    because: str = ""
    """The member because of whom it leaves, where it is not its own matter."""


class Noted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="noted"):
    """It arrived, and there is nothing to say."""


Request = Offer | Propose | Founded | Heartbeat | Leave
CrewAnswer = Noted | Signature | Refuse | Alive
CrewMessage = Request | CrewAnswer
MessageT = TypeVar("MessageT")


def encode_message(message: CrewMessage) -> bytes:
    return strict.encode(message)


def decode_request(data: bytes) -> Request:
    """Raises BadMessage: oversize, malformed, schema, bounds or not_finite."""
    message: Request = strict.decode(data, Request, MESSAGE_BYTES)
    check_message(message)
    return message


def decode_answer(data: bytes) -> CrewAnswer:
    """Raises BadMessage as `decode_request` does."""
    message: CrewAnswer = strict.decode(data, CrewAnswer, MESSAGE_BYTES)
    check_message(message)
    return message


def check_signature(record: Record, peer: str, answer: Signature, verify: Verify) -> None:
    """Whether `peer`, asked to sign `record`, has. Raises BadMessage("signature")."""
    crew = crew_id(record)
    if answer.crew != crew or not verify(peer, member_bytes(crew), answer.signature):
        raise BadMessage("signature", "of a member")


_MESSAGE_LENGTHS: Final = {"crew": HASH_BYTES, "model": HASH_BYTES, "signature": SIGNATURE_BYTES}
_MESSAGE_RANGES: Final = {
    **dict.fromkeys(("step", "progress"), ANY_COUNTER),
    **dict.fromkeys(("memory", "speed", "hop_seconds"), (0.0, AMOUNT)),
}


def check_message(message: CrewMessage) -> None:
    """Raises BadMessage("bounds") or BadMessage("not_finite") where a value is not allowed; also
    for our own, before they are sent."""
    check_fields(message, _MESSAGE_LENGTHS, _MESSAGE_RANGES)
    match message:
        case Offer():
            check_copies(message.copies)
            check_between("without", len(message.without), 0, WITHOUT)
            for peer in message.without:
                check_name("peer", peer, PEER_ID_BYTES)
        case Propose():
            check_record(message.record)
        case Founded():
            check_record(message.record)
            check_signed(message.signatures)
        case Heartbeat() | Alive():
            check_fields(message.status, {}, _MESSAGE_RANGES)
        case Leave():
            check_between("reason", len(message.reason), 0, REASON_BYTES)
            if message.because:
                check_name("because", message.because, PEER_ID_BYTES)
            if not all(" " <= character <= "~" for character in message.reason):
                raise BadMessage("bounds", "reason")


# Events and actions of crew control. Each Received gets exactly one SendAnswer. Actions run in
# order. The service sends a Tick every `tick_seconds`; its lateness measures how slow this process
# is.

NOTES = (
    "proposed",
    "founded",
    "running",
    "paused",
    "suspected",
    "refuted",
    "broken",
    "refused",
    "blamed",
    "left",
)


class Settings(msgspec.Struct, frozen=True):
    """Seconds, unless it says otherwise."""

    stages: int = 0
    """The number of stages of a crew that begins with the base; 0 is what the planner finds
    best."""
    lost_seconds: float = 120.0
    """A node that has learnt something begins anew after so long without a crew."""
    tick_seconds: float = 0.5
    heartbeat_seconds: float = 1.0
    offer_seconds: float = 10.0
    """Between two offers to the same peer where nothing has changed; an offer counts for three
    times as long."""
    foreign_seconds: float = 300.0
    """No offer to a peer that does not speak of crews, for so long."""
    gather_seconds: float = 3.0
    """A crew that begins with the base is proposed when no new offer came for so long, or after
    three times that."""
    turn_seconds: float = 3.0
    """A proposal lives so long, and who is next in turn waits so long."""
    exact_seconds: float = 12.0
    """An older copy of a stage will do after so long: its holder's own is exact, and may be on its
    way back."""
    join_seconds: float = 6.0
    """A member that has not been heard in a new crew after so long has not joined."""
    gone_seconds: float = 5.0
    """A member without a connection is given up after so long."""
    evict_seconds: float = 13.0
    """Any other silent member."""
    prepare_seconds: float = 300.0
    """A stage that is being restored, and shows no sign of progress."""
    restore_bytes_per_second: float = 1e6
    """It may take prepare_seconds and its memory by this rate in all, whatever progress it
    reports."""
    step_seconds: float = 900.0
    """A crew that runs and takes no step for so long is left."""
    slow_steps: float = 10.0
    """Or for so many times what its training takes, by the plan: completions and evaluations are
    computed besides, token by token."""
    slow_lines: float = 2.0
    """And for so many times what the way of all tokens through all stages takes messages, whose
    time it has measured."""
    bar_seconds: float = 10.0
    """How long a peer is left out because of which a crew ended or was not founded, at least: as
    long as it cost, doubled each time. The time that it works with us is taken off."""
    most_peers: int = 64
    """Whose offers are remembered."""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""

    heard: Mapping[str, float] = {}
    """Member → when bytes of whatever kind last came from it."""


class Received(msgspec.Struct, frozen=True):
    """A request of an authenticated peer, decoded by `decode_request`."""

    peer: str
    message: Request


class Answered(msgspec.Struct, frozen=True):
    """What came back for a Send: None for a timeout, a refused dial, or an answer that was no
    message."""

    peer: str
    request: Request
    answer: CrewAnswer | None
    foreign: bool = False
    """It does not speak this protocol at all."""
    seconds: float | None = None
    """What a message takes to it, one way, by how long this answer took; None without one."""


class StreamLost(msgspec.Struct, frozen=True):
    """A stage stream to `peer` in this crew broke or was reset. Not for those that the end of the
    crew or a newer one ended."""

    peer: str
    crew: bytes


class PeerGone(msgspec.Struct, frozen=True):
    """The last connection to `peer` is down."""

    peer: str


class PeerBack(msgspec.Struct, frozen=True):
    """`peer` is connected; also said of everybody connected at the start."""

    peer: str


class TrainerLeft(msgspec.Struct, frozen=True):
    """The trainer's connection ended, or its process did."""


class Drain(msgspec.Struct, frozen=True):
    """This node wants to stop politely: hold nothing more, offer nothing more."""

    reason: str


Event = (
    Tick
    | Received
    | Answered
    | StreamLost
    | PeerGone
    | PeerBack
    | FromTrainer
    | TrainerLeft
    | Drain
)
"""What our trainer says is an event as it is."""


class SendAnswer(msgspec.Struct, frozen=True):
    """The answer to the Received just handled."""

    message: CrewAnswer


class Send(msgspec.Struct, frozen=True):
    """Ask `peer`; tell what came of it as Answered. Later ones need not wait for earlier ones."""

    peer: str
    message: Request


class Note(msgspec.Struct, frozen=True):
    """For logs and metrics: `what` is one of NOTES."""

    what: str
    detail: str = ""


Action = SendAnswer | Send | ToTrainer | Note
"""What our trainer is to be told is an action as it is, and says what becomes of stage streams:
from an Assigned on (its `socket` is empty, whoever owns the socket fills it in) they are welcome of
this crew and of no other, after a Released of none."""


# The first messages of a stage stream, each `u32be length ‖ canonical msgpack`. The rest of the
# stream belongs to the trainers.

OPEN_BYTES: Final = 512
"""Open, StreamOpen, StreamReady: encoded, at most."""
REFUSALS: Final = ("malformed", "timeout", "crew", "stage", "peer")
"""Why an incoming stream is reset."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


class StreamOpen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dialler → acceptor, the first message of a stream: u32be length ‖ canonical msgpack."""

    crew: bytes
    from_stage: int
    to_stage: int
    kind: Kind


class StreamReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Acceptor → dialler: the trainer is there. What follows, both ways, is theirs."""

    crew: bytes


@dataclasses.dataclass(frozen=True)
class StreamPeers:
    """A crew as far as streams are concerned, seen from one of its stages."""

    crew: bytes
    stage: int
    """Ours."""
    members: tuple[str, ...]
    """Peer id by stage."""


def refusal(peers: StreamPeers | None, peer: str, opened: StreamOpen) -> str:
    """Why a stream that `peer` opened is not taken, of REFUSALS; empty for one that is welcome."""
    if peers is None or opened.crew != peers.crew:
        return "crew"
    if opened.to_stage != peers.stage or not 0 <= opened.from_stage < peers.stage:
        return "stage"
    return "" if peers.members[opened.from_stage] == peer else "peer"


async def read_first(stream: PeerStream, kind: type[StructT]) -> StructT:
    """The first message on a stream; what follows it stays there. Raises BadMessage, PeerError."""
    data = b""
    while (end := _end(data)) is None or len(data) < end:
        more = await stream.receive()
        if not more:
            raise PeerError("the stream ended before its first message")
        data += more
    stream.unread(data[end:])
    message: StructT = strict.decode(data[4:end], kind)
    return message


async def read_open(unix: trio.SocketStream) -> Open | None:
    """None when the trainer said nothing. Raises BadMessage, and what the socket raises."""
    opened: Open | None = await headed.read_header(
        unix, lambda data: strict.decode(data, Open), OPEN_BYTES
    )
    return opened


def _end(data: bytes) -> int | None:
    """Where the message at the start of `data` ends; None where its length is not there yet. Raises
    BadMessage("oversize")."""
    if len(data) < 4:
        return None
    length = int.from_bytes(data[:4], "big")
    if not 0 < length <= OPEN_BYTES:
        raise BadMessage("oversize", f"a first message of {length} bytes")
    return 4 + length


# State messages between trainers:
#
#     u32be header length ‖ header (canonical msgpack, tagged by `type`) ‖ body of a Chunk
#
#     Ask ──▶ Holds                    the sources that exist for the asker's stage
#     Want ──▶ Have, Chunk … | Lack    a body of a stage, or a part of a snapshot
#     Run ──▶ Have, Chunk … | Lack     activations in, activations or log-probabilities out
#     Made ──▶                         a new snapshot exists; its keeper sends Want, then Kept
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
STATE_REFUSALS: Final = (*STATE_REASONS, "busy", "failed", "repeated")
"""Beside what is sent: too many requests at a time; our own disk's, device's or numbers' matter;
one thing too often."""
ROOT_BYTES: Final = 32
FACTOR: Final = 2.0
"""No stage says that it learns with more than so many times the crew's learning rate."""
Form = Literal["exact", "small"]
"""A snapshot is float32 with AdamW's moments and counts, or bfloat16 without."""
What = Literal["shadow", "layers", "tied", "ends", "probes", "edges", "copy", "ran"]
Given = Literal["shadow", "ends", "probes"]
"""What others keep of a stage."""
Wanted = Literal["shadow", "layers", "tied", "ends", "probes", "edges", "copy"]
LackReason = Literal["none", "loading", "refused", "busy", "failed"]


class StateMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    place: Place
    request: int
    """Numbered by whoever began; answers repeat it."""


class Ask(StateMessage, frozen=True, tag="ask"):
    pass


class Holds(StateMessage, frozen=True, tag="holds"):
    """All of the asker's stage; None where there is nothing."""

    loaded: bool
    """The answering stage has its weights, and they are good."""
    rung: int | None
    """It is being restored, and has a candidate of this kind (`transfer.SourceKind`), which is
    being judged; 6 while it has none."""
    exhausted: bool
    """And nothing else left to try."""
    shadow: int | None
    """Committed steps in it."""
    root: bytes
    """32 bytes, the snapshot's; empty without one. Two neighbours that name the same need not be
    judged."""
    hash: bytes
    """32 bytes: its step hash; empty without one."""
    ends: int | None
    probes: int | None


class Want(StateMessage, frozen=True, tag="want"):
    what: Wanted
    of: int
    """Whose, of what one stage keeps of another (Given); else the asked stage."""
    at: int
    until: int | None
    """Its bytes `at` … `until` − 1, of a shadow; None: to its end. 0 and None of anything else."""


class Run(StateMessage, frozen=True, tag="run"):
    """Body: a description (`work.MicroBatch`) ‖ activations."""

    codec: ActivationCodec | None
    """None for the first stage, which takes no activations."""
    rows: int
    about: int
    """Bytes of the description."""


class Have(StateMessage, frozen=True, tag="have"):
    """It has `size` bytes; those that were wanted follow in chunks."""

    what: What
    step: int
    """Committed steps in it."""
    size: int
    root: bytes
    """32 bytes, blake2b of all."""
    hash: bytes = b""
    """32 bytes: the step hash of a snapshot or a copy; empty of anything else."""
    form: Form = "exact"
    squared_norm: float = 0.0
    """The stage's last raw gradient's over its layers: CheckFree weights it by this."""
    factor: float = 1.0
    """Its learning rate is the crew's times this, as it says itself: nobody trains by it."""


class Chunk(StateMessage, frozen=True, tag="chunk"):
    at: int
    length: int


class Lack(StateMessage, frozen=True, tag="lack"):
    reason: LackReason


class Made(StateMessage, frozen=True, tag="made"):
    """There is a new one of the sender's. `request` is 0."""

    what: Given


class Kept(StateMessage, frozen=True, tag="kept"):
    """The receiver's shadow of this step is stored here. `request` is 0."""

    step: int


AnyStateMessage = Ask | Holds | Want | Run | Have | Chunk | Lack | Made | Kept


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A micro-batch that was learnt from, and what the policy said of it then."""

    micro_batch: int
    step: int
    """Committed steps when it was computed."""
    rows: int
    about: bytes
    """`work.MicroBatch`."""
    logprobs: bytes
    """f32 for each completion token, by the whole policy as it was then."""


class Edge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Activations of a committed micro-batch on their way from one stage to another."""

    micro_batch: int
    step: int
    source: int
    target: int
    rows: int
    about: bytes
    body: bytes
    """In the crew's codec."""


def root_of(body: bytes | bytearray | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=ROOT_BYTES).digest()


def state_bytes(layout: Layout, form: Form) -> int:
    """How long a snapshot is: weights, first and second moments and a count for each tensor; or
    weights in two bytes each."""
    return 12 * elements(layout) + 4 * len(layout) if form == "exact" else 2 * elements(layout)


def pack_state(message: AnyStateMessage, body: bytes | memoryview = b"") -> bytes:
    return headed.pack(message, body)


async def read_state(
    stream: headed.Reader, limits: FrameLimits
) -> tuple[AnyStateMessage, bytes] | None:
    """The next message and its body; None at the end. Raises BadMessage: oversize, malformed,
    schema, bounds, truncated."""
    message: AnyStateMessage | None = await headed.read_header(
        stream, lambda data: strict.decode(data, AnyStateMessage), HEADER_BYTES
    )
    if message is None:
        return None
    _check_state_message(message, limits)
    size = 0
    if isinstance(message, Chunk):
        size = message.length
    elif isinstance(message, Run):
        size = message.about + (
            activation_bytes(message.codec, message.rows, limits.hidden)
            if message.codec is not None
            else 0
        )
    return message, await headed.read_exactly(stream, size) or b""


_STATE_RANGES: Final = {
    **dict.fromkeys(
        ("request", "step", "size", "at", "until", "rung", "shadow", "ends", "probes"), ANY_COUNTER
    ),
    "length": (1, CHUNK_BYTES),
    "of": (0, STAGES - 1),
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
    if isinstance(message, Want) and (message.at, message.until) != (0, None):
        if message.what != "shadow":
            raise BadMessage("bounds", f"a part of {message.what}")
        if message.until is not None:
            check_between("until", message.until, message.at + 1, math.inf)
    if isinstance(message, Holds):
        check_length("root", message.root, 0 if message.shadow is None else ROOT_BYTES)
        check_length("hash", message.hash, 0 if message.shadow is None else HASH_BYTES)
    if isinstance(message, Have):
        check_length("root", message.root, ROOT_BYTES)
        check_length("hash", message.hash, HASH_BYTES if message.what in ("shadow", "copy") else 0)
        check_between("squared_norm", message.squared_norm, 0.0, math.inf)
        check_positive("factor", message.factor, FACTOR)
