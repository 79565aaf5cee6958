"""Selects connections to close: to make room for new peers, and to meet other peers. Pure.

    above FULL of network.max_connections ─▶ make_room: inbound, settled, unneeded; the oldest of
                                             the largest network group
    every TURNOVER_SECONDS                ─▶ exchanged: a random outbound peer, except the oldest
                                             half (anchors)

Turnover alone would hand a node to the operator with the most peer ids: each exchange is a random
draw, and the lost peer is replaced from reports of other peers. The anchors, the limits by prefix
and relay, and the keyed sampling of the peer table (`peers.py`) counteract this.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

FULL = 0.75
"""Share of `network.max_connections` above which connections are closed. The rest stays free for
new peers, which need a connection to receive addresses of other peers."""
SETTLED_SECONDS = 20.0
"""By this time a new peer has completed its peer exchange."""
TURNOVER_SECONDS = 600.0
"""Interval between exchanges, before jitter."""


class Link(NamedTuple):
    """A connected peer.

    Attributes:
        peer: its peer id.
        inbound: it dialled this node.
        since: time of the connection.
        group: its /24 or /48 network, or its relay.
        spare: no part of this node needs it.
    """

    peer: str
    inbound: bool
    since: float
    group: str | None
    spare: bool


def make_room(links: Collection[Link], most: int, now: float) -> list[str]:
    """Return the peers to disconnect. `most` is `network.max_connections`."""
    excess = len(links) - int(FULL * most)
    settled = sorted(
        (
            each
            for each in links
            if each.inbound and each.spare and now - each.since >= SETTLED_SECONDS
        ),
        key=_age,
    )
    alike: Counter[str | None] = Counter(each.group for each in links if each.group is not None)
    chosen: list[str] = []
    while settled and len(chosen) < excess:
        # `settled` is sorted by age, so this is the oldest peer of the largest group
        gone = max(settled, key=lambda each: alike[each.group])
        settled.remove(gone)
        alike[gone.group] -= 1
        chosen.append(gone.peer)
    return chosen


def exchanged(links: Collection[Link], target: int, now: float, rng: random.Random) -> str | None:
    """Return a random peer to replace, or None below `target` connections. The oldest half of the
    outbound peers is never replaced."""
    ours = sorted((each for each in links if not each.inbound), key=_age)
    if len(links) < target or len(ours) < target // 2:
        return None
    young = [
        each.peer
        for each in ours[target // 4 :]
        if each.spare and now - each.since >= SETTLED_SECONDS
    ]
    return rng.choice(young) if young else None


def _age(link: Link) -> float:
    return link.since
