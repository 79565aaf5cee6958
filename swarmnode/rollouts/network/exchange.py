"""The rollout service of a node: it publishes the node's own groups and fetches groups of peers
(SAPO, arXiv 2509.08721). Read `admission`, `pool` and `puller` (what is fetched when) next.

    trainer ─ publish: check, sign ─▶ shelf ─▶ peers that fetch it
    peers' shelves ─ PullGossip ─▶ admission ─▶ scorer ─▶ pool, shelf
    trainer ─ draw ─▶ pool ─▶ trainer ─ judged ─▶ authors (trust)

A failed fetch or a failed scorer loses one group and is counted. Any other exception is a defect of
this node and ends `run`.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec
import trio

from swarmnode.config import SharingConfig
from swarmnode.drops import DropTally
from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout
from swarmnode.p2p.api import Network
from swarmnode.rollouts import sampling
from swarmnode.rollouts.groups import (
    Candidate,
    Draw,
    Drawn,
    GroupRules,
    OwnGroup,
    PolicyFacts,
    has_turns,
    is_useful,
    without_token_ids,
)
from swarmnode.rollouts.network.admission import (
    Admission,
    AdmissionStatistics,
    Refusal,
    Scorer,
    ScoringQueue,
    Signer,
    clock_reason,
)
from swarmnode.rollouts.network.authors import Authors
from swarmnode.rollouts.network.pool import Pool, PoolStatistics
from swarmnode.rollouts.network.puller import (
    EVIDENT,
    Fault,
    ListingStatistics,
    Pull,
    Puller,
    contradiction,
)
from swarmnode.rollouts.network.shelf import ServingStatistics, Shelf, ShelfServer
from swarmnode.rollouts.reasons import Verdict
from swarmnode.tasks.frames import Scored
from swarmnode.tasks.registry import TASKS
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.envelope import Credentials
from swarmnode.wire.listings import (
    GroupsRequest,
    GroupsResponse,
    ListedGroup,
    ListingRequest,
    ListingResponse,
)
from swarmnode.wire.messages import RolloutGroup

EXPIRE_SECONDS = 30.0
ANSWER_SECONDS = 5.0
"""A requester waits for the answer to a poll for its patience plus this time."""
LEAST_SECONDS = 5.0
"""Constant part of a fetch's deadline. A trainer may leave the network process little CPU: with 2 s
and a tenth of a core, fetches timed out and were repeated, and half of the groups were missing."""
LEAST_BYTES_PER_SECOND = 64 * 2**10
"""Least throughput that a fetch's deadline allows for."""
BUDGET_SECONDS = 1.0
"""Time between two checks whether a paused node may fetch again."""
LISTINGS = ("ok", "busy", "other_swarm", "unsupported", "timeout", "failed", "malformed")
"""Outcomes of polls."""
PULLED = ("ok", "refused", "unknown", "busy", "timeout", "failed", "malformed", "mismatch")
"""Outcomes of fetched groups; `refused` by admission, which counts the reason."""
PUBLISHED = "published"
"""Outcome of an own group that was put on the shelf."""
UNPUBLISHED = ("zero_advantage", "budget", "rate", "oversize", "invalid", "no_policy")
"""Outcomes of an own group that was not put on the shelf."""
EXPECTED = ("zero_advantage", "budget", "disabled")
"""Outcomes of normal operation, logged at level info."""


class PullStatistics(msgspec.Struct, frozen=True):
    """Counts of this node's polls and fetches."""

    polled: int = 0
    """Peers whose listings are being polled now."""
    listings: dict[str, int] = {}
    """Polls by outcome, of LISTINGS."""
    pulled: dict[str, int] = {}
    """Fetched groups by outcome, of PULLED."""
    offered: int = 0
    """Listed groups that this node has not fetched; a group counts once per peer that lists it."""
    claims: ListingStatistics = ListingStatistics()


class ExchangeStatistics(msgspec.Struct, frozen=True):
    """Counts of groups sent to and received from peers."""

    published: int = 0
    """Own groups that were put on the shelf."""
    unpublished: dict[str, int] = {}
    """Own groups that were not put on the shelf, by reason: `zero_advantage`, `rate`, `oversize`,
    `invalid`, `no_policy`, `budget`, `disabled`."""
    unpublished_since: dict[str, int] = {}
    """The same, counted since the last published group."""
    received: int = 0
    """Groups that arrived: admitted, ignored, rejected, or waiting for the scorer."""
    admission: AdmissionStatistics = AdmissionStatistics()
    pulling: PullStatistics = PullStatistics()
    serving: ServingStatistics = ServingStatistics()
    waiting: int = 0
    """Groups that wait for the scorer."""
    pool: PoolStatistics = PoolStatistics()
    judged: dict[str, int] = {}
    """Drawn groups by the trainer's judgement."""
    peers_used: int = 0
    """Peers with at least one group that was trained on and none refused since."""


class RolloutExchange:
    """The rollout service of one node.

    Start it with `await nursery.start(exchange.run)`. The process link calls the other methods.

    Args:
        network: The node's network.
        scorer: Computes rewards in a sandbox.
        credentials: The node's key and its swarm.
        rules: The groups that this node samples and accepts.
        cfg: The settings `sharing.*`.
        clock: Returns Unix seconds.
        rng: Source of randomness.
        allows: allows("fetch") and allows("publish") return True while budget and pauses permit
            fetching groups, or publishing and serving them.
    """

    def __init__(
        self,
        network: Network,
        scorer: Scorer,
        credentials: Credentials,
        rules: GroupRules,
        cfg: SharingConfig,
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        allows: Callable[[str], bool] = lambda choice: True,
    ) -> None:
        self.cfg = cfg
        self._network = network
        self._clock = clock
        self._rng = rng or random.Random()
        self.admission = Admission(
            credentials.swarm,
            network.peer_id,
            rules.tasks,
            cfg,
            max_completion_length=rules.max_completion_length,
            is_greylisted=lambda peer: not network.is_allowed(peer),
            meets_rules=rules.meets_rules,
        )
        self.pool = Pool()
        self.authors = Authors(network)
        self._scoring = ScoringQueue(scorer, self._scored, self._refuse, clock)
        shelf = Shelf(
            credentials.key.public_key().public_bytes_raw(),
            credentials.swarm,
            self._rng.randbytes(limits.LIFE_BYTES),
        )
        self._gossip = PullGossip(
            network,
            self.admission,
            self.authors,
            shelf,
            self._enqueue,
            allows=allows,
            clock=clock,
            rng=self._rng,
        )
        self._credentials = credentials
        self._meets_rules = rules.meets_rules
        self._allows = allows
        self._pace = Signer(network.peer_id, cfg.groups_per_second, clock())
        """Rate of own groups. Peers ignore groups above it."""
        self._own = DropTally("own group not published", quiet=EXPECTED, reasons=UNPUBLISHED)
        self._policy: PolicyFacts | None = None
        self._version = 0

    # -- for the node

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
        """Run until cancelled. Reports started once peers are served. Only sleeps if sharing is
        off."""
        if not self.cfg.enabled:
            task_status.started()
            await trio.sleep_forever()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._gossip.run)
            nursery.start_soon(self._expire)
            self._scoring.start(nursery)
            task_status.started()

    def statistics(self) -> ExchangeStatistics:
        """Return all counters of the rollout service."""
        admission, own = self.admission.statistics(), self._own.statistics()
        decided = (
            admission.admitted + sum(admission.ignored.values()) + sum(admission.rejected.values())
        )
        return ExchangeStatistics(
            published=own.kept,
            unpublished=own.dropped,
            unpublished_since=own.since_kept,
            received=decided + len(self._scoring),
            admission=admission,
            pulling=self._gossip.statistics(),
            serving=self._gossip.serving(),
            waiting=len(self._scoring),
            pool=self.pool.statistics(),
            judged=self.authors.outcomes,
            peers_used=len(self.authors),
        )

    # -- for the trainer

    def set_policy(self, policy: PolicyFacts) -> None:
        """Store the model facts of a trainer that has just started."""
        self._policy = policy
        self._version = policy.policy_version
        self.admission.set_policy(policy.model, policy.tokenizer, policy.tokens_per_text_byte)

    def publish(self, own: OwnGroup) -> str:
        """Check an own group against the bounds that peers apply, sign it and put it on the shelf.

        A group whose rewards are all equal is not published, because peers would drop it. Never
        raises for a group that cannot be shared.

        Returns:
            The outcome, which is also counted: PUBLISHED, or a reason of
            `ExchangeStatistics.unpublished`.
        """
        try:
            outcome, error = self._publish(own), ""
        except BadMessage as bad:
            outcome, error = "invalid", str(bad)
        if outcome == PUBLISHED:
            self._own.keep()
        else:
            self._own.drop(outcome, error=error)
        return outcome

    def _publish(self, own: OwnGroup) -> str:
        if not self.cfg.enabled:
            return "disabled"
        if self._policy is None:
            return "no_policy"
        if not is_useful(own.rewards):
            return "zero_advantage"
        if not self._allows("publish"):
            return "budget"
        now = self._clock()
        if not self._pace.has_token(self.cfg.groups_per_second, now):
            return "rate"
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
        codec.check_message(group)
        spec = TASKS.get(own.task.id)
        if spec is None or not all(has_turns(c, spec.turns) for c in group.completions):
            return "invalid"
        if not self._meets_rules(group):  # sampled before the manifest changed
            return "invalid"
        if len(codec.encode(group)) > limits.GROUP_BYTES:
            group = without_token_ids(group)
            if len(codec.encode(group)) > limits.GROUP_BYTES:
                return "oversize"
        key, swarm = self._credentials.key, self._credentials.swarm
        frame = envelope.seal(group, key, ids.DOMAIN_ROLLOUT, swarm)
        self._pace.take_token()
        self._gossip.put(group, self._network.peer_id, frame, own.rewards)
        return PUBLISHED

    def draw(self, request: Draw) -> Drawn:
        """Remove up to `count` groups from the pool for the step at `policy_version`.

        Each group is drawn at most once.
        """
        self._version = request.policy_version
        groups = self.pool.draw(
            request.count,
            request.policy_version,
            self._clock(),
            self._rng,
            self.authors.trust,
            self.authors.participation,
            request.per_peer,
        )
        tokenizer = self._policy.tokenizer if self._policy else b""
        groups = [
            g
            if g.group.tokenizer == tokenizer
            else msgspec.structs.replace(g, group=without_token_ids(g.group))
            for g in groups
        ]
        waiting = self.pool.waiting(self.authors.participation)
        self._gossip.drew(request.count, waiting, request.policy_version)
        return Drawn(request.request, groups)

    # -- from peers

    def _enqueue(self, candidate: Candidate) -> None:
        """Queue a group that passed admission for scoring.

        If the queue is full, the group is lost to this node: admission has recorded its content id,
        so it is not fetched again.
        """
        if (reason := self._scoring.put(candidate)) is not None:
            self.admission.refuse(reason, candidate.peer)

    def _scored(self, candidate: Candidate, scored: Scored) -> None:
        """Put a scored group into the pool and on the shelf."""
        group = self.admission.check_scored(candidate, scored)
        if isinstance(group, Refusal) and group.reason == "trajectory":
            self._gossip.replay_failed(candidate.content)
            return
        self._gossip.scored(candidate.content, scored.rewards)
        if isinstance(group, Refusal):
            return
        connected = candidate.peer in self._network.connected()
        nearest = candidate.peer if connected else candidate.source or candidate.peer
        source = self._network.origin(nearest) or nearest
        if self.pool.add(
            group, self._clock(), self._version, source, is_direct=nearest == candidate.peer
        ):
            self.admission.note_admitted()
            self.authors.admitted(candidate.peer)
            self._gossip.put(
                candidate.group,
                candidate.peer,
                candidate.envelope,
                group.rewards,
                source=candidate.source,
            )
        else:
            self.admission.refuse("not_pooled", candidate.peer)

    def _refuse(self, reason: str, peer: str) -> None:
        """Refuse a group whose scoring failed. Only its author can lose reputation for it."""
        if self.admission.refuse(reason, peer).verdict is Verdict.REJECT:
            self._network.rejected(peer, reason)

    async def _expire(self) -> None:
        while True:
            await trio.sleep(EXPIRE_SECONDS)
            self.pool.expire(self._clock(), self._version)


# ---- peers' groups -------------------------------------------------------------------------------

Answer = TypeVar("Answer", bound=msgspec.Struct)


class PullGossip:
    """Pull gossip of one node: it polls the listings of connected peers and fetches the groups that
    its trainer will use, and at least one group per 10 s to forward. Groups travel from shelf to
    shelf; no peer can push.

        shelf ─ listing, held open up to 10 s until a new group ───▶ peers' polls
              ─ groups, up to 16 and 1 MiB ────────────────────────▶ peers' fetches
        own polls ─▶ listings ─▶ Puller chooses groups and holders ─▶ own fetches ─▶ admission

    This is the anti-entropy of Demers et al. (PODC 1987) in its pull variant, with long polls. A
    new group travels as fast as with a push, and only peers that poll receive it. Serving does not
    depend on the node's own demand. A node that is paused or over its budget neither fetches nor
    serves.

    Args:
        network: Carries polls and fetches, and records peers' reputation.
        admission: Checks fetched groups.
        authors: Trust in the authors of groups.
        shelf: The groups that this node serves.
        enqueue: Queues a group that passed admission for scoring.
        allows: See `RolloutExchange`.
        clock: Returns Unix seconds.
        rng: Source of randomness.
    """

    def __init__(
        self,
        network: Network,
        admission: Admission,
        authors: Authors,
        shelf: Shelf,
        enqueue: Callable[[Candidate], None],
        *,
        allows: Callable[[str], bool],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._network = network
        self._admission = admission
        self._shelf = shelf
        self._authors = authors
        self._enqueue = enqueue
        self._allows = allows
        self._clock = clock
        self._rng = rng
        own_key = envelope.peer_key(network.peer_id) or b""
        self._puller = Puller(own_key, envelope.peer_id, rng)
        self._changed = trio.Event()
        self._polls: Counter[str] = Counter()
        self._fetches: Counter[str] = Counter()
        self._server = ShelfServer(
            network.requests,
            shelf,
            allows=lambda: allows("publish"),
            gives=lambda peer: authors.admitted_of(peer) > 0,
            clock=clock,
        )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
        """Serve, poll and fetch until cancelled."""
        self._server.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_connections)
            task_status.started()
            while True:
                self._changed = trio.Event()
                now = trio.current_time()
                if self._allows("fetch"):
                    self._start_due(nursery)
                    wake = self._puller.next_time(now)
                else:
                    wake = now + BUDGET_SECONDS
                with trio.move_on_at(wake):
                    await self._changed.wait()

    def put(
        self,
        group: RolloutGroup,
        author: str,
        frame: bytes,
        rewards: list[float],
        source: str = "",
    ) -> None:
        """Put a group on the shelf.

        Args:
            group: The decoded group.
            author: Peer id of its signer.
            frame: Its envelope, as signed.
            rewards: (G,), as this node computed them.
            source: Peer id of the holder it was fetched from; empty for an own group.
        """
        key = envelope.peer_key(author)
        if key is None:
            return
        listed = ListedGroup(
            envelope.content_id(frame),
            key,
            group.task.id,
            group.created_at,
            len(frame),
            min(limits.SPREAD, sampling.spread(rewards)),
        )
        self._shelf.put(frame, listed, envelope.peer_key(source) or b"" if source else key)
        self._server.news()

    def drew(self, count: int, waiting: int, policy_version: int) -> None:
        """Record a draw of the trainer.

        Args:
            count: Groups that the trainer asked for.
            waiting: Groups that are left in the pool.
            policy_version: Version of the policy that the step trains.
        """
        self._puller.drew(count, waiting, policy_version, trio.current_time())
        self._changed.set()

    def scored(self, content: bytes, rewards: list[float]) -> None:
        """Compare a group's rewards (G,) with the spread that its holder listed."""
        self._puller.scored(content, rewards, trio.current_time())
        self._changed.set()

    def replay_failed(self, content: bytes) -> None:
        """Note that the episodes of a group end elsewhere when they are replayed."""
        self._puller.replay_failed(content, trio.current_time())
        self._changed.set()

    def statistics(self) -> PullStatistics:
        """Return the counts of polls and fetches."""
        puller = self._puller
        return PullStatistics(
            polled=puller.polling,
            listings=dict(self._polls),
            pulled=dict(self._fetches),
            offered=puller.offered,
            claims=puller.statistics(),
        )

    def serving(self) -> ServingStatistics:
        """Return the counts of answers."""
        return self._server.statistics()

    async def _watch_connections(self) -> None:
        """Wake `run` when a peer connects or disconnects."""
        while True:
            await self._network.changed()
            self._changed.set()

    def _start_due(self, nursery: trio.Nursery) -> None:
        """Start the polls and fetches that are due."""
        now, seen = trio.current_time(), self._admission.has_seen
        connected = [peer for peer in self._network.connected() if self._network.is_allowed(peer)]
        for peer in self._puller.polls_due(connected, now, seen):
            nursery.start_soon(self._poll, peer)
        for pull in self._puller.fetches_due(now, self._clock(), self._authors.fetch_weight, seen):
            nursery.start_soon(self._fetch, pull)

    # -- polls

    async def _poll(self, peer: str) -> None:
        """Poll the listing of `peer` once."""
        puller = self._puller
        life, position = puller.cursor(peer)
        patience = limits.PATIENCE_SECONDS
        request = ListingRequest(self._admission.swarm, life, position, patience)
        now = trio.current_time
        try:
            response = await self._ask(
                peer,
                ids.LISTING_PROTOCOL,
                request,
                ListingResponse,
                deadline=patience + ANSWER_SECONDS,
                limit=limits.LISTING_RESPONSE_BYTES,
            )
        except _Unanswered as why:
            outcome = why.outcome
            if outcome in ("unsupported", "failed"):
                puller.refused(peer, now())
            else:
                puller.polled(peer, None, now(), self._clock())
        else:
            outcome = "other_swarm" if response.status == "unknown" else response.status
            taken = puller.polled(peer, response, now(), self._clock())
            for listed in response.groups if taken else ():
                # `Holder.take` drops a group outside the clock window: this node's clock or its
                # author's is wrong. Count it here, so that the operator sees it.
                if (reason := clock_reason(listed.created_at, self._clock())) is not None:
                    self._admission.refuse(reason, peer)
        self._polls[outcome] += 1
        self._changed.set()

    # -- fetches

    async def _fetch(self, pull: Pull) -> None:
        """Send one fetch request and hand the received groups to admission."""
        size = sum(listed.size for listed in pull.groups)
        deadline, began = fetch_deadline(size), trio.current_time()
        try:
            response = await self._ask(
                pull.holder,
                ids.GROUPS_PROTOCOL,
                GroupsRequest([listed.content for listed in pull.groups]),
                GroupsResponse,
                deadline=deadline,
                limit=min(limits.GROUPS_RESPONSE_BYTES, size + 512),
            )
            if len(response.groups) != len(pull.groups):
                self._network.rejected(pull.holder, "bounds")
                raise _Unanswered("malformed")
        except _Unanswered as why:
            self._puller.failed(pull, trio.current_time())
            self._fetches[why.outcome] += len(pull.groups)
        else:
            outcomes = [
                self._take(pull.holder, listed, group.body)
                if group.status == "ok"
                else group.status
                for listed, group in zip(pull.groups, response.groups, strict=True)
            ]
            now = trio.current_time()
            self._puller.fetched(pull, outcomes, now, slow=now - began > deadline / 2)
            self._fetches.update(outcomes)
        self._changed.set()

    def _take(self, holder: str, listed: ListedGroup, body: bytes) -> str:
        """Check one fetched group against its listing and by admission.

        Returns:
            The outcome, one of PULLED.
        """
        if envelope.content_id(body) != listed.content:
            self._count_fault(holder, "content")
            return "mismatch"
        result = self._admission.check(body, self._clock())
        if isinstance(result, Refusal):
            if result.verdict is Verdict.REJECT:
                # The holder had to apply the same checks before it listed the group.
                self._count_fault(holder, "content")
                if result.peer is not None and result.peer != holder:
                    self._network.rejected(result.peer, result.reason)
            return "refused"
        author = envelope.peer_key(result.peer) or b""
        fault = contradiction(listed, author, result.group, len(body))
        if fault is not None:
            # The group is signed by its author, so it is used although its listing is false.
            self._count_fault(holder, fault)
            self._puller.contradicted(listed.content)
        self._enqueue(msgspec.structs.replace(result, source=holder))
        return "ok"

    def _count_fault(self, holder: str, fault: Fault) -> None:
        """Count a false listing; a proven one also costs the holder reputation."""
        self._puller.fault(holder, fault, trio.current_time())
        if fault in EVIDENT:
            self._network.rejected(holder, "mismatch")

    async def _ask(
        self,
        peer: str,
        protocol: str,
        request: msgspec.Struct,
        kind: type[Answer],
        *,
        deadline: float,
        limit: int,
    ) -> Answer:
        """Send a request and decode the response.

        Raises:
            _Unanswered: The peer sent no valid response before the deadline.
        """
        try:
            data = await self._network.requests.request(
                peer, protocol, codec.encode(request), deadline=deadline, max_response_bytes=limit
            )
            return codec.decode(data, kind, limit)
        except Incompatible:
            raise _Unanswered("unsupported") from None
        except PeerTimeout:
            raise _Unanswered("timeout") from None
        except BadMessage as bad:
            self._network.rejected(peer, bad.reason)
            raise _Unanswered("malformed") from None
        except PeerError:
            raise _Unanswered("failed") from None


class _Unanswered(Exception):
    """Raised when a request has no valid response. `outcome` is one of LISTINGS or PULLED."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def fetch_deadline(size: int) -> float:
    """Return the deadline of a fetch of `size` bytes, seconds: at most 21 s, because a request
    lists at most 1 MiB."""
    return LEAST_SECONDS + size / LEAST_BYTES_PER_SECOND
