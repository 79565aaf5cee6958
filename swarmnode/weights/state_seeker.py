"""Fetches the swarm's state from a neighbour, for a node that is new or has lost its disk.

    ask three neighbours for signed manifests ─▶ `manifest.agreed_source` ─▶ fetch φ
        ─▶ AdoptState ─▶ trainer, on probation

A node that has trained never takes a state, because a peer could otherwise overwrite its weights. A
node that has fallen behind catches up by swaps, each of which passes the gate.
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
"""Least duration of a search, in which further neighbours may connect."""
POLL_INTERVAL: Final = 0.5
PROGRESS_SECONDS: Final = 30.0
"""Interval of the progress messages to a trainer that waits for a state."""
ADOPT_SECONDS: Final = 300.0
"""Time limit for the trainer to read and adopt a state."""


def open_state_manifest(frame: bytes, swarm: bytes) -> tuple[str, StateManifest]:
    """Return the signer's peer id and the manifest. The tensors are not compared with a layout.

    Raises:
        BadMessage: The envelope or the manifest is invalid.
    """
    signed = envelope.open_raw(frame, ids.DOMAIN_STATE, swarm, STATE_BYTES)
    manifest: StateManifest = strict.decode(signed.payload, StateManifest)
    names = [tensor.name for tensor in manifest.tensors]
    if names != sorted(set(names)):
        raise BadMessage("bounds", "tensors must be sorted and unique")
    check_manifest(manifest, names)
    return envelope.peer_id(signed.key), manifest


class CatchUpStatistics(msgspec.Struct, frozen=True):
    """Counts of fetched and served states."""

    adoptions: dict[str, int] = {}
    """Neighbours' states by `local.ADOPTIONS`."""
    served: int = 0
    """Number of manifests sent."""
    source: str = ""
    """Peer whose state was taken last."""


class OfferedState(msgspec.Struct, frozen=True):
    """A neighbour's manifest and the file with its tensors."""

    manifest: StateManifest
    payload: RemotePayload


class StateSeeker:
    """Searches for a state while the trainer has none.

    Args:
        cfg: `join_from_one` is used.
    """

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
                self._send_to_trainer(local.AdoptState("", "", 0, []))

    def statistics(self, served: int) -> CatchUpStatistics:
        return CatchUpStatistics(dict(self._adoptions), served, self._source)

    def adopted(self, message: local.StateAdopted) -> None:
        """Record the trainer's verdict on a state."""
        outcome = message.outcome if message.outcome in ADOPTIONS else "local"
        self._adoptions[outcome] += 1
        if ADOPTIONS[outcome] and message.peer:
            self._network.rejected(message.peer, f"weights_state_{outcome}", ADOPTIONS[outcome])
        self._adopted.set()

    async def _search(self) -> bool:
        """Ask neighbours, choose a source and fetch its state. Return True if one was adopted."""
        began = trio.current_time()
        deadline = began + local.JOIN_SECONDS + self._replica.writing_seconds
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
                    break  # no neighbour is ahead of this node, or too few agree
                await trio.sleep(POLL_INTERVAL)
            nursery.cancel_scope.cancel()
        steps = sorted((offer.manifest.outer_step for offer in offers.values()), reverse=True)
        log.info("no state to take: neighbours=%d outer_steps=%s", len(asked), steps)
        if len(offers) == 1 and steps[0] > 0 and not self._cfg.join_from_one:
            (only,) = offers
            log.warning(
                "starting from the base policy: only neighbour %s offers a state, and %d must"
                " agree; if you trust it, set weights.join_from_one = true",
                only,
                AGREE,
            )
        return False

    def _source_among(self, offers: dict[str, OfferedState], *, alone: bool) -> str | None:
        """Return the peer whose state to take, or None.

        Args:
            offers: The neighbours' answers.
            alone: True if a single neighbour suffices, given `join_from_one`.
        """
        agree = 1 if alone and self._cfg.join_from_one and len(offers) == 1 else AGREE
        source = agreed_source(
            {peer: offer.manifest for peer, offer in offers.items()},
            self._replica.state_fingerprint,
            agree,
        )
        return source if source is not None and offers[source].manifest.outer_step > 0 else None

    async def _ask(self, peer: str, offers: dict[str, OfferedState], silent: set[str]) -> None:
        try:
            offer = await self._request_offer(peer)
            if offer is not None:
                offers[peer] = offer
        finally:
            silent.discard(peer)

    async def _request_offer(self, peer: str) -> OfferedState | None:
        """Request a peer's manifest. Return None if it has none or an invalid one."""
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
            log.info("no state manifest: peer=%s error=%s", peer, error)
            return None
        try:
            return self._open(peer, data)
        except BadMessage as bad:
            log.warning("invalid state manifest: peer=%s reason=%s", peer, bad)
            self._network.rejected(peer, "weights_manifest", PROOF)
            return None

    def _open(self, peer: str, data: bytes) -> OfferedState:
        """Decode an answer. Raises BadMessage unless `peer` has signed a manifest of exactly this
        node's tensors."""
        response = decode_state(data)
        if not isinstance(response, StateResponse):
            raise BadMessage("schema", "not a response")
        signer, manifest = open_state_manifest(response.manifest, self._swarm)
        if signer != peer:
            raise BadMessage("signature", "signed by another peer")
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
        """Fetch a state and have the trainer adopt it. Return True if it did."""
        path = self._store.new_path()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_progress, offer, path)
            taken = await self._fetch(offer, path)
            nursery.cancel_scope.cancel()
        return taken

    async def _report_progress(self, offer: OfferedState, path: Path) -> None:
        """Send the trainer a message whenever the transfer has progressed. The state of a 7 B model
        takes ten minutes at home bandwidth."""
        before = 0
        while True:
            await trio.sleep(PROGRESS_SECONDS)
            missing = self._store.missing_chunks(path)
            if missing is not None and missing < before:
                self._send_to_trainer(
                    local.AdoptState(offer.payload.peer, "", offer.manifest.outer_step, [])
                )
            before = missing or 0

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
            log.warning("invalid state: peer=%s reason=%s", remote.peer, bad)
            self._network.rejected(remote.peer, "weights_state", PROOF)
        except (PeerError, LocalError) as error:
            log.info("state not fetched: peer=%s error=%s", remote.peer, error)
        finally:
            self._store.discard(path)
        return False
