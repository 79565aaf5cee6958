"""Bytes by protocol and direction, counted at stream reads and writes, without the overhead of
Noise and Yamux. Reads also record the time of the last byte from each peer."""

from __future__ import annotations

import collections

import msgspec
import trio

from swarmnode.p2p.library.objects import NetStream

NEGOTIATION = "negotiation"
"""Label of the bytes before a protocol is negotiated. Later labels are protocols of this node, so
peers cannot create labels."""


class TrafficStatistics(msgspec.Struct, frozen=True):
    received: dict[str, int] = {}
    """Bytes by protocol."""
    sent: dict[str, int] = {}


class Traffic:
    """Counts the bytes of every stream."""

    def __init__(self) -> None:
        self._received = collections.Counter[str]()
        self._sent = collections.Counter[str]()

    def meter(self, stream: NetStream) -> None:
        """Replace read and write of a new, unread stream by counting versions."""
        read, write, received, sent = stream.read, stream.write, self._received, self._sent

        async def counting_read(n: int | None = None) -> bytes:
            data = await read(n)
            received[stream.protocol_id or NEGOTIATION] += len(data)
            if data:
                stream.muxed_conn.last_received_at = trio.current_time()
            return data

        async def counting_write(data: bytes) -> None:
            sent[stream.protocol_id or NEGOTIATION] += len(data)
            await write(data)

        stream.read, stream.write = counting_read, counting_write

    def statistics(self) -> TrafficStatistics:
        return TrafficStatistics(received=dict(self._received), sent=dict(self._sent))
