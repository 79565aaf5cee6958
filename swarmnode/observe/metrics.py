"""The table of everything that /metrics exports.

A row names a metric, the place of its numbers in the snapshot, and its meaning for an operator.
`collector.py` reads the rows at each scrape. deploy/grafana/build.py writes them into
docs/monitoring.md and onto the dashboards; tests/deploy check that nothing is missing there.

A metric is in the table only if an alert or a panel needs it. /status has every other number.
Names follow https://prometheus.io/docs/practices/naming/: `swarmnode_`, base units, `_total` for
counters. Label values come from the keys of the snapshot's own dicts, which this node's code
chooses. A peer id is never a label, except this node's own in `swarmnode_node_info`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from swarmnode.histogram import Histogram
from swarmnode.observe import computed
from swarmnode.observe.computed import Counts, Labels, Number
from swarmnode.observe.health import ready
from swarmnode.observe.snapshot import NodeSnapshot

Value = Number | Histogram | Counts
Source = str | Mapping[str, str] | Callable[[NodeSnapshot], Value]
Condition = Callable[[NodeSnapshot], bool]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        source: Place of its numbers.
            A path into the snapshot, `network.peers.known`: a number, a histogram, or a dict of
            numbers by label value.
            A dict of paths by label value, {"in": …, "out": …}. If a path leads to a dict, the key
            of that dict is the first label and the key of `source` is the last.
            A function of the snapshot, for numbers that are computed from several.
        when: Condition for its existence on this node. Without series, nothing is measured.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    source: Source
    help: str
    labels: Labels = ()
    when: Condition | None = None

    def exists(self, snapshot: NodeSnapshot) -> bool:
        """Return True if `when` and the conditions of its part of the snapshot are met."""
        conditions = [
            condition
            for part, condition in CONDITIONS.items()
            if isinstance(self.source, str) and self.source.startswith(part)
        ]
        if self.when is not None:
            conditions.append(self.when)
        return all(condition(snapshot) for condition in conditions)


def averages_weights(s: NodeSnapshot) -> bool:
    """Return True if this node averages its weights with peers."""
    return s.weights.enabled


def trainer_reports(s: NodeSnapshot) -> bool:
    """Return True once the trainer has loaded its state.

    Before that its counters are 0, and their jump would look like work.
    """
    report = s.trainer.report
    return report is not None and not (report.phase == "loading" and report.step == 0)


def has_server(s: NodeSnapshot) -> bool:
    """Return True if the trainer reports on an inference server."""
    return (
        trainer_reports(s) and s.trainer.report is not None and s.trainer.report.server is not None
    )


def has_crew(s: NodeSnapshot) -> bool:
    """Return True if this node holds a stage of a policy, or offers to."""
    return s.stages.enabled


def has_stage(s: NodeSnapshot) -> bool:
    """Return True if this node holds a stage now."""
    return s.stages.enabled and s.stages.crew.stage is not None


CONDITIONS: dict[str, Condition] = {
    "trainer.report.": trainer_reports,
    "trainer.report.weights.": averages_weights,
    "weights.": averages_weights,
    "stages.": has_crew,
}
"""Conditions of all paths that begin with the key."""


# ---- the table -----------------------------------------------------------------------------------

NODE = (
    Metric(
        "swarmnode_node_info",
        "info",
        computed.node_info,
        "Identity, model, device and versions of this node, as labels; the value is 1.",
        ("peer", "name", "swarm", "swarm_name", "model", "device", "dtype", "version", "python"),
    ),
    Metric(
        "swarmnode_ready",
        "gauge",
        lambda s: float(ready(s).ok),
        "1 while /readyz answers 200: the network is up and the policy or stage is loaded.",
    ),
    Metric(
        "swarmnode_event_loop_lag_seconds",
        "gauge",
        "loop_lag_seconds",
        "Delay of the last timer in the network process. Above 1 s, the machine is overloaded and"
        " peers drop the node.",
    ),
)

TRAINING = (
    Metric(
        "swarmnode_trainer_phase",
        "gauge",
        computed.trainer_phase,
        "1 for the present phase of the trainer. `disconnected`: it has ended or not started yet.",
        ("phase",),
    ),
    Metric(
        "swarmnode_steps_total",
        "counter",
        "trainer.report.step",
        "Finished training steps since the node's first start; restarts do not reset it.",
    ),
    Metric(
        "swarmnode_policy_version",
        "gauge",
        "trainer.report.policy_version",
        "Steps that changed the policy. A step changes nothing if all rewards of each group are"
        " equal.",
    ),
    Metric(
        "swarmnode_step_seconds",
        "histogram",
        "trainer.step_seconds",
        "Duration of training steps, sampling included.",
    ),
    Metric(
        "swarmnode_phase_seconds",
        "gauge",
        {
            "generating": "trainer.report.generate_seconds",
            "training": "trainer.report.train_seconds",
        },
        "Duration of the two parts of the last step: sampling and update.",
        ("phase",),
        when=trainer_reports,
    ),
    Metric(
        "swarmnode_reward",
        "gauge",
        computed.reward,
        "Mean reward, 0 to 1, of the last step's own completions, of peers' completions in the"
        " last batch (`external`), and of the held-out questions now and when they were first"
        " asked (`held_out_start`). After a change of tasks, `questions` has another value.",
        ("source", "questions"),
        when=trainer_reports,
    ),
    Metric(
        "swarmnode_reward_held_out_error",
        "gauge",
        "trainer.report.reward_held_out_error",
        "Standard error of the held-out reward. A change below two standard errors may be noise.",
    ),
    Metric(
        "swarmnode_task_reward",
        "gauge",
        "trainer.report.reward_by_task",
        "Mean reward of own completions, 0 to 1, in the last step with the task. A task that"
        " stays at 0 or 1 teaches nothing.",
        ("task",),
    ),
    Metric(
        "swarmnode_reward_errors_total",
        "counter",
        computed.reward_errors,
        "Own and peers' completions that scored 0 because the reward function failed or returned"
        " no number from 0 to 1.",
        ("task",),
    ),
    Metric(
        "swarmnode_sandbox_refusals_total",
        "counter",
        computed.refusals,
        "Actions of a task's code that the scorer's sandbox refused, such as an import. The code"
        " may catch the error, so rewards may be wrong.",
        ("task",),
    ),
    Metric(
        "swarmnode_zero_advantage_share",
        "gauge",
        "trainer.report.zero_advantage_share",
        "Share of own groups whose rewards are all equal. Near 1, the tasks are too hard or too"
        " easy.",
    ),
    Metric(
        "swarmnode_entropy",
        "gauge",
        "trainer.report.entropy",
        "Entropy of the policy in nats per token. Near 0, it gives the same answer each time.",
    ),
    Metric(
        "swarmnode_gradient_norm",
        "gauge",
        "trainer.report.grad_norm",
        "Norm of the last step's gradient before clipping. No series: the gradient was not finite.",
    ),
    Metric(
        "swarmnode_completion_tokens",
        "gauge",
        {
            "mean": "trainer.report.completion_tokens",
            "p95": "trainer.report.completion_tokens_p95",
        },
        "Length of own completions in the last step: mean and 95th percentile.",
        ("statistic",),
        when=trainer_reports,
    ),
    Metric(
        "swarmnode_completion_cut_share",
        "gauge",
        "trainer.report.completion_cut_share",
        "Share of the last step's completions that reached training.max_completion_length. If it"
        " stays above 0.2, raise that setting.",
    ),
    Metric(
        "swarmnode_cut_rewarded_share",
        "gauge",
        "trainer.report.cut_rewarded_share",
        "Share of the last step's completions that reached training.max_completion_length and"
        " earned 1, so that the policy does not learn to stop.",
    ),
    Metric(
        "swarmnode_trained_groups_total",
        "counter",
        {
            "own": "trainer.report.own_groups_total",
            "external": "trainer.report.external_groups_total",
        },
        "Groups that this node has trained on: own, and peers' (`external`).",
        ("source",),
        when=trainer_reports,
    ),
    Metric(
        "swarmnode_dropped_total",
        "counter",
        computed.dropped,
        "Dropped items by kind and reason. `update`: a step that changed nothing. `question`,"
        " `held_out`: a question that was not asked. `completion`: not trained on or not shared."
        " `group`: an own group that was not shared. `pooled_group`: a peer's group that did"
        " not enter the pool (`refused`) or left it unused. `message`: lost between the node's"
        " processes. The log has each reason once.",
        ("kind", "reason"),
    ),
    Metric(
        "swarmnode_tokens_total",
        "counter",
        computed.tokens,
        "Sampled tokens, for training and in held-out evaluations.",
        ("use",),
        when=trainer_reports,
    ),
    Metric(
        "swarmnode_tokens_per_second",
        "gauge",
        "trainer.report.tokens_per_second",
        "Tokens that the last step sampled, divided by its duration.",
    ),
    Metric(
        "swarmnode_environment_share",
        "gauge",
        "trainer.report.environment_share",
        "Share of the last step's sampling time spent waiting for environments; only with tasks"
        " of several turns.",
    ),
    Metric(
        "swarmnode_device_memory_bytes",
        "gauge",
        "trainer.report.device_memory_bytes",
        "Peak memory of the trainer on its accelerator.",
    ),
    Metric(
        "swarmnode_out_of_memory_retries_total",
        "counter",
        "trainer.report.oom_retries_total",
        "Micro-batches that ran out of memory and were repeated in halves. A few at the start are"
        " normal.",
    ),
    Metric(
        "swarmnode_server_failures_total",
        "counter",
        computed.server_failures,
        "Failures of the inference server, after which the node's own engine took over.",
        ("reason",),
        when=trainer_reports,
    ),
    Metric(
        "swarmnode_server_sampling",
        "gauge",
        computed.server_sampling,
        "1 while the server of policy.server.url samples, 0 while the node's own engine does.",
        when=has_server,
    ),
    Metric(
        "swarmnode_sampler_gap",
        "gauge",
        "trainer.report.own_gap",
        "Mean absolute difference between the log-probabilities of the sampling engine and the"
        " trainer, in nats. Rounding is about 0.00001 in float32 and 0.01 in 16 bits.",
    ),
    Metric(
        "swarmnode_unsaved_steps",
        "gauge",
        computed.unsaved_steps,
        "Steps that a crash of the trainer would lose now.",
        when=trainer_reports,
    ),
    Metric(
        "swarmnode_state_due_timestamp_seconds",
        "gauge",
        "trainer.report.state_due_at",
        "Unix time at which a save of the trainer's state became due that is not on disk. No"
        " series: none is due.",
    ),
    Metric(
        "swarmnode_state_save_failed",
        "gauge",
        computed.state_save_failed,
        "1 if the last save of the trainer's state failed, else 0.",
        when=trainer_reports,
    ),
)

SHARING = (
    Metric(
        "swarmnode_effective_sample_share",
        "gauge",
        {"own": "trainer.report.effective_own", "external": "trainer.report.effective_external"},
        "Effective sample size of the last batch's tokens as a share of their number. Low for"
        " `own`: the engine's policy differs from the trainer's. Low for `external`: peers' texts"
        " have stretches that this policy would not sample.",
        ("source",),
        when=trainer_reports,
    ),
    Metric(
        "swarmnode_learning_problem",
        "gauge",
        computed.learning_problem,
        "1 if the reward of own groups has not moved in 20 steps with an update (`unmoved`), or has"
        " fallen to less than half of its best (`collapsed`); else 0.",
        ("problem",),
        when=trainer_reports,
    ),
)

ROLLOUTS = (
    Metric(
        "swarmnode_rollouts_published_total",
        "counter",
        "rollouts.published",
        "Own groups that this node has offered to peers.",
    ),
    Metric(
        "swarmnode_rollouts_admission_total",
        "counter",
        computed.admission,
        "Groups of peers by verdict and reason. `ignored`: normal, such as a duplicate."
        " `rejected`: provably wrong; honest nodes cause none.",
        ("verdict", "reason"),
    ),
    Metric(
        "swarmnode_rollouts_judged_total",
        "counter",
        "rollouts.judged",
        "Groups of peers that the trainer examined: `used`, or the reason of the refusal. Only"
        " `forged_ids` proves a lie.",
        ("outcome",),
    ),
    Metric(
        "swarmnode_rollouts_false_listings_total",
        "counter",
        "rollouts.pulling.claims.faults",
        "False listings of peers and requests without a response. `absent`, `slow` and"
        " `trajectory` also occur with honest peers.",
        ("kind",),
    ),
    Metric(
        "swarmnode_rollouts_served_total",
        "counter",
        "rollouts.serving.served",
        "Responses to peers' polls and fetches. `busy`: the peer's allowance or this node's"
        " budget is used up.",
        ("outcome",),
    ),
    Metric(
        "swarmnode_rollout_staleness_versions",
        "histogram",
        computed.staleness,
        "Policy versions between the arrival of a peer's group and its use.",
    ),
    Metric(
        "swarmnode_pool_groups",
        "gauge",
        "rollouts.pool.groups",
        "Groups of peers that wait in the pool. A full pool is normal: peers send more than this"
        " node uses.",
    ),
)

NETWORK = (
    Metric(
        "swarmnode_peers",
        "gauge",
        {"in": "network.peers.inbound", "out": "network.peers.outbound"},
        "Connected peers. `in`: the peer dialled. `out`: this node dialled.",
        ("direction",),
    ),
    Metric(
        "swarmnode_peers_known",
        "gauge",
        "network.peers.known",
        "Peers whose address this node knows, connected or not. 0: a swarm of one.",
    ),
    Metric(
        "swarmnode_peers_excluded",
        "gauge",
        {
            "greylisted": "network.reputation.greylisted",
            "banned": "network.reputation.banned",
        },
        "Peers with low reputation, for a time. `greylisted`: their groups are ignored. `banned`:"
        " connections are refused.",
        ("state",),
    ),
    Metric(
        "swarmnode_reach",
        "gauge",
        lambda s: {str(s.network.nat.reach.verdict): 1},
        "1 for the present verdict. `public`: strangers can dial this node. `private`: only"
        " through a relay. `unknown`: not tested yet.",
        ("verdict",),
    ),
    Metric(
        "swarmnode_relays",
        "gauge",
        lambda s: len(s.network.nat.client.relays),
        "Relays through which peers can reach this node. A private node with 0 can only dial out.",
    ),
    Metric(
        "swarmnode_relay_bytes_total",
        "counter",
        "network.nat.relay.bytes",
        "Bytes that this node has carried between other nodes as a relay.",
    ),
    Metric(
        "swarmnode_dials_total",
        "counter",
        computed.dials,
        "Attempts to connect, with a plain dial or a hole punch. Failed dials are normal: address"
        " books contain nodes that are gone.",
        ("method", "outcome"),
    ),
    Metric(
        "swarmnode_requests_total",
        "counter",
        computed.requests,
        "Requests sent (`out`) and received (`in`). `busy` and `unwelcome` ones were refused;"
        " `error` is a defect of this node.",
        ("direction", "outcome"),
    ),
    Metric(
        "swarmnode_network_bytes_total",
        "counter",
        {"in": "network.traffic.received", "out": "network.traffic.sent"},
        "Bytes by protocol, without the overhead of encryption and multiplexing.",
        ("protocol", "direction"),
    ),
    Metric(
        "swarmnode_guard_firings_total",
        "counter",
        "network.guards",
        "Interventions of the guards around libp2p. A steady rate means that a peer sends what no"
        " honest node sends.",
        ("guard",),
    ),
)

WEIGHTS = (
    Metric(
        "swarmnode_weights_exchanges_total",
        "counter",
        "weights.outcomes",
        "Outer steps in a swap (`applied`) and without a partner (`solo`), proposals without a"
        " swap (`busy`, `refused`, `unreachable`), and swaps that `failed`. `applied` includes"
        " swaps with weight 0: `lagging` of `swarmnode_weights_judged_total`.",
        ("outcome",),
    ),
    Metric(
        "swarmnode_weights_failures_total",
        "counter",
        "weights.failures",
        "Failed swaps by cause: the connection, the partner, or this node (`local`, `snapshot`,"
        " `apply_timeout`, `no_trainer`).",
        ("cause",),
    ),
    Metric(
        "swarmnode_weights_judged_total",
        "counter",
        "weights.judged",
        "Partners' weights at the gate. `probe`: the average made the policy worse and was not"
        " applied.",
        ("outcome",),
    ),
    Metric(
        "swarmnode_weights_candidates",
        "gauge",
        "weights.candidates",
        "Connected peers that train the same policy. With 0, this node takes solo steps.",
    ),
    Metric(
        "swarmnode_weights_distance",
        "gauge",
        "trainer.report.weights.distance",
        "Distance of the last partner's weights, as a share of this node's norm. Replicas that"
        " train together stay within a few percent.",
    ),
    Metric(
        "swarmnode_weights_stall_seconds_total",
        "counter",
        "trainer.report.weights.stall_seconds_total",
        "Seconds for which averaging stopped the training.",
    ),
)

STAGES = (
    Metric(
        "swarmnode_crew_state",
        "gauge",
        lambda s: {str(s.stages.crew.state): 1},
        "1 for the present state of this node's crew. Only a `running` crew takes steps.",
        ("state",),
        when=has_crew,
    ),
    Metric(
        "swarmnode_crew_offers",
        "gauge",
        "stages.crew.offers",
        "Other nodes that offer to hold a stage. With 0, no node can replace a lost member.",
    ),
    Metric(
        "swarmnode_crew_stopped_seconds",
        "gauge",
        "stages.crew.stopped_seconds",
        "Seconds since this node's crew last ran; 0 while it runs. After ten minutes its nodes"
        " start again from the base model.",
    ),
    Metric(
        "swarmnode_crew_events_total",
        "counter",
        "stages.events",
        "Events of this node's crews. `proposed`, `formed`, `running`: phases of a crew. `broken`:"
        " a crew ended. `declined`: this node refused a proposal. `unformed`: a proposed crew did"
        " not form. `struck`: a peer missed a deadline or sent an invalid message.",
        ("event",),
    ),
    Metric(
        "swarmnode_crew_recovery_seconds",
        "histogram",
        "stages.recoveries",
        "Seconds from the end of a running crew until a crew runs again.",
        when=has_crew,
    ),
    Metric(
        "swarmnode_stage_index",
        "gauge",
        "stages.crew.stage",
        "Stage that this node holds. 0 is the head, which trains and publishes.",
    ),
    Metric(
        "swarmnode_stage_phase",
        "gauge",
        lambda s: {str(s.stages.own.phase): 1} if s.stages.own else {},
        "1 for the present phase of this node's stage.",
        ("phase",),
        when=has_stage,
    ),
    Metric(
        "swarmnode_stage_restorations_total",
        "counter",
        "stages.sources",
        "Restorations of this node's stages. `base` loses what the stage had learned.",
        ("source",),
    ),
    Metric(
        "swarmnode_stage_checkpoint_age_steps",
        "gauge",
        "stages.own.checkpoint_age_steps",
        "Steps since the newest checkpoint of this stage at a neighbour: the cost of losing this"
        " node and its disk.",
        when=has_stage,
    ),
    Metric(
        "swarmnode_stage_bubble_share",
        "gauge",
        "stages.own.bubble_share",
        "Share of the last step in which this node's stage waited for other stages.",
        when=has_stage,
    ),
    Metric(
        "swarmnode_stage_throttled_seconds_total",
        "counter",
        "stages.streams.throttled_seconds",
        "Seconds for which streams between stages waited for the byte budget. If it grows, the"
        " caps are too low.",
    ),
    Metric(
        "swarmnode_stage_refusals_total",
        "counter",
        computed.stage_refusals,
        "Refused items between stages. `crew` and `step` are usual after the end of a crew, and"
        " `timeout` and `lacking` (an announced body did not arrive) at it; other reasons show a"
        " defect or a hostile member.",
        ("kind", "reason"),
        when=has_crew,
    ),
)

CLAIMED = (
    Metric(
        "swarmnode_claimed_peers",
        "gauge",
        "swarm.reporting",
        "Nodes of the swarm with a recent signed summary, connected or not. Summaries are not"
        " verified.",
    ),
    Metric(
        "swarmnode_claimed_reward_median",
        "gauge",
        "swarm.reward_median",
        "Median of the held-out rewards in other nodes' summaries.",
    ),
    Metric(
        "swarmnode_clock_offset_seconds",
        "gauge",
        "swarm.clock_offset_seconds",
        "Median of peers' clocks minus this node's, from at least two peers. Beyond 120 s groups"
        " are dropped.",
    ),
)

BUDGET = (
    Metric(
        "swarmnode_budget_paused",
        "gauge",
        "budget.paused",
        "1 while this reason stops the node from fetching groups. `owner`: `swarmnode pause`.",
        ("reason",),
    ),
    Metric(
        "swarmnode_budget_month_bytes",
        "gauge",
        "budget.month_bytes",
        "Bytes received and sent in this calendar month; restarts do not reset it.",
        ("direction",),
    ),
    Metric(
        "swarmnode_budget_month_limit_bytes",
        "gauge",
        "budget.month_limit_bytes",
        "Bytes per calendar month at which sharing pauses; only with network.monthly_bytes.",
    ),
    Metric(
        "swarmnode_budget_refusals_total",
        "counter",
        "budget.refused",
        "Actions that were skipped because a cap or the monthly limit was reached.",
        ("action",),
    ),
)

MACHINE = (
    Metric(
        "swarmnode_successor_waiting",
        "gauge",
        "successor.waiting",
        "1 while a successor of this swarm is signed and the node has not moved there.",
    ),
    Metric(
        "swarmnode_disk_free_bytes",
        "gauge",
        "disk.free_bytes",
        "Free bytes on the data directory's file system. With 0, state is not saved.",
    ),
    Metric(
        "swarmnode_disk_size_bytes",
        "gauge",
        "disk.total_bytes",
        "Size of the data directory's file system.",
    ),
    Metric(
        "swarmnode_restarts_total",
        "counter",
        computed.restarts,
        "Restarts by the supervisor. `ended`: the process exited. `stalled`: it made no progress"
        " in time.",
        ("process", "reason"),
    ),
    Metric(
        "swarmnode_scorer_restarts_total",
        "counter",
        computed.scorer_restarts,
        "Scorers that were replaced because they died or took too long. An answer that kills a"
        " scorer costs only time.",
        ("process",),
    ),
    Metric(
        "swarmnode_process_memory_bytes",
        "gauge",
        lambda s: {name: use.memory_bytes for name, use in s.processes.items()},
        "Resident memory by process.",
        ("process",),
    ),
    Metric(
        "swarmnode_process_cpu_seconds_total",
        "counter",
        lambda s: {name: use.cpu_seconds for name, use in s.processes.items()},
        "CPU time since the start of the process.",
        ("process",),
    ),
)

METRICS: tuple[Metric, ...] = (
    *NODE,
    *TRAINING,
    *SHARING,
    *ROLLOUTS,
    *NETWORK,
    *WEIGHTS,
    *STAGES,
    *CLAIMED,
    *BUDGET,
    *MACHINE,
)
