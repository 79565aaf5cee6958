"""What a stage in good order has others keep, and what is kept here of theirs: snapshots, an end's
copy, probes. Torch.

Nobody is sent any of it unasked. A stage says that there is a new one, and whoever keeps it fetches
it, of each stage and kind one after the other; what is superseded before it was fetched is left
out.
"""

from __future__ import annotations

import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.pipeline import faults
from swarmnode.pipeline.worker import StageWorker
from swarmnode.recovery import messages as m
from swarmnode.recovery.channel import LATER_SECONDS, Channel
from swarmnode.recovery.fetching import Fetcher
from swarmnode.recovery.local import LocalStage
from swarmnode.recovery.serving import Rations
from swarmnode.recovery.snapshots import Copied, SnapshotStore, copy_stage, form_of, ring
from swarmnode.recovery.state import encode_state


class Sharing:
    def __init__(self, channel: Channel, stage: LocalStage, fetch: Fetcher) -> None:
        self.stored: dict[int, int] = {}
        """Stage → committed steps in our snapshot there."""
        self._channel = channel
        self._stage = stage
        self._fetch = fetch
        self._news: dict[tuple[int, m.Given], bool] = {}
        """(stage, what) that is being fetched → whether there is a newer one."""
        self._rations = Rations()
        """What is announced again and again is not written to our disk again and again."""
        self._room = trio.Lock()
        """There is memory for one snapshot at a time of the stages that are no neighbours."""

    # Ours.

    def snapshot(self, copied: Copied) -> None:
        """Stores it, and says so, in the background."""
        if (store := self._stage.store) is not None:
            self._channel.spawn(lambda: self._store(copied, store))

    def snapshot_of(self, worker: StageWorker) -> None:
        """Likewise of the weights as they are, which are copied in the background too."""
        if (store := self._stage.store) is not None:
            self._channel.spawn(lambda: self._copy(worker, store))

    def announce(self, what: m.Given) -> None:
        for stage in self._channel.streams:
            self._channel.send(stage, m.Made(self._channel.place, 0, what))

    def kept(self, stage: int, message: m.Kept) -> None:
        """Our snapshot is stored there."""
        self.stored[stage] = max(message.step, self.stored.get(stage, 0))

    async def _copy(self, worker: StageWorker, store: SnapshotStore) -> None:
        try:
            async with worker.optimizer.moving:  # never in the middle of a step
                copied = await self._channel.compute(
                    lambda: copy_stage(worker, self._stage.settings)
                )
        except (RuntimeError, MemoryError) as error:
            if not faults.of_device(error):
                raise
            self._channel.refused["failed"] += 1
        else:
            await self._store(copied, store)

    async def _store(self, copied: Copied, store: SnapshotStore) -> None:
        own, state = self._stage.spec.index, copied.state
        layout = self._stage.layouts[own]
        form = form_of(layout, self._stage.settings)

        def put() -> bool:
            body = encode_state(state, layout, form) if copied.body is None else copied.body
            have = m.Have(
                self._channel.place,
                0,
                "shadow",
                state.step,
                len(body),
                m.root_of(body),
                state.hash,
                form,
                state.squared_norm,
                state.factor,
            )
            return store.put(own, have, body)

        try:
            stored = await self._channel.compute(put)
        except (BadMessage, OSError):
            self._channel.refused["failed"] += 1
            return
        if stored:
            self.announce("shadow")

    # Others'.

    def made(self, stage: int, made: m.Made) -> None:
        """It has a new one, which is fetched if it is to be kept here."""
        key = stage, made.what
        if not self._keeps(*key):
            return
        begun = key in self._news
        self._news[key] = True
        if not begun:
            self._channel.spawn(lambda: self._follow(*key))

    def _keeps(self, stage: int, what: m.Given) -> bool:
        own, stages = self._stage.spec.index, self._stage.spec.stages
        if what == "shadow":
            return self._stage.store is not None and stage in self._stage.store.stages
        if what == "ends":
            return (stage, own) in ((0, 1), (stages - 1, stages - 2))
        return stage == stages - 1 and stage in ring(own, stages)

    async def _follow(self, stage: int, what: m.Given) -> None:
        key = stage, what
        while self._news[key]:
            self._news[key] = False
            if not self._rations.take(stage, what, stage, self._channel.step):
                self._channel.refused["repeated"] += 1
            elif what != "shadow":
                await self._take(stage, what)
            elif stage in ring(self._stage.spec.index, self._stage.spec.stages):
                await self._keep(stage)
            else:
                async with self._room:
                    await self._keep(stage)
        del self._news[key]

    async def _keep(self, stage: int) -> None:
        """Stores the snapshot that `stage` has."""
        store = self._stage.store
        assert store is not None
        try:
            have, body = await self._fetch.theirs(stage)
        except PeerError:
            return  # the next one will be announced as well
        try:
            if await self._channel.compute(lambda: store.put(stage, have, body)):
                self._channel.send(stage, m.Kept(self._channel.place, 0, have.step))
        except BadMessage as error:
            self._channel.refuse(stage, error)
        except OSError:
            self._channel.refused["failed"] += 1

    async def _take(self, stage: int, what: m.Given) -> None:
        recorder = self._stage.recorder
        try:
            have, body = await self._fetch.given(stage, what, stage, LATER_SECONDS)
        except PeerError:
            return  # the next one will be announced as well
        try:
            if what == "ends":
                recorder.ends[stage] = have.step, self._stage.read_ends(stage, body)
            else:
                recorder.probes[:] = self._stage.read_probes(body)
        except BadMessage as error:
            self._channel.refuse(stage, error)
