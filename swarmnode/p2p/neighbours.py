"""The neighbours protocol, `/swarmnode/neighbours/1`: connected peers exchange what they know about
their swarm.

    this node ─ own addresses, session, summary, groups used ─▶ peer
    this node ◀─ peers, sessions, summaries, successor ──────── peer

    addresses ─▶ reports.py      sessions  ─▶ sessions.py
    summaries ─▶ summaries.py    successor ─▶ daemon/member.py

A peer gets a request right after it connects, and several in its first minute, because a copied
data directory is often started together with the original. Afterwards each round sends requests to
a few peers, first to those whose last request is oldest. A change of own addresses also starts a
round, because a request carries them.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Awaitable, Callable

import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import Requests
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.nat import Nat
from swarmnode.p2p.peers import PeerTable
from swarmnode.p2p.reports import AddressReports
from swarmnode.p2p.sessions import OwnSession, Witness
from swarmnode.p2p.slots import RateLimiter
from swarmnode.p2p.summaries import Claims, Requesters, SummaryStatistics, aggregate, plain_name
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.envelope import Credentials, open_session, open_summary, seal_summary
from swarmnode.wire.messages import NeighboursRequest, NeighboursResponse, Summary

log = logging.getLogger(__name__)

DEADLINE = 10.0
POLL_SECONDS = 1.0
ROUND_SECONDS = 30.0
"""Minimum interval between rounds; jitter adds up to half of it."""
PEERS_PER_ROUND = 4
ROUND_SHARE = 8
"""A round sends requests to PEERS_PER_ROUND peers, or to 1/ROUND_SHARE of the connected ones if
that is more, so that each peer gets one within five minutes."""
NEW_PEER_SECONDS = 60.0
"""For this time a new peer gets a request every NEW_PEER_INTERVAL_SECONDS."""
NEW_PEER_INTERVAL_SECONDS = 15.0
CHANGES_SECONDS = 0.5
"""Changes of own addresses within this time are sent together."""
REQUEST_BURST = 8
REQUEST_SECONDS = 10.0
"""A peer may send REQUEST_BURST requests at once and one more per REQUEST_SECONDS: those of a new
peer, and as many for changes of its addresses."""
LOGGED_PEERS = 8
"""Number of peers that are logged. Strangers can create any number of peers."""


async def _ignore(peer: str, successor: bytes) -> None:
    await trio.lowlevel.checkpoint()


class Neighbours:
    """Sends and answers requests.

    Args:
        requests: transport of the messages.
        credentials: key and swarm id, which sign the own session and summary.
        table: the known peers, which receives and provides addresses.
        connections: the open connections.
        nat: own addresses and relays.
        on_change: called when the table has changed.
        is_allowed: returns False for peers whose summaries are dropped.
        rng: random source.
        clock: returns Unix time in seconds.

    Attributes:
        own_summary: (creation time in ms) → own summary; None shares nothing.
        used_of: peer id → number of its groups that this node has trained on.
        successor_of: swarm id → swarm id of a known successor; empty without one.
        on_successor: (peer id, swarm id) → done; called with a successor that a peer knows.
        reports: the addresses that peers report.
    """

    def __init__(
        self,
        requests: Requests,
        credentials: Credentials,
        table: PeerTable,
        connections: ConnectionTable,
        nat: Nat,
        on_change: Callable[[], None],
        is_allowed: Callable[[str], bool],
        rng: random.Random,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.own_summary: Callable[[int], Summary | None] = lambda created_at: None
        self.used_of: Callable[[str], int] = lambda peer: 0
        self.successor_of: Callable[[bytes], bytes] = lambda swarm: b""
        self.on_successor: Callable[[str, bytes], Awaitable[None]] = _ignore
        self._session: OwnSession | None = None
        self.reports = AddressReports(table, connections, nat)
        self._requests = requests
        self._credentials = credentials
        self._swarm = credentials.swarm
        self._table = table
        self._nat = nat
        self._on_change = on_change
        self._is_allowed = is_allowed
        self._rng = rng
        self._clock = clock
        self._claims = Claims(credentials.peer)
        self._requesters = Requesters()
        self._witness = Witness()
        self._limiter = RateLimiter(REQUEST_BURST, REQUEST_SECONDS)
        self._logged: set[str] = set()
        self._asked: dict[str, float] = {}
        """Connected peer → time of the last request, or of its connection."""
        self._next_round = 0.0
        self._summary_frame, self._summary_at = b"", -math.inf
        requests.serve(
            ids.NEIGHBOURS_PROTOCOL,
            self._answer,
            max_request_bytes=limits.NEIGHBOURS_REQUEST_BYTES,
            max_response_bytes=limits.NEIGHBOURS_RESPONSE_BYTES,
            concurrent=16,
            per_peer=2,  # two processes with one key are one peer
            deadline=DEADLINE,
        )

    def detect_duplicates(self) -> None:
        """Send a session from now on. `run`, `greet` and `ask` then raise Refused if another
        process, which started earlier, uses this node's key."""
        name = self._rng.randbytes(limits.SESSION_BYTES)
        self._session = OwnSession(self._credentials, name, self._clock)

    # -- when to ask

    async def run(self) -> None:
        """Ask connected peers until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_address_changes)
            while True:
                await trio.sleep(POLL_SECONDS)
                for peer in self._due(trio.current_time()):
                    nursery.start_soon(self.ask, peer)

    async def greet(self, peer: str) -> None:
        """Ask a new peer, after its reachability check, because the request carries own addresses.
        Never raises for a fault of the peer."""
        await self._nat.greet(peer)
        if peer in self._table.connected():
            await self.ask(peer)

    async def _send_address_changes(self) -> None:
        """Ask a few peers when own addresses change."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._nat.addresses_changed()
                await trio.sleep(CHANGES_SECONDS)
                connected = self._table.connected()
                for peer in self._rng.sample(connected, min(PEERS_PER_ROUND, len(connected))):
                    nursery.start_soon(self.ask, peer)

    def _due(self, now: float) -> list[str]:
        """Return the peers to ask now."""
        since = {
            peer: known.connected_at
            for peer in self._table.connected()
            if (known := self._table.get(peer)) is not None
        }
        self._asked = {peer: self._asked.get(peer, at) for peer, at in since.items()}
        new = [peer for peer, at in since.items() if now - at < NEW_PEER_SECONDS]
        due = [peer for peer in new if now - self._asked[peer] >= NEW_PEER_INTERVAL_SECONDS]
        if now >= self._next_round:
            self._next_round = now + ROUND_SECONDS * self._rng.uniform(1.0, 1.5)
            settled = [peer for peer in since if peer not in new]
            settled.sort(key=lambda peer: (self._asked[peer], self._rng.random()))
            due += settled[: max(PEERS_PER_ROUND, math.ceil(len(since) / ROUND_SHARE))]
        return due

    # -- asking

    async def ask(self, peer: str) -> None:
        """Ask one connected peer. Never raises for a fault of the peer.

        Raises:
            Refused: see `detect_duplicates`.
        """
        self._asked[peer] = trio.current_time()
        try:
            data = await self._requests.request(
                peer,
                ids.NEIGHBOURS_PROTOCOL,
                codec.encode(self._request_to(peer)),
                deadline=DEADLINE,
                max_response_bytes=limits.NEIGHBOURS_RESPONSE_BYTES,
            )
            response = codec.decode(data, NeighboursResponse, limits.NEIGHBOURS_RESPONSE_BYTES)
            if response.swarm == self._swarm:
                await self._take(response, peer)
            else:
                self.reports.outcomes["other_swarm"] += 1
            if response.successor:
                await self.on_successor(peer, response.successor)
        except PeerError as error:
            log.debug("no neighbours from %s: %s", peer, error)

    def _request_to(self, peer: str) -> NeighboursRequest:
        summary = self._own_summary()
        return NeighboursRequest(
            self._swarm,
            self._nat.own_addresses(peer)[: limits.PEER_ADDRESSES],
            self._session.issue() if self._session is not None else b"",
            summary,
            self.used_of(peer) if summary else 0,
        )

    def _own_summary(self) -> bytes:
        """Return the own signed summary, signed at most SUMMARY_SECONDS ago; empty if none is
        shared."""
        now = trio.current_time()
        if now - self._summary_at >= limits.SUMMARY_SECONDS:
            own = self.own_summary(int(self._clock() * 1000))
            if own is None:
                return b""
            self._summary_frame = seal_summary(own, self._credentials.key, self._swarm)
            self._summary_at = now
        return self._summary_frame

    async def _take(self, response: NeighboursResponse, peer: str) -> None:
        """Use the response of a peer of this swarm. Raises BadMessage and Refused."""
        self.reports.store_others(response.peers, peer, trio.current_time())
        self._on_change()
        if self._session is not None:
            for session in response.sessions:
                self._session.check(session)
        for frame in response.summaries:
            if frame not in self._claims:
                # verifying many signatures takes time, so other tasks may run in between
                await trio.lowlevel.checkpoint()
                signer, summary = open_summary(frame, self._swarm)
                self._take_summary(frame, signer, summary, peer)

    def _take_summary(self, frame: bytes, signer: str, summary: Summary, sender: str) -> None:
        if self._is_allowed(signer):
            self._claims.take(frame, signer, summary, sender, self._clock())
            logged = self._logged
            if signer == sender and signer not in logged and len(logged) < LOGGED_PEERS:
                logged.add(signer)
                log.info("connected to %s (%s)", plain_name(summary.name) or "a node", signer)

    # -- answering

    async def _answer(self, peer: str, data: bytes) -> bytes:
        """Handle a request. Raises BadMessage, also if another peer signed the session or the
        summary, and PeerError above the request rate."""
        now = trio.current_time()
        if not self._limiter.allow(peer, now):
            raise PeerError(f"{peer} sends too many requests")
        request = codec.decode(data, NeighboursRequest, limits.NEIGHBOURS_REQUEST_BYTES)
        successor = self.successor_of(request.swarm)
        if request.swarm != self._swarm:
            return codec.encode(NeighboursResponse(self._swarm, [], [], [], successor))
        sessions: list[bytes] = []
        if request.session:
            signer, session = open_session(request.session, self._swarm)
            if signer != peer:
                raise BadMessage("bounds", "the session is signed by another peer")
            sessions = self._witness.received(peer, session.id, request.session, now)
            self._requesters.record(
                peer, session.issued_at / 1000 - self._clock(), request.used, now
            )
        if request.summary:
            signer, summary = open_summary(request.summary, self._swarm)
            if signer != peer:
                raise BadMessage("bounds", "the summary is signed by another peer")
            self._take_summary(request.summary, signer, summary, peer)
        self.reports.store_own(request.addresses, peer, now)
        self._claims.expire(self._clock())
        own = [frame] if (frame := self._own_summary()) else []
        summaries = own + self._claims.frames(limits.SUMMARIES - len(own), peer, self._rng)
        return codec.encode(
            NeighboursResponse(
                self._swarm, self.reports.to_share(peer), sessions, summaries, successor
            )
        )

    # -- what was learned

    def statistics(self) -> SummaryStatistics:
        """Return the swarm as its nodes describe themselves."""
        now = self._clock()
        self._claims.expire(now)
        offset = self._requesters.clock_offset(trio.current_time())
        return aggregate(self._claims.all(), self._requesters.used(), offset, now)
