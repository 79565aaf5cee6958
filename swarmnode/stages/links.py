"""Frames over streams: one duplex stream to every other member of a crew, read at once, written in order. No torch, no libp2p.

The member that uses it never waits for a slow neighbour: sending queues, and a task per neighbour writes. What a neighbour may make us
keep is bounded by what we asked of it (credits of the schedule, waves in flight), and by streams that are not read while `inbox` is full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import trio

from swarmnode.errors import BadMessage
from swarmnode.stages.frames import CHUNK_BYTES, Frame, FrameLimits, pack_frame, read_frame

INBOX: Final = 64
"""Frames received and not yet handled, all neighbours together."""
OUTBOX: Final = 4096
"""Frames to one neighbour, queued: far more than a crew has in flight. A neighbour that lets it fill up is gone."""


@dataclass(frozen=True)
class Arrival:
    sender: int
    """Stage."""
    frame: Frame | None
    """None: the stream ended, or what came was no frame."""
    body: bytes
    reason: str = ""


@dataclass(frozen=True)
class LinkStatistics:
    bytes_sent: int
    bytes_received: int
    frames_received: int
    refused: dict[str, int]


class Links:
    """`streams`: stage → stream. Frames to our own stage come back without a stream."""

    def __init__(self, stage: int, streams: Mapping[int, trio.abc.Stream], limits: FrameLimits) -> None:
        self.stage = stage
        self.limits = limits
        self._streams = dict(streams)
        self._in_send, self.inbox = trio.open_memory_channel[Arrival](INBOX)
        self._to_self, self._from_self = trio.open_memory_channel[Arrival](OUTBOX)
        self._out = {peer: trio.open_memory_channel[bytes](OUTBOX) for peer in self._streams}
        self._sent = self._received = self._frames = 0
        self._refused: Counter[str] = Counter()

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(self._sent, self._received, self._frames, dict(self._refused))

    def send(self, stage: int, frame: Frame, body: bytes = b"") -> None:
        """Queues. To a stage whose stream is gone or full it does nothing: its end arrives as such."""
        if stage == self.stage:
            self._to_self.send_nowait(Arrival(stage, frame, body))
            return
        data = pack_frame(frame, body)
        self._sent += len(data)
        try:
            self._out[stage][0].send_nowait(data)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            self._refused["unsent"] += 1

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._loop_back)
            for peer, stream in self._streams.items():
                nursery.start_soon(self._read, peer, stream)
                nursery.start_soon(self._write, peer, stream)

    async def _loop_back(self) -> None:
        async for arrival in self._from_self:
            await self._in_send.send(arrival)

    async def _read(self, peer: int, stream: trio.abc.Stream) -> None:
        reason = "closed"
        try:
            while (got := await read_frame(stream, self.limits)) is not None:
                self._frames += 1
                self._received += len(got[1])
                await self._in_send.send(Arrival(peer, *got))
        except BadMessage as error:
            reason = error.reason
            self._refused[reason] += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # said by the arrival below
        await self._in_send.send(Arrival(peer, None, b"", reason))

    async def _write(self, peer: int, stream: trio.abc.Stream) -> None:
        try:
            async for data in self._out[peer][1]:
                for at in range(0, len(data), CHUNK_BYTES):
                    await stream.send_all(data[at : at + CHUNK_BYTES])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._out[peer][1].close()
