"""Getting the swarm's state from neighbours, for a node that is new or has lost its disk.

    ask three for signed manifests ─▶ `manifest.agreed_source` ─▶ fetch φ ─▶ AdoptState ─▶ trainer,
    on probation

A running node never takes one: whoever could make it take a state could overwrite it. One that has
fallen behind is served by those ahead, exchange by exchange, and each of these passes the gate.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec
import trio

from swarmnode.config import WeightsConfig
from swarmnode.errors import BadMessage, LocalError, PeerError
from swarmnode.p2p.api import Network
from swarmnode.weights import local
from swarmnode.weights.discovery import Discovery
from swarmnode.weights.layout import payload_limit
from swarmnode.weights.local import ADOPTIONS, PROOF, LocalReplica, SendToTrainer
from swarmnode.weights.manifest import (
    AGREE,
    ASK,
    STATE_CODEC,
    StateManifest,
    agreed_source,
    check_manifest,
)
from swarmnode.weights.messages import (
    STATE_BYTES,
    StateRequest,
    StateResponse,
    decode_state,
    encode_message,
)
from swarmnode.weights.payload_store import PayloadStore, RemotePayload
from swarmnode.weights.state_server import (
    ANSWER_SECONDS,
    MARGIN_SECONDS,
    WRITE_SECONDS,
    offer_seconds,
)
from swarmnode.wire import envelope, ids, strict

log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 3.0
"""Time to wait for more neighbours than there are."""
POLL_INTERVAL: Final = 0.5
COMES_SECONDS: Final = 30.0
"""A trainer that waits for a state is told so often that more of it is here."""
ADOPT_SECONDS: Final = 300.0
"""Time for our trainer to read a state and to become it."""


def open_state_manifest(frame: bytes, swarm: bytes) -> tuple[str, StateManifest]:
    """(peer id of its signer, manifest). Raises BadMessage; whose tensors it speaks of is not
    looked at."""
    signed = envelope.open_raw(frame, ids.DOMAIN_STATE, swarm, STATE_BYTES)
    manifest: StateManifest = strict.decode(signed.payload, StateManifest)
    names = [tensor.name for tensor in manifest.tensors]
    if names != sorted(set(names)):
        raise BadMessage("bounds", "tensors are sorted, none twice")
    check_manifest(manifest, names)
    return envelope.peer_id(signed.key), manifest


class CatchUpStatistics(msgspec.Struct, frozen=True):
    adoptions: dict[str, int] = {}
    """Neighbours' states by `local.ADOPTIONS`."""
    served: int = 0
    """Manifests given out."""
    source: str = ""
    """Peer whose state was taken last."""


class OfferedState(msgspec.Struct, frozen=True):
    """What a neighbour signs, and where its tensors can be fetched."""

    manifest: StateManifest
    payload: RemotePayload


class StateSeeker:
    """Takes the section's `join_seconds` and `join_from_one`."""

    def __init__(
        self,
        network: Network,
        swarm: bytes,
        replica: LocalReplica,
        discovery: Discovery,
        store: PayloadStore,
        send_to_trainer: SendToTrainer,
        cfg: WeightsConfig,
        rng: random.Random | None = None,
    ) -> None:
        self._network = network
        self._swarm = swarm
        self._replica = replica
        self._discovery = discovery
        self._store = store
        self._send_to_trainer = send_to_trainer
        self._cfg = cfg
        self._rng = rng or random.Random()
        self._wanted = trio.Event()
        self._adopted = trio.Event()
        self._adoptions: Counter[str] = Counter()
        self._source = ""

    def trainer_started(self) -> None:
        """A fresh trainer waits for what is found here."""
        if self._replica.facts is not None and self._replica.facts.fresh:
            self._wanted.set()

    async def run(self) -> None:
        """Look for a state whenever the trainer has none, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            if not await self._search():
                self._send_to_trainer(local.AdoptState("", "", 0, []))

    def statistics(self, served: int) -> CatchUpStatistics:
        return CatchUpStatistics(dict(self._adoptions), served, self._source)

    def adopted(self, message: local.StateAdopted) -> None:
        """The trainer has read a state, and taken it or not."""
        outcome = message.outcome if message.outcome in ADOPTIONS else "local"
        self._adoptions[outcome] += 1
        if ADOPTIONS[outcome] and message.peer:
            self._network.rejected(message.peer, f"weights_state_{outcome}", ADOPTIONS[outcome])
        self._adopted.set()

    async def _search(self) -> bool:
        """Ask, choose, fetch, until a state was adopted or there is none. Whether one was."""
        began = trio.current_time()
        deadline = began + self._cfg.join_seconds + self._replica.writing_seconds
        asked: set[str] = set()
        silent: set[str] = set()
        offers: dict[str, OfferedState] = {}
        async with trio.open_nursery() as nursery:
            while trio.current_time() < deadline:
                others = [peer for peer in self._discovery.alike() if peer not in asked]
                chosen = self._rng.sample(
                    others, min(len(others), max(0, ASK - len(offers) - len(silent)))
                )
                asked.update(chosen)
                silent.update(chosen)
                for peer in chosen:
                    nursery.start_soon(self._ask, peer, offers, silent)
                waited = trio.current_time() - began >= GRACE_SECONDS
                source = (
                    self._source_among(offers, alone=waited and not silent)
                    if waited or len(offers) >= ASK
                    else None
                )
                if source is not None:
                    if await self._take(offers.pop(source)):
                        nursery.cancel_scope.cancel()
                        return True
                    continue
                enough = len(offers) >= min(ASK, len(self._network.connected()))
                if waited and not silent and (enough or not others):
                    break  # nobody is ahead of us, or too few to agree
                await trio.sleep(POLL_INTERVAL)
            nursery.cancel_scope.cancel()
        steps = sorted((offer.manifest.outer_step for offer in offers.values()), reverse=True)
        log.info("no state to take: %d neighbours asked, their outer steps %s", len(asked), steps)
        if len(offers) == 1 and steps[0] > 0 and not self._cfg.join_from_one:
            (only,) = offers
            log.warning(
                "starting from the base policy: only neighbour %s offers a state, and a state is"
                " taken where %d agree; if you trust it, set weights.join_from_one = true",
                only,
                AGREE,
            )
        return False

    def _source_among(self, offers: dict[str, OfferedState], *, alone: bool) -> str | None:
        """Whose state to take; alone: a single neighbour's, where that was asked for."""
        agree = 1 if alone and self._cfg.join_from_one and len(offers) == 1 else AGREE
        source = agreed_source(
            {peer: offer.manifest for peer, offer in offers.items()},
            self._replica.state_fingerprint,
            agree,
        )
        return source if source is not None and offers[source].manifest.outer_step > 0 else None

    async def _ask(self, peer: str, offers: dict[str, OfferedState], silent: set[str]) -> None:
        try:
            offer = await self._offer_of(peer)
            if offer is not None:
                offers[peer] = offer
        finally:
            silent.discard(peer)

    async def _offer_of(self, peer: str) -> OfferedState | None:
        try:
            data = await self._network.requests.request(
                peer,
                ids.WEIGHTS_STATE_PROTOCOL,
                encode_message(StateRequest(self._replica.state_fingerprint)),
                deadline=min(
                    WRITE_SECONDS + MARGIN_SECONDS + self._replica.writing_seconds, ANSWER_SECONDS
                ),
                max_response_bytes=STATE_BYTES,
            )
        except PeerError as error:
            log.info("no state manifest of %s: %s", peer, error)
            return None
        try:
            return self._open(peer, data)
        except BadMessage as bad:
            log.warning("state manifest of %s: %s", peer, bad)
            self._network.rejected(peer, "weights_manifest", PROOF)
            return None

    def _open(self, peer: str, data: bytes) -> OfferedState:
        """Raises BadMessage unless it is `peer` that signed a manifest of exactly our tensors."""
        response = decode_state(data)
        if not isinstance(response, StateResponse):
            raise BadMessage("schema", "not a response")
        signer, manifest = open_state_manifest(response.manifest, self._swarm)
        if signer != peer:
            raise BadMessage("signature", "somebody else's")
        facts = self._replica.facts
        check_manifest(manifest, [spec.name for spec in facts.layout] if facts is not None else [])
        if response.size > self._limit():
            raise BadMessage("oversize", f"{response.size} bytes of state")
        return OfferedState(
            manifest, RemotePayload(peer, response.transfer, response.root, response.size)
        )

    def _limit(self) -> int:
        return (
            payload_limit(self._replica.facts.layout, STATE_CODEC)
            if self._replica.facts is not None
            else 0
        )

    async def _take(self, offer: OfferedState) -> bool:
        """Fetch a state, which the trainer waits for, and have it adopted. Whether it was."""
        path = self._store.new_path()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_that_it_comes, offer, path)
            taken = await self._fetch(offer, path)
            nursery.cancel_scope.cancel()
        return taken

    async def _tell_that_it_comes(self, offer: OfferedState, path: Path) -> None:
        """At 7 B a state is ten minutes on a home's line: whoever waits for it shall see that it
        moves."""
        before = 0
        while True:
            await trio.sleep(COMES_SECONDS)
            lacking = self._store.lacking(path)
            if lacking is not None and lacking < before:
                self._send_to_trainer(
                    local.AdoptState(offer.payload.peer, "", offer.manifest.outer_step, [])
                )
            before = lacking or 0

    async def _fetch(self, offer: OfferedState, path: Path) -> bool:
        remote, manifest = offer.payload, offer.manifest
        deadline = trio.current_time() + offer_seconds(remote.size)
        try:
            self._send_to_trainer(local.AdoptState(remote.peer, "", manifest.outer_step, []))
            await self._store.fetch(remote, path, self._limit(), deadline)
            self._adopted = trio.Event()
            self._source = remote.peer
            if not self._send_to_trainer(
                local.AdoptState(remote.peer, str(path), manifest.outer_step, manifest.tensors)
            ):
                return False
            before = self._adoptions["adopted"]
            with trio.move_on_after(ADOPT_SECONDS):
                await self._adopted.wait()
            return self._adoptions["adopted"] > before
        except BadMessage as bad:
            log.warning("state of %s: %s", remote.peer, bad)
            self._network.rejected(remote.peer, "weights_state", PROOF)
        except (PeerError, LocalError) as error:
            log.info("state of %s: %s", remote.peer, error)
        finally:
            self._store.discard(path)
        return False
