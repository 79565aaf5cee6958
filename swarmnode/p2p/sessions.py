"""The session protocol, `/swarmnode/session/1`: detects another process with this node's key.

A node cannot observe such a duplicate directly, because no peer reports a node's own address to it.
A peer that is connected to both receives messages of both. Each node therefore signs a session and
sends it to its peers. They answer with other sessions under the same key.

Such an answer is a proof: the session is signed by the key, was created by another process, was
issued after this process started, and is issued again later. A peer that reports a session can
neither forge it nor replay one of an earlier run. `Stamps` makes times rise even if the clock was
ahead in an earlier run and has been corrected.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import BadMessage, PeerError, Refused
from swarmnode.files import write_atomically
from swarmnode.p2p.api import Requests
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.envelope import open_session, seal_session
from swarmnode.wire.messages import Session, SessionResponse

log = logging.getLogger(__name__)

DEADLINE = 10.0
POLL_INTERVAL = 1.0
"""Interval of checks for peers that are due."""
NOTIFY_INTERVAL = 30.0
"""Interval between messages to one peer, before jitter."""
EARLY_SECONDS = 60.0
"""A peer that connected less than this ago is notified every RETRY_SECONDS, because a copied data
directory is often started together with the original."""
RETRY_SECONDS = 5.0
"""Interval after a failed message (the peer may have just started) and after a first suspicion."""
PEERS_PER_ROUND = 4
"""Peers notified in one round."""
REMEMBER_SECONDS = 300.0
RESERVED_SECONDS = 30.0
MAX_STAMP_DIGITS = 15
"""Maximum number of decimal digits, enough until the year 33658."""
MAX_SUSPECTS = 16
PEERS = 4096
"""Number of peers whose sessions are stored; the least recently active is dropped."""


@dataclasses.dataclass(frozen=True)
class SessionStatistics:
    answers: int
    """Answers received."""
    duplicates: int
    """Proofs that the key is used by another process."""


class Stamps:
    """Timestamps that increase across all runs with one data directory, even if the clock is set
    back.

    The file holds a stamp that no session has reached. It is moved RESERVED_SECONDS ahead at a
    time, so that it is written rarely. A copy of the directory starts up to RESERVED_SECONDS ahead
    of the original, and its detection is delayed by that much.

    Attributes:
        first: stamp of this run's start in milliseconds, above all stamps of earlier runs.
    """

    def __init__(self, clock: Callable[[], float], path: Path | None = None) -> None:
        self._clock = clock
        self._path = path
        now = int(clock() * 1000)
        self._reserved = self._read()
        self.first = self._last = max(now, self._reserved)
        self._ahead = self.first - now

    async def next(self) -> int:
        """Return the current stamp, above every earlier one."""
        self._last = max(self._last + 1, int(self._clock() * 1000) + self._ahead)
        if self._path is not None and self._last > self._reserved:
            self._reserved = self._last + int(RESERVED_SECONDS * 1000)
            text = f"{self._reserved}\n".encode()
            try:
                await trio.to_thread.run_sync(write_atomically, self._path, text)
            except OSError as error:
                log.debug("cannot write %s: %s", self._path, error)
        return self._last

    def _read(self) -> int:
        """Return the stored stamp; 0 if none is usable."""
        try:
            text = self._path.read_text(encoding="ascii").strip() if self._path is not None else ""
        except (OSError, ValueError):
            return 0
        return int(text) if text.isdigit() and len(text) <= MAX_STAMP_DIGITS else 0


class Witness:
    """Sessions of other nodes. Pure: `now` is in seconds on any clock."""

    def __init__(self) -> None:
        self._sessions: collections.OrderedDict[str, dict[bytes, tuple[float, bytes]]] = (
            collections.OrderedDict()
        )

    def received(self, peer: str, session: Session, frame: bytes, now: float) -> list[bytes]:
        """Store the session of `peer`; returns the frames of its other recent sessions, latest
        first."""
        known = {
            name: (at, other)
            for name, (at, other) in self._sessions.pop(peer, {}).items()
            if now - at <= REMEMBER_SECONDS
        }
        known.pop(session.session, None)
        others = [other for _, other in sorted(known.values(), reverse=True)][: limits.SESSIONS]
        latest = sorted(known.items(), key=lambda item: item[1][0], reverse=True)[: limits.SESSIONS]
        self._sessions[peer] = {session.session: (now, frame), **dict(latest)}
        if len(self._sessions) > PEERS:
            self._sessions.popitem(last=False)
        return others

    def __len__(self) -> int:
        return len(self._sessions)


class Sessions:
    """The session of this process. `run` announces it to every peer and raises if a duplicate
    started earlier.

    Args:
        requests: transport of the messages.
        own: peer id of this node.
        key: signs the session.
        swarm: swarm id, part of the signature.
        connected: returns the connected peers.
        clock: Unix time in seconds.
        rng: random source.
        stamp_file: see `Stamps`.
    """

    def __init__(
        self,
        requests: Requests,
        own: str,
        key: Ed25519PrivateKey,
        swarm: bytes,
        connected: Callable[[], list[str]],
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        stamp_file: Path | None = None,
    ) -> None:
        self._requests = requests
        self._own = own
        self._key = key
        self._swarm = swarm
        self._connected = connected
        self._stamps = Stamps(clock, stamp_file)
        self._rng = rng or random.Random()
        self._session = os.urandom(limits.SESSION_BYTES)
        self._started_at = self._stamps.first
        self._witness = Witness()
        self._suspects: dict[bytes, int] = {}  # session → time of its first observed issue
        self._answered = 0
        self._duplicates = 0
        requests.serve(
            ids.SESSION_PROTOCOL,
            self._answer,
            max_request_bytes=limits.SESSION_REQUEST_BYTES,
            max_response_bytes=limits.SESSION_RESPONSE_BYTES,
            concurrent=16,
            per_peer=2,
            deadline=DEADLINE,
        )

    async def run(self) -> None:
        """Announce the session until cancelled. Raises Refused when another process with this key
        started earlier."""
        since: dict[str, float] = {}  # connected peer → time it was first seen
        due: dict[str, float] = {}  # connected peer → time of the next message
        while True:
            now = trio.current_time()
            since = {peer: since.get(peer, now) for peer in self._connected()}
            due = {peer: due.get(peer, now) for peer in since}
            for peer in [peer for peer, at in due.items() if at <= now][:PEERS_PER_ROUND]:
                suspected = len(self._suspects)
                early = now - since[peer] < EARLY_SECONDS
                steady = await self.notify(peer) and len(self._suspects) == suspected and not early
                due[peer] = trio.current_time() + (
                    self._rng.uniform(0.5, 1.5) * NOTIFY_INTERVAL if steady else RETRY_SECONDS
                )
            await trio.sleep(POLL_INTERVAL)

    async def notify(self, peer: str) -> bool:
        """Send the session to one peer; returns True if it answered. Raises Refused, but never for
        a fault of the peer."""
        session = Session(self._session, self._started_at, await self._stamps.next())
        try:
            data = await self._requests.request(
                peer,
                ids.SESSION_PROTOCOL,
                seal_session(session, self._key, self._swarm),
                deadline=DEADLINE,
                max_response_bytes=limits.SESSION_RESPONSE_BYTES,
            )
            response = codec.decode(data, SessionResponse, limits.SESSION_RESPONSE_BYTES)
            found = [open_session(frame, self._swarm) for frame in response.sessions]
        except PeerError as error:
            log.debug("session exchange with %s failed: %s", peer, error)
            return False
        self._answered += 1
        for signer, other in found:
            if self.is_duplicate(signer, other):
                self._duplicates += 1
                self._report_duplicate(other)
        return True

    def is_duplicate(self, signer: str, other: Session) -> bool:
        """Return True if `other` proves, with an earlier observation, that another process uses
        this node's key now."""
        if (
            signer != self._own
            or other.session == self._session
            or other.issued_at <= self._started_at
        ):
            return False
        first = self._suspects.setdefault(other.session, other.issued_at)
        if len(self._suspects) > MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        return other.issued_at > first

    def _report_duplicate(self, other: Session) -> None:
        if (other.started_at, other.session) < (self._started_at, self._session):
            raise Refused(
                f"another running node uses this node's key ({self._own}) and started before it:"
                " stop one of the two, or give this one a key of its own (`swarmnode key rotate`)"
            )
        log.error(
            "another running node uses this node's key (%s); it started later and should stop by"
            " itself",
            self._own,
        )

    async def _answer(self, peer: str, data: bytes) -> bytes:
        """Handle a peer's session. Raises BadMessage, also if another key signed it."""
        signer, session = open_session(data, self._swarm)
        if signer != peer:
            raise BadMessage("bounds", "the session is signed by another peer")
        return codec.encode(
            SessionResponse(self._witness.received(peer, session, data, trio.current_time()))
        )

    def statistics(self) -> SessionStatistics:
        return SessionStatistics(self._answered, self._duplicates)
