"""The rollout service at work: trio tasks, a network, a scorer. It only carries; the decisions are admission's and the pool's.

    trainer ─ publish ─▶ check, sign ─▶ gossip                        up to 64 KB
                                     └▶ shelf, and its hash on gossip  longer; whoever wants it fetches it
    gossip ─▶ admission.check_frame (in the validator) ─▶ queue ─▶ scorer ─▶ admission.check_scored ─▶ pool ─ draw ─▶ trainer
                          ├ announced ─▶ fetching ─▶ admission.check_fetched ─▶ queue
    pulling ─ listings, groups asked for ─▶ admission.check_pulled ─▶ queue
    serving ◀─ what is published and what is admitted: listed, and given to whoever asks

Nothing a peer does ends a task here: a failed fetch or scorer costs that group and is counted. What fails otherwise is a defect of ours and
ends `run`, visibly; nothing is restarted in silence.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import trio

from swarmnode.config import SharingConfig
from swarmnode.errors import BadMessage
from swarmnode.p2p.api import Network
from swarmnode.p2p.gossip import Validation
from swarmnode.p2p.reputation import GREYLIST
from swarmnode.rollouts.admission import Admission, AdmissionStatistics, Rejected
from swarmnode.rollouts.catalogue import Catalogue
from swarmnode.rollouts.fetching import Fetching, FetchStatistics
from swarmnode.rollouts.groups import Announced, Candidate, Draw, Drawn, Judged, OwnGroup, PolicyFacts, is_useful, without_token_ids
from swarmnode.rollouts.pool import Pool, PoolStatistics
from swarmnode.rollouts.pulling import Around, Pulling, PullStatistics
from swarmnode.rollouts.reasons import REASONS
from swarmnode.rollouts.serving import Serving, ServingStatistics
from swarmnode.rollouts.shelf import CandidateQueue, Strikes
from swarmnode.rollouts.signers import Signer
from swarmnode.rollouts.trust import Arrivals, PeerTrust, count
from swarmnode.tasks.frames import Scored, ScoreError, ScorerFailed, TaskUnknown
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.envelope import Credentials
from swarmnode.wire.messages import Announce, RolloutGroup, TaskRef

log = logging.getLogger(__name__)

SCORER_GROUPS = 32
"""Groups handed to the scorer at once, by each of SCORER_TASKS tasks: one frame is judged while the next is decoded."""
SCORER_TASKS = 2
EXPIRE_SECONDS = 30.0
BUDGET_SECONDS = 1.0
"""Between two looks whether the budget still lets us listen."""


class Scoring(Protocol):
    """What is needed of `tasks.client.AsyncScorer`."""

    async def score_many(self, items: Sequence[tuple[TaskRef, Sequence[str]]]) -> list[Scored | ScoreError]: ...


class Budget(Protocol):
    """What is needed of `p2p.metering.Meter`."""

    def allows(self, choice: str) -> bool: ...
    def listening(self) -> bool: ...


class Unlimited:
    """No budget to mind."""

    def allows(self, choice: str) -> bool:
        return True

    def listening(self) -> bool:
        return True


PUBLISHED = ("gossip", "announced")
"""Outcomes of `RolloutExchange.publish` where the group went out."""


class ExchangeStatistics(msgspec.Struct, frozen=True):
    """Groups on their way from and to peers."""

    published: int = 0
    """Own groups that went out, whole or announced by their hash."""
    unpublished: dict[str, int] = {}
    """Own groups that stayed here: `zero_advantage`, `rate`, `oversize`, `invalid`, `no_policy`, `failed`, `budget`, `disabled`."""
    received: int = 0
    """Groups that arrived: admitted, ignored, rejected, and those still being fetched or scored."""
    admission: AdmissionStatistics = AdmissionStatistics()
    fetching: FetchStatistics = FetchStatistics()
    pulling: PullStatistics = PullStatistics()
    serving: ServingStatistics = ServingStatistics()
    waiting: int = 0
    """Candidates before the scorer."""
    pool: PoolStatistics = PoolStatistics()
    judged: dict[str, int] = {}
    """Drawn groups by what the trainer made of them."""
    peers_used: int = 0
    """Peers of which a group was trained on."""


@dataclass(frozen=True)
class GroupRules:
    """What this node samples and takes."""

    tasks: Collection[str]
    """Names of the tasks that it trains on."""
    max_completion_length: int = limits.TOKENS
    """Its own, tokens."""
    keeps_rules: Callable[[RolloutGroup], bool] = lambda group: True
    """Whether a group is one that the swarm's manifest allows."""
    spoken: ids.Spoken = field(default_factory=ids.Spoken)
    """Ordinals of the swarm."""


class _ByListing(NamedTuple):
    """Both ends of listings and pulls."""

    serving: Serving
    pulling: Pulling


class _Counts:
    def __init__(self) -> None:
        self.published: Counter[str] = Counter()
        """Own groups, by outcome of `publish`."""
        self.judged: Counter[str] = Counter()
        """Drawn groups, by what the trainer made of them."""


class RolloutExchange:
    """Shares this node's groups and gathers others'. clock: Unix seconds.

    Start it with `await nursery.start(exchange.run)`; the other methods are for the process link.
    """

    def __init__(
        self,
        network: Network,
        scorer: Scoring,
        credentials: Credentials,
        rules: GroupRules,
        cfg: SharingConfig,
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.cfg = cfg
        self._topic = ids.rollout_topic(credentials.swarm, rules.spoken.rollouts)
        self._budget: Budget = budget or Unlimited()
        self._network = network
        self._scorer = scorer
        self._credentials = credentials
        self._clock = clock
        self._rng = rng or random.Random()
        self.admission = Admission(
            credentials.swarm,
            network.peer_id,
            rules.tasks,
            cfg,
            max_completion_length=rules.max_completion_length,
            is_greylisted=lambda peer: not network.welcome(peer),
            keeps_rules=rules.keeps_rules,
        )
        self.pool = Pool()
        self._policy: PolicyFacts | None = None
        self._version = 0
        self._pace = Signer(network.peer_id, cfg.groups_per_second, clock())
        self._queue = CandidateQueue()
        self._strikes = Strikes()
        self._news = trio.Event()
        self._fetching = Fetching(network, self._fetched, self._refuse, self._budget.allows, rules.spoken.fetch)
        life = self._rng.randbytes(limits.LIFE_BYTES)
        around = Around(self._budget.allows, self.trust, self._enqueue)
        self._by_listing = _ByListing(
            Serving(Catalogue(credentials.swarm, life), self._budget.allows, lambda peer: self.admitted_of(peer) > 0, clock),
            Pulling(network, self.admission, around, cfg.exchange, clock, self._rng),
        )
        self._trust = PeerTrust()
        self._admitted_of: OrderedDict[str, int] = OrderedDict()
        self._arrivals = Arrivals()
        self._counts = _Counts()

    # -- for the node

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
        """Until cancelled. Started once the topic is joined and long groups are served. With sharing off it only waits."""
        if not self.cfg.enabled:
            task_status.started()
            await trio.sleep_forever()
        topic = await self._network.gossip.join(self._topic, self.validate)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_drain, topic)
            nursery.start_soon(self._expire)
            nursery.start_soon(self._mind_budget)
            await nursery.start(self._fetching.run)
            self._by_listing.serving.start(self._network.requests)
            nursery.start_soon(self._by_listing.pulling.run)
            for _ in range(SCORER_TASKS):
                nursery.start_soon(self._score)
            task_status.started()

    def statistics(self) -> ExchangeStatistics:
        admission, fetching = self.admission.statistics(), self._fetching.statistics()
        decided = admission.admitted + sum(admission.ignored.values()) + sum(admission.rejected.values())
        return ExchangeStatistics(
            published=sum(self._counts.published[outcome] for outcome in PUBLISHED),
            unpublished={outcome: n for outcome, n in self._counts.published.items() if outcome not in PUBLISHED},
            received=decided + len(self._queue) + fetching.pending,
            admission=admission,
            fetching=fetching,
            pulling=self._by_listing.pulling.statistics(),
            serving=self._by_listing.serving.statistics(),
            waiting=len(self._queue),
            pool=self.pool.statistics(self._clock()),
            judged=dict(self._counts.judged),
            peers_used=len(self._trust),
        )

    def admitted_of(self, peer: str) -> int:
        """Groups of `peer` that were admitted; 0 once it is not among the MAX_PEERS latest any more."""
        return self._admitted_of.get(peer, 0)

    def authors(self) -> list[str]:
        """Peers of whom a group was admitted, the latest last."""
        return list(self._admitted_of)

    # -- for the trainer

    def set_policy(self, policy: PolicyFacts) -> None:
        """The trainer (re)started with this model: its Hello."""
        self._policy = policy
        self._version = policy.policy_version
        self.admission.set_policy(policy.model, policy.tokenizer, policy.tokens_per_text_byte)

    async def publish(self, own: OwnGroup) -> str:
        """Sign a group and send it out; returns its outcome, which is also counted. Never raises for a group that cannot be sent.

        A group whose rewards are all equal stays here unless the filter is off: receivers would drop it.
        """
        outcome = await self._publish(own) if self.cfg.enabled else "disabled"
        self._counts.published[outcome] += 1
        return outcome

    def draw(self, request: Draw) -> Drawn:
        """Up to `count` groups for the step at `policy_version`; each group of the pool is drawn at most once."""
        self._version = request.policy_version
        groups = self.pool.draw(request.count, request.policy_version, self._clock(), self._rng, self.trust, self.belief, request.per_peer)
        tokenizer = self._policy.tokenizer if self._policy else b""
        groups = [g if g.group.tokenizer == tokenizer else msgspec.structs.replace(g, group=without_token_ids(g.group)) for g in groups]
        self._by_listing.pulling.want(request.count, len(self.pool))
        return Drawn(request.request, groups, self._arrivals.take(request.per_peer, self.belief))

    def judged(self, judged: Judged) -> None:
        """What the trainer made of a drawn group: builds its author's trust, or costs it."""
        self._counts.judged[judged.outcome] += 1
        self._trust.judged(judged.peer, judged.outcome)
        if judged.outcome == "used":
            self._network.accepted(judged.peer)
        elif REASONS[judged.outcome] is Validation.REJECT:
            self._network.rejected(judged.peer, judged.outcome)

    def trust(self, peer: str) -> float:
        """How much of a step the groups of `peer` may be, 0 to 1; 0 where the network stops listening."""
        if not self._network.welcome(peer):
            return 0.0
        score = self._network.score(peer)
        return self._trust.of(peer, 1.0 + min(0.0, score) / -GREYLIST)

    def belief(self, peer: str) -> float:
        """In what share of draws the groups of `peer` take part; see `PeerTrust`."""
        return self._trust.belief(peer)

    # -- out

    async def _publish(self, own: OwnGroup) -> str:
        if self._policy is None:
            return "no_policy"
        if own.rewards and not is_useful(own.rewards):
            return "zero_advantage"
        if not self._budget.allows("publish"):
            return "budget"
        now = self._clock()
        if not self._pace.has_token(self.cfg.groups_per_second, now):
            return "rate"  # peers take no more from us than we from them
        group = RolloutGroup(
            task=own.task,
            model=self._policy.model,
            tokenizer=self._policy.tokenizer,
            policy_version=own.policy_version,
            created_at=int(now * 1000),
            sequence=own.sequence,
            sampling=own.sampling,
            completions=own.completions,
        )
        try:
            codec.check_group(group)
        except BadMessage as bad:
            log.warning("own group %d is not valid and was not published: %s", own.sequence, bad)
            return "invalid"
        if not self.admission.keeps_rules(group):  # sampled before the manifest changed
            return "invalid"
        if len(codec.encode(group)) > limits.GROUP_BYTES:
            group = without_token_ids(group)
            if len(codec.encode(group)) > limits.GROUP_BYTES:
                return "oversize"
        frame = envelope.seal(group, self._credentials.key, ids.DOMAIN_ROLLOUT, self._credentials.swarm)
        outcome = "gossip"
        if own.rewards:
            self._by_listing.serving.put(group, self._network.peer_id, frame, own.rewards)
        if len(frame) > limits.GOSSIP_BYTES:
            content = envelope.content_id(frame)
            self._fetching.shelf.put(content, frame)
            announce = Announce(content, len(frame), group.created_at, group.sequence)
            frame, outcome = envelope.seal(announce, self._credentials.key, ids.DOMAIN_ROLLOUT, self._credentials.swarm), "announced"
        self._pace.take_token()
        try:
            await self._network.gossip.publish(self._topic, frame)
        except Exception:  # whatever the library raises, it is one group of ours that was not sent
            log.exception("publishing group %d failed", own.sequence)
            return "failed"
        return outcome

    # -- in

    def validate(self, frame: bytes, forwarder: str) -> Validation:
        """Gossip's validator: admission without the scorer. Cannot raise."""
        self._by_listing.pulling.arrived()
        result = self.admission.check_frame(frame, self._clock())
        if isinstance(result, Rejected):
            if result.verdict is Validation.REJECT and result.peer is not None and result.peer != forwarder:
                self._network.rejected(result.peer, result.reason)  # gossip holds it against the forwarder
            return result.verdict
        if isinstance(result, Announced):
            if (reason := self._fetching.want(result, forwarder)) is not None:
                self.admission.refuse(reason, result.peer)
        else:
            self._enqueue(result)
        if not self._budget.allows("forward"):
            return Validation.IGNORE  # taken, and not passed on
        return Validation.ACCEPT  # even when we are too busy for it: others need not be

    def _enqueue(self, candidate: Candidate) -> None:
        if self._strikes.is_out(candidate.peer, self._clock()):
            self.admission.refuse("scorer", candidate.peer)
        elif self._queue.put(candidate):
            self._news.set()
        else:
            self.admission.refuse("busy", candidate.peer)

    async def _score(self) -> None:
        """The queue, through the scorer, into the pool."""
        while True:
            while not (batch := self._queue.take(SCORER_GROUPS)):
                self._news = trio.Event() if self._news.is_set() else self._news
                await self._news.wait()
            questions = [(c.group.task, [completion.text for completion in c.group.completions]) for c in batch]
            try:
                results = await self._scorer.score_many(questions)
            except ScorerFailed as failed:  # there is no scorer to be had at all
                results = [failed] * len(batch)
            works = any(isinstance(scored, Scored) for scored in results)
            for candidate, scored in zip(batch, results, strict=True):
                if isinstance(scored, Scored):
                    self._by_listing.pulling.scored(candidate.content, scored.rewards)
                    self._admit(candidate, scored)
                    continue
                if isinstance(scored, ScorerFailed) and works:
                    self._strikes.add(candidate.peer, self._clock())
                self._refuse("unregenerable" if isinstance(scored, TaskUnknown) else "scorer", candidate.peer)

    def _admit(self, candidate: Candidate, scored: Scored) -> None:
        group = self.admission.check_scored(candidate, scored.prompt, scored.rewards)
        if isinstance(group, Rejected):
            return
        if self.pool.add(group, self._clock(), self._version):
            self.admission.note_admitted()
            count(self._admitted_of, candidate.peer)
            self._by_listing.serving.put(candidate.group, candidate.peer, candidate.envelope, group.rewards)
            if is_useful(group.rewards):
                self._arrivals.add(candidate.peer)
        else:
            self.admission.refuse("pool_full", candidate.peer)

    def _refuse(self, reason: str, peer: str) -> None:
        """Refuse a group after it was passed on: only `peer` can be answerable."""
        if self.admission.refuse(reason, peer).verdict is Validation.REJECT:
            self._network.rejected(peer, reason)

    def _fetched(self, announced: Announced, body: bytes) -> None:
        result = self.admission.check_fetched(announced, body, self._clock())
        if isinstance(result, Candidate):
            self._fetching.shelf.put(announced.content, body)  # for peers that are not connected to its author
            self._enqueue(result)
        elif result.verdict is Validation.REJECT:
            self._network.rejected(announced.peer, result.reason)

    async def _mind_budget(self) -> None:
        """In the topic while there is budget for what others send and this node does not pull instead, out of it otherwise."""
        topic, listening = self._topic, True
        while True:
            affordable = self._budget.listening()
            if (affordable and self._by_listing.pulling.in_topic) != listening:
                listening = not listening
                why = "asking for groups instead" if affordable else "the budget is used up for now"
                log.info("taking part in the swarm's topic again" if listening else f"leaving the swarm's topic: {why}")
                await (self._network.gossip.rejoin(topic) if listening else self._network.gossip.leave(topic))
            await trio.sleep(BUDGET_SECONDS)

    async def _expire(self) -> None:
        while True:
            await trio.sleep(EXPIRE_SECONDS)
            self.pool.expire(self._clock(), self._version)


async def _drain(topic: AsyncIterable[object]) -> None:
    """Everything was taken in the validator; what gossip then delivers is only emptied out."""
    async for _ in topic:
        pass
