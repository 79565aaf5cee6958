"""Averaging one fragment with one peer: a swap, from the request to the commit. NoLoCo, arXiv
2506.10911, section 3.2: both sides take the mean of the pair. trio; no torch.

    A ─ swap(id, fragment, blocks, outer_step, fingerprint) ─▶ B
    A ◀─ accepted(id) | busy(retry_after) | refused(reason) ─ B    at once: nothing is copied yet
    then both, each by itself:
        `_copy`           the trainer copies between two steps and encodes
        `_await_payload`  ask the partner for payload(id) until it is there
        `_fetch`          fetch it by bulk
        `_commit`         the trainer judges it and commits between two steps

Our outer step is due: `outer_step_due` asks candidates in the order of `Discovery.partners`, at
most TRIES of them, and has the step taken alone when none of them takes part. A peer asks: `answer`
decides. Either way `_exchange` is the rest of the story, top to bottom. Whatever a peer does ends
one swap at most, is counted by cause, and lengthens the peer's `PeerBackoff`. A side that fails
does not tell the other, which may commit alone: that is harmless by measurement.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import secrets
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVarTuple

import msgspec
import trio

from swarmnode.errors import BadMessage, LocalError, PeerError, PeerTimeout
from swarmnode.p2p.api import Network
from swarmnode.weights import local
from swarmnode.weights.discovery import REQUEST_SECONDS, Discovery, ask
from swarmnode.weights.local import OURS, PROOF, LocalReplica, SendToTrainer
from swarmnode.weights.messages import (
    ID_BYTES,
    MESSAGE_BYTES,
    Accepted,
    Busy,
    Here,
    Message,
    Payload,
    Ready,
    Refused,
    Swap,
    decode_message,
    encode_message,
)
from swarmnode.weights.payload_store import (
    PayloadOffer,
    PayloadStore,
    RemotePayload,
    offer_seconds,
)
from swarmnode.wire import ids

log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")

TRIES: Final = 3
"""Candidates that are asked for one outer step."""
PROPOSE_SECONDS: Final = 2.0
"""For the answer to a swap request, which is given at once: a round trip and a busy event loop."""
PAUSE_SECONDS: Final = 2.0
PAUSE_SHARE: Final = 0.125
"""Longest pause between two tries, also as a share of the gap between two outer steps. A node that
always proposes can never be proposed to."""
COPY_WAIT_SECONDS: Final = (5.0, 120.0)
"""Least and most time for a copy, beside two training steps and its encoding."""
ENCODED_PER_SECOND: Final = 1e8
"""Bytes of a payload."""
APPLY_SECONDS: Final = 360.0
"""For our trainer to judge a payload and to end its step, beside eight training steps."""
POLL_SECONDS: Final = 4.0
"""A question for a payload that is being written is held for this long."""
POLL_PAUSE_SECONDS: Final = 0.5
COPY_REUSE_SECONDS: Final = 5.0
"""One copy serves every swap of its fragment that is accepted within this time."""
LINGER_SECONDS: Final = 30.0
"""The partner may fetch for this long after the time that a transfer may take."""
SLOWER: Final = 4.0
"""A partner that was slow before gets this multiple of a stranger's time."""
MOST_SWAPS: Final = 4
"""Swaps under way at a time, each of another fragment: each holds a copy of it."""
ACCEPT_SHARE: Final = 0.25
"""A fragment takes at most one swap that others propose in this share of its interval."""
PEER_SHARE: Final = 0.4
"""One of n equally good candidates is accepted at most once in n times this share of the gap
between two outer steps. An honest peer proposes to each of n once in n gaps. With 0.6, two nodes
would refuse each other every second time."""
SHORT_SECONDS: Final = 5.0
"""A failed swap counts as having taken this long at least, or one gap if that is less."""
FAILURE_FACTOR: Final = 4.0
"""A first failure costs a peer this multiple of the time that its swap took."""
LIE_SECONDS: Final = 300.0
"""The first backoff of a peer whose lie was proved."""
LONGEST_BACKOFF_SECONDS: Final = 3600.0
PARTNERS: Final = 256
"""Peers that are remembered."""
REMEMBERED_SWAPS: Final = 64

OUTCOMES: Final = (
    "applied",  # outer steps: with a partner's weights, or alone
    "solo",
    "busy",  # attempts to find a partner
    "refused",
    "unreachable",
    "failed",  # swaps after `accepted`
)
FAILURES: Final = (
    "no_payload",  # nothing to fetch in time
    "withdrawn",  # the partner says that its swap is over
    "timeout",  # the transfer was too slow
    "broken",  # the transfer broke off
    "size",
    "hash",
    "malformed",
    "gate",  # our trainer refused the weights: `judged` has the reason
    "local",  # our disk, or our weights had moved on
    "snapshot",  # our copy was late
    "apply_timeout",  # our trainer did not answer
    "no_trainer",
)
"""Why a swap failed."""
BLAMELESS: Final = frozenset(("local", "snapshot", "apply_timeout", "no_trainer"))
"""Failures that are ours."""
LIES: Final = frozenset(("size", "hash", "malformed"))


class PeerBackoff:
    """How long one peer is neither asked nor accepted.

    The time doubles with each failure, up to LONGEST_BACKOFF_SECONDS. A swap that began after the
    last failure and succeeds clears it.
    """

    def __init__(self) -> None:
        self.until = -math.inf
        self._failures = 0
        self._failed_at = -math.inf

    def fail(self, now: float, seconds: float) -> None:
        """Count a failure that costs `seconds` if it is the first."""
        wait = min(seconds * 2.0 ** min(self._failures, 32), LONGEST_BACKOFF_SECONDS)
        self.until = max(self.until, now + wait)
        self._failures += 1
        self._failed_at = now

    def succeed(self, began: float) -> None:
        """Count a success of a swap that began at `began`."""
        if began >= self._failed_at:
            self.until, self._failures = -math.inf, 0


@dataclass
class Partner:
    """What is remembered of one peer. Times are trio's."""

    backoff: PeerBackoff = field(default_factory=PeerBackoff)
    swapped_at: float = -math.inf
    """When the last swap with it began."""
    busy_until: float = -math.inf
    """As it said itself: it is asked after the others until then."""
    applied: int = 0
    """Swaps that were applied."""


@dataclass(frozen=True)
class Copy:
    """Our encoded weights of a fragment, as of one moment."""

    offer: PayloadOffer
    blocks: bytes
    """What of the fragment is in it, packed."""
    outer_step: int
    at: float


@dataclass(eq=False)
class SwapState:
    """One swap, under way or over."""

    id: bytes
    peer: str
    fragment: int
    blocks: bytes
    """What the partner and we hold, packed, as of the swap's beginning."""
    phase: str = "proposing"
    copy: Copy | None = None
    """As it is offered to the partner."""
    offered: trio.Event = field(default_factory=trio.Event)
    """Set when `copy` is there, or never will be."""
    theirs: Ready | None = None
    path: Path | None = None
    """Where the partner's payload is."""
    snapshot: local.SnapshotWritten | None = None
    copied: trio.Event = field(default_factory=trio.Event)
    ended: local.ExchangeEnded | None = None
    judged: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    began: float = field(default_factory=trio.current_time)

    @property
    def is_applied(self) -> bool:
        return self.ended is not None and self.ended.committed


@dataclass
class ExchangeStatistics:
    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    failures: Counter[str] = field(default_factory=Counter)
    judged: Counter[str] = field(default_factory=Counter)
    """Partners' weights by `local.OUTCOMES`."""
    seconds: float = 0.0
    """Duration of the applied swaps, summed."""
    received_bytes: int = 0
    """Length of the payloads that they fetched, summed."""


class Exchange:
    """All swaps of this node.

    Args:
        sync_every: Training steps between two outer steps of a fragment.
        may_accept: Returns False while no swap may begin.
        may_propose: Returns False while none may be proposed.
    """

    def __init__(
        self,
        network: Network,
        replica: LocalReplica,
        discovery: Discovery,
        store: PayloadStore,
        send_to_trainer: SendToTrainer,
        sync_every: int,
        *,
        may_accept: Callable[[], bool] = lambda: True,
        may_propose: Callable[[], bool] = lambda: True,
        rng: random.Random | None = None,
    ) -> None:
        self.statistics = ExchangeStatistics()
        self._network = network
        self._replica = replica
        self._discovery = discovery
        self._store = store
        self._send_to_trainer = send_to_trainer
        self._sync_every = sync_every
        self._may_accept = may_accept
        self._may_propose = may_propose
        self._rng = rng or random.Random()
        self._nursery: trio.Nursery | None = None
        self._swaps: dict[int, SwapState] = {}
        """Under way, by fragment; a proposal is one."""
        self._searches: dict[int, local.OuterStepDue] = {}
        """Outer steps of ours for which a partner is sought, by fragment."""
        self._recent: OrderedDict[bytes, SwapState] = OrderedDict()
        """Accepted swaps, the latest REMEMBERED_SWAPS: partners fetch from them."""
        self._copies: dict[int, Copy] = {}
        self._rest_until: dict[int, float] = {}
        """No swap of the fragment is accepted until then."""
        self._partners: OrderedDict[str, Partner] = OrderedDict()
        self._candidates: tuple[str, ...] = ()
        """Those of the last search."""
        self._best = 0
        """How many of the first of them are worth as much as the first."""
        self._step_seconds = 0.0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer peers and average with them, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._network.requests.serve(
                ids.WEIGHTS_PROTOCOL,
                self._serve,
                max_request_bytes=MESSAGE_BYTES,
                max_response_bytes=MESSAGE_BYTES,
                concurrent=32,
                per_peer=4,
                deadline=REQUEST_SECONDS,
            )
            task_status.started()
            await trio.sleep_forever()

    def start(self, work: Callable[[*Args], Awaitable[object]], *args: *Args) -> None:
        """Start a task that ends with `run`; before and after `run` it is not started."""
        # A nursery that is closed to new tasks cannot be asked whether it is.
        with contextlib.suppress(RuntimeError):
            if self._nursery is not None:
                self._nursery.start_soon(work, *args)

    # ---- our outer step --------------------------------------------------------------------------

    def outer_step_due(self, due: local.OuterStepDue) -> None:
        """Find a partner for an outer step of ours. A search that is under way already counts for
        it."""
        self._step_seconds = max(0.0, due.step_seconds)
        if due.fragment not in self._searches:
            self._searches[due.fragment] = due
            self.start(self._take_outer_step, due)

    async def _take_outer_step(self, due: local.OuterStepDue) -> None:
        """Swap the fragment with the first candidate that accepts. Take the step alone when TRIES
        of them do not, or half an interval is over."""
        pause = min(PAUSE_SECONDS, PAUSE_SHARE * self._gap)
        latest = trio.current_time() + self._interval / 2
        candidates = self._order(due)[:TRIES]
        await self._wait_for_swap(due.fragment)
        while candidates and self._is_sought(due) and len(self._swaps) < MOST_SWAPS:
            swap = await self._propose(candidates.pop(0), due)
            if swap is not None:
                await self._exchange(swap)
            else:
                await trio.sleep(pause * self._rng.random())
            await self._wait_for_swap(due.fragment)
            if trio.current_time() > latest:
                break
        if self._is_sought(due):
            del self._searches[due.fragment]
            self._copies.pop(due.fragment, None)
            self.statistics.outcomes["solo"] += 1
            self._send_to_trainer(local.SoloStep(due.fragment))

    def _is_sought(self, due: local.OuterStepDue) -> bool:
        """Return False once a swap of the fragment was applied, whoever proposed it, or the trainer
        has left."""
        return self._searches.get(due.fragment) is due

    async def _wait_for_swap(self, fragment: int) -> None:
        """Wait for a swap of the fragment that a peer has proposed, if there is one."""
        while (swap := self._swaps.get(fragment)) is not None:
            await swap.over.wait()

    def _order(self, due: local.OuterStepDue) -> list[str]:
        """Candidates without those in backoff: by edge rank, after the others those that said that
        they are busy, or that we have swapped with lately."""
        if not self._may_propose():
            return []
        now = trio.current_time()
        self._candidates, self._best = self._discovery.partners(
            due.fragment, due.outer_step, due.blocks
        )
        best = self._candidates[: self._best]

        def later(peer: str) -> tuple[bool, bool, bool]:
            is_busy = self._known(peer).busy_until > now
            return is_busy, peer not in best, self._seconds_until_welcome(peer, now) > 0

        free = (peer for peer in self._candidates if self._known(peer).backoff.until <= now)
        return sorted(free, key=later)

    async def _propose(self, peer: str, due: local.OuterStepDue) -> SwapState | None:
        """Ask one candidate. Return None if it does not take part."""
        fragment, blocks = due.fragment, self._replica.blocks
        swap = SwapState(
            secrets.token_bytes(ID_BYTES), peer, fragment, self._discovery.shared(peer)
        )
        self._swaps[fragment] = swap
        outer_step = self._replica.outer_steps[fragment]
        request = Swap(swap.id, self._replica.fingerprint, fragment, outer_step, blocks)
        answer: Message | None = None
        outcome = "unreachable"
        try:
            answer = await ask(self._network, peer, request, PROPOSE_SECONDS)
        except BadMessage:
            self._lied(peer, "weights_malformed")
        except PeerError as error:
            log.info("%s cannot be asked for a swap: %s", peer, error)
            self._fail(peer, PROPOSE_SECONDS)
        if self._swaps.get(fragment) is not swap:  # the peer proposed too, and its swap counts
            swap.over.set()
            return None
        match answer:
            case Accepted(id=swap.id):
                self._discovery.received(peer, answer)
                swap.blocks = self._discovery.shared(peer)
                if self._replica.within(swap.blocks, fragment):
                    self._begin(swap)
                    return swap
                outcome = "refused"
            case Busy(id=swap.id):
                self._partner(peer).busy_until = trio.current_time() + answer.retry_seconds
                outcome = "busy"
            case Refused(id=swap.id):
                outcome = "refused"
            case None:
                pass
            case _:
                self._lied(peer, "weights_malformed")
        self.statistics.outcomes[outcome] += 1
        del self._swaps[fragment]
        swap.over.set()
        return None

    # ---- a peer's outer step ---------------------------------------------------------------------

    async def _serve(self, peer: str, data: bytes) -> bytes:
        """Answer one request. Raises PeerError to reset the stream."""
        await trio.lowlevel.checkpoint()
        try:
            message = decode_message(data)
            if not isinstance(message, Here | Swap | Payload):
                raise BadMessage("schema", "an answer to nothing")
            if (
                isinstance(message, Swap)
                and message.fingerprint == self._replica.fingerprint
                and not self._replica.has(message.fragment)
            ):
                raise BadMessage("bounds", "fragment")
        except BadMessage:
            self._network.rejected(peer, "weights_malformed", PROOF)
            raise
        if self._replica.facts is None:
            raise PeerError("no replica yet")
        match message:
            case Here():
                self._discovery.received(peer, message)
                return encode_message(self._discovery.claim())
            case Swap():
                self._discovery.received(peer, message)
                return encode_message(self.answer(peer, message))
            case Payload():
                return encode_message(await self._payload(peer, message))

    def answer(self, peer: str, request: Swap) -> Accepted | Busy | Refused:
        """Accept the swap of a peer, or say why not, at once."""
        shared, fragment = self._discovery.shared(peer), request.fragment
        if request.fingerprint != self._replica.fingerprint or not self._replica.within(
            shared, fragment
        ):
            return Refused(request.id, "other_policy")
        if request.id in self._recent:
            return Refused(request.id, "over")
        mine = self._swaps.get(fragment)
        crosses = mine is not None and mine.phase == "proposing" and mine.peer == peer
        # Of two crossing proposals the one of the lower peer id counts: theirs is busy, or ours is.
        wait = 0.0 if crosses and peer < self._network.peer_id else self._wait(peer, fragment)
        if wait > 0 or not self._may_accept():
            return Busy(request.id, min(3600, math.ceil(max(wait, PAUSE_SECONDS))))
        swap = SwapState(request.id, peer, fragment, shared)
        self._swaps[fragment] = swap
        self._begin(swap)
        self.start(self._exchange, swap)
        return Accepted(request.id, self._replica.outer_steps[fragment], self._replica.blocks)

    def _wait(self, peer: str, fragment: int) -> float:
        """Return for how many seconds no swap of the fragment is accepted from the peer."""
        now = trio.current_time()
        under_way = fragment in self._swaps or len(self._swaps) >= MOST_SWAPS
        return max(
            self._copy_seconds if under_way else 0.0,
            self._rest_until.get(fragment, now) - now,
            self._seconds_until_welcome(peer, now),
            self._known(peer).backoff.until - now,
        )

    def _seconds_until_welcome(self, peer: str, now: float) -> float:
        """Return for how long a peer is not accepted because of its last swap with us."""
        best = peer in self._candidates[: self._best]
        equals = self._best if best else max(1, len(self._candidates))
        until = self._known(peer).swapped_at + PEER_SHARE * self._gap * equals
        return max(0.0, until - now)

    async def _payload(self, peer: str, request: Payload) -> Ready | Busy | Refused:
        """Say where our payload of a swap is, once it is there. One that is an interval old is not
        served: it would cost the partner 0.3 nats."""
        swap = self._recent.get(request.id)
        if swap is None or swap.peer != peer:
            return Refused(request.id, "over")
        with trio.move_on_after(POLL_SECONDS):
            await swap.offered.wait()
        if not swap.offered.is_set():
            return Busy(request.id)
        copy = swap.copy
        if (
            copy is None
            or not self._store.is_offered(copy.offer)
            or trio.current_time() > copy.at + self._age_limit
        ):
            return Refused(request.id, "over")
        offer = copy.offer
        return Ready(request.id, offer.transfer, offer.root, offer.size, copy.outer_step)

    # ---- a swap that both have agreed to ---------------------------------------------------------

    def _begin(self, swap: SwapState) -> None:
        now, swap.phase = trio.current_time(), "copying"
        swap.began = self._partner(swap.peer).swapped_at = now
        self._rest_until[swap.fragment] = now + ACCEPT_SHARE * self._interval
        self._recent[swap.id] = swap
        while len(self._recent) > REMEMBERED_SWAPS:
            self._recent.popitem(last=False)

    async def _exchange(self, swap: SwapState) -> bool:
        """Everything from the agreement to the commit. Return True if our trainer has committed."""
        cause = "no_trainer"
        with swap.scope:  # cancelled when the trainer leaves
            cause = (
                await self._copy(swap)
                or await self._await_payload(swap)
                or await self._fetch(swap)
                or await self._commit(swap)
            )
        self._conclude(swap, cause)
        return swap.is_applied

    async def _copy(self, swap: SwapState) -> str:
        """Have our trainer copy its weights between two steps and encode them; serve them to the
        partner. Return why it failed, or an empty string; so do the three that follow."""
        swap.copy = self._reused_copy(swap)
        if swap.copy is None:
            request = local.TakeSnapshot(swap.id, swap.fragment, swap.blocks)
            if not self._send_to_trainer(request):
                return "no_trainer"
            with trio.move_on_after(self._copy_seconds):
                await swap.copied.wait()
            if swap.ended is not None:  # a stage that is suspended averages with nobody
                return "local"
            if (snapshot := swap.snapshot) is None:
                return "snapshot"
            payload = await self._store.open(snapshot.path)
            if payload is None:
                return "snapshot"
            until = self._offered_until(swap, payload.source.size)
            offer = self._store.offer(payload, until, [swap.peer])
            swap.copy = Copy(offer, snapshot.blocks, snapshot.outer_step, trio.current_time())
        self._copies[swap.fragment] = swap.copy
        swap.offered.set()
        return ""

    def _reused_copy(self, swap: SwapState) -> Copy | None:
        """Return the last copy of the fragment, offered to this partner too, if it is recent and of
        the same blocks."""
        copy = self._copies.get(swap.fragment)
        if (
            copy is None
            or trio.current_time() > copy.at + min(COPY_REUSE_SECONDS, self._age_limit / 4)
            or copy.blocks != self._replica.within(swap.blocks, swap.fragment)
        ):
            return None
        until = self._offered_until(swap, copy.offer.size)
        offer = self._store.offer_again(copy.offer, until, [swap.peer])
        return None if offer is None else replace(copy, offer=offer)

    def _offered_until(self, swap: SwapState, size: int) -> float:
        fetched = max(self._lease(swap) + LINGER_SECONDS, offer_seconds(size))
        return trio.current_time() + self._copy_seconds + fetched

    async def _await_payload(self, swap: SwapState) -> str:
        """Ask the partner for its payload until it is there."""
        swap.phase = "waiting"
        with trio.move_on_after(self._copy_seconds):
            while True:
                answer: Message | None = None
                try:
                    answer = await ask(self._network, swap.peer, Payload(swap.id))
                except BadMessage:
                    return "malformed"
                except PeerError as error:  # its connection may be back in a moment
                    log.debug("%s does not say where its weights are: %s", swap.peer, error)
                match answer:
                    case Ready(id=swap.id):
                        swap.theirs = answer
                        limit = self._replica.limits[swap.fragment]
                        return "size" if answer.size > limit else ""
                    case Refused(id=swap.id):
                        return "withdrawn"
                    case None | Busy(id=swap.id):
                        await trio.sleep(POLL_PAUSE_SECONDS)
                    case _:
                        return "malformed"
        return "no_payload"

    async def _fetch(self, swap: SwapState) -> str:
        """Fetch the partner's payload into a file, each chunk verified."""
        assert swap.theirs is not None
        swap.phase, swap.path, theirs = "fetching", self._store.new_path(), swap.theirs
        remote = RemotePayload(swap.peer, theirs.transfer, theirs.root, theirs.size)
        limit = self._replica.limits[swap.fragment]
        deadline = trio.current_time() + self._lease(swap)
        try:
            await self._store.fetch(remote, swap.path, limit, deadline)
        except BadMessage as bad:
            return "hash" if bad.reason == "hash" else "malformed"
        except PeerTimeout:
            return "timeout"
        except PeerError as error:
            log.info("weights of %s: %s", swap.peer, error)
            return "broken"
        except LocalError as error:
            log.warning("weights of %s not stored: %s", swap.peer, error)
            return "local"
        return ""

    async def _commit(self, swap: SwapState) -> str:
        """Have our trainer judge the partner's weights, and commit what its gate makes of them."""
        assert swap.theirs is not None
        swap.phase, theirs = "judging", swap.theirs.outer_step
        apply = local.ApplyPayload(
            swap.id, swap.fragment, swap.peer, theirs, str(swap.path), swap.blocks
        )
        if not self._send_to_trainer(apply):
            return "no_trainer"
        with trio.move_on_after(APPLY_SECONDS + 8 * self._step_seconds):
            await swap.judged.wait()
        if swap.ended is None:
            return "apply_timeout"
        if swap.ended.committed:
            return ""
        return "local" if swap.ended.outcome in OURS else "gate"

    def _conclude(self, swap: SwapState, cause: str) -> None:
        """Count how a swap ended, and hold it for or against the partner."""
        now, outcomes = trio.current_time(), self.statistics.outcomes
        if self._swaps.get(swap.fragment) is swap:
            del self._swaps[swap.fragment]
        if swap.path is not None:
            self._store.discard(swap.path)
        if cause:
            log.info("swap with %s failed: %s", swap.peer, cause)
            outcomes["failed"] += 1
            self.statistics.failures[cause] += 1
            if swap.ended is None:
                self._send_to_trainer(local.DropExchange(swap.id))
            if swap.copy is not None and cause != "gate":
                self._store.shorten(swap.copy.offer, now + COPY_REUSE_SECONDS)
            held = max(now - swap.began, self._short_seconds)
            if cause in LIES:
                self._lied(swap.peer, f"weights_{cause}")
            elif cause == "gate" and swap.ended is not None and local.OUTCOMES[swap.ended.outcome]:
                self._lied(swap.peer, f"weights_{swap.ended.outcome}")
            elif cause not in BLAMELESS:
                self._fail(swap.peer, FAILURE_FACTOR * held)
        else:
            outcomes["applied"] += 1
            self.statistics.seconds += now - swap.began
            self.statistics.received_bytes += swap.theirs.size if swap.theirs is not None else 0
            self._searches.pop(swap.fragment, None)
            self._rest_until[swap.fragment] = now + ACCEPT_SHARE * self._interval
            partner = self._partner(swap.peer)
            partner.applied += 1
            # A partner that is far behind is served, and nothing of it was mixed in.
            if swap.ended is not None and swap.ended.outcome != "lagging":
                partner.backoff.succeed(swap.began)
                self._network.accepted(swap.peer)
        swap.offered.set()
        swap.over.set()

    def _lied(self, peer: str, reason: str, cost: float = PROOF) -> None:
        self._network.rejected(peer, reason, cost)
        self._fail(peer, LIE_SECONDS)

    def _fail(self, peer: str, seconds: float) -> None:
        self._partner(peer).backoff.fail(trio.current_time(), seconds)

    def _known(self, peer: str) -> Partner:
        """Return what is remembered of the peer, to read."""
        return self._partners.get(peer) or Partner()

    def _partner(self, peer: str) -> Partner:
        """Return what is remembered of the peer, to change."""
        partner = self._partners[peer] = self._known(peer)
        self._partners.move_to_end(peer)
        while len(self._partners) > PARTNERS:
            self._partners.popitem(last=False)
        return partner

    # ---- what the trainer sends ------------------------------------------------------------------

    def trainer_left(self) -> None:
        """What the trainer was doing is over."""
        for swap in self._swaps.values():
            swap.scope.cancel()
        self._searches.clear()
        self._swaps.clear()
        self._copies.clear()

    def snapshot_written(self, snapshot: local.SnapshotWritten) -> None:
        """Our copy for a swap is there; the file is deleted if the swap has ended meanwhile."""
        swap = self._swaps.get(snapshot.fragment)
        if swap is not None and swap.id == snapshot.session:
            swap.snapshot = snapshot
            swap.copied.set()
        elif snapshot.path:
            self._store.discard(Path(snapshot.path))

    def exchange_ended(self, ended: local.ExchangeEnded) -> None:
        """Our trainer has committed a swap or refused it."""
        outcome = ended.outcome if ended.outcome in local.OUTCOMES else "local"
        self.statistics.judged[outcome] += 1
        if ended.committed:
            self._copies.pop(ended.fragment, None)
        for swap in self._swaps.values():
            if swap.id == ended.session:
                swap.ended = msgspec.structs.replace(ended, outcome=outcome)
                swap.copied.set()
                swap.judged.set()

    def reverted(self, peer: str) -> None:
        """Swaps with `peer`, among others, were taken back."""
        self.statistics.judged["reverted"] += 1
        self._copies.clear()
        self._fail(peer, FAILURE_FACTOR * self._short_seconds)

    # ---- for people, and for sums ----------------------------------------------------------------

    @property
    def phase(self) -> tuple[str, str]:
        """Phase and partner of the swap that has been under way for longest."""
        swap = next(iter(self._swaps.values()), None)
        return ("idle", "") if swap is None else (swap.phase, swap.peer)

    def pairs(self) -> dict[str, int]:
        """Applied swaps by peer: for people, never a metric's label."""
        return {
            peer: partner.applied for peer, partner in self._partners.items() if partner.applied
        }

    @property
    def _interval(self) -> float:
        """Seconds between two outer steps of one fragment."""
        return self._sync_every * self._step_seconds

    @property
    def _gap(self) -> float:
        """Seconds between two outer steps, of any fragment."""
        return self._interval / max(1, len(self._replica.limits))

    @property
    def _short_seconds(self) -> float:
        """How long a failed swap counts as having taken, at least."""
        return min(SHORT_SECONDS, self._gap or SHORT_SECONDS)

    @property
    def _copy_seconds(self) -> float:
        """How long a copy may take, ours or the partner's."""
        least, most = COPY_WAIT_SECONDS
        encoding = max(self._replica.limits, default=0) / ENCODED_PER_SECOND
        return min(least + 2 * self._step_seconds, most) + encoding

    @property
    def _age_limit(self) -> float:
        """Age in seconds up to which a copy is served: one interval."""
        return max(self._interval, self._copy_seconds)

    def _lease(self, swap: SwapState) -> float:
        """Seconds that a payload may take, both ways at once."""
        size, bulk = self._replica.limits[swap.fragment], self._network.bulk
        return 2 * min(bulk.deadline(swap.peer, size), SLOWER * bulk.deadline("", size))
