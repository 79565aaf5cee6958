"""Numbers of /metrics that are computed from several ones of the snapshot, for `metrics.py`."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping

import swarmnode
from swarmnode.histogram import Histogram
from swarmnode.observe.snapshot import NodeSnapshot

Labels = tuple[str, ...]
Number = float | None
Counts = Mapping[str, Number] | Mapping[Labels, Number]
"""Numbers by label value, or by a tuple of label values if a metric has several labels."""

STALENESS_BOUNDS = (0, 1, 2, 4, 8)
"""Policy versions."""


def node_info(s: NodeSnapshot) -> dict[Labels, Number]:
    report, node = s.trainer.report, s.node
    device, dtype = (report.device, report.dtype) if report else ("", "")
    version = node.version or swarmnode.__version__
    labels = (node.peer, node.name, node.swarm, node.swarm_name, node.model, device, dtype)
    return {(*labels, version, platform.python_version()): 1}


def trainer_phase(s: NodeSnapshot) -> Counts:
    if not s.node.trainer:
        return {}
    report = s.trainer.report if s.trainer.connected else None
    return {report.phase if report is not None else "disconnected": 1}


def learning_problem(s: NodeSnapshot) -> Counts:
    report = s.trainer.report
    kinds = ("unmoved", "collapsed")
    return {kind: int(report.learning == kind) for kind in kinds} if report is not None else {}


def tokens(s: NodeSnapshot) -> Counts:
    report = s.trainer.report
    if report is None:
        return {}
    evaluated = report.evaluation_tokens_total
    return {"training": report.tokens_total - evaluated, "evaluation": evaluated}


def reward(s: NodeSnapshot) -> dict[Labels, Number]:
    report = s.trainer.report
    if report is None:
        return {}
    rewards = {
        "own": report.reward_own,
        "external": report.reward_external,
        "held_out": report.reward_held_out,
        "held_out_start": report.reward_held_out_start,
    }
    return {(source, report.held_out_questions): reward for source, reward in rewards.items()}


def reward_errors(s: NodeSnapshot) -> Counts:
    """Both scorers' counts, and 0 for the node's other tasks."""
    counts = Counter(dict.fromkeys(s.node.tasks, 0))
    counts.update(s.scorer.reward_errors)
    counts.update(s.trainer.report.reward_errors if s.trainer.report else {})
    return counts


def refusals(s: NodeSnapshot) -> Counts:
    """Both scorers' counts, and 0 for the node's other tasks."""
    counts = Counter(dict.fromkeys(s.node.tasks, 0))
    counts.update(s.scorer.refusals)
    counts.update(s.trainer.report.refusals if s.trainer.report else {})
    return counts


def dropped(s: NodeSnapshot) -> dict[Labels, Number]:
    """Own items by kind and reason, and groups of peers that the pool refused or lost unused."""
    pool, found = s.rollouts.pool, Counter[Labels]()
    report = s.trainer.report
    kinds = [(kind, counts.dropped) for kind, counts in report.drops.items()] if report else []
    pooled = {
        "too_old": pool.expired_age,
        "outdated": pool.expired_version,
        "pool_full": pool.evicted_full,
        "peer_share": pool.evicted_peer_share,
        "refused": pool.refused,
    }
    for kind, dropped in [*kinds, ("group", s.rollouts.unpublished), ("pooled_group", pooled)]:
        if kind != "external":  # `swarmnode_rollouts_judged_total` has the groups of peers
            found.update({(kind, reason): count for reason, count in dropped.items()})
    return dict(found)


def server_failures(s: NodeSnapshot) -> dict[Labels, Number]:
    report = s.trainer.report
    if report is None or report.server is None:
        return {}
    return {(reason,): count for reason, count in report.server.failures.items()}


def server_sampling(s: NodeSnapshot) -> Number:
    report = s.trainer.report
    sampling = (
        report is not None and report.server is not None and report.server.state == "sampling"
    )
    return float(sampling)


def unsaved_steps(s: NodeSnapshot) -> Number:
    report = s.trainer.report
    return max(0, report.step - report.state_saved_step) if report is not None else None


def state_save_failed(s: NodeSnapshot) -> Number:
    report = s.trainer.report
    return float(bool(report.state_error)) if report is not None else None


def admission(s: NodeSnapshot) -> dict[Labels, Number]:
    admission = s.rollouts.admission
    refused = {"ignored": admission.ignored, "rejected": admission.rejected}
    return {
        ("admitted", "valid"): admission.admitted,
        **{
            (verdict, reason): count
            for verdict, counts in refused.items()
            for reason, count in counts.items()
        },
    }


def staleness(s: NodeSnapshot) -> Histogram:
    counts = s.rollouts.pool.staleness
    by_bound = [0] * (len(STALENESS_BOUNDS) + 1)
    for versions, count in counts.items():
        by_bound[sum(versions > bound for bound in STALENESS_BOUNDS)] += count
    return Histogram(
        tuple(float(bound) for bound in STALENESS_BOUNDS),
        tuple(by_bound),
        float(sum(versions * count for versions, count in counts.items())),
    )


def dials(s: NodeSnapshot) -> dict[Labels, Number]:
    peers, punch = s.network.peers, s.network.nat.punch
    return {
        ("dial", "connected"): peers.dials - peers.dial_failures,
        ("dial", "failed"): peers.dial_failures,
        ("hole_punch", "connected"): punch.succeeded,
        ("hole_punch", "failed"): punch.failed,
        ("hole_punch", "refused"): punch.refused,
    }


def requests(s: NodeSnapshot) -> dict[Labels, Number]:
    """Requests by direction and outcome, summed over the protocols."""
    requests, found = s.network.requests, Counter[Labels]()
    for direction, by_protocol in (("out", requests.requests), ("in", requests.served)):
        for by_outcome in by_protocol.values():
            found.update({(direction, outcome): count for outcome, count in by_outcome.items()})
    return dict(found)


def stage_refusals(s: NodeSnapshot) -> dict[Labels, Number]:
    own = s.stages.own
    kinds = {
        "frame": own.dropped if own else {},
        "state": own.state_refused if own else {},
        "stream": s.stages.streams.refused,
    }
    return {
        (kind, reason): count for kind, counts in kinds.items() for reason, count in counts.items()
    }


def restarts(s: NodeSnapshot) -> dict[Labels, Number]:
    restarts, stalls = s.supervisor.restarts, s.supervisor.stalls
    found: dict[Labels, Number] = {}
    for process in ("network", "trainer"):
        stalled = stalls.get(process, 0)
        found[process, "stalled"] = stalled
        found[process, "ended"] = restarts.get(process, 0) - stalled
    return found


def scorer_restarts(s: NodeSnapshot) -> Counts:
    return {
        "network": max(0, s.scorer.starts - 1),
        "trainer": s.trainer.report.scorer_restarts_total if s.trainer.report else None,
    }
