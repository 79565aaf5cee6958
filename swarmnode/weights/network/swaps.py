"""A swap: averaging one fragment with one peer, from the request to the commit (NoLoCo, arXiv
2506.10911, section 3.2). trio; no torch.

Each side computes θ̄ = θ_i + w (θ_j − θ_i) with its own θ_i and w = ½. If the partner is n > 0 outer
steps behind, w = ½ / (1 + n). If n > 4, w = 0: this side takes a solo step (`weights.rule`).

    A ─ swap(id, fragment, blocks, outer_step, fingerprint) ─▶ B
    A ◀─ accepted(id, blocks) | busy | refused(reason) ─ B    nothing is copied yet
    then each side independently:
        `_copy`           the trainer copies between two steps and encodes
        `_await_payload`  ask the partner for payload(id) until it is ready
        `_fetch`          fetch it by bulk transfer
        `_apply_payload`  the trainer checks it with the gate and commits between two steps

When an own outer step is due, `outer_step_due` asks candidates in the order of
`Discovery.ordered`, until swaps have covered all due blocks. A stage of a crew covers a part of
them. After TRIES proposals without a swap or half an interval, the trainer takes the step of the
remaining blocks solo; so it does without a network process. When a peer proposes a swap, `answer`
decides. Both paths continue in `_exchange`. A swap that a peer proposed counts as the own outer
step of its blocks if that is due within half an interval (`schedule.EARLY`).

A failure ends one swap, is counted by cause, and lengthens the peer's `PeerBackoff`, unless it is
this node's fault. A side that fails does not notify the other side, which may commit alone;
measurements show no harm (protocol/03-weights.md, Questions).

An *interval* is the time between two outer steps of one fragment, a *gap* the time between two
outer steps of any fragments.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import secrets
import statistics
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVarTuple

import msgspec
import trio

from swarmnode.errors import BadMessage, LocalError, PeerError, PeerTimeout
from swarmnode.latest import Latest
from swarmnode.p2p.api import Network
from swarmnode.weights import local
from swarmnode.weights.fragments import common, pack, unpack
from swarmnode.weights.local import MOST_SWAPS, OWN_FAULTS, PROOF, LocalReplica, SendToTrainer
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
)
from swarmnode.weights.network.discovery import REQUEST_SECONDS, Discovery, ask
from swarmnode.weights.network.payload_store import (
    PayloadOffer,
    PayloadStore,
    RemotePayload,
    offer_seconds,
)
from swarmnode.wire import ids, strict

log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")

TRIES: Final = 3
"""Number of proposals without a swap after which an outer step is taken solo."""
PROPOSE_SECONDS: Final = 2.0
"""Deadline of a swap request. It is answered at once, so this covers a round trip and a busy event
loop."""
PAUSE_SECONDS: Final = 2.0
"""Longest pause between two tries. Pauses are random: a node that always has a proposal under way
cannot accept one."""
PAUSE_SHARE: Final = 0.125
"""Longest pause between two tries, as a share of the gap between two outer steps."""
COPY_WAIT_SECONDS: Final = (5.0, 120.0)
"""`min(5 s + two training steps, 120 s)` is the time limit of a copy without encoding."""
ENCODED_PER_SECOND: Final = 1e8
"""Lowest expected speed of encoding, bytes of payload per second."""
APPLY_SECONDS: Final = 360.0
"""Time limit of `_apply_payload`, to which eight training steps are added."""
POLL_SECONDS: Final = 4.0
"""Longest time for which a `payload` request is held while the payload is being written."""
POLL_PAUSE_SECONDS: Final = 0.5
"""Pause between two `payload` requests."""
LINGER_SECONDS: Final = 30.0
"""A payload is offered for the time limit of its transfer plus this time."""
SLOWER: Final = 4.0
"""Longest transfer deadline of a partner with a low measured bandwidth, as a multiple of an
unmeasured peer's deadline."""
ACCEPT_SHARE: Final = 0.25
"""A block accepts at most one swap in this share of its interval."""
PEER_GAPS: Final = 0.4
"""A proposal of one of n equally good candidates is accepted at most once in `PEER_GAPS * n` gaps.
An honest peer proposes to each of n candidates once in n gaps. With 0.6, two nodes would refuse
every second proposal of each other."""
MEASURED_PACES: Final = 5
"""Own outer steps over which the duration of a training step is measured. The median of the
intervals between them ignores a pause of the training."""
LONGEST_BACKOFF_SECONDS: Final = 3600.0
PARTNERS: Final = 256
"""Peers that are remembered."""
REMEMBERED_SWAPS: Final = 64
"""Accepted swaps whose payload requests are answered."""

OUTCOMES: Final = (
    "applied",  # completed swaps; `lagging` averages with weight 0
    "solo",  # outer steps without a partner
    "busy",  # proposals without a swap, by answer
    "refused",
    "unreachable",
    "failed",  # swaps after `accepted`
)
FAILURES: Final = (
    "no_payload",  # the partner's payload was not ready in time
    "withdrawn",  # the partner answered that its swap is over
    "timeout",  # the transfer was too slow
    "broken",  # the transfer broke off
    "size",  # the announced payload is longer than the layout allows
    "hash",  # a chunk does not have its hash
    "malformed",  # a message is malformed
    "gate",  # this node's trainer refused the weights; `judged` has the reason
    "local",  # this node's disk failed, or its φ changed during the swap
    "snapshot",  # this node's copy was not ready in time
    "apply_timeout",  # this node's trainer did not answer in time
    "no_trainer",  # this node's trainer has left
)
"""Causes of a failed swap."""
OWN_FAILURES: Final = frozenset(("local", "snapshot", "apply_timeout", "no_trainer"))
"""Failures that are this node's fault."""
FALSE_DATA: Final = frozenset(("size", "hash", "malformed"))
"""Failures that prove that the partner sent false data. They cost it reputation."""


@dataclass(eq=False)
class Search:
    """The search of partners for an own outer step."""

    due: local.OuterStepDue
    blocks: frozenset[int]
    """Due blocks that no swap has covered."""


@dataclass(eq=False)
class SwapState:
    """One swap, under way or over."""

    id: bytes
    peer: str
    fragment: int
    blocks: bytes
    """The swapped blocks of the fragment, as a bitmask (`fragments.pack`)."""
    phase: str = "proposing"
    copy: PayloadOffer | None = None
    """This node's weights of the blocks, encoded and offered to the partner."""
    copied_at: float = 0.0
    offered: trio.Event = field(default_factory=trio.Event)
    """Set when `copy` is offered, or the swap has ended without one."""
    partner_offer: Ready | None = None
    """The partner's offer."""
    path: Path | None = None
    """File of the partner's payload."""
    snapshot: local.SnapshotWritten | None = None
    copied: trio.Event = field(default_factory=trio.Event)
    ended: local.SwapEnded | None = None
    judged: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    began: float = field(default_factory=trio.current_time)


class WeightsStatistics(msgspec.Struct, frozen=True):
    """Counts and state of averaging, for the status page and metrics."""

    enabled: bool = False
    """True if this node averages with peers."""
    phase: str = ""
    """Phase of the earliest swap under way: idle, proposing, copying, waiting, fetching or
    judging."""
    partner: str = ""
    outcomes: dict[str, int] = {}
    """Outer steps, proposals and swaps by OUTCOMES."""
    failures: dict[str, int] = {}
    """Failed swaps by FAILURES."""
    judged: dict[str, int] = {}
    """Partners' weights by `local.OUTCOMES`."""
    candidates: int = 0
    """Number of peers that are candidates for a swap."""
    exchange_seconds: float = 0.0
    """Duration of the applied swaps, summed."""
    received_bytes: int = 0
    """Length of the payloads that they fetched, summed."""
    pairs: dict[str, int] = {}
    """Number of applied swaps by peer. Shown to the operator, never a metric label."""


class SwapService:
    """All swaps of this node.

    Args:
        sync_every: Training steps between two outer steps of a fragment.
        may_accept: Returns False while no peer's proposal may be accepted.
        may_propose: Returns False while this node may not propose a swap.
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
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self._failures = Counter(dict.fromkeys(FAILURES, 0))
        self._judged = Counter(dict.fromkeys(local.OUTCOMES, 0))
        self._exchange_seconds, self._received_bytes = 0.0, 0
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
        """Swaps under way by fragment, including proposals."""
        self._searches: dict[int, Search] = {}
        """Own outer steps with blocks that have no partner yet, by fragment."""
        self._recent = Latest[bytes, SwapState](REMEMBERED_SWAPS)
        """Accepted swaps, for the partners' `payload` requests."""
        self._rest_until: dict[int, float] = {}
        """Block → time before which no swap of it is accepted."""
        self._partners = Latest[str, Partner](PARTNERS)
        self._candidates: tuple[str, ...] = ()
        """Candidates of the last search."""
        self._best = 0
        """Number of candidates that equal the first."""
        self._step_seconds = 0.0
        """Time from one training step to the next."""
        self._paces: deque[float] = deque(maxlen=MEASURED_PACES)
        self._last_due: tuple[float, int] | None = None
        """Time and training step of the last `outer_step_due`."""

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer and propose swaps until cancelled."""
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
        """Start a task in the nursery of `run`. Does nothing unless `run` is running."""
        # trio has no way to ask a nursery whether it is closed to new tasks.
        with contextlib.suppress(RuntimeError):
            if self._nursery is not None:
                self._nursery.start_soon(work, *args)

    # ---- own outer step --------------------------------------------------------------------------

    def outer_step_due(self, due: local.OuterStepDue) -> None:
        """Start to look for a partner for an own outer step, unless a search for the fragment is
        under way."""
        self._measure_pace(due)
        if due.fragment not in self._searches:
            search = self._searches[due.fragment] = Search(due, unpack(due.blocks))
            self.start(self._take_outer_step, search)

    def _measure_pace(self, due: local.OuterStepDue) -> None:
        """Measure the time from one training step to the next, with evaluation and averaging in
        between. Before the second outer step, use the duration of the last training step."""
        now = trio.current_time()
        if self._last_due is not None and due.step > self._last_due[1]:
            at, step = self._last_due
            self._paces.append((now - at) / (due.step - step))
        self._last_due = now, due.step
        self._step_seconds = statistics.median(self._paces or [due.step_seconds])

    async def _take_outer_step(self, search: Search) -> None:
        """Swap the due blocks with the candidates that accept, one after the other. Request a solo
        step of the remaining blocks after TRIES candidates, or after half an interval."""
        pause = min(PAUSE_SECONDS, PAUSE_SHARE * self._gap)
        latest, tries = trio.current_time() + self._interval / 2, TRIES
        candidates = self._order(search.due)
        await self._wait_for_swap(search.due.fragment)
        while (
            tries
            and self._needs_partner(search)
            and len(self._swaps) < MOST_SWAPS
            and trio.current_time() <= latest
        ):
            blocks = pack(search.blocks)
            peer = next((p for p in candidates if common(self._discovery.shared(p), blocks)), None)
            if peer is None:
                break
            candidates.remove(peer)
            swap = await self._propose(peer, search.due, blocks)
            if swap is not None:
                await self._exchange(swap)
            else:
                await trio.sleep(pause * self._rng.random())
            if swap is None or swap.ended is None or not swap.ended.committed:
                tries -= 1
            await self._wait_for_swap(search.due.fragment)
        if self._needs_partner(search):
            fragment, blocks = search.due.fragment, pack(search.blocks)
            del self._searches[fragment]
            self._outcomes["solo"] += 1
            self._send_to_trainer(local.SoloStep(fragment, blocks))

    def _needs_partner(self, search: Search) -> bool:
        """Return True while due blocks need a partner: no swap has covered them, by either side's
        proposal, and the trainer is connected."""
        return self._searches.get(search.due.fragment) is search

    async def _wait_for_swap(self, fragment: int) -> None:
        """Wait until no swap of the fragment is under way."""
        while (swap := self._swaps.get(fragment)) is not None:
            await swap.over.wait()

    def _order(self, due: local.OuterStepDue) -> list[str]:
        """Return the candidates that are not in backoff, in the order to ask them.

        Candidates that this node would refuse now (PEER_GAPS) come last.
        """
        if not self._may_propose():
            return []
        now = trio.current_time()
        self._candidates, self._best = self._discovery.ordered(
            due.blocks, due.outer_step, self._rng
        )
        best = self._candidates[: self._best]
        free = (peer for peer in self._candidates if self._known(peer).backoff.until <= now)
        return sorted(free, key=lambda peer: (peer not in best, self._rests(peer, now)))

    async def _propose(self, peer: str, due: local.OuterStepDue, blocks: bytes) -> SwapState | None:
        """Propose a swap of `blocks` to one candidate. Return None unless it accepts."""
        fragment = due.fragment
        swap = SwapState(secrets.token_bytes(ID_BYTES), peer, fragment, blocks)
        self._swaps[fragment] = swap
        outer_step = self._replica.outer_steps[fragment]
        request = Swap(swap.id, self._replica.fingerprint, fragment, outer_step, blocks)
        answer: Message | None = None
        outcome = "unreachable"
        try:
            answer = await ask(self._network, peer, request, PROPOSE_SECONDS)
        except BadMessage:
            self._report_false_data(peer, "weights_malformed")
        except PeerError as error:
            log.info("swap proposal failed: peer=%s error=%s", peer, error)
            self._fail(peer)
        if self._swaps.get(fragment) is not swap:
            # The peer proposed too and its proposal won, or the trainer has left.
            swap.over.set()
            return None
        match answer:
            case Accepted(id=swap.id, blocks=some) if common(some, blocks) == some:
                self._discovery.received(peer, answer)
                swap.blocks = some
                self._begin(swap)
                return swap
            case Busy(id=swap.id):
                outcome = "busy"
            case Refused(id=swap.id):
                outcome = "refused"
                if answer.reason == "stranger":
                    self._fail(peer)
            case None:
                pass
            case _:
                self._report_false_data(peer, "weights_malformed")
        self._outcomes[outcome] += 1
        del self._swaps[fragment]
        swap.over.set()
        return None

    # ---- a peer's outer step ---------------------------------------------------------------------

    async def _serve(self, peer: str, data: bytes) -> bytes:
        """Answer one request.

        Raises:
            PeerError: The stream is to be reset.
        """
        await trio.lowlevel.checkpoint()
        try:
            message = decode_message(data)
            if not isinstance(message, Here | Swap | Payload):
                raise BadMessage("schema", "an answer was sent as a request")
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
                return strict.encode(self._discovery.claim())
            case Swap():
                self._discovery.received(peer, message)
                return strict.encode(self.answer(peer, message))
            case Payload():
                return strict.encode(await self._payload(peer, message))

    def answer(self, peer: str, request: Swap) -> Accepted | Busy | Refused:
        """Accept or decline the swap that a peer proposes."""
        fragment = request.fragment
        shared = self._replica.within(common(request.blocks, self._replica.blocks), fragment)
        if request.fingerprint != self._replica.fingerprint or not shared:
            return Refused(request.id, "other_policy")
        if peer not in self._discovery.partners:
            return Refused(request.id, "stranger")
        now = trio.current_time()
        ready = pack(block for block in unpack(shared) if self._rest_until.get(block, now) <= now)
        if request.id in self._recent:
            return Refused(request.id, "over")
        mine = self._swaps.get(fragment)
        crosses = mine is not None and mine.phase == "proposing" and mine.peer == peer
        # Of two crossing proposals, the one of the lower peer id wins; the other gets `busy`.
        is_free = (crosses and peer < self._network.peer_id) or self._is_free(peer, fragment)
        if not (ready and is_free and self._may_accept()):
            return Busy(request.id)
        swap = SwapState(request.id, peer, fragment, ready)
        self._swaps[fragment] = swap
        self._begin(swap)
        self.start(self._exchange, swap)
        return Accepted(request.id, self._replica.outer_steps[fragment], ready)

    def _is_free(self, peer: str, fragment: int) -> bool:
        """Return True if a swap of the fragment with the peer may be accepted now."""
        now = trio.current_time()
        return (
            fragment not in self._swaps
            and len(self._swaps) < MOST_SWAPS
            and not self._rests(peer, now)
            and now >= self._known(peer).backoff.until
        )

    def _rests(self, peer: str, now: float) -> bool:
        """Return True while the last swap with the peer excludes a new one."""
        best = peer in self._candidates[: self._best]
        equals = self._best if best else max(1, len(self._candidates))
        return now < self._known(peer).swapped_at + PEER_GAPS * self._gap * equals

    async def _payload(self, peer: str, request: Payload) -> Ready | Busy | Refused:
        """Answer a request for this node's payload of a swap.

        A payload older than one interval is not served: averaging with it costs the partner 0.3
        nats.
        """
        swap = self._recent.get(request.id)
        if swap is None or swap.peer != peer:
            return Refused(request.id, "over")
        with trio.move_on_after(POLL_SECONDS):
            await swap.offered.wait()
        if not swap.offered.is_set():
            return Busy(request.id)
        offer, snapshot = swap.copy, swap.snapshot
        if (
            offer is None
            or snapshot is None
            or not self._store.is_offered(offer)
            or trio.current_time() > swap.copied_at + self._age_limit
        ):
            return Refused(request.id, "over")
        return Ready(request.id, offer.transfer, offer.root, offer.size, snapshot.outer_step)

    # ---- an accepted swap ------------------------------------------------------------------------

    def _begin(self, swap: SwapState) -> None:
        """Record that both sides have agreed to the swap."""
        now, swap.phase = trio.current_time(), "copying"
        swap.began = self._partner(swap.peer).swapped_at = now
        self._rest(swap, now)
        self._recent[swap.id] = swap

    def _rest(self, swap: SwapState, now: float) -> None:
        """Accept no swap of the same blocks for a while."""
        until = now + ACCEPT_SHARE * self._interval
        self._rest_until |= dict.fromkeys(unpack(swap.blocks), until)

    async def _exchange(self, swap: SwapState) -> None:
        """Run an accepted swap up to the commit."""
        cause = "no_trainer"
        with swap.scope:  # cancelled when the trainer leaves
            cause = (
                await self._copy(swap)
                or await self._await_payload(swap)
                or await self._fetch(swap)
                or await self._apply_payload(swap)
            )
        self._conclude(swap, cause)

    async def _copy(self, swap: SwapState) -> str:
        """Have the trainer copy and encode its weights, and offer them to the partner.

        Returns:
            An entry of FAILURES, or an empty string. The same holds for the next three methods.
        """
        request = local.TakeSnapshot(swap.id, swap.fragment, swap.blocks)
        if not self._send_to_trainer(request):
            return "no_trainer"
        with trio.move_on_after(self._copy_seconds):
            await swap.copied.wait()
        # `ended` before the copy: the trainer refused to copy, as a suspended stage does.
        if swap.ended is not None:
            return "local"
        if (snapshot := swap.snapshot) is None:
            return "snapshot"
        payload = await self._store.open(snapshot.path)
        if payload is None:
            return "snapshot"
        # the partner may still have to copy, then it fetches
        fetched = max(
            self._transfer_seconds(swap) + LINGER_SECONDS, offer_seconds(payload.source.size)
        )
        until = trio.current_time() + self._copy_seconds + fetched
        offer = self._store.offer(payload, until, [swap.peer])
        swap.copy, swap.copied_at = offer, trio.current_time()
        swap.offered.set()
        return ""

    async def _await_payload(self, swap: SwapState) -> str:
        """Request the partner's payload until it is ready."""
        swap.phase = "waiting"
        with trio.move_on_after(self._copy_seconds):
            while True:
                answer: Message | None = None
                try:
                    answer = await ask(self._network, swap.peer, Payload(swap.id))
                except BadMessage:
                    return "malformed"
                except PeerError as error:  # the connection may be restored soon
                    log.debug("payload request failed: peer=%s error=%s", swap.peer, error)
                match answer:
                    case Ready(id=swap.id):
                        swap.partner_offer = answer
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
        """Fetch the partner's payload into a file and verify each chunk."""
        assert swap.partner_offer is not None
        swap.phase, swap.path, offer = "fetching", self._store.new_path(), swap.partner_offer
        remote = RemotePayload(swap.peer, offer.transfer, offer.root, offer.size, offer.outer_step)
        limit = self._replica.limits[swap.fragment]
        deadline = trio.current_time() + self._transfer_seconds(swap)
        try:
            await self._store.fetch(remote, swap.path, limit, deadline)
        except BadMessage as bad:
            return "hash" if bad.reason == "hash" else "malformed"
        except PeerTimeout:
            return "timeout"
        except PeerError as error:
            log.info("fetch of weights failed: peer=%s error=%s", swap.peer, error)
            return "broken"
        except LocalError as error:
            log.warning("fetched weights not stored: peer=%s error=%s", swap.peer, error)
            return "local"
        return ""

    async def _apply_payload(self, swap: SwapState) -> str:
        """Have the trainer check the partner's weights with its gate, and commit θ̄."""
        assert swap.partner_offer is not None
        swap.phase = "judging"
        apply = local.ApplyPayload(
            swap.id,
            swap.fragment,
            swap.peer,
            swap.partner_offer.outer_step,
            str(swap.path),
        )
        if not self._send_to_trainer(apply):
            return "no_trainer"
        with trio.move_on_after(APPLY_SECONDS + 8 * self._step_seconds):
            await swap.judged.wait()
        if swap.ended is None:
            return "apply_timeout"
        if swap.ended.committed:
            return ""
        return "local" if swap.ended.outcome in OWN_FAULTS else "gate"

    def _conclude(self, swap: SwapState, cause: str) -> None:
        """End a swap: free its slot and file, count the outcome, update the partner's backoff and
        reputation.

        Args:
            swap: The swap.
            cause: An entry of FAILURES; empty for a success.
        """
        now, outcomes = trio.current_time(), self._outcomes
        if self._swaps.get(swap.fragment) is swap:
            del self._swaps[swap.fragment]
        if swap.path is not None:
            self._store.discard(swap.path)
        if swap.copy is None and swap.snapshot is not None and swap.snapshot.path:
            self._store.discard(Path(swap.snapshot.path))  # written, but never offered
        if cause:
            log.info("swap failed: peer=%s cause=%s", swap.peer, cause)
            outcomes["failed"] += 1
            self._failures[cause] += 1
            if swap.ended is None:
                self._send_to_trainer(local.DropSwap(swap.id))
            # If this node's gate refused, the partner may still apply the payload.
            if swap.copy is not None and cause != "gate":
                self._store.withdraw(swap.copy)
            if cause in FALSE_DATA:
                self._report_false_data(swap.peer, f"weights_{cause}")
            elif cause == "gate" and swap.ended is not None and local.OUTCOMES[swap.ended.outcome]:
                self._report_false_data(swap.peer, f"weights_{swap.ended.outcome}")
            elif cause not in OWN_FAILURES:
                self._fail(swap.peer)
        else:
            outcomes["applied"] += 1
            self._exchange_seconds += now - swap.began
            if swap.partner_offer is not None:
                self._received_bytes += swap.partner_offer.size
            if (search := self._searches.get(swap.fragment)) is not None:
                search.blocks -= unpack(swap.blocks)
                if not search.blocks:
                    del self._searches[swap.fragment]
            self._rest(swap, now)
            partner = self._partner(swap.peer)
            partner.applied += 1
            # Do not clear the backoff: the gate has not checked a lagging partner's weights.
            if swap.ended is not None and swap.ended.outcome != "lagging":
                partner.backoff.succeed(swap.began)
                self._network.accepted(swap.peer)
        swap.offered.set()
        swap.over.set()

    def _report_false_data(self, peer: str, reason: str) -> None:
        """Lower the reputation and lengthen the backoff of a peer that provably sent false data."""
        self._network.rejected(peer, reason, PROOF)
        self._fail(peer)

    def _fail(self, peer: str) -> None:
        """Lengthen the backoff of a peer. Its first one is max(PAUSE_SECONDS, gap)."""
        self._partner(peer).backoff.fail(trio.current_time(), max(PAUSE_SECONDS, self._gap))

    def _known(self, peer: str) -> Partner:
        """Return the state of the peer for reading; a new peer is not stored."""
        return self._partners.get(peer) or Partner()

    def _partner(self, peer: str) -> Partner:
        """Return the state of the peer for changing; a new peer is stored."""
        partner = self._partners[peer] = self._known(peer)
        return partner

    # ---- messages of the trainer -----------------------------------------------------------------

    def trainer_left(self) -> None:
        """Cancel all swaps and searches: the trainer has disconnected."""
        for swap in self._swaps.values():
            swap.scope.cancel()
        self._last_due = None
        self._searches.clear()
        self._swaps.clear()

    def snapshot_written(self, snapshot: local.SnapshotWritten) -> None:
        """Take the copy for a swap. Its file is deleted if the swap has ended meanwhile."""
        swap = self._swaps.get(snapshot.fragment)
        if swap is not None and swap.id == snapshot.session:
            swap.snapshot = snapshot
            swap.copied.set()
        elif snapshot.path:
            self._store.discard(Path(snapshot.path))

    def swap_ended(self, ended: local.SwapEnded) -> None:
        """Take the trainer's result of a swap."""
        outcome = ended.outcome if ended.outcome in local.OUTCOMES else "local"
        self._judged[outcome] += 1
        for swap in self._swaps.values():
            if swap.id == ended.session:
                swap.ended = msgspec.structs.replace(ended, outcome=outcome)
                swap.copied.set()
                swap.judged.set()

    # ---- statistics and time limits --------------------------------------------------------------

    def statistics(self) -> WeightsStatistics:
        """Return the counts of outer steps and swaps. `enabled` is the caller's."""
        swap = next(iter(self._swaps.values()), None)
        return WeightsStatistics(
            phase=swap.phase if swap is not None else "idle",
            partner=swap.peer if swap is not None else "",
            outcomes=dict(self._outcomes),
            failures=dict(self._failures),
            judged=dict(self._judged),
            candidates=len(self._discovery.candidates()),
            exchange_seconds=self._exchange_seconds,
            received_bytes=self._received_bytes,
            pairs={peer: known.applied for peer, known in self._partners.items() if known.applied},
        )

    @property
    def _interval(self) -> float:
        """Seconds between two outer steps of one fragment."""
        return self._sync_every * self._step_seconds

    @property
    def _gap(self) -> float:
        """Seconds between two outer steps of any two fragments."""
        return self._interval / max(1, len(self._replica.limits))

    @property
    def _copy_seconds(self) -> float:
        """Time limit of a copy on either side, including encoding, seconds."""
        least, most = COPY_WAIT_SECONDS
        encoding = max(self._replica.limits, default=0) / ENCODED_PER_SECOND
        return min(least + 2 * self._step_seconds, most) + encoding

    @property
    def _age_limit(self) -> float:
        """Age up to which a copy is served, seconds: one interval, or the time limit of a copy if
        that is longer."""
        return max(self._interval, self._copy_seconds)

    def _transfer_seconds(self, swap: SwapState) -> float:
        """Return the time limit of a transfer, seconds. Payloads travel both ways at once, hence
        the factor 2."""
        size, bulk = self._replica.limits[swap.fragment], self._network.bulk
        return 2 * min(bulk.deadline(swap.peer, size), SLOWER * bulk.deadline("", size))


# ---- memory of partners --------------------------------------------------------------------------


class PeerBackoff:
    """Backoff state of one peer, which is neither asked nor accepted before `until`.

    The time doubles with each failure, up to LONGEST_BACKOFF_SECONDS. The success of a swap that
    began after the last failure clears it.
    """

    def __init__(self) -> None:
        self.until = -math.inf
        self._failures = 0
        self._failed_at = -math.inf

    def fail(self, now: float, seconds: float) -> None:
        """Count a failure. The first one costs `seconds`."""
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
    """State that is remembered of one peer. Times are trio's."""

    backoff: PeerBackoff = field(default_factory=PeerBackoff)
    swapped_at: float = -math.inf
    """Time at which the last swap with it began."""
    applied: int = 0
    """Number of applied swaps."""
