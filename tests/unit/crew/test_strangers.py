"""What somebody in no crew of ours can bring about: crews that are none, foundings that never end."""

import hashlib
import random

import msgspec
import pytest

from swarmnode.crew import events as ev
from swarmnode.crew import forming as forming_module
from swarmnode.crew import local
from swarmnode.crew import messages as m
from swarmnode.crew.backoff import LONGEST_SECONDS, PEERS, PeerBackoff
from swarmnode.crew.control import CrewControl
from swarmnode.crew.forming import Forming
from swarmnode.crew.plan import Capacity, ModelCost, Part

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


def forged(me, strangers=STRANGERS, **changes):
    """A lawful certificate of strangers for a crew of theirs in which `me` gets the last stage."""
    voters = tuple(m.Voter(peer, b"i" * 8) for peer in strangers)
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


class Others:
    """The rest of a crew of strangers in which a spare sits: they answer every heartbeat, and say what `phase` they are in."""

    def __init__(self, control, now=1.0, strangers=STRANGERS, crew=b"c" * 32):
        self.control, self.now, self.strangers, self.crew = control, now, strangers, crew
        self.released = []
        self.assigned = assigned(self.hear(ev.Received(strangers[0], forged(control.acceptor.me, strangers, crew=crew))))
        self.version = 0

    def hear(self, event):
        actions = self.control.handle(event, self.now)
        for action in actions:
            if isinstance(action, ev.TellTrainer) and isinstance(action.message, local.Released):
                self.released.append((self.now, action.message.reason))
            if isinstance(action, ev.Send) and isinstance(action.message, m.Heartbeat):
                answer = m.Alive(self.crew, 5, action.message.sequence, m.Status())
                self.control.handle(ev.Answered(action.peer, action.message, answer), self.now)
        return actions

    def say(self, phase, step=7, progress=0):
        """The others and our trainer are in this phase."""
        self.version += 1
        for peer in self.strangers:
            status = m.Status("ready" if phase == "probation" else phase, step, version=self.version)
            self.hear(ev.Received(peer, m.Heartbeat(self.crew, 5, self.version, status)))
        self.hear(ev.TrainerStatus(local.StageStatus(self.crew, 5, 2, phase, step=step, progress=progress)))

    def run(self, seconds, **said):
        for phase in ("probation", "active"):
            self.say(phase)
        end = self.now + seconds
        while self.now < end and self.control.roster is not None:
            self.now += 1.0
            self.say("active", **said)
            self.hear(ev.Tick())


def test_strangers_who_seat_a_spare_again_and_again_get_it_seldom():
    control, now, seated, seats = spare(), 1.0, 0.0, 0
    while now < 3600.0:
        names = (f"y{now}", f"z{now}")  # keys cost nothing
        control.handle(ev.Tick(), now)
        if control.roster is None and assigned(
            control.handle(ev.Received(names[0], forged(control.acceptor.me, names, crew=repr(now).encode().ljust(32))), now)
        ):
            seats += 1
        seated += control.roster is not None
        now += 1.0
    assert 2 <= seats <= 6
    assert seated < 0.25 * 3600


def test_who_has_taken_steps_with_us_does_not_wait_for_what_strangers_did():
    patience = PeerBackoff(100.0)
    patience.took_a_step(("a", "b"))
    for _ in range(3):
        patience.never_ran(("y", "b"), 0.0)
    assert [patience.waits(peer, 200.0) for peer in "abyz"] == [False, True, True, True]
    assert [patience.waits(peer, 301.0) for peer in "byz"] == [False, False, False]
    patience.never_ran(("y",), 1000.0)
    assert patience.waits("z", 1699.0)
    patience.took_a_step(("a",))
    assert [patience.waits(peer, 1699.0) for peer in "ayz"] == [False, True, False]
    for number in range(3 * PEERS):
        patience.never_ran((f"s{number}", "y"), 1000.0)
        patience.took_a_step((f"t{number}",))
    assert patience.waits("y", 1000.0 + LONGEST_SECONDS - 1)
    assert not patience.waits("y", 1000.0 + LONGEST_SECONDS)
    assert len(patience._strikes) == len(patience._worked) == PEERS


def test_a_step_with_somebody_makes_up_for_what_it_signed_and_is_remembered_longest_of_whom_it_was_last_with():
    patience = PeerBackoff(100.0)
    for _ in range(3):
        patience.never_ran(("a", "b"), 0.0)
    patience.took_a_step(("a",))
    assert [patience.waits(peer, 1.0) for peer in "ab"] == [False, True]
    for number in range(PEERS - 1):
        patience.took_a_step((f"t{number}",))
    patience.took_a_step(("a",))
    patience.took_a_step(("one more",))
    for _ in range(2):
        patience.never_ran((), 0.0)
    assert [patience.waits(peer, 1.0) for peer in ("a", "t0", "t1", "one more")] == [False, True, False, False]
    patience.never_ran(("old",), 0.0)
    patience.never_ran(("old",), 0.0)
    for number in range(PEERS - 1):
        patience.never_ran((f"s{number}",), 0.0)
    patience.never_ran(("old",), 0.0)
    patience.never_ran(("new",), 0.0)
    assert "old" in patience._strikes
    assert "s0" not in patience._strikes


@pytest.mark.parametrize(("said", "left"), [({}, True), ({"progress": 1}, False), ({"step": 8}, False)], ids=["nothing", "work", "a step"])
def test_a_crew_that_runs_and_has_nothing_to_do_is_left(said, left):
    others = Others(spare())
    assert others.assigned
    others.run(2 * SETTINGS.idle_seconds, **said)
    assert others.control.statistics().notes["running"] == 1
    assert bool(others.released) == left
    if left:
        assert SETTINGS.idle_seconds - 5 < others.released[0][0] < SETTINGS.idle_seconds + 10
        assert others.released[0][1] == "the crew has nothing to do"


def test_a_crew_that_took_a_step_is_forgiven_and_one_that_did_not_is_not_joined_for_a_while():
    def over(others):
        others.control.handle(ev.Received("y", m.Leave(others.crew, 5)), others.now)
        others.control.handle(ev.Received("z", m.Leave(others.crew, 5)), others.now)
        assert others.control.roster is None

    for step, seats in ((8, 4), (7, 2)):
        control, now, got = spare(), 1.0, 0
        for number in range(4):
            others = Others(control, now, crew=bytes([number + 1]) * 32)
            got += len(others.assigned)
            if others.assigned:
                others.run(5.0, step=step)
                over(others)
            now = others.now + 1.0
        assert got == seats


def test_no_founding_record_of_those_is_signed_and_nothing_is_offered_to_them():
    control = spare()
    control.handle(ev.PeerBack("y"), 0.5)
    for number in range(2):
        others = Others(control, 1.0 + number, crew=bytes([number + 1]) * 32)
        control.handle(ev.Received("y", m.Leave(others.crew, 5)), 1.0 + number)
        control.handle(ev.Received("z", m.Leave(others.crew, 5)), 1.0 + number)
    me = control.acceptor.me
    seats = (m.Seat("y", b"i" * 8, 1), m.Seat(me.peer, me.incarnation, 1))
    record = m.Record(m.NO_CREW, 1, m.NO_HASH, MODEL, (2, 2), seats, (), (), 0, 30, bytes(8))
    record = msgspec.structs.replace(record, voters=m.voters_of(record))
    late = 10.0 + SETTINGS.wait_seconds
    for now, answer, offers in ((10.0, m.Refuse("record"), 0), (late, None, 1)):
        actions = control.handle(ev.Received("y", m.Propose(record, 0)), now)
        assert answer in (None, next(a.message for a in actions if isinstance(a, ev.Answer)))
        sent = [a for a in control.handle(ev.Tick(), now) if isinstance(a, ev.Send) and isinstance(a.message, m.Offer)]
        assert [a.peer for a in sent] == ["y"] * offers


def test_a_trainer_with_another_model_gets_no_stage_of_the_crew_that_is_remembered():
    control = spare()
    memory = next(a.memory for a in control.handle(ev.Received("y", forged(control.acceptor.me)), 1.0) if isinstance(a, ev.Persist))
    for model, cost, stays in ((MODEL, OFFERING.cost, True), (b"n" * 32, OFFERING.cost, False)):
        again = CrewControl("me", sign_as("me"), verify, SETTINGS, random.Random(2), memory)
        again.handle(ev.Tick(), 0.0)
        assert again.roster is not None
        actions = again.handle(ev.TrainerOffers(local.Offering(model, OFFERING.capacity, cost)), 1.0)
        assert assigned(actions) == []
        assert (again.roster is not None) == stays
        assert bool([a for a in actions if isinstance(a, ev.Send) and isinstance(a.message, m.Leave)]) != stays
        again.handle(ev.Received("y", forged(again.acceptor.me, epoch=6)), 2.0)
        assert (again.roster is not None) == stays


def offered(actions):
    return [a.peer for a in actions if isinstance(a, ev.Send) and isinstance(a.message, m.Offer)]


def test_an_offer_is_said_at_once_and_then_seldom():
    control = CrewControl("me", sign_as("me"), verify, SETTINGS, random.Random(1))
    control.handle(ev.PeerBack("a"), 0.0)
    said = [(0.1, peer) for peer in offered(control.handle(ev.TrainerOffers(OFFERING), 0.1))]
    said += [(0.2, peer) for peer in offered(control.handle(ev.PeerBack("b"), 0.2))]
    said += [(0.3, peer) for peer in offered(control.handle(ev.TrainerOffers(OFFERING, fresh=False), 0.3))]
    more = msgspec.structs.replace(OFFERING, capacity=Capacity(90.0, 1.0))
    said += [(0.4, peer) for peer in offered(control.handle(ev.TrainerOffers(more, fresh=False), 0.4))]
    assert said == [(0.1, "a"), (0.2, "b"), (0.4, "a"), (0.4, "b")]
    times = [tick / 2 for tick in range(1, 81) for peer in offered(control.handle(ev.Tick(), tick / 2)) if peer == "a"]
    assert times == [10.5, 20.5, 30.5] or times == [10.0, 20.0, 30.0, 40.0]


def test_an_offer_that_was_not_heard_is_repeated_a_few_times_and_one_to_a_foreign_peer_is_not():
    control = CrewControl("me", sign_as("me"), verify, SETTINGS, random.Random(1))
    for peer in ("far", "foreign", "well"):
        control.handle(ev.PeerBack(peer), 0.0)
    offer = next(a.message for a in control.handle(ev.TrainerOffers(OFFERING), 0.0) if isinstance(a, ev.Send))
    count = dict.fromkeys(("far", "foreign", "well"), 0)
    now = 0.0
    answers = {"far": (None, False), "foreign": (None, True), "well": (m.Noted(), False)}
    control.handle(ev.Answered("well", offer, m.Noted()), now)
    control.handle(ev.Answered("far", offer, None), now)
    control.handle(ev.Answered("foreign", offer, None, True), now)
    while now < 100.0:
        now += 0.5
        for peer in offered(control.handle(ev.Tick(), now)):
            count[peer] += 1
            answer, foreign = answers[peer]
            control.handle(ev.Answered(peer, offer, answer, foreign), now)
    assert count["foreign"] == 0
    assert count["well"] in (9, 10)
    assert count["far"] <= 4 * count["well"] + 3
    assert count["far"] > 3 * count["well"]
    actions = control.handle(ev.Received("foreign", msgspec.structs.replace(offer, incarnation=b"j" * 8)), now)
    assert offered(actions) == ["foreign"]  # it does now


def test_offers_that_change_all_the_time_force_no_more_plans(monkeypatch):
    plans = []
    make = forming_module.make_plan
    monkeypatch.setattr(forming_module, "make_plan", lambda *args: plans.append(1) or make(*args))
    forming = Forming("z", SETTINGS, random.Random(1))
    forming.begin(0.0)
    own, now = m.Offer(MODEL, b"i" * 8, 60.0, 1.0, 0.0), 0.0
    while now < 60.0:
        now += 0.1
        for peer in "abc":
            forming.heard(peer, msgspec.structs.replace(own, speed=1.0 + now), now)
        forming.propose(own, OFFERING, now)
    assert 5 < len(plans) <= 60 / SETTINGS.plan_seconds + 1


def test_everybody_who_will_not_sign_is_left_out_of_the_next_plan():
    forming = Forming("a", SETTINGS, random.Random(1))
    forming.begin(0.0)
    own = m.Offer(MODEL, b"i" * 8, 100.0, 1.0, 0.0)
    now, records = 0.0, []
    while now < 20.0 and len(records) < 2:
        for peer in ("b", "c", "d", "e") if now == 0.0 else ("d", "e"):  # b and c are in a crew by now, and offer nothing
            forming.heard(peer, own, now)
        record = forming.propose(own, OFFERING, now)
        if record is not None:
            records.append({seat.peer for seat in record.seats})
            for peer in records[-1] & {"b", "c"}:
                forming.refused(peer, record, "record", now)
        now += 0.5
    assert records[0] & {"b", "c"}
    assert not records[1] & {"b", "c"}
    assert now < 12.0


def test_an_offer_is_taken_back_by_whoever_has_a_seat_or_no_trainer_and_counts_no_more():
    taken = [lambda control: ev.Received("y", forged(control.acceptor.me)), lambda _: ev.TrainerLeft(), lambda _: ev.Drain("stops")]
    for event in taken:
        control = CrewControl("me", sign_as("me"), verify, SETTINGS, random.Random(1))
        control.handle(ev.PeerBack("a"), 0.0)
        first = next(a.message for a in control.handle(ev.TrainerOffers(OFFERING), 0.0) if isinstance(a, ev.Send))
        sent = [a for a in control.handle(event(control), 1.0) if isinstance(a, ev.Send) and isinstance(a.message, m.Offer)]
        assert [(a.peer, a.message.speed) for a in sent] == [("a", 0.0)]
        forming = Forming("a", SETTINGS, random.Random(1))
        forming.heard("me", first, 0.0)
        assert list(forming.offers(1.0)) == ["me"]
        forming.heard("me", sent[0].message, 1.0)
        assert list(forming.offers(1.0)) == []
