"""What is kept between two looks at a crew: which rungs were taken and how long it stood still; and all of it as one view.

Everything else is read from its owner at the moment of asking. Loads neither torch nor libp2p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from swarmnode.observe.snapshot import SlotRow, StagesView
from swarmnode.observe.watch import RECOVERY_BOUNDS, Observations
from swarmnode.stages.events import ControlStatistics
from swarmnode.stages.local import StageStatus
from swarmnode.stages.pipes import PipesStatistics

WAYS = ("in", "out")


class StagesWatch:
    """Follows one node's part in crews. Looked at once a second by the history, and whenever somebody asks."""

    def __init__(self) -> None:
        self._rungs: Counter[str] = Counter()
        self._latest: tuple[bytes, int, str, float] | None = None
        self._recoveries = Observations(RECOVERY_BOUNDS)
        self._running = 0

    def view(
        self,
        control: ControlStatistics,
        status: StageStatus | None,
        pipes: PipesStatistics,
        *,
        layers: Sequence[int] = (),
        reason: str = "",
    ) -> StagesView:
        """`status`: the trainer's last one; `layers`: of the roster, per stage; `reason`: why the last crew was left."""
        self._follow(control, status)
        held = status is not None and control.stage is not None and status.crew.hex() == control.crew and status.stage == control.stage
        own = status if held and status is not None else StageStatus(b"", 0, 0, "idle")
        return StagesView(
            enabled=True,
            state=control.state,
            crew=control.crew,
            roster_epoch=control.roster_epoch,
            fenced=control.fenced,
            slots=[
                SlotRow(s.stage, s.peer, s.state, s.stage_epoch, s.step, layers[s.stage] if s.stage < len(layers) else None)
                for s in control.slots
            ],
            offers=control.offers,
            events=dict(control.notes),
            standing_seconds=control.standing_seconds if control.state != "none" else None,
            last_recovery_seconds=control.recovery_seconds,
            recovery_seconds=self._recoveries.statistics(),
            stage=control.stage,
            phase=own.phase if held else "",
            step=own.step,
            rung=own.rung,
            rungs=dict(self._rungs),
            rung_seconds=own.rung_seconds,
            shadow_step=own.shadow_step,
            shadow_age_steps=_shadow_age(own, len(control.slots)) if held else None,
            probe_kl=own.probe_kl,
            bubble_share=own.bubble_share,
            tokens_per_second=own.tokens_per_second,
            reason=own.reason or reason,
            dropped=dict(own.dropped),
            streams=dict(pipes.open),
            streams_lost=dict(pipes.lost),
            streams_refused=dict(pipes.refused),
            bytes={
                kind: dict(zip(WAYS, (pipes.received.get(kind, 0), pipes.sent.get(kind, 0)), strict=True))
                for kind in sorted(pipes.received.keys() | pipes.sent.keys())
            },
            throttled_seconds=pipes.throttled_seconds,
        )

    def _follow(self, control: ControlStatistics, status: StageStatus | None) -> None:
        """A recovery counts once it is over, and a rung each time that it took its seconds, however often they are mentioned."""
        running = control.notes.get("running", 0)
        if running > self._running and control.recovery_seconds is not None:
            self._recoveries.observe(control.recovery_seconds)
        self._running = running
        if status is None or not status.rung or status.rung_seconds is None:
            return
        taken = (status.crew, status.stage, status.rung, status.rung_seconds)
        if taken != self._latest:
            self._rungs[status.rung] += 1
            self._latest = taken


def _shadow_age(own: StageStatus, stages: int) -> int | None:
    """In a crew of one there is no neighbour to keep a copy."""
    if stages < 2:
        return None
    return own.step if own.shadow_age_steps is None else own.shadow_age_steps
