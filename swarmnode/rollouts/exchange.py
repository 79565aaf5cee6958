"""The rollout service at work: it carries groups between network, scorer and trainer; the decisions
are its parts'.

    trainer ─ publisher ─▶ check, sign ─▶ serving
    pulling ─ listings, groups asked for ─▶ admission.check_pulled ─▶ scoring queue ─▶
    admission.check_scored ─▶ pool ─ draw ─▶ trainer
    serving ◀─ published and admitted groups: listed, and sent to peers that ask

Nothing a peer does ends a task here: a failed fetch or scorer costs that group and is counted. What
fails otherwise is a defect of ours and ends `run`, visibly; nothing is restarted in silence.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import trio

from swarmnode.config import SharingConfig
from swarmnode.p2p.api import Network
from swarmnode.rollouts.admission import Admission, AdmissionStatistics, Rejected
from swarmnode.rollouts.authors import Authors
from swarmnode.rollouts.catalogue import Catalogue
from swarmnode.rollouts.groups import (
    Candidate,
    Draw,
    Drawn,
    GroupRules,
    OwnGroup,
    PolicyFacts,
    without_token_ids,
)
from swarmnode.rollouts.pool import Pool, PoolStatistics
from swarmnode.rollouts.publisher import Publisher
from swarmnode.rollouts.pulling import Around, Pulling, PullStatistics
from swarmnode.rollouts.reasons import Verdict
from swarmnode.rollouts.scoring import Scorer, ScoringQueue
from swarmnode.rollouts.serving import Serving, ServingStatistics
from swarmnode.tasks.frames import Scored
from swarmnode.wire import limits
from swarmnode.wire.envelope import Credentials

log = logging.getLogger(__name__)

EXPIRE_SECONDS = 30.0


class Budget(Protocol):
    """What is needed of `p2p.metering.Meter`."""

    def allows(self, choice: str) -> bool: ...


class Unlimited:
    """No budget to mind."""

    def allows(self, choice: str) -> bool:
        return True


class ExchangeStatistics(msgspec.Struct, frozen=True):
    """Groups on their way from and to peers."""

    published: int = 0
    """Own groups that peers can ask for."""
    unpublished: dict[str, int] = {}
    """Own groups that stayed here: `zero_advantage`, `rate`, `oversize`, `invalid`, `no_policy`,
    `failed`, `budget`, `disabled`."""
    unpublished_since: dict[str, int] = {}
    """Those after the last one that went out."""
    received: int = 0
    """Groups that arrived: admitted, ignored, rejected, and those still being scored."""
    admission: AdmissionStatistics = AdmissionStatistics()
    pulling: PullStatistics = PullStatistics()
    serving: ServingStatistics = ServingStatistics()
    waiting: int = 0
    """Candidates before the scorer."""
    pool: PoolStatistics = PoolStatistics()
    judged: dict[str, int] = {}
    """Drawn groups by what the trainer made of them."""
    peers_used: int = 0
    """Peers of which a group was trained on."""


class _ByListing(NamedTuple):
    """Both ends of listings and pulls."""

    serving: Serving
    pulling: Pulling


class RolloutExchange:
    """Shares this node's groups and gathers others'. clock: Unix seconds.

    Start it with `await nursery.start(exchange.run)`; the other methods are for the process link.
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
        budget: Budget | None = None,
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
            is_greylisted=lambda peer: not network.welcome(peer),
            keeps_rules=rules.keeps_rules,
            chooses=rules.spoken.chooses,
        )
        self.pool = Pool()
        self.authors = Authors(network)
        budget = budget or Unlimited()
        self._policy: PolicyFacts | None = None
        self._version = 0
        self.scoring = ScoringQueue(scorer, self._scored, self._refuse, clock)
        life, own_key = (
            self._rng.randbytes(limits.LIFE_BYTES),
            credentials.key.public_key().public_bytes_raw(),
        )
        around = Around(budget.allows, self.authors.worth, self._enqueue, lambda: ())
        gives = lambda peer: self.authors.admitted_of(peer) > 0
        self._by_listing = _ByListing(
            Serving(
                Catalogue(own_key, credentials.swarm, life),
                budget.allows,
                gives,
                clock,
                rules.spoken.fetch,
            ),
            Pulling(network, self.admission, around, "pull", clock, self._rng),
        )
        self._publisher = Publisher(
            network,
            credentials,
            rules,
            cfg.groups_per_second,
            budget.allows,
            self._by_listing.serving,
            clock,
        )

    # -- for the node

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
        """Until cancelled. Started once groups are listed and served. With sharing off it only
        waits."""
        if not self.cfg.enabled:
            task_status.started()
            await trio.sleep_forever()
        self._by_listing.serving.start(self._network.requests)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._expire)
            nursery.start_soon(self._by_listing.pulling.run)
            self.scoring.start(nursery)
            task_status.started()

    def statistics(self) -> ExchangeStatistics:
        admission = self.admission.statistics()
        own = self._publisher.statistics()
        decided = (
            admission.admitted + sum(admission.ignored.values()) + sum(admission.rejected.values())
        )
        return ExchangeStatistics(
            published=own.kept,
            unpublished=own.dropped,
            unpublished_since=own.since_kept,
            received=decided + len(self.scoring),
            admission=admission,
            pulling=self._by_listing.pulling.statistics(),
            serving=self._by_listing.serving.statistics(),
            waiting=len(self.scoring),
            pool=self.pool.statistics(self._clock()),
            judged=self.authors.outcomes,
            peers_used=self.authors.used,
        )

    # -- for the trainer

    def set_policy(self, policy: PolicyFacts) -> None:
        """The trainer (re)started with this model: its Hello."""
        self._policy = policy
        self._version = policy.policy_version
        self.admission.set_policy(policy.model, policy.tokenizer, policy.tokens_per_text_byte)

    async def publish(self, own: OwnGroup) -> str:
        """Sign a group and send it out; returns its outcome, which is also counted. Never raises
        for a group that cannot be sent.

        A group whose rewards are all equal stays here: receivers would drop it.
        """
        return (
            await self._publisher.publish(own, self._policy)
            if self.cfg.enabled
            else self._publisher.note("disabled")
        )

    def draw(self, request: Draw) -> Drawn:
        """Up to `count` groups for the step at `policy_version`; each group of the pool is drawn at
        most once."""
        self._version = request.policy_version
        groups = self.pool.draw(
            request.count,
            request.policy_version,
            self._clock(),
            self._rng,
            self.authors.trust,
            self.authors.belief,
            request.per_peer,
        )
        tokenizer = self._policy.tokenizer if self._policy else b""
        groups = [
            g
            if g.group.tokenizer == tokenizer
            else msgspec.structs.replace(g, group=without_token_ids(g.group))
            for g in groups
        ]
        self._by_listing.pulling.want(request.count, self.pool.waiting(self.authors.belief))
        return Drawn(request.request, groups)

    # -- in

    def _enqueue(self, candidate: Candidate) -> None:
        if (reason := self.scoring.put(candidate)) is not None:
            self.admission.refuse(reason, candidate.peer)

    def _scored(self, candidate: Candidate, scored: Scored) -> None:
        self._by_listing.pulling.scored(candidate.content, scored.rewards)
        group = self.admission.check_scored(candidate, scored.prompt, scored.rewards)
        if isinstance(group, Rejected):
            return
        group = msgspec.structs.replace(group, components=scored.components)
        if self.pool.add(group, self._clock(), self._version):
            self.admission.note_admitted()
            self.authors.admitted(candidate.peer)
            self._by_listing.serving.put(
                candidate.group, candidate.peer, candidate.envelope, group.rewards
            )
        else:
            self.admission.refuse("pool_full", candidate.peer)

    def _refuse(self, reason: str, peer: str) -> None:
        """Refuse a group of `peer`, and hold a rejected one against it."""
        if self.admission.refuse(reason, peer).verdict is Verdict.REJECT:
            self._network.rejected(peer, reason)

    async def _expire(self) -> None:
        while True:
            await trio.sleep(EXPIRE_SECONDS)
            self.pool.expire(self._clock(), self._version)
