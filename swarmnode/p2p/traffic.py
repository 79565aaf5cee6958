"""Bytes by protocol and direction, counted where a stream is read and written: what applications
see, without Noise and Yamux overhead. When a peer was last heard is noted there, too."""

from __future__ import annotations

import collections

import msgspec
import trio

from swarmnode.p2p.library.objects import NetStream

NEGOTIATION = "negotiation"
"""Label of bytes that went by before a protocol was agreed on. After that the label is one of our
protocols: peers cannot invent any."""


class TrafficStatistics(msgspec.Struct, frozen=True):
    received: dict[str, int] = {}
    """Bytes by protocol."""
    sent: dict[str, int] = {}


class Traffic:
    """Counts what goes by on every stream."""

    def __init__(self) -> None:
        self._received = collections.Counter[str]()
        self._sent = collections.Counter[str]()

    def meter(self, stream: NetStream) -> None:
        """A new stream, from which nothing has been read yet: replaces its read and write by
        counting ones."""
        read, write, received, sent = stream.read, stream.write, self._received, self._sent

        async def counting_read(n: int | None = None) -> bytes:
            data = await read(n)
            received[stream.protocol_id or NEGOTIATION] += len(data)
            if data:
                stream.muxed_conn.heard_at = trio.current_time()
            return data

        async def counting_write(data: bytes) -> None:
            sent[stream.protocol_id or NEGOTIATION] += len(data)
            await write(data)

        stream.read, stream.write = counting_read, counting_write

    def statistics(self) -> TrafficStatistics:
        return TrafficStatistics(received=dict(self._received), sent=dict(self._sent))
