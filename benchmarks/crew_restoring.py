"""A stage of 7 B from one holder and from several: `python -m benchmarks.crew --restoring`. In
virtual time.

The product's `recovery.gathering` splits 3.5 GB among holders whose lines carry so many Mbit/s
each, 50 ms away one way. They send what they were asked for a chunk of each piece in turn. Nothing
else is on the lines, and no byte is hashed or written: these are times of the division alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Final

import trio
from swarmnode.stages.transfer import Gathering, Part, nothing_of
from trio.testing import MockClock

from benchmarks import report
from swarmnode.errors import PeerError
from swarmnode.stages.wire import CHUNK_BYTES, Have, Place

STAGE_BYTES: Final = 3_500_000_000
ONE_WAY: Final = 0.05
LINES: Final[tuple[tuple[float, ...], ...]] = ((50,), (50, 50), (50, 25), (50, 5), (50, 50, 100))
"""Mbit/s of each holder."""
HAVE: Final = Have(Place(bytes(16), 0, 9), 1, "shadow", 9, STAGE_BYTES, bytes(32), bytes(32))


class Line:
    """dies: bytes after which it is gone."""

    def __init__(self, megabits: float, dies: float) -> None:
        self.gave = 0
        self._rate, self._dies = megabits * 1e6 / 8, dies
        self._turn = trio.Lock()

    async def fill(self, part: Part) -> Have:
        await trio.sleep(2 * ONE_WAY)
        while part.at < part.until:
            length = min(CHUNK_BYTES, part.until - part.at)
            async with self._turn:
                if self.gave >= self._dies:
                    raise PeerError("it is gone")
                await trio.sleep(length / self._rate)
                self.gave += length
            part.at += length
        return HAVE


async def restored(megabits: Sequence[float], dies: float) -> tuple[float, list[float]]:
    """(seconds, share that each gave). dies: as of the last line."""
    lines = [*(Line(each, float("inf")) for each in megabits[:-1]), Line(megabits[-1], dies)]
    started = trio.current_time()
    await Gathering(
        nothing_of(STAGE_BYTES), range(len(lines)), lambda holder, part: lines[holder].fill(part)
    ).run()
    return trio.current_time() - started, [line.gave / STAGE_BYTES for line in lines]


def run(rounds: int) -> None:
    rows = []
    for megabits in LINES:
        for dies in (float("inf"), STAGE_BYTES / 4) if megabits == (50, 50) else (float("inf"),):
            found = [
                trio.run(partial(restored, megabits, dies), clock=MockClock(autojump_threshold=0))
                for _ in range(rounds)
            ]
            name = " + ".join(f"{each:.0f}" for each in megabits) + (
                ", the last one gone after a quarter" if dies < STAGE_BYTES else ""
            )
            shares = " + ".join(
                f"{statistics.median(each):.2f}"
                for each in zip(*(shares for _, shares in found), strict=True)
            )
            best = 8 * STAGE_BYTES / sum(megabits) / 1e6
            rows.append(
                [
                    name,
                    report.middle([seconds for seconds, _ in found], 0),
                    "–" if dies < STAGE_BYTES else f"{best:.0f}",
                    shares,
                ]
            )
    print(report.heading("crew: a stage of 3.5 GB from all who keep it"))
    print(
        report.table(
            ["Mbit/s of each holder", "s", "all lines full, s", "share that each sent"], rows
        )
    )
