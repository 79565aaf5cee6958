"""Frames to and from the other stages of a crew, over one stream to each of them."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.files import socket_address
from swarmnode.stages.crew_messages import StageAssignment, StreamKind, StreamOpen
from swarmnode.stages.stage_frames import CHUNK_BYTES, FRAME_REASONS, Frame, FrameLimits, read_frame
from swarmnode.wire import headed

# Frames over streams: one duplex stream to each other stage.
#
# A link is the stream to one other stage and its queue. `send` queues the frame without waiting,
# and one task per link writes. While a link is `full`, no forward, score or wave starts over it,
# and no part of an embedding is sent. Gradients, tokens and the commit are always queued, so two
# stages cannot wait for each other. Streams are not read while too many frames wait.

MAX_INBOX_FRAMES: Final = 64
"""Maximum number of frames of other stages that wait to be handled."""
MAX_INBOX_BYTES: Final = 64 * 2**20
"""Streams are not read while the bodies of these frames have at least this many bytes."""
MAX_OUTBOX_FRAMES: Final = 4096
"""Maximum number of frames queued for one stage, far more than a crew has in flight. The stream
to a stage whose queue is full is closed."""
FULL_LINK_BYTES: Final = 64 * 2**20
"""A link is full while at least this many bytes are queued. Frames that are always queued may
exceed it."""
STREAM_FAULTS: Final = frozenset({*FRAME_REASONS, "unread"} - {"truncated"})
"""Reasons of a stream's end that are the other stage's fault. `truncated` is excluded, because a
process that dies inside a frame causes it."""


@dataclass(frozen=True)
class ReceivedFrame:
    """A frame that arrived from a stage, or the end of its stream."""

    sender: int
    """Stage that sent it."""
    frame: Frame | None
    """None if the stream ended, for `reason`."""
    body: bytes
    reason: str = ""


class FrameInbox:
    """Frames that the worker has not handled yet, in order of arrival.

    Args:
        own: This node's stage. Its frames do not count towards the limits.
    """

    def __init__(self, own: int) -> None:
        self.idle_since = math.inf
        """Time since which the worker waits; infinite while it works."""
        self._own = own
        self._arrivals: deque[ReceivedFrame] = deque()
        self._frames = self._bytes = 0
        """Numbers of waiting frames, and of bytes in them, from other stages."""
        self._woken = trio.Event()
        self._has_room = trio.Event()

    async def wait_for_room(self) -> None:
        """Wait until another frame may be read."""
        while self._frames >= MAX_INBOX_FRAMES or self._bytes >= MAX_INBOX_BYTES:
            await self._has_room.wait()

    def put(self, arrival: ReceivedFrame) -> None:
        """Append a frame."""
        self._count(arrival, 1)
        self._arrivals.append(arrival)
        self.wake()

    def take(self) -> ReceivedFrame | None:
        """Remove and return the oldest frame; None if there is none."""
        if not self._arrivals:
            return None
        arrival = self._arrivals.popleft()
        self._count(arrival, -1)
        self._wake_readers()
        return arrival

    def wake(self) -> None:
        """End `wait`: a frame arrived, a link has room again, or there is a fault."""
        self._woken.set()

    async def wait(self) -> None:
        """Wait until `wake` is called."""
        self.idle_since = trio.current_time()
        try:
            await self._woken.wait()
        finally:
            self.idle_since = math.inf
        self._woken = trio.Event()

    def _wake_readers(self) -> None:
        self._has_room.set()
        self._has_room = trio.Event()

    def _count(self, arrival: ReceivedFrame, sign: int) -> None:
        if arrival.sender != self._own:
            self._frames += sign
            self._bytes += sign * len(arrival.body)


class Links:
    """Frames to and from all stages. Frames to the own stage need no stream.

    Args:
        stage: This node's stage.
        streams: Other stage → stream.
        limits: Bounds of the frames.
    """

    def __init__(
        self, stage: int, streams: Mapping[int, trio.abc.Stream], limits: FrameLimits
    ) -> None:
        self.stage = stage
        self.limits = limits
        self._streams = dict(streams)
        self.inbox = FrameInbox(stage)
        self._out = {
            peer: trio.open_memory_channel[bytes](MAX_OUTBOX_FRAMES) for peer in self._streams
        }
        self.queued = dict.fromkeys(self._streams, 0)
        """Stage with an open stream → bytes that are queued."""
        self.frames_received = 0
        self.closed_streams: Counter[str] = Counter()
        """Streams that were closed, by reason: of FRAME_REASONS, or `unread`."""

    def full(self, stage: int) -> bool:
        """Return True if no new work for `stage` may start. The result is False after the end of
        the stream, which the inbox reports."""
        return self.queued.get(stage, 0) >= FULL_LINK_BYTES

    def send(self, stage: int, frame: Frame, body: bytes = b"") -> None:
        """Queue a frame. If the queue is at its limit, close the stream. After the end of the
        stream, discard the frame."""
        if stage == self.stage:
            self.inbox.put(ReceivedFrame(stage, frame, body))
            return
        if stage not in self.queued:
            return
        data = headed.pack(frame, body)
        try:
            self._out[stage][0].send_nowait(data)
        except trio.WouldBlock:
            self._end(stage, "unread")
        else:
            self.queued[stage] += len(data)

    async def run(self) -> None:
        """Read and write all streams until they end."""
        async with trio.open_nursery() as nursery:
            for peer, stream in self._streams.items():
                nursery.start_soon(self._read, peer, stream)
                nursery.start_soon(self._write, peer, stream)

    async def _read(self, peer: int, stream: trio.abc.Stream) -> None:
        reason = "closed"
        try:
            while True:
                await self.inbox.wait_for_room()
                got = await read_frame(stream, self.limits)
                if got is None:
                    break
                self.frames_received += 1
                self.inbox.put(ReceivedFrame(peer, *got))
        except BadMessage as error:
            reason = error.reason
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._end(peer, reason)

    def _end(self, peer: int, reason: str) -> None:
        """Report the end of the stream to stage `peer`, and forget its queue."""
        self.queued.pop(peer, None)
        if reason != "closed":
            self.closed_streams[reason] += 1
        self.inbox.put(ReceivedFrame(peer, None, b"", reason))

    async def _write(self, peer: int, stream: trio.abc.Stream) -> None:
        try:
            async for data in self._out[peer][1]:
                for at in range(0, len(data), CHUNK_BYTES):
                    part = data[at : at + CHUNK_BYTES]
                    await stream.send_all(part)
                    if peer not in self.queued:
                        return
                    was_full = self.full(peer)
                    self.queued[peer] -= len(part)
                    if was_full and not self.full(peer):
                        self.inbox.wake()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._end(peer, "closed")


# Streams to the other stages, through Unix sockets of the network process.

CONNECT_SECONDS = 10.0
"""Deadline of a connection to the network process, which may be restarting."""
RETRY_SECONDS = 0.1
"""Wait before the next attempt."""


async def connect(assignment: StageAssignment, stage: int, kind: StreamKind) -> trio.abc.Stream:
    """Return a stream to the trainer of `stage`, which may open its end later.

    Raises:
        PeerError: the network process does not answer.
    """
    opened = headed.pack(StreamOpen(assignment.crew, assignment.stage, stage, kind))
    with trio.move_on_after(CONNECT_SECONDS):
        while True:
            address, directory = socket_address(Path(assignment.socket))
            try:
                stream = await trio.open_unix_socket(address)
                try:
                    await stream.send_all(opened)
                except BaseException:
                    await trio.aclose_forcefully(stream)
                    raise
                return stream
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(RETRY_SECONDS)
            finally:
                if directory is not None:
                    os.close(directory)
    raise PeerError("the network process did not accept a stream to another stage in time")


async def connect_all(assignment: StageAssignment, kind: StreamKind) -> dict[int, trio.abc.Stream]:
    """Return a stream to every other stage, by stage.

    Raises:
        PeerError: the network process does not answer.
    """
    streams: dict[int, trio.abc.Stream] = {}
    try:
        for stage in range(len(assignment.members)):
            if stage != assignment.stage:
                streams[stage] = await connect(assignment, stage, kind)
    except BaseException:
        await close_streams(streams)
        raise
    return streams


async def close_streams(streams: Mapping[int, trio.abc.Stream]) -> None:
    """Close the streams to all stages, also in a cancelled task."""
    with trio.CancelScope(shield=True):
        for stream in streams.values():
            await trio.aclose_forcefully(stream)
