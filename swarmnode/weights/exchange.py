"""The weight plane at work: trio tasks, a network, a trainer at the other end of the link. It only carries; the decisions are `pairing`'s.

    trainer ─ Due ─▶ pairing ─ PROPOSE ─▶ peer            both: TakeSnapshot ─▶ trainer ─ Snapshot ─▶ offered, READY ─▶ peer
                        ◀─ ACCEPT, BUSY ─                 both: READY heard ─▶ fetch ─▶ JudgePayload ─▶ trainer ─ Gated ─▶ pairing
    trainer ◀─ SoloStep ─ nobody found                    CommitExchange ─▶ trainer ─ Committed ─▶ pairing: idle

Tensors are files on this side: fetched into `weights/` with every chunk's hash checked, opened by the trainer. Nothing a peer does ends a
task here, holds a lock or keeps the trainer waiting; it ends an exchange, which is counted by cause, and costs whoever lied its standing.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.config import WeightsConfig
from swarmnode.errors import BadMessage, LocalError, PeerError, PeerTimeout
from swarmnode.weights import local, pairing
from swarmnode.weights.catchup import CatchUp, CatchUpStatistics
from swarmnode.weights.members import Members
from swarmnode.weights.messages import (
    MESSAGE_BYTES,
    NONCE_BYTES,
    Accept,
    Busy,
    Here,
    Latest,
    Message,
    Propose,
    Ready,
    Release,
    decode_message,
    encode_message,
)
from swarmnode.weights.offers import Offer, Offers
from swarmnode.weights.outcomes import OUTCOMES, PROOF, VANISHED
from swarmnode.weights.pairing import Phase
from swarmnode.weights.partners import epoch_bucket, partner_order
from swarmnode.weights.rule import MAX_LAG, too_far_behind
from swarmnode.wire import ids

log = logging.getLogger(__name__)

GREET_SECONDS = 2.0
"""Between two looks whether somebody is there who has not said what he averages."""
SAY_SECONDS = 10.0
"""For a message that needs no thought at the other end."""
PUBLISHED_SECONDS = 3600.0
"""A copy stays open to whoever wants to pull it for so long, or until the next one."""
LINGER_SECONDS = 30.0
"""The partner may fetch for so long after its lease."""
OPEN_SECONDS = (5.0, 120.0)
"""Least and most time for both copies to be offered."""
EARLY = 8
REST_SHARE = 0.25
"""Of the time between two outer steps: after an exchange nobody else is accepted for so long."""
FAILURES = ("timeout", "declined", "malformed", "hash", "failed", "size", "local", "no_trainer", "snapshot")
"""Why an exchange failed on our side, where pairing only knows that it did."""


class Network(Protocol):
    """What is needed of `p2p.network.Network`."""

    @property
    def peer_id(self) -> str: ...
    @property
    def requests(self) -> Any: ...
    @property
    def bulk(self) -> Any: ...
    def connected(self) -> list[str]: ...
    def welcome(self, peer: str) -> bool: ...
    def accepted(self, peer: str) -> None: ...
    def rejected(self, peer: str, reason: str, cost: float = ...) -> None: ...


class Session:
    """One exchange under way, as this process knows it."""

    def __init__(self, session: bytes, peer: str, fragment: int, clock: int, lease: float) -> None:
        self.id = session
        self.peer = peer
        self.fragment = fragment
        self.clock = clock
        """The partner's claim."""
        self.lease = lease
        self.mine: Offer | None = None
        self.theirs: Ready | None = None
        self.path: Path | None = None
        self.scope = trio.CancelScope()
        self.began = trio.current_time()


class WeightsStatistics(msgspec.Struct, frozen=True):
    enabled: bool = False
    phase: str = ""
    partner: str = ""
    outcomes: dict[str, int] = {}
    """Tries and exchanges by `pairing.OUTCOMES`."""
    failures: dict[str, int] = {}
    """Failed ones by FAILURES."""
    judged: dict[str, int] = {}
    """Partners' weights by `outcomes.OUTCOMES`."""
    candidates: int = 0
    """Peers that could be partners now."""
    exchange_seconds: float = 0.0
    """Of finished exchanges, in all."""
    received_bytes: int = 0
    """Of their payloads."""
    catch_up: CatchUpStatistics = CatchUpStatistics()
    pairs: dict[str, int] = {}
    """Exchanges applied by peer: for people, never a metric's label."""


class WeightExchange:
    """Averages this node's policy with others'. key, swarm: as RolloutExchange. tell(message): to the trainer, False if there is none.
    may_average(): False while the weights here are nobody's to have: then nothing is proposed, accepted or left to be pulled.

    Start it with `await nursery.start(exchange.run)`; `set_policy` and `receive` are for the process link.
    """

    def __init__(
        self, network: Network, key: Ed25519PrivateKey, swarm: bytes, cfg: WeightsConfig, data_dir: Path,
        tell: Callable[[local.ToTrainer], bool], *, budget: Callable[[str], bool] = lambda choice: True,
        clock: Callable[[], float] = time.time, may_average: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self.cfg = cfg
        self._network = network
        self._swarm = swarm
        self._tell = tell
        self._budget = budget
        self._may_average = may_average
        self._clock = clock
        self._offers = Offers(network.bulk, data_dir / local.DIRECTORY)
        self._members = Members()
        self._facts: local.ReplicaFacts | None = None
        self._limits: list[int] = []
        self._clocks: list[int] = []
        self._pairing = pairing.Pairing(pairing.Settings(network.peer_id, b""))
        self._session: Session | None = None
        self._early: OrderedDict[tuple[str, bytes], Ready] = OrderedDict()
        self._published: dict[int, tuple[Offer, int]] = {}
        self._wake = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._failures: Counter[str] = Counter()
        self._judged: Counter[str] = Counter()
        self._pairs: Counter[str] = Counter()
        self._seconds = 0.0
        self._received = 0
        self._catch_up = CatchUp(
            network, key, swarm, self._offers, self._tell, self._candidates, cfg.join_seconds, from_one=cfg.join_from_one
        )  # fmt: skip

    # -- for the node

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
        """Until cancelled. With averaging off it only waits."""
        if self.cfg.rule == "off":
            task_status.started()
            await trio.sleep_forever()
        await trio.to_thread.run_sync(self._offers.clean)
        self._network.requests.serve(
            ids.WEIGHTS_PROTOCOL, self._serve, max_request_bytes=MESSAGE_BYTES, max_response_bytes=MESSAGE_BYTES,
            concurrent=32, per_peer=4, deadline=SAY_SECONDS,
        )  # fmt: skip
        self._catch_up.serve()
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._tick)
            self._nursery.start_soon(self._greet)
            self._nursery.start_soon(self._catch_up.run)
            task_status.started()

    def statistics(self) -> WeightsStatistics:
        paired = self._pairing.statistics()
        return WeightsStatistics(
            enabled=self.cfg.rule != "off", phase=paired.phase, partner=paired.peer, outcomes=paired.outcomes,
            failures=dict(self._failures), judged=dict(self._judged), candidates=len(self._candidates()), exchange_seconds=self._seconds,
            received_bytes=self._received, catch_up=self._catch_up.statistics(), pairs=dict(self._pairs),
        )  # fmt: skip

    # -- for the trainer

    def set_policy(self, facts: local.ReplicaFacts | None, base: bytes, tokenizer: bytes) -> None:
        """The trainer (re)started, with this replica: its Hello. What an earlier one was doing is over."""
        if facts is None or self.cfg.rule == "off":
            self._facts = None
            return
        if self._session is not None:
            self._fail(self._session.id, "no_trainer")
        self._facts, self._limits, self._clocks = facts, facts.limits(), list(facts.clocks)
        fingerprint = facts.fingerprint(self._swarm, base, tokenizer)
        self._pairing.settings = msgspec.structs.replace(self._pairing.settings, fingerprint=fingerprint)
        self._members = Members()  # so that everybody hears of it
        self._catch_up.set_policy(facts, fingerprint)

    def receive(self, message: local.FromTrainer) -> None:
        """What the trainer says."""
        if self._facts is None or self._nursery is None:
            return
        match message:
            case local.Due():
                self._due(message)
            case local.Snapshot():
                self._soon(self._offer, message)
            case local.Gated():
                self._gated(message)
            case local.Committed():
                self._clocks[message.fragment] = message.clock
                self._handle(pairing.Applied(message.session))
            case local.StateWritten():
                self._soon(self._catch_up.written, message)
            case local.Adopted():
                self._clocks = list(message.clocks)
                self._catch_up.adopted(message)

    def _due(self, due: local.Due) -> None:
        self._clocks[due.fragment] = due.clock
        step = max(0.0, due.step_seconds)
        interval = self.cfg.sync_every * step / max(1, len(self._limits))
        self._pairing.settings = msgspec.structs.replace(
            self._pairing.settings, open_seconds=min(OPEN_SECONDS[0] + 2 * step, OPEN_SECONDS[1]),
            verify_seconds=60 + 4 * step, apply_seconds=300 + 4 * step, rest_seconds=REST_SHARE * interval,
        )  # fmt: skip
        candidates = self._candidates() if self._budget("fetch") and self._may_average() else []
        order = partner_order(self._network.peer_id, candidates, epoch_bucket(self._clock()), self._swarm)
        order.sort(key=lambda peer: too_far_behind(abs(self._members.outer_step(peer) - due.clock)))  # with those there is less to gain
        lease = self._lease(order[0] if order else "", due.fragment)
        self._handle(pairing.Due(due.fragment, due.clock, tuple(order), secrets.token_bytes(NONCE_BYTES), lease))

    def _gated(self, gated: local.Gated) -> None:
        outcome = gated.outcome if gated.outcome in OUTCOMES else "local"
        self._judged[outcome] += 1
        if OUTCOMES[outcome] and gated.peer:
            self._lied(gated.peer, f"weights_{outcome}", OUTCOMES[outcome])
        if gated.ok:
            self._handle(pairing.Verified(gated.session))
        elif gated.session:
            self._handle(pairing.Failed(gated.session))

    # -- the machine

    def _handle(self, event: pairing.Event) -> tuple[pairing.Action, ...]:
        """One event, and everything that follows from it, started."""
        actions = self._pairing.handle(event, trio.current_time())
        state = self._pairing.state
        if state.phase is Phase.PAIRED and (self._session is None or self._session.id != state.session):
            self._begin(state)
        for action in actions:
            self._perform(action)
        self._wake.set()
        return actions

    def _perform(self, action: pairing.Action) -> None:
        session = self._session
        match action:
            case pairing.Send(peer, Propose() as message):
                self._soon(self._propose, peer, message)
            case pairing.Send(peer, Release() as message):
                self._soon(self._say, peer, message)
            case pairing.Pull(peer, name, fragment):
                self._session = Session(name, peer, fragment, 0, self._pairing.state.lease_seconds)
                self._soon(self._pull, self._session)
            case pairing.Verify() if session is not None:
                judge = local.JudgePayload(session.id, session.fragment, session.peer, session.clock, str(session.path))
                if not self._tell(judge):
                    self._soon(self._fail_soon, session.id, "no_trainer")
            case pairing.Apply() if session is not None:
                if not self._tell(local.CommitExchange(session.id)):
                    self._soon(self._fail_soon, session.id, "no_trainer")
            case pairing.Close(name):
                self._tell(local.DropExchange(name))
                if session is not None and session.id == name:
                    self._end(session, keep=False)
            case pairing.Solo(fragment):
                self._tell(local.SoloStep(fragment))
            case pairing.Ended(peer, outcome):
                self._ended(peer, outcome, session)

    def _ended(self, peer: str, outcome: str, session: Session | None) -> None:
        if outcome == "vanished" and pairing.vanished(self._pairing.state, peer) > 1:  # once is what a crash looks like
            self._network.rejected(peer, "weights_vanished", VANISHED)
        if outcome in ("applied", "pulled") and session is not None:
            self._network.accepted(peer)
            self._pairs[peer] += 1
            self._seconds += trio.current_time() - session.began
            if session.path is not None and session.path.exists():
                self._received += session.path.stat().st_size
            self._end(session, keep=True)

    def _lied(self, peer: str, reason: str, cost: float = PROOF) -> None:
        """It has shown that an exchange with it is wasted: none for a while, whatever its standing is otherwise."""
        self._network.rejected(peer, reason, cost)
        self._handle(pairing.Lied(peer))

    def _begin(self, state: pairing.State) -> None:
        """Both sides have agreed: now each needs a copy of its weights."""
        if self._session is not None:
            self._end(self._session, keep=True)
        session = Session(state.session, state.peer, state.fragment, state.outer_step, state.lease_seconds)
        self._session = session
        session.theirs = self._early.pop((session.peer, session.id), None)
        if not self._tell(local.TakeSnapshot(session.id, session.fragment)):
            self._soon(self._fail_soon, session.id, "no_trainer")

    def _end(self, session: Session, *, keep: bool) -> None:
        """keep: the partner may still be fetching."""
        session.scope.cancel()
        if session.mine is not None and not keep:
            self._offers.withdraw(session.mine)
        if session.path is not None:
            self._offers.discard(session.path)
        if self._session is session:
            self._session = None

    def _fail(self, session: bytes, cause: str) -> None:
        self._failures[cause] += 1
        self._handle(pairing.Failed(session))

    async def _fail_soon(self, session: bytes, cause: str) -> None:
        await trio.lowlevel.checkpoint()
        self._fail(session, cause)

    def _soon(self, work: Callable[..., Any], *args: Any) -> None:
        """Start `work`; not when the exchange is ending, which the trainer may learn a moment later than we do."""
        if self._nursery is not None:
            with contextlib.suppress(RuntimeError):  # closed to new arrivals: trio has no way to ask first
                self._nursery.start_soon(work, *args)

    async def _tick(self) -> None:
        while True:
            self._wake = trio.Event()
            with trio.move_on_at(min(self._pairing.deadline, trio.current_time() + GREET_SECONDS)):
                await self._wake.wait()
            if trio.current_time() >= self._pairing.deadline:
                self._handle(pairing.Tick())
            self._offers.expire(trio.current_time())

    # -- what we ask

    def _candidates(self) -> list[str]:
        """Connected, of our fingerprint, heard of lately, in good standing."""
        now = trio.current_time()
        return [
            peer
            for peer in self._members.candidates(self._network.connected(), self._pairing.settings.fingerprint, now)
            if self._network.welcome(peer)
        ]

    def _lease(self, peer: str, fragment: int) -> float:
        """Seconds that a payload may take, both ways at once."""
        return 2 * self._network.bulk.deadline(peer, self._limits[fragment])

    async def _ask(self, peer: str, message: Message, seconds: float) -> Message | None:
        """The answer; None where the peer gave an empty one. Raises PeerError."""
        data = await self._network.requests.request(
            peer, ids.WEIGHTS_PROTOCOL, encode_message(message), deadline=seconds, max_response_bytes=MESSAGE_BYTES
        )  # fmt: skip
        if not data:
            return None
        try:
            return decode_message(data)
        except BadMessage:
            self._network.rejected(peer, "weights_malformed", PROOF)
            raise

    async def _propose(self, peer: str, message: Propose) -> None:
        try:
            answer = await self._ask(peer, message, self._pairing.settings.propose_seconds)
        except PeerTimeout:
            return  # the machine's own deadline
        except PeerError as error:
            log.info("%s cannot be proposed to: %s", peer, error)
            self._handle(pairing.Unreachable(peer, message.nonce))
            return
        if isinstance(answer, Accept | Busy) and answer.nonce == message.nonce and self._fits(answer):
            lease = self._lease(peer, message.fragment)
            self._handle(pairing.Received(peer, answer, self._clocks[message.fragment], lease))
        else:
            self._network.rejected(peer, "weights_malformed", PROOF)
            self._handle(pairing.Unreachable(peer, message.nonce))

    def _fits(self, message: Message) -> bool:
        return getattr(message, "fragment", 0) < len(self._limits)

    async def _say(self, peer: str, message: Message) -> None:
        try:
            await self._ask(peer, message, SAY_SECONDS)
        except PeerError as error:
            log.debug("%s was not told: %s", peer, error)

    async def _greet(self) -> None:
        """Ask whoever has not said what he averages."""
        while True:
            if self._facts is not None:
                for peer in self._members.to_ask(self._network.connected(), trio.current_time()):
                    if self._network.welcome(peer):
                        self._soon(self._meet, peer)
                    self._members.said(peer, b"", 0, trio.current_time())
            await trio.sleep(GREET_SECONDS)

    async def _meet(self, peer: str) -> None:
        members = self._members
        try:
            answer = await self._ask(peer, self._here(), SAY_SECONDS)
        except PeerError:
            return  # it does not average, or its trainer is not there yet: then it will ask us
        if isinstance(answer, Here):
            members.said(peer, answer.fingerprint, answer.outer_step, trio.current_time())
            self._heard(answer)

    def _heard(self, here: Here) -> None:
        """Somebody far ahead is a reason to look whether the swarm is."""
        if here.fingerprint == self._pairing.settings.fingerprint:
            self._catch_up.heard(here.outer_step, min(self._clocks, default=0) + MAX_LAG)

    def _here(self) -> Here:
        return Here(self._pairing.settings.fingerprint, min(self._clocks, default=0))

    # -- what others ask

    async def _serve(self, peer: str, data: bytes) -> bytes:
        """Answers at once. Raises PeerError to reset the stream."""
        await trio.lowlevel.checkpoint()
        try:
            message = decode_message(data)
            if self._facts is not None and isinstance(message, Propose):
                ours = message.fingerprint == self._pairing.settings.fingerprint
                if ours and not self._fits(message):
                    raise BadMessage("bounds", "fragment")
            if isinstance(message, Accept | Busy):
                raise BadMessage("schema", "an answer to nothing")
        except BadMessage:
            self._network.rejected(peer, "weights_malformed", PROOF)
            raise
        if self._facts is None:
            raise PeerError("no replica yet")
        answer: Message | None = None
        match message:
            case Here():
                self._members.said(peer, message.fingerprint, message.outer_step, trio.current_time())
                self._heard(message)
                answer = self._here()
            case Propose():
                answer = self._answer(peer, message) if self._may_average() else Busy(message.nonce, "busy")
            case Release():
                self._handle(pairing.Received(peer, message))
            case Ready():
                self._ready(peer, message)
            case Latest():
                answer = self._latest(message)
        return encode_message(answer) if answer is not None else b""

    def _answer(self, peer: str, message: Propose) -> Message:
        fits = self._fits(message)  # not, only where the fingerprint is another one
        clock, lease = (self._clocks[message.fragment], self._lease(peer, message.fragment)) if fits else (0, 0.0)
        actions = self._handle(pairing.Received(peer, message, clock, lease))
        for action in actions:
            if isinstance(action, pairing.Send) and isinstance(action.message, Accept | Busy) and action.message.nonce == message.nonce:
                return action.message
        raise PeerError("no answer")

    def _latest(self, message: Latest) -> Ready:
        published = self._published.get(message.fragment) if message.fingerprint == self._pairing.settings.fingerprint else None
        if published is None or not self._may_average():
            raise PeerError("nothing to pull")
        offer, clock = published
        return Ready(bytes(NONCE_BYTES), offer.transfer, offer.root, offer.size, clock)

    # -- copies, ours and theirs

    async def _offer(self, snapshot: local.Snapshot) -> None:
        """The trainer has written a copy: for this session's partner, and for whoever comes to pull one."""
        path = Path(snapshot.path)
        source = await self._offers.open(path) if snapshot.path and path.parent == self._offers.directory else None
        session = self._session if self._session is not None and self._session.id == snapshot.session else None
        if source is None:
            if session is not None:
                self._fail(session.id, "snapshot")
            return
        now = trio.current_time()
        before = self._published.pop(snapshot.fragment, None)
        self._published[snapshot.fragment] = (self._offers.offer(source, path, now + PUBLISHED_SECONDS, None), snapshot.clock)
        if before is not None:
            self._offers.withdraw(before[0])
        if session is not None and self._pairing.state.phase is Phase.PAIRED:
            until = now + self._pairing.settings.open_seconds + session.lease + LINGER_SECONDS
            session.mine = mine = self._offers.offer(source, path, until, [session.peer])
            self._soon(self._say, session.peer, Ready(session.id, mine.transfer, mine.root, mine.size, snapshot.clock))
            self._open(session)

    def _ready(self, peer: str, ready: Ready) -> None:
        session, state = self._session, self._pairing.state
        if session is not None and (session.id, session.peer) == (ready.session, peer):
            if session.theirs is None:  # whoever says it twice is held to the first
                session.theirs = ready
                self._open(session)
        elif state.phase is Phase.PROPOSED and state.peer == peer:  # overtook its own ACCEPT
            self._early[peer, ready.session] = ready
            while len(self._early) > EARLY:
                self._early.popitem(last=False)

    def _open(self, session: Session) -> None:
        """Both copies are there: fetch."""
        if session.mine is None or session.theirs is None or self._pairing.state.phase is not Phase.PAIRED:
            return
        if session.theirs.size > self._limits[session.fragment]:
            self._lied(session.peer, "weights_size")
            self._fail(session.id, "size")
            return
        session.clock = session.theirs.outer_step
        self._handle(pairing.Opened(session.id))
        if self._pairing.state.phase is Phase.TRANSFER and self._session is session:
            self._soon(self._fetch, session, session.theirs)

    async def _pull(self, session: Session) -> None:
        """What a busy peer published, without its help."""
        try:
            answer = await self._ask(session.peer, Latest(self._pairing.settings.fingerprint, session.fragment), SAY_SECONDS)
        except PeerError:
            answer = None
        if not isinstance(answer, Ready) or answer.size > self._limits[session.fragment]:
            self._fail(session.id, "declined")
            return
        session.clock = answer.outer_step
        await self._fetch(session, answer)

    async def _fetch(self, session: Session, ready: Ready) -> None:
        path = self._offers.directory / f"in-{secrets.token_hex(8)}.bin"
        session.path = path
        late = trio.current_time() + session.lease
        cause = ""
        with session.scope:
            try:
                limit = self._limits[session.fragment]
                await self._offers.fetch(session.peer, ready.transfer, ready.root, ready.size, path, limit, late)
            except BadMessage as bad:
                cause = "hash" if bad.reason == "hash" else "malformed"
                self._lied(session.peer, f"weights_{cause}")
            except PeerTimeout:
                cause = "timeout"
            except PeerError as error:
                log.info("weights of %s: %s", session.peer, error)
                cause = "failed"
            except LocalError as error:
                log.warning("weights of %s not stored: %s", session.peer, error)
                cause = "local"
        if session.scope.cancelled_caught or self._session is not session:
            self._offers.discard(path)
        elif cause:
            self._fail(session.id, cause)
        else:
            self._handle(pairing.Transferred(session.id))
