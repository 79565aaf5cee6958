"""A crew in one process, over memory streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import trio
from trio.testing import memory_stream_pair

from swarmnode.stages.stage_frames import CREW_BYTES, Fence, FrameLimits, Place
from swarmnode.stages.trainer.head import Head
from swarmnode.stages.trainer.links import Links
from swarmnode.stages.trainer.pipeline import StageWorker, WorkerSettings
from swarmnode.stages.trainer.stage_model import StageRuntime

T = TypeVar("T")


async def run_inline(work: Callable[[], T]) -> T:
    """Run `work` in the event loop, which is deterministic."""
    return work()


@dataclass(frozen=True)
class Crew:
    """Workers of all stages and the streams between them."""

    head: Head
    members: list[StageWorker]
    """By stage. The first is the head."""
    streams: dict[tuple[int, int], trio.abc.Stream]
    """(stage, other stage) → this stage's end."""


@asynccontextmanager
async def open_crew(
    runtimes: Sequence[StageRuntime],
    settings: WorkerSettings,
    limits: FrameLimits,
    *,
    crew: bytes = b"\0" * CREW_BYTES,
    step: int = 0,
) -> AsyncIterator[Crew]:
    """Open all stages in this process over memory streams. The streams close on exit.

    The members do nothing before the caller's first await.

    Args:
        step: Committed steps at the start.
    """
    count = len(runtimes)
    streams: dict[tuple[int, int], trio.abc.Stream] = {}
    for i in range(count):
        for j in range(i):
            streams[i, j], streams[j, i] = memory_stream_pair()
    members: list[StageWorker] = []
    for i, runtime in enumerate(runtimes):
        links = Links(i, {j: streams[i, j] for j in range(count) if j != i}, limits)
        fence = Fence(Place(crew, i, step), count)
        kind = StageWorker if i else Head
        members.append(kind(runtime, links, fence, settings, run_inline))
    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(member.run)
        head = members[0]
        assert isinstance(head, Head)
        yield Crew(head, members, streams)
        nursery.cancel_scope.cancel()
