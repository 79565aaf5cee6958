"""Control messages: one encoding each, every value checked before anybody acts on it."""

import msgspec
import pytest

from swarmnode.crew import messages as m
from swarmnode.errors import BadMessage

INCARNATION, CREW, HASH, SIGNATURE = b"i" * 8, b"c" * 32, b"h" * 32, b"s" * 64


def record(**changes):
    seats = tuple(m.Seat(name, INCARNATION, 1) for name in ("12D3KooWa", "12D3KooWb"))
    founding = m.Record(m.NO_CREW, 1, m.NO_HASH, HASH, (3, 2), seats, (m.Voter("12D3KooWw", INCARNATION),), (), 0, 30, bytes(8))
    return msgspec.structs.replace(founding, **{"voters": m.voters_of(founding), **changes})


def chain(*records):
    return m.Adopt(tuple(m.Certificate(r, 16, (m.Signed("12D3KooWa", INCARNATION, SIGNATURE),)) for r in records))


later = record(crew=CREW, epoch=2, previous=HASH)
REQUESTS = [
    m.Offer(HASH, INCARNATION, 1e9, 2e12, 0.01, CREW, 1, 7),
    m.Prepare(CREW, 2, HASH, 17, ("12D3KooWb",)),
    m.Propose(record(), 0),
    chain(record(), later),
    m.Heartbeat(CREW, 2, 5, m.Status("active", 4, True, 3, 0.5, 1e-4, 9, 1, True, True, 12)),
    m.Leave(CREW, 2, "asked to"),
]
ANSWERS = [
    m.Promise(CREW, 2, 17), m.Promise(CREW, 2, 17, 16, later), m.Vote(CREW, 2, 17, HASH, INCARNATION, SIGNATURE),
    m.Refuse("alive", 3, INCARNATION), chain(later), m.Alive(CREW, 2, 5, m.Status()), m.Leave(CREW, 2), m.Noted(),
]  # fmt: skip


def test_every_message_comes_back_as_it_was_and_in_one_encoding():
    for messages, decode in ((REQUESTS, m.decode_request), (ANSWERS, m.decode_answer)):
        for message in messages:
            data = m.encode_message(message)
            assert len(data) <= m.MESSAGE_BYTES
            assert decode(data) == message
            values = msgspec.msgpack.decode(data)
            shuffled = {key: values[key] for key in ("type", *reversed([key for key in values if key != "type"]))}
            if list(shuffled) != list(values):
                with pytest.raises(BadMessage, match="malformed"):
                    decode(msgspec.msgpack.encode(shuffled))


def test_an_answer_is_no_request_and_rubbish_is_neither():
    with pytest.raises(BadMessage, match="schema"):
        m.decode_request(m.encode_message(ANSWERS[1]))
    with pytest.raises(BadMessage, match="schema"):
        m.decode_answer(m.encode_message(REQUESTS[0]))
    for data in (b"", b"\xc1", b"\x81", m.encode_message(ANSWERS[0])[:-1]):
        with pytest.raises(BadMessage):
            m.decode_request(data)
    with pytest.raises(BadMessage, match="oversize"):
        m.decode_request(bytes(m.MESSAGE_BYTES + 1))


def test_the_largest_chain_fits():
    seats = tuple(m.Seat(f"{i:064d}", INCARNATION, 2**62) for i in range(m.MEMBERS))
    big = record(seats=seats, layers=(m.LAYERS,) * m.MEMBERS, witnesses=(m.Voter("w" * 64, INCARNATION),), dissolved="x" * m.REASON_BYTES)
    big = msgspec.structs.replace(big, voters=m.voters_of(big))
    votes = tuple(m.Signed(v.peer, v.incarnation, SIGNATURE) for v in big.voters)
    records = [big] + [msgspec.structs.replace(big, epoch=e, crew=CREW, previous=HASH) for e in range(2, m.CHAIN + 1)]
    data = m.encode_message(m.Adopt(tuple(m.Certificate(r, 2**62, votes) for r in records)))
    assert len(data) < m.MESSAGE_BYTES
    assert len(m.decode_request(data).certificates) == m.CHAIN


replace = msgspec.structs.replace


def named(**changes):
    """A founding record like `record`'s, whose voters are those that it names."""
    made = record(**changes)
    return replace(made, voters=m.voters_of(made))


def adopted(peer="12D3KooWa", votes=1, ballot=16):
    return m.Adopt((m.Certificate(record(), ballot, (m.Signed(peer, INCARNATION, SIGNATURE),) * votes),))


def test_what_the_bad_ones_are_made_of_is_good():
    for good in (m.Propose(named(), 0), m.Propose(named(seats=(m.Seat("x", INCARNATION, 1),), layers=(5,)), 0), adopted()):
        m.check_message(good)


@pytest.mark.parametrize(
    "bad",
    [
        replace(REQUESTS[0], model=b"short"), replace(REQUESTS[0], incarnation=b""), replace(REQUESTS[0], memory=float("nan")),
        replace(REQUESTS[0], speed=-1.0), replace(REQUESTS[0], hop_seconds=float("inf")), replace(REQUESTS[0], step=-1),
        replace(REQUESTS[1], previous=b""), replace(REQUESTS[1], ballot=-1), replace(REQUESTS[1], evicting=("x",) * 9),
        replace(REQUESTS[1], evicting=("no spaces",)), replace(REQUESTS[1], crew=b"c" * 16),
        m.Propose(record(epoch=0), 0), m.Propose(record(epoch=2), 0), m.Propose(record(previous=HASH), 0),
        m.Propose(record(layers=(3,)), 0),
        m.Propose(record(layers=(3, 0)), 0), m.Propose(record(seats=()), 0), m.Propose(record(nonce=b""), 0),
        m.Propose(record(seats=(m.Seat("x", INCARNATION, 1),) * 2), 0), m.Propose(record(seats=(m.Seat("", INCARNATION, 1),) * 2), 0),
        m.Propose(record(witnesses=(m.Voter("w", INCARNATION), m.Voter("v", INCARNATION))), 0), m.Propose(record(voters=()), 0),
        m.Propose(record(dissolved="\n"), 0), m.Propose(record(dissolved="x" * 129), 0), m.Propose(record(step=-1), 0),
        m.Propose(record(epoch=0, crew=CREW, previous=HASH), 0), m.Propose(named(witnesses=(m.Voter("w", INCARNATION),) * 2), 0),
        m.Propose(named(witnesses=(m.Voter("w", INCARNATION), m.Voter("v", INCARNATION))), 0),
        m.Propose(named(witnesses=(m.Voter("no spaces", INCARNATION),)), 0), m.Propose(named(witnesses=(m.Voter("w", b"i"),)), 0),
        m.Propose(named(seats=(m.Seat("x", INCARNATION, 1),) * 2), 0), m.Propose(named(seats=(), layers=()), 0),
        m.Propose(named(seats=tuple(m.Seat(str(i), INCARNATION, 1) for i in range(m.MEMBERS + 1)), layers=(1,) * (m.MEMBERS + 1)), 0),
        m.Propose(named(seats=(m.Seat("a", INCARNATION, 1), m.Seat("b" * 65, INCARNATION, 1))), 0),
        adopted(peer="no spaces"), adopted(votes=m.VOTERS + 1), adopted(ballot=-1),
        m.Adopt(()), chain(*[record()] * 9), chain(later, record()), chain(later, later),
        replace(REQUESTS[4], status=m.Status(clip=float("nan"))), replace(REQUESTS[4], status=m.Status(learning_rate=-1.0)),
        replace(REQUESTS[4], status=m.Status(clip=1.5)),
        replace(REQUESTS[4], status=m.Status(step=2**63)), replace(REQUESTS[4], sequence=-1), replace(REQUESTS[5], reason="é"),
    ],
)  # fmt: skip
def test_values_out_of_bounds_are_refused(bad):
    with pytest.raises(BadMessage):
        m.check_message(bad)
    data = m.encode_message(bad)
    with pytest.raises(BadMessage):
        m.decode_request(data)


VOTE, REFUSE = ANSWERS[2:4]


@pytest.mark.parametrize(
    "bad",
    [
        replace(VOTE, signature=b""), replace(VOTE, hash=b""), replace(REFUSE, incarnation=b""),
        m.Promise(CREW, 2, 17, 16, replace(later, layers=(0, 5))),
    ],
)  # fmt: skip
def test_answers_out_of_bounds_are_refused(bad):
    with pytest.raises(BadMessage):
        m.decode_answer(m.encode_message(bad))


def test_a_crew_is_named_by_its_founding_record_and_by_nothing_less():
    founding = record()
    assert m.crew_id(founding) == m.record_hash(founding)
    assert m.crew_id(later) == CREW
    assert m.crew_id(record(nonce=b"n" * 8)) != m.crew_id(founding)
    assert [v.peer for v in m.voters_of(founding)] == ["12D3KooWa", "12D3KooWb", "12D3KooWw"]
    assert (m.needed_votes(founding), m.needed_votes(later)) == (3, 2)
