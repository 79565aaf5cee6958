"""Bound on what one source contributes to training. Pure, bounded.

A source is the connection by which groups came: the address prefix or relay of their author where
the author is connected, else that of the holder they were fetched from. Keys are free, connections
from many networks are not.

    arrived ─▶ density of a source: its groups ÷ numbers that its authors have advanced meanwhile
    room    ─▶ groups of a source in the next draw: over the last draws at most EXCESS × its part
               of all densities, and in any draw its part of the places, rounded down

An author may skip numbers, because a question without a signal is not published, and no reader sees
all groups of an author. So a gap is not refused, but lowers the density. An author that answers one
question in eight, to choose the text it teaches, has an eighth of the density and an eighth of the
room. Honest authors have similar gaps: questions without a signal, and groups that are over the
rate, not shared, or never fetched by this reader. A pause advances no number. A restart skips 4096
numbers and counts MOST_GAP once.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

FIRST_NUMBERS = 16
"""Numbers that an author's first group counts for, since earlier numbers are unknown. So a new key
for each group gains nothing."""
MOST_GAP = 64
"""Most numbers that one gap counts for."""
MEMORY_NUMBERS = 512
"""Numbers of a source that are remembered: at twice as many, all counts are halved."""
HISTORY_DRAWS = 16
"""Draws over which a source's part is bounded. Rare successes come in bursts."""
EXCESS = 1.5
"""Most groups that a source may contribute, as a multiple of its part."""
MOST_AUTHORS = 4096
MOST_SOURCES = 1024


class Density:
    """Groups of one source, and the numbers that its authors advanced for them."""

    __slots__ = ("groups", "numbers")

    def __init__(self) -> None:
        self.groups = self.numbers = 0.0

    def add(self, numbers: int) -> None:
        """Count one group and the numbers since the one before it."""
        self.groups += 1
        self.numbers += numbers
        if self.numbers > 2 * MEMORY_NUMBERS:
            self.groups, self.numbers = self.groups / 2, self.numbers / 2

    @property
    def value(self) -> float:
        """Groups per number, 0 to 1."""
        return min(1.0, self.groups / self.numbers) if self.numbers else 1.0


class SourceShares:
    """Densities of sources, and the number of groups recently drawn from each."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, int] = OrderedDict()
        """Author → its highest number."""
        self._density: OrderedDict[str, Density] = OrderedDict()
        self._draws: deque[Counter[str]] = deque(maxlen=HISTORY_DRAWS - 1)

    def arrived(self, source: str, author: str, sequence: int) -> None:
        """Record an admitted group."""
        newest = self._newest.pop(author, None)
        gap = FIRST_NUMBERS if newest is None else min(MOST_GAP, max(0, sequence - newest))
        self._newest[author] = sequence if newest is None else max(newest, sequence)
        density = self._density.pop(source, None) or Density()
        density.add(gap)
        self._density[source] = density
        if len(self._newest) > MOST_AUTHORS:
            self._newest.popitem(last=False)
        if len(self._density) > MOST_SOURCES:
            self._density.popitem(last=False)

    def room(self, waiting: Iterable[str], count: int) -> dict[str, int]:
        """Return the number of groups of each source that the next draw may take.

        Args:
            waiting: Sources of the groups that can be drawn.
            count: Groups that are asked for.
        """
        recent: Counter[str] = Counter()
        for drawn in self._draws:
            recent.update(drawn)
        sources = {*waiting, *recent}
        if len(sources) <= 1:
            return dict.fromkeys(sources, count)
        density = {source: self._value(source) for source in sources}
        total = sum(density.values())
        part = {source: value / total for source, value in density.items()}
        most = EXCESS * (recent.total() + count)
        return {
            source: max(
                math.floor(count * part[source]),
                max(1, math.ceil(most * part[source])) - recent[source],
            )
            for source in sources
        }

    def drew(self, sources: Iterable[str]) -> None:
        """Record the sources of a draw's groups, one for each group."""
        self._draws.append(Counter(sources))

    def _value(self, source: str) -> float:
        known = self._density.get(source)
        return known.value if known is not None else 1.0 / FIRST_NUMBERS
