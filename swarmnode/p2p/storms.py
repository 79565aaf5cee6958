"""Who publishes far more than its swarm allows: what a neighbour hands over as its own is counted.
Pure; `now` is any monotonic time.

    a message whose maker is the neighbour that brings it ─▶ + 1, less TIMES the rate for each
    second since
                                                             above TIMES the rate for SECONDS: a
                                                             storm, and counted anew

Others' messages say nothing about who passes them on, and are not counted. Nobody who keeps to the
rate comes near: what was held up by a pause of the network or of a machine, and comes at once, is
less than what is published in the minute and a half after which a connection on which nothing
passes is closed (`liveness.py`); whoever starts again may publish four seconds' worth at once.
"""

from __future__ import annotations

from collections import OrderedDict

TIMES = 2.0
SECONDS = 60.0
MOST_PEERS = 1024


class Storms:
    """Remembers MOST_PEERS neighbours, those heard last."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._beyond: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Messages that are not made up for yet, and as of when."""

    def __len__(self) -> int:
        return len(self._beyond)

    def allow(self, rate: float) -> None:
        """So many more messages per second are no storm. Before the first such call nothing is."""
        self._rate += rate

    def found(self, peer: str, now: float) -> bool:
        """`peer` hands over one more message of its own; whether that makes it a storm."""
        rate = TIMES * self._rate
        beyond, at = self._beyond.pop(peer, (0.0, now))
        beyond = max(0.0, beyond - rate * max(0.0, now - at)) + 1.0
        storm = 0.0 < rate * SECONDS < beyond
        self._beyond[peer] = (0.0 if storm else beyond, now)
        if len(self._beyond) > MOST_PEERS:
            self._beyond.popitem(last=False)
        return storm
