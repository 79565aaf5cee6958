"""What somebody in no crew of ours can bring about: crews that are none, foundings that never end."""

import hashlib
import random

import msgspec
import pytest

from swarmnode.stages import events as ev
from swarmnode.stages import local
from swarmnode.stages import messages as m
from swarmnode.stages.control import CrewControl
from swarmnode.stages.forming import Forming
from swarmnode.stages.plan import Capacity, ModelCost, Part

MODEL = b"m" * 32
LAYERS = 4
OFFERING = local.Offering(MODEL, Capacity(100.0, 1.0), ModelCost(Part(1, 0), (Part(50.0, 1),) * LAYERS, Part(1, 1)))
SETTINGS = ev.Settings()
STRANGERS = ("y", "z")


def sign_as(peer):
    return lambda data: hashlib.blake2b(data, key=peer.encode(), digest_size=64).digest()


def verify(peer, data, signature):
    return sign_as(peer)(data) == signature


def spare():
    """A node whose trainer waits for a crew."""
    control = CrewControl("me", sign_as("me"), verify, SETTINGS, random.Random(1))
    control.handle(ev.TrainerOffers(OFFERING), 0.0)
    return control


def forged(me, **changes):
    """A lawful certificate of strangers for a crew of theirs in which `me` gets the last stage."""
    voters = tuple(m.Voter(peer, b"i" * 8) for peer in STRANGERS)
    seats = (*(m.Seat(voter.peer, voter.incarnation, 1) for voter in voters), m.Seat(me.peer, me.incarnation, 2))
    record = m.Record(b"c" * 32, 5, b"p" * 32, MODEL, (1, 1, 2), seats, (), voters, 7, 30, bytes(8))
    record = msgspec.structs.replace(record, **changes)
    data = [m.vote_bytes(record.crew, record.epoch, 16, m.record_hash(record), voter.incarnation) for voter in voters]
    votes = tuple(m.Signed(v.peer, v.incarnation, sign_as(v.peer)(d)) for v, d in zip(voters, data, strict=True))
    return m.Adopt((m.Certificate(record, 16, votes),))


def assigned(actions):
    return [a.message for a in actions if isinstance(a, ev.TellTrainer) and isinstance(a.message, local.Assigned)]


@pytest.mark.parametrize("changes", [{"layers": (1, 1, 1)}, {"layers": (2, 2, 1024)}, {"model": b"n" * 32}])
def test_a_spare_takes_no_seat_in_a_crew_of_another_model(changes):
    control = spare()
    actions = control.handle(ev.Received("y", forged(control.acceptor.me, **changes)), 1.0)
    assert assigned(actions) == []
    assert control.roster is None
    assert [type(a.message) for a in actions if isinstance(a, ev.Answer)] == [m.Leave]
    assert assigned(control.handle(ev.Received("y", forged(control.acceptor.me)), 2.0))[0].layers == (1, 1, 2)


def test_nobody_signs_a_founding_record_of_other_layers():
    control = spare()
    me = control.acceptor.me
    seats = (m.Seat("y", b"i" * 8, 1), m.Seat(me.peer, me.incarnation, 1))
    founding = m.Record(m.NO_CREW, 1, m.NO_HASH, MODEL, (2, 3), seats, (), (), 0, 30, bytes(8))
    for layers, answer in (((2, 3), m.Refuse), ((2, 2), m.Vote)):
        record = msgspec.structs.replace(founding, layers=layers)
        record = msgspec.structs.replace(record, voters=m.voters_of(record))
        actions = control.handle(ev.Received("y", m.Propose(record, 0)), 1.0)
        assert [type(a.message) for a in actions if isinstance(a, ev.Answer)] == [answer]


@pytest.mark.parametrize(("memory", "first"), [(160.0, [{"a", "b", "c", "silent"}]), (1e30, [])], ids=["a stage", "everything"])
def test_who_offers_much_and_never_signs_does_not_keep_the_others_from_founding(memory, first):
    forming = Forming("a", SETTINGS, random.Random(1))
    forming.begin(0.0)
    own = m.Offer(MODEL, b"i" * 8, 100.0, 1.0, 0.0)
    now, seated = 0.0, []
    while now < 20.0:
        for peer, offered in (("b", 100.0), ("c", 100.0), ("silent", memory)):
            forming.heard(peer, msgspec.structs.replace(own, memory=offered, speed=offered / 100), now)
        record = forming.propose(own, OFFERING, now)
        if record is not None:
            seated.append({seat.peer for seat in record.seats})
            for voter in record.voters:
                if voter.peer != "silent":
                    data = m.vote_bytes(m.crew_id(record), 1, 0, m.record_hash(record), voter.incarnation)
                    vote = m.Vote(m.NO_CREW, 1, 0, m.record_hash(record), voter.incarnation, sign_as(voter.peer)(data))
                    if forming.voted(voter.peer, vote, verify) is not None:
                        assert seated == [*first, {"a", "b", "c"}]
                        return
        now += 0.5
    pytest.fail(f"nothing was founded: {seated}")
