"""The parts' statistics as one `NodeSnapshot`: what metrics, the status page and health see of a node."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from swarmnode.link.messages import Report
from swarmnode.observe.snapshot import BudgetView, ClaimRow, NetworkView, PeerRow, PoolView, RolloutsView, SwarmView, WeightsView
from swarmnode.p2p.budget import PAUSES, BudgetStatistics
from swarmnode.p2p.network import Network, NetworkStatistics
from swarmnode.p2p.summaries import SummaryStatistics
from swarmnode.rollouts.exchange import ExchangeStatistics
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.weights.exchange import WeightsStatistics
from swarmnode.wire import limits
from swarmnode.wire.messages import Summary

PEER_ROWS = 64
"""Peers in the page's table, at most."""
CLAIM_ROWS = 128
"""Lines of the swarm panel, at most."""
NAME_CHARACTERS = 32
"""Of a node's name, as told and as shown."""


def network_view(s: NetworkStatistics, topic: str) -> NetworkView:
    """`topic`: whose mesh counts."""
    protocols = s.traffic.received.keys() | s.traffic.sent.keys()
    gossip = s.gossip
    return NetworkView(
        peers_in=s.peers.inbound,
        peers_out=s.peers.outbound,
        peers_known=s.peers.known,
        mesh=gossip.mesh.get(topic, 0),
        dials=s.peers.dials,
        dial_failures=s.peers.dial_failures,
        gossip={
            "received": gossip.received, "accepted": gossip.accepted, "ignored": gossip.ignored, "rejected": gossip.rejected,
            "delivered": gossip.delivered, "published": gossip.published, "unwelcome": gossip.unwelcome, "dropped": gossip.dropped,
        },
        requests=_by_outcome(s.requests.requests),
        requests_served=_by_outcome(s.requests.served),
        bytes={p: {"in": s.traffic.received.get(p, 0), "out": s.traffic.sent.get(p, 0)} for p in sorted(protocols)},
        guards=dict(s.guards),
        greylisted=s.reputation.greylisted,
        banned=s.reputation.banned,
        reach=s.nat.reach.verdict,
        relayed=s.nat.relayed,
        relays=len(s.nat.client.relays),
        relay_circuits=s.nat.relay.circuits,
        relay_bytes=s.nat.relay.bytes,
        punches={"succeeded": s.nat.punch.succeeded, "failed": s.nat.punch.failed, "refused": s.nat.punch.refused},
    )  # fmt: skip


def rollouts_view(s: ExchangeStatistics, staleness: Mapping[int, int], max_groups: int, max_bytes: int) -> RolloutsView:
    """`staleness`: groups handed to the trainer, by own policy versions since they arrived."""
    outcomes = s.admission.outcomes
    by_verdict = lambda verdict: {reason: n for reason, n in outcomes.items() if REASONS.get(reason) is verdict}
    failed = sum(s.published.get(outcome, 0) for outcome in ("failed", "invalid", "oversize", "rate", "no_policy"))
    ignored, rejected = by_verdict(Verdict.IGNORE), by_verdict(Verdict.REJECT)
    admitted = outcomes.get("admitted", 0)
    return RolloutsView(
        published=s.published.get("gossip", 0) + s.published.get("announced", 0),
        publish_failures=failed,
        received=admitted + sum(ignored.values()) + sum(rejected.values()) + s.waiting + s.fetching.pending,
        admitted=admitted,
        ignored=ignored,
        rejected=rejected,
        drawn=s.pool.drawn,
        used=s.judged.get("used", 0),
        judged=dict(s.judged),
        staleness=dict(staleness),
        fetches=dict(s.fetching.fetched),
        pool=PoolView(
            groups=s.pool.groups,
            bytes=s.pool.bytes,
            peers=s.pool.peers,
            oldest_seconds=s.pool.oldest_seconds if s.pool.groups else None,
            max_groups=max_groups,
            max_bytes=max_bytes,
            dropped={
                "expired_age": s.pool.expired_age, "expired_version": s.pool.expired_version,
                "evicted_full": s.pool.evicted_full, "evicted_peer_share": s.pool.evicted_peer_share,
            },
        ),
    )  # fmt: skip


def weights_view(s: WeightsStatistics) -> WeightsView:
    return WeightsView(
        enabled=s.enabled,
        phase=s.phase,
        candidates=s.candidates,
        outcomes={outcome: n for outcome, n in s.outcomes.items() if n},
        failures=dict(s.failures),
        judged=dict(s.judged),
        exchange_seconds=s.exchange_seconds,
        received_bytes=s.received_bytes,
        adoptions=dict(s.catch_up.adoptions),
        states_served=s.catch_up.served,
        pairs=dict(s.pairs),
    )


def swarm_view(s: SummaryStatistics, now: float) -> SwarmView:
    """`now`: Unix seconds."""
    rewards = [claim.summary.reward for claim in s.claims if claim.summary.reward >= 0]
    return SwarmView(
        reporting=len(s.claims),
        reward_median=statistics.median(rewards) if rewards else None,
        policy_version_median=statistics.median(claim.summary.policy_version for claim in s.claims) if s.claims else None,
        rows=[
            ClaimRow(
                peer=claim.peer, name=plain_name(claim.summary.name), version=claim.summary.version, step=claim.summary.step,
                policy_version=claim.summary.policy_version, reward=claim.summary.reward if claim.summary.reward >= 0 else None,
                published=claim.summary.published, peers=claim.summary.peers, uptime_seconds=claim.summary.uptime,
                age_seconds=max(0.0, now - claim.summary.created_at / 1000), direct=claim.direct,
            )
            for claim in s.claims[:CLAIM_ROWS]
        ],
        heard=dict(s.heard),
        clock_offset_seconds=s.clock_offset,
    )  # fmt: skip


def own_summary(
    created_at: int, started_at: float, name: str, report: Report | None, *, version: str, published: int, peers: int
) -> Summary:
    """What this node says of itself. `created_at`: Unix milliseconds; `started_at`: Unix seconds."""
    reward = report.reward_held_out if report is not None else None
    return Summary(
        name=plain_name(name).encode()[: limits.SUMMARY_NAME_BYTES].decode(errors="ignore"),
        version=version[: limits.MINIMUM_VERSION_BYTES],
        created_at=created_at,
        uptime=max(0, int(created_at / 1000 - started_at)),
        step=report.step if report is not None else 0,
        policy_version=report.policy_version if report is not None else 0,
        reward=-1.0 if reward is None else min(1.0, max(0.0, float(reward))),
        published=published,
        peers=peers,
    )


def plain_name(name: str) -> str:
    """At most NAME_CHARACTERS of it, without what turns the text around it or cannot be seen: it may be a stranger's."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name[:NAME_CHARACTERS])


def budget_view(s: BudgetStatistics) -> BudgetView:
    levels = {"in": s.download_level, "out": s.upload_level}
    return BudgetView(
        paused={reason: reason in s.paused for reason in PAUSES},
        level_bytes={way: level for way, level in levels.items() if level is not None},
        month_bytes={"in": s.month.received, "out": s.month.sent},
        month_limit_bytes=s.month_limit or None,
        refused=dict(s.refused),
    )


def peer_rows(network: Network, admitted: Mapping[str, int], report: Report | None, now: float) -> list[PeerRow]:
    """Connected peers first, then others we have heard from; `now` is trio's clock."""
    used = report.peers_used if report is not None else {}
    connected = network.connected()
    others = [peer for peer in {**used, **admitted} if peer not in connected]
    rows = []
    for peer in [*connected, *others][:PEER_ROWS]:
        known = network.peers.get(peer)
        linked = known is not None and peer in connected
        rows.append(
            PeerRow(
                peer=peer,
                direction=("in" if known.inbound else "out") if known is not None and linked else "",
                admitted=admitted.get(peer, 0),
                used=used.get(peer, 0),
                rejected=network.reputation.rejections(peer),
                reputation=network.reputation.score(peer, now),
                last_seen_seconds=max(0.0, now - known.seen_at(now)) if known is not None and known.last_seen > -math.inf else None,
            )
        )
    return rows


def _by_outcome(by_protocol: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for outcomes in by_protocol.values():
        for outcome, count in outcomes.items():
            total[outcome] = total.get(outcome, 0) + count
    return total
