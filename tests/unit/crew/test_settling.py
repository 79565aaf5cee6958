"""Where a crew goes on after a new roster, and who holds what in the next one."""

import msgspec
import pytest

from swarmnode.crew import messages as m
from swarmnode.crew.events import Settings
from swarmnode.crew.forming import Forming, founding_record
from swarmnode.crew.local import Offering, Settled
from swarmnode.crew.messages import Offer, Seat, Status, Voter
from swarmnode.crew.plan import Capacity, ModelCost, Part, make_plan, stage_memory
from swarmnode.crew.settling import settle
from swarmnode.crew.succession import Facts, next_record

# ---- settling --------------------------------------------------------------------------------------------------------------------


def kept(step, prepared=False):
    return Status("ready", step, prepared, 4, 0.5, 1e-3)


def journal(step, phase="probation"):
    return Status(phase, step, journal=True, attempt=4, clip=0.25)


LOADING, RESTORED = Status("loading"), Status("probation", 3)


@pytest.mark.parametrize(
    ("statuses", "step"),
    [
        ([kept(5), kept(5), kept(5)], 5),
        ([kept(5, True), kept(6), LOADING], 6),  # somebody took it: all who prepared do
        ([kept(5, True), kept(5, True), RESTORED], 5),  # nobody did
        ([kept(5, True), kept(5, True), LOADING], None),  # whoever looks for its journal may know
        ([kept(5, True), kept(5, True), journal(6)], 6),  # it does
        ([kept(5, True), kept(5, True), journal(5)], 5),
        ([kept(5), kept(5, True), LOADING], 5),  # not all had prepared: nobody can have taken it
        ([kept(5), kept(5), journal(6)], 5),  # an end that was decided otherwise meanwhile
        ([journal(5), journal(6), journal(5)], 6),  # everybody restarted
        ([LOADING, journal(6)], None),
        ([RESTORED, RESTORED], 2),  # only what the record knew
        ([kept(5), None], None),
        ([kept(5), Status("absent", 5)], None),
        ([kept(5), Status("claiming", 5)], None),
        ([kept(5), Status("stopping", 5)], None),  # may still take a step
        ([kept(3), kept(6)], 6),  # one that is behind for good is restored
    ],
)
def test_where_the_crew_goes_on(statuses, step):
    settled = settle(9, 2, statuses)
    assert (None if settled is None else settled.step) == step
    assert settled is None or settled.roster_epoch == 9


def test_whoever_missed_the_commit_gets_its_numbers():
    assert settle(2, 0, [kept(5, True), kept(6)]) == Settled(2, 6, 4, 0.5, 1e-3)
    assert settle(2, 0, [kept(5, True), journal(6)]) == Settled(2, 6, 4, 0.25, 0.0)
    assert settle(2, 0, [Status("ready", 3, False, 3, 0.1, 1e-9), kept(6)]) == Settled(2, 6, 4, 0.5, 1e-3)  # of that step, and no other


# ---- the next record -------------------------------------------------------------------------------------------------------------

SETTINGS = Settings()
SECRET = b"i" * 8


def record(stages=3, witnesses=()):
    seats = tuple(Seat(f"p{i}", SECRET, 1) for i in range(stages))
    founding = m.Record(m.NO_CREW, 1, m.NO_HASH, bytes(32), (1,) * stages, seats, witnesses, (), 0, 30, bytes(8))
    return msgspec.structs.replace(founding, voters=m.voters_of(founding))


def offer(memory=10.0, speed=1.0, crew=m.NO_CREW, stage=0):
    return Offer(bytes(32), b"s" * 8, memory, speed, 0.0, crew, stage)


def wished(facts, spares=None, stages=3, **options):
    present = options.pop("present", record(stages))
    facts = {f"p{i}": Facts() for i in range(stages)} | facts
    wish = next_record(present, facts, spares or {}, None, 7, SETTINGS, **options)
    if wish is not None:
        m.check_successor(present, wish.record)
    return wish


def holders(wish):
    return [(seat.peer, seat.stage_epoch) for seat in wish.record.seats]


def test_a_well_crew_stays_as_it_is_whatever_is_offered():
    assert wished({}, {"s": offer()}) is None
    assert wished({"p1": Facts(suspected=True, silent_seconds=5.0)}, {"s": offer()}) is None
    assert wished({"p1": Facts(absent_seconds=5.0)}, {"s": offer()}) is None


def test_who_restarted_gets_its_own_stage_at_once():
    wish = wished({"p1": Facts(claims=b"n" * 8, suspected=True)}, {"s": offer()})
    assert holders(wish) == [("p0", 1), ("p1", 2), ("p2", 1)]
    assert wish.record.seats[1].incarnation == b"n" * 8
    assert wish.evicting == ()
    assert wish.record.step == 7


@pytest.mark.parametrize(
    ("fact", "alone", "with_spare", "evicting"),
    [
        (Facts(suspected=True, gone_seconds=4.0, silent_seconds=4.0), None, ("s", 2), ("p1",)),
        (Facts(suspected=True, silent_seconds=13.0), ("", 1), ("s", 2), ("p1",)),
        (Facts(absent_seconds=20.0), None, ("s", 2), ()),
        (Facts(left=True), ("", 1), ("s", 2), ()),
        (Facts(failed=True), ("", 1), ("s", 2), ()),
    ],
)
def test_who_is_replaced_and_when(fact, alone, with_spare, evicting):
    wish = wished({"p1": fact})
    assert (None if wish is None else holders(wish)[1]) == alone
    wish = wished({"p1": fact}, {"s": offer()})
    assert holders(wish)[1] == with_spare
    assert wish.evicting == evicting


def test_a_vacancy_is_filled_by_whoever_comes_later():
    vacant = wished({"p1": Facts(left=True)}).record
    assert wished({}, present=vacant) is None
    wish = wished({}, {"s": offer()}, present=vacant)
    assert holders(wish) == [("p0", 1), ("s", 2), ("p2", 1)]
    assert wish.evicting == ()


def test_no_source_of_weights_and_nobody_else_ends_the_crew():
    wish = wished({"p1": Facts(failed=True)})
    assert wish.record.dissolved == "no source of weights is left for stage 1"
    assert wished({"p1": Facts(failed=True)}, {"s": offer()}).record.dissolved == ""
    assert wished({}, dissolve="stood still").record.dissolved == "stood still"


def test_broken_streams_of_well_members_make_a_new_roster_of_the_same():
    assert holders(wished({"p1": Facts(broken=True)})) == [("p0", 1), ("p1", 1), ("p2", 1)]
    assert wished({"p1": Facts(broken=True), "p2": Facts(suspected=True)}) is None


def test_spares_that_have_a_copy_go_before_fast_ones_and_small_ones_do_not_go_at_all():
    present = record()
    gone = {"p1": Facts(left=True)}
    spares = {"fast": offer(speed=9.0), "copy": offer(crew=m.crew_id(present), stage=1), "small": offer(memory=0.0, speed=99.0)}
    assert holders(wished(gone, spares))[1][0] == "copy"
    del spares["copy"]
    assert holders(wished(gone, spares))[1][0] == "fast"
    part = Part(4.0, 1.0)
    cost = ModelCost(part, (part,) * 3, part)
    assert [stage_memory(cost, (1, 1, 1), i) for i in range(3)] == [8.0, 4.0, 8.0]
    facts = {"p0": Facts(left=True), "p1": Facts(), "p2": Facts()}
    assert next_record(present, facts, {"s": offer(memory=7.0)}, cost, 0, SETTINGS).record.seats[0].peer == ""
    assert next_record(present, facts, {"s": offer(memory=8.0)}, cost, 0, SETTINGS).record.seats[0].peer == "s"


def test_an_even_crew_keeps_a_witness():
    present = record(2, (Voter("w", SECRET),))
    assert wished({"p0": Facts(broken=True)}, {}, 2, present=present).record.witnesses == (Voter("w", SECRET),)
    assert wished({"p0": Facts(broken=True)}, {"s": offer()}, 2, present=present).record.witnesses == (Voter("w", SECRET),)
    assert wished({"p0": Facts(broken=True)}, {"s": offer()}, 2, present=present, lost={"w"}).record.witnesses == (Voter("s", b"s" * 8),)
    taken = wished({"p0": Facts(left=True)}, {"w": offer()}, 2, present=present)  # the witness takes the vacancy
    assert holders(taken)[0] == ("w", 2)
    assert taken.record.witnesses == ()


# ---- founding --------------------------------------------------------------------------------------------------------------------

PART = Part(4.0, 1.0)
OFFERING = Offering(bytes(32), Capacity(10.0, 1.0), ModelCost(PART, (PART,) * 4, PART))


def test_a_crew_is_planned_from_offers_and_everybody_plans_the_same():
    offers = {name: offer(memory=9.0) for name in "dcba"}
    plans = [founding_record(dict(sorted(offers.items(), reverse=flip)), OFFERING, 0, 30.0) for flip in (False, True)]
    assert plans[0] == plans[1]
    assert plans[0].layers == (1, 2, 1)
    m.check_record(plans[0])
    assert founding_record({"a": offer(memory=9.0)}, OFFERING, 0, 30.0) is None
    assert len(founding_record(offers, OFFERING, 4, 30.0).seats) == 4
    assert founding_record(offers, OFFERING, 5, 30.0) is None
    two = founding_record({name: offer(memory=100.0) for name in "abc"}, OFFERING, 2, 30.0)
    assert [v.peer for v in two.witnesses] == ["c"]
    other = msgspec.structs.replace(offers["a"], model=b"x" * 32)
    assert founding_record({**offers, "a": other}, OFFERING, 4, 30.0) is None


def test_exactly_so_many_stages_are_planned_where_that_is_asked():
    members = [Capacity(100.0, 1.0)] * 4
    for stages in (1, 2, 3, 4):
        assert len(make_plan(OFFERING.cost, members, stages).members) == stages


def test_founders_take_turns_and_sign_for_one_at_a_time():
    import random

    def node(name):
        forming = Forming(name, SETTINGS, random.Random(1))
        forming.begin(0.0)
        for other in "abc":
            if other != name:
                forming.heard(other, offer(memory=9.0), 0.0)
        return forming

    first, second = node("a"), node("b")
    own = offer(memory=9.0)
    assert first.propose(own, OFFERING, SETTINGS.gather_seconds - 0.1) is None
    assert second.propose(own, OFFERING, SETTINGS.gather_seconds) is None  # not its turn
    proposed = first.propose(own, OFFERING, SETTINGS.gather_seconds)
    assert len(proposed.seats) == 3
    assert first.propose(own, OFFERING, SETTINGS.gather_seconds + 0.1) is None  # one at a time
    assert second.may_sign("a", 3.0)
    assert not second.may_sign("c", 3.1)
    assert second.propose(own, OFFERING, 3.2) is None
    assert second.may_sign("c", 3.0 + 2 * SETTINGS.request_seconds)
    alone = Forming("b", SETTINGS, random.Random(1))
    for other in "abc":
        alone.heard(other, offer(memory=9.0), 0.0)
    assert alone.propose(own, OFFERING, 5.9) is None
    for other in "ac":
        alone.heard(other, offer(memory=9.0), 5.9)
    late = SETTINGS.gather_seconds + 2.5 * SETTINGS.request_seconds
    for other in "ac":
        alone.heard(other, offer(memory=9.0), late)
    assert alone.propose(own, OFFERING, late) is not None  # the lowest did nothing
