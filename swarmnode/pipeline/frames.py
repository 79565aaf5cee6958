"""What the members of a crew send each other, and how it looks on a stream. No torch.

    u32be header length ‖ header (canonical msgpack, tagged by `type`) ‖ body

The length of the body follows from the header, and is computed from it and checked before a byte of
it is read: no number that a peer sends is ever a size to allocate. Every header says where in a
crew's life it belongs; `fence.py` drops what is over.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final, Literal

import msgspec

from swarmnode.wire import headed, strict
from swarmnode.wire import limits as caps
from swarmnode.wire.fields import (
    ANY_COUNTER,
    check_between,
    check_counter,
    check_fields,
    check_length,
    check_rising,
)

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
"""Every reason with which frames, their bodies and `work.py` raise BadMessage."""
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


class Propose(Header, frozen=True, tag="propose"):
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
Control = Embedding | Propose | Acknowledge | Commit | Abort | Done | Locate | Located
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
    _check(frame, limits)
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
        case Propose():
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


_LENGTHS: Final = {
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


def _check(frame: Frame, limits: FrameLimits) -> None:
    check_place(frame.place)
    about = ABOUT_ITEM_BYTES * (limits.tokens + 16)
    ranges = {
        "rows": (1, limits.tokens),
        "about": (1, about),
        "source": (0, STAGES - 1),
        **_COUNTERS,
    }
    check_fields(frame, _LENGTHS, {**ranges, **_AMOUNTS})
    if isinstance(frame, Embedding):
        check_between("first", frame.first, 0, limits.vocab - frame.rows)
    if isinstance(frame, Propose):
        check_rising("micro_batches", frame.micro_batches, 1, MICRO_BATCHES)
        check_counter("micro_batches", frame.micro_batches[0])
        check_counter("micro_batches", frame.micro_batches[-1])
