"""The table of everything that /metrics exports.

A row says where in the snapshot a number is (its path), and what an operator must know to read it.
Nothing else has to change for a number that a part already counts: `collector.py` reads the path
when somebody scrapes, and docs/monitoring.md and the dashboards are held to the table by
tests/deploy. Names follow https://prometheus.io/docs/practices/naming/: `swarmnode_`, base units,
`_total` for counters.

Peer ids would make a new series per stranger, so they appear in `swarmnode_node_info` only, and
there only our own. Label values are closed sets: those listed in a row are there from the start, at
0; the rest comes from dict keys of our own parts; what does not look like one, or is one too many,
is counted as `other`.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import swarmnode
from swarmnode.observe.health import ready
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.observe.watch import Histogram
from swarmnode.p2p.budget import CHOICES, PAUSES
from swarmnode.p2p.peers import DROP_REASONS
from swarmnode.p2p.summaries import OUTCOMES as SUMMARY_OUTCOMES
from swarmnode.policy.engine.client import Reason
from swarmnode.policy.engine.servers import ServerStatistics
from swarmnode.rollouts.claims import LIES
from swarmnode.rollouts.groups import Outcome
from swarmnode.rollouts.pull_gossip import LISTINGS, PULLED
from swarmnode.rollouts.pull_gossip import SERVED as ROLLOUTS_SERVED
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.stages.crew import CrewState, SlotState
from swarmnode.stages.service import RECOVERY_BOUNDS as RECOVERY_BOUNDS
from swarmnode.stages.wire import (
    DEVICE_REASON,
    FENCE_REASONS,
    FRAME_REASONS,
    NOTES,
    SOURCES,
    STATE_REFUSALS,
    CrewRequest,
    StagePhase,
    StreamKind,
)
from swarmnode.stages.wire import STREAM_REFUSALS as STREAM_REFUSALS
from swarmnode.weights import exchange, local

Labels = tuple[str, ...]
Number = float | None
Counts = Mapping[str, Number] | Mapping[Labels, Number]
"""Numbers by label value, or by a tuple of them where there are several labels."""
Value = Number | Histogram | Counts
Source = str | Mapping[str, str] | Callable[[NodeSnapshot], Value]
Condition = Callable[[NodeSnapshot], bool]

PHASES = ("loading", "generating", "training", "evaluating", "paused", "draining")
REACH = ("public", "private", "unknown")
PUNCHES = ("succeeded", "failed", "refused")
JUDGED: tuple[str, ...] = get_args(Outcome)
FAILURES: tuple[str, ...] = get_args(Reason)
"""Why an inference server is not used."""
PROCESSES = ("network", "trainer")
REQUESTS = ("ok", "timeout", "failed", "malformed")
SERVED = (*REQUESTS, "busy", "unwelcome", "error")
POOL_DROPS = ("expired_age", "expired_version", "evicted_full", "evicted_peer_share", "refused")
DROPS = {
    "update": ("not_finite", "no_signal", "overflow", "refused"),
    "question": ("no_question", "too_long"),
    "held_out": ("no_question", "not_scored"),
    "group": (
        *("special_ids", "charset", "not_scored"),
        *("zero_advantage", "budget", "rate", "oversize", "invalid", "no_policy", "failed"),
    ),
    "completion": ("charset", "special_ids", "cut", "too_large"),
    "message": ("link_full",),
}
"""Dropped items by kind and reason; see `TrainerDrops` and `Publisher`."""
CREW_STATES: tuple[str, ...] = get_args(CrewState)
SLOT_STATES: tuple[str, ...] = get_args(SlotState)
STAGE_PHASES: tuple[str, ...] = get_args(StagePhase)
KINDS: tuple[str, ...] = get_args(StreamKind)
CREW_MESSAGES: tuple[str, ...] = tuple(
    str(message.__struct_config__.tag) for message in get_args(CrewRequest)
)
IGNORED = tuple(reason for reason, verdict in REASONS.items() if verdict is Verdict.IGNORE)
REJECTED = tuple(reason for reason, verdict in REASONS.items() if verdict is Verdict.REJECT)
STALENESS_BOUNDS = (0, 1, 2, 4, 8)
"""Policy versions."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    source: where its numbers are. A path into the snapshot, `network.peers.known`: a number, a
    histogram, or a dict of numbers by label
        value. Several of them by label value, {"in": …, "out": …}; where these are dicts, their key
        is the first label and this the last. Or a function of the snapshot, for what is counted
        nowhere as it is shown.
    when: whether it exists on this node now; `not measured` is no series, not a 0.
    values: label values that are exported even before anything happened (one label only).
    """

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    source: Source
    help: str
    labels: Labels = ()
    values: tuple[str, ...] = ()
    when: Condition | None = None

    def exists(self, snapshot: NodeSnapshot) -> bool:
        """`when`, and what is asked of everything below the same part."""
        conditions = [
            condition
            for part, condition in CONDITIONS.items()
            if isinstance(self.source, str) and self.source.startswith(part)
        ]
        return all(
            condition(snapshot)
            for condition in (*conditions, *((self.when,) if self.when is not None else ()))
        )


def averages(s: NodeSnapshot) -> bool:
    """A node that averages nothing has no numbers of it."""
    return s.weights.enabled


def reports(s: NodeSnapshot) -> bool:
    """Nothing until the trainer has loaded its state: a counter that starts at 0 and jumps would
    look like work."""
    report = s.trainer.report
    return report is not None and not (report.phase == "loading" and report.step == 0)


def serves(s: NodeSnapshot) -> bool:
    """Return True if the trainer reports on an inference server."""
    return reports(s) and s.trainer.report is not None and s.trainer.report.server is not None


def has_crew(s: NodeSnapshot) -> bool:
    """A node that holds its policy alone has no numbers of a crew."""
    return s.stages.enabled


def has_stage(s: NodeSnapshot) -> bool:
    return s.stages.enabled and s.stages.crew.stage is not None


CONDITIONS: dict[str, Condition] = {
    "trainer.report.": reports,
    "trainer.report.server.": serves,
    "weights.": averages,
    "stages.": has_crew,
}
"""By the beginning of a path."""


# ---- what is counted nowhere as it is shown ------------------------------------------------------


def _one_of(
    values: tuple[str, ...], read: Callable[[NodeSnapshot], str]
) -> Callable[[NodeSnapshot], Counts]:
    """1 for the state that holds, 0 for the others."""
    return lambda s: {value: float(value == read(s)) for value in values}


def _server(s: NodeSnapshot) -> ServerStatistics:
    """Return the server's statistics. Called only if `serves` is True."""
    report = s.trainer.report
    return (report.server if report is not None else None) or ServerStatistics("", "")


def _staleness(s: NodeSnapshot) -> Histogram:
    counts = s.rollouts.pool.staleness
    sized = [0] * (len(STALENESS_BOUNDS) + 1)
    for versions, count in counts.items():
        sized[
            next(
                (i for i, bound in enumerate(STALENESS_BOUNDS) if versions <= bound),
                len(STALENESS_BOUNDS),
            )
        ] += count
    return Histogram(
        tuple(float(b) for b in STALENESS_BOUNDS),
        tuple(sized),
        float(sum(v * c for v, c in counts.items())),
    )


def _by_outcome(
    read: Callable[[NodeSnapshot], Mapping[str, Mapping[str, int]]],
) -> Callable[[NodeSnapshot], Counts]:
    """Counts by protocol and outcome, summed over the protocols."""

    def summed(s: NodeSnapshot) -> Counts:
        total: Counter[str] = Counter()
        for by_outcome in read(s).values():
            total.update(by_outcome)
        return total

    return summed


def _build_info(s: NodeSnapshot) -> dict[Labels, Number]:
    return {(s.node.version or swarmnode.__version__, platform.python_version()): 1}


def _node_info(s: NodeSnapshot) -> dict[Labels, Number]:
    report = s.trainer.report
    device, dtype = (report.device, report.dtype) if report else ("", "")
    return {
        (s.node.peer, s.node.name, s.node.swarm, s.node.swarm_name, s.node.model, device, dtype): 1
    }


def _crew_recoveries(s: NodeSnapshot) -> Histogram:
    return Histogram(RECOVERY_BOUNDS, s.stages.recovery_counts, s.stages.recovery_seconds_total)


def _scorer_restarts(s: NodeSnapshot) -> Counts:
    return {
        "network": max(0, s.scorer.starts - 1),
        "trainer": s.trainer.report.scorer_restarts_total if s.trainer.report else None,
    }


def _reward_errors(s: NodeSnapshot) -> Counts:
    """Also of tasks without one, so that their increase can be asked for."""
    counts = Counter(dict.fromkeys(s.node.tasks, 0))
    counts.update(s.scorer.reward_errors)
    counts.update(s.trainer.report.reward_errors if s.trainer.report else {})
    return counts


def _dropped(s: NodeSnapshot) -> dict[Labels, Number]:
    """By kind and reason. A peer's groups have metrics of their own."""
    found: dict[Labels, Number] = {
        (what, why): 0 for what, reasons in DROPS.items() for why in reasons
    }
    report = s.trainer.report
    counts = [(what, c.dropped) for what, c in report.drops.items()] if report else []
    for what, dropped in [*counts, ("group", s.rollouts.unpublished)]:
        for why, count in dropped.items():
            if (what, why) in found:
                found[what, why] = (found[what, why] or 0) + count
    return found


def _trainer_phase(s: NodeSnapshot) -> Counts:
    return {s.trainer.report.phase: 1} if s.trainer.report and s.trainer.connected else {}


# ---- the table -----------------------------------------------------------------------------------

NODE = (
    Metric(
        "swarmnode_build_info",
        "info",
        _build_info,
        "Versions of swarmnode and of Python that this node runs, as labels; the value is"
        " always 1.",
        ("version", "python"),
    ),
    Metric(
        "swarmnode_node_info",
        "info",
        _node_info,
        "Who this node is, as labels; the value is always 1. It is the only metric with a peer id,"
        " this node's own.",
        ("peer", "name", "swarm", "swarm_name", "model", "device", "dtype"),
    ),
    Metric(
        "swarmnode_start_time_seconds",
        "gauge",
        "node.started_at",
        "Unix time at which the network process started.",
    ),
    Metric(
        "swarmnode_ready",
        "gauge",
        lambda s: float(ready(s).ok),
        "1 while the node does its job, so that /readyz answers 200; otherwise 0, and /readyz says"
        " why.",
    ),
    Metric(
        "swarmnode_check_ok",
        "gauge",
        {
            "network": "health.network_ready",
            "policy": "health.policy_loaded",
            "joined": "health.joined",
        },
        "1 when a part is up: `network` listens, `policy` is loaded, `joined` means that a peer was"
        " connected since the start.",
        ("check",),
    ),
    Metric(
        "swarmnode_event_loop_lag_seconds",
        "gauge",
        "loop_lag_seconds",
        "Seconds by which the network process woke a waiting task too late. Above 1 s peers take"
        " the node for slow: the machine has too much to do.",
    ),
)

LEARNING = (
    Metric(
        "swarmnode_trainer_connected",
        "gauge",
        "trainer.connected",
        "1 while the trainer is connected to the network process. The supervisor restarts a trainer"
        " that is gone; its log says why.",
    ),
    Metric(
        "swarmnode_trainer_report_age_seconds",
        "gauge",
        "trainer.age_seconds",
        "Seconds since the trainer last reported a step, an evaluation or a change of phase.",
    ),
    Metric(
        "swarmnode_trainer_phase",
        "gauge",
        _trainer_phase,
        "1 for what the trainer is doing now, 0 for everything else.",
        ("phase",),
        PHASES,
    ),
    Metric(
        "swarmnode_steps_total",
        "counter",
        "trainer.report.step",
        "Training steps that this node has finished since its first start, restarts included.",
    ),
    Metric(
        "swarmnode_policy_version",
        "gauge",
        "trainer.report.policy_version",
        "Version of the node's policy: the number of steps that changed it. It lags behind the"
        " steps where all rewards were equal.",
    ),
    Metric(
        "swarmnode_step_seconds",
        "histogram",
        "trainer.step_seconds",
        "How long training steps took in seconds, generation included.",
    ),
    Metric(
        "swarmnode_phase_seconds",
        "gauge",
        {
            "generating": "trainer.report.generate_seconds",
            "training": "trainer.report.train_seconds",
        },
        "How many seconds of the last step went to sampling completions and how many to the"
        " update.",
        ("phase",),
        when=reports,
    ),
    Metric(
        "swarmnode_reward",
        "gauge",
        {
            "own": "trainer.report.reward_own",
            "external": "trainer.report.reward_external",
            "held_out": "trainer.report.reward_held_out",
        },
        "Mean reward, 0 to 1: of this node's fresh completions, of peers' that it trained on, and"
        " on held-out questions. Held-out is the one that tells whether the policy gets better.",
        ("source",),
        when=reports,
    ),
    Metric(
        "swarmnode_task_reward",
        "gauge",
        "trainer.report.reward_by_task",
        "Mean reward of this node's fresh completions by task, 0 to 1, of the last step that asked"
        " it. A task that stays at 0 or 1 while others move teaches nothing.",
        ("task",),
    ),
    Metric(
        "swarmnode_task_signal",
        "gauge",
        "trainer.report.signals",
        "Share of groups with a signal, 0 to 1, that is expected of each task at each difficulty. A"
        " curriculum asks most where it is highest. Empty where a question's task follows from its"
        " number.",
        ("task",),
    ),
    Metric(
        "swarmnode_reward_errors_total",
        "counter",
        _reward_errors,
        "Completions that scored 0 because the task's reward raised an exception or was no number"
        " from 0 to 1, by task, own and peers'. Try the task with `swarmnode task try`.",
        ("task",),
    ),
    Metric(
        "swarmnode_reward_held_out_start",
        "gauge",
        "trainer.report.reward_held_out_start",
        "Mean reward on the held-out questions before the first step: what held-out reward is to be"
        " compared with.",
    ),
    Metric(
        "swarmnode_reward_held_out_error",
        "gauge",
        "trainer.report.reward_held_out_error",
        "Standard error of the held-out reward over its questions. Changes of less than two of them"
        " are noise.",
    ),
    Metric(
        "swarmnode_loss",
        "gauge",
        "trainer.report.loss",
        "Policy loss of the last step. With group-relative advantages it stays around 0 and is no"
        " measure of progress.",
    ),
    Metric(
        "swarmnode_entropy",
        "gauge",
        "trainer.report.entropy",
        "Entropy of the policy in nats per sampled token. A fall towards 0 means that it always"
        " answers the same.",
    ),
    Metric(
        "swarmnode_completion_tokens",
        "gauge",
        {
            "mean": "trainer.report.completion_tokens",
            "p95": "trainer.report.completion_tokens_p95",
        },
        "Length of this node's completions in the last step, in tokens: the mean, and the 95th"
        " percentile.",
        ("statistic",),
        when=reports,
    ),
    Metric(
        "swarmnode_completion_cut_share",
        "gauge",
        "trainer.report.completion_cut_share",
        "Share of the last step's completions that ended at training.max_completion_length. Above"
        " 0.2 for long, raise it or reward shorter answers.",
    ),
    Metric(
        "swarmnode_kl",
        "gauge",
        "trainer.report.kl",
        "KL divergence from the reference policy in nats per token; only where training.beta is"
        " above 0.",
    ),
    Metric(
        "swarmnode_clip_fraction",
        "gauge",
        "trainer.report.clip_fraction",
        "Share of the trained tokens whose importance ratio was clipped. Above 0.2 for long, the"
        " learning rate is too high.",
    ),
    Metric(
        "swarmnode_gradient_norm",
        "gauge",
        "trainer.report.grad_norm",
        "Norm of the last step's gradient before it was clipped.",
    ),
    Metric(
        "swarmnode_learning_rate",
        "gauge",
        "trainer.report.learning_rate",
        "Learning rate of the last step.",
    ),
    Metric(
        "swarmnode_zero_advantage_share",
        "gauge",
        "trainer.report.zero_advantage_share",
        "Share of the node's own groups whose rewards were all equal, so that they teach nothing."
        " Near 1 the tasks are too hard or too easy for this policy.",
    ),
    Metric(
        "swarmnode_batch_groups",
        "gauge",
        {
            "own": "trainer.report.own_groups",
            "external": "trainer.report.external_groups",
            "replayed": "trainer.report.replayed_groups",
        },
        "Groups in the last batch: the node's own (I), its peers' (J), and those of earlier steps"
        " that were trained on again.",
        ("source",),
        when=reports,
    ),
    Metric(
        "swarmnode_trained_groups_total",
        "counter",
        {
            "own": "trainer.report.own_groups_total",
            "external": "trainer.report.external_groups_total",
        },
        "Groups that this node has trained on, its own and its peers'.",
        ("source",),
        when=reports,
    ),
    Metric(
        "swarmnode_dropped_total",
        "counter",
        _dropped,
        "What this node dropped, by kind and reason: an `update` that was not taken, a `question`"
        " not asked, a `held_out` question left out, an own `group` not shared, a `completion` not"
        " used, a `message` between the processes lost. The log has each reason once.",
        ("what", "reason"),
    ),
    Metric(
        "swarmnode_tokens_total",
        "counter",
        "trainer.report.tokens_total",
        "Tokens that this node has sampled, in evaluations too.",
    ),
    Metric(
        "swarmnode_evaluation_tokens_total",
        "counter",
        "trainer.report.evaluation_tokens_total",
        "Tokens that this node has sampled in held-out evaluations. training.eval_budget is the"
        " share of all tokens that they may be.",
    ),
    Metric(
        "swarmnode_tokens_per_second",
        "gauge",
        "trainer.report.tokens_per_second",
        "Tokens sampled per second in the generating part of the last step.",
    ),
    Metric(
        "swarmnode_device_memory_bytes",
        "gauge",
        "trainer.report.device_memory_bytes",
        "Most memory of the accelerator that the trainer has held, in bytes; only with an"
        " accelerator.",
    ),
    Metric(
        "swarmnode_out_of_memory_retries_total",
        "counter",
        "trainer.report.oom_retries_total",
        "Times that a micro-batch was repeated in halves because memory ran out. If it keeps"
        " rising, something else uses the device.",
    ),
    Metric(
        "swarmnode_micro_batch_tokens",
        "gauge",
        {
            "training": "trainer.report.micro_batch_tokens",
            "generation": "trainer.report.generation_tokens",
        },
        "Tokens that a micro-batch may have. The bound is halved when memory runs out, and raised"
        " again much later.",
        ("part",),
        when=reports,
    ),
    Metric(
        "swarmnode_episodes_total",
        "counter",
        "trainer.report.episodes_total",
        "Episodes of several turns that this node has played to their ends for training.",
    ),
    Metric(
        "swarmnode_episode_turns",
        "gauge",
        "trainer.report.episode_turns",
        "Actions of an episode, mean over the last step; only with tasks of several turns.",
    ),
    Metric(
        "swarmnode_environment_share",
        "gauge",
        "trainer.report.environment_share",
        "Share of the last step's sampling time in which environments were waited for; only with"
        " tasks of several turns. Near 1, the environment is what a step takes.",
    ),
    Metric(
        "swarmnode_generation_rows",
        "gauge",
        "trainer.report.generation_rows",
        "Tokens sampled in a decoding step, mean over the last step. In lockstep it is far below"
        " the completions that were begun where some are much longer than others.",
    ),
    Metric(
        "swarmnode_generation_lag",
        "gauge",
        "trainer.report.generation_lag",
        "Updates between the first token of an own group and the step that learnt from it, mean. 0"
        " in lockstep.",
    ),
    Metric(
        "swarmnode_engine_rebuilds_total",
        "counter",
        "trainer.report.engine_rebuilds",
        "Times that the engine that samples was built anew: it had stopped, failed, or its"
        " log-probabilities were not the trainer's. The log says which.",
    ),
    Metric(
        "swarmnode_served",
        "gauge",
        lambda s: float(_server(s).state == "sampling"),
        "1 while the configured inference server samples, 0 while the own engine does; only with"
        " policy.server.url.",
        when=serves,
    ),
    Metric(
        "swarmnode_served_failures_total",
        "counter",
        "trainer.report.server.failures",
        "Times that the own engine took over from the server, by reason. The log has each with its"
        " details.",
        ("reason",),
        FAILURES,
    ),
    Metric(
        "swarmnode_served_load_seconds",
        "gauge",
        "trainer.report.server.load_seconds",
        "Seconds from writing the last weights for the server until their check had passed.",
    ),
    Metric(
        "swarmnode_served_check_gap",
        "gauge",
        "trainer.report.server.gap",
        "Mean difference of log-probabilities between server and trainer on a fixed text after the"
        " last load, nats.",
    ),
    Metric(
        "swarmnode_unsaved_steps",
        "gauge",
        lambda s: (
            max(0, s.trainer.report.step - s.trainer.report.state_saved_step)
            if s.trainer.report
            else None
        ),
        "Steps that a crash of the trainer would cost now. If it does not fall back to 0 now and"
        " then, saving fails: see the log.",
        when=reports,
    ),
)

UTILITY = (
    Metric(
        "swarmnode_external_share",
        "gauge",
        "trainer.report.external_share",
        "Share of the last batch that came from peers, 0 to 1.",
    ),
    Metric(
        "swarmnode_correction_mean",
        "gauge",
        "trainer.report.correction_mean",
        "Mean off-policy correction of peers' groups in the last batch, 0 to 1: 1 where their"
        " policy samples as ours would.",
    ),
    Metric(
        "swarmnode_effective_sample_share",
        "gauge",
        {"own": "trainer.report.effective_own", "external": "trainer.report.effective_external"},
        "Effective sample size of the last batch's tokens, of own groups and of peers', as a share"
        " of their number: 1 where all weigh the same. Low for own groups: what samples them is not"
        " the policy that is trained. Low for peers': they are far from it.",
        ("source",),
        when=reports,
    ),
    Metric(
        "swarmnode_own_gap",
        "gauge",
        "trainer.report.own_gap",
        "Mean difference of log-probabilities between what sampled the own tokens of the last batch"
        " and the policy that is trained, nats. Rounding is 0.00001 in float32 and 0.01 in 16 bits;"
        " updates since the tokens were sampled come on top.",
        when=reports,
    ),
    Metric(
        "swarmnode_gradient_agreement",
        "gauge",
        "trainer.report.gradient_agreement",
        "Cosine between what own and what peers' groups want to change, −1 to 1. Usual is 0.1 to"
        " 0.4; below 0 for long, peers' groups pull elsewhere.",
    ),
    Metric(
        "swarmnode_peer_drift",
        "gauge",
        "trainer.report.drift",
        "Part of strangers' rewarded answers to one task that have a token, less the part of own"
        " rewarded answers, of the task and token where that is largest. Near 1: strangers write"
        " something beside their answers, or write them in another way. `swarmnode samples` names"
        " the token.",
    ),
    Metric(
        "swarmnode_top_answer_share",
        "gauge",
        "trainer.report.top_answer_share",
        "Share of the latest majorities, of the verifier `majority`, that chose the most frequent"
        " answer, 0 to 1. Near 1 the policy answers all questions alike.",
    ),
    Metric(
        "swarmnode_external_scale",
        "gauge",
        "trainer.report.external_scale",
        "Share of the peers' groups that the utility guard leaves, 0 to 1. It falls while their"
        " gradients disagree with ours.",
    ),
    Metric(
        "swarmnode_contributing_peers",
        "gauge",
        lambda s: len(s.trainer.report.peers_used) if s.trainer.report else None,
        "Peers on whose groups this node has trained since its first start, the latest 256 of"
        " them.",
        when=reports,
    ),
)

ROLLOUTS = (
    Metric(
        "swarmnode_rollouts_published_total",
        "counter",
        "rollouts.published",
        "Own groups that this node offers to its peers.",
    ),
    Metric(
        "swarmnode_rollouts_received_total",
        "counter",
        "rollouts.received",
        "Groups that arrived from peers, whatever became of them.",
    ),
    Metric(
        "swarmnode_rollouts_admitted_total",
        "counter",
        "rollouts.admission.admitted",
        "Groups of peers that passed every check and went into the pool.",
    ),
    Metric(
        "swarmnode_rollouts_ignored_total",
        "counter",
        "rollouts.admission.ignored",
        "Groups of peers that were dropped without blame, by reason: late, seen before, too many."
        " Normal operation causes some.",
        ("reason",),
        IGNORED,
    ),
    Metric(
        "swarmnode_rollouts_rejected_total",
        "counter",
        "rollouts.admission.rejected",
        "Groups dropped as provably wrong, by reason. Each cost its holder reputation, and its"
        " author if the signature was valid. Honest nodes of the same version cause none.",
        ("reason",),
        REJECTED,
    ),
    Metric(
        "swarmnode_rollouts_drawn_total",
        "counter",
        "rollouts.pool.drawn",
        "Groups of peers that were handed to the trainer.",
    ),
    Metric(
        "swarmnode_rollouts_judged_total",
        "counter",
        "rollouts.judged",
        "Groups handed to the trainer: `used`, or why not. Only `forged_ids` proves a lie;"
        " the other reasons can also occur with honest peers.",
        ("outcome",),
        JUDGED,
    ),
    Metric(
        "swarmnode_rollouts_listings_total",
        "counter",
        "rollouts.pulling.listings",
        "Polls of peers' listings, by outcome. `unsupported`: the peer does not serve listings, or"
        " not yet.",
        ("outcome",),
        LISTINGS,
    ),
    Metric(
        "swarmnode_rollouts_pulled_total",
        "counter",
        "rollouts.pulling.pulled",
        "Groups of fetches, by outcome. `refused`: admission counts the reason.",
        ("outcome",),
        PULLED,
    ),
    Metric(
        "swarmnode_rollouts_listing_lies_total",
        "counter",
        "rollouts.pulling.claims.lies",
        "False listings and unanswered requests, by kind. `absent`, `slow` and `trajectory` occur"
        " with honest peers.",
        ("lie",),
        LIES,
    ),
    Metric(
        "swarmnode_rollouts_offered",
        "gauge",
        "rollouts.pulling.offered",
        "Groups that connected peers list and this node has not fetched; one per peer that lists"
        " it.",
    ),
    Metric(
        "swarmnode_rollouts_served_total",
        "counter",
        "rollouts.serving.served",
        "Answers to polls and fetches of peers: a `listing`, a `group`, `unknown`, `busy` (the"
        " peer's allowance or this node's budget is used up, or no room), `malformed`.",
        ("outcome",),
        ROLLOUTS_SERVED,
    ),
    Metric(
        "swarmnode_rollouts_shelf_groups",
        "gauge",
        "rollouts.serving.shelf.groups",
        "Groups that this node offers to its peers.",
    ),
    Metric(
        "swarmnode_rollouts_polls_held",
        "gauge",
        "rollouts.serving.waiting",
        "Polls of peers that this node holds open until it has a new group, at most 512.",
    ),
    Metric(
        "swarmnode_rollout_staleness_versions",
        "histogram",
        _staleness,
        "Own policy versions between a group's arrival and its use.",
    ),
    Metric(
        "swarmnode_pool_groups",
        "gauge",
        "rollouts.pool.groups",
        "Groups of peers that wait in the pool to be trained on.",
    ),
    Metric(
        "swarmnode_pool_bytes",
        "gauge",
        "rollouts.pool.bytes",
        "Bytes of memory that the groups in the pool take.",
    ),
    Metric(
        "swarmnode_pool_peers",
        "gauge",
        "rollouts.pool.peers",
        "Peers that have a group in the pool.",
    ),
    Metric(
        "swarmnode_pool_oldest_seconds",
        "gauge",
        "rollouts.pool.oldest_seconds",
        "Seconds that the oldest group has been in the pool. If it grows, peers send more than this"
        " node uses; that is fine.",
    ),
    Metric(
        "swarmnode_pool_dropped_total",
        "counter",
        {reason: f"rollouts.pool.{reason}" for reason in POOL_DROPS},
        "Groups that left the pool unused, or never got in, by reason.",
        ("reason",),
    ),
)

NETWORK = (
    Metric(
        "swarmnode_peers",
        "gauge",
        {"in": "network.peers.inbound", "out": "network.peers.outbound"},
        "Connected peers, by who dialled: `in` is they, `out` is this node.",
        ("direction",),
    ),
    Metric(
        "swarmnode_peers_known",
        "gauge",
        "network.peers.known",
        "Peers of whom the node knows an address, connected or not.",
    ),
    Metric(
        "swarmnode_peers_dropped_total",
        "counter",
        "network.peers.dropped",
        "Connected peers that were let go for others: `exchanged` now and then, so that others'"
        " groups are met; `full`, so that newcomers find a place.",
        ("why",),
        DROP_REASONS,
    ),
    Metric(
        "swarmnode_peers_greylisted",
        "gauge",
        "network.reputation.greylisted",
        "Peers whose reputation is so low that nothing of theirs is looked at for now.",
    ),
    Metric(
        "swarmnode_peers_banned",
        "gauge",
        "network.reputation.banned",
        "Peers that are not talked to at all for now.",
    ),
    Metric(
        "swarmnode_reach",
        "gauge",
        _one_of(REACH, lambda s: s.network.nat.reach.verdict),
        "1 for what is known of whether strangers can dial this node: `public` they can, `private`"
        " only through relays.",
        ("verdict",),
        REACH,
    ),
    Metric(
        "swarmnode_peers_relayed",
        "gauge",
        "network.nat.relayed",
        "Peers that are connected through a relay only.",
    ),
    Metric(
        "swarmnode_relays",
        "gauge",
        lambda s: len(s.network.nat.client.relays),
        "Relays through which this node can be called. A private node with 0 can only dial out.",
    ),
    Metric(
        "swarmnode_relay_circuits",
        "gauge",
        "network.nat.relay.circuits",
        "Connections between other nodes that this node carries as a relay now.",
    ),
    Metric(
        "swarmnode_relay_bytes_total",
        "counter",
        "network.nat.relay.bytes",
        "Bytes that this node has carried for others as a relay.",
    ),
    Metric(
        "swarmnode_hole_punches_total",
        "counter",
        {outcome: f"network.nat.punch.{outcome}" for outcome in PUNCHES},
        "Peers behind routers, by whether a direct connection with them was made.",
        ("outcome",),
    ),
    Metric(
        "swarmnode_polled_peers",
        "gauge",
        "rollouts.pulling.polled",
        "Connected peers whose listings this node polls now. 0 while its pool is full, while it is"
        " paused, and where its budget is used up.",
    ),
    Metric(
        "swarmnode_dials_total", "counter", "network.peers.dials", "Attempts to connect to a peer."
    ),
    Metric(
        "swarmnode_dial_failures_total",
        "counter",
        "network.peers.dial_failures",
        "Attempts to connect that failed. Many are normal: addresses outlive the nodes behind"
        " them.",
    ),
    Metric(
        "swarmnode_requests_total",
        "counter",
        _by_outcome(lambda s: s.network.requests.requests),
        "Requests that this node sent to peers, by how they ended.",
        ("outcome",),
        REQUESTS,
    ),
    Metric(
        "swarmnode_requests_served_total",
        "counter",
        _by_outcome(lambda s: s.network.requests.served),
        "Requests of peers, by how they were answered: `busy` and `unwelcome` were turned away,"
        " `error` is a defect here.",
        ("outcome",),
        SERVED,
    ),
    Metric(
        "swarmnode_network_bytes_total",
        "counter",
        {"in": "network.traffic.received", "out": "network.traffic.sent"},
        "Bytes received and sent, by protocol, without the overhead of encryption and"
        " multiplexing.",
        ("protocol", "direction"),
    ),
    Metric(
        "swarmnode_guard_firings_total",
        "counter",
        "network.guards",
        "How often a guard around libp2p stepped in, by guard. Steady firing means that somebody"
        " sends what no honest node sends.",
        ("guard",),
    ),
)

WEIGHTS = (
    Metric(
        "swarmnode_weights_exchanges_total",
        "counter",
        "weights.outcomes",
        "Outer steps (`applied` with a partner's weights, or `solo`), attempts to find a partner"
        " (`busy`, `refused`, `unreachable`), and swaps that `failed` after a partner was found.",
        ("outcome",),
        exchange.OUTCOMES,
    ),
    Metric(
        "swarmnode_weights_failures_total",
        "counter",
        "weights.failures",
        "Swaps that failed after a partner was found, by cause: a slow or blocked connection, a"
        " partner that breaks the protocol, or this node (`local`, `snapshot`, `apply_timeout`,"
        " `no_trainer`).",
        ("cause",),
        exchange.FAILURES,
    ),
    Metric(
        "swarmnode_weights_judged_total",
        "counter",
        "weights.judged",
        "Partners' weights, by outcome at the gate. `probe`: the mean made the policy worse"
        " and was not taken.",
        ("outcome",),
        tuple(local.OUTCOMES),
    ),
    Metric(
        "swarmnode_weights_adoptions_total",
        "counter",
        "weights.catch_up.adoptions",
        "Whole states fetched from a neighbour at the start, by outcome.",
        ("outcome",),
        tuple(local.ADOPTIONS),
    ),
    Metric(
        "swarmnode_weights_candidates",
        "gauge",
        "weights.candidates",
        "Connected peers that train the same policy and can be partners. While it is 0, this node"
        " takes solo steps.",
    ),
    Metric(
        "swarmnode_weights_exchange_seconds_total",
        "counter",
        "weights.exchange_seconds",
        "Seconds that applied swaps took, summed; training continues meanwhile.",
    ),
    Metric(
        "swarmnode_weights_received_bytes_total",
        "counter",
        "weights.received_bytes",
        "Bytes of weights that came from partners.",
    ),
    Metric(
        "swarmnode_weights_outer_step",
        "gauge",
        "trainer.report.weights.outer_step",
        "Outer steps that the fragment furthest behind has taken.",
    ),
    Metric(
        "swarmnode_weights_distance",
        "gauge",
        "trainer.report.weights.distance",
        "Distance between the last partner's weights and ours, as a share of the norm of ours."
        " Replicas that train together stay within a few percent.",
    ),
    Metric(
        "swarmnode_weights_clip_ratio",
        "gauge",
        "trainer.report.weights.clip_ratio",
        "Mean share of partners' differences taken in accepted swaps, 0 to 1; 1 when nothing"
        " was clipped.",
    ),
    Metric(
        "swarmnode_weights_lag",
        "gauge",
        "trainer.report.weights.lag",
        "Outer steps by which the last partner was behind this node; negative when it was ahead.",
    ),
    Metric(
        "swarmnode_weights_reverts_total",
        "counter",
        "trainer.report.weights.reverts_total",
        "Reverts of swaps because held-out reward fell after them.",
    ),
    Metric(
        "swarmnode_weights_stall_seconds_total",
        "counter",
        "trainer.report.weights.stall_seconds_total",
        "Seconds that training stood still for averaging.",
    ),
)

CREW = (
    Metric(
        "swarmnode_crew_state",
        "gauge",
        _one_of(CREW_STATES, lambda s: s.stages.crew.state),
        "1 for the state of this node's crew, 0 for the others. Only `running` takes steps.",
        ("state",),
        CREW_STATES,
        when=has_crew,
    ),
    Metric(
        "swarmnode_crew_slots",
        "gauge",
        lambda s: dict(Counter(str(slot.state) for slot in s.stages.crew.slots)),
        "Stages of this node's crew, by state. The crew takes steps only while all stages are"
        " `active`.",
        ("state",),
        SLOT_STATES,
        when=has_crew,
    ),
    Metric(
        "swarmnode_crew_offers",
        "gauge",
        "stages.crew.offers",
        "Other nodes that offer to hold a stage. With 0, no node can replace a lost member.",
    ),
    Metric(
        "swarmnode_crew_standing_seconds",
        "gauge",
        "stages.crew.standing_seconds",
        "Seconds since this node's crew last ran; 0 while it runs. After stages.wait_seconds"
        " without a crew, its nodes start again from the base model.",
    ),
    Metric(
        "swarmnode_crew_events_total",
        "counter",
        "stages.events",
        "Events of this node's crews. `proposed`, `formed`, `running`, `paused`: phases of a"
        " crew. `broken`: a crew ended. `refused`: a proposal failed. `suspected`: a member was"
        " silent. `refuted`: a suspected member was heard again; each false suspicion costs a"
        " pause. `struck`: a peer missed a deadline or sent garbage. `behind`: a former member is"
        " not in the next crew.",
        ("event",),
        NOTES,
    ),
    Metric(
        "swarmnode_crew_recovery_seconds",
        "histogram",
        _crew_recoveries,
        "Seconds from the pause or end of a running crew until a crew runs again.",
        when=has_crew,
    ),
    Metric(
        "swarmnode_crew_heartbeat_seconds",
        "gauge",
        "stages.heartbeat_seconds",
        "Seconds between the last answered heartbeat and its answer.",
        when=has_stage,
    ),
    Metric(
        "swarmnode_crew_unanswered_total",
        "counter",
        "stages.unanswered",
        "Requests to other nodes without a valid answer in time, by message.",
        ("message",),
        CREW_MESSAGES,
    ),
    Metric(
        "swarmnode_stage_trainer_restarts_total",
        "counter",
        "stages.trainer_restarts",
        "Restarts of this node's trainer because it had work for its stage and made no progress.",
    ),
    Metric(
        "swarmnode_stage_index",
        "gauge",
        "stages.crew.stage",
        "Number of the stage that this node holds; 0 is the head, which trains and publishes.",
    ),
    Metric(
        "swarmnode_stage_phase",
        "gauge",
        _one_of(STAGE_PHASES, lambda s: s.stages.own.phase if s.stages.own else ""),
        "1 for the phase of this node's stage, 0 for the others.",
        ("phase",),
        STAGE_PHASES,
        when=has_stage,
    ),
    Metric(
        "swarmnode_stage_step",
        "gauge",
        "stages.own.step",
        "Steps that this node's stage has taken.",
        when=has_stage,
    ),
    Metric(
        "swarmnode_stage_sources_total",
        "counter",
        "stages.sources",
        "Restorations of this node's stages, by source of the weights.",
        ("source",),
        tuple(filter(None, SOURCES)),
    ),
    Metric(
        "swarmnode_stage_source_seconds",
        "gauge",
        "stages.own.source_seconds",
        "Seconds that the last restoration of this node's stage took.",
        when=has_stage,
    ),
    Metric(
        "swarmnode_stage_checkpoint_age_steps",
        "gauge",
        "stages.own.checkpoint_age_steps",
        "Steps of this stage that the loss of this node and its disk would cost: those since the"
        " newest checkpoint that a neighbour stores.",
        when=has_stage,
    ),
    Metric(
        "swarmnode_stage_copy_age_steps",
        "gauge",
        "stages.own.copy_age_steps",
        "Steps by which the policy copy that this node samples from is behind its crew.",
        when=has_stage,
    ),
    Metric(
        "swarmnode_stage_gate_kl",
        "gauge",
        "stages.own.gate_kl",
        "KL divergence between the policy before and after the last recovery, in nats per token."
        " Near 0, the recovery changed nothing.",
        when=has_stage,
    ),
    Metric(
        "swarmnode_stage_bubble_share",
        "gauge",
        "stages.own.bubble_share",
        "Share of the last step in which this node's stage waited for others, 0 to 1.",
        when=has_stage,
    ),
    Metric(
        "swarmnode_stage_tokens_per_second",
        "gauge",
        "stages.own.tokens_per_second",
        "Tokens per second that this node's stage runs forward.",
        when=has_stage,
    ),
    Metric(
        "swarmnode_stage_frames_dropped_total",
        "counter",
        lambda s: s.stages.own.dropped if s.stages.own else {},
        "Frames between stages that were dropped, by reason. `crew` and `step` are usual after"
        " the end of a crew. The other reasons show a defect or a hostile member.",
        ("reason",),
        (*FENCE_REASONS, *FRAME_REASONS, DEVICE_REASON),
        when=has_crew,
    ),
    Metric(
        "swarmnode_stage_state_refused_total",
        "counter",
        "stages.own.state_refused",
        "Invalid messages and refused requests on the streams for checkpoints, by reason, in this"
        " crew. `busy`: a member sent too many requests at a time. `repeated`: a member requested"
        " the same body too often. `failed`: this node's own disk or device failed. `gate`: no"
        " source of the stage passed the gate.",
        ("reason",),
        STATE_REFUSALS,
        when=has_stage,
    ),
    Metric(
        "swarmnode_stage_streams",
        "gauge",
        "stages.streams.open",
        "Open streams to other stages, by kind.",
        ("kind",),
        KINDS,
    ),
    Metric(
        "swarmnode_stage_streams_lost_total",
        "counter",
        "stages.streams.lost",
        "Streams to other stages that broke or that the other side ended, by kind.",
        ("kind",),
        KINDS,
    ),
    Metric(
        "swarmnode_stage_streams_refused_total",
        "counter",
        "stages.streams.refused",
        "Streams of peers that this node refused, by reason.",
        ("reason",),
        STREAM_REFUSALS,
    ),
    Metric(
        "swarmnode_stage_bytes_total",
        "counter",
        {"in": "stages.streams.received", "out": "stages.streams.sent"},
        "Bytes between this node's stage and other stages, by kind.",
        ("kind", "direction"),
        when=has_crew,
    ),
    Metric(
        "swarmnode_stage_throttled_seconds_total",
        "counter",
        "stages.streams.throttled_seconds",
        "Seconds that streams between stages waited for the node's byte budget. If it grows, the"
        " caps are too low for a stage.",
    ),
)

CLAIMED = (
    Metric(
        "swarmnode_claimed_peers",
        "gauge",
        "swarm.reporting",
        "Nodes of the swarm that recently said how they are, connected or not; claimed, not"
        " verified.",
    ),
    Metric(
        "swarmnode_claimed_reward_median",
        "gauge",
        "swarm.reward_median",
        "Median of the held-out rewards that other nodes claim.",
    ),
    Metric(
        "swarmnode_claimed_policy_version_median",
        "gauge",
        "swarm.policy_version_median",
        "Median of the policy versions that other nodes claim.",
    ),
    Metric(
        "swarmnode_summaries_total",
        "counter",
        "swarm.heard",
        "Summaries in which nodes say how they are, by what became of them.",
        ("outcome",),
        SUMMARY_OUTCOMES,
    ),
    Metric(
        "swarmnode_clock_offset_seconds",
        "gauge",
        "swarm.clock_offset_seconds",
        "Seconds by which peers' clocks are ahead of this one, their median, from two peers on."
        " Beyond 120 s groups are dropped: synchronise the clock.",
    ),
)

BUDGET = (
    Metric(
        "swarmnode_budget_paused",
        "gauge",
        "budget.paused",
        "1 while this reason keeps the node from fetching groups: quiet hours, the month's bytes,"
        " its owner's `swarmnode pause`, a machine on its battery, one that is busy with other"
        " programs, or a download cap in debt.",
        ("reason",),
        PAUSES,
    ),
    Metric(
        "swarmnode_budget_level_bytes",
        "gauge",
        "budget.level_bytes",
        "Bytes that may be received and sent at once; below 0 the cap is in debt. Only for"
        " directions with a cap.",
        ("direction",),
    ),
    Metric(
        "swarmnode_budget_month_bytes",
        "gauge",
        "budget.month_bytes",
        "Bytes received and sent in this calendar month, kept over restarts.",
        ("direction",),
        ("in", "out"),
    ),
    Metric(
        "swarmnode_budget_month_limit_bytes",
        "gauge",
        "budget.month_limit_bytes",
        "Bytes of a calendar month, both directions together, at which sharing pauses; only where"
        " network.monthly_bytes is set.",
    ),
    Metric(
        "swarmnode_budget_refusals_total",
        "counter",
        "budget.refused",
        "What was left out because a cap or the month's bytes were used up, by what it was.",
        ("what",),
        CHOICES,
    ),
)

MACHINE = (
    Metric(
        "swarmnode_successor_waiting",
        "gauge",
        "successor.waiting",
        "1 while the founder has signed a successor of this node's swarm and the node waits for its"
        " owner's word, or cannot follow.",
    ),
    Metric(
        "swarmnode_disk_free_bytes",
        "gauge",
        "disk.free_bytes",
        "Bytes that this user may still write on the data directory's file system. When none are"
        " left, state is not saved.",
    ),
    Metric(
        "swarmnode_disk_size_bytes",
        "gauge",
        "disk.total_bytes",
        "Size of the data directory's file system in bytes.",
    ),
    Metric(
        "swarmnode_restarts_total",
        "counter",
        "supervisor.restarts",
        "Times that the supervisor started a process again, by process. A few are what it is for;"
        " the log says why each ended.",
        ("process",),
        PROCESSES,
    ),
    Metric(
        "swarmnode_stalls_total",
        "counter",
        "supervisor.stalls",
        "Times that the supervisor ended a process because it made no progress in time, by"
        " process.",
        ("process",),
        PROCESSES,
    ),
    Metric(
        "swarmnode_recovery_seconds",
        "histogram",
        "supervisor.recovery_seconds",
        "Seconds from a process's end to the first progress of the one that replaced it.",
    ),
    Metric(
        "swarmnode_scorer_restarts_total",
        "counter",
        _scorer_restarts,
        "Scorers replaced because they died or took too long, by the process that asks them."
        " Answers that kill a scorer cost speed, nothing else.",
        ("process",),
        PROCESSES,
    ),
    Metric(
        "swarmnode_process_memory_bytes",
        "gauge",
        lambda s: {name: use.memory_bytes for name, use in s.processes.items()},
        "Resident memory in bytes, by process.",
        ("process",),
    ),
    Metric(
        "swarmnode_process_cpu_seconds_total",
        "counter",
        lambda s: {name: use.cpu_seconds for name, use in s.processes.items()},
        "Seconds of CPU time that a process has used since it started, by process.",
        ("process",),
    ),
)

METRICS: tuple[Metric, ...] = (
    *NODE,
    *LEARNING,
    *UTILITY,
    *ROLLOUTS,
    *NETWORK,
    *WEIGHTS,
    *CREW,
    *CLAIMED,
    *BUDGET,
    *MACHINE,
)
