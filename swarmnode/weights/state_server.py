"""Serves this node's slow weights φ to new neighbours, signed.

    request ─▶ WriteState ─▶ trainer ─▶ StateWritten ─▶ sign and offer the file

One file is written at a time, and one offer serves all requests for it. The signature binds this
node to its manifest: a receiver counts tensors with other hashes as a lie.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec
import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import Network
from swarmnode.weights import local
from swarmnode.weights.local import PROOF, LocalReplica, SendToTrainer
from swarmnode.weights.manifest import StateManifest
from swarmnode.weights.messages import (
    STATE_BYTES,
    STATE_REQUEST_BYTES,
    StateRequest,
    StateResponse,
    decode_state,
    encode_message,
)
from swarmnode.weights.payload_store import PayloadOffer, PayloadStore, offer_seconds
from swarmnode.wire import codec, envelope, ids, strict
from swarmnode.wire.envelope import Credentials

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
    """A file with this node's slow weights, and its signed manifest."""

    until: float
    """End of the time in which it answers requests, on trio's clock."""
    manifest: bytes
    """A signed envelope."""
    offer: PayloadOffer
    """Offer to all peers. It uses none of the slots for partners."""


class StateServer:
    """Answers requests for this node's state."""

    def __init__(
        self,
        network: Network,
        credentials: Credentials,
        replica: LocalReplica,
        store: PayloadStore,
        send_to_trainer: SendToTrainer,
    ) -> None:
        self.served = 0
        """Number of manifests sent."""
        self._network = network
        self._credentials = credentials
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
            max_request_bytes=STATE_REQUEST_BYTES,
            max_response_bytes=STATE_BYTES,
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
        """Sign and offer the state that the trainer has written."""
        payload = await self._store.open(message.path)
        if payload is not None:
            manifest = StateManifest(
                self._replica.state_fingerprint,
                message.outer_step,
                int(time.time() * 1000),
                message.tensors,
            )
            signed = envelope.sign(
                strict.encode(manifest),
                self._credentials.key,
                ids.DOMAIN_STATE,
                self._credentials.swarm,
            )
            now = trio.current_time()
            until = now + max(KEEP_SECONDS, KEEP_FACTOR * (now - self._asked_at))
            offer = self._store.offer(payload, until + offer_seconds(payload.source.size), None)
            self._state = WrittenState(until, codec.encode(signed), offer)
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
        if self._replica.facts is None or request.fingerprint != self._replica.state_fingerprint:
            raise PeerError("another policy")
        state = await self._current()
        offer = state.offer
        if not self._store.extend(offer, trio.current_time() + offer_seconds(offer.size)):
            raise PeerError("the state has expired")
        self.served += 1
        return encode_message(StateResponse(state.manifest, offer.transfer, offer.root, offer.size))

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
