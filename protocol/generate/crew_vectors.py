"""The vectors about who is in a crew and holds what: part of what `vectors.py` writes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.generate.frames import Vector, accepted, pack, pairs, plain, rejected, without
from swarmnode.crew.messages import Certificate, Prepare, Promise, Propose, Refuse, Vote, Voter, record_hash
from swarmnode.crew.roster import Acceptor
from swarmnode.crew.stream_handshake import Circle
from swarmnode.wire.envelope import peer_id

KEYS = [Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"member {n}".encode()).digest()) for n in range(6)]
PEERS = [peer_id(key.public_key().public_bytes_raw()) for key in KEYS]
INCARNATIONS = [bytes([0x70 + n]) * 8 for n in range(6)]
VOTERS = [[peer, incarnation] for peer, incarnation in zip(PEERS, INCARNATIONS, strict=True)]
MODEL, ZERO = b"\x11" * 32, bytes(32)
RECORD_DOMAIN, VOTE_DOMAIN = b"swarmnode/crew-record/1", b"swarmnode/crew-vote/1"
NAN = float("nan")


def founding(members: int = 4, **fields: Any) -> dict[str, Any]:
    seats = [[*VOTERS[n], 1] for n in range(members)]
    return {
        "crew": ZERO, "epoch": 1, "previous": ZERO, "model": MODEL, "layers": [4] * members, "seats": seats, "witnesses": [VOTERS[4]],
        "voters": [*VOTERS[:members], VOTERS[4]], "step": 0, "lease_seconds": 30, "nonce": b"\x08" * 8,
        "dissolved": "", **fields,
    }  # fmt: skip


def digest(record: dict[str, Any]) -> bytes:
    return hashlib.blake2b(RECORD_DOMAIN + pack(record), digest_size=32).digest()


FOUNDING = founding()
CREW = digest(FOUNDING)
SEATS = [FOUNDING["seats"][0], FOUNDING["seats"][1], [*VOTERS[5], 2], FOUNDING["seats"][3]]
"""Stage 2 went from member 2 to member 5."""


def after(before: dict[str, Any] = FOUNDING, /, **fields: Any) -> dict[str, Any]:
    """The record after `before`, by which member 5 holds stage 2."""
    voters = [[peer, incarnation] for peer, incarnation, _ in before["seats"] if peer] + before["witnesses"]
    changed = {"crew": CREW, "epoch": before["epoch"] + 1, "previous": digest(before), "voters": voters, "seats": SEATS, "step": 41}
    return {**before, **changed, **fields}


def certificate(record: dict[str, Any], voters: Sequence[int], ballot: int = 16, **signed: Any) -> dict[str, Any]:
    """Signed by the members `voters`; `signed` replaces what they sign: crew, epoch, ballot, hash, incarnation, domain."""
    founded = record["epoch"] == 1
    about = {
        "domain": VOTE_DOMAIN, "crew": digest(record) if founded else record["crew"], "epoch": record["epoch"],
        "ballot": 0 if founded else ballot, "hash": digest(record), **signed,
    }  # fmt: skip
    votes = []
    for n in voters:
        place = about["crew"] + about["epoch"].to_bytes(8, "big") + about["ballot"].to_bytes(8, "big") + about["hash"]
        signature = KEYS[n].sign(about["domain"] + place + about.get("incarnation", INCARNATIONS[n]))
        votes.append([PEERS[n], INCARNATIONS[n], signature])
    return {"record": record, "ballot": 0 if founded else ballot, "votes": votes}


STATUS = ["active", 41, True, 2, 1.0, 1e-6, 900, 3, False, False, 2**40]
OFFER = {
    "type": "offer", "model": MODEL, "incarnation": INCARNATIONS[5], "memory": 8e9, "speed": 1e12, "hop_seconds": 0.01, "crew": ZERO,
    "stage": 0, "step": 0,
}  # fmt: skip
PREPARE = {"type": "prepare", "crew": CREW, "epoch": 2, "previous": digest(FOUNDING), "ballot": 17, "evicting": [PEERS[2]]}
PROPOSE = {"type": "propose", "record": after(), "ballot": 17}
ADOPT = {"type": "adopt", "certificates": [certificate(FOUNDING, range(5)), certificate(after(), (0, 1, 3))]}
HEARTBEAT = {"type": "heartbeat", "crew": CREW, "roster_epoch": 2, "sequence": 7, "status": STATUS}
LEAVE = {"type": "leave", "crew": CREW, "roster_epoch": 2, "reason": "drained"}
PROMISE = {"type": "promise", "crew": CREW, "epoch": 2, "ballot": 17, "accepted_ballot": 16, "accepted": after()}
VOTE = {
    "type": "vote", "crew": CREW, "epoch": 2, "ballot": 17, "hash": digest(after()), "incarnation": INCARNATIONS[0],
    "signature": KEYS[0].sign(b"vote"),
}  # fmt: skip
REFUSE = {"type": "refuse", "reason": "ballot", "ballot": 33, "incarnation": bytes(8)}


def messages() -> Iterator[Vector]:
    requests = [OFFER, PREPARE, PROPOSE, ADOPT, HEARTBEAT, LEAVE]
    answers = [PROMISE, {**PROMISE, "accepted": None, "accepted_ballot": 0}, VOTE, REFUSE, {**HEARTBEAT, "type": "alive"}, ADOPT, LEAVE]
    for kind, all_of in (("crews_request", requests), ("crews_answer", [*answers, {"type": "noted"}])):
        for number, message in enumerate(all_of):
            yield accepted(f"{kind} {message['type']} {number}", kind, pack(message), message)
    for reason in ("epoch", "alive", "unknown", "busy", "record"):
        yield accepted(f"refuse {reason}", "crews_answer", pack({**REFUSE, "reason": reason}), {**REFUSE, "reason": reason})
    vacant = after(seats=[*SEATS[:2], ["", b"", 1], SEATS[3]], dissolved="")
    yield accepted("a vacant stage", "crews_request", pack({**PROPOSE, "record": vacant}), {**PROPOSE, "record": vacant})
    end = after(dissolved="stage 2 was vacant for 120 s")
    yield accepted("an end", "crews_request", pack({**PROPOSE, "record": end}), {**PROPOSE, "record": end})
    whole = {**OFFER, "memory": 1e30, "speed": 0.0}
    yield accepted("the largest amount", "crews_request", pack(whole), whole)

    def bad(reason: str, name: str, message: dict[str, Any], /, *, read_as: str = "crews_request", **fields: Any) -> Vector:
        return rejected(reason, name, pack({**message, **fields}), read_as)

    yield bad("schema", "an answer as a request", VOTE)
    yield bad("schema", "a request as an answer", OFFER, read_as="crews_answer")
    yield bad("schema", "an unknown type", LEAVE, type="expel")
    yield bad("schema", "an unknown field", HEARTBEAT, weight=1.0)
    yield bad("schema", "an unknown refusal", REFUSE, reason="tired", read_as="crews_answer")
    yield bad("schema", "an unknown phase", HEARTBEAT, status=["asleep", *STATUS[1:]])
    yield bad("schema", "a status of twelve", HEARTBEAT, status=[*STATUS, 0])
    yield bad("schema", "prepared as a number", HEARTBEAT, status=[*STATUS[:2], 1, *STATUS[3:]])
    yield bad("schema", "a step as a boolean", HEARTBEAT, status=["active", True, *STATUS[2:]])
    yield bad("schema", "a crew that is nil", LEAVE, crew=None)
    yield bad("schema", "a seat of two", PROPOSE, record=after(seats=[SEATS[0][:2], *SEATS[1:]]))
    yield rejected("schema", "a heartbeat without a status", pack(without(HEARTBEAT, "status")), "crews_request")
    yield rejected("schema", "a proposal with its type last", pack({**without(PROPOSE, "type"), "type": "propose"}), "crews_request")
    yield rejected("malformed", "an adoption cut short", pack(ADOPT)[:-1], "crews_request")
    yield rejected("malformed", "a heartbeat and a byte", pack(HEARTBEAT) + b"\0", "crews_request")
    yield rejected("malformed", "a crew named twice", pairs([*LEAVE.items(), ("crew", CREW)]), "crews_request")
    yield rejected("malformed", "no request at all", b"", "crews_request")
    yield rejected("malformed", "a memory as integer", pack({**OFFER, "memory": 8}), "crews_request")
    yield rejected("oversize", "65,537 bytes of request", bytes(65_537), "crews_request")
    yield rejected("oversize", "65,537 bytes of answer", bytes(65_537), "crews_answer")
    yield bad("bounds", "a crew's id of 16 bytes", LEAVE, crew=CREW[:16])
    yield bad("bounds", "a roster epoch of -1", HEARTBEAT, roster_epoch=-1)
    yield bad("bounds", "a roster epoch of 2**63", HEARTBEAT, roster_epoch=2**63)
    yield bad("bounds", "a ballot of -1", PREPARE, ballot=-1)
    yield bad("bounds", "an incarnation of 7 bytes", OFFER, incarnation=bytes(7))
    yield bad("bounds", "a model of 31 bytes", OFFER, model=MODEL[1:])
    yield bad("bounds", "a refusal's incarnation of 9 bytes", REFUSE, incarnation=bytes(9), read_as="crews_answer")
    yield bad("bounds", "less than no memory", OFFER, memory=-1.0)
    yield bad("bounds", "more speed than there is", OFFER, speed=1.1e30)
    yield bad("bounds", "nine to evict", PREPARE, evicting=[PEERS[0]] * 9)
    yield bad("bounds", "somebody without a name to evict", PREPARE, evicting=[""])
    yield bad("bounds", "a name with a space", PREPARE, evicting=["12D3 KooW"])
    yield bad("bounds", "a reason of 129 characters", LEAVE, reason="a" * 129)
    yield bad("bounds", "a reason that moves the cursor", LEAVE, reason="\x1b[2J")
    yield bad("bounds", "a signature of 63 bytes", VOTE, signature=bytes(63), read_as="crews_answer")
    yield bad("bounds", "a vote for 31 bytes", VOTE, hash=bytes(31), read_as="crews_answer")
    yield bad("bounds", "a status of step -1", HEARTBEAT, status=["active", -1, *STATUS[2:]])
    yield bad("bounds", "a clip factor below 0", HEARTBEAT, status=[*STATUS[:4], -1.0, *STATUS[5:]])
    yield bad("bounds", "a clip factor above 1", HEARTBEAT, status=[*STATUS[:4], 1.5, *STATUS[5:]])
    yield bad("not_finite", "a learning rate of nan", HEARTBEAT, status=[*STATUS[:5], NAN, *STATUS[6:]])
    yield bad("not_finite", "a memory of infinity", OFFER, memory=float("inf"))
    yield bad("not_finite", "a speed of nan", OFFER, speed=NAN)
    yield bad("bounds", "nothing to adopt", ADOPT, certificates=[])
    yield bad("bounds", "nine certificates", ADOPT, certificates=[certificate(after(epoch=2 + n), ()) for n in range(9)])
    yield bad("bounds", "a gap in a chain", ADOPT, certificates=[ADOPT["certificates"][0], certificate(after(epoch=3), ())])
    yield bad("bounds", "ten votes", ADOPT, certificates=[{**certificate(FOUNDING, range(5)), "votes": [[*VOTERS[0], bytes(64)]] * 10}])
    yield from records()


def records() -> Iterator[Vector]:
    """What one record may say."""

    def bad(name: str, record: dict[str, Any]) -> Vector:
        return rejected("bounds", name, pack({**PROPOSE, "record": record}), "crews_request")

    yield bad("a founding record with a crew", founding(crew=CREW))
    yield bad("a founding record with one before it", founding(previous=b"\x01" * 32))
    yield bad("a second record without a crew", after(crew=ZERO))
    yield bad("a second record without one before it", after(previous=ZERO))
    yield bad("epoch 0", founding(epoch=0))
    yield bad("no seats", founding(seats=[], layers=[], voters=[VOTERS[4]]))
    nine = [[f"peer{n}", bytes(8), 1] for n in range(9)]
    yield bad("nine seats", after(seats=nine, layers=[1] * 9))
    yield bad("fewer layers than seats", founding(layers=[4, 4, 4]))
    yield bad("a stage of no layers", founding(layers=[4, 4, 4, 0]))
    yield bad("a stage of 1025 layers", founding(layers=[4, 4, 4, 1025]))
    yield bad("a vacant seat with an incarnation", after(seats=[["", bytes(8), 1], *SEATS[1:]]))
    yield bad("a holder without an incarnation", after(seats=[[PEERS[0], b"", 1], *SEATS[1:]]))
    yield bad("a stage epoch of -1", after(seats=[[*VOTERS[0], -1], *SEATS[1:]]))
    yield bad("one peer on two stages", after(seats=[[*VOTERS[0], 1], [*VOTERS[0], 1], *SEATS[2:]]))
    yield bad("a witness that holds a stage", after(witnesses=[VOTERS[0]]))
    yield bad("two witnesses", after(witnesses=[VOTERS[4], VOTERS[2]]))
    yield bad("ten voters", after(voters=[[f"peer{n}", bytes(8)] for n in range(10)]))
    yield bad("a voter twice", after(voters=[*VOTERS[:4], VOTERS[0]]))
    yield bad("a founding record that somebody else signs", founding(voters=[*VOTERS[:4], VOTERS[5]]))
    yield bad("a nonce of 7 bytes", founding(nonce=bytes(7)))
    yield bad("a step of -1", after(step=-1))
    yield bad("an end without words in ASCII", after(dissolved="größer"))


def adoptions() -> Iterator[Vector]:
    """What somebody who knows `known` takes from an `adopt`."""
    second, third = after(), after(after(), seats=[*SEATS[:3], ["", b"", 1]], step=60)
    ours, chain = certificate(FOUNDING, range(5)), certificate(second, (0, 1, 3))
    value = lambda record: {"crew": CREW, "hash": digest(record), "epoch": record["epoch"], "seats": record["seats"]}

    def made(certificates: Sequence[Any], known: dict[str, Any] | None) -> tuple[bytes, dict[str, str]]:
        return pack({"type": "adopt", "certificates": list(certificates)}), {"known": pack(known).hex() if known else ""}

    def good(name: str, certificates: Sequence[Any], known: dict[str, Any] | None, record: dict[str, Any]) -> Vector:
        frame, given = made(certificates, known)
        return {**accepted(name, "crews_adopt", frame, value(record)), "given": given}

    def bad(reason: str, name: str, *certificates: dict[str, Any], known: dict[str, Any] | None = FOUNDING) -> Vector:
        frame, given = made(certificates, known)
        return {**rejected(reason, name, frame, "crews_adopt"), "given": given}

    yield good("a founding record, signed by all", [ours], None, FOUNDING)
    yield good("a majority's successor", [chain], FOUNDING, second)
    yield good("a successor that all signed", [certificate(second, range(5))], FOUNDING, second)
    yield good("a chain, the known part skipped", [ours, chain, certificate(third, (0, 1, 5))], second, third)
    yield good("a chain, by a stranger", [ours, chain], None, second)
    yield good("nothing new", [ours], second, second)
    alike = after(seats=FOUNDING["seats"], step=0)
    yield good("the same holders under another roster", [certificate(alike, (1, 2, 4))], FOUNDING, alike)
    again = after(seats=[*FOUNDING["seats"][:3], [PEERS[3], b"\x55" * 8, 2]])
    yield good("a holder that came back without its memory", [certificate(again, (0, 1, 2))], FOUNDING, again)

    yield bad("signature", "a minority's record", certificate(second, (0, 1)))
    yield bad("signature", "nobody's record", certificate(second, ()))
    yield bad("signature", "a majority's founding record", certificate(FOUNDING, (0, 1, 2, 3)), known=None)
    twice = {**chain, "votes": [chain["votes"][0]] * 3}
    yield bad("signature", "one vote three times", twice)
    yield bad("signature", "a vote of the newcomer", certificate(second, (0, 1, 5)))
    yield bad("signature", "votes for another record", certificate(second, (0, 1, 3), hash=digest(third)))
    yield bad("signature", "votes of another ballot", {**chain, "ballot": 17})
    yield bad("signature", "votes of another epoch", certificate(second, (0, 1, 3), epoch=1))
    yield bad("signature", "votes for another crew", certificate(second, (0, 1, 3), crew=b"\x99" * 32))
    yield bad("signature", "votes in another domain", certificate(second, (0, 1, 3), domain=b"swarmnode/crew-vote/2"))
    yield bad("signature", "votes of another incarnation", certificate(second, (0, 1, 3), incarnation=bytes(8)))
    foreign = {**chain, "votes": [chain["votes"][0], chain["votes"][1], [*VOTERS[3], chain["votes"][1][2]]]}
    yield bad("signature", "a foreign signature", foreign)
    flipped = [*chain["votes"][0][:2], bytes([chain["votes"][0][2][0] ^ 1]) + chain["votes"][0][2][1:]]
    yield bad("signature", "one bit of a vote flipped", {**chain, "votes": [flipped, *chain["votes"][1:]]})
    nobody = after(voters=[["nobody", bytes(8)]])
    yield bad("signature", "a peer whose name is no key", {"record": nobody, "ballot": 16, "votes": [["nobody", bytes(8), bytes(64)]]})
    forged = after(epoch=9)
    yield bad("bounds", "a forged roster epoch", certificate(forged, (0, 1, 3)))
    yield bad("bounds", "a record after another one", certificate(after(third, epoch=2), (0, 1, 5)))
    others = after(voters=VOTERS[:3])
    yield bad("bounds", "voters of its own choice", certificate(others, (0, 1, 2)))
    yield bad("bounds", "another model", certificate(after(model=b"\x12" * 32), (0, 1, 3)))
    yield bad("bounds", "layers that move", certificate(after(layers=[4, 4, 5, 3]), (0, 1, 3)))
    yield bad("bounds", "another nonce", certificate(after(nonce=bytes(8)), (0, 1, 3)))
    yield bad("bounds", "another lease", certificate(after(lease_seconds=300), (0, 1, 3)))
    early = after(after(), step=40)
    yield bad("bounds", "back in time", chain, certificate(early, (0, 1, 3)))
    ended = after(dissolved="no spare")
    yield bad("bounds", "a record after the end", certificate(ended, (0, 1, 3)), certificate(after(ended), (0, 1, 3)))
    yield bad("bounds", "a new holder in the old epoch", certificate(after(seats=[*SEATS[:2], [*VOTERS[5], 1], SEATS[3]]), (0, 1, 3)))
    yield bad("bounds", "an old holder two epochs on", certificate(after(seats=[*SEATS[:3], [*VOTERS[3], 3]]), (0, 1, 3)))
    yield bad("bounds", "a vacancy that counts as a holder", certificate(after(seats=[*SEATS[:2], ["", b"", 2], SEATS[3]]), (0, 1, 3)))
    yield bad("bounds", "fewer stages", certificate(after(seats=SEATS[:3], layers=[4, 4, 8]), (0, 1, 3)))
    elsewhere = founding(3)
    yield bad("bounds", "another crew's", certificate(elsewhere, (0, 1, 2, 4)))
    yield {**rejected("schema", "no adoption", pack(VOTE), "crews_adopt"), "given": {"known": ""}}


def streams() -> Iterator[Vector]:
    roster = {"crew": CREW.hex(), "roster_epoch": 2, "stage": 2, "members": PEERS[:4], "stage_epochs": [1, 1, 2, 1]}
    given = {"roster": roster, "peer": PEERS[1]}
    opened = {"crew": CREW, "roster_epoch": 2, "from_stage": 1, "from_epoch": 1, "to_stage": 2, "kind": "frames"}
    for kind in ("frames", "state"):
        message = {**opened, "kind": kind}
        yield {**accepted(f"a stream of {kind}", "stage_stream_open", pack(message), message), "given": given}

    def bad(reason: str, name: str, frame: bytes | None = None, peer: str = PEERS[1], **fields: Any) -> Vector:
        frame = pack({**opened, **fields}) if frame is None else frame
        return {**rejected(reason, name, frame, "stage_stream_open"), "given": {**given, "peer": peer}}

    yield bad("crew", "a stream of another crew", crew=b"\x99" * 32)
    yield bad("crew", "a stream of half a crew", crew=CREW[:16])
    yield bad("roster_epoch", "a stream of the roster before", roster_epoch=1)
    yield bad("roster_epoch", "a stream of the roster after", roster_epoch=3)
    yield bad("stage", "a stream to another stage", to_stage=3)
    yield bad("stage", "a stream from a higher stage", from_stage=3)
    yield bad("stage", "a stream from itself", from_stage=2)
    yield bad("stage", "a stream from stage -1", from_stage=-1)
    yield bad("peer", "a stream of somebody else", peer=PEERS[5])
    yield bad("peer", "a stream in another's place", from_stage=0)
    yield bad("stage_epoch", "a stream of a zombie", from_epoch=0)
    yield bad("stage_epoch", "a stream of a holder that nobody knows", from_epoch=2)
    yield bad("schema", "a stream of gradients", kind="gradients")
    yield bad("schema", "a stream with a password", password="x")
    yield bad("malformed", "a stream opened in another form", frame=pairs(list(reversed(opened.items()))))
    yield bad("oversize", "513 bytes to open a stream", frame=bytes(513))


def derivations() -> Iterator[Vector]:
    for name, record in (("founding", FOUNDING), ("second", after()), ("last", after(dissolved="no spare"))):
        given: dict[str, Any] = {"record": plain(record)}
        yield {"name": f"hash of the {name} record", "derive": "record_hash", "input": given, "output": digest(record).hex()}
    for name, (voter, events) in votes().items():
        given = {"record": plain(FOUNDING), "voter": PEERS[voter], "events": [[kind, plain(message)] for kind, message in events]}
        yield {"name": f"a voter: {name}", "derive": "crew_votes", "input": given, "output": voted(voter, events)}


def votes() -> dict[str, tuple[int, list[tuple[str, dict[str, Any]]]]]:
    """What a voter of the founding record is sent."""
    mine, other = after(), after(seats=[*SEATS[:2], ["", b"", 1], SEATS[3]])
    prepare = lambda ballot, **fields: ("prepare", {**without(PREPARE, "type"), "ballot": ballot, **fields})
    propose = lambda ballot, record=mine: ("propose", {"record": record, "ballot": ballot})
    return {
        "a round": (1, [prepare(16), propose(16), propose(16)]),
        "a higher ballot takes over what was voted for": (1, [prepare(16), propose(16), prepare(33), propose(16, other), propose(33)]),
        "a lower ballot comes late": (1, [prepare(33), prepare(16), propose(16), propose(33)]),
        "two records in one ballot": (1, [propose(16), propose(16, other), propose(32, other)]),
        "another crew, epoch or past": (1, [
            prepare(16, crew=b"\x99" * 32), prepare(16, epoch=1), prepare(16, epoch=3), prepare(16, previous=b"\x99" * 32),
            propose(16, after(epoch=3)), propose(16, after(crew=b"\x99" * 32)),
        ]),
        "a record that may not follow": (1, [prepare(16), propose(16, after(model=b"\x12" * 32)), propose(16, after(voters=VOTERS[:3]))]),
        "a newcomer has no vote": (5, [prepare(16), propose(16)]),
        "a witness has one": (4, [prepare(16), propose(16)]),
    }  # fmt: skip


def voted(voter: int, events: Sequence[tuple[str, dict[str, Any]]]) -> list[list[Any]]:
    """What `roster.Acceptor` answers, in the words of the vectors."""
    acceptor = Acceptor(Voter(PEERS[voter], INCARNATIONS[voter]), lambda data: bytes(64), lambda peer, data, signature: True)
    acceptor.learn((read(certificate(FOUNDING, range(5)), Certificate),))
    answers = []
    for kind, message in events:
        answer = acceptor.prepare(read(message, Prepare)) if kind == "prepare" else acceptor.propose(read(message, Propose))
        match answer:
            case Promise():
                answers.append(["promise", answer.ballot, answer.accepted_ballot, answer.accepted and record_hash(answer.accepted).hex()])
            case Vote():
                answers.append(["vote", answer.ballot, answer.hash.hex()])
            case Refuse():
                answers.append(["refuse", answer.reason, answer.ballot])
            case _:
                answers.append(["adopt"])
    return answers


def circle(roster: dict[str, Any]) -> Circle:
    return Circle(
        bytes.fromhex(roster["crew"]), roster["roster_epoch"], roster["stage"], tuple(roster["members"]), tuple(roster["stage_epochs"]),
    )  # fmt: skip


def read(message: dict[str, Any], kind: Any) -> Any:
    """The struct `kind` of a message without its type."""
    tag = kind.__struct_config__.tag
    return msgspec.msgpack.decode(pack({"type": tag, **message} if tag else message), type=kind)
