"""The rollout service of a node: it shares the node's own groups and collects groups of peers
(SAPO, arXiv 2509.08721).

    trainer ─ publish ─▶ publisher: check, sign ─▶ shelf ─▶ peers that fetch it
    peers' shelves ─ pull_gossip ─▶ admission ─▶ scorer ─▶ pool, shelf
    trainer ─ draw ─▶ pool ─▶ trainer ─ judged ─▶ authors (trust)

A failed fetch or a failed scorer loses one group and is counted. Any other exception is a defect of
this node and ends `run`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import trio

from swarmnode.config import SharingConfig
from swarmnode.p2p.api import Network
from swarmnode.rollouts.admission import Admission, AdmissionStatistics, Rejected
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
from swarmnode.rollouts.pull_gossip import Hooks, PullGossip, PullStatistics, ServingStatistics
from swarmnode.rollouts.reasons import Verdict
from swarmnode.rollouts.scoring import Scorer, ScoringQueue
from swarmnode.rollouts.shelf import Shelf
from swarmnode.rollouts.trust import Authors
from swarmnode.tasks.frames import Scored
from swarmnode.wire import limits
from swarmnode.wire.envelope import Credentials

EXPIRE_SECONDS = 30.0


class Budget(Protocol):
    """The part of `p2p.budget.Meter` that the rollout service uses."""

    def allows(self, choice: str) -> bool: ...


class Unlimited:
    """A budget without limits."""

    def allows(self, choice: str) -> bool:
        """Return True."""
        return True


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
        budget: Limits on sending and receiving; None for no limits.
        version_of: Peer id → version of swarmnode that the peer says it runs; empty if unknown.
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
        version_of: Callable[[str], str] = lambda peer: "",
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
            chooses=rules.members_choose_difficulty,
            version_of=version_of,
        )
        self.pool = Pool()
        self.authors = Authors(network)
        self._scoring = ScoringQueue(scorer, self._scored, self._refuse, clock)
        budget = budget or Unlimited()
        shelf = Shelf(
            credentials.key.public_key().public_bytes_raw(),
            credentials.swarm,
            self._rng.randbytes(limits.LIFE_BYTES),
        )
        hooks = Hooks(
            allows=budget.allows,
            trust=self.authors.fetch_weight,
            gives=lambda peer: self.authors.admitted_of(peer) > 0,
            enqueue=self._enqueue,
        )
        self._gossip = PullGossip(network, self.admission, shelf, hooks, clock, self._rng)
        self._publisher = Publisher(
            network.peer_id,
            credentials,
            rules,
            cfg.groups_per_second,
            budget.allows,
            self._gossip,
            clock,
        )
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
        admission, own = self.admission.statistics(), self._publisher.statistics()
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
            pool=self.pool.statistics(self._clock()),
            judged=self.authors.outcomes,
            peers_used=self.authors.used,
        )

    # -- for the trainer

    def set_policy(self, policy: PolicyFacts) -> None:
        """Store the model facts of a trainer that has just started."""
        self._policy = policy
        self._version = policy.policy_version
        self.admission.set_policy(policy.model, policy.tokenizer, policy.tokens_per_text_byte)

    def publish(self, own: OwnGroup) -> str:
        """Sign an own group and put it on the shelf.

        Never raises for a group that cannot be shared.

        Returns:
            The outcome, which is also counted.
        """
        if not self.cfg.enabled:
            return self._publisher.note("disabled")
        return self._publisher.publish(own, self._policy)

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
        waiting = self.pool.waiting(self.authors.belief)
        self._gossip.drew(request.count, waiting, request.policy_version)
        return Drawn(request.request, groups)

    # -- from peers

    def _enqueue(self, candidate: Candidate) -> None:
        """Queue a group that passed admission for scoring."""
        if (reason := self._scoring.put(candidate)) is not None:
            self.admission.refuse(reason, candidate.peer)

    def _scored(self, candidate: Candidate, scored: Scored) -> None:
        """Put a scored group into the pool and on the shelf."""
        group = self.admission.check_scored(candidate, scored)
        if isinstance(group, Rejected) and group.reason == "trajectory":
            self._gossip.diverged(candidate.content)
            return
        self._gossip.scored(candidate.content, scored.rewards)
        if isinstance(group, Rejected):
            return
        connected = candidate.peer in self._network.connected()
        nearest = candidate.peer if connected else candidate.source or candidate.peer
        source = self._network.group(nearest) or nearest
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
            self.admission.refuse("pool_full", candidate.peer)

    def _refuse(self, reason: str, peer: str) -> None:
        """Refuse a group whose scoring failed. Only its author can lose reputation for it."""
        if self.admission.refuse(reason, peer).verdict is Verdict.REJECT:
            self._network.rejected(peer, reason)

    async def _expire(self) -> None:
        while True:
            await trio.sleep(EXPIRE_SECONDS)
            self.pool.expire(self._clock(), self._version)
