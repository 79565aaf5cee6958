"""Which connections a node gives up: so that newcomers find a place, and so that it meets others
than those it met first. Pure.

    above FULL of network.max_connections ─▶ make_room: inbound, settled, nothing depends on it; of
    whoever has most, the oldest
    now and then                          ─▶ exchanged: outbound, none of the oldest half (anchors),
    drawn; another is dialled for it

Turnover alone would hand a node to whoever has most identities: each exchange is a draw, and who is
lost is replaced from what others tell. The anchors, the bounds by prefix and relay, and a table
that keeps peers by a key of its own (`peers.py`) are what stands against that.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

FULL = 0.75
"""Share of the connections above which places are given up: the rest is for whoever comes, who is
told of others by whom it is let in."""
SETTLED_SECONDS = 20.0
"""After so long a newcomer has asked for peers."""
TURNOVER_SECONDS = 600.0
"""Between two exchanges, with jitter."""


class Link(NamedTuple):
    """A connected peer. `group`: the /24, the /48 or the relay that it is seen at. `spare`: nothing
    here depends on it."""

    peer: str
    inbound: bool
    since: float
    group: str | None
    spare: bool


def make_room(links: Collection[Link], most: int, now: float) -> list[str]:
    """Peers to disconnect. most: as `network.max_connections`."""
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
        # the oldest of those with most: `settled` is in order
        gone = max(settled, key=lambda each: alike[each.group])
        settled.remove(gone)
        alike[gone.group] -= 1
        chosen.append(gone.peer)
    return chosen


def exchanged(links: Collection[Link], target: int, now: float, rng: random.Random) -> str | None:
    """The peer to exchange for another, if there are `target`: half of those that we dialled are
    kept for good."""
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
