"""From a crew's statistics to the view that metrics, the page and health see."""

from __future__ import annotations

from msgspec.structs import replace

from swarmnode.observe.stages import StagesWatch
from swarmnode.stages.events import ControlStatistics, SlotStatistics
from swarmnode.stages.local import StageStatus
from swarmnode.stages.pipes import PipesStatistics

CREW = b"\x07" * 32
SLOTS = tuple(SlotStatistics(stage, f"peer{stage}", 0, "active", 40) for stage in range(3))
CONTROL = ControlStatistics(
    state="running", crew=CREW.hex(), roster_epoch=2, stage=1, slots=SLOTS, fenced=False, offers=1, notes={"running": 1},
    standing_seconds=0.0, recovery_seconds=None,
)  # fmt: skip
STATUS = StageStatus(CREW, 2, 1, "active", step=40, shadow_step=20, shadow_age_steps=20, dropped={"stage_epoch": 3})
PIPES = PipesStatistics(
    open={"frames": 2, "state": 0}, waiting=0, parked=0, opened={"frames": 3}, lost={"frames": 1}, refused={"peer": 2},
    sent={"frames": 10}, received={"frames": 7, "state": 5}, throttled_seconds=0.5,
)  # fmt: skip


def test_a_crew_is_seen_as_it_is() -> None:
    view = StagesWatch().view(CONTROL, STATUS, PIPES, layers=(4, 6, 6))
    assert [(slot.stage, slot.peer, slot.state, slot.layers) for slot in view.slots] == [
        (0, "peer0", "active", 4), (1, "peer1", "active", 6), (2, "peer2", "active", 6),
    ]  # fmt: skip
    assert (view.stage, view.phase, view.step, view.shadow_age_steps, view.dropped) == (1, "active", 40, 20, {"stage_epoch": 3})
    assert view.bytes == {"frames": {"in": 7, "out": 10}, "state": {"in": 5, "out": 0}}
    assert view.rungs == {}
    assert view.recovery_seconds is not None
    assert sum(view.recovery_seconds.counts) == 0


def test_a_status_of_another_crew_or_stage_is_not_ours() -> None:
    for status in (None, replace(STATUS, crew=b"\x08" * 32), replace(STATUS, stage=2)):
        view = StagesWatch().view(CONTROL, status, PIPES)
        assert (view.phase, view.step, view.shadow_age_steps, view.dropped) == ("", 0, None, {})


def test_without_a_shadow_every_step_would_be_lost_but_a_crew_of_one_has_nobody_to_keep_one() -> None:
    bare = replace(STATUS, shadow_step=None, shadow_age_steps=None)
    assert StagesWatch().view(CONTROL, bare, PIPES).shadow_age_steps == 40
    alone = replace(CONTROL, slots=SLOTS[:1], stage=0)
    assert StagesWatch().view(alone, replace(bare, stage=0), PIPES).shadow_age_steps is None


def test_a_rung_counts_once_each_time_it_was_taken() -> None:
    watch = StagesWatch()
    taken = replace(STATUS, rung="R2", rung_seconds=2.5)
    said = [
        STATUS, replace(STATUS, rung="R2"), taken, taken, replace(taken, roster_epoch=3, phase="probation"), None, taken,
        replace(taken, rung="R3", rung_seconds=4.0), replace(taken, rung_seconds=1.0),
    ]  # fmt: skip
    for status in said:
        view = watch.view(CONTROL, status, PIPES)
    assert view.rungs == {"R2": 2, "R3": 1}


def test_a_recovery_counts_once_it_is_over() -> None:
    watch = StagesWatch()
    for notes, seconds in (({"running": 1}, None), ({"running": 1, "paused": 1}, None), ({"running": 2}, 6.0), ({"running": 2}, 6.0)):
        view = watch.view(replace(CONTROL, notes=notes, recovery_seconds=seconds), STATUS, PIPES)
    assert view.recovery_seconds is not None
    assert (sum(view.recovery_seconds.counts), view.recovery_seconds.sum, view.last_recovery_seconds) == (1, 6.0, 6.0)


def test_outside_a_crew_nothing_stands_still() -> None:
    out = ControlStatistics("none", "", 0, None, (), False, 2, {}, 0.0, None)
    view = StagesWatch().view(out, None, PIPES, reason="dissolved: no spare")
    assert (view.enabled, view.state, view.standing_seconds, view.offers, view.reason) == (True, "none", None, 2, "dissolved: no spare")
