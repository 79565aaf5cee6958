"""What a member makes of what it hears: who is well, who is absent since when, who claims what, and when steps can be taken."""

import msgspec
import pytest

from swarmnode.crew import messages as m
from swarmnode.crew.detector import Detector
from swarmnode.crew.messages import Offer, Seat, Status
from swarmnode.crew.view import View

LIFE = b"i" * 8


def record(stages=3, epoch=1, **changes):
    seats = tuple(Seat(f"p{i}", LIFE, 1) for i in range(stages))
    made = m.Record(m.NO_CREW, 1, m.NO_HASH, bytes(32), (1,) * stages, seats, (), (), 4, 30, bytes(8))
    return msgspec.structs.replace(made, voters=m.voters_of(made), **({"epoch": epoch, "crew": b"c" * 32} if epoch > 1 else {}) | changes)


def view_of(now=0.0, **changes):
    detector = Detector(1.0, 0.5)
    view = View(record(**changes), m.Voter("p0", LIFE))
    detector.watch(view.others, now)
    return view, detector


def everybody(view, phase="active", step=5, **changes):
    for peer in view.seated:
        view.take(peer, Status(phase, step, version=9, **changes), 0.0)


def facts(view, detector, peer, now, gone=None, offers=None):
    return view.facts(detector, gone or {}, offers or {}, now)[peer]


def offer(incarnation):
    return Offer(bytes(32), incarnation, 10.0, 1.0, 0.0)


def test_what_was_overtaken_on_its_way_is_no_news():
    view, _ = view_of()
    assert view.take("p1", Status("ready", 5, version=3), 0.0)
    assert not view.take("p1", Status("ready", 5, version=3), 1.0)
    assert not view.take("p1", Status("loading", 0, version=2), 1.0)
    assert view.statuses["p1"].phase == "ready"
    assert view.take("p1", Status("active", 5, version=4), 1.0)


def test_since_when_somebody_has_had_no_trainer_is_kept_over_a_new_record_and_ends_with_a_trainer():
    view, detector = view_of()
    for now, version in ((10.0, 1), (12.0, 2)):
        view.take("p1", Status("absent", version=version), now)
    view.forgot("p2", 15.0)
    assert [facts(view, detector, peer, 20.0).absent_seconds for peer in view.seated] == [0.0, 10.0, 5.0]
    following = View(record(epoch=2), m.Voter("p0", LIFE), view)
    assert facts(following, detector, "p1", 30.0).absent_seconds == 20.0
    following.take("p1", Status("loading", version=3), 30.0)
    assert facts(following, detector, "p1", 31.0).absent_seconds == 0.0
    without = View(record(epoch=2, seats=(Seat("p0", LIFE, 1), Seat("", b"", 1), Seat("p2", LIFE, 1))), m.Voter("p0", LIFE), view)
    assert without._absent.keys() == {"p2"}  # who is no member is forgotten


def test_who_has_forgotten_the_crew_proposes_nothing_until_it_is_heard_again():
    view, detector = view_of()
    second = View(view.record, m.Voter("p1", LIFE))
    assert (second.place(detector), view.place(detector)) == (1, 0)
    second.take("p0", Status("active", version=1), 0.0)
    second.forgot("p0", 1.0)
    assert second.statuses == {}
    assert second.place(detector) == 0
    second.take("p0", Status("claiming", version=2), 2.0)
    assert second.place(detector) == 1
    second.left.add("p0")
    assert second.place(detector) == 0
    assert View(view.record, m.Voter("p1", b"another!")).place(detector) is None
    detector.watch(["p0"], 0.0)
    detector.broke("p0")
    assert View(view.record, m.Voter("p1", LIFE)).place(detector) == 0


def test_what_is_said_of_a_seat_becomes_what_is_to_be_done_about_it():
    view, detector = view_of()
    assert facts(view, detector, "p1", 1.0).claims == b""
    assert facts(view, detector, "p1", 1.0, offers={"p1": offer(LIFE)}).claims == b""  # said before it had the seat
    assert facts(view, detector, "p1", 1.0, offers={"p1": offer(b"j" * 8)}).claims == b"j" * 8
    for version, (phase, broken) in enumerate((("claiming", False), ("failed", False), ("active", True))):
        view.take("p1", Status(phase, version=version, broken=broken), 1.0)
        known = facts(view, detector, "p1", 1.0)
        assert (known.claims, known.failed, known.broken) == (LIFE if phase == "claiming" else b"", phase == "failed", broken)
    view.left.add("p2")
    assert [facts(view, detector, peer, 1.0).left for peer in view.seated] == [False, False, True]
    assert facts(view, detector, "p1", 9.0, gone={"p1": 2.0}).gone_seconds == 0.0  # it was heard since
    detector.broke("p1")
    assert facts(view, detector, "p1", 9.0, gone={"p1": 2.0}).gone_seconds == 7.0
    assert facts(view, detector, "p1", 9.0).suspected
    assert facts(view, detector, "p1", 9.0).silent_seconds == 9.0


def settled_view(**changes):
    view, detector = view_of(**changes)
    everybody(view, "ready")
    assert view.settle().step == 5
    everybody(view)
    return view, detector


@pytest.mark.parametrize(
    "spoil",
    [
        lambda view, detector: view.left.add("p2"),
        lambda view, detector: view.statuses.pop("p2"),
        lambda view, detector: view.take("p2", Status("probation", 5, version=10), 0.0),
        lambda view, detector: view.take("p2", Status("active", 4, version=10), 0.0),
        lambda view, detector: view.take("p2", Status("active", 5, version=10, broken=True), 0.0),
        lambda view, detector: detector.broke("p2"),
    ],
    ids=["left", "unheard", "probation", "behind", "broken", "suspected"],
)
def test_steps_are_taken_while_every_stage_is_well(spoil):
    view, detector = settled_view()
    assert view.is_well(detector)
    spoil(view, detector)
    assert not view.is_well(detector)


def test_nothing_is_well_before_it_is_known_where_the_crew_stands_or_with_a_vacancy():
    view, detector = view_of()
    everybody(view)
    assert not view.is_well(detector)
    assert view.steps_of_all == 4  # the record's
    assert view.settle() is not None
    assert view.settle() is None  # said once
    assert view.is_well(detector)
    view.take("p1", Status("active", 7, version=10), 0.0)
    assert view.steps_of_all == 5
    everybody(view, step=8)
    assert view.steps_of_all == 7  # p1's older word does not count any more than the newest that it said

    vacant = View(record(epoch=2, seats=(Seat("p0", LIFE, 1), Seat("", b"", 1), Seat("p2", LIFE, 1))), m.Voter("p0", LIFE))
    everybody(vacant, "ready")
    assert vacant.settle() is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda view, detector: view.left.add("p2"),
        lambda view, detector: view.forgot("p2", 0.0),
        lambda view, detector: view.statuses.pop("p2"),
        lambda view, detector: view.take("p2", Status("probation", 5, version=10), 0.0),
        lambda view, detector: detector.broke("p2"),
    ],
    ids=["left", "stranger", "unheard", "probation", "suspected"],
)
def test_a_witness_goes_from_a_crew_in_which_every_stage_works(spoil):
    view, detector = settled_view()
    assert view.is_calm(detector)
    spoil(view, detector)
    assert not view.is_calm(detector)
    vacant, detector = view_of(epoch=2, seats=(Seat("p0", LIFE, 1), Seat("", b"", 1), Seat("p2", LIFE, 1)))
    everybody(vacant)
    assert not vacant.is_calm(detector)


def test_a_witness_is_lacked_by_an_even_number_of_stages_of_which_nobody_votes_any_more():
    witness = (m.Voter("w", LIFE),)

    def lacks(now=0.0, gone=(), strange=(), broken=(), **changes):
        view, detector = view_of(**changes)
        view.left.update(gone)
        for peer in strange:
            view.forgot(peer, now)
        for peer in broken:
            detector.broke(peer)
        return view.lacks_witness(detector, 13.0, now)

    assert (lacks(stages=2), lacks(stages=3)) == (True, False)
    assert not lacks(stages=2, witnesses=witness)
    assert lacks(stages=2, witnesses=witness, gone=("w",))
    assert lacks(stages=2, witnesses=witness, strange=("w",))
    assert not lacks(stages=2, witnesses=witness, gone=("p1",))
    assert [lacks(now, stages=2, witnesses=witness, broken=("w",)) for now in (12.9, 13.0)] == [False, True]
    assert not lacks(13.0, stages=2, witnesses=witness)  # it is not suspected


def test_whoever_is_heard_well_is_not_to_be_evicted():
    view, detector = view_of()
    assert view.hears("p1", detector, 3.0, 2.9)
    assert not view.hears("p1", detector, 3.0, 3.0)
    assert not view.hears("stranger", detector, 3.0, 0.0)
    detector.broke("p1")
    assert not view.hears("p1", detector, 3.0, 0.1)


def test_slots_are_told_apart_for_people():
    seats = (*(Seat(f"p{i}", LIFE, 1) for i in range(7)), Seat("", b"", 3))
    view, detector = view_of(stages=8, seats=seats, epoch=2)
    for number, phase in enumerate(("active", "ready", "loading", "probation", "failed", "active")):
        view.take(f"p{number}", Status(phase, number, version=1), 0.0)
    view.left.add("p5")
    detector.broke("p1")
    states = [slot.state for slot in view.slots(detector)]
    assert states == ["active", "suspect", "loading", "probation", "suspect", "draining", "claimed", "vacant"]
    assert [slot.step for slot in view.slots(detector)] == [0, 1, 2, 3, 4, 5, 0, 0]
    assert view.why_standing(detector, 61.0) == "stood still for 61 s: stage 1 suspect, stage 2 loading, stage 3 probation"
    calm, detector = settled_view()
    assert calm.why_standing(detector, 3.0) == "stood still for 3 s: streams"
