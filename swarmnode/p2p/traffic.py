"""Bytes by protocol and direction, counted where a stream is read and written: what applications see, without Noise and Yamux overhead."""

from __future__ import annotations

import collections
from typing import Any

import msgspec
from libp2p.abc import INotifee

NEGOTIATION = "negotiation"
"""Label of bytes that went by before a protocol was agreed on. After that the label is one of our protocols: peers cannot invent any."""


class TrafficStatistics(msgspec.Struct, frozen=True):
    received: dict[str, int] = {}
    """Bytes by protocol."""
    sent: dict[str, int] = {}


class Traffic(INotifee):
    """Told of every new stream by the swarm before anything is read from it; replaces the stream's read and write by counting ones."""

    def __init__(self) -> None:
        self._received = collections.Counter[str]()
        self._sent = collections.Counter[str]()

    def count(self, protocol: str, received: int, sent: int) -> None:
        """Bytes that went by on a connection of our own, beside libp2p."""
        self._received[protocol] += received
        self._sent[protocol] += sent

    async def opened_stream(self, network: Any, stream: Any) -> None:
        read, write, received, sent = stream.read, stream.write, self._received, self._sent

        async def counting_read(n: int | None = None) -> bytes:
            data = await read(n)
            received[stream.protocol_id or NEGOTIATION] += len(data)
            return data

        async def counting_write(data: bytes) -> None:
            sent[stream.protocol_id or NEGOTIATION] += len(data)
            await write(data)

        stream.read, stream.write = counting_read, counting_write

    async def closed_stream(self, network: Any, stream: Any) -> None:
        return None

    async def connected(self, network: Any, connection: Any) -> None:
        return None

    async def disconnected(self, network: Any, connection: Any) -> None:
        return None

    async def listen(self, network: Any, multiaddr: Any) -> None:
        return None

    async def listen_close(self, network: Any, multiaddr: Any) -> None:
        return None

    def statistics(self) -> TrafficStatistics:
        return TrafficStatistics(received=dict(self._received), sent=dict(self._sent))
