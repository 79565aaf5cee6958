"""The trainer's end of stage streams without a trainer: opens the sockets on which the stream proxy
listens."""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from swarmnode.stages.crew_messages import StreamKind, StreamOpen
from swarmnode.stages.network.stream_proxy import StreamPeers, StreamProxy


async def open_pipe(
    proxy: StreamProxy, peers: StreamPeers, stage: int, kind: StreamKind = "frames", **other: Any
) -> trio.SocketStream:
    """Open the stream to the trainer of `stage`. other: fields that differ from the crew's."""
    opened = msgspec.structs.replace(StreamOpen(peers.crew, peers.stage, stage, kind), **other)
    body = msgspec.msgpack.encode(opened)
    stream = await trio.open_unix_socket(str(proxy.path))
    await stream.send_all(len(body).to_bytes(4, "big") + body)
    return stream


def stream_peers(members: list[str], *, crew: bytes = b"c" * 32) -> list[StreamPeers]:
    """Return one crew as each of its stages sees it."""
    return [StreamPeers(crew, stage, tuple(members)) for stage in range(len(members))]
