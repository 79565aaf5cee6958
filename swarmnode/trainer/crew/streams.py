"""Streams to the trainers of a crew's other stages, through the network process: a Unix socket
each, and a gate that all stop at.

While the gate is shut nothing is read, so nothing that others do is acted on; what they send waits
on its way, and they with it.
"""

from __future__ import annotations

import os
from pathlib import Path

import trio

from swarmnode.crew.local import Assigned, Kind, Open
from swarmnode.errors import PeerError
from swarmnode.files import socket_address
from swarmnode.wire import headed

CONNECT_SECONDS = 10.0
"""To a socket on this machine; the network process may be on its way back."""
RETRY_SECONDS = 0.1


class Gate:
    """Open to begin with."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._event.set()

    def shut(self) -> None:
        if self._event.is_set():
            self._event = trio.Event()

    def let(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


class GatedStream(trio.abc.Stream):
    """`inner`, read only while the gate is open."""

    def __init__(self, inner: trio.abc.Stream, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await self._gate.wait()
        return bytes(await self._inner.receive_some(max_bytes))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


async def connect(assigned: Assigned, stage: int, kind: Kind) -> trio.abc.Stream:
    """A stream to the trainer of `stage`; it need not be there yet. Raises PeerError when our
    network process is not."""
    opened = headed.pack(Open(assigned.crew, stage, kind))
    with trio.move_on_after(CONNECT_SECONDS):
        while True:
            address, directory = socket_address(Path(assigned.socket))
            try:
                return await _opened(await trio.open_unix_socket(address), opened)
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(RETRY_SECONDS)
            finally:
                if directory is not None:
                    os.close(directory)
    raise PeerError("the network process takes no streams for stages")


async def _opened(stream: trio.abc.Stream, data: bytes) -> trio.abc.Stream:
    try:
        await stream.send_all(data)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


async def connect_all(assigned: Assigned, kind: Kind, gate: Gate) -> dict[int, trio.abc.Stream]:
    """To every other stage. Raises PeerError."""
    streams: dict[int, trio.abc.Stream] = {}
    try:
        for stage in range(len(assigned.members)):
            if stage != assigned.stage:
                streams[stage] = GatedStream(await connect(assigned, stage, kind), gate)
    except BaseException:
        await close_all(streams)
        raise
    return streams


async def close_all(streams: dict[int, trio.abc.Stream]) -> None:
    for stream in streams.values():
        await trio.aclose_forcefully(stream)
