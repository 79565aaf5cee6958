"""Detects another process with this node's key. Pure.

A node cannot observe such a duplicate directly, because no peer reports a node's own address to it.
A peer that is connected to both receives messages of both. Each process therefore signs a session
and sends it to its peers. They answer with the other sessions of the key that arrived after its
own first one. An earlier run of the same node has ended by then, so no honest peer reports it. A
hostile peer cannot report one either, because it was issued before this process started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from swarmnode.errors import Refused
from swarmnode.latest import Latest
from swarmnode.wire import limits
from swarmnode.wire.envelope import Credentials, open_session, seal_session
from swarmnode.wire.messages import Session

log = logging.getLogger(__name__)

REMEMBER_SECONDS = 600.0
"""Twice the time in which `neighbours.py` asks every peer."""
PEERS = 4096
"""Number of peers whose sessions are stored; the least recently active is dropped."""


class OwnSession:
    """The session of this process.

    Args:
        credentials: sign it.
        name: 16 random bytes.
        clock: returns Unix time in seconds.
    """

    def __init__(self, credentials: Credentials, name: bytes, clock: Callable[[], float]) -> None:
        self._credentials = credentials
        self._peer = credentials.peer
        self._name = name
        self._clock = clock
        self._started_at = int(clock() * 1000)
        self._logged = b""

    def issue(self) -> bytes:
        """Return the session, signed now."""
        session = Session(self._name, self._started_at, int(self._clock() * 1000))
        return seal_session(session, self._credentials.key, self._credentials.swarm)

    def check(self, frame: bytes) -> None:
        """Check a session that a peer reported.

        Raises:
            BadMessage: it is not a signed session.
            Refused: it proves that another process, which started earlier, uses this node's key.
        """
        signer, other = open_session(frame, self._credentials.swarm)
        if signer != self._peer or other.id == self._name or other.issued_at <= self._started_at:
            return
        if (other.started_at, other.id) < (self._started_at, self._name):
            raise Refused(
                f"another running node uses this node's key ({self._peer}) and started before it:"
                " stop one of the two, or give this one a key of its own (`swarmnode key rotate`)"
            )
        if other.id != self._logged:
            self._logged = other.id
            log.error(
                "another running node uses this node's key (%s); it started later and should stop"
                " by itself",
                self._peer,
            )


class Sighting(NamedTuple):
    """A session of a peer: when it first and last arrived, and its last frame."""

    first: float
    last: float
    frame: bytes


class Witness:
    """Recent sessions of other nodes. `now` is in seconds on any clock."""

    def __init__(self) -> None:
        self._sessions = Latest[str, dict[bytes, Sighting]](PEERS)

    def received(self, peer: str, name: bytes, frame: bytes, now: float) -> list[bytes]:
        """Store the session `name` of `peer`; returns the frames of its other sessions that arrived
        after the first frame of this one, latest first."""
        known = {
            each: sighting
            for each, sighting in self._sessions.get(peer, {}).items()
            if now - sighting.last <= REMEMBER_SECONDS
        }
        first = known.pop(name, Sighting(now, now, frame)).first
        others = sorted(known.items(), key=lambda item: item[1].last, reverse=True)
        others = others[: limits.SESSIONS]
        self._sessions[peer] = {name: Sighting(first, now, frame), **dict(others)}
        return [other.frame for _, other in others if other.last > first]

    def __len__(self) -> int:
        return len(self._sessions)
