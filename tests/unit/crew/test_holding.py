"""What a node tells its crew of its own trainer: nothing of another roster, nothing too early, and never more than is held."""

import msgspec
import pytest

from swarmnode.crew import events as ev
from swarmnode.crew import local
from swarmnode.crew import messages as m
from swarmnode.crew.holding import VERSION_BITS, Holding
from swarmnode.crew.messages import Seat, Status
from swarmnode.crew.plan import Capacity, ModelCost, Part
from swarmnode.crew.view import View

LIFE, CREW = b"i" * 8, b"c" * 32
ME = m.Voter("p1", LIFE)
COST = ModelCost(Part(1, 1), (Part(1, 1),) * 3, Part(1, 1))
OFFERING = local.Offering(bytes(32), Capacity(10.0, 2.0, 0.5), COST)


def view_of(epoch=5, stage_epoch=2, step=4, layers=(1, 2)):
    seats = (Seat("p0", LIFE, 1), Seat("p1", LIFE, stage_epoch))
    return View(m.Record(CREW, epoch, b"p" * 32, bytes(32), layers, seats, (), (), step, 30, bytes(8)), ME)


def said(phase, step=4, epoch=5, stage=1, crew=CREW, **more):
    return local.StageStatus(crew, epoch, stage, phase, step, **more)


def seated(view=None):
    """Its trainer is there and restores a stage."""
    holding = Holding(4.0)
    holding.came(ev.TrainerOffers(OFFERING), None)
    holding.set(holding.under(view or view_of())[0])
    return holding


def test_what_is_said_later_has_a_higher_number_over_restarts_too():
    holding = Holding(4.0)
    holding.begin(3)
    numbers = [holding.set(Status()).version for _ in range(3)]
    holding.begin(4)
    numbers.append(holding.set(Status("ready", 7)).version)
    assert numbers == [(3 << VERSION_BITS) + 1, (3 << VERSION_BITS) + 2, (3 << VERSION_BITS) + 3, (4 << VERSION_BITS) + 1]
    assert (holding.status.phase, holding.status.step) == ("ready", 7)


def test_a_trainer_process_that_is_new_claims_its_stage_until_a_record_gives_it_another_stage_epoch():
    view, holding = view_of(), seated()
    holding.said(said("ready"), view)
    assert holding.holds
    assert holding.came(ev.TrainerOffers(OFFERING), view) == Status("claiming")
    assert not holding.holds
    assert holding.under(view_of(epoch=6)) == (Status("claiming"), None)  # made before the claim was heard
    status, assigned = holding.under(view_of(epoch=7, stage_epoch=3, step=6))
    assert status == Status("loading")
    assert assigned == local.Assigned(CREW, 7, 1, (1, 3), (1, 2), ("p0", "p1"), 6, False, False, "")
    holding.set(holding.said(said("probation", 6, epoch=7), view_of(epoch=7, stage_epoch=3, step=6)))
    assert holding.under(view_of(epoch=8, stage_epoch=3))[0] == Status("loading")  # of what was not held nothing is said
    assert holding.under(view_of(epoch=6))[0].phase == "loading"  # claimed no more


def test_one_that_only_lost_its_connection_stops_and_holds_what_it_held():
    view, holding = view_of(), seated()
    holding.set(holding.said(said("ready", 5), view))
    back = holding.came(ev.TrainerOffers(OFFERING, fresh=False), view)
    assert (back.phase, back.step, back.broken) == ("stopping", 5, True)
    status, assigned = holding.under(view_of(epoch=6))
    assert (status.phase, status.step, assigned.held, assigned.founding) == ("stopping", 5, True, False)


def test_one_that_may_have_no_seat_here_says_nothing_to_the_crew():
    holding = Holding(4.0)
    assert holding.under(view_of()) == (Status("absent"), None)
    other = msgspec.structs.replace(OFFERING, model=b"x" * 32)
    assert holding.came(ev.TrainerOffers(OFFERING), None) is None
    assert holding.came(ev.TrainerOffers(OFFERING), View(view_of().record, m.Voter("w", LIFE))) is None
    assert holding.came(ev.TrainerOffers(other), view_of()) is None
    assert holding.under(view_of()) == (Status("absent"), None)
    assert [holding.knows(view_of(layers=layers).record) for layers in ((1, 2), (1, 1))] == [False, False]
    holding.came(ev.TrainerOffers(OFFERING), None)
    assert [holding.knows(view_of(layers=layers).record) for layers in ((1, 2), (1, 1))] == [True, False]


def test_a_trainer_that_is_gone_is_absent_where_it_stood_and_speaks_no_more():
    view, holding = view_of(), seated()
    holding.set(holding.said(said("ready", 5), view))
    gone = holding.left()
    assert gone == Status("absent", step=5)
    assert holding.said(said("ready", 6), view) is None
    holding.set(gone)
    holding.came(ev.TrainerOffers(OFFERING, fresh=False), None)
    assert holding.said(said("ready", 6), view) is None  # of before it went
    holding.release()
    assert (holding.holds, holding.status) == (False, Status())


@pytest.mark.parametrize(
    "changes", [{"crew": b"x" * 32}, {"epoch": 4}, {"stage": 0}, {"phase": "idle"}], ids=["crew", "roster", "stage", "idle"]
)
def test_reports_of_another_roster_are_none(changes):
    view, holding = view_of(), seated()
    assert holding.said(said("ready"), view) is not None
    assert holding.said(said(**{"phase": "ready", **changes}), view) is None
    assert holding.said(said("ready"), None) is None


def test_nobody_is_active_before_it_is_known_where_the_crew_stands():
    view, holding = view_of(), seated()
    assert holding.said(said("active", 9), view).phase == "probation"
    assert not holding.holds
    holding.said(said("ready", 9), view)
    holding.said(said("active", 9), view)
    assert holding.holds
    view.settled = local.Settled(5, 5)
    assert [holding.said(said("active", step), view).phase for step in (4, 5)] == ["probation", "active"]
    assert holding.holds
    holding.set(Status("stopping"))
    assert [holding.said(said(phase, 5), view) for phase in ("active", "probation")] == [None, None]  # it has not heard of this roster yet
    assert holding.said(said("ready", 5), view).phase == "ready"
    for phase in ("loading", "failed"):
        holding.said(said("ready", 5), view)
        holding.said(said(phase, 5), view)
        assert not holding.holds


def test_a_report_is_passed_on_with_what_the_others_need():
    view, holding = view_of(), seated()
    holding.set(Status("loading", broken=True))
    more = {"prepared": True, "attempt": 3, "clip": 0.5, "learning_rate": 1e-3, "progress": 8, "load": 2, "rung": "R0"}
    assert holding.said(said("probation", 4, **more), view) == Status("probation", 4, True, 3, 0.5, 1e-3, 8, 2, journal=True, broken=True)
    assert not holding.said(said("ready", 4, **more), view).journal
    assert not holding.said(said("probation", 4, **more | {"rung": "R2"}), view).journal


def test_everybody_begins_with_the_base_model_under_the_founding_record_and_never_again():
    for stage_epoch, step, founding in ((1, 0, True), (2, 0, False), (1, 3, False)):
        view = view_of(stage_epoch=stage_epoch, step=step)
        holding = seated(view)
        assert holding.under(view)[1].founding == founding
        holding.said(said("ready", step), view)
        assert not holding.under(view)[1].founding
    assert holding.offer(b"j" * 8) == m.Offer(bytes(32), b"j" * 8, 10.0, 2.0, 0.5, m.NO_CREW, 0, 0)
