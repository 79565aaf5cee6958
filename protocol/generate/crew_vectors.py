"""Vectors of membership, records and held blocks, for `vectors.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.generate.frames import (
    Vector,
    derived,
    encoded,
    pack,
    pairs,
    plain,
    refusals,
    rejected,
)
from swarmnode.wire.envelope import peer_id

KEYS = [
    Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"member {n}".encode()).digest())
    for n in range(6)
]
PEERS = [peer_id(key.public_key().public_bytes_raw()) for key in KEYS]
MODEL, LINEAGE = b"\x11" * 32, b"\x22" * 32
RECORD_DOMAIN = b"swarmnode/crew-record/1"


def record(members: int = 4, **fields: Any) -> dict[str, Any]:
    return {
        "lineage": LINEAGE,
        "model": MODEL,
        "step": 41,
        "members": [[peer, 4] for peer in PEERS[:members]],
        "nonce": b"\x08" * 8,
        **fields,
    }


def digest(of: dict[str, Any]) -> bytes:
    return hashlib.blake2b(RECORD_DOMAIN + pack(of), digest_size=32).digest()


CREW = digest(record())
STATUS = ["active", 41, 900, 2]
BLOCK = [LINEAGE, [4, 4, 4, 4], 1, 40, "memory"]
OFFER = {
    "type": "offer",
    "model": MODEL,
    "memory": 8e9,
    "speed": 1e12,
    "held_blocks": [BLOCK, [*BLOCK[:4], "disk"]],
}
PROPOSE = {"type": "propose", "record": record()}
HEARTBEAT = {"type": "heartbeat", "crew": CREW, "status": STATUS}
LEAVE = {"type": "leave", "crew": CREW, "reason": "drained"}
ACCEPT = {"type": "accept", "crew": CREW}
REFUSE = {"type": "refuse", "reason": "busy", "crew": CREW}


def messages() -> Iterator[Vector]:
    requests = [
        OFFER,
        {**OFFER, "held_blocks": []},
        PROPOSE,
        {**PROPOSE, "record": record(step=0)},
        HEARTBEAT,
        LEAVE,
    ]
    answers = [ACCEPT, REFUSE, {**HEARTBEAT, "type": "alive"}, {"type": "noted"}]
    for kind, all_of in (("crews_request", requests), ("crews_answer", answers)):
        for number, message in enumerate(all_of):
            yield encoded(f"{kind} {message['type']} {number}", kind, message)
    for reason in ("crew", "model", "room", "newer", "trust", "struck", "record"):
        yield encoded(f"refuse {reason}", "crews_answer", {**REFUSE, "reason": reason})
    others: dict[str, dict[str, Any]] = {
        f"a block in {where}": {**OFFER, "held_blocks": [[*BLOCK[:4], where]]}
        for where in ("memory", "disk", "neighbour")
    }
    for phase in ("loading", "failed"):
        others[f"a stage that is {phase}"] = {**HEARTBEAT, "status": [phase, *STATUS[1:]]}
    others["a withdrawn offer"] = {**OFFER, "memory": 0.0, "speed": 0.0, "held_blocks": []}
    most = {**OFFER, "memory": 1e30, "held_blocks": [BLOCK] * 32}
    others["the largest amount and the most held blocks"] = most
    others["eight members"] = _proposal([[f"peer{n}", 1] for n in range(8)])
    for name, message in others.items():
        yield encoded(name, "crews_request", message)
    yield from refusals(
        "crews_request",
        ("schema", "an answer as a request", ACCEPT),
        ("schema", "an unknown type", {**LEAVE, "type": "expel"}),
        ("schema", "an unknown phase", {**HEARTBEAT, "status": ["asleep", *STATUS[1:]]}),
        ("schema", "a status of five", {**HEARTBEAT, "status": [*STATUS, 0]}),
        ("schema", "a member of one", _proposal([[PEERS[0]]])),
        ("schema", "a block in the cloud", {**OFFER, "held_blocks": [[*BLOCK[:4], "cloud"]]}),
        ("schema", "a block of four values", {**OFFER, "held_blocks": [BLOCK[:4]]}),
        ("malformed", "a crew named twice", pairs([*LEAVE.items(), ("crew", CREW)])),
        ("oversize", "16,385 bytes of request", bytes(16_385)),
        ("bounds", "more speed than there is", {**OFFER, "speed": 1.1e30}),
        ("bounds", "less than no memory", {**OFFER, "memory": -1.0}),
        ("bounds", "a reason of 129 characters", {**LEAVE, "reason": "a" * 129}),
        ("bounds", "a reason that moves the cursor", {**LEAVE, "reason": "\x1b[2J"}),
    )
    yield from refusals(
        "crews_answer",
        ("schema", "a request as an answer", OFFER),
        ("schema", "an unknown refusal", {**REFUSE, "reason": "tired"}),
        ("oversize", "16,385 bytes of answer", bytes(16_385)),
    )
    for name, blocks in (
        ("33 held blocks", [BLOCK] * 33),
        ("a block of no stages", _block(1, [])),
        ("a block of nine stages", _block(1, [1] * 9)),
        ("a block of no layers", _block(1, [4, 0])),
        ("a block of 1025 layers", _block(1, [4, 1025])),
        ("a block of a stage beyond the last", _block(2, 4)),
    ):
        yield rejected("bounds", name, {**OFFER, "held_blocks": blocks}, "crews_request")
    for name, members in (
        ("no members", []),
        ("nine members", [[f"peer{n}", 1] for n in range(9)]),
        ("a member without a name", [["", 1]]),
        ("a name with a space", [["12D3 KooW", 1]]),
        ("a member of 65 characters", [["p" * 65, 1]]),
        ("a stage of no layers", [[PEERS[0], 0]]),
        ("a stage of 1025 layers", [[PEERS[0], 1025]]),
        ("one peer on two stages", [[PEERS[0], 4], [PEERS[0], 4]]),
    ):
        yield rejected("bounds", name, _proposal(members), "crews_request")


def _proposal(members: list[list[Any]]) -> dict[str, Any]:
    return {**PROPOSE, "record": record(members=0) | {"members": members}}


def _block(at: int, value: Any) -> list[list[Any]]:
    return [[*BLOCK[:at], value, *BLOCK[at + 1 :]]]


def streams() -> Iterator[Vector]:
    crew = {"crew": CREW.hex(), "stage": 2, "members": PEERS[:4]}
    given = {"crew": crew, "peer": PEERS[1]}
    opened = {"crew": CREW, "from_stage": 1, "to_stage": 2, "kind": "frames"}
    for kind in ("frames", "state"):
        message = {**opened, "kind": kind}
        yield {**encoded(f"a stream of {kind}", "stage_stream_open", message), "given": given}

    for reason, name, peer, fields in (
        ("crew", "a stream of another crew", PEERS[1], {"crew": b"\x99" * 32}),
        ("crew", "a stream of half a crew", PEERS[1], {"crew": CREW[:16]}),
        ("stage", "a stream to another stage", PEERS[1], {"to_stage": 3}),
        ("stage", "a stream from a higher stage", PEERS[1], {"from_stage": 3}),
        ("stage", "a stream from itself", PEERS[1], {"from_stage": 2}),
        ("stage", "a stream from stage -1", PEERS[1], {"from_stage": -1}),
        ("peer", "a stream of another peer", PEERS[5], {}),
        ("peer", "a stream in another's place", PEERS[1], {"from_stage": 0}),
        ("schema", "a stream of gradients", PEERS[1], {"kind": "gradients"}),
        ("schema", "a stream with a password", PEERS[1], {"password": "x"}),
    ):
        frame = pack({**opened, **fields})
        bad = rejected(reason, name, frame, "stage_stream_open")
        yield {**bad, "given": {**given, "peer": peer}}
    for bad in refusals(
        "stage_stream_open",
        ("malformed", "a stream opened in another form", pairs(list(reversed(opened.items())))),
        ("oversize", "513 bytes to open a stream", bytes(513)),
    ):
        yield {**bad, "given": given}


def derivations() -> Iterator[Vector]:
    for name, of in (
        ("a crew", record()),
        ("a crew that begins", record(step=0)),
        ("the same members again", record(nonce=b"\x09" * 8)),
    ):
        yield derived(f"id of {name}", "crew_id", {"record": plain(of)}, digest(of).hex())
