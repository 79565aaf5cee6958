"""A crew's statistics as one view of it, for metrics, the page and health. Loads neither torch nor libp2p."""

from __future__ import annotations

from swarmnode.crew.local import StageStatus
from swarmnode.crew.service import BOUNDS, StagesStatistics
from swarmnode.observe.snapshot import SlotRow, StagesView
from swarmnode.observe.watch import Histogram

WAYS = ("in", "out")
NOTHING = StageStatus(b"", 0, "loading")


def stages_view(s: StagesStatistics) -> StagesView:
    """Not `enabled` while this node's trainer holds its policy alone."""
    control, pipes, own = s.control, s.streams, s.own
    held = own is not None and control.stage is not None and (own.crew.hex(), own.stage) == (control.crew, control.stage)
    stage = own if held and own is not None else NOTHING
    return StagesView(
        enabled=s.enabled and (s.trainer or control.crew != ""),
        state=control.state,
        crew=control.crew,
        slots=[
            SlotRow(slot.stage, slot.peer, slot.state, slot.step, s.layers[slot.stage] if s.layers else None)
            for slot in control.slots
        ],
        offers=control.offers,
        events=dict(s.notes),
        standing_seconds=control.standing_seconds if control.state != "none" else None,
        last_recovery_seconds=control.recovery_seconds,
        recovery_seconds=Histogram(BOUNDS, s.recovery_counts, s.recovery_seconds_total),
        heartbeat_seconds=s.heartbeat_seconds,
        unanswered=dict(s.unanswered),
        malformed=s.malformed,
        trainer_restarts=s.trainer_restarts,
        stage=control.stage,
        phase=stage.phase if held and s.trainer else "",
        step=stage.step,
        rung=stage.rung,
        rungs=dict(s.rungs),
        rung_seconds=stage.rung_seconds,
        shadow_step=stage.shadow_step,
        shadow_age_steps=_shadow_age(stage, len(control.slots)) if held else None,
        probe_kl=stage.probe_kl,
        bubble_share=stage.bubble_share,
        tokens_per_second=stage.tokens_per_second,
        reason=stage.reason or s.last_reason,
        dropped=dict(stage.dropped),
        streams=dict(pipes.open),
        streams_lost=dict(pipes.lost),
        streams_refused=dict(pipes.refused),
        bytes={
            kind: dict(zip(WAYS, (pipes.received.get(kind, 0), pipes.sent.get(kind, 0)), strict=True))
            for kind in sorted(pipes.received.keys() | pipes.sent.keys())
        },
        throttled_seconds=pipes.throttled_seconds,
    )


def _shadow_age(stage: StageStatus, stages: int) -> int | None:
    """Without a shadow, all its steps. In a crew of one there is no neighbour to keep one."""
    if stages < 2:
        return None
    return stage.step if stage.shadow_age_steps is None else stage.shadow_age_steps
