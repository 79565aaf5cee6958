"""What the network processes of a crew tell each other: offers, records to sign, heartbeats. No
torch.

    request      answer
    Offer        Noted                  "this much of the model fits here, and these copies of it
    are here"
    Propose      Signature | Refuse     "be a member of this crew"
    Founded      Noted | Refuse         all have signed: it begins
    Heartbeat    Alive | Refuse         every second
    Leave        Noted

One message is one frame of the request protocol, canonical msgpack with the tag `type` first, at
most MESSAGE_BYTES, and every value is checked before anybody acts on it. Tensors never travel here.
"""

from __future__ import annotations

from typing import Final, Literal, TypeVar

import msgspec

from swarmnode.crew.record import (
    AMOUNT,
    HASH_BYTES,
    NO_CREW,
    Copy,
    Founded,
    Record,
    Verify,
    check_copies,
    check_record,
    check_signed,
    crew_id,
    member_bytes,
)
from swarmnode.errors import BadMessage
from swarmnode.wire import strict
from swarmnode.wire.fields import ANY_COUNTER, check_between, check_fields, check_name
from swarmnode.wire.limits import PEER_ID_BYTES, SIGNATURE_BYTES

MESSAGE_BYTES: Final = 64 * 1024
REASON_BYTES: Final = 128
WITHOUT: Final = 16
"""Peers that one offer names, at most."""

StagePhase = Literal["absent", "loading", "probation", "active", "failed"]
"""How a stage is at its holder. `absent`: the trainer is gone, its network process is there.
`active`: it could take the next step. `failed`: no source of its weights is left."""
Refusal = Literal["busy", "crew", "trust", "model", "behind", "record"]
"""`busy`: promised to another proposer. `crew`: in a crew that works, or not in that one. `trust`:
not with one of those. `model`: we train another. `behind`: what we have is newer, and may still be
founded from. `record`: it does not name us, or its proposer."""


class Status(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the sender's stage is doing in the crew that the message names."""

    phase: StagePhase = "absent"
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
    """Work per second, see `plan.Capacity`."""
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
Answer = Noted | Signature | Refuse | Alive
Message = Request | Answer
M = TypeVar("M")


def encode_message(message: Message) -> bytes:
    return strict.encode(message)


def decode_request(data: bytes) -> Request:
    """Raises BadMessage: oversize, malformed, schema, bounds or not_finite."""
    message: Request = strict.decode(data, Request, MESSAGE_BYTES)
    check_message(message)
    return message


def decode_answer(data: bytes) -> Answer:
    """Raises BadMessage as `decode_request` does."""
    message: Answer = strict.decode(data, Answer, MESSAGE_BYTES)
    check_message(message)
    return message


def check_signature(record: Record, peer: str, answer: Signature, verify: Verify) -> None:
    """Whether `peer`, asked to sign `record`, has. Raises BadMessage("signature")."""
    crew = crew_id(record)
    if answer.crew != crew or not verify(peer, member_bytes(crew), answer.signature):
        raise BadMessage("signature", "of a member")


_LENGTHS: Final = {"crew": HASH_BYTES, "model": HASH_BYTES, "signature": SIGNATURE_BYTES}
_RANGES: Final = {
    **dict.fromkeys(("step", "progress"), ANY_COUNTER),
    **dict.fromkeys(("memory", "speed", "hop_seconds"), (0.0, AMOUNT)),
}


def check_message(message: Message) -> None:
    """Raises BadMessage("bounds") or BadMessage("not_finite") where a value is not allowed; also
    for our own, before they are sent."""
    check_fields(message, _LENGTHS, _RANGES)
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
            check_fields(message.status, {}, _RANGES)
        case Leave():
            check_between("reason", len(message.reason), 0, REASON_BYTES)
            if message.because:
                check_name("because", message.because, PEER_ID_BYTES)
            if not all(" " <= character <= "~" for character in message.reason):
                raise BadMessage("bounds", "reason")
