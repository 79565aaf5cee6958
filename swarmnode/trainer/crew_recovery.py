"""How this node's stage gets its weights, and what keeps them safe from then on: `stages.recovery`, wired to the seat.

    on disk    <data>/trainer/stage/       our own stage's journal          <data>/trainer/shadows/    neighbours' stages
"""

from __future__ import annotations

from typing import Any

import trio

from swarmnode.config import Config
from swarmnode.errors import StateError
from swarmnode.stages.local import Assigned, Settled
from swarmnode.stages.recovery.journal import Journal
from swarmnode.stages.recovery.ladder import RecoverySettings
from swarmnode.stages.recovery.shadows import Shadowing
from swarmnode.stages.recovery.state import load_moments, load_weights
from swarmnode.stages.spec import StageSpec, stage_specs
from swarmnode.trainer.crew_model import CrewModel
from swarmnode.trainer.crew_seat import Restored
from swarmnode.trainer.crew_stage import Stage
from swarmnode.trainer.crew_streams import Gate


class StageRecovery:
    """`crew_seat.Recovery` of this node."""

    def __init__(self, config: Config, model: CrewModel) -> None:
        self._config = config
        self._model = model
        self._directory = config.node.data_dir / "trainer"
        self._settings = recovery_settings(config)
        self._journal: Journal | None = None
        self._shadowing: Shadowing | None = None

    def journal(self, assigned: Assigned) -> int | None:
        spec = self._spec(assigned)
        if self._journal is not None:
            self._journal.close()
        self._journal = Journal(self._directory / "stage", assigned.crew, spec)
        return self._journal.step

    async def restore(self, assigned: Assigned, stage: Stage, settled: Settled, gate: Gate) -> Restored:
        journal = self._journal
        assert journal is not None
        restored = Restored("" if assigned.founding else "R3")
        if journal.step is not None and journal.step <= settled.step:
            try:
                kept = await trio.to_thread.run_sync(journal.read)
                load_weights(stage.runtime, kept.state.weights)
                load_moments(stage.member, kept.state)
                stage.member.pace, stage.member.squared_norm = kept.pace, kept.state.squared_norm
                restored = Restored("R0")
            except StateError:
                pass
        self._shadowing = Shadowing(stage.runtime.spec, self._settings, journal)
        stage.observers.append(self._shadowing)
        return restored

    async def serve(self, assigned: Assigned, stage: Stage, gate: Gate) -> None:
        await trio.sleep_forever()

    def facts(self) -> dict[str, Any]:
        return {}

    def forget(self) -> None:
        self._shadowing = None

    def close(self) -> None:
        """Writes what is pending."""
        if self._journal is not None:
            self._journal.close()

    def _spec(self, assigned: Assigned) -> StageSpec:
        return stage_specs(self._model.config, assigned.layers)[assigned.stage]


def recovery_settings(config: Config) -> RecoverySettings:
    cfg = config.stages
    return RecoverySettings(shadow_every=cfg.shadow_every, synthesis=cfg.synthesis, paper=cfg.paper_mode)
