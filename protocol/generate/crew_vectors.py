"""Vectors of membership, records and held blocks, for `vectors.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.generate.frames import Vector, accepted, derived, pack, pairs, plain, rejected
from swarmnode.stages.network.stream_proxy import StreamPeers
from swarmnode.wire.envelope import peer_id

KEYS = [
    Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"member {n}".encode()).digest())
    for n in range(6)
]
PEERS = [peer_id(key.public_key().public_bytes_raw()) for key in KEYS]
MODEL, LINEAGE = b"\x11" * 32, b"\x22" * 32
RECORD_DOMAIN = b"swarmnode/crew-record/1"
NAN = float("nan")


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
            yield accepted(f"{kind} {message['type']} {number}", kind, pack(message), message)
    for reason in ("crew", "model", "room", "newer", "trust", "struck", "record"):
        yield accepted(
            f"refuse {reason}",
            "crews_answer",
            pack({**REFUSE, "reason": reason}),
            {**REFUSE, "reason": reason},
        )
    for where in ("memory", "disk", "neighbour"):
        one = {**OFFER, "held_blocks": [[*BLOCK[:4], where]]}
        yield accepted(f"a block in {where}", "crews_request", pack(one), one)
    for phase in ("loading", "failed"):
        beat = {**HEARTBEAT, "status": [phase, *STATUS[1:]]}
        yield accepted(f"a stage that is {phase}", "crews_request", pack(beat), beat)
    back = {**OFFER, "memory": 0.0, "speed": 0.0, "held_blocks": []}
    yield accepted("a withdrawn offer", "crews_request", pack(back), back)
    most = {**OFFER, "memory": 1e30, "held_blocks": [BLOCK] * 32}
    yield accepted("the largest amount and the most held blocks", "crews_request", pack(most), most)
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

    yield bad("schema", "an answer as a request", ACCEPT)
    yield bad("schema", "a request as an answer", OFFER, read_as="crews_answer")
    yield bad("schema", "an unknown type", LEAVE, type="expel")
    yield bad("schema", "an unknown refusal", REFUSE, reason="tired", read_as="crews_answer")
    yield bad("schema", "an unknown phase", HEARTBEAT, status=["asleep", *STATUS[1:]])
    yield bad("schema", "a status of five", HEARTBEAT, status=[*STATUS, 0])
    yield bad(
        "schema", "a member of one", PROPOSE, record=record(members=0) | {"members": [[PEERS[0]]]}
    )
    yield bad("schema", "a block in the cloud", OFFER, held_blocks=[[*BLOCK[:4], "cloud"]])
    yield bad("schema", "a block of four values", OFFER, held_blocks=[BLOCK[:4]])
    yield rejected(
        "malformed", "a crew named twice", pairs([*LEAVE.items(), ("crew", CREW)]), "crews_request"
    )
    yield rejected("oversize", "16,385 bytes of request", bytes(16_385), "crews_request")
    yield rejected("oversize", "16,385 bytes of answer", bytes(16_385), "crews_answer")
    yield bad("bounds", "less than no memory", OFFER, memory=-1.0)
    yield bad("bounds", "more speed than there is", OFFER, speed=1.1e30)
    yield bad("bounds", "a reason of 129 characters", LEAVE, reason="a" * 129)
    yield bad("bounds", "a reason that moves the cursor", LEAVE, reason="\x1b[2J")
    yield from held_blocks()
    yield from records()


def held_blocks() -> Iterator[Vector]:
    """Yield vectors of one held block."""

    def bad(reason: str, name: str, *blocks: list[Any]) -> Vector:
        return rejected(reason, name, pack({**OFFER, "held_blocks": list(blocks)}), "crews_request")

    def block(at: int, value: Any) -> list[Any]:
        return [*BLOCK[:at], value, *BLOCK[at + 1 :]]

    yield bad("bounds", "33 held blocks", *[BLOCK] * 33)
    yield bad("bounds", "a block of no stages", block(1, []))
    yield bad("bounds", "a block of nine stages", block(1, [1] * 9))
    yield bad("bounds", "a block of no layers", block(1, [4, 0]))
    yield bad("bounds", "a block of 1025 layers", block(1, [4, 1025]))
    yield bad("bounds", "a block of a stage beyond the last", block(2, 4))


def records() -> Iterator[Vector]:
    """Yield vectors of one record."""

    def bad(name: str, of: dict[str, Any], reason: str = "bounds") -> Vector:
        return rejected(reason, name, pack({**PROPOSE, "record": of}), "crews_request")

    yield bad("no members", record(members=0))
    yield bad("nine members", record(members=0) | {"members": [[f"peer{n}", 1] for n in range(9)]})
    yield bad("a member without a name", record(members=0) | {"members": [["", 1]]})
    yield bad("a name with a space", record(members=0) | {"members": [["12D3 KooW", 1]]})
    yield bad("a member of 65 characters", record(members=0) | {"members": [["p" * 65, 1]]})
    yield bad("a stage of no layers", record(members=0) | {"members": [[PEERS[0], 0]]})
    yield bad("a stage of 1025 layers", record(members=0) | {"members": [[PEERS[0], 1025]]})
    yield bad(
        "one peer on two stages", record(members=0) | {"members": [[PEERS[0], 4], [PEERS[0], 4]]}
    )


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
    yield bad("peer", "a stream of another peer", peer=PEERS[5])
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
        ("a crew that begins", record(step=0)),
        ("the same members again", record(nonce=b"\x09" * 8)),
    ):
        yield derived(f"id of {name}", "crew_id", {"record": plain(of)}, digest(of).hex())


def stream_peers(crew: dict[str, Any]) -> StreamPeers:
    return StreamPeers(bytes.fromhex(crew["crew"]), crew["stage"], tuple(crew["members"]))


def read(message: dict[str, Any], kind: Any) -> Any:
    """Return a message without its type as a struct `kind`."""
    tag = kind.__struct_config__.tag
    return msgspec.msgpack.decode(pack({"type": tag, **message} if tag else message), type=kind)
