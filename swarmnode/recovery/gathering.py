"""One snapshot from all who keep it, in pieces: whoever is free is asked for the next, so that each
gives what its line carries. No torch.

Who fails, or is silent for as long as anything is waited for, costs what it was asked for and has
not sent: others are asked for that. Who is slow has the rest of its piece taken over, once nothing
else is left. What has come stays, also when the crew ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import trio

from swarmnode.errors import PeerError
from swarmnode.pipeline.frames import CHUNK_BYTES
from swarmnode.recovery import messages as m
from swarmnode.recovery.channel import Part

PIECE_BYTES: Final = 16 * CHUNK_BYTES
"""At most: of a small snapshot everybody is asked for some, in whole chunks."""
ROUNDS: Final = 4
"""Pieces for each lane, at least, where there are as many chunks."""
LANES: Final = 2
"""Pieces that one holder is asked for at a time: while the request for the next is on its way, it
sends the other."""
SLOW: Final = 3.0
"""A piece is taken over from a holder after so many times the time that who takes it over would
need for it, and SLOW_SECONDS."""
SLOW_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 1.0


@dataclass
class Begun:
    """What has come of a snapshot, from whomever."""

    body: memoryview
    gaps: list[tuple[int, int]]
    """(from, to): what has not come, and nobody is asked for now."""


def nothing_of(size: int) -> Begun:
    return Begun(np.empty(size, np.uint8).data, [(0, size)])  # memory is taken as it comes


@dataclass(eq=False)
class _Piece(Part):
    holder: int
    since: float
    first: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    taken: bool = False
    """Another holder is asked for its rest."""


class Gathering:
    """ask: fills a part from a holder; raises PeerError."""

    def __init__(
        self, begun: Begun, holders: Sequence[int], ask: Callable[[int, Part], Awaitable[m.Have]]
    ) -> None:
        size = len(begun.body)
        # it was all there when the crew ended: what is said of it comes with its end
        if not begun.gaps:
            begun.gaps.append((max(0, size - CHUNK_BYTES), size))
        self._begun = begun
        self._holders = holders
        self._ask = ask
        self._fresh = begun.gaps == [(0, size)]
        self._most = min(
            PIECE_BYTES, CHUNK_BYTES * -(-size // (ROUNDS * LANES * len(holders) * CHUNK_BYTES))
        )
        self._asked: list[_Piece] = []
        self._came: Counter[int] = Counter()
        """Holder → bytes of it."""
        self._haves: dict[int, m.Have] = {}
        self._since = trio.current_time()
        self._changed = trio.Event()
        self._error = PeerError("nobody has it")

    @property
    def alone(self) -> int | None:
        """Who has given all of it; None where nobody has."""
        gave = list(self._came)
        return gave[0] if self._fresh and len(gave) == 1 else None

    async def run(self) -> m.Have:
        """All of it is there: what the first of the holders that gave any says of it. Raises
        PeerError, of the last one that failed."""
        async with trio.open_nursery() as nursery:
            for holder in self._holders:
                for lane in range(LANES):
                    nursery.start_soon(self._lane, holder, lane)
        if self._begun.gaps:
            raise self._error
        return self._haves[min(self._haves, key=self._holders.index)]

    async def _lane(self, holder: int, lane: int) -> None:
        # two that ended together would leave the line idle together
        most = max(CHUNK_BYTES, self._most // (lane + 1))
        while (piece := await self._next(holder, most)) is not None:
            most = self._most
            try:
                with piece.scope:
                    self._haves[holder] = await self._ask(holder, piece)
            except PeerError as error:
                self._error = error
                return
            finally:
                self._over(piece)

    async def _next(self, holder: int, most: int) -> _Piece | None:
        """What to ask `holder` for; None where all has come."""
        gaps = self._begun.gaps
        while gaps or self._asked:
            if gaps:
                at, until = gaps.pop()
                if until - at > most:
                    gaps.append((at + most, until))
                    until = at + most
            elif (slow := self._slow(holder)) is not None:
                slow.taken = True
                slow.scope.cancel()
                at, until = slow.at, slow.until
            else:
                with trio.move_on_after(LOOK_SECONDS):  # around waiting only
                    await self._changed.wait()
                continue
            piece = _Piece(self._begun.body, at, until, holder, trio.current_time(), at)
            self._asked.append(piece)
            return piece
        return None

    def _slow(self, holder: int) -> _Piece | None:
        """What another one should have sent long ago, by what `holder` sends."""
        now = trio.current_time()
        rate = self._came[holder] / max(now - self._since, 1e-3)
        late = lambda piece: (
            now - piece.since > SLOW_SECONDS
            and (now - piece.since) * rate > SLOW * (piece.until - piece.first)
        )
        return next(
            (
                piece
                for piece in self._asked
                if piece.holder != holder and not piece.taken and late(piece)
            ),
            None,
        )

    def _over(self, piece: _Piece) -> None:
        self._asked.remove(piece)
        if piece.at > piece.first:
            self._came[piece.holder] += piece.at - piece.first
        if piece.at < piece.until and not piece.taken:
            self._begun.gaps.append((piece.at, piece.until))
        self._changed.set()
        self._changed = trio.Event()
