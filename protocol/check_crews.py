"""04-stages, sections 7 to 9: streams between members, what their network processes tell each
other, and who holds which stage."""

import math

import msgpack
from check_frames import (
    BYTES,
    COUNTS,
    EXACT,
    FLOATS,
    REGISTRY,
    Row,
    counter,
    decode,
    digest,
    name,
    require,
    verify_signature,
)

TAKEN = Row(attempt=int, clip=float, learning_rate=float)
RECORD = {
    "lineage": bytes,
    "model": bytes,
    "previous": bytes,
    "step": int,
    "taken": TAKEN,
    "members": [Row(peer=str, layers=int)],
    "nonce": bytes,
}
COPY = Row(
    lineage=bytes,
    first=int,
    last=int,
    step=int,
    hash=bytes,
    where=("memory", "disk", "neighbour"),
    taken=TAKEN,
    next=bytes,
)
STATUS = Row(phase=("absent", "loading", "probation", "active", "failed"), step=int, progress=int)
STREAM_OPEN = {"crew": bytes, "from_stage": int, "to_stage": int, "kind": ("frames", "state")}
STREAM_READY = {"crew": bytes}
OFFER = {
    "type": ("offer",),
    "model": bytes,
    "memory": float,
    "speed": float,
    "hop_seconds": float,
    "copies": [COPY],
    "without": [str],
}
PROPOSE = {"type": ("propose",), "record": RECORD}
FOUNDED = {"type": ("founded",), "record": RECORD, "signatures": [Row(peer=str, signature=bytes)]}
HEARTBEAT = {"type": ("heartbeat",), "crew": bytes, "status": STATUS}
LEAVE = {"type": ("leave",), "crew": bytes, "reason": str, "because": str}
SIGNATURE = {"type": ("signature",), "crew": bytes, "signature": bytes}
REFUSE = {
    "type": ("refuse",),
    "reason": ("busy", "crew", "trust", "model", "behind", "record"),
    "crew": bytes,
}
ALIVE = {**HEARTBEAT, "type": ("alive",)}
NOTED = {"type": ("noted",)}
REQUESTS = (OFFER, PROPOSE, FOUNDED, HEARTBEAT, LEAVE)
ANSWERS = (SIGNATURE, REFUSE, ALIVE, NOTED)


def read_message(frame, shapes):
    """Section 8."""
    message = decode(frame, BYTES["crews_message"], *shapes)
    if "crew" in message:
        require(len(message["crew"]) == EXACT["crew"])
    if "status" in message:
        counter(*message["status"][1:])
    if message["type"] == "offer":
        require(len(message["model"]) == EXACT["record_hash"])
        amounts(message["memory"], message["speed"], message["hop_seconds"])
        require(len(message["copies"]) <= COUNTS["copies"])
        [check_copy(*copy) for copy in message["copies"]]
        require(len(message["without"]) <= COUNTS["crew_without"])
        [name(peer, BYTES["peer_id"]) for peer in message["without"]]
    if message["type"] in ("propose", "founded"):
        check_record(message["record"])
    if message["type"] == "founded":
        require(1 <= len(message["signatures"]) <= COUNTS["crew_members"])
        for peer, signature in message["signatures"]:
            name(peer, BYTES["peer_id"])
            require(len(signature) == EXACT["signature"])
    if message["type"] == "signature":
        require(len(message["signature"]) == EXACT["signature"])
    if message["type"] == "leave":
        reason = message["reason"]
        require(
            len(reason) <= BYTES["crew_reason"]
            and all(" " <= character <= "~" for character in reason)
        )
        name(message["because"] or "nobody", BYTES["peer_id"])
    return message


def amounts(*values):
    require(all(map(math.isfinite, values)), "not_finite")
    require(all(0 <= value <= FLOATS["crew_amount"] for value in values))


def check_taken(attempt, clip, learning_rate):
    counter(attempt)
    amounts(clip, learning_rate)
    require(clip <= 1)


def check_copy(lineage, first, last, step, digest_, _where, taken, ready):
    """Section 9.2."""
    require(
        len(lineage) == len(digest_) == EXACT["record_hash"]
        and len(ready) in (0, EXACT["record_hash"])
    )
    require(0 <= first < last <= COUNTS["layers"])
    counter(step)
    check_taken(*taken)
    require((step == 0) == (not any(digest_)))


def check_record(record):
    """Section 9.1."""
    require(
        all(
            len(record[field]) == EXACT["record_hash"] for field in ("lineage", "model", "previous")
        )
    )
    require(len(record["nonce"]) == EXACT["crew_nonce"])
    counter(record["step"])
    check_taken(*record["taken"])
    require((record["step"] == 0) == (not any(record["previous"])))
    require(1 <= len(record["members"]) <= COUNTS["crew_members"])
    for peer, layers in record["members"]:
        name(peer, BYTES["peer_id"])
        require(1 <= layers <= COUNTS["layers"])
    require(len({peer for peer, _ in record["members"]}) == len(record["members"]))


def crew_id(record):
    return digest(REGISTRY["domains"]["crew_record"].encode() + msgpack.packb(record))


def read_founded(frame, domain, swarm):
    """Section 9.1: whether all members have signed."""
    message = read_message(frame, (FOUNDED, NOTED))
    crew = crew_id(message["record"])
    require(
        [peer for peer, _ in message["signatures"]]
        == [peer for peer, _ in message["record"]["members"]],
        "signature",
    )
    for peer, signature in message["signatures"]:
        verify_signature(
            key_of(peer), signature, REGISTRY["domains"]["crew_member"].encode() + crew
        )
    return {"crew": crew}


def key_of(peer):
    """The Ed25519 key in a peer id (01, section 1)."""
    number = 0
    for character in peer:
        at = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz".find(character)
        require(at >= 0, "signature")
        number = number * 58 + at
    require(number < 2**304, "signature")
    data = number.to_bytes(38, "big")
    require(data.startswith(bytes.fromhex("002408011220")), "signature")
    return data[6:]


def read_stream_open(frame, given):
    """Section 7: what becomes of a stream whose first message, behind its length, is `frame`, from
    `given["peer"]` to a member."""
    opened, crew = decode(frame, BYTES["stage_open"], STREAM_OPEN), given["crew"]
    require(opened["crew"].hex() == crew["crew"], "crew")
    require(
        opened["to_stage"] == crew["stage"] and 0 <= opened["from_stage"] < crew["stage"], "stage"
    )
    require(crew["members"][opened["from_stage"]] == given["peer"], "peer")
    return opened


def step_hash(before, crew, step, attempt, micro_batches):
    """Section 6.1."""
    numbers = b"".join(
        number.to_bytes(8, "big") for number in [step, attempt, *sorted(micro_batches)]
    )
    return digest(
        REGISTRY["domains"]["crew_step"].encode()
        + bytes.fromhex(before)
        + bytes.fromhex(crew)
        + numbers
    ).hex()


def unhexed(record):
    """A record as it was before its bytes were written in hex."""
    return {
        field: bytes.fromhex(value) if field in ("lineage", "model", "previous", "nonce") else value
        for field, value in record.items()
    }


READERS = {
    "stage_stream_open": read_stream_open,
    "crews_request": lambda frame, domain, swarm: read_message(frame, REQUESTS),
    "crews_answer": lambda frame, domain, swarm: read_message(frame, ANSWERS),
    "crews_founded": read_founded,
}
DERIVATIONS = {
    "crew_id": lambda record: crew_id(unhexed(record)).hex(),
    "step_hash": step_hash,
}
