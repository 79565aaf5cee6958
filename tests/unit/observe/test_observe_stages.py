"""From a crew's statistics to the view that metrics, the page and health see."""

from __future__ import annotations

from msgspec.structs import replace

from swarmnode.crew.control import ControlStatistics, SlotStatistics
from swarmnode.crew.local import StageStatus
from swarmnode.crew.service import BOUNDS, StagesStatistics
from swarmnode.crew.stream_proxy import StreamProxyStatistics
from swarmnode.link.messages import Report
from swarmnode.observe.health import policy_loaded
from swarmnode.observe.snapshot import StagesView
from swarmnode.observe.stages import stages_view

CREW = b"\x07" * 32
SLOTS = tuple(SlotStatistics(stage, f"peer{stage}", "active", 40) for stage in range(3))
CONTROL = ControlStatistics(
    state="running", crew=CREW.hex(), lineage="11" * 32, stage=1, slots=SLOTS, offers=1, standing_seconds=0.0, recovery_seconds=None,
)  # fmt: skip
STATUS = StageStatus(CREW, 1, "active", step=40, shadow_step=20, shadow_age_steps=20, dropped={"crew": 3})
PIPES = StreamProxyStatistics(
    open={"frames": 2, "state": 0}, waiting=0, parked=0, opened={"frames": 3}, lost={"frames": 1}, refused={"peer": 2},
    sent={"frames": 10}, received={"frames": 7, "state": 5}, throttled_seconds=0.5,
)  # fmt: skip
PLANE = StagesStatistics(
    enabled=True, control=CONTROL, notes={"running": 1, "refuted": 2}, layers=(4, 6, 6), own=STATUS, trainer=True, recoveries=2,
    recovery_seconds_total=9.0, recovery_counts=(1, 0, 1, *[0] * (len(BOUNDS) - 2)), rungs={"R2": 1}, last_reason="",
    heartbeat_seconds=0.01,
    unanswered={"heartbeat": 2}, malformed=1, trainer_restarts=0, streams=PIPES,
)  # fmt: skip


def test_a_crew_is_seen_as_it_is() -> None:
    view = stages_view(PLANE)
    assert [(slot.stage, slot.peer, slot.state, slot.layers) for slot in view.slots] == [
        (0, "peer0", "active", 4), (1, "peer1", "active", 6), (2, "peer2", "active", 6),
    ]  # fmt: skip
    assert (view.enabled, view.stage, view.phase, view.step, view.shadow_age_steps) == (True, 1, "active", 40, 20)
    assert (view.dropped, view.events["refuted"], view.rungs, view.unanswered) == ({"crew": 3}, 2, {"R2": 1}, {"heartbeat": 2})
    assert view.bytes == {"frames": {"in": 7, "out": 10}, "state": {"in": 5, "out": 0}}
    assert view.recovery_seconds is not None
    assert (view.recovery_seconds.bounds, sum(view.recovery_seconds.counts), view.recovery_seconds.sum) == (BOUNDS, 2, 9.0)


def test_a_status_of_another_crew_or_stage_is_not_ours() -> None:
    for status in (None, replace(STATUS, crew=b"\x08" * 32), replace(STATUS, stage=2)):
        view = stages_view(replace(PLANE, own=status))
        assert (view.phase, view.step, view.shadow_age_steps, view.dropped) == ("", 0, None, {})


def test_without_a_shadow_every_step_would_be_lost_but_a_crew_of_one_has_nobody_to_keep_one() -> None:
    bare = replace(STATUS, shadow_step=None, shadow_age_steps=None)
    assert stages_view(replace(PLANE, own=bare)).shadow_age_steps == 40
    alone = replace(PLANE, control=replace(CONTROL, slots=SLOTS[:1], stage=0), own=replace(bare, stage=0))
    assert stages_view(alone).shadow_age_steps is None


def test_a_node_that_holds_its_policy_alone_has_nothing_to_show_and_one_that_waits_has() -> None:
    out = ControlStatistics("none", "", "", None, (), 2, 0.0, None)
    waiting = stages_view(replace(PLANE, control=out, own=None, layers=(), last_reason="stage 2 was vacant for 120 s"))
    assert (waiting.enabled, waiting.state, waiting.standing_seconds, waiting.offers) == (True, "none", None, 2)
    assert waiting.reason == "stage 2 was vacant for 120 s"
    assert not stages_view(replace(PLANE, control=out, own=None, trainer=False)).enabled
    assert stages_view(replace(PLANE, trainer=False)).enabled  # its trainer restarts, the crew is there
    assert not stages_view(replace(PLANE, enabled=False)).enabled


def test_a_member_that_trains_nothing_itself_has_the_policy_once_its_stage_is_there() -> None:
    view = stages_view(PLANE)
    assert policy_loaded(None, view)  # only the head reports
    for phase in ("active", "probation"):
        assert policy_loaded(None, replace(view, phase=phase))
    killed = stages_view(replace(PLANE, trainer=False))
    assert (killed.enabled, killed.stage, killed.phase, killed.step) == (True, 1, "", 40)
    assert not policy_loaded(None, killed)
    assert not policy_loaded(Report(phase="generating"), replace(view, phase="loading"))
    assert not policy_loaded(Report(phase="generating"), replace(view, stage=None, phase=""))  # it was a head, and its crew is gone
    alone = StagesView()
    assert policy_loaded(Report(phase="generating"), alone)
    assert not policy_loaded(Report(phase="loading"), alone)
    assert not policy_loaded(None, alone)
