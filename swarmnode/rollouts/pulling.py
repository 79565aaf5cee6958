"""Gets groups by asking for them: as many as the trainer draws, from whoever lists them.

    trainer draws ─ want ─▶ listings of a few connected peers ─▶ offers ─ choose ─▶ pulls, a few at
    a time
                            claims ◀─ as listed? ─ admission.check_pulled ◀─────────┘      └─ scored
                            ─▶ as listed?
    what arrives, is asked for, is listed ─▶ mode ─▶ in the topic, or pulling

A node whose trainer does not draw asks nobody. Each request has its deadline, and while it runs
others are asked. Where the pool holds the next step already, a node asks shortly before the next
draw, the choice waits for the listings that are under way, the newest, and is of few holders.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import trio

from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout
from swarmnode.p2p.api import Network
from swarmnode.rollouts.admission import Admission, Rejected
from swarmnode.rollouts.asking import PLENTY, Asking, Moments
from swarmnode.rollouts.claims import (
    PROVEN,
    BeliefStatistics,
    Claims,
    Lie,
    contradiction,
    has_spread,
)
from swarmnode.rollouts.groups import Candidate, is_useful
from swarmnode.rollouts.mode import PULLING, Choice, Mode, Phase
from swarmnode.rollouts.offers import Offers, Pull
from swarmnode.rollouts.pace import Throughput
from swarmnode.rollouts.reasons import Verdict
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.listings import (
    GroupsRequest,
    GroupsResponse,
    Listed,
    ListingRequest,
    ListingResponse,
)

LISTING_SECONDS = 10.0
"""A listing is waited for so long at most."""
STEPS_AHEAD = 2
"""Steps' worth of groups that are kept in the pool: what comes is not always what can be trained
on."""
PULLS_AT_ONCE = 4
MOST_ASKED = 1024
"""Groups that were asked for and not scored yet."""
MEASURE_SECONDS = 1.0
"""Between two looks at the mode: a visit to a topic that is a flood ends after so long at most."""
LISTINGS = ("ok", "busy", "other_swarm", "unsupported", "timeout", "failed", "malformed")
"""How asking for a listing ends."""
PULLED = ("ok", "refused", "unknown", "busy", "timeout", "failed", "malformed", "mismatch")
"""How asking for a group ends; `refused` by admission, which counts why."""

Answer = TypeVar("Answer", bound=msgspec.Struct)


class PullStatistics(msgspec.Struct, frozen=True):
    mode: str = Phase.GOSSIP.value
    """`gossip`, `trial` (in the topic, and asking for listings as well), `pull`, or `visit` (that,
    and in the topic for those that do not list)."""
    modes: dict[str, bool] = {}
    """The same for every mode: whether it is this one."""
    switches: int = 0
    """Times that the topic was left or taken up again."""
    arrived_per_wanted: float | None = None
    """Groups that came by gossip lately for each that the trainer asked for; None while it asked
    for none."""
    listed_per_wanted: float | None = None
    """Groups that were listed lately for each that the trainer asked for; None while it asked for
    none."""
    listings: dict[str, int] = {}
    """Listings asked for, by outcome of LISTINGS."""
    pulled: dict[str, int] = {}
    """Groups asked for, by outcome of PULLED."""
    offered: int = 0
    """Groups that could be asked for now, each as often as it is listed."""
    listers: int = 0
    """Connected peers that list."""
    polled: int = 0
    """Connected peers whose listings this node polls."""
    claims: BeliefStatistics = BeliefStatistics()


@dataclass(frozen=True)
class Around:
    """What pulling needs of the exchange."""

    allows: Callable[[str], bool]
    """allows("fetch"): whether there is budget for it."""
    trust: Callable[[str], float]
    """How gladly the groups of an author are taken, 0 to 1."""
    enqueue: Callable[[Candidate], None]
    """Takes what passed admission."""
    in_topic: Callable[[], Collection[str]]
    """Connected peers that take part in the topic."""


class Pulling:
    """clock: Unix seconds. choice: the setting `sharing.exchange`."""

    def __init__(
        self,
        network: Network,
        admission: Admission,
        around: Around,
        choice: Choice,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._network = network
        self._admission = admission
        self._around = around
        self._clock = clock
        self._rng = rng
        self._mode = Mode(choice, clock())
        self._offers = Offers(envelope.peer_key(network.peer_id) or b"", envelope.peer_id)
        self._claims = Claims()
        self._asking = Asking()
        self._moments = Moments()
        self._asked: OrderedDict[bytes, tuple[str, Listed]] = OrderedDict()
        self._under_way = _UnderWay()
        self._news = trio.Event()
        self._counts: Counter[tuple[str, str]] = Counter()

    @property
    def in_topic(self) -> bool:
        """Whether this node listens to gossip."""
        return self._mode.phase is not Phase.PULL

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._measure_now_and_then)
            while True:
                self._start_what_is_due(nursery)
                self._news = trio.Event()
                again = (
                    self._moments.lead
                    if self._under_way.wanted > 0 and self._asking.left
                    else math.inf
                )
                with trio.move_on_at(min(self._moments.next, trio.current_time() + again)):
                    await self._news.wait()

    def arrived(self) -> None:
        """A group came by gossip."""
        self._mode.note("arrived")

    def want(self, count: int, waiting: int) -> None:
        """The trainer draws `count` groups, and `waiting` are in the pool after that."""
        self._under_way.want(count, waiting)
        self._moments.drew(trio.current_time(), urgent=self._under_way.urgent)
        pulls = self._mode.phase is Phase.PULL
        self._under_way.drained = pulls and (self._under_way.drained or self._under_way.wanted > 0)
        if self._under_way.drained or not pulls:
            self._mode.note("wanted", count)
        self._news.set()

    def scored(self, content: bytes, rewards: list[float]) -> None:
        """A group has these rewards (G,): were they as its listing said? Nothing is said of one
        that was not pulled."""
        holder, listed = self._asked.pop(content, (None, None))
        if holder is None or listed is None:
            return
        if has_spread(listed, rewards):
            self._claims.keep(holder)
        else:
            self._lie(holder, "spread")
        self._mode.note("gained", is_useful(rewards))

    def statistics(self) -> PullStatistics:
        mode = self._mode.state
        named = lambda kind: {
            outcome: n for (which, outcome), n in self._counts.items() if which == kind
        }
        return PullStatistics(
            mode=mode.phase.value,
            modes={phase.value: phase is mode.phase for phase in Phase},
            switches=mode.switches,
            arrived_per_wanted=mode.arrived / mode.wanted if mode.wanted > 0 else None,
            listed_per_wanted=mode.listed / mode.wanted if mode.wanted > 0 else None,
            listings=named("listing"),
            pulled=named("group"),
            offered=len(self._offers),
            listers=self._asking.listers(self._network.connected()),
            claims=self._claims.statistics(),
        )

    # -- what is due

    def _start_what_is_due(self, nursery: trio.Nursery) -> None:
        phase = self._mode.phase
        if self._moments.come(trio.current_time()):
            self._asking.allow(
                plenty=len(self._offers) >= PLENTY * self._under_way.step,
                urgent=self._under_way.urgent,
            )
        if (
            phase is Phase.GOSSIP
            or (phase in PULLING and self._under_way.wanted <= 0)
            or not self._around.allows("fetch")
        ):
            return
        connected = [peer for peer in self._network.connected() if self._network.welcome(peer)]
        self._offers.keep(connected)
        for peer in self._asking.next(connected, self._clock(), self._rng):
            nursery.start_soon(self._list, peer)
        for pull in self._choose() if phase in PULLING else ():
            self._under_way.begin(pull)
            for listed in pull.groups:
                self._asked[listed.content] = (pull.holder, listed)
            while len(self._asked) > MOST_ASKED:
                self._asked.popitem(last=False)
            nursery.start_soon(self._pull, pull)

    def _choose(self) -> list[Pull]:
        busy, urgent = self._under_way.holders, self._under_way.urgent
        waits = self._asking.waits or self._moments.next < math.inf
        if len(busy) >= PULLS_AT_ONCE or (waits and not urgent):
            return []
        return self._offers.choose(
            self._under_way.missing,
            self._clock(),
            self._rng,
            self._around.trust,
            self._claims.belief,
            self._is_known,
            busy,
            few=not urgent,
        )

    def _is_known(self, content: bytes) -> bool:
        return content in self._asked or self._admission.has_seen(content)

    # -- listings

    async def _list(self, peer: str) -> None:
        life, position = self._offers.cursor(peer)
        request = ListingRequest(self._admission.swarm, life, position)
        lists: bool | None = None
        try:
            response = await self._ask(
                peer, request, ListingResponse, LISTING_SECONDS, limits.LISTING_RESPONSE_BYTES
            )
        except _Unanswered as why:
            outcome = why.outcome
            lists = False if outcome == "unsupported" else None
        else:
            outcome = {"ok": "ok", "busy": "busy", "unknown": "other_swarm"}[response.status]
            lists = outcome != "other_swarm"
            if outcome == "ok":
                new = self._offers.take(peer, response, self._clock())
                if new is None:
                    self._lie(peer, "cursor")
                else:
                    self._mode.note("listed", new * self._claims.credit(peer))
        self._counts["listing", outcome] += 1
        self._asking.done(peer, self._clock(), lists=lists)
        self._news.set()

    # -- groups

    async def _pull(self, pull: Pull) -> None:
        size = sum(listed.size for listed in pull.groups)
        deadline = self._under_way.pace.deadline(size)
        started, came = trio.current_time(), 0
        try:
            response = await self._ask(
                pull.holder,
                GroupsRequest([listed.content for listed in pull.groups]),
                GroupsResponse,
                deadline,
                min(limits.GROUPS_RESPONSE_BYTES, size + 512),
            )
            if len(response.groups) != len(pull.groups):
                self._network.rejected(pull.holder, "bounds")
                raise _Unanswered("malformed")
        except _Unanswered as why:
            self._failed(pull, why.outcome)
        else:
            for listed, group in zip(pull.groups, response.groups, strict=True):
                outcome = (
                    self._arrived(pull.holder, listed, group.body)
                    if group.status == "ok"
                    else group.status
                )
                if outcome == "unknown":
                    self._lie(pull.holder, "absent")
                if outcome != "ok":
                    self._asked.pop(listed.content, None)
                self._counts["group", outcome] += 1
                came += outcome == "ok"
            took = trio.current_time() - started
            self._under_way.pace.observe(
                pull.holder, sum(len(group.body) for group in response.groups), took
            )
            if took > deadline / 2:
                self._lie(pull.holder, "slow")
        self._under_way.end(pull, came)
        self._news.set()

    def _failed(self, pull: Pull, outcome: str) -> None:
        """Nothing came: others may be asked for the same, and this holder for nothing that it has
        listed."""
        self._lie(pull.holder, "slow")
        self._asking.done(pull.holder, self._clock(), lists=None)
        for listed in pull.groups:
            self._asked.pop(listed.content, None)
        self._offers.drop(pull.holder)
        self._counts["group", outcome] += len(pull.groups)

    def _arrived(self, holder: str, listed: Listed, body: bytes) -> str:
        """One group: through admission, like those that come by gossip, and against its listing.
        Returns how asking for it ended."""
        if envelope.content_id(body) != listed.content:
            self._lie(holder, "content")
            return "mismatch"
        result = self._admission.check_pulled(body, self._clock())
        if isinstance(result, Rejected):
            # whoever lists it has found the same, so it is as much to blame as its author
            if result.verdict is Verdict.REJECT:
                self._lie(holder, "content")
                if result.peer is not None and result.peer != holder:
                    self._network.rejected(result.peer, result.reason)
            return "refused"
        lie = contradiction(listed, envelope.peer_key(result.peer) or b"", result.group, len(body))
        if lie is not None:
            self._lie(holder, lie)  # and take it: what is signed is true
            self._asked.pop(listed.content, None)
        self._around.enqueue(result)
        return "ok"

    def _lie(self, holder: str, lie: Lie) -> None:
        self._claims.lie(holder, lie)
        if lie in PROVEN:
            self._network.rejected(holder, "mismatch")

    # -- both

    async def _ask(
        self, peer: str, request: msgspec.Struct, kind: type[Answer], deadline: float, limit: int
    ) -> Answer:
        """Raises _Unanswered, whatever the peer does."""
        protocol = (
            ids.LISTING_PROTOCOL if isinstance(request, ListingRequest) else ids.GROUPS_PROTOCOL
        )
        try:
            data = await self._network.requests.request(
                peer, protocol, codec.encode(request), deadline=deadline, max_response_bytes=limit
            )
            answer: Answer = codec.decode(data, kind, limit)
            return answer
        except Incompatible:
            raise _Unanswered("unsupported") from None
        except PeerTimeout:
            raise _Unanswered("timeout") from None
        except BadMessage as bad:
            self._network.rejected(peer, bad.reason)
            raise _Unanswered("malformed") from None
        except PeerError:
            raise _Unanswered("failed") from None

    # -- gossip or pull

    async def _measure_now_and_then(self) -> None:
        while True:
            await trio.sleep(MEASURE_SECONDS)
            listers, mutes = (
                self._asking.listers(self._network.connected()),
                self._asking.mutes(self._around.in_topic()),
            )
            self._mode.look(self._clock(), listers, mutes)


class _UnderWay:
    """Groups that are wanted, and asked for now."""

    def __init__(self) -> None:
        self.step = 0
        """Groups that the trainer drew last."""
        self.wanted = 0
        self.drained = False
        """Whether what the topic left in the pool has been used up: until then nothing is asked of
        listings, nor held against them."""
        self.pace = Throughput()
        self._groups_of: dict[str, int] = {}

    @property
    def urgent(self) -> bool:
        """Whether the pool holds less than the next step's."""
        return self.wanted > (STEPS_AHEAD - 1) * self.step

    @property
    def holders(self) -> Collection[str]:
        """Peers that are being asked, each once at a time."""
        return self._groups_of.keys()

    @property
    def missing(self) -> int:
        """Groups that are wanted and not asked for."""
        return max(0, self.wanted - sum(self._groups_of.values()))

    def want(self, count: int, waiting: int) -> None:
        self.step = count
        self.wanted = max(0, STEPS_AHEAD * count - waiting)

    def begin(self, pull: Pull) -> None:
        self._groups_of[pull.holder] = len(pull.groups)

    def end(self, pull: Pull, came: int) -> None:
        del self._groups_of[pull.holder]
        self.wanted = max(0, self.wanted - came)


class _Unanswered(Exception):
    """Raised when a peer did not answer as it must. `outcome`: of LISTINGS and PULLED."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome
