"""Drives `pairing`: hands it what happens, and carries out every action that it asks for. trio; the
decisions are the machine's.

    trainer ─ OuterStepDue ─▶ pairing ─ PROPOSE ─▶ peer     both: TakeSnapshot ─▶ trainer ─
    SnapshotWritten ─▶ offered, READY ─▶ peer
                                 ◀─ ACCEPT, BUSY ─          both: READY arrives ─▶ fetch ─▶
                                 ApplyPayload ─▶ trainer ─ ExchangeEnded ─▶ idle
    trainer ◀─ SoloStep ─ nobody found

Tensors are files on this side: fetched with every chunk's hash checked, opened by the trainer.
Nothing a peer does ends a task here, holds a lock or keeps the trainer waiting; it ends an
exchange, which is counted by cause, and costs whoever lied its standing.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import trio

from swarmnode.errors import BadMessage, LocalError, PeerError, PeerTimeout
from swarmnode.p2p.api import Network
from swarmnode.weights import local, pairing
from swarmnode.weights.background import Background
from swarmnode.weights.discovery import Discovery
from swarmnode.weights.messages import NONCE_BYTES, Accept, Busy, Latest, Propose, Ready, Release
from swarmnode.weights.outcomes import OURS, PROOF, VANISHED
from swarmnode.weights.pairing import Phase
from swarmnode.weights.payload_store import PayloadOffer, PayloadStore, RemotePayload, offer_seconds
from swarmnode.weights.replica import LocalReplica
from swarmnode.weights.requests import PeerRequests

log = logging.getLogger(__name__)

EXPIRY_INTERVAL: Final = 2.0
LINGER_SECONDS: Final = 30.0
"""The partner may fetch for so long after its lease."""
OPEN_SECONDS: Final = (5.0, 120.0)
"""Least and most time for both copies to be offered, beside what it takes to write them."""
ENCODED_BYTES: Final = 1e8
"""A second for so many bytes of a copy."""
EARLY: Final = 8
SLOWER: Final = 4.0
"""A partner that was slow before is given so many times what a stranger is."""
AVOID_SECONDS: Final = 300.0
"""A peer that lied is neither asked nor accepted for so long at least."""
MEET_SHARE: Final = 0.4
"""`PairingSettings.meet_seconds` in units of the time between two outer steps. Who proposes once in
that time meets each of n partners once in n / 2; at 0.6 two nodes would refuse each other every
second time."""
REST_SHARE: Final = 0.25
"""Share of the time between two outer steps for which, after an exchange, nobody else is
accepted."""
BACKOFF_SECONDS: Final = 2.0
BACKOFF_SHARE: Final = 0.125
"""Longest moment between two tries, also in units of the time between two outer steps: three have
to fit into it, and a pull."""
SHORT_SECONDS: Final = 5.0
"""As `PairingSettings.short_seconds`; never more than the time between two outer steps, of which
being left alone should cost few."""
FAILURES: Final = (
    "timeout",
    "declined",
    "malformed",
    "hash",
    "failed",
    "size",
    "local",
    "no_trainer",
    "snapshot",
)
"""Why an exchange failed on our side, where pairing only knows that it did."""
BLAMELESS: Final = ("local", "no_trainer", "snapshot", "declined")
"""Those that a partner can do nothing about: for ours, and for having published nothing."""

SendToTrainer = Callable[[local.ToTrainer], bool]
"""False where there is no trainer."""


@dataclass
class ExchangeSession:
    """One exchange under way, as this process knows it."""

    id: bytes
    peer: str
    fragment: int
    lease_seconds: float
    blocks: bytes
    """What the partner and we hold, packed, as it was when this began."""
    mine: PayloadOffer | None = None
    theirs: Ready | None = None
    path: Path | None = None
    mixed: bool = True
    """Whether the partner's weights are in ours now; not where they are of too long ago."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    began: float = field(default_factory=trio.current_time)


PARTNERS = 256
"""Peers of which is remembered how often we averaged with them."""


@dataclass
class ExchangeTotals:
    failures: Counter[str] = field(default_factory=Counter)
    """Failed exchanges by FAILURES."""
    pairs: dict[str, int] = field(default_factory=dict)
    """Exchanges applied, of the PARTNERS latest peers: for people, never a metric's label."""
    seconds: float = 0.0
    """Time that finished exchanges took, in all."""
    received_bytes: int = 0
    """Length of what they fetched, in all."""

    def note_pair(self, peer: str) -> None:
        """Count an exchange with `peer` that was applied; the partner of longest ago makes room."""
        self.pairs[peer] = self.pairs.pop(peer, 0) + 1
        while len(self.pairs) > PARTNERS:
            del self.pairs[next(iter(self.pairs))]


class ExchangeDriver:
    """sync_every: training steps between two outer steps of a fragment."""

    def __init__(
        self,
        network: Network,
        requests: PeerRequests,
        replica: LocalReplica,
        discovery: Discovery,
        store: PayloadStore,
        send_to_trainer: SendToTrainer,
        background: Background,
        sync_every: int,
    ) -> None:
        self.totals = ExchangeTotals()
        self._network = network
        self._requests = requests
        self._replica = replica
        self._discovery = discovery
        self._store = store
        self._send_to_trainer = send_to_trainer
        self._sync_every = sync_every
        self._background = background
        self._pairing = pairing.Pairing(
            pairing.PairingSettings(network.peer_id, b"", avoid_seconds=AVOID_SECONDS)
        )
        self._session: ExchangeSession | None = None
        self._early: OrderedDict[tuple[str, bytes], Ready] = OrderedDict()
        self._wake = trio.Event()

    async def run(self) -> None:
        """Tell the machine of the time, until cancelled."""
        while True:
            self._wake = trio.Event()
            with trio.move_on_at(
                min(self._pairing.deadline, trio.current_time() + EXPIRY_INTERVAL)
            ):
                await self._wake.wait()
            if trio.current_time() >= self._pairing.deadline:
                self._expired()
            self._store.expire(trio.current_time())

    def _expired(self) -> None:
        session = self._session
        if (
            session is not None
            and self._pairing.state.phase is Phase.PAIRED
            and session.mine is None
            and session.theirs is not None
        ):
            self._fail(session.id, "snapshot")  # ours alone is late
        else:
            self._handle(pairing.Tick())

    def statistics(self) -> pairing.PairingStatistics:
        return self._pairing.statistics()

    # ---- what the trainer sends ------------------------------------------------------------------

    def trainer_left(self) -> None:
        """What it was doing is over."""
        if self._session is not None:
            self._fail(self._session.id, "no_trainer")

    def trainer_started(self) -> None:
        """The trainer (re)started: what an earlier one was doing is over."""
        self.trainer_left()
        self._settings(fingerprint=self._replica.fingerprint, open_seconds=self._open_seconds(0.0))

    def outer_step_due(self, due: local.OuterStepDue, propose: bool) -> None:
        """propose: whether somebody may be asked; otherwise the step is taken alone."""
        step = max(0.0, due.step_seconds)
        interval = self._sync_every * step / max(1, len(self._replica.limits))
        self._settings(
            open_seconds=self._open_seconds(step),
            apply_seconds=360 + 8 * step,
            rest_seconds=REST_SHARE * interval,
            backoff_seconds=min(BACKOFF_SECONDS, BACKOFF_SHARE * interval),
            short_seconds=min(SHORT_SECONDS, interval),
            meet_seconds=MEET_SHARE * interval,
        )
        partners, best = (
            self._discovery.partners(due.fragment, due.outer_step, due.blocks)
            if propose
            else ((), 0)
        )
        lease = self._lease(partners[0] if partners else "", due.fragment)
        self._handle(
            pairing.Due(
                due.fragment,
                due.outer_step,
                partners,
                secrets.token_bytes(NONCE_BYTES),
                lease,
                best,
            )
        )

    def snapshot_written(self, snapshot: local.SnapshotWritten) -> None:
        """The trainer has written a copy: for this session's partner, and for whoever comes to pull
        one."""
        self._background.start(self._offer, snapshot)

    def exchange_ended(self, ended: local.ExchangeEnded) -> None:
        if not ended.committed:
            self._handle(pairing.Failed(ended.session, ended.outcome in OURS))
            return
        if self._session is not None and self._session.id == ended.session:
            self._session.mixed = ended.outcome != "lagging"
        self._handle(pairing.Applied(ended.session, ended.outcome != "lagging"))

    # ---- what peers send -------------------------------------------------------------------------

    def proposed(self, peer: str, message: Propose) -> Accept | Busy:
        """The answer to a proposal. Raises PeerError."""
        # another fingerprint, or other layers
        if not self._discovery.shares(peer, message.fragment):
            return Busy(message.nonce, "other_policy")
        outer_step, lease = (
            self._replica.outer_steps[message.fragment],
            self._lease(peer, message.fragment),
        )
        for action in self._handle(pairing.Received(peer, message, outer_step, lease)):
            if (
                isinstance(action, pairing.Send)
                and isinstance(action.message, Accept | Busy)
                and action.message.nonce == message.nonce
            ):
                answer = action.message
                return (
                    msgspec.structs.replace(answer, blocks=self._replica.blocks)
                    if isinstance(answer, Accept)
                    else answer
                )
        raise PeerError("no answer")

    def released(self, peer: str, message: Release) -> None:
        self._handle(pairing.Received(peer, message))

    def ready(self, peer: str, ready: Ready) -> None:
        """`peer` has offered its copy."""
        session, state = self._session, self._pairing.state
        if session is not None and (session.id, session.peer) == (ready.session, peer):
            if session.theirs is None:  # whoever sends it twice is held to the first
                session.theirs = ready
                self._fetch_when_offered(session)
        elif state.phase is Phase.PROPOSED and state.peer == peer:  # overtook its own ACCEPT
            self._early[peer, ready.session] = ready
            while len(self._early) > EARLY:
                self._early.popitem(last=False)

    def lied(self, peer: str, reason: str, cost: float = PROOF) -> None:
        """`peer` has shown that an exchange with it is wasted: none for a while, whatever its
        standing is otherwise."""
        self._network.rejected(peer, reason, cost)
        self._handle(pairing.Lied(peer))

    def reverted(self, peer: str) -> None:
        """Exchanges with `peer`, among others, were taken back."""
        self._handle(pairing.Reverted(peer))

    # ---- the machine -----------------------------------------------------------------------------

    def _handle(self, event: pairing.Event) -> tuple[pairing.Action, ...]:
        """Hand the machine one event, and start everything that follows from it."""
        actions = self._pairing.handle(event, trio.current_time())
        state = self._pairing.state
        if state.phase is Phase.PAIRED and (
            self._session is None or self._session.id != state.session
        ):
            self._begin(state)
        for action in actions:
            self._perform(action)
        self._wake.set()
        return actions

    def _perform(self, action: pairing.Action) -> None:
        session = self._session
        match action:
            case pairing.Send(peer, Propose() as message):
                self._background.start(self._propose, peer, message)
            case pairing.Send(peer, Release() as message):
                self._background.start(self._requests.notify, peer, message)
            case pairing.Pull(peer, name, fragment):
                self._session = ExchangeSession(
                    name,
                    peer,
                    fragment,
                    self._pairing.state.lease_seconds,
                    self._discovery.shared(peer),
                )
                self._background.start(self._pull, self._session)
            case pairing.Apply(name) if (
                session is not None and session.theirs is not None and session.path is not None
            ):
                theirs, path = session.theirs.outer_step, str(session.path)
                self._send_or_fail(
                    session,
                    local.ApplyPayload(
                        name, session.fragment, session.peer, theirs, path, session.blocks
                    ),
                )
            case pairing.Close(name, serve):
                self._send_to_trainer(local.DropExchange(name))
                if session is not None and session.id == name:
                    self._end(session, keep=serve)
            case pairing.Solo(fragment):
                self._send_to_trainer(local.SoloStep(fragment))
            case pairing.Ended(peer, outcome):
                self._count(peer, outcome, session)

    def _count(self, peer: str, outcome: str, session: ExchangeSession | None) -> None:
        # once is what a crash looks like
        if outcome == "vanished" and pairing.vanished(self._pairing.state, peer) >= 2:
            self._network.rejected(peer, "weights_vanished", VANISHED)
        if outcome in ("applied", "pulled") and session is not None:
            if session.mixed:
                self._network.accepted(peer)
            self.totals.note_pair(peer)
            self.totals.seconds += trio.current_time() - session.began
            self.totals.received_bytes += session.theirs.size if session.theirs is not None else 0
            self._end(session, keep=True)

    def _begin(self, state: pairing.PairingState) -> None:
        """Both sides have agreed: now each needs a copy of its weights."""
        if self._session is not None:
            self._end(self._session, keep=True)
        shared = self._discovery.shared(state.peer)
        self._session = session = ExchangeSession(
            state.session, state.peer, state.fragment, state.lease_seconds, shared
        )
        session.theirs = self._early.pop((session.peer, session.id), None)
        if self._replica.within(shared, session.fragment):
            self._send_or_fail(
                session, local.TakeSnapshot(session.id, session.fragment, session.blocks)
            )
        else:  # both have proposed, and it claims other blocks than when we did
            self._background.start(self._fail_soon, session.id, "declined")

    def _end(self, session: ExchangeSession, *, keep: bool) -> None:
        """keep: the partner may still be fetching."""
        session.scope.cancel()
        if session.mine is not None and not keep:
            self._store.withdraw(session.mine)
        if session.path is not None:
            self._store.discard(session.path)
        if self._session is session:
            self._session = None

    def _fail(self, session: bytes, cause: str) -> None:
        self.totals.failures[cause] += 1
        self._handle(pairing.Failed(session, cause in BLAMELESS))

    async def _fail_soon(self, session: bytes, cause: str) -> None:
        """Outside the action that fails: the machine takes one event at a time."""
        await trio.lowlevel.checkpoint()
        self._fail(session, cause)

    def _send_or_fail(self, session: ExchangeSession, message: local.ToTrainer) -> None:
        if not self._send_to_trainer(message):
            self._background.start(self._fail_soon, session.id, "no_trainer")

    def _settings(self, **changes: float | bytes) -> None:
        self._pairing.settings = msgspec.structs.replace(self._pairing.settings, **changes)

    def _open_seconds(self, step: float) -> float:
        return (
            min(OPEN_SECONDS[0] + 2 * step, OPEN_SECONDS[1])
            + max(self._replica.limits, default=0) / ENCODED_BYTES
        )

    def _lease(self, peer: str, fragment: int) -> float:
        """Seconds that a payload may take, both ways at once."""
        size, bulk = self._replica.limits[fragment], self._network.bulk
        return 2 * min(bulk.deadline(peer, size), SLOWER * bulk.deadline("", size))

    # ---- work ------------------------------------------------------------------------------------

    async def _propose(self, peer: str, message: Propose) -> None:
        try:
            blocks = self._replica.blocks
            answer = await self._requests.ask(
                peer,
                msgspec.structs.replace(message, blocks=blocks),
                self._pairing.settings.propose_seconds,
            )
        except PeerTimeout:
            return  # the machine's own deadline
        except PeerError as error:
            log.info("%s cannot be proposed to: %s", peer, error)
            self._handle(pairing.Unreachable(peer, message.nonce))
            return
        if self._replica.blocks != blocks:  # another trainer, with other layers
            self._handle(pairing.Unreachable(peer, message.nonce))
            return
        if isinstance(answer, Accept) and answer.nonce == message.nonce:
            self._discovery.received(peer, answer)
            if not self._discovery.shares(peer, answer.fragment):
                answer = None
        if isinstance(answer, Accept | Busy) and answer.nonce == message.nonce:
            lease = self._lease(peer, message.fragment)
            self._handle(
                pairing.Received(peer, answer, self._replica.outer_steps[message.fragment], lease)
            )
        else:
            self._requests.malformed(peer)
            self._handle(pairing.Unreachable(peer, message.nonce))

    async def _offer(self, snapshot: local.SnapshotWritten) -> None:
        payload = await self._store.open(snapshot.path)
        session = (
            self._session
            if self._session is not None and self._session.id == snapshot.session
            else None
        )
        if payload is None:
            if session is not None:
                self._fail(session.id, "snapshot")
            return
        self._store.publish(payload, snapshot.fragment, snapshot.outer_step, snapshot.blocks)
        if session is not None and self._pairing.state.phase is Phase.PAIRED:
            # as long as we would need for theirs says nothing about how long they need for ours
            fetched = max(
                session.lease_seconds + LINGER_SECONDS, offer_seconds(payload.source.size)
            )
            until = trio.current_time() + self._pairing.settings.open_seconds + fetched
            session.mine = mine = self._store.offer(payload, until, [session.peer])
            ready = Ready(session.id, mine.transfer, mine.root, mine.size, snapshot.outer_step)
            self._background.start(self._requests.notify, session.peer, ready)
            self._fetch_when_offered(session)

    def _fetch_when_offered(self, session: ExchangeSession) -> None:
        """Both copies are there: fetch the partner's."""
        if (
            session.mine is None
            or session.theirs is None
            or self._pairing.state.phase is not Phase.PAIRED
        ):
            return
        if session.theirs.size > self._replica.limits[session.fragment]:
            self.lied(session.peer, "weights_size")
            self._fail(session.id, "size")
            return
        self._handle(
            pairing.CopiesOffered(session.id, self._network.bulk.deadline("", session.theirs.size))
        )
        if self._pairing.state.phase is Phase.TRANSFER and self._session is session:
            self._background.start(self._fetch, session, session.theirs)

    async def _pull(self, session: ExchangeSession) -> None:
        """Fetch what a busy peer published; it need not take part."""
        try:
            latest = Latest(self._replica.fingerprint, session.fragment, session.blocks)
            # none: it averages something else by now
            answer = await self._requests.ask(session.peer, latest) if session.blocks else None
        except PeerError:
            answer = None
        if isinstance(answer, Ready) and answer.size <= self._replica.limits[session.fragment]:
            session.theirs = answer
            await self._fetch(session, answer)
        else:
            self._fail(session.id, "declined")

    async def _fetch(self, session: ExchangeSession, ready: Ready) -> None:
        session.path = path = self._store.new_path()
        remote = RemotePayload(session.peer, ready.transfer, ready.root, ready.size)
        deadline = trio.current_time() + session.lease_seconds
        cause = ""
        with session.scope:
            try:
                await self._store.fetch(
                    remote, path, self._replica.limits[session.fragment], deadline
                )
            except BadMessage as bad:
                cause = "hash" if bad.reason == "hash" else "malformed"
                self.lied(session.peer, f"weights_{cause}")
            except PeerTimeout:
                cause = "timeout"
            except PeerError as error:
                log.info("weights of %s: %s", session.peer, error)
                cause = "failed"
            except LocalError as error:
                log.warning("weights of %s not stored: %s", session.peer, error)
                cause = "local"
        if session.scope.cancelled_caught or self._session is not session:
            self._store.discard(path)
        elif cause:
            self._fail(session.id, cause)
        else:
            self._handle(pairing.Transferred(session.id))
