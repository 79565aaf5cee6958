"""The vectors about who is in a crew and holds what: part of what `vectors.py` writes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.generate.frames import (
    FORGED_SIGNATURE,
    Vector,
    accepted,
    pack,
    pairs,
    plain,
    rejected,
    without,
)
from swarmnode.stages.wire import StreamPeers, step_hash
from swarmnode.wire.envelope import peer_id

KEYS = [
    Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"member {n}".encode()).digest())
    for n in range(6)
]
PEERS = [peer_id(key.public_key().public_bytes_raw()) for key in KEYS]
MODEL, LINEAGE, ZERO = b"\x11" * 32, b"\x22" * 32, bytes(32)
POINT = b"\x33" * 32
RECORD_DOMAIN, MEMBER_DOMAIN = b"swarmnode/crew-record/2", b"swarmnode/crew-member/1"
NAN = float("nan")
TAKEN = [2, 0.5, 1e-6]


def record(members: int = 4, **fields: Any) -> dict[str, Any]:
    return {
        "lineage": LINEAGE,
        "model": MODEL,
        "previous": POINT,
        "step": 41,
        "taken": TAKEN,
        "members": [[peer, 4] for peer in PEERS[:members]],
        "nonce": b"\x08" * 8,
        **fields,
    }


def first(**fields: Any) -> dict[str, Any]:
    """With which training begins."""
    return record(**{"previous": ZERO, "step": 0, "taken": [0, 1.0, 0.0], **fields})


def digest(of: dict[str, Any]) -> bytes:
    return hashlib.blake2b(RECORD_DOMAIN + pack(of), digest_size=32).digest()


def founded(
    of: dict[str, Any],
    signers: Sequence[int] = (0, 1, 2, 3),
    *,
    crew: bytes | None = None,
    domain: bytes = MEMBER_DOMAIN,
) -> Any:
    data = domain + (digest(of) if crew is None else crew)
    return {
        "type": "founded",
        "record": of,
        "signatures": [[PEERS[n], KEYS[n].sign(data)] for n in signers],
    }


CREW = digest(record())
STATUS = ["active", 41, 900]
COPY = [LINEAGE, 4, 8, 40, b"\x44" * 32, "memory", TAKEN, POINT]
OFFER = {
    "type": "offer",
    "model": MODEL,
    "memory": 8e9,
    "speed": 1e12,
    "hop_seconds": 0.01,
    "copies": [COPY, [*COPY[:5], "disk", TAKEN, b""]],
    "without": [PEERS[3]],
}
PROPOSE = {"type": "propose", "record": record()}
FOUNDED = founded(record())
HEARTBEAT = {"type": "heartbeat", "crew": CREW, "status": STATUS}
LEAVE = {"type": "leave", "crew": CREW, "reason": "drained", "because": ""}
SIGNATURE = {"type": "signature", "crew": CREW, "signature": KEYS[0].sign(MEMBER_DOMAIN + CREW)}
REFUSE = {"type": "refuse", "reason": "busy", "crew": CREW}


def messages() -> Iterator[Vector]:
    requests = [
        OFFER,
        {**OFFER, "copies": []},
        PROPOSE,
        {**PROPOSE, "record": first()},
        FOUNDED,
        HEARTBEAT,
        LEAVE,
    ]
    answers = [SIGNATURE, REFUSE, {**HEARTBEAT, "type": "alive"}, {"type": "noted"}]
    for kind, all_of in (("crews_request", requests), ("crews_answer", answers)):
        for number, message in enumerate(all_of):
            yield accepted(f"{kind} {message['type']} {number}", kind, pack(message), message)
    for reason in ("crew", "trust", "model", "behind", "record"):
        yield accepted(
            f"refuse {reason}",
            "crews_answer",
            pack({**REFUSE, "reason": reason}),
            {**REFUSE, "reason": reason},
        )
    for where in ("memory", "disk", "neighbour"):
        one = {**OFFER, "copies": [[*COPY[:5], where, *COPY[6:]]]}
        yield accepted(f"a copy in {where}", "crews_request", pack(one), one)
    for phase in ("absent", "loading", "probation", "failed"):
        beat = {**HEARTBEAT, "status": [phase, *STATUS[1:]]}
        yield accepted(f"a stage that is {phase}", "crews_request", pack(beat), beat)
    back = {**OFFER, "memory": 0.0, "speed": 0.0, "copies": []}
    yield accepted("an offer taken back", "crews_request", pack(back), back)
    most = {**OFFER, "memory": 1e30, "copies": [COPY] * 32, "without": ["p" * 64] * 16}
    yield accepted(
        "the largest amount, the most copies and the most peers", "crews_request", pack(most), most
    )
    yield accepted(
        "a leave because of a member",
        "crews_request",
        pack({**LEAVE, "because": PEERS[1]}),
        {**LEAVE, "because": PEERS[1]},
    )
    eight = {
        **PROPOSE,
        "record": record(members=0) | {"members": [[f"peer{n}", 1] for n in range(8)]},
    }
    yield accepted("eight members", "crews_request", pack(eight), eight)

    def bad(
        reason: str,
        name: str,
        message: dict[str, Any],
        /,
        *,
        read_as: str = "crews_request",
        **fields: Any,
    ) -> Vector:
        return rejected(reason, name, pack({**message, **fields}), read_as)

    yield bad("schema", "an answer as a request", SIGNATURE)
    yield bad("schema", "a request as an answer", OFFER, read_as="crews_answer")
    yield bad("schema", "an unknown type", LEAVE, type="expel")
    yield bad("schema", "an unknown field", HEARTBEAT, weight=1.0)
    yield bad("schema", "an unknown refusal", REFUSE, reason="tired", read_as="crews_answer")
    yield bad("schema", "an unknown phase", HEARTBEAT, status=["asleep", *STATUS[1:]])
    yield bad("schema", "a status of four", HEARTBEAT, status=[*STATUS, 0])
    yield bad("schema", "a step as a boolean", HEARTBEAT, status=["active", True, 900])
    yield bad("schema", "a crew that is nil", LEAVE, crew=None)
    yield bad(
        "schema", "a member of one", PROPOSE, record=record(members=0) | {"members": [[PEERS[0]]]}
    )
    yield bad("schema", "a copy in the cloud", OFFER, copies=[[*COPY[:5], "cloud", *COPY[6:]]])
    yield bad("schema", "a copy of seven", OFFER, copies=[COPY[:7]])
    yield rejected(
        "schema",
        "a heartbeat without a status",
        pack(without(HEARTBEAT, "status")),
        "crews_request",
    )
    yield rejected(
        "schema",
        "a proposal with its type last",
        pack({**without(PROPOSE, "type"), "type": "propose"}),
        "crews_request",
    )
    yield rejected("malformed", "a founding cut short", pack(FOUNDED)[:-1], "crews_request")
    yield rejected("malformed", "a heartbeat and a byte", pack(HEARTBEAT) + b"\0", "crews_request")
    yield rejected(
        "malformed", "a crew named twice", pairs([*LEAVE.items(), ("crew", CREW)]), "crews_request"
    )
    yield rejected("malformed", "no request at all", b"", "crews_request")
    yield rejected(
        "malformed", "a memory as integer", pack({**OFFER, "memory": 8}), "crews_request"
    )
    yield rejected("oversize", "65,537 bytes of request", bytes(65_537), "crews_request")
    yield rejected("oversize", "65,537 bytes of answer", bytes(65_537), "crews_answer")
    yield bad("bounds", "a crew's id of 16 bytes", LEAVE, crew=CREW[:16])
    yield bad("bounds", "a model of 31 bytes", OFFER, model=MODEL[1:])
    yield bad("bounds", "less than no memory", OFFER, memory=-1.0)
    yield bad("bounds", "more speed than there is", OFFER, speed=1.1e30)
    yield bad("bounds", "a reason of 129 characters", LEAVE, reason="a" * 129)
    yield bad("bounds", "a reason that moves the cursor", LEAVE, reason="\x1b[2J")
    yield bad("bounds", "because of somebody with a space", LEAVE, because="a b")
    yield bad("bounds", "because of a peer of 65 characters", LEAVE, because="p" * 65)
    yield bad("bounds", "without 17 peers", OFFER, without=["p"] * 17)
    yield bad("bounds", "without a peer of no name", OFFER, without=[""])
    yield bad("schema", "without a number", OFFER, without=[7])
    yield bad(
        "bounds", "a signature of 63 bytes", SIGNATURE, signature=bytes(63), read_as="crews_answer"
    )
    yield bad(
        "bounds",
        "a signature of 31 bytes of crew",
        SIGNATURE,
        crew=bytes(31),
        read_as="crews_answer",
    )
    yield bad("bounds", "a status of step -1", HEARTBEAT, status=["active", -1, 900])
    yield bad("bounds", "progress of 2**63", HEARTBEAT, status=["active", 41, 2**63])
    yield bad("not_finite", "a memory of infinity", OFFER, memory=float("inf"))
    yield bad("not_finite", "a speed of nan", OFFER, speed=NAN)
    yield from copies()
    yield from records()


def copies() -> Iterator[Vector]:
    """What one copy may say."""

    def bad(reason: str, name: str, *copies: list[Any]) -> Vector:
        return rejected(reason, name, pack({**OFFER, "copies": list(copies)}), "crews_request")

    def copy(at: int, value: Any) -> list[Any]:
        return [*COPY[:at], value, *COPY[at + 1 :]]

    yield bad("bounds", "33 copies", *[COPY] * 33)
    yield bad("bounds", "a copy of a lineage of 31 bytes", copy(0, LINEAGE[1:]))
    yield bad("bounds", "a copy from layer -1", copy(1, -1))
    yield bad("bounds", "a copy of no layers", copy(2, 4))
    yield bad("bounds", "a copy up to layer 1025", copy(2, 1025))
    yield bad("bounds", "a copy of step -1", copy(3, -1))
    yield bad("bounds", "a copy of a step without a hash", copy(4, ZERO))
    yield bad("bounds", "a copy of the base with a hash", copy(3, 0))
    yield bad("bounds", "a copy with a clip above 1", copy(6, [2, 1.5, 1e-6]))
    yield bad("not_finite", "a copy with a rate of nan", copy(6, [2, 0.5, NAN]))
    yield bad("bounds", "a copy that is ready for half a hash", copy(7, POINT[:16]))


def records() -> Iterator[Vector]:
    """What one record may say."""

    def bad(name: str, of: dict[str, Any], reason: str = "bounds") -> Vector:
        return rejected(reason, name, pack({**PROPOSE, "record": of}), "crews_request")

    yield bad("a step that follows nothing", record(previous=ZERO))
    yield bad("a beginning after something", record(step=0))
    yield bad("a step of -1", record(step=-1))
    yield bad("a lineage of 31 bytes", record(lineage=LINEAGE[1:]))
    yield bad("a predecessor of 31 bytes", record(previous=POINT[1:]))
    yield bad("a nonce of 7 bytes", record(nonce=bytes(7)))
    yield bad("no members", record(members=0))
    yield bad("nine members", record(members=0) | {"members": [[f"peer{n}", 1] for n in range(9)]})
    yield bad("a member without a name", record(members=0) | {"members": [["", 1]]})
    yield bad("a name with a space", record(members=0) | {"members": [["12D3 KooW", 1]]})
    yield bad("a stage of no layers", record(members=0) | {"members": [[PEERS[0], 0]]})
    yield bad("a stage of 1025 layers", record(members=0) | {"members": [[PEERS[0], 1025]]})
    yield bad(
        "one peer on two stages", record(members=0) | {"members": [[PEERS[0], 4], [PEERS[0], 4]]}
    )
    yield bad("a clip below 0", record(taken=[2, -0.5, 1e-6]))
    yield bad("an attempt of -1", record(taken=[-1, 0.5, 1e-6]))
    yield bad("a rate of infinity", record(taken=[2, 0.5, float("inf")]), "not_finite")
    yield rejected(
        "bounds",
        "nine signatures",
        pack({**FOUNDED, "signatures": FOUNDED["signatures"] * 3}),
        "crews_request",
    )
    short = {**FOUNDED, "signatures": [[PEERS[0], bytes(63)]]}
    yield rejected("bounds", "a founding with a short signature", pack(short), "crews_request")


def foundings() -> Iterator[Vector]:
    """Whether a `founded` makes a crew."""

    def good(name: str, message: dict[str, Any]) -> Vector:
        return accepted(name, "crews_founded", pack(message), {"crew": digest(message["record"])})

    def bad(name: str, message: dict[str, Any]) -> Vector:
        return rejected("signature", name, pack(message), "crews_founded")

    yield good("a crew that all have signed", FOUNDED)
    yield good("a crew with which training begins", founded(first()))
    yield good("a crew of one", founded(record(members=1), (0,)))
    yield bad("a crew that three of four have signed", founded(record(), (0, 1, 2)))
    yield bad("a crew that nobody has signed but its first", founded(record(), (0,)))
    yield bad("a crew with one signature twice", founded(record(), (0, 1, 2, 2)))
    yield bad("signatures in another order", founded(record(), (1, 0, 2, 3)))
    yield bad("a signature of somebody else", founded(record(), (0, 1, 2, 5)))
    yield bad("signatures of another crew", founded(record(), crew=b"\x99" * 32))
    yield bad("signatures in another domain", founded(record(), domain=b"swarmnode/crew-member/2"))
    other = record(nonce=b"\x09" * 8)
    yield bad(
        "signatures of the same members at the same step", {**founded(record()), "record": other}
    )
    signatures = FOUNDED["signatures"]
    flipped = [signatures[0][0], bytes([signatures[0][1][0] ^ 1]) + signatures[0][1][1:]]
    yield bad(
        "one bit of a signature flipped", {**FOUNDED, "signatures": [flipped, *signatures[1:]]}
    )
    nobody = record(members=0) | {"members": [["nobody", 16]]}
    yield bad(
        "a member whose name is no key",
        {"type": "founded", "record": nobody, "signatures": [["nobody", bytes(64)]]},
    )
    anybody = peer_id(b"\x01" + bytes(31))
    yield bad(
        "a member whose key is of small order",
        {
            "type": "founded",
            "record": {**record(), "members": [[anybody, 4]]},
            "signatures": [[anybody, FORGED_SIGNATURE]],
        },
    )
    yield rejected("schema", "no founding", pack(LEAVE), "crews_founded")


def streams() -> Iterator[Vector]:
    crew = {"crew": CREW.hex(), "stage": 2, "members": PEERS[:4]}
    given = {"crew": crew, "peer": PEERS[1]}
    opened = {"crew": CREW, "from_stage": 1, "to_stage": 2, "kind": "frames"}
    for kind in ("frames", "state"):
        message = {**opened, "kind": kind}
        yield {
            **accepted(f"a stream of {kind}", "stage_stream_open", pack(message), message),
            "given": given,
        }

    def bad(
        reason: str, name: str, frame: bytes | None = None, peer: str = PEERS[1], **fields: Any
    ) -> Vector:
        frame = pack({**opened, **fields}) if frame is None else frame
        return {
            **rejected(reason, name, frame, "stage_stream_open"),
            "given": {**given, "peer": peer},
        }

    yield bad("crew", "a stream of another crew", crew=b"\x99" * 32)
    yield bad("crew", "a stream of half a crew", crew=CREW[:16])
    yield bad("stage", "a stream to another stage", to_stage=3)
    yield bad("stage", "a stream from a higher stage", from_stage=3)
    yield bad("stage", "a stream from itself", from_stage=2)
    yield bad("stage", "a stream from stage -1", from_stage=-1)
    yield bad("peer", "a stream of somebody else", peer=PEERS[5])
    yield bad("peer", "a stream in another's place", from_stage=0)
    yield bad("schema", "a stream of gradients", kind="gradients")
    yield bad("schema", "a stream with a password", password="x")
    yield bad(
        "malformed", "a stream opened in another form", frame=pairs(list(reversed(opened.items())))
    )
    yield bad("oversize", "513 bytes to open a stream", frame=bytes(513))


def derivations() -> Iterator[Vector]:
    for name, of in (
        ("a crew", record()),
        ("a crew that begins", first()),
        ("the same members again", record(nonce=b"\x09" * 8)),
    ):
        yield {
            "name": f"id of {name}",
            "derive": "crew_id",
            "input": {"record": plain(of)},
            "output": digest(of).hex(),
        }
    for name, before, step, attempt, batches in (
        ("the first step", ZERO, 1, 1, (3, 5, 8)),
        ("a step", POINT, 42, 2, (7,)),
        ("the step of another attempt", POINT, 42, 3, (7,)),
        ("numbers in any order", POINT, 42, 2, (9, 7)),
        ("a step of nothing", POINT, 42, 2, ()),
    ):
        given: dict[str, Any] = {
            "before": before.hex(),
            "crew": CREW[:16].hex(),
            "step": step,
            "attempt": attempt,
            "micro_batches": list(batches),
        }
        output = step_hash(before, CREW[:16], step, attempt, batches).hex()
        yield {"name": f"hash of {name}", "derive": "step_hash", "input": given, "output": output}


def stream_peers(crew: dict[str, Any]) -> StreamPeers:
    return StreamPeers(bytes.fromhex(crew["crew"]), crew["stage"], tuple(crew["members"]))


def read(message: dict[str, Any], kind: Any) -> Any:
    """The struct `kind` of a message without its type."""
    tag = kind.__struct_config__.tag
    return msgspec.msgpack.decode(pack({"type": tag, **message} if tag else message), type=kind)
