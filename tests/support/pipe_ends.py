"""A trainer's end of stage streams, for tests: opens what `stages.pipes` listens for, without any trainer."""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from swarmnode.crew import local
from swarmnode.crew.stream_handshake import Circle, Kind
from swarmnode.crew.stream_proxy import StreamProxy


async def open_pipe(pipes: StreamProxy, circle: Circle, stage: int, kind: Kind = "frames", **other: Any) -> trio.SocketStream:
    """A connection that is to be the stream to the trainer of `stage`. other: fields that are not the circle's."""
    opened = msgspec.structs.replace(local.Open(circle.crew, circle.roster_epoch, stage, kind), **other)
    data = msgspec.msgpack.encode(opened)
    stream = await trio.open_unix_socket(str(pipes.path))
    await stream.send_all(len(data).to_bytes(4, "big") + data)
    return stream


def circles(members: list[str], *, crew: bytes = b"c" * 32, roster_epoch: int = 1) -> list[Circle]:
    """One roster as each of its stages sees it."""
    return [Circle(crew, roster_epoch, stage, tuple(members), (1,) * len(members)) for stage in range(len(members))]
