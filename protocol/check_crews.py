"""04-stages, sections 7 to 9: streams between members, what their network processes tell each other, and who holds which stage."""

import math

import msgpack
from check_frames import BYTES, COUNTS, EXACT, FLOATS, REGISTRY, Maybe, Refused, Row, counter, decode, digest, name, require
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

VOTER = Row(peer=str, incarnation=bytes)
SEAT = Row(peer=str, incarnation=bytes, stage_epoch=int)
RECORD = {
    "crew": bytes, "epoch": int, "previous": bytes, "model": bytes, "layers": [int], "seats": [SEAT], "witnesses": [VOTER],
    "voters": [VOTER], "step": int, "lease_seconds": int, "nonce": bytes, "dissolved": str,
}  # fmt: skip
CERTIFICATE = {"record": RECORD, "ballot": int, "votes": [Row(peer=str, incarnation=bytes, signature=bytes)]}
PHASE = ("absent", "claiming", "stopping", "ready", "loading", "probation", "active", "failed")
STATUS = Row(
    phase=PHASE, step=int, prepared=bool, attempt=int, clip=float, learning_rate=float, progress=int, load=int, journal=bool, broken=bool,
    version=int,
)  # fmt: skip
STREAM_OPEN = {"crew": bytes, "roster_epoch": int, "from_stage": int, "from_epoch": int, "to_stage": int, "kind": ("frames", "state")}
STREAM_READY = {"crew": bytes, "roster_epoch": int}
OFFER = {
    "type": ("offer",), "model": bytes, "incarnation": bytes, "memory": float, "speed": float, "hop_seconds": float, "crew": bytes,
    "stage": int, "step": int,
}  # fmt: skip
PREPARE = {"type": ("prepare",), "crew": bytes, "epoch": int, "previous": bytes, "ballot": int, "evicting": [str]}
PROMISE = {"type": ("promise",), "crew": bytes, "epoch": int, "ballot": int, "accepted_ballot": int, "accepted": Maybe(RECORD)}
PROPOSE = {"type": ("propose",), "record": RECORD, "ballot": int}
VOTE = {"type": ("vote",), "crew": bytes, "epoch": int, "ballot": int, "hash": bytes, "incarnation": bytes, "signature": bytes}
REFUSE = {"type": ("refuse",), "reason": ("ballot", "epoch", "alive", "unknown", "busy", "record"), "ballot": int, "incarnation": bytes}
ADOPT = {"type": ("adopt",), "certificates": [CERTIFICATE]}
HEARTBEAT = {"type": ("heartbeat",), "crew": bytes, "roster_epoch": int, "sequence": int, "status": STATUS}
ALIVE = {**HEARTBEAT, "type": ("alive",)}
LEAVE = {"type": ("leave",), "crew": bytes, "roster_epoch": int, "reason": str}
NOTED = {"type": ("noted",)}
REQUESTS = (OFFER, PREPARE, PROPOSE, ADOPT, HEARTBEAT, LEAVE)
ANSWERS = (PROMISE, VOTE, REFUSE, ADOPT, ALIVE, LEAVE, NOTED)
LENGTHS = {
    "model": "record_hash", "previous": "record_hash", "hash": "record_hash", "crew": "crew", "incarnation": "incarnation",
    "signature": "signature", "nonce": "crew_nonce",
}  # fmt: skip


def read_message(frame, shapes):
    """Section 8."""
    message = decode(frame, BYTES["crews_message"], *shapes)
    check_fields(message)
    for field in ("record", "accepted"):
        if message.get(field) is not None:
            check_record(message[field])
    if message["type"] == "prepare":
        require(len(message["evicting"]) <= COUNTS["seats"])
        [name(peer, BYTES["peer_id"]) for peer in message["evicting"]]
    if "status" in message:
        counter(*[value for value in message["status"] if type(value) is int])
        amounts(*[value for value in message["status"] if isinstance(value, float)])
        require(message["status"][4] <= 1)  # clip
    if message["type"] == "adopt":
        check_chain(message["certificates"])
    return message


def check_fields(message):
    for field, length in LENGTHS.items():
        require(len(message.get(field, bytes(EXACT[length]))) == EXACT[length])
    counter(*[value for value in message.values() if type(value) is int])
    amounts(*[value for value in message.values() if isinstance(value, float)])
    if message["type"] == "leave":
        reason(message["reason"])


def amounts(*values):
    require(all(map(math.isfinite, values)), "not_finite")
    require(all(0 <= value <= FLOATS["crew_amount"] for value in values))


def reason(value):
    require(len(value) <= BYTES["crew_reason"] and all(" " <= character <= "~" for character in value))


def check_record(record):
    """Section 9.1."""
    check_fields({**record, "type": "record"})
    founding = record["epoch"] == 1
    require(record["epoch"] >= 1 and founding == (not any(record["previous"])) and founding == (not any(record["crew"])))
    require(1 <= len(record["seats"]) <= COUNTS["seats"] and len(record["layers"]) == len(record["seats"]))
    require(all(1 <= layers <= COUNTS["layers"] for layers in record["layers"]))
    for peer, incarnation, stage_epoch in record["seats"]:
        counter(stage_epoch)
        voter([peer, incarnation]) if peer else require(not incarnation)
    require(len(record["witnesses"]) <= COUNTS["witnesses"])
    require(len(record["voters"]) <= COUNTS["seats"] + COUNTS["witnesses"])
    for voters in (voters_of(record), record["voters"]):
        [voter(one) for one in voters]
        require(len({peer for peer, _ in voters}) == len(voters))
    require(not founding or record["voters"] == voters_of(record))
    reason(record["dissolved"])


def voter(one):
    name(one[0], BYTES["peer_id"])
    require(len(one[1]) == EXACT["incarnation"])


def check_chain(certificates):
    require(1 <= len(certificates) <= COUNTS["chain"])
    for number, certificate in enumerate(certificates):
        check_record(certificate["record"])
        counter(certificate["ballot"])
        require(certificate["record"]["epoch"] == certificates[0]["record"]["epoch"] + number)
        require(len(certificate["votes"]) <= COUNTS["seats"] + COUNTS["witnesses"])
        for peer, incarnation, signature in certificate["votes"]:
            voter([peer, incarnation])
            require(len(signature) == EXACT["signature"])


def voters_of(record):
    return [[peer, incarnation] for peer, incarnation, _ in record["seats"] if peer] + record["witnesses"]


def record_hash(record):
    return digest(REGISTRY["domains"]["crew_record"].encode() + msgpack.packb(record))


def crew_id(record):
    return record_hash(record) if record["epoch"] == 1 else record["crew"]


def check_certificate(certificate):
    """Section 9.2: whether it has the votes that it needs."""
    record, left = certificate["record"], list(certificate["record"]["voters"])
    needed = len(left) if record["epoch"] == 1 else len(left) // 2 + 1
    place = crew_id(record) + record["epoch"].to_bytes(8, "big") + certificate["ballot"].to_bytes(8, "big") + record_hash(record)
    for peer, incarnation, signature in certificate["votes"]:
        require([peer, incarnation] in left, "signature")
        left.remove([peer, incarnation])
        signed = REGISTRY["domains"]["crew_vote"].encode() + place + incarnation
        try:
            Ed25519PublicKey.from_public_bytes(key_of(peer)).verify(signature, signed)
        except InvalidSignature:
            raise Refused("signature") from None
    require(len(certificate["votes"]) >= needed, "signature")


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


def check_successor(previous, record):
    """Section 9.3: whether it may follow, votes aside."""
    require(record["crew"] == crew_id(previous) and record["epoch"] == previous["epoch"] + 1)
    require(record["previous"] == record_hash(previous) and record["voters"] == voters_of(previous))
    require(all(record[field] == previous[field] for field in ("model", "layers", "lease_seconds", "nonce")))
    require(not previous["dissolved"] and record["step"] >= previous["step"])
    for (was, as_, before), (is_, like, after) in zip(previous["seats"], record["seats"], strict=True):
        if not is_:
            require(after == before)
        elif (was, as_) == (is_, like):
            require(after in (before, before + 1))
        else:
            require(after == before + 1)


def read_adopt(frame, given):
    """The newest record that a member who holds `known` (hex, or empty) takes from an `adopt`."""
    known = decode(bytes.fromhex(given["known"]), BYTES["crews_message"], RECORD) if given["known"] else None
    certificates = read_message(frame, (ADOPT, NOTED))["certificates"]
    require(known is None or crew_id(certificates[0]["record"]) == crew_id(known))
    for certificate in certificates:
        record = certificate["record"]
        if known is not None and record["epoch"] <= known["epoch"]:
            continue
        check_certificate(certificate)
        if known is not None:
            check_successor(known, record)
        known = record
    return {"crew": crew_id(known), "hash": record_hash(known), "epoch": known["epoch"], "seats": known["seats"]}


def read_stream_open(frame, given):
    """Section 7: what becomes of a stream whose first message, behind its length, is `frame`, from `given["peer"]` to a member."""
    opened, roster = decode(frame, BYTES["stage_open"], STREAM_OPEN), given["roster"]
    require(opened["crew"].hex() == roster["crew"], "crew")
    require(opened["roster_epoch"] == roster["roster_epoch"], "roster_epoch")
    require(opened["to_stage"] == roster["stage"] and 0 <= opened["from_stage"] < roster["stage"], "stage")
    require(roster["members"][opened["from_stage"]] == given["peer"], "peer")
    require(roster["stage_epochs"][opened["from_stage"]] == opened["from_epoch"], "stage_epoch")
    return opened


def crew_votes(record, voter, events):
    """Section 9.4: what `voter`, who holds `record`, answers to each event: a prepare or a propose, without signatures."""
    state = {"promised": 0, "ballot": 0, "voted": None}
    return [answer_of(unhexed(record), voter, state, *event) for event in events]


def answer_of(known, voter, state, event, given):
    given = unhexed(given)
    place = given["record"] if event == "propose" else given
    if place["crew"] != crew_id(known):
        return ["refuse", "unknown", 0]
    if place["epoch"] <= known["epoch"]:
        return ["adopt"]
    if place["epoch"] > known["epoch"] + 1 or place["previous"] != record_hash(known) or voter not in [one[0] for one in voters_of(known)]:
        return ["refuse", "epoch", 0]
    if given["ballot"] < state["promised"]:
        return ["refuse", "ballot", state["promised"]]
    if event == "prepare":
        state["promised"] = given["ballot"]
        return ["promise", given["ballot"], state["ballot"], state["voted"] and record_hash(state["voted"]).hex()]
    if given["ballot"] == state["ballot"] and place != state["voted"]:
        return ["refuse", "ballot", state["promised"]]
    try:
        check_successor(known, place)
    except Refused:
        return ["refuse", "record", 0]
    state.update(promised=given["ballot"], ballot=given["ballot"], voted=place)
    return ["vote", given["ballot"], record_hash(place).hex()]


def unhexed(record):
    """A record or message as it was before its bytes were written in hex."""
    if isinstance(record, dict):
        return {field: bytes.fromhex(value) if field in BYTES_FIELDS else unhexed(value) for field, value in record.items()}
    if isinstance(record, list) and len(record) in (2, 3) and isinstance(record[0], str) and isinstance(record[1], str):
        return [record[0], bytes.fromhex(record[1]), *record[2:]]
    return [unhexed(value) for value in record] if isinstance(record, list) else record


BYTES_FIELDS = ("crew", "previous", "model", "nonce")
READERS = {
    "stage_stream_open": read_stream_open,
    "crews_request": lambda frame, domain, swarm: read_message(frame, REQUESTS),
    "crews_answer": lambda frame, domain, swarm: read_message(frame, ANSWERS),
    "crews_adopt": read_adopt,
}
DERIVATIONS = {
    "record_hash": lambda record: record_hash(unhexed(record)).hex(),
    "crew_votes": crew_votes,
}
