"""What members send each other on their state streams, and how long it may be. No torch.

    u32be header length ‖ header (canonical msgpack, tagged by `type`) ‖ body of a Chunk

    Ask ──▶ Holds                    what is there for the asker's stage
    Want ──▶ Have, Chunk … | Lack    something of a stage, or a part of a snapshot
    Run ──▶ Have, Chunk … | Lack     activations in, activations or log-probabilities out
    Made ──▶                         there is a new one of ours: who keeps it wants it, and says
    Kept

Nothing large comes unasked. How long it must be follows from the model, for the few things where it
cannot it is capped; a `size` that differs is refused before memory is taken. No chunk is longer
than 1 MiB, and what arrives is looked at only once its hash is the promised one.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final, Literal

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.pipeline.commit import HASH_BYTES
from swarmnode.pipeline.frames import (
    ABOUT_ITEM_BYTES,
    CHUNK_BYTES,
    HEADER_BYTES,
    STAGES,
    ActivationCodec,
    FrameLimits,
    Place,
    activation_bytes,
    check_place,
)
from swarmnode.weights.layout import Layout, elements
from swarmnode.wire import headed, strict
from swarmnode.wire.fields import (
    ANY_COUNTER,
    check_between,
    check_fields,
    check_length,
    check_positive,
)

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
    """It is being restored, and has a candidate of this kind (`sources.SourceKind`), which is being
    judged; 6 while it has none."""
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


Message = Ask | Holds | Want | Run | Have | Chunk | Lack | Made | Kept


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


def pack(message: Message, body: bytes | memoryview = b"") -> bytes:
    return headed.pack(message, body)


async def read(stream: headed.Reader, limits: FrameLimits) -> tuple[Message, bytes] | None:
    """The next message and its body; None at the end. Raises BadMessage: oversize, malformed,
    schema, bounds, truncated."""
    message: Message | None = await headed.read_header(
        stream, lambda data: strict.decode(data, Message), HEADER_BYTES
    )
    if message is None:
        return None
    _check(message, limits)
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


_RANGES: Final = {
    **dict.fromkeys(
        ("request", "step", "size", "at", "until", "rung", "shadow", "ends", "probes"), ANY_COUNTER
    ),
    "length": (1, CHUNK_BYTES),
    "of": (0, STAGES - 1),
}


def _check(message: Message, limits: FrameLimits) -> None:
    check_place(message.place)
    check_fields(
        message,
        {},
        {
            **_RANGES,
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
