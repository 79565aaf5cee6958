"""Combines the statistics of the network process into a `NodeSnapshot`."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import trio

from swarmnode.daemon.member import Successors
from swarmnode.link.messages import Report
from swarmnode.observe import health
from swarmnode.observe.logfile import WARNINGS, LogLine, LogTail, log_file
from swarmnode.observe.snapshot import Gained, Health, NodeInfo, NodeSnapshot, PeerRow
from swarmnode.observe.watch import SupervisorWatch, TrainerWatch, disk_use, process_use
from swarmnode.p2p.budget import Meter
from swarmnode.p2p.network import Libp2pNetwork
from swarmnode.p2p.summaries import SummaryStatistics, plain_name
from swarmnode.rollouts.network.exchange import ExchangeStatistics, RolloutExchange
from swarmnode.stages.network.crew_service import StageService, StagesStatistics
from swarmnode.swarm.successor import SuccessorStatistics
from swarmnode.tasks.child import ScorerStatistics
from swarmnode.tasks.client import AsyncScorer
from swarmnode.weights.network.service import WeightService
from swarmnode.weights.network.swaps import WeightsStatistics
from swarmnode.wire import limits
from swarmnode.wire.messages import Summary

LOG_LINES = 200
PEER_ROWS = 64
"""Maximum number of peers in the page's table."""


@dataclass(frozen=True)
class ObservedParts:
    """The observed parts. A node without a trainer has no scorer and none of the planes."""

    network: Libp2pNetwork
    meter: Meter
    supervisor: SupervisorWatch
    trainer: TrainerWatch
    rollouts: RolloutExchange | None = None
    weights: WeightService | None = None
    crew: StageService | None = None
    scorer: AsyncScorer | None = None
    successors: Successors | None = None


class NodeObserver:
    """Provides `snapshot` for the operator of this node, and `summary` for the operators of
    others."""

    def __init__(self, info: NodeInfo, parts: ObservedParts, data_dir: Path) -> None:
        self.info = info
        self.draining = False
        self._parts = parts
        self._data_dir = data_dir
        self._tails = [
            LogTail(log_file(data_dir, process), process, LOG_LINES)
            for process in ("supervisor", "network", "trainer")
        ]

    def snapshot(self) -> NodeSnapshot:
        """Return all statistics of now."""
        parts, now = self._parts, trio.current_time()
        trainer = parts.trainer.statistics(now)
        stages = parts.crew.statistics() if parts.crew is not None else StagesStatistics()
        scorer = parts.scorer.statistics() if parts.scorer is not None else ScorerStatistics()
        swarm = parts.network.neighbours.statistics()
        return NodeSnapshot(
            at=time.time(),
            node=self.info,
            health=Health(
                policy_loaded=health.policy_loaded(trainer.report, stages),
                draining=self.draining,
            ),
            trainer=trainer,
            rollouts=parts.rollouts.statistics()
            if parts.rollouts is not None
            else ExchangeStatistics(),
            weights=parts.weights.statistics()
            if parts.weights is not None
            else WeightsStatistics(),
            stages=stages,
            network=parts.network.statistics(),
            swarm=swarm,
            gained=gained(trainer.report, swarm),
            budget=parts.meter.statistics(),
            disk=disk_use(self._data_dir),
            supervisor=parts.supervisor.read(),
            scorer=scorer,
            successor=parts.successors.statistics()
            if parts.successors is not None
            else SuccessorStatistics(),
            processes=process_use(
                {"network": os.getpid(), "trainer": trainer.pid, "scorer": scorer.pid}
            ),
            peers=peer_rows(parts.network, parts.rollouts, now),
            logs=self._lines(),
            warnings=self._warnings(),
        )

    def used_of(self, peer: str) -> int:
        """Return the number of groups of `peer` that this node has trained on."""
        report = self._parts.trainer.statistics(trio.current_time()).report
        return report.peers_used.get(peer, 0) if report is not None else 0

    def _lines(self) -> list[LogLine]:
        """Return the newest log lines of all processes of this node, in the order of writing."""
        lines = [line for tail in self._tails for line in tail.statistics()]
        return sorted(lines, key=lambda line: line.at)[-LOG_LINES:]

    def _warnings(self) -> list[LogLine]:
        """Return the newest warnings and errors, as of the last call of `_lines`."""
        lines = [line for tail in self._tails for line in tail.warnings]
        return sorted(lines, key=lambda line: line.at)[-WARNINGS:]

    def summary(self, created_at: int) -> Summary:
        """Return this node's summary for its peers. `created_at` is Unix time in milliseconds."""
        parts = self._parts
        report = parts.trainer.statistics(trio.current_time()).report
        published = parts.rollouts.statistics().published if parts.rollouts is not None else 0
        return own_summary(
            self.info, report, created_at, published=published, peers=len(parts.network.connected())
        )


def gained(report: Report | None, swarm: SummaryStatistics) -> Gained:
    """Return the groups given to peers and used from them."""
    if report is None:
        return Gained(swarm.used, swarm.used_by)
    sampled = report.tokens_total - report.evaluation_tokens_total
    used, own = report.external_groups_total, report.own_groups_total
    saved = round(used * sampled / own) if own else 0
    return Gained(swarm.used, swarm.used_by, used, saved)


def own_summary(
    info: NodeInfo, report: Report | None, created_at: int, *, published: int, peers: int
) -> Summary:
    """Return a node's summary within the limits of the protocol. `created_at` is Unix time in
    milliseconds."""
    reward = report.reward_held_out if report is not None else None
    return Summary(
        name=plain_name(info.name).encode()[: limits.SUMMARY_NAME_BYTES].decode(errors="ignore"),
        version=info.version[: limits.MINIMUM_VERSION_BYTES],
        created_at=created_at,
        uptime=max(0, int(created_at / 1000 - info.started_at)),
        step=report.step if report is not None else 0,
        policy_version=report.policy_version if report is not None else 0,
        reward=-1.0 if reward is None else min(1.0, max(0.0, float(reward))),
        reward_step=(report.reward_held_out_step or 0) if report is not None else 0,
        published=published,
        peers=peers,
    )


def peer_rows(
    network: Libp2pNetwork, rollouts: RolloutExchange | None, now: float
) -> list[PeerRow]:
    """Return the rows of the page's table: connected peers first, then others with groups. All
    counts are since the start of this process. `now` is trio's clock."""
    connected = network.connected()
    authors = rollouts.authors.peers() if rollouts is not None else []
    others = [peer for peer in authors if peer not in connected]
    rows = []
    for peer in [*connected, *others][:PEER_ROWS]:
        known = network.peers.get(peer)
        linked = known is not None and peer in connected
        rows.append(
            PeerRow(
                peer=peer,
                direction=("in" if known.inbound else "out")
                if known is not None and linked
                else "",
                admitted=rollouts.authors.admitted_of(peer) if rollouts is not None else 0,
                used=rollouts.authors.used_of(peer) if rollouts is not None else 0,
                rejected=network.reputation.rejections(peer),
                reputation=network.reputation.score(peer, now),
                last_seen_seconds=max(0.0, now - known.seen_at(now))
                if known is not None and known.last_seen > -math.inf
                else None,
            )
        )
    return rows
