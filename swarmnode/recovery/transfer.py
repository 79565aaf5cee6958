"""A member's end of the state streams: what a lost stage fetches, what a stage in good order shares
and serves. Torch.

shared    snapshots with both ring neighbours, and whoever keeps the whole policy; the tail's probes
with its own; in paper mode embedding
          and head with the second and last but one
served    snapshots, the stage's layers and ω, a tied embedding, copies of an end, probes,
activations, and running a micro-batch
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import trio

from swarmnode.pipeline.compute import Compute, in_thread
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.worker import StageWorker
from swarmnode.recovery.channel import Channel
from swarmnode.recovery.fetching import Fetcher
from swarmnode.recovery.local import LocalStage
from swarmnode.recovery.serving import Server
from swarmnode.recovery.sharing import Sharing


class StatePeer:
    """streams: stage → stream; again: as of `Channel`. `attach` the worker once it runs; until then
    `stage.phase` says what its weights are worth."""

    def __init__(
        self,
        stage: LocalStage,
        fence: Fence,
        streams: Mapping[int, trio.abc.Stream],
        compute: Compute = in_thread,
        again: Callable[[int], Awaitable[trio.abc.Stream]] | None = None,
    ) -> None:
        settings = stage.settings
        step = lambda: (
            stage.worker.participant.step if stage.worker is not None else fence.place.step
        )
        self.stage = stage
        self._begins_at = fence.place.step
        self.channel = Channel(fence, streams, stage.limits, settings.seconds, compute, step, again)
        self.fetch = Fetcher(self.channel, stage)
        self.sharing = Sharing(self.channel, stage, self.fetch)
        self.server = Server(self.channel, stage)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Started once what is kept here is what the crew can go on from."""
        if (store := self.stage.store) is not None:
            await self.channel.compute(lambda: store.begins(self._begins_at))
        task_status.started()
        await self.channel.run(self.server, self.sharing)

    def attach(self, worker: StageWorker) -> None:
        """The stage is in order: `worker` runs it."""
        self.stage.worker, self.stage.restored = worker, None
        self.stage.phase, self.stage.kind = "whole", None
