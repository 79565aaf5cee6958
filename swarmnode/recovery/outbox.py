"""What is to be written to one peer: messages first, then bodies, chunk by chunk in turn, what is
kept for later last. No torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import trio

from swarmnode.pipeline.frames import CHUNK_BYTES, Place
from swarmnode.recovery import messages as m


@dataclass(eq=False)  # two of one request are two
class Outgoing:
    """One transfer on its way out."""

    request: int
    what: m.What
    head: bytes
    """What goes before the first chunk; empty from then on."""
    body: memoryview
    later: bool
    at: int


class Outbox:
    def __init__(self) -> None:
        self.messages: deque[tuple[int, bytes]] = deque()
        """(number of the request of ours that it is, 0 for none; bytes)."""
        self.transfers: deque[Outgoing] = deque()
        self._wake = trio.Event()

    def add(self, message: bytes, request: int) -> None:
        self.messages.append((request, message))
        self._wake.set()

    def transfer(self, have: m.Have, body: bytes | memoryview, later: bool, at: int) -> None:
        """`body` from byte `at` on."""
        self.transfers.append(
            Outgoing(have.request, have.what, m.pack(have), memoryview(body), later, at)
        )
        self._wake.set()

    def clear(self) -> None:
        self.messages.clear()
        self.transfers.clear()
        self._wake.set()

    def next(self, place: Place) -> tuple[int, bytes] | None:
        """What to write next, and of which request of ours it is; None where there is nothing."""
        if self.messages:
            return self.messages.popleft()
        if not self.transfers:
            return None
        out = next((out for out in self.transfers if not out.later), self.transfers[0])
        self.transfers.remove(out)
        head, out.head = out.head, b""
        part = out.body[out.at : out.at + CHUNK_BYTES]
        chunk = m.pack(m.Chunk(place, out.request, out.at, len(part)), part)
        out.at += len(part)
        if out.at < len(out.body):
            self.transfers.append(out)  # in turn
        return 0, head + chunk

    async def wait(self) -> None:
        """Until there may be something to write."""
        self._wake = trio.Event()
        await self._wake.wait()
