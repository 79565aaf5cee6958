"""Getting the swarm's state from neighbours, and giving ours: for a node that is new, has lost its disk, or was away for too long.

    needs a state ─▶ ask three for signed manifests ─▶ `manifest.agreed_source` ─▶ fetch φ, δ ─▶ AdoptState ─▶ trainer, on probation
    is asked for one ─▶ WriteState ─▶ trainer ─▶ StateWritten ─▶ sign, offer        one file at a time, for all who ask

There is no server of checkpoints. A signature makes a manifest somebody's: tensors that do not have its hashes are held against that peer.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import BadMessage, LocalError, PeerError
from swarmnode.weights import local
from swarmnode.weights.layout import payload_limit
from swarmnode.weights.manifest import AGREE, ASK, StateManifest, agreed_source, check_manifest
from swarmnode.weights.messages import STATE_BYTES, STATE_REQUEST_BYTES, StateRequest, StateResponse, decode_state, encode_message
from swarmnode.weights.offers import Offers
from swarmnode.weights.outcomes import ADOPTIONS, PROOF
from swarmnode.wire import codec, envelope, ids, strict

log = logging.getLogger(__name__)

WRITE_SECONDS = 30.0
"""For our trainer to write its state."""
ASK_SECONDS = WRITE_SECONDS + 10.0
KEEP_SECONDS = 5.0
KEEP_FACTOR = 20.0
"""A written state is given out for at least so long, and for so many times as long as it took to write: whoever asks how often, our trainer
spends no more than a twentieth of its writing on it."""
OFFER_SECONDS = 600.0
GRACE_SECONDS = 3.0
"""How long to wait for more neighbours than there are."""
AGAIN_SECONDS = 600.0
"""Between two attempts of a node that fell behind."""
LOOK_SECONDS = 0.5
ADOPT_SECONDS = 300.0


def open_state_manifest(frame: bytes, swarm: bytes) -> tuple[str, StateManifest]:
    """(peer id of its signer, manifest). Raises BadMessage; whose tensors it speaks of is not looked at."""
    signed = envelope.open_raw(frame, ids.DOMAIN_STATE, swarm, STATE_BYTES)
    manifest: StateManifest = strict.decode(signed.payload, StateManifest)
    names = [tensor.name for tensor in manifest.tensors]
    if names != sorted(set(names)):
        raise BadMessage("bounds", "tensors are sorted, none twice")
    check_manifest(manifest, names)
    return envelope.peer_id(signed.key), manifest


class CatchUpStatistics(msgspec.Struct, frozen=True):
    adoptions: dict[str, int] = {}
    """Neighbours' states by `outcomes.ADOPTIONS`."""
    served: int = 0
    """Manifests given out."""
    source: str = ""
    """Peer whose state was taken last."""


class CatchUp:
    """`candidates()`: peers of our fingerprint in good standing. `tell`: as WeightExchange. from_one: as `weights.join_from_one`."""

    def __init__(
        self, network: Any, key: Ed25519PrivateKey, swarm: bytes, offers: Offers, tell: Callable[[local.ToTrainer], bool],
        candidates: Callable[[], list[str]], join_seconds: float = 15.0, rng: random.Random | None = None,
        *, from_one: bool = False,
    ) -> None:  # fmt: skip
        self._network = network
        self._key = key
        self._swarm = swarm
        self._offers = offers
        self._tell = tell
        self._candidates = candidates
        self._join_seconds = join_seconds
        self._from_one = from_one
        self._rng = rng or random.Random()
        self._facts: local.ReplicaFacts | None = None
        self._fingerprint = b""
        self._beyond = 0.0
        self._fresh = False
        self._wanted = trio.Event()
        self._next = float("-inf")
        self._written: tuple[float, bytes, Any, Path] | None = None
        self._pending = False
        self._asked_at = 0.0
        self._writing = trio.Event()
        self._adopting: trio.Event | None = None
        self._adoptions: Counter[str] = Counter()
        self._served = 0
        self._source = ""

    def set_policy(self, facts: local.ReplicaFacts, fingerprint: bytes) -> None:
        """The trainer's Hello: a fresh one waits for what is found here."""
        self._facts, self._fingerprint, self._written, self._pending = facts, fingerprint, None, False
        if facts.fresh:
            self._beyond, self._fresh = 0.0, True
            self._wanted.set()

    def heard(self, step: int, most: float) -> None:
        """A peer claims `step` outer steps; beyond `most` of them we are too far behind to be averaged with."""
        if not self._fresh and step > most and trio.current_time() >= self._next:
            self._next = trio.current_time() + AGAIN_SECONDS
            self._beyond = most
            self._wanted.set()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            found = await self._search()
            if not found and self._fresh:
                self._tell(local.AdoptState("", "", 0, []))
            self._fresh = False

    def statistics(self) -> CatchUpStatistics:
        return CatchUpStatistics(dict(self._adoptions), self._served, self._source)

    # -- ours to take

    async def _search(self) -> bool:
        """Whether a state was adopted."""
        began = trio.current_time()
        asked: set[str] = set()
        answers: dict[str, tuple[StateManifest, StateResponse]] = {}
        while trio.current_time() - began < self._join_seconds:
            others = [peer for peer in self._candidates() if peer not in asked]
            chosen = self._rng.sample(others, min(len(others), max(0, ASK - len(answers))))
            asked.update(chosen)
            with trio.move_on_after(began + self._join_seconds - trio.current_time()):
                async with trio.open_nursery() as nursery:
                    for peer in chosen:
                        nursery.start_soon(self._ask, peer, answers)
            patient = trio.current_time() - began < GRACE_SECONDS
            early = len(answers) < ASK and patient
            claims = {peer: manifest for peer, (manifest, _) in answers.items()}
            alone = self._from_one and len(answers) == 1 and not patient
            source = agreed_source(claims, self._fingerprint, 1 if alone else AGREE) if not early else None
            if source is not None and answers[source][0].outer_step > self._beyond:
                if await self._pull(source, *answers[source]):
                    return True
                del answers[source]
                continue
            enough = len(answers) >= min(ASK, len(self._network.connected())) or len(answers) >= ASK
            if (enough or not others) and not patient:
                break  # nobody is ahead of us, or too few to agree
            await trio.sleep(LOOK_SECONDS)
        steps = sorted((manifest.outer_step for manifest, _ in answers.values()), reverse=True)
        log.info("no state to take: %d neighbours asked, their outer steps %s, ours %g", len(asked), steps, self._beyond)
        return False

    async def _ask(self, peer: str, answers: dict[str, tuple[StateManifest, StateResponse]]) -> None:
        try:
            data = await self._network.requests.request(
                peer, ids.WEIGHTS_STATE_PROTOCOL, encode_message(StateRequest(self._fingerprint)),
                deadline=ASK_SECONDS, max_response_bytes=STATE_BYTES,
            )  # fmt: skip
        except PeerError as error:
            log.info("no state manifest of %s: %s", peer, error)
            return
        try:
            answers[peer] = self._open(peer, data)
        except BadMessage as bad:
            log.warning("state manifest of %s: %s", peer, bad)
            self._network.rejected(peer, "weights_manifest", PROOF)

    def _open(self, peer: str, data: bytes) -> tuple[StateManifest, StateResponse]:
        """Raises BadMessage unless it is `peer` that signed a manifest of exactly our tensors."""
        assert self._facts is not None
        response = decode_state(data)
        if not isinstance(response, StateResponse):
            raise BadMessage("schema", "not a response")
        signer, manifest = open_state_manifest(response.manifest, self._swarm)
        if signer != peer:
            raise BadMessage("signature", "somebody else's")
        check_manifest(manifest, [spec.name for spec in self._facts.layout])
        if response.size > payload_limit(self._facts.state(), "float32"):
            raise BadMessage("oversize", f"{response.size} bytes of state")
        return manifest, response

    async def _pull(self, peer: str, manifest: StateManifest, response: StateResponse) -> bool:
        assert self._facts is not None
        path = self._offers.directory / f"in-state-{secrets.token_hex(8)}.bin"
        limit = payload_limit(self._facts.state(), "float32")
        late = trio.current_time() + 2 * self._network.bulk.deadline(peer, response.size)
        try:
            await self._offers.fetch(peer, response.transfer, response.root, response.size, path, limit, late)
            self._adopting = trio.Event()
            self._source = peer
            if not self._tell(local.AdoptState(peer, str(path), manifest.outer_step, manifest.tensors)):
                return False
            before = self._adoptions["adopted"]
            with trio.move_on_after(ADOPT_SECONDS):
                await self._adopting.wait()
            return self._adoptions["adopted"] > before
        except BadMessage as bad:
            log.warning("state of %s: %s", peer, bad)
            self._network.rejected(peer, "weights_state", PROOF)
        except (PeerError, LocalError) as error:
            log.info("state of %s: %s", peer, error)
        finally:
            self._offers.discard(path)
        return False

    def adopted(self, message: local.Adopted) -> None:
        """What the trainer made of it."""
        outcome = message.outcome if message.outcome in ADOPTIONS else "local"
        self._adoptions[outcome] += 1
        if ADOPTIONS[outcome] and message.peer:
            self._network.rejected(message.peer, f"weights_state_{outcome}", ADOPTIONS[outcome])
        if self._adopting is not None:
            self._adopting.set()

    # -- ours to give

    def serve(self) -> None:
        self._network.requests.serve(
            ids.WEIGHTS_STATE_PROTOCOL, self._answer, max_request_bytes=STATE_REQUEST_BYTES, max_response_bytes=STATE_BYTES,
            concurrent=8, per_peer=1, deadline=ASK_SECONDS,
        )  # fmt: skip

    async def _answer(self, peer: str, data: bytes) -> bytes:
        """Raises PeerError to reset the stream."""
        try:
            request = decode_state(data)
            if not isinstance(request, StateRequest):
                raise BadMessage("schema", "not a request")
        except BadMessage:
            self._network.rejected(peer, "weights_malformed", PROOF)
            raise
        if self._facts is None or request.fingerprint != self._fingerprint:
            raise PeerError("another policy")
        if self._written is None or trio.current_time() >= self._written[0]:
            if not self._pending:  # once for all who wait
                self._pending, self._writing, self._asked_at = True, trio.Event(), trio.current_time()
                self._tell(local.WriteState())
            with trio.move_on_after(WRITE_SECONDS):
                await self._writing.wait()
        if self._written is None:
            raise PeerError("no state now")
        _, manifest, source, path = self._written
        offer = self._offers.offer(source, path, trio.current_time() + OFFER_SECONDS, [peer])
        self._served += 1
        return encode_message(StateResponse(manifest, offer.transfer, offer.root, offer.size))

    async def written(self, message: local.StateWritten) -> None:
        """The trainer has written φ and δ: sign what they are."""
        path = Path(message.path)
        source = await self._offers.open(path) if message.path and path.parent == self._offers.directory else None
        if source is not None:
            manifest = StateManifest(self._fingerprint, message.outer_step, int(time.time() * 1000), message.tensors)
            signed = codec.encode(envelope.sign(strict.encode(manifest), self._key, ids.DOMAIN_STATE, self._swarm))
            now = trio.current_time()
            until = now + max(KEEP_SECONDS, KEEP_FACTOR * (now - self._asked_at))
            self._offers.offer(source, path, until + OFFER_SECONDS, [])  # keeps the file for who comes later
            self._written = (until, signed, source, path)
        self._pending = False
        self._writing.set()
