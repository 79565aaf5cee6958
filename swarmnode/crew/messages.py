"""What the network processes of a crew tell each other: offers, rosters and the votes for them, heartbeats. No torch.

    request      answer
    Offer        Noted | Adopt        "my trainer is ready": a spare, or a member that claims its own stage again
    Prepare      Promise | Refuse | Adopt
    Propose      Vote | Refuse | Adopt
    Adopt        Noted | Leave
    Heartbeat    Alive | Adopt | Refuse | Leave
    Leave        Noted

One message is one frame of the request protocol, canonical msgpack with the tag `type` first, at most MESSAGE_BYTES, and every value is
checked before anybody acts on it. Tensors never travel here.

**Records.** Who holds which stage is a chain of records. The first, the founding record, is signed by everybody that it names; its hash
is the crew's id. Each further one is signed by a majority of the voters of the one before, those who are gone counted. How they come to
agree on exactly one record per epoch, whoever fails meanwhile, is in `roster.py`.

**Incarnations.** A process that forgot what it voted for may not vote again as the same voter. So a voter is a peer together with 8
random bytes that are drawn when its memory begins; a peer that starts without memory is not a voter until a record seats it anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

from swarmnode.crew.plan import MEMBERS
from swarmnode.errors import BadMessage
from swarmnode.pipeline.frames import STAGES
from swarmnode.wire import strict
from swarmnode.wire.fields import ANY_COUNTER, check_between, check_counter, check_fields, check_finite, check_length, check_name
from swarmnode.wire.limits import PEER_ID_BYTES, SIGNATURE_BYTES

MESSAGE_BYTES: Final = 64 * 1024
HASH_BYTES: Final = 32
CREW_BYTES: Final = 32
"""Frames carry the first 16; see `frames.Place`."""
INCARNATION_BYTES: Final = 8
NONCE_BYTES: Final = 8
WITNESSES: Final = 1
VOTERS: Final = MEMBERS + WITNESSES
CHAIN: Final = 8
"""Certificates in one Adopt, at most; who has missed more starts as a stranger."""
REASON_BYTES: Final = 128
LAYERS: Final = 1024
RECORD_DOMAIN: Final = b"swarmnode/crew-record/1"
VOTE_DOMAIN: Final = b"swarmnode/crew-vote/1"
NO_CREW: Final = bytes(CREW_BYTES)
NO_HASH: Final = bytes(HASH_BYTES)

Phase = Literal["absent", "claiming", "stopping", "ready", "loading", "probation", "active", "failed"]
"""Of a stage at its holder. `absent`: the trainer is gone, its network process is there. `claiming`: a trainer is back, without the stage
in memory: the next record gives it a new stage epoch. `stopping`: it has the stage in memory and still does something of the roster before;
`ready`: it has stopped, and its step is final. `active`: it could take the next step. `failed`: no rung of the ladder is left."""
REFUSALS: Final = ("ballot", "epoch", "alive", "unknown", "busy", "record")
"""`ballot`: promised to a higher one. `epoch`: not the next one here. `alive`: somebody to be evicted is well. `unknown`: not my crew.
`busy`: promised to another crew. `record`: not a lawful successor."""
Refusal = Literal["ballot", "epoch", "alive", "unknown", "busy", "record"]


class Voter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    peer: str
    incarnation: bytes


class Seat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who holds a stage; the peer is empty where it is vacant."""

    peer: str
    incarnation: bytes
    """8 bytes; empty where vacant."""
    stage_epoch: int
    """How many holders the stage has had: +1 with each trainer that begins without the stage in memory."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A roster. Two records are one if their hashes are."""

    crew: bytes
    """32 bytes, all zero in a founding record; see `crew_id`."""
    epoch: int
    """1 for the founding record."""
    previous: bytes
    """Hash of the record before; all zero in a founding record."""
    model: bytes
    """32 bytes: which weights, and what a crew that trains them must have alike."""
    layers: tuple[int, ...]
    """Per stage; never changes within a crew."""
    seats: tuple[Seat, ...]
    """Per stage."""
    witnesses: tuple[Voter, ...]
    """Vote and hold nothing."""
    voters: tuple[Voter, ...]
    """Of the record before, who sign this one; of itself in a founding record."""
    step: int
    """Committed steps that the proposer knew of: the crew goes on there or later."""
    lease_seconds: int
    nonce: bytes
    """8 random bytes of whoever founded the crew: the same members may found another one."""
    dissolved: str = ""
    """Why the crew ends with this record; empty where it goes on."""


class Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    peer: str
    incarnation: bytes
    signature: bytes


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record with the votes that make it one. All votes are of one ballot."""

    record: Record
    ballot: int
    votes: tuple[Signed, ...]


class Status(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the sender's stage is doing under the roster that the message names."""

    phase: Phase = "absent"
    step: int = 0
    """Steps taken."""
    prepared: bool = False
    """It has acknowledged the next step and would take it."""
    attempt: int = 0
    """Of the step it is prepared for, or else of the last one taken."""
    clip: float = 1.0
    """Of the last step taken: what another stage needs to take it too."""
    learning_rate: float = 0.0
    progress: int = 0
    """Grows with each piece of work done."""
    load: int = 0
    """Pieces of work in hand."""
    journal: bool = False
    """What is being restored here is the sender's own copy of exactly `step` steps (rung R0)."""
    broken: bool = False
    """A stream of this roster broke here: only a new roster helps."""
    version: int = 0
    """Grows with every change at the sender, across its restarts too: messages overtake each other."""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="offer"):
    """Said to everybody connected, at once when it changes, and again every few seconds while it holds."""

    model: bytes
    incarnation: bytes
    memory: float
    """Bytes; 0 where the sender would only be a witness."""
    speed: float
    """0 takes the sender's offers back: it is in a crew by now, or has no trainer."""
    hop_seconds: float
    crew: bytes = NO_CREW
    """Whose stage the trainer has on disk or in memory, if any."""
    stage: int = 0
    step: int = 0


class Prepare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prepare"):
    """Promise to vote in no lower ballot for the record after `previous`, and say what you voted for."""

    crew: bytes
    epoch: int
    previous: bytes
    ballot: int
    evicting: tuple[str, ...] = ()
    """Peers that would lose their seats because they are not heard."""


class Promise(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="promise"):
    crew: bytes
    epoch: int
    ballot: int
    accepted_ballot: int = 0
    accepted: Record | None = None
    """What the sender has voted for in `accepted_ballot`, its highest."""


class Propose(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="propose"):
    """Sign this record. A founding record has ballot 0 and no Prepare before it."""

    record: Record
    ballot: int


class Vote(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="vote"):
    crew: bytes
    epoch: int
    ballot: int
    hash: bytes
    incarnation: bytes
    signature: bytes


class Refuse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refuse"):
    reason: Refusal
    ballot: int = 0
    """Promised to this one."""
    incarnation: bytes = bytes(INCARNATION_BYTES)
    """Of the sender, with `unknown`: whether it is another process, or has not heard yet."""


class Adopt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="adopt"):
    """The newest record, and as many before it as the receiver may lack; epochs rise by one."""

    certificates: tuple[Certificate, ...]


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="heartbeat"):
    """Every second, and at once when something changes."""

    crew: bytes
    roster_epoch: int
    sequence: int
    status: Status


class Alive(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="alive"):
    """Answer to the heartbeat `sequence`, with the answerer's own status. The same epoch, or the one is told of the newer record."""

    crew: bytes
    roster_epoch: int
    sequence: int
    status: Status


class Leave(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="leave"):
    """I hold nothing of this crew from now on: give my seat away without waiting."""

    crew: bytes
    roster_epoch: int
    reason: str = ""


class Noted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="noted"):
    """Heard, and nothing to say."""


Request = Offer | Prepare | Propose | Adopt | Heartbeat | Leave
Answer = Promise | Vote | Refuse | Adopt | Alive | Leave | Noted
Message = Offer | Prepare | Promise | Propose | Vote | Refuse | Adopt | Heartbeat | Alive | Leave | Noted


def encode_message(message: Message) -> bytes:
    return strict.encode(message)


def decode_request(data: bytes) -> Request:
    """Raises BadMessage: oversize, malformed, schema, bounds or not_finite."""
    return _decode(data, Request)


def decode_answer(data: bytes) -> Answer:
    """Raises BadMessage as `decode_request` does."""
    return _decode(data, Answer)


def record_hash(record: Record) -> bytes:
    """32 bytes: blake2b of the domain and the record's canonical encoding."""
    return hashlib.blake2b(RECORD_DOMAIN + strict.encode(record), digest_size=HASH_BYTES).digest()


def crew_id(record: Record) -> bytes:
    """32 bytes, from any record of the crew: the hash of its founding record."""
    return record_hash(record) if record.epoch == 1 else record.crew


def voters_of(record: Record) -> tuple[Voter, ...]:
    """Who votes on the record after this one, in the order of stages; witnesses last. No peer twice."""
    return (*(Voter(seat.peer, seat.incarnation) for seat in record.seats if seat.peer), *record.witnesses)


def vote_bytes(crew: bytes, epoch: int, ballot: int, digest: bytes, incarnation: bytes) -> bytes:
    """What a voter signs. `crew` is the record's `crew_id`."""
    return VOTE_DOMAIN + crew + epoch.to_bytes(8, "big") + ballot.to_bytes(8, "big") + digest + incarnation


def majority(voters: int) -> int:
    return voters // 2 + 1


def needed_votes(record: Record) -> int:
    return len(record.voters) if record.epoch == 1 else majority(len(record.voters))


def check_certificate(certificate: Certificate, verify: Callable[[str, bytes, bytes], bool]) -> None:
    """Whether enough of the voters that the record names have signed it in this ballot. Raises BadMessage("signature").

    `verify(peer, data, signature)`. Whether they are the voters of the record before is `check_successor`'s question.
    """
    record, digest = certificate.record, record_hash(certificate.record)
    crew, left = crew_id(record), set(record.voters)
    for vote in certificate.votes:
        voter = Voter(vote.peer, vote.incarnation)
        if voter not in left:
            raise BadMessage("signature", "signed by somebody who has no vote, or twice")
        left.discard(voter)
        if not verify(vote.peer, vote_bytes(crew, record.epoch, certificate.ballot, digest, vote.incarnation), vote.signature):
            raise BadMessage("signature", "of a vote")
    if len(certificate.votes) < needed_votes(record):
        raise BadMessage("signature", f"{len(certificate.votes)} votes, {needed_votes(record)} are needed")


def check_successor(previous: Record, record: Record) -> None:
    """Whether `record` may follow `previous`, votes aside. Raises BadMessage("bounds")."""
    if record.crew != crew_id(previous) or record.epoch != previous.epoch + 1 or record.previous != record_hash(previous):
        raise BadMessage("bounds", "does not follow the record before")
    if record.voters != voters_of(previous):
        raise BadMessage("bounds", "its voters are not those of the record before")
    if any(getattr(record, name) != getattr(previous, name) for name in ("model", "layers", "lease_seconds", "nonce")):
        raise BadMessage("bounds", "a crew's model, layers, lease and nonce never change")
    if previous.dissolved or record.step < previous.step:
        raise BadMessage("bounds", "after the end, or back in time")
    for before, after in zip(previous.seats, record.seats, strict=True):
        same = (before.peer, before.incarnation) == (after.peer, after.incarnation)
        lawful = (0, 1) if same and after.peer else (0,) if not after.peer else (1,)
        if after.stage_epoch - before.stage_epoch not in lawful:
            raise BadMessage("bounds", "a stage's epoch grows by one with a new holder")


def check_chain(certificates: tuple[Certificate, ...], verify: Callable[[str, bytes, bytes], bool]) -> None:
    """Whether each of them is signed, and follows the one before it. Raises BadMessage: signature, bounds.

    Nothing else has a part in it, so what fails is wrong wherever it comes; and whoever passes a chain on has checked it.
    """
    for number, certificate in enumerate(certificates):
        check_certificate(certificate, verify)
        if number:
            check_successor(certificates[number - 1].record, certificate.record)


def check_vote(record: Record, peer: str, vote: Vote, verify: Callable[[str, bytes, bytes], bool]) -> None:
    """Whether `peer`, asked for its vote on `record`, has signed what it says. Raises BadMessage("signature")."""
    if not verify(peer, vote_bytes(crew_id(record), vote.epoch, vote.ballot, vote.hash, vote.incarnation), vote.signature):
        raise BadMessage("signature", "of a vote")


# ---- bounds --------------------------------------------------------------------------------------------------------------------


_LENGTHS: Final = {
    "crew": CREW_BYTES, "incarnation": INCARNATION_BYTES, "model": HASH_BYTES, "previous": HASH_BYTES, "hash": HASH_BYTES,
    "signature": SIGNATURE_BYTES, "nonce": NONCE_BYTES,
}  # fmt: skip
_COUNTERS: Final = dict.fromkeys(
    ("accepted_ballot", "attempt", "ballot", "epoch", "lease_seconds", "load", "progress", "roster_epoch", "sequence", "stage",
     "stage_epoch", "step", "version"),
    ANY_COUNTER,
)  # fmt: skip
AMOUNT: Final = 1e30
"""The largest memory, speed or learning rate that anybody may claim."""


def _decode(data: bytes, kind: Any) -> Any:
    message = strict.decode(data, kind, MESSAGE_BYTES)
    check_message(message)
    return message


def check_message(message: Message) -> None:
    """Raises BadMessage("bounds") or BadMessage("not_finite") where a value is not allowed; also for our own, before they are sent."""
    check_fields(message, _LENGTHS, _COUNTERS)
    match message:
        case Offer():
            _amounts(message, "memory", "speed", "hop_seconds")
        case Prepare():
            check_between("evicting", len(message.evicting), 0, MEMBERS)
            for peer in message.evicting:
                check_name("peer", peer, PEER_ID_BYTES)
        case Promise():
            if message.accepted is not None:
                check_record(message.accepted)
        case Propose():
            check_record(message.record)
        case Adopt():
            _check_chain(message.certificates)
        case Heartbeat() | Alive():
            check_fields(message.status, {}, _COUNTERS)
            _amounts(message.status, "clip", "learning_rate")
            check_between("clip", message.status.clip, 0, 1)
        case Leave():
            _reason(message.reason)


def check_record(record: Record) -> None:
    """Raises BadMessage("bounds"). What one record says of itself; `check_successor` compares two."""
    check_fields(record, _LENGTHS, _COUNTERS)
    if record.epoch < 1 or (record.epoch == 1) != (record.previous == NO_HASH) or (record.epoch == 1) != (record.crew == NO_CREW):
        raise BadMessage("bounds", "a founding record, and only it, has epoch 1 and nothing before it")
    if not 1 <= len(record.seats) <= min(MEMBERS, STAGES) or len(record.layers) != len(record.seats):
        raise BadMessage("bounds", "seats")
    if not all(1 <= layers <= LAYERS for layers in record.layers):
        raise BadMessage("bounds", "layers")
    for seat in record.seats:
        check_counter("stage_epoch", seat.stage_epoch)
        check_length("incarnation", seat.incarnation, INCARNATION_BYTES if seat.peer else 0)
    check_between("witnesses", len(record.witnesses), 0, WITNESSES)
    check_between("voters", len(record.voters), 0, VOTERS)
    for voters in (voters_of(record), record.voters):
        for voter in voters:
            _check_voter(voter)
        if len({voter.peer for voter in voters}) != len(voters):
            raise BadMessage("bounds", "a peer twice")
    if record.epoch == 1 and record.voters != voters_of(record):
        raise BadMessage("bounds", "a founding record is signed by those it names")
    _reason(record.dissolved)


def _check_chain(certificates: tuple[Certificate, ...]) -> None:
    check_between("certificates", len(certificates), 1, CHAIN)
    first = certificates[0].record.epoch
    for number, certificate in enumerate(certificates):
        check_record(certificate.record)
        check_counter("ballot", certificate.ballot)
        if certificate.record.epoch != first + number:
            raise BadMessage("bounds", "a gap in the chain")
        check_between("votes", len(certificate.votes), 0, VOTERS)
        for vote in certificate.votes:
            _check_voter(vote)


def _check_voter(voter: Voter | Signed) -> None:
    check_name("peer", voter.peer, PEER_ID_BYTES)
    check_fields(voter, _LENGTHS, {})


def _reason(reason: str) -> None:
    if len(reason) > REASON_BYTES or not all(" " <= character <= "~" for character in reason):
        raise BadMessage("bounds", "reason")


def _amounts(message: Offer | Status, *names: str) -> None:
    for name in names:
        check_finite(name, getattr(message, name))
    for name in names:
        check_between(name, getattr(message, name), 0, AMOUNT)
