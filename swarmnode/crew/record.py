"""What a crew is: an immutable, signed record of who holds which layers, and of the step that it
goes on from. Pure; no torch.

    lineage      drawn when training leaves the base; every later crew of the same policy keeps it
    step hash    H(step hash before, crew, step, attempt, micro-batches): what the weights are, by
    how they came about (`pipeline.commit`)
    copy         somebody has layers first … last − 1 of (lineage, step, step hash): in memory, or
    on disk

Every change of a crew is a new record, signed by everybody that it names; there is no vote, and
nobody else has a say. Two continuations of one crew are two policies: they share the lineage and
differ in the step hash. Equal hashes fit together, others never do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from swarmnode.crew.plan import MEMBERS
from swarmnode.errors import BadMessage
from swarmnode.pipeline.commit import HASH_BYTES, NO_HASH, Taken
from swarmnode.wire import strict
from swarmnode.wire.fields import (
    ANY_COUNTER,
    check_between,
    check_counter,
    check_fields,
    check_length,
    check_name,
)
from swarmnode.wire.limits import PEER_ID_BYTES, SIGNATURE_BYTES

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


_LENGTHS: Final = {
    "lineage": HASH_BYTES,
    "model": HASH_BYTES,
    "previous": HASH_BYTES,
    "hash": HASH_BYTES,
    "nonce": NONCE_BYTES,
}
_RANGES: Final = {"step": ANY_COUNTER, "first": (0, LAYERS - 1), "last": (1, LAYERS)}
AMOUNT: Final = 1e30
"""The largest memory, speed or learning rate that anybody may claim."""


def check_record(record: Record) -> None:
    """Raises BadMessage("bounds"), BadMessage("not_finite")."""
    check_fields(record, _LENGTHS, _RANGES)
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
        check_fields(copy, _LENGTHS, _RANGES)
        check_taken(copy.taken)
        check_length("next", copy.next, HASH_BYTES if copy.next else 0)
        if copy.first >= copy.last or (copy.step == 0) != (copy.hash == NO_HASH):
            raise BadMessage("bounds", "a copy of nothing")


def check_taken(taken: Taken) -> None:
    """Raises BadMessage("bounds"), BadMessage("not_finite")."""
    check_counter("attempt", taken.attempt)
    check_between("clip", taken.clip, 0, 1)
    check_between("learning_rate", taken.learning_rate, 0, AMOUNT)
