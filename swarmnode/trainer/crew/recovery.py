"""How this node's stage gets its weights, and what keeps them safe from then on:
`swarmnode.recovery`, wired to the runner.

on disk    <data>/trainer/stage/       our own stage's journal, of each lineage
           <data>/trainer/shadows/     our ring neighbours' stages, and our own; with
           `stages.keep_policy`, all
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
import torch
import trio

from swarmnode.averaging.lora import A_MARK
from swarmnode.config import StagesConfig
from swarmnode.crew.local import Assigned
from swarmnode.crew.record import COPIES, Copy, Where
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.frames import CREW_BYTES, Place
from swarmnode.pipeline.spec import stage_specs
from swarmnode.pipeline.split import tensors_of
from swarmnode.pipeline.worker import StageWorker
from swarmnode.policy.load import lora_settings
from swarmnode.recovery import restore as recovery
from swarmnode.recovery.disk import OnDisk
from swarmnode.recovery.gathering import Begun
from swarmnode.recovery.journal import Journal, find_journals, journal_every, journal_file
from swarmnode.recovery.local import LocalStage
from swarmnode.recovery.restore import Base, Replica, base_adapter, base_stage
from swarmnode.recovery.snapshots import (
    SNAPSHOTS,
    SnapshotRecorder,
    SnapshotStore,
    find_snapshots,
    ring,
)
from swarmnode.recovery.sources import RecoverySettings, Run
from swarmnode.recovery.state import host_copy, stage_layouts, trained
from swarmnode.recovery.transfer import StatePeer
from swarmnode.trainer import state
from swarmnode.trainer.crew.average import StageAveraging
from swarmnode.trainer.crew.model import CrewModel
from swarmnode.trainer.crew.runner import Notify
from swarmnode.trainer.crew.stage import Stage
from swarmnode.trainer.crew.streams import Gate, close_all, connect, connect_all
from swarmnode.weights.layout import Layout

JOURNALS = "stage"
"""Below the trainer's directory: a directory for each lineage."""

log = structlog.get_logger("swarmnode.crew")


class StageRecovery:
    """It keeps its files below the trainer's `directory`. averaging: that of the stage that is
    being restored; asked: called when it seeks a replica, for the network process to be notified;
    more: what else `facts` says of a crew at a step."""

    def __init__(
        self,
        directory: Path,
        settings: RecoverySettings,
        model: CrewModel,
        averaging: Callable[[], StageAveraging | None] = lambda: None,
        asked: Callable[[], None] = lambda: None,
        more: Callable[[int], dict[str, int]] = lambda step: {},
    ) -> None:
        self._averaging = averaging
        self._asked = asked
        self.outer: Mapping[str, torch.Tensor] = {}
        """What averaging kept with the weights that were found (R0, R1); empty where nothing came
        with them."""
        self._model = model
        self._directory = directory
        self._settings = settings
        self._more = more
        self._journal: Journal | None = None
        self._store: SnapshotStore | None = None
        self._layouts: tuple[Layout, ...] = ()
        self._arriving: dict[int, tuple[bytes, Begun]] = {}
        """As `LocalStage.arriving`: the next crew goes on with it."""
        self._recorder: SnapshotRecorder | None = None
        self.peer: StatePeer | None = None
        """Our end of the state streams, while there is a crew."""
        self._holders: tuple[str, ...] = ()
        """Our ring neighbours, when they were last given our state."""

    def copies(self) -> tuple[Copy, ...]:
        """What is on this node's disk: its own stages, and its neighbours'. In a thread."""
        # before the files, since it may be there meanwhile
        coming = self._journal.coming if self._journal is not None else []
        own, kept = (
            find_journals(self._directory / JOURNALS),
            find_snapshots(self._directory / SNAPSHOTS),
        )
        written = {one.lineage for one in coming}
        own = [*coming, *(one for one in own if one.lineage not in written)]
        found = [*(_copy("disk", one) for one in own), *(_copy("neighbour", one) for one in kept)]
        newest = sorted((copy for copy in found if copy.step > 0), key=lambda copy: -copy.step)
        return tuple(newest[: COPIES - 1])  # and one in memory

    def prepare(self, assigned: Assigned) -> None:
        """Opens what this node has on disk of the stage. In a thread. Steps of the stage before
        that were not written are not written now: a slow disk would keep a crew waiting."""
        before = self._journal
        self._recorder = None  # it knows the stage before, and there may be no room for two
        specs = stage_specs(self._model.config, assigned.layers)
        spec = specs[assigned.stage]
        terms = self._model.terms
        lora = lora_settings(self._model.policy) if terms.lora.r else None
        self._layouts = stage_layouts(self._model.config, specs, lora)
        if terms.frozen_a:  # frozen, and everybody derives the same
            self._layouts = tuple(
                tuple(spec for spec in layout if A_MARK not in spec.name)
                for layout in self._layouts
            )
        if before is not None:
            before.leave()
            # as it will be, it is our best source
            if before.writes(journal_file(self._directory / JOURNALS, assigned.lineage)):
                before.ended()
        self._journal = Journal(
            self._directory / JOURNALS,
            assigned.lineage,
            spec,
            journal_every(self._layouts),
            after=before,
        )
        kept = (
            range(spec.stages)
            if self._settings.keep_policy
            else (spec.index, *ring(spec.index, spec.stages))
        )
        self._arriving = {i: begun for i, begun in self._arriving.items() if i in kept}
        whose = state.owner(self._model.text.fingerprint, terms.lora.r, terms.frozen_a)
        about = {"layers": assigned.layers, "owner": whose}
        self._store = SnapshotStore(
            self._directory / SNAPSHOTS,
            assigned.lineage,
            {i: self._layouts[i] for i in kept},
            about,
        )

    def built(self, stage: Stage) -> None:
        """A stage with the base model's weights is there."""
        self.outer = {}
        averaging = self._averaging()
        outer = averaging.tensors if averaging is not None else dict
        self._recorder = SnapshotRecorder(
            stage.runtime.spec, self._settings, self._journal, self._store, outer
        )
        stage.observers.append(self._recorder)

    @contextlib.asynccontextmanager
    async def open(self, assigned: Assigned, stage: Stage) -> AsyncIterator[None]:
        """While it is open, others' stages can be asked and are answered. Raises PeerError."""
        assert self._recorder is not None
        place = Place(assigned.crew[:CREW_BYTES], assigned.stage, assigned.step)
        averaging = self._averaging()
        # what lies here is as good while the crew is suspended
        streams = await connect_all(assigned, "state", Gate())
        again = partial(connect, assigned, kind="state")
        try:
            local = LocalStage(
                stage.runtime,
                stage.runtime.spec,
                self._model.limits(),
                self._layouts,
                self._settings,
                self._model.terms.codec,
                self._recorder,
                self._store,
                base=None if self._model.terms.lora.r else tensors_of(self._model.directory),
                arriving=self._arriving,
            )
            self.peer = peer = StatePeer(
                local, Fence(place, len(assigned.layers)), streams, stage.meter, again
            )
            self._recorder.sharing = peer.sharing
            async with trio.open_nursery() as nursery:
                await nursery.start(peer.run)
                if averaging is not None:
                    averaging.probe.open(peer)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self.peer = self._recorder.sharing = None
            if averaging is not None:
                averaging.probe.close()
            with trio.CancelScope(shield=True):
                await close_all(streams)

    async def restore(
        self, stage: Stage, assigned: Assigned, notify: Notify
    ) -> tuple[str, float | None]:
        """Fill `stage`: (source, KL of the probe). Raises Refused where no source is left,
        PeerError where somebody is lost meanwhile."""
        assert self.peer is not None
        averaging = self._averaging()
        met = averaging is not None and averaging.met()
        restored = await recovery.restore(
            self.peer,
            step=assigned.step,
            hash=assigned.hash,
            run=self._model.run,
            journal=self._journal,
            base=self._base(stage),
            replica=partial(self._replica, stage, averaging)
            if averaging is not None and met
            else None,
            notify=lambda phase, kind: notify(phase, f"R{int(kind)}"),
        )
        self._arriving.pop(assigned.stage, None)
        restored.install(stage.worker)
        self.outer = restored.kept.outer
        for kind, why in restored.tried:
            log.info("source not taken", rung=f"R{int(kind)}", reason=why)
        log.info(
            "weights are back",
            rung=f"R{int(restored.kind)}",
            step=assigned.step,
            source_step=restored.step,
        )
        return (
            f"R{int(restored.kind)}",
            restored.verdict.kl if restored.verdict is not None else None,
        )

    def _base(self, stage: Stage) -> Base | None:
        """R3. To be called before anything is restored."""
        if self._model.terms.lora.r > 0:
            return base_adapter(stage.runtime)
        if self._model.pretrained:  # of a run from scratch it is worth nothing
            return base_stage(
                self._model.directory, stage.runtime.spec, self._model.text.fingerprint
            )
        return None

    async def _replica(self, stage: Stage, averaging: StageAveraging) -> Replica:
        """R1. Raises PeerError."""
        averaging.seek()
        self._asked()
        phi, outer = await averaging.fetch()
        # what is not averaged stays
        spec, weights = (
            stage.runtime.spec,
            {n: host_copy(t) for n, t in trained(stage.runtime).items()},
        )
        weights |= {
            name: tensor for whole, tensor in phi.items() if (name := spec.local(whole)) is not None
        }
        return Replica(weights, outer=outer)

    def attach(self, assigned: Assigned, worker: StageWorker) -> None:
        """The stage is in order; `worker` has not begun."""
        assert self.peer is not None
        self.peer.attach(worker)
        holders = tuple(assigned.members[i] for i in ring(assigned.stage, len(assigned.layers)))
        lacking = holders != self._holders or (
            self._store is not None and self._store.get(assigned.stage) is None
        )
        # the base is on every disk
        if lacking and assigned.step > 0 and self._settings.keeps_copies(worker.runtime.spec):
            # a neighbour that is new has none of ours, and the next comes in many steps
            self.peer.sharing.snapshot_of(worker)
        self._holders = holders

    def progress(self) -> int:
        """Grows while weights arrive: a stage that is being restored over a slow link, or from a
        slow disk, is no stage that is stuck."""
        averaging = self._averaging()
        waits = int(time.monotonic()) if self._journal is not None and self._journal.leaving else 0
        return (
            waits
            + (self.peer.channel.progress if self.peer is not None else 0)
            + (averaging.arrived if averaging is not None else 0)
        )

    def facts(self, step: int) -> dict[str, int]:
        """Fields of StageStatus about copies: shadow_step, shadow_age_steps, and `more`."""
        kept = dict(self.peer.sharing.stored) if self.peer is not None else {}
        # its loss would cost all steps; in a crew of one nobody is there to keep a copy
        if not kept:
            return (
                {"shadow_age_steps": step, **self._more(step)}
                if self._holders
                else self._more(step)
            )
        newest = max(kept.values())
        return {
            "shadow_step": newest,
            "shadow_age_steps": max(0, step - newest),
            **self._more(step),
        }

    def refused(self) -> dict[str, int]:
        """What others sent on state streams that is not what it has to be, and what they asked for
        and did not get, by reason."""
        return dict(self.peer.channel.refused) if self.peer is not None else {}

    def forget(self) -> None:
        """The stage in memory is none any more."""
        if self._journal is not None:
            self._journal.forget()

    def close(self) -> None:
        """Writes the last step of our stage: the trainer ends."""
        if self._journal is not None:
            self._journal.finish()
            self._journal = None


def _copy(where: Where, found: OnDisk) -> Copy:
    return Copy(
        found.lineage, found.first, found.last, found.step, found.hash, where, found.taken, b""
    )


def recovery_settings(cfg: StagesConfig, run: Run) -> RecoverySettings:
    """Where no stage is ever made of its neighbours' layers, nobody is given any."""
    settings = RecoverySettings(
        cfg.shadow_every, cfg.keep_policy in ("disk", "both"), mode=cfg.paper_mode
    )
    return replace(settings, synthesis="none") if run.pretrained or run.adapter else settings
