"""What is to be written to one peer: messages first, then fetched bodies, chunk by chunk in turn, then pushed ones. No torch."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import trio

from swarmnode.pipeline.frames import CHUNK_BYTES, Place
from swarmnode.recovery import messages as m


@dataclass
class Outgoing:
    """One transfer on its way out."""

    have: m.Have
    body: memoryview
    push: bool
    at: int = 0


class Outbox:
    """push_rate: bytes per second; 0 is without limit."""

    def __init__(self, push_rate: float) -> None:
        self.messages: deque[bytes] = deque()
        self.transfers: deque[Outgoing] = deque()
        self._push_rate = push_rate
        self._wake = trio.Event()
        self._not_before = 0.0
        """The next chunk of a push."""

    @property
    def unread(self) -> int:
        """Answers that have not left."""
        return sum(out.have.answer for out in self.transfers)

    def pushing(self, what: m.What) -> bool:
        return any(out.push and out.have.what == what for out in self.transfers)

    def add(self, message: bytes) -> None:
        self.messages.append(message)
        self._wake.set()

    def transfer(self, have: m.Have, body: bytes, push: bool = False) -> None:
        """A push replaces one of its kind that has not begun."""
        if push:
            for out in [out for out in self.transfers if out.push and out.at == 0 and out.have.what == have.what]:
                self.transfers.remove(out)
        self.transfers.append(Outgoing(have, memoryview(body), push))
        self._wake.set()

    def clear(self) -> None:
        self.messages.clear()
        self.transfers.clear()
        self._wake.set()

    def next(self, place: Place) -> tuple[Outgoing | None, bytes | None]:
        """What to write next, and of which transfer it is a part; no bytes where there is nothing, or nothing yet."""
        if self.messages:
            return None, self.messages.popleft()
        now = trio.current_time()
        begun = {out.have.what for out in self.transfers if out.push and out.at > 0}  # of each kind of push one after the other
        ready = [out for out in self.transfers if not out.push]
        if not ready and now >= self._not_before:
            ready = [out for out in self.transfers if out.at > 0 or out.have.what not in begun]
        if not ready:
            return None, None
        out = ready[0]
        self.transfers.remove(out)
        head = m.pack(out.have) if out.at == 0 else b""
        part = out.body[out.at : out.at + CHUNK_BYTES]
        chunk = m.pack(m.Chunk(place, out.have.request, out.have.answer, out.at, len(part)), part)
        out.at += len(part)
        if out.at < len(out.body):
            self.transfers.append(out)  # in turn
        if out.push and self._push_rate > 0:
            self._not_before = now + len(part) / self._push_rate
        return out, head + chunk

    async def wait(self) -> None:
        """Until there may be something to write."""
        self._wake = trio.Event()
        later = self._not_before if any(out.push for out in self.transfers) else math.inf
        with trio.move_on_at(later):  # around waiting only, never around the stream
            await self._wake.wait()
