"""The state of a new node: φ of a neighbour, fetched (`StateSeeker`) and served (`StateServer`). No
torch.

    new node    ask known neighbours ─▶ fetch φ of the one furthest ahead
                ─▶ AdoptState ─▶ trainer
    neighbour   request ─▶ WriteState ─▶ trainer ─▶ StateWritten ─▶ offer the file

A node that has trained never takes a state, because a peer could otherwise overwrite its weights. A
node that has fallen behind catches up by swaps, each of which passes the gate.

No check detects a state that was tuned against this node, and replicas of a swarm are never equal,
so neighbours cannot vouch for each other. A node therefore takes a state from known peers only
(`swarm.known`); without any it starts from the base policy and learns from shared groups. The file
must have the root that the neighbour announced.
"""

from __future__ import annotations

import logging
import random
from typing import Final

import msgspec
import trio

from swarmnode.errors import BadMessage, LocalError, PeerError
from swarmnode.p2p.api import Network
from swarmnode.swarm.known import KnownPeers
from swarmnode.weights import local
from swarmnode.weights.layout import payload_limit
from swarmnode.weights.local import (
    ADOPTIONS,
    PROOF,
    STATE_CODEC,
    LocalReplica,
    SendToTrainer,
)
from swarmnode.weights.messages import (
    MESSAGE_BYTES,
    StateRequest,
    StateResponse,
    decode_state,
)
from swarmnode.weights.network.discovery import Discovery
from swarmnode.weights.network.payload_store import (
    PayloadOffer,
    PayloadStore,
    RemotePayload,
    offer_seconds,
)
from swarmnode.weights.rule import LARGEST_OUTER_STEP
from swarmnode.wire import ids, strict

log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 3.0
"""Least duration of a search, in which further neighbours may connect."""
POLL_INTERVAL: Final = 0.5
ASKED: Final = 3
"""Maximum number of neighbours that are asked at a time, because each writes a file of its
weights."""
ADOPT_SECONDS: Final = 300.0
"""Time limit for the trainer to read and adopt a state."""


class StateSeeker:
    """Searches for a state while the trainer has none.

    Args:
        known: Peers whose state may be taken.
    """

    def __init__(
        self,
        network: Network,
        replica: LocalReplica,
        discovery: Discovery,
        store: PayloadStore,
        send_to_trainer: SendToTrainer,
        known: KnownPeers,
        rng: random.Random | None = None,
    ) -> None:
        self._network = network
        self._replica = replica
        self._discovery = discovery
        self._store = store
        self._send_to_trainer = send_to_trainer
        self._known = known
        self._rng = rng or random.Random()
        self._wanted = trio.Event()
        self._verdict = trio.Event()
        self._outcome = ""
        """The trainer's verdict on the last state."""

    def trainer_started(self) -> None:
        """Start a search if the trainer is new."""
        if self._replica.facts is not None and self._replica.facts.fresh:
            self._wanted.set()

    async def run(self) -> None:
        """Run searches until cancelled. Tell the trainer to start with its own weights if a search
        finds no state."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            if not await self._search():
                self._send_to_trainer(local.AdoptState("", "", 0))

    def adopted(self, message: local.StateAdopted) -> None:
        """Record the trainer's verdict on a state."""
        outcome = message.outcome if message.outcome in ADOPTIONS else "local"
        self._outcome = outcome
        if outcome not in ("adopted", "local") and message.peer:
            self._network.rejected(message.peer, f"weights_state_{outcome}", ADOPTIONS[outcome])
        self._verdict.set()

    async def _search(self) -> bool:
        """Ask known neighbours and fetch the state of the one furthest ahead. Return True if one
        was adopted."""
        if not self._known:
            log.info("starting from the base policy: this node has no known peers (stages.trust)")
            return False
        began = trio.current_time()
        deadline = began + local.JOIN_SECONDS + self._replica.writing_seconds
        asked: set[str] = set()
        silent: set[str] = set()
        offers: dict[str, RemotePayload] = {}
        async with trio.open_nursery() as nursery:
            while trio.current_time() < deadline:
                others = [
                    peer
                    for peer in self._discovery.alike()
                    if peer in self._known and peer not in asked
                ]
                chosen = self._rng.sample(
                    others, min(len(others), max(0, ASKED - len(offers) - len(silent)))
                )
                asked.update(chosen)
                silent.update(chosen)
                for peer in chosen:
                    nursery.start_soon(self._ask, peer, offers, silent)
                waited = trio.current_time() - began >= GRACE_SECONDS
                if offers and (waited or len(offers) >= ASKED):
                    furthest = max(offers, key=lambda peer: offers[peer].outer_step)
                    if await self._take(offers.pop(furthest)):
                        nursery.cancel_scope.cancel()
                        return True
                    continue
                if waited and not silent and not others:
                    break  # no known neighbour is ahead of this node
                await trio.sleep(POLL_INTERVAL)
            nursery.cancel_scope.cancel()
        log.info("starting from the base policy: no state to take, known neighbours=%d", len(asked))
        return False

    async def _ask(self, peer: str, offers: dict[str, RemotePayload], silent: set[str]) -> None:
        try:
            offer = await self._request_offer(peer)
            if offer is not None and 0 < offer.outer_step <= LARGEST_OUTER_STEP:
                offers[peer] = offer
        finally:
            silent.discard(peer)

    async def _request_offer(self, peer: str) -> RemotePayload | None:
        """Request a peer's state. Return None if it has none or answers with an invalid message."""
        try:
            data = await self._network.requests.request(
                peer,
                ids.WEIGHTS_STATE_PROTOCOL,
                strict.encode(StateRequest(self._replica.fingerprint, self._replica.blocks)),
                deadline=min(
                    WRITE_SECONDS + MARGIN_SECONDS + self._replica.writing_seconds, ANSWER_SECONDS
                ),
                max_response_bytes=MESSAGE_BYTES,
            )
        except PeerError as error:
            log.info("no state: peer=%s error=%s", peer, error)
            return None
        try:
            response = decode_state(data)
            if not isinstance(response, StateResponse):
                raise BadMessage("schema", "not a response")
            if response.size > self._limit():
                raise BadMessage("oversize", f"{response.size} bytes of state")
        except BadMessage as bad:
            log.warning("invalid answer about a state: peer=%s reason=%s", peer, bad)
            self._network.rejected(peer, "weights_manifest", PROOF)
            return None
        return RemotePayload(
            peer, response.transfer, response.root, response.size, response.outer_step
        )

    def _limit(self) -> int:
        return (
            payload_limit(self._replica.facts.layout, STATE_CODEC)
            if self._replica.facts is not None
            else 0
        )

    async def _take(self, remote: RemotePayload) -> bool:
        """Fetch a state and have the trainer adopt it. Return True if it did."""
        path, outer_step = self._store.new_path(), remote.outer_step
        deadline = trio.current_time() + offer_seconds(remote.size)
        try:
            self._send_to_trainer(local.AdoptState(remote.peer, "", outer_step))
            await self._store.fetch(remote, path, self._limit(), deadline)
            self._verdict, self._outcome = trio.Event(), ""
            if not self._send_to_trainer(local.AdoptState(remote.peer, str(path), outer_step)):
                return False
            with trio.move_on_after(ADOPT_SECONDS):
                await self._verdict.wait()
            if self._outcome == "adopted":
                return True
            log.warning(
                "state not adopted: peer=%s outcome=%s", remote.peer, self._outcome or "timeout"
            )
        except BadMessage as bad:
            log.warning("invalid state: peer=%s reason=%s", remote.peer, bad)
            self._network.rejected(remote.peer, "weights_state", PROOF)
        except (PeerError, LocalError) as error:
            log.info("state not fetched: peer=%s error=%s", remote.peer, error)
        finally:
            self._store.discard(path)
        return False


# ---- serving -------------------------------------------------------------------------------------


WRITE_SECONDS: Final = 30.0
"""Time limit for the trainer to write its state, in addition to `writing_seconds`."""
MARGIN_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 400.0
"""Longest time until an answer, reached at 16 billion weights."""
KEEP_SECONDS: Final = 5.0
KEEP_FACTOR: Final = 20.0
"""A written state answers requests for `max(KEEP_SECONDS, KEEP_FACTOR × time to write it)`, so that
requests cost the trainer at most one twentieth of its time."""
MOST_STATES: Final = 2
SMALL_BYTES: Final = 2**30
"""Offered states take at most `max(SMALL_BYTES, MOST_STATES × size)` of disk."""


class WrittenState(msgspec.Struct, frozen=True):
    """A file with this node's slow weights."""

    until: float
    """End of the time in which it answers requests, on trio's clock."""
    outer_step: int
    offer: PayloadOffer
    """Offer to all peers. It uses none of the slots for partners."""


class StateServer:
    """Serves this node's slow weights φ to new neighbours.

    One file is written at a time, and one offer serves all requests for it.
    """

    def __init__(
        self,
        network: Network,
        replica: LocalReplica,
        store: PayloadStore,
        send_to_trainer: SendToTrainer,
    ) -> None:
        self._network = network
        self._replica = replica
        self._store = store
        self._send_to_trainer = send_to_trainer
        self._state: WrittenState | None = None
        self._kept: list[PayloadOffer] = []
        """Offers of the written states."""
        self._writing: trio.Event | None = None
        """Set when the trainer has written the state; None while it writes none."""
        self._asked_at = 0.0

    def start(self) -> None:
        self._network.requests.serve(
            ids.WEIGHTS_STATE_PROTOCOL,
            self._serve,
            max_request_bytes=MESSAGE_BYTES,
            max_response_bytes=MESSAGE_BYTES,
            concurrent=8,
            per_peer=1,
            deadline=ANSWER_SECONDS,
        )

    @property
    def is_writing(self) -> bool:
        """True while the trainer writes a state. It makes no copies for swaps meanwhile."""
        return (
            self._writing is not None and trio.current_time() < self._asked_at + self._write_seconds
        )

    @property
    def _write_seconds(self) -> float:
        return min(WRITE_SECONDS + self._replica.writing_seconds, ANSWER_SECONDS - MARGIN_SECONDS)

    def trainer_started(self) -> None:
        self._state = self._writing = None

    async def written(self, message: local.StateWritten) -> None:
        """Offer the state that the trainer has written."""
        payload = await self._store.open(message.path)
        if payload is not None:
            now = trio.current_time()
            until = now + max(KEEP_SECONDS, KEEP_FACTOR * (now - self._asked_at))
            offer = self._store.offer(payload, until + offer_seconds(payload.source.size), None)
            self._state = WrittenState(until, message.outer_step, offer)
            self._kept.append(offer)
        if self._writing is not None:
            self._writing.set()
            self._writing = None

    async def _serve(self, peer: str, data: bytes) -> bytes:
        """Answer a request. Raises PeerError, which resets the stream."""
        try:
            request = decode_state(data)
            if not isinstance(request, StateRequest):
                raise BadMessage("schema", "not a request")
        except BadMessage:
            self._network.rejected(peer, "weights_malformed", PROOF)
            raise
        mine = self._replica.fingerprint, self._replica.blocks
        if self._replica.facts is None or (request.fingerprint, request.blocks) != mine:
            raise PeerError("another policy")
        state = await self._current()
        offer = state.offer
        if not self._store.extend(offer, trio.current_time() + offer_seconds(offer.size)):
            raise PeerError("the state has expired")
        return strict.encode(
            StateResponse(state.outer_step, offer.transfer, offer.root, offer.size)
        )

    async def _current(self) -> WrittenState:
        """Return a state that has not expired, or the last one if the disk has no room for another.
        Raises PeerError if there is none."""
        if self._state is None or (trio.current_time() >= self._state.until and self._has_room()):
            if self._writing is None:  # one file for all waiting requests
                self._writing, self._asked_at = trio.Event(), trio.current_time()
                self._send_to_trainer(local.WriteState())
            with trio.move_on_after(self._write_seconds):
                await self._writing.wait()
        if self._state is None:
            raise PeerError("the state is not ready")
        return self._state

    def _has_room(self) -> bool:
        """Return True if the disk may hold one more state. A large one is fetched for hours, and
        further requests arrive meanwhile."""
        self._kept = [offer for offer in self._kept if self._store.is_offered(offer)]
        size = max((offer.size for offer in self._kept), default=0)
        return sum(offer.size for offer in self._kept) + size <= max(
            SMALL_BYTES, MOST_STATES * size
        )
