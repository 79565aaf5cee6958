"""Selects connections to close: dead ones, to make room for new peers, and to meet other peers.

Pure: `now` is monotonic time in seconds.

    above FULL_SHARE of max_connections ─▶ peers_to_drop: inbound, settled, unneeded; the oldest of
                                           the largest network group
    every TURNOVER_SECONDS              ─▶ peer_to_replace: a random outbound peer, except the
                                           oldest half (anchors)

Turnover alone would hand a node to the operator with the most peer ids: each exchange is a random
draw, and the lost peer is replaced from reports of other peers. The anchors, the limits by prefix
and relay, and the keyed sampling of the peer table (`peers.py`) counteract this.

Dead connections are those whose remote end vanished silently: power loss, pulled cable, stopped
process. Yamux pings every connection every 30 s but ignores missing answers, and TCP needs about 15
minutes to notice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # loads libp2p
    from swarmnode.p2p.library.hosts import Connection

SILENT_SECONDS = 30.0
"""A connection is dead after a ping was unanswered for this long. Yamux sends the next ping 40 s
after an unanswered one."""
FULL_SHARE = 0.75
"""Share of `network.max_connections` above which connections are closed. The rest stays free for
new peers, which need a connection to receive addresses of other peers."""
SETTLED_SECONDS = 20.0
"""Time after which a new peer has received addresses of others, seconds."""
TURNOVER_SECONDS = 600.0
"""Interval between exchanges, before jitter."""


class PeerLink(NamedTuple):
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


def peers_to_drop(links: Collection[PeerLink], max_connections: int, now: float) -> list[str]:
    """Return the peers to disconnect. `max_connections` is `network.max_connections`."""
    excess = len(links) - int(FULL_SHARE * max_connections)
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


def peer_to_replace(
    links: Collection[PeerLink], target: int, now: float, rng: random.Random
) -> str | None:
    """Return a random peer to replace, or None below `target` connections. The oldest half of the
    outbound peers is never replaced."""
    outbound = sorted((each for each in links if not each.inbound), key=_age)
    if len(links) < target or len(outbound) < target // 2:
        return None
    young = [
        each.peer
        for each in outbound[target // 4 :]
        if each.spare and now - each.since >= SETTLED_SECONDS
    ]
    return rng.choice(young) if young else None


def _age(link: PeerLink) -> float:
    return link.since


class Liveness:
    """Tracks the pings of all connections."""

    def __init__(self) -> None:
        self._unanswered: dict[Connection, tuple[int, float]] = {}
        """Connection → (number of its unanswered ping, time of the first check that saw it)."""

    def dead(self, connections: Iterable[Connection], now: float) -> list[Connection]:
        """Return the connections to close.

        Received bytes count as a sign of life, because the answer to a ping can be half a minute
        late on a line that is busy with weights.
        """
        since = {}
        for each in connections:
            number, answered = each.ping
            if number and not answered:
                before = self._unanswered.get(each)
                since[each] = before if before and before[0] == number else (number, now)
        self._unanswered = since
        return [
            each
            for each, (_, at) in since.items()
            if now - max(at, each.last_received or at) >= SILENT_SECONDS
        ]
