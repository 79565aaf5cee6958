"""The table of everything that /metrics exports, and the collector that reads it off a snapshot when somebody scrapes.

`METRICS` is the one source: names, types, help, labels and where each value comes from. Dashboards, rules and docs/monitoring.md
are held to it by tests/deploy. Names follow https://prometheus.io/docs/practices/naming/: `swarmnode_`, base units, `_total`.

Peer ids would make a new series per stranger, so they appear in `swarmnode_node_info` only, and there only our own. Label values are
closed sets: those listed in a row are there from the start, at 0; the rest comes from dict keys of our own parts; what does not look
like one, or is one too many, is counted as `other`.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import swarmnode
from swarmnode.crew.events import NOTES, CrewState, SlotState
from swarmnode.crew.local import RUNGS, StagePhase
from swarmnode.crew.messages import Request
from swarmnode.crew.stream_handshake import REFUSALS as STREAM_REFUSALS
from swarmnode.crew.stream_handshake import Kind
from swarmnode.link.messages import Report, WeightsReport
from swarmnode.observe.health import ready
from swarmnode.observe.snapshot import Histogram, NodeSnapshot, StagesView
from swarmnode.p2p.budget import CHOICES, PAUSES
from swarmnode.p2p.summaries import HEARD
from swarmnode.pipeline.faults import DEVICE
from swarmnode.pipeline.fence import FENCE_REASONS
from swarmnode.pipeline.frames import FRAME_REASONS
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.weights import outcomes, pairing
from swarmnode.weights.exchange import FAILURES

Labels = tuple[str, ...]
Value = float | None | Histogram | Mapping[Any, float | None]  # Any: a label value, or a tuple of them

MAX_LABEL_VALUES = 64
LABEL_VALUE = re.compile(r"[A-Za-z0-9_./+-]{1,64}")

PHASES = ("loading", "generating", "training", "evaluating", "paused", "draining")
REACH = ("public", "private", "unknown")
PUNCHES = ("succeeded", "failed", "refused")
JUDGED = ("used", "forged_ids", "spot_check", "mean_logprob", "untokenizable")
PROCESSES = ("network", "trainer")
DIRECTIONS = ("in", "out")
CHECKS = ("network", "policy", "joined")
REQUESTS = ("ok", "timeout", "failed", "malformed")
SERVED = (*REQUESTS, "busy", "unwelcome", "error")
FETCHES = ("ok", "fetch_timeout", "fetch_failed", "fetch_unknown", "fetch_busy", "mismatch")
GOSSIP = ("received", "accepted", "ignored", "rejected", "delivered", "published", "unwelcome", "dropped")
POOL_DROPS = ("expired_age", "expired_version", "evicted_full", "evicted_peer_share", "refused")
CREW_STATES: tuple[str, ...] = get_args(CrewState)
SLOT_STATES: tuple[str, ...] = get_args(SlotState)
STAGE_PHASES: tuple[str, ...] = get_args(StagePhase)
KINDS: tuple[str, ...] = get_args(Kind)
SAID: tuple[str, ...] = tuple(str(message.__struct_config__.tag) for message in get_args(Request))
IGNORED = tuple(reason for reason, verdict in REASONS.items() if verdict is Verdict.IGNORE)
REJECTED = tuple(reason for reason, verdict in REASONS.items() if verdict is Verdict.REJECT)


@dataclass(frozen=True)
class Family:
    """One metric. `read` gives a number, a histogram, or numbers by label value (a tuple of them where there are two labels)."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    read: Callable[[NodeSnapshot], Value]
    labels: Labels = ()
    values: tuple[str, ...] = ()
    """Label values that are exported even before anything happened (families of one label)."""


def _report(read: Callable[[Report], Value]) -> Callable[[NodeSnapshot], Value]:
    """Of the trainer's last report. Nothing until it has loaded its state: a counter that starts at 0 and jumps would look like work."""

    def value(s: NodeSnapshot) -> Value:
        report = s.trainer.report
        return None if report is None or (report.phase == "loading" and report.step == 0) else read(report)

    return value


def _averaging(read: Callable[[NodeSnapshot], Value]) -> Callable[[NodeSnapshot], Value]:
    """Nothing on a node that averages nothing."""
    return lambda s: read(s) if s.weights.enabled else None


def _weights(read: Callable[[WeightsReport], Value]) -> Callable[[NodeSnapshot], Value]:
    """Of the trainer's half of averaging."""
    return _report(lambda r: None if r.weights is None else read(r.weights))


def _crew(read: Callable[[StagesView], Value]) -> Callable[[NodeSnapshot], Value]:
    """Nothing on a node that holds its policy alone."""
    return lambda s: read(s.stages) if s.stages.enabled else None


def _stage(read: Callable[[StagesView], Value]) -> Callable[[NodeSnapshot], Value]:
    """Nothing on a node without a stage."""
    return _crew(lambda c: read(c) if c.stage is not None else None)


def _staleness(counts: Mapping[int, int]) -> Histogram:
    bounds = (0, 1, 2, 4, 8)
    sized = [0] * (len(bounds) + 1)
    for versions, count in counts.items():
        sized[next((i for i, bound in enumerate(bounds) if versions <= bound), len(bounds))] += count
    return Histogram(tuple(float(b) for b in bounds), tuple(sized), float(sum(v * c for v, c in counts.items())))


def _scorer_restarts(s: NodeSnapshot) -> dict[str, float | None]:
    return {"network": s.scorer_restarts, "trainer": s.trainer.report.scorer_restarts_total if s.trainer.report else None}


def _node_info(s: NodeSnapshot) -> dict[Labels, float | None]:
    report = s.trainer.report
    device, dtype = (report.device, report.dtype) if report else ("", "")
    return {(s.node.peer, s.node.name, s.node.swarm, s.node.swarm_name, s.node.model, device, dtype): 1}


METRICS: tuple[Family, ...] = (
    # node
    Family("swarmnode_build_info", "info", "Version of swarmnode and of Python; the value is always 1.",
           lambda s: {(s.node.version or swarmnode.__version__, platform.python_version()): 1}, ("version", "python")),
    Family("swarmnode_node_info", "info", "Who this node is; the value is always 1. The only metric with a peer id.",
           _node_info, ("peer", "name", "swarm", "swarm_name", "model", "device", "dtype")),
    Family("swarmnode_start_time_seconds", "gauge", "When the network process started, Unix time.", lambda s: s.node.started_at),
    Family("swarmnode_ready", "gauge", "1 when /readyz answers 200.", lambda s: float(ready(s).ok)),
    Family("swarmnode_check_ok", "gauge", "1 when the part is up: network listening, policy loaded, a peer met since the start.",
           lambda s: {"network": s.health.network_ready, "policy": s.health.policy_loaded, "joined": s.health.joined}, ("check",), CHECKS),
    Family("swarmnode_event_loop_lag_seconds", "gauge", "How late the network process's event loop woke a waiting task.",
           lambda s: s.loop_lag_seconds),
    # learning
    Family("swarmnode_trainer_connected", "gauge", "1 while the trainer is connected to the network process.",
           lambda s: float(s.trainer.connected)),
    Family("swarmnode_trainer_report_age_seconds", "gauge", "Since the trainer last reported a step, an evaluation or a phase.",
           lambda s: s.trainer.age_seconds),
    Family("swarmnode_trainer_phase", "gauge", "1 for what the trainer is doing, 0 for the rest.",
           lambda s: {s.trainer.report.phase: 1} if s.trainer.report and s.trainer.connected else {}, ("phase",), PHASES),
    Family("swarmnode_steps_total", "counter", "Training steps finished.", _report(lambda r: r.step)),
    Family("swarmnode_policy_version", "gauge", "Own policy version.", _report(lambda r: r.policy_version)),
    Family("swarmnode_step_seconds", "histogram", "Duration of training steps, generation included.", lambda s: s.trainer.step_seconds),
    Family("swarmnode_phase_seconds", "gauge", "Duration of the last step's parts.",
           _report(lambda r: {"generating": r.generate_seconds, "training": r.train_seconds}), ("phase",)),
    Family("swarmnode_reward", "gauge", "Mean reward, 0 to 1: on this node's fresh completions, on peers', and on held-out questions.",
           _report(lambda r: {"own": r.reward_own, "external": r.reward_external, "held_out": r.reward_held_out}), ("source",)),
    Family("swarmnode_reward_held_out_start", "gauge", "Mean held-out reward before the first step.",
           _report(lambda r: r.reward_held_out_start)),
    Family("swarmnode_loss", "gauge", "Policy loss of the last step.", _report(lambda r: r.loss)),
    Family("swarmnode_entropy", "gauge", "Entropy of the policy per sampled token, nats.", _report(lambda r: r.entropy)),
    Family("swarmnode_kl", "gauge", "KL divergence from the reference policy per token, nats.", _report(lambda r: r.kl)),
    Family("swarmnode_clip_fraction", "gauge", "Share of tokens whose importance ratio was clipped.", _report(lambda r: r.clip_fraction)),
    Family("swarmnode_gradient_norm", "gauge", "Gradient norm before clipping.", _report(lambda r: r.grad_norm)),
    Family("swarmnode_learning_rate", "gauge", "Learning rate of the last step.", _report(lambda r: r.learning_rate)),
    Family("swarmnode_zero_advantage_share", "gauge", "Share of own groups whose rewards were all equal, so that they teach nothing.",
           _report(lambda r: r.zero_advantage_share)),
    Family("swarmnode_batch_groups", "gauge", "Groups in the last batch: own (I) and peers' (J).",
           _report(lambda r: {"own": r.own_groups, "external": r.external_groups}), ("source",)),
    Family("swarmnode_trained_groups_total", "counter", "Groups trained on.",
           _report(lambda r: {"own": r.own_groups_total, "external": r.external_groups_total}), ("source",)),
    Family("swarmnode_tokens_total", "counter", "Tokens sampled by this node.", _report(lambda r: r.tokens_total)),
    Family("swarmnode_tokens_per_second", "gauge", "Sampling speed in the last step.", _report(lambda r: r.tokens_per_second)),
    Family("swarmnode_device_memory_bytes", "gauge", "Most accelerator memory the trainer has held.",
           _report(lambda r: r.device_memory_bytes)),
    Family("swarmnode_out_of_memory_retries_total", "counter", "Steps repeated with smaller micro-batches because memory ran out.",
           _report(lambda r: r.oom_retries_total)),
    Family("swarmnode_micro_batch_tokens", "gauge", "Micro-batch bound, tokens; halved when memory runs out.",
           _report(lambda r: r.micro_batch_tokens)),
    Family("swarmnode_unsaved_steps", "gauge", "Steps that a crash of the trainer now would cost.",
           _report(lambda r: max(0, r.step - r.state_saved_step))),
    # swarm utility
    Family("swarmnode_external_share", "gauge", "Share of the last batch that came from peers.", _report(lambda r: r.external_share)),
    Family("swarmnode_correction_mean", "gauge", "Mean off-policy correction of peers' groups, 0.8 to 1.",
           _report(lambda r: r.correction_mean)),
    Family("swarmnode_gradient_agreement", "gauge", "Cosine between the gradients of own and of peers' groups.",
           _report(lambda r: r.gradient_agreement)),
    Family("swarmnode_external_scale", "gauge", "What the utility guard leaves of the peers' share, 0 to 1.",
           _report(lambda r: r.external_scale)),
    Family("swarmnode_contributing_peers", "gauge", "Peers on whose groups this node has trained.",
           _report(lambda r: len(r.peers_used))),
    # rollouts
    Family("swarmnode_rollouts_published_total", "counter", "Own groups published.", lambda s: s.rollouts.published),
    Family("swarmnode_rollouts_publish_failures_total", "counter", "Own groups that could not be published.",
           lambda s: s.rollouts.publish_failures),
    Family("swarmnode_rollouts_received_total", "counter", "Groups that arrived from peers.", lambda s: s.rollouts.received),
    Family("swarmnode_rollouts_admitted_total", "counter", "Groups that passed every check and went into the pool.",
           lambda s: s.rollouts.admitted),
    Family("swarmnode_rollouts_ignored_total", "counter", "Groups dropped without blame, by reason.",
           lambda s: s.rollouts.ignored, ("reason",), IGNORED),
    Family("swarmnode_rollouts_rejected_total", "counter", "Groups dropped at the cost of somebody's reputation, by reason.",
           lambda s: s.rollouts.rejected, ("reason",), REJECTED),
    Family("swarmnode_rollouts_drawn_total", "counter", "Groups handed to the trainer.", lambda s: s.rollouts.drawn),
    Family("swarmnode_rollouts_used_total", "counter", "Groups of peers that were trained on.", lambda s: s.rollouts.used),
    Family("swarmnode_rollouts_judged_total", "counter", "Groups handed to the trainer, by its verdict.",
           lambda s: s.rollouts.judged, ("outcome",), JUDGED),
    Family("swarmnode_rollouts_fetched_total", "counter", "Groups announced by hash, by outcome of fetching them.",
           lambda s: s.rollouts.fetches, ("outcome",), FETCHES),
    Family("swarmnode_rollout_staleness_versions", "histogram", "Own policy versions between a group's arrival and its use.",
           lambda s: _staleness(s.rollouts.staleness)),
    Family("swarmnode_pool_groups", "gauge", "Groups in the pool.", lambda s: s.rollouts.pool.groups),
    Family("swarmnode_pool_bytes", "gauge", "Bytes in the pool.", lambda s: s.rollouts.pool.bytes),
    Family("swarmnode_pool_peers", "gauge", "Peers with a group in the pool.", lambda s: s.rollouts.pool.peers),
    Family("swarmnode_pool_oldest_seconds", "gauge", "Age of the oldest group in the pool.", lambda s: s.rollouts.pool.oldest_seconds),
    Family("swarmnode_pool_dropped_total", "counter", "Groups that left the pool unused or never got in, by reason.",
           lambda s: s.rollouts.pool.dropped, ("reason",), POOL_DROPS),
    # network
    Family("swarmnode_peers", "gauge", "Connected peers, by who dialled.",
           lambda s: {"in": s.network.peers_in, "out": s.network.peers_out}, ("direction",), DIRECTIONS),
    Family("swarmnode_peers_known", "gauge", "Peers with a known address, connected or not.", lambda s: s.network.peers_known),
    Family("swarmnode_peers_greylisted", "gauge", "Peers whose groups are not taken for now.", lambda s: s.network.greylisted),
    Family("swarmnode_peers_banned", "gauge", "Peers that are not talked to.", lambda s: s.network.banned),
    Family("swarmnode_reach", "gauge", "1 for what is known of whether strangers can dial this node.",
           lambda s: {verdict: float(verdict == s.network.reach) for verdict in REACH}, ("verdict",), REACH),
    Family("swarmnode_peers_relayed", "gauge", "Peers connected through a relay only.", lambda s: s.network.relayed),
    Family("swarmnode_relays", "gauge", "Relays through which this node can be called.", lambda s: s.network.relays),
    Family("swarmnode_relay_circuits", "gauge", "Circuits that this node carries for others.", lambda s: s.network.relay_circuits),
    Family("swarmnode_relay_bytes_total", "counter", "Bytes carried for others.", lambda s: s.network.relay_bytes),
    Family("swarmnode_hole_punches_total", "counter", "Peers behind routers, by whether a direct connection was made.",
           lambda s: s.network.punches, ("outcome",), PUNCHES),
    Family("swarmnode_mesh_peers", "gauge", "Peers in the gossip mesh.", lambda s: s.network.mesh),
    Family("swarmnode_dials_total", "counter", "Attempts to connect to a peer.", lambda s: s.network.dials),
    Family("swarmnode_dial_failures_total", "counter", "Attempts that failed.", lambda s: s.network.dial_failures),
    Family("swarmnode_gossip_messages_total", "counter", "Gossip messages, by what happened to them.",
           lambda s: s.network.gossip, ("event",), GOSSIP),
    Family("swarmnode_requests_total", "counter", "Requests sent to peers, by outcome.",
           lambda s: s.network.requests, ("outcome",), REQUESTS),
    Family("swarmnode_requests_served_total", "counter", "Requests of peers, by outcome.",
           lambda s: s.network.requests_served, ("outcome",), SERVED),
    Family("swarmnode_network_bytes_total", "counter", "Bytes by protocol and direction.",
           lambda s: {(protocol, way): n for protocol, ways in s.network.bytes.items() for way, n in ways.items() if way in DIRECTIONS},
           ("protocol", "direction")),
    Family("swarmnode_guard_firings_total", "counter", "How often a guard around libp2p stepped in, by guard.",
           lambda s: s.network.guards, ("guard",)),
    # weights
    Family("swarmnode_weights_exchanges_total", "counter", "Outer steps, tries and exchanges, by how they ended.",
           _averaging(lambda s: s.weights.outcomes), ("outcome",), pairing.OUTCOMES),
    Family("swarmnode_weights_failures_total", "counter", "Exchanges that failed, by cause.",
           _averaging(lambda s: s.weights.failures), ("cause",), FAILURES),
    Family("swarmnode_weights_judged_total", "counter", "Partners' weights, by what the gate made of them.",
           _averaging(lambda s: s.weights.judged), ("outcome",), tuple(outcomes.OUTCOMES)),
    Family("swarmnode_weights_adoptions_total", "counter", "Neighbours' states, by what became of them.",
           _averaging(lambda s: s.weights.adoptions), ("outcome",), tuple(outcomes.ADOPTIONS)),
    Family("swarmnode_weights_states_served_total", "counter", "States given to neighbours.",
           _averaging(lambda s: s.weights.states_served)),
    Family("swarmnode_weights_candidates", "gauge", "Connected peers with the same policy.", _averaging(lambda s: s.weights.candidates)),
    Family("swarmnode_weights_exchange_seconds_total", "counter", "Seconds that finished exchanges took.",
           _averaging(lambda s: s.weights.exchange_seconds)),
    Family("swarmnode_weights_received_bytes_total", "counter", "Bytes of partners' weights.",
           _averaging(lambda s: s.weights.received_bytes)),
    Family("swarmnode_weights_outer_step", "gauge", "Outer steps of the fragment that is furthest behind.",
           _weights(lambda w: w.outer_step)),
    Family("swarmnode_weights_distance", "gauge", "How far the last partner was, relative to the norm of our weights.",
           _weights(lambda w: w.distance)),
    Family("swarmnode_weights_clip_ratio", "gauge", "Share of a partner's difference that was taken; 1 when nothing was clipped.",
           _weights(lambda w: w.clip_ratio)),
    Family("swarmnode_weights_lag", "gauge", "Outer steps that the last partner was behind; negative when ahead.",
           _weights(lambda w: w.lag)),
    Family("swarmnode_weights_momentum_norm", "gauge", "Norm of the outer momentum.", _weights(lambda w: w.momentum_norm)),
    Family("swarmnode_weights_reverts_total", "counter", "Exchanges taken back because held-out reward fell.",
           _weights(lambda w: w.reverts_total)),
    Family("swarmnode_weights_stall_seconds_total", "counter", "Seconds that training stood still for averaging.",
           _weights(lambda w: w.stall_seconds_total)),
    # crews
    Family("swarmnode_crew_state", "gauge", "1 for the state of this node's crew, 0 for the rest.",
           _crew(lambda c: {state: float(state == c.state) for state in CREW_STATES}), ("state",), CREW_STATES),
    Family("swarmnode_crew_slots", "gauge", "Stages of this node's crew, by state.",
           _crew(lambda c: dict(Counter(slot.state for slot in c.slots))), ("state",), SLOT_STATES),
    Family("swarmnode_crew_roster_epoch", "gauge", "Rosters that the crew has had.", _stage(lambda c: c.roster_epoch)),
    Family("swarmnode_crew_fenced", "gauge", "1 while no majority of the crew hears this node, so that it takes no step.",
           _stage(lambda c: float(c.fenced))),
    Family("swarmnode_crew_offers", "gauge", "Other nodes that would hold a stage.", _crew(lambda c: c.offers)),
    Family("swarmnode_crew_standing_seconds", "gauge", "Since the crew last took steps; 0 while it does.",
           _crew(lambda c: c.standing_seconds)),
    Family("swarmnode_crew_events_total", "counter", "What happened in this node's crews.", _crew(lambda c: c.events), ("event",), NOTES),
    Family("swarmnode_crew_recovery_seconds", "histogram", "From a crew's standing still to its running again.",
           _crew(lambda c: c.recovery_seconds)),
    Family("swarmnode_crew_heartbeat_seconds", "gauge", "That the last heartbeat to another member waited for its answer.",
           _stage(lambda c: c.heartbeat_seconds)),
    Family("swarmnode_crew_unanswered_total", "counter", "Requests to other members without an answer, by message.",
           _crew(lambda c: c.unanswered), ("message",), SAID),
    Family("swarmnode_crew_malformed_total", "counter", "Requests about crews that were none.", _crew(lambda c: c.malformed)),
    Family("swarmnode_crew_unsaved_total", "counter", "Votes not cast because they could not be written to disk.",
           _crew(lambda c: c.unsaved)),
    Family("swarmnode_stage_trainer_restarts_total", "counter", "Times that the trainer was ended because it had work and did none.",
           _crew(lambda c: c.trainer_restarts)),
    Family("swarmnode_stage_index", "gauge", "Which stage this node holds; 0 publishes and trains.", _stage(lambda c: c.stage)),
    Family("swarmnode_stage_phase", "gauge", "1 for what this node's stage is doing, 0 for the rest.",
           _stage(lambda c: {phase: float(phase == c.phase) for phase in STAGE_PHASES}), ("phase",), STAGE_PHASES),
    Family("swarmnode_stage_step", "gauge", "Steps that this node's stage has taken.", _stage(lambda c: c.step)),
    Family("swarmnode_stage_rungs_total", "counter", "Where this node's stages came from, R0 to R6, best first.",
           _crew(lambda c: c.rungs), ("rung",), tuple(filter(None, RUNGS))),
    Family("swarmnode_stage_rung_seconds", "gauge", "That the last rung took.", _stage(lambda c: c.rung_seconds)),
    Family("swarmnode_stage_shadow_age_steps", "gauge", "Steps since the newest copy of this node's stage that a neighbour has.",
           _stage(lambda c: c.shadow_age_steps)),
    Family("swarmnode_stage_probe_kl", "gauge", "KL divergence over the last recovery, nats per token: before against after.",
           _stage(lambda c: c.probe_kl)),
    Family("swarmnode_stage_bubble_share", "gauge", "Share of the last step in which this node's stage waited.",
           _stage(lambda c: c.bubble_share)),
    Family("swarmnode_stage_tokens_per_second", "gauge", "Tokens that go through this node's stage.",
           _stage(lambda c: c.tokens_per_second)),
    Family("swarmnode_stage_frames_dropped_total", "counter", "Frames of the crew that counted for nothing, by reason.",
           _crew(lambda c: c.dropped), ("reason",), (*FENCE_REASONS, *FRAME_REASONS, DEVICE)),
    Family("swarmnode_stage_streams", "gauge", "Open streams to other stages, by kind.", _crew(lambda c: c.streams), ("kind",), KINDS),
    Family("swarmnode_stage_streams_lost_total", "counter", "Streams that the other side ended, or that broke, by kind.",
           _crew(lambda c: c.streams_lost), ("kind",), KINDS),
    Family("swarmnode_stage_streams_refused_total", "counter", "Streams of peers that were not taken, by reason.",
           _crew(lambda c: c.streams_refused), ("reason",), STREAM_REFUSALS),
    Family("swarmnode_stage_bytes_total", "counter", "Bytes between stages, by kind and direction.",
           _crew(lambda c: {(kind, way): n for kind, ways in c.bytes.items() for way, n in ways.items() if way in DIRECTIONS}),
           ("kind", "direction")),
    Family("swarmnode_stage_throttled_seconds_total", "counter", "Seconds that streams between stages waited for the byte budget.",
           _crew(lambda c: c.throttled_seconds)),
    # what peers say of themselves
    Family("swarmnode_claimed_peers", "gauge", "Peers with a recent summary of themselves, connected or not; claimed, not verified.",
           lambda s: s.swarm.reporting),
    Family("swarmnode_claimed_reward_median", "gauge", "Median of the held-out rewards that peers claim.", lambda s: s.swarm.reward_median),
    Family("swarmnode_claimed_policy_version_median", "gauge", "Median of the policy versions that peers claim.",
           lambda s: s.swarm.policy_version_median),
    Family("swarmnode_summaries_total", "counter", "Summaries from peers, by what became of them.",
           lambda s: s.swarm.heard, ("outcome",), HEARD),
    Family("swarmnode_clock_offset_seconds", "gauge", "By how much peers' clocks are ahead of this one, their median; two peers at least.",
           lambda s: s.swarm.clock_offset_seconds),
    # budget
    Family("swarmnode_budget_paused", "gauge", "1 while this keeps the node from listening to the swarm.",
           lambda s: {reason: float(paused) for reason, paused in s.budget.paused.items()}, ("reason",), PAUSES),
    Family("swarmnode_budget_level_bytes", "gauge", "What may go by at once; below 0 in debt. Only for directions with a cap.",
           lambda s: s.budget.level_bytes, ("direction",)),
    Family("swarmnode_budget_month_bytes", "gauge", "Bytes of this calendar month, kept over restarts.",
           lambda s: s.budget.month_bytes, ("direction",), DIRECTIONS),
    Family("swarmnode_budget_month_limit_bytes", "gauge", "At this many bytes, both directions together, sharing pauses.",
           lambda s: s.budget.month_limit_bytes),
    Family("swarmnode_budget_refusals_total", "counter", "What was left out for want of budget.",
           lambda s: s.budget.refused, ("what",), CHOICES),
    # disk
    Family("swarmnode_disk_free_bytes", "gauge", "Room on the data directory's file system, for this user.", lambda s: s.disk.free_bytes),
    Family("swarmnode_disk_size_bytes", "gauge", "Size of the data directory's file system.", lambda s: s.disk.total_bytes),
    # processes
    Family("swarmnode_restarts_total", "counter", "Restarts by the supervisor, by process.",
           lambda s: s.supervisor.restarts, ("process",), PROCESSES),
    Family("swarmnode_stalls_total", "counter", "Restarts because a process made no progress in time, by process.",
           lambda s: s.supervisor.stalls, ("process",), PROCESSES),
    Family("swarmnode_recovery_seconds", "histogram", "From a process's death to its first progress again.",
           lambda s: s.supervisor.recovery_seconds),
    Family("swarmnode_scorer_restarts_total", "counter", "Scorers replaced because they died or overran, by the process that asks them.",
           _scorer_restarts, ("process",), PROCESSES),
    Family("swarmnode_process_memory_bytes", "gauge", "Resident memory, by process.",
           lambda s: {name: use.memory_bytes for name, use in s.processes.items()}, ("process",)),
    Family("swarmnode_process_cpu_seconds_total", "counter", "User and system CPU time, by process.",
           lambda s: {name: use.cpu_seconds for name, use in s.processes.items()}, ("process",)),
)  # fmt: skip


def collect(family: Family, snapshot: NodeSnapshot) -> Metric:
    """One family of one snapshot, in prometheus_client's terms."""
    value = family.read(snapshot)
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help)
        if isinstance(value, Histogram):
            bounds = [*(str(float(b)) for b in value.bounds), "+Inf"]
            histogram.add_metric([], list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
        return histogram
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(family.name, family.help, labels=family.labels)
    if not family.labels:
        if isinstance(value, int | float):
            metric.add_metric([], value)
    elif value is not None:
        assert isinstance(value, Mapping)
        for labels, number in _closed(family, value).items():
            if number is not None:
                metric.add_metric(labels, number)
    return metric


def _closed(family: Family, value: Mapping) -> dict[Labels, float | None]:
    """Label values → number: the declared ones first, at 0 unless told otherwise; strange and surplus ones summed up as `other`."""
    found: dict[Labels, float | None] = {(name,): 0 for name in family.values}
    for key, number in value.items():
        labels = (key,) if isinstance(key, str) else key
        if family.kind != "info" and labels not in found:
            fits = len(found) < MAX_LABEL_VALUES and all(LABEL_VALUE.fullmatch(label) for label in labels)
            if not fits:
                labels = ("other", *labels[1:])
                number = None if number is None else number + (found.get(labels) or 0)
        found[labels] = number
    return found


class NodeCollector(Collector):
    """Takes one snapshot per scrape, so that the numbers of one scrape belong together."""

    def __init__(self, snapshot: Callable[[], NodeSnapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Names and types without values: registering must not need a running node."""
        return [Metric(family.name, family.help, "gauge" if family.kind == "info" else family.kind) for family in METRICS]

    def collect(self) -> Iterable[Metric]:
        snapshot = self._snapshot()
        for family in METRICS:
            yield collect(family, snapshot)


def make_registry(snapshot: Callable[[], NodeSnapshot]) -> CollectorRegistry:
    """A registry of its own: nothing that a library registers globally leaks into /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(snapshot))
    return registry
