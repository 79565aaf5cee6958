"""Writes the Grafana dashboards and the tables of docs/monitoring.md. Run it after changing
swarmnode/observe/metrics.py or this file:

    python deploy/grafana/build.py

A panel here is one line: title, expressions with their legends, unit. Its description is the
metrics' own help text. tests/deploy holds the files to this script, the script to the registry, and
every registered metric to a panel or to EXEMPT.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from swarmnode.observe.metrics import METRICS, Metric

ROOT = Path(__file__).parents[2]
DASHBOARDS = Path(__file__).parent / "dashboards"
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
MONITORING = ROOT / "docs" / "monitoring.md"

I = 'instance=~"$instance"'  # noqa: E741 - short, because it is in every expression
EXEMPT: dict[str, str] = {}
"""Metrics that are on no panel, and why."""

SIGNED = (
    "Loss",
    "Gradient agreement",
    "Reward of peers' groups minus own",
    "Left in the buckets",
    "Peers' clocks ahead of ours",
    "Outer steps that the last partner was behind",
)
"""Panels whose axis goes below 0."""


@dataclass(frozen=True)
class Panel:
    title: str
    targets: tuple[tuple[str, str], ...]
    """(expression, legend); the legend may use {{label}}."""
    unit: str = "short"
    kind: str = "timeseries"
    """timeseries, stat, table; state: what holds now, by name; timeline: a bar for as long as a
    series is there."""
    stack: bool = False
    top: float | None = None
    """Upper end of the axis."""
    width: int = 8


def p(title: str, *targets: str | tuple[str, str], **options: Any) -> Panel:
    """A panel; a bare expression gets the instance as its legend."""
    return Panel(
        title, tuple(t if isinstance(t, tuple) else (t, "{{instance}}") for t in targets), **options
    )


def rate(metric: str, by: str = "") -> str:
    """Per second, summed over everything but `by` and the instance."""
    inside = f"rate({metric}{{{I}}}[$__rate_interval])"
    return f"sum by (instance{', ' + by if by else ''}) ({inside})"


def total(metric: str, by: str) -> str:
    """Per second, of all nodes together."""
    return f"sum by ({by}) (rate({metric}{{{I}}}[$__rate_interval]))"


def quantile(q: float, metric: str) -> str:
    return (
        f"histogram_quantile({q}, sum by (instance, le)"
        f" (rate({metric}_bucket{{{I}}}[$__rate_interval])))"
    )


def gauge(metric: str, **labels: str) -> str:
    matchers = [I, *(f'{name}="{value}"' for name, value in labels.items())]
    return f"{metric}{{{', '.join(matchers)}}}"


NODE: dict[str, list[Panel]] = {
    "State": [
        p("Ready", gauge("swarmnode_ready"), kind="stat", unit="bool_yes_no", width=3),
        p(
            "Up",
            f"time() - {gauge('swarmnode_start_time_seconds')}",
            unit="s",
            kind="stat",
            width=3,
        ),
        p(
            "Parts",
            (gauge("swarmnode_check_ok"), "{{check}}"),
            kind="stat",
            unit="bool_yes_no",
            width=4,
        ),
        p("Policy version", gauge("swarmnode_policy_version"), kind="stat", width=3),
        p("Held-out reward", gauge("swarmnode_reward", source="held_out"), kind="stat", width=3),
        p(
            "Phase",
            (f"{gauge('swarmnode_trainer_phase')} == 1", "{{phase}}"),
            kind="state",
            width=4,
        ),
        p(
            "Restarts, last day",
            (f"sum by (process) (increase(swarmnode_restarts_total{{{I}}}[1d]))", "{{process}}"),
            kind="stat",
            width=4,
        ),
        p("Node", gauge("swarmnode_node_info"), kind="table", width=16),
        p("Build", gauge("swarmnode_build_info"), kind="table", width=8),
    ],
    "Learning": [
        p(
            "Reward",
            (gauge("swarmnode_reward"), "{{source}}"),
            (gauge("swarmnode_reward_held_out_start"), "held-out at the start"),
            (
                f"{gauge('swarmnode_reward', source='held_out')} - ignoring(source)"
                f" 2 * {gauge('swarmnode_reward_held_out_error')}",
                "held-out less two standard errors",
            ),
            (
                f"{gauge('swarmnode_reward', source='held_out')} + ignoring(source)"
                f" 2 * {gauge('swarmnode_reward_held_out_error')}",
                "held-out plus two standard errors",
            ),
            top=1,
            width=12,
        ),
        p("Reward by task", (gauge("swarmnode_task_reward"), "{{task}}"), top=1, width=12),
        p(
            "Signal that the curriculum expects, by task and difficulty",
            (gauge("swarmnode_task_signal"), "{{task}}"),
            top=1,
            width=12,
        ),
        p(
            "Rewards that failed per hour",
            (f"sum by (task) (increase(swarmnode_reward_errors_total{{{I}}}[1h]))", "{{task}}"),
            width=12,
        ),
        p("Steps per minute", f"60 * {rate('swarmnode_steps_total')}", width=6),
        p(
            "Groups that teach nothing",
            gauge("swarmnode_zero_advantage_share"),
            unit="percentunit",
            top=1,
            width=6,
        ),
        p(
            "Completion length, tokens",
            (gauge("swarmnode_completion_tokens"), "{{statistic}}"),
            width=6,
        ),
        p(
            "Completions cut",
            gauge("swarmnode_completion_cut_share"),
            unit="percentunit",
            top=1,
            width=6,
        ),
        p("Loss", gauge("swarmnode_loss"), width=6),
        p("Entropy", gauge("swarmnode_entropy"), width=6),
        p("Clip fraction", gauge("swarmnode_clip_fraction"), unit="percentunit", width=6),
        p("Gradient norm", gauge("swarmnode_gradient_norm"), width=6),
        p("Learning rate", gauge("swarmnode_learning_rate"), width=6),
        p(
            "Dropped per hour",
            (
                f"sum by (what, reason) (increase(swarmnode_dropped_total{{{I}}}[1h])) > 0",
                "{{what}}: {{reason}}",
            ),
            width=24,
        ),
    ],
    "Speed": [
        p(
            "Step",
            (quantile(0.5, "swarmnode_step_seconds"), "median"),
            (quantile(0.95, "swarmnode_step_seconds"), "p95"),
            unit="s",
        ),
        p("Parts of a step", (gauge("swarmnode_phase_seconds"), "{{phase}}"), unit="s", stack=True),
        p(
            "Tokens per second",
            (gauge("swarmnode_tokens_per_second"), "while sampling"),
            (rate("swarmnode_tokens_total"), "over all"),
            (rate("swarmnode_evaluation_tokens_total"), "in evaluations"),
        ),
        p("Memory", (gauge("swarmnode_process_memory_bytes"), "{{process}}"), unit="bytes"),
        p(
            "CPU",
            (rate("swarmnode_process_cpu_seconds_total", "process"), "{{process}}"),
            unit="percentunit",
        ),
        p("Micro-batch", (gauge("swarmnode_micro_batch_tokens"), "{{part}}")),
    ],
    "Accelerator, reference policy and majority": [
        p(
            "Most memory of the device",
            gauge("swarmnode_device_memory_bytes"),
            unit="bytes",
            width=12,
        ),
        p("KL divergence", gauge("swarmnode_kl"), width=12),
        p(
            "Majorities for one answer",
            gauge("swarmnode_top_answer_share"),
            unit="percentunit",
            top=1,
            width=12,
        ),
    ],
    "Stage": [
        p("Crew", (f"{gauge('swarmnode_crew_state')} == 1", "{{state}}"), kind="state", width=4),
        p("Stage", gauge("swarmnode_stage_index"), kind="stat", width=3),
        p(
            "What it does",
            (f"{gauge('swarmnode_stage_phase')} == 1", "{{phase}}"),
            kind="state",
            width=4,
        ),
        p("Steps", gauge("swarmnode_stage_step"), kind="stat", width=3),
        p(
            "Sources, last day",
            (
                f"sum by (source) (increase(swarmnode_stage_sources_total{{{I}}}[1d]))",
                "{{source}}",
            ),
            kind="stat",
            width=7,
        ),
        p(
            "Age of the newest checkpoint at a neighbour, steps",
            gauge("swarmnode_stage_checkpoint_age_steps"),
            width=6,
        ),
        p(
            "Age of the copy that is sampled from, steps",
            gauge("swarmnode_stage_copy_age_steps"),
            width=6,
        ),
        p("Restoring a stage", gauge("swarmnode_stage_source_seconds"), unit="s", width=6),
        p("KL over the last recovery", gauge("swarmnode_stage_gate_kl"), width=6),
        p(
            "Share of the time that is waited",
            (gauge("swarmnode_stage_bubble_share"), "for other stages, of a step"),
            (
                rate("swarmnode_stage_throttled_seconds_total"),
                "for the byte budget, streams together",
            ),
            unit="percentunit",
            width=6,
        ),
        p(
            "Tokens per second through the stage",
            gauge("swarmnode_stage_tokens_per_second"),
            width=6,
        ),
        p(
            "Frames that counted for nothing",
            (rate("swarmnode_stage_frames_dropped_total", "reason"), "{{reason}}"),
            unit="ops",
            width=6,
        ),
        p(
            "State refused, or not given",
            (rate("swarmnode_stage_state_refused_total", "reason"), "{{reason}}"),
            unit="ops",
            width=6,
        ),
        p(
            "Between stages",
            (rate("swarmnode_stage_bytes_total", "kind, direction"), "{{kind}} {{direction}}"),
            unit="Bps",
            width=6,
        ),
        p(
            "Streams",
            (gauge("swarmnode_stage_streams"), "{{kind}} open"),
            (f"increase(swarmnode_stage_streams_lost_total{{{I}}}[1h])", "{{kind}} lost per hour"),
            (
                f"sum by (instance) (increase(swarmnode_stage_streams_refused_total{{{I}}}[1h]))",
                "refused per hour",
            ),
            width=6,
        ),
    ],
    "Supervision": [
        p("Out-of-memory retries", f"increase(swarmnode_out_of_memory_retries_total{{{I}}}[1h])"),
        p(
            "Sampling engine",
            (f"increase(swarmnode_engine_rebuilds_total{{{I}}}[1h])", "rebuilt per hour"),
            (gauge("swarmnode_generation_rows"), "rows of a decoding step"),
            (gauge("swarmnode_generation_lag"), "lag, updates"),
        ),
        p(
            "Inference server",
            (gauge("swarmnode_served"), "it samples"),
            (f"increase(swarmnode_served_failures_total{{{I}}}[1h])", "{{reason}} per hour"),
            (gauge("swarmnode_served_load_seconds"), "load, seconds"),
        ),
        p(
            "Sampled and trained log-probabilities, nats",
            (gauge("swarmnode_own_gap"), "own completions"),
            (gauge("swarmnode_served_check_gap"), "the server's check"),
        ),
        p(
            "Episodes",
            (rate("swarmnode_episodes_total"), "per second"),
            (gauge("swarmnode_episode_turns"), "turns of an episode"),
            (gauge("swarmnode_environment_share"), "share of sampling time in environments"),
        ),
        p(
            "Restarts and stalls per hour",
            (f"increase(swarmnode_restarts_total{{{I}}}[1h])", "{{process}} restarted"),
            (f"increase(swarmnode_stalls_total{{{I}}}[1h])", "{{process}} stalled"),
        ),
        p(
            "Recovery",
            (
                (
                    "histogram_quantile(0.95, sum by (instance, le)"
                    f" (increase(swarmnode_recovery_seconds_bucket{{{I}}}[1d])))"
                ),
                "p95 of the last day",
            ),
            unit="s",
        ),
        p("Event loop lag", gauge("swarmnode_event_loop_lag_seconds"), unit="s", width=6),
        p(
            "Trainer's last report",
            gauge("swarmnode_trainer_report_age_seconds"),
            unit="s",
            width=6,
        ),
        p(
            "Trainer connected",
            gauge("swarmnode_trainer_connected"),
            unit="bool_yes_no",
            top=1,
            width=6,
        ),
        p(
            "Peers' clocks ahead of ours",
            gauge("swarmnode_clock_offset_seconds"),
            unit="s",
            width=12,
        ),
        p(
            "Room on the disk",
            (gauge("swarmnode_disk_free_bytes"), "{{instance}} free"),
            (gauge("swarmnode_disk_size_bytes"), "{{instance}} in all"),
            unit="bytes",
            width=12,
        ),
        p("Steps a crash would cost", gauge("swarmnode_unsaved_steps"), width=6),
        p(
            "A successor waits for its owner",
            gauge("swarmnode_successor_waiting"),
            unit="bool_yes_no",
            top=1,
            width=6,
        ),
    ],
}

SWARM: dict[str, list[Panel]] = {
    "Does sharing help": [
        p("Held-out reward", gauge("swarmnode_reward", source="held_out"), top=1, width=12),
        p(
            "Reward of peers' groups minus own",
            f"{gauge('swarmnode_reward', source='external')} - ignoring(source)"
            f" {gauge('swarmnode_reward', source='own')}",
            width=12,
        ),
        p(
            "Share of the batch from peers",
            gauge("swarmnode_external_share"),
            unit="percentunit",
            top=1,
            width=6,
        ),
        p(
            "What the utility guard leaves",
            gauge("swarmnode_external_scale"),
            unit="percentunit",
            top=1,
            width=6,
        ),
        p("Gradient agreement", gauge("swarmnode_gradient_agreement"), width=6),
        p("Token that peers write more", gauge("swarmnode_peer_drift"), top=1, width=6),
        p("Off-policy correction", gauge("swarmnode_correction_mean"), top=1, width=6),
        p(
            "Effective sample",
            (gauge("swarmnode_effective_sample_share"), "{{instance}} {{source}}"),
            unit="percentunit",
            top=1,
            width=24,
        ),
        p("Batch", (gauge("swarmnode_batch_groups"), "{{instance}} {{source}}"), width=8),
        p(
            "Groups trained on per minute",
            (f"60 * {rate('swarmnode_trained_groups_total', 'source')}", "{{instance}} {{source}}"),
            width=8,
        ),
        p("Peers that contributed", gauge("swarmnode_contributing_peers"), width=8),
    ],
    "Rollouts": [
        p(
            "Groups from peers, by outcome",
            (f"sum({rate('swarmnode_rollouts_admitted_total')})", "admitted"),
            (f"sum({rate('swarmnode_rollouts_ignored_total')})", "ignored"),
            (f"sum({rate('swarmnode_rollouts_rejected_total')})", "rejected"),
            unit="ops",
            stack=True,
            width=12,
        ),
        p(
            "Groups per second",
            (rate("swarmnode_rollouts_published_total"), "{{instance}} published"),
            (rate("swarmnode_rollouts_received_total"), "{{instance}} received"),
            (rate("swarmnode_rollouts_drawn_total"), "{{instance}} drawn"),
            (
                f'sum by (instance) (rate(swarmnode_rollouts_judged_total{{{I}, outcome="used"}}'
                "[$__rate_interval]))",
                "{{instance}} used",
            ),
            unit="ops",
            width=12,
        ),
        p(
            "Staleness of used groups",
            (quantile(0.5, "swarmnode_rollout_staleness_versions"), "{{instance}} median"),
            (quantile(0.95, "swarmnode_rollout_staleness_versions"), "{{instance}} p95"),
        ),
        p(
            "Groups fetched",
            (total("swarmnode_rollouts_pulled_total", "outcome"), "{{outcome}}"),
            unit="ops",
        ),
        p(
            "Polls of listings",
            (total("swarmnode_rollouts_listings_total", "outcome"), "{{outcome}}"),
            unit="ops",
        ),
        p(
            "False listings per hour",
            (
                f"sum by (lie) (increase(swarmnode_rollouts_listing_lies_total{{{I}}}[1h]))",
                "{{lie}}",
            ),
        ),
        p(
            "Groups on offer",
            (f"swarmnode_rollouts_offered{{{I}}}", "{{instance}} by peers"),
            (f"swarmnode_rollouts_shelf_groups{{{I}}}", "{{instance}} here"),
        ),
        p(
            "Answers to peers",
            (total("swarmnode_rollouts_served_total", "outcome"), "{{outcome}}"),
            unit="ops",
        ),
        p("Polls held open", gauge("swarmnode_rollouts_polls_held")),
        p("Pool", gauge("swarmnode_pool_groups")),
        p("Pool size", gauge("swarmnode_pool_bytes"), unit="bytes", width=6),
        p("Peers in the pool", gauge("swarmnode_pool_peers"), width=6),
        p("Oldest group in the pool", gauge("swarmnode_pool_oldest_seconds"), unit="s", width=6),
        p(
            "Groups lost from the pool",
            (total("swarmnode_pool_dropped_total", "reason"), "{{reason}}"),
            unit="ops",
            width=6,
        ),
    ],
    "Weights": [
        p(
            "Outer steps and tries per minute, by how they ended",
            (f"60 * {total('swarmnode_weights_exchanges_total', 'outcome')}", "{{outcome}}"),
            stack=True,
            width=12,
        ),
        p(
            "Failed exchanges per hour, by cause",
            (
                f"sum by (cause) (increase(swarmnode_weights_failures_total{{{I}}}[1h]))",
                "{{cause}}",
            ),
            width=6,
        ),
        p(
            "Partners' weights per minute, by what the gate made of them",
            (f"60 * {total('swarmnode_weights_judged_total', 'outcome')}", "{{outcome}}"),
            width=6,
        ),
        p(
            "Distance of the last partner",
            gauge("swarmnode_weights_distance"),
            unit="percentunit",
            width=6,
        ),
        p(
            "Share of its difference that was taken",
            gauge("swarmnode_weights_clip_ratio"),
            unit="percentunit",
            top=1,
            width=6,
        ),
        p("Outer steps", gauge("swarmnode_weights_outer_step"), width=6),
        p("Outer steps that the last partner was behind", gauge("swarmnode_weights_lag"), width=6),
        p("Partners to choose from", gauge("swarmnode_weights_candidates"), width=6),
        p(
            "Exchanging, and training stood still for it",
            (rate("swarmnode_weights_exchange_seconds_total"), "{{instance}} exchanging"),
            (rate("swarmnode_weights_stall_seconds_total"), "{{instance}} stood still"),
            unit="percentunit",
            width=6,
        ),
        p(
            "Bytes of partners' weights",
            rate("swarmnode_weights_received_bytes_total"),
            unit="Bps",
            width=6,
        ),
        p(
            "States of neighbours",
            (
                f"sum by (outcome) (increase(swarmnode_weights_adoptions_total{{{I}}}[1h]))",
                "{{outcome}} per hour",
            ),
            width=12,
        ),
        p(
            "Exchanges taken back per day",
            f"increase(swarmnode_weights_reverts_total{{{I}}}[1d])",
            width=12,
        ),
    ],
    "Crews": [
        p(
            "Crew",
            (f"{gauge('swarmnode_crew_state')} == 1", "{{instance}} {{state}}"),
            kind="timeline",
            width=6,
        ),
        p(
            "Stages that are not active, as each member sees its crew",
            (f'swarmnode_crew_slots{{{I}, state!="active"}} > 0', "{{instance}} {{state}}"),
            width=6,
        ),
        p("Standing still", gauge("swarmnode_crew_standing_seconds"), unit="s", width=6),
        p(
            "Recovery of a crew",
            (
                (
                    "histogram_quantile(0.5, sum by (le)"
                    f" (increase(swarmnode_crew_recovery_seconds_bucket{{{I}}}[1d])))"
                ),
                "median of the last day",
            ),
            (
                (
                    "histogram_quantile(0.95, sum by (le)"
                    f" (increase(swarmnode_crew_recovery_seconds_bucket{{{I}}}[1d])))"
                ),
                "p95 of the last day",
            ),
            unit="s",
            width=6,
        ),
        p(
            "What members saw happen, per hour",
            (f"sum by (event) (increase(swarmnode_crew_events_total{{{I}}}[1h]))", "{{event}}"),
            width=12,
        ),
        p("Heartbeats wait", gauge("swarmnode_crew_heartbeat_seconds"), unit="s", width=6),
        p(
            "Not answered per hour",
            (
                f"sum by (message) (increase(swarmnode_crew_unanswered_total{{{I}}}[1h]))",
                "{{message}} not answered",
            ),
            (
                f"sum by (instance) (increase(swarmnode_stage_trainer_restarts_total{{{I}}}[1h]))",
                "{{instance}} trainer ended",
            ),
            width=6,
        ),
        p("Others that would hold a stage", gauge("swarmnode_crew_offers"), width=6),
    ],
    "Claimed by peers, not verified": [
        p("Peers that say how they are", gauge("swarmnode_claimed_peers"), width=6),
        p(
            "Median of their held-out rewards",
            gauge("swarmnode_claimed_reward_median"),
            top=1,
            width=6,
        ),
        p(
            "Median of their policy versions",
            gauge("swarmnode_claimed_policy_version_median"),
            width=6,
        ),
        p(
            "Summaries heard",
            (total("swarmnode_summaries_total", "outcome"), "{{outcome}}"),
            unit="ops",
            width=6,
        ),
    ],
    "Network": [
        p("Peers", (gauge("swarmnode_peers"), "{{instance}} {{direction}}"), width=6),
        p("Known peers", gauge("swarmnode_peers_known"), width=6),
        p(
            "Peers let go for others per hour",
            (f"increase(swarmnode_peers_dropped_total{{{I}}}[1h])", "{{instance}} {{why}}"),
            width=6,
        ),
        p("Polled peers", gauge("swarmnode_polled_peers"), width=6),
        p(
            "Can strangers dial it?",
            (f"{gauge('swarmnode_reach')} == 1", "{{instance}} {{verdict}}"),
            kind="timeline",
            width=6,
        ),
        p(
            "Relays",
            (gauge("swarmnode_peers_relayed"), "{{instance}} peers by relay"),
            (gauge("swarmnode_relays"), "{{instance}} relays"),
            (gauge("swarmnode_relay_circuits"), "{{instance}} circuits for others"),
            width=6,
        ),
        p("Carried for others", rate("swarmnode_relay_bytes_total"), unit="Bps", width=6),
        p(
            "Hole punches",
            (total("swarmnode_hole_punches_total", "outcome"), "{{outcome}}"),
            unit="ops",
            width=6,
        ),
        p(
            "Dials",
            (rate("swarmnode_dials_total"), "{{instance}} all"),
            (rate("swarmnode_dial_failures_total"), "{{instance}} failed"),
            unit="ops",
            width=6,
        ),
        p(
            "Bytes",
            (
                total("swarmnode_network_bytes_total", "protocol, direction"),
                "{{protocol}} {{direction}}",
            ),
            unit="Bps",
        ),
        p("Requests", (total("swarmnode_requests_total", "outcome"), "{{outcome}}"), unit="ops"),
    ],
    "Budget": [
        p(
            "Sharing paused by",
            (f"{gauge('swarmnode_budget_paused')} == 1", "{{instance}} {{reason}}"),
            kind="timeline",
            width=6,
        ),
        p(
            "Left in the buckets",
            (gauge("swarmnode_budget_level_bytes"), "{{instance}} {{direction}}"),
            unit="bytes",
            width=6,
        ),
        p(
            "This month",
            (gauge("swarmnode_budget_month_bytes"), "{{instance}} {{direction}}"),
            (gauge("swarmnode_budget_month_limit_bytes"), "{{instance}} limit"),
            unit="bytes",
            width=6,
        ),
        p(
            "Left out for want of budget",
            (rate("swarmnode_budget_refusals_total", "what"), "{{instance}} {{what}}"),
            unit="ops",
            width=6,
        ),
    ],
}

SECURITY: dict[str, list[Panel]] = {
    "What was refused": [
        p(
            "Rejected, by reason",
            (total("swarmnode_rollouts_rejected_total", "reason"), "{{reason}}"),
            unit="ops",
            stack=True,
            width=12,
        ),
        p(
            "Ignored, by reason",
            (total("swarmnode_rollouts_ignored_total", "reason"), "{{reason}}"),
            unit="ops",
            stack=True,
            width=12,
        ),
        p(
            "Rejected share of what arrives",
            f"{rate('swarmnode_rollouts_rejected_total')} /"
            f" {rate('swarmnode_rollouts_received_total')}",
            unit="percentunit",
            top=1,
        ),
        p(
            "Drawn groups, by the trainer's verdict",
            (total("swarmnode_rollouts_judged_total", "outcome"), "{{outcome}}"),
            unit="ops",
        ),
        p(
            "Own groups that were not shared",
            (
                "sum by (reason) (rate(swarmnode_dropped_total"
                f'{{{I}, what="group"}}[$__rate_interval]))',
                "{{reason}}",
            ),
            unit="ops",
        ),
    ],
    "Between stages": [
        p(
            "Streams refused",
            (total("swarmnode_stage_streams_refused_total", "reason"), "{{reason}}"),
            unit="ops",
        ),
        p(
            "Frames that counted for nothing",
            (total("swarmnode_stage_frames_dropped_total", "reason"), "{{reason}}"),
            unit="ops",
        ),
        p(
            "State refused, or not given",
            (total("swarmnode_stage_state_refused_total", "reason"), "{{reason}}"),
            unit="ops",
        ),
    ],
    "Who is kept away": [
        p("Greylisted peers", gauge("swarmnode_peers_greylisted")),
        p("Banned peers", gauge("swarmnode_peers_banned")),
        p(
            "Requests of peers",
            (total("swarmnode_requests_served_total", "outcome"), "{{outcome}}"),
            unit="ops",
        ),
    ],
    "What held": [
        p(
            "Guards around libp2p",
            (total("swarmnode_guard_firings_total", "guard"), "{{guard}}"),
            unit="ops",
            width=12,
        ),
        p(
            "Scorers replaced per hour",
            (f"increase(swarmnode_scorer_restarts_total{{{I}}}[1h])", "{{instance}} {{process}}"),
            width=6,
        ),
        p(
            "Memory of the network process",
            gauge("swarmnode_process_memory_bytes", process="network"),
            unit="bytes",
            width=6,
        ),
    ],
}

BOARDS = {
    "node": (
        "swarmnode: node",
        "One node: is it well, does it learn, how fast, what failed.",
        NODE,
    ),
    "swarm": (
        "swarmnode: swarm",
        "All your nodes: what travels between them and their peers, and whether it helps.",
        SWARM,
    ),
    "security": (
        "swarmnode: security",
        "What peers tried that honest peers do not try, and what became of it.",
        SECURITY,
    ),
}
COLLAPSED = {
    "Accelerator, reference policy and majority": (
        "only with an accelerator; the KL divergence only with training.beta above 0; majorities"
        " only with the verifier majority"
    ),
    "Stage": "only for a node in a crew",
    "Weights": "only with weights.rule on",
    "Crews": "only for nodes in a crew",
    "Budget": "only with caps, a month's limit or quiet hours",
    "Between stages": "only for nodes in a crew",
}
"""Rows that are closed until somebody opens them, because on many nodes they have no data, and when
they have some."""
FAMILIES = {metric.name: metric for metric in METRICS}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def metric_names(expression: str) -> list[str]:
    """The registered families that an expression reads, and whatever else looks like one of
    ours."""
    found = re.findall(r"\bswarmnode_[a-z0-9_]+", expression)
    return [
        re.sub(r"_(bucket|sum|count)$", "", name) if name not in FAMILIES else name
        for name in found
    ]


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    names = dict.fromkeys(
        name for expression, _ in panel.targets for name in metric_names(expression)
    )
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0} if panel.kind != "table" else {}
    if panel.title in SIGNED:
        del defaults["min"]
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.kind == "timeseries":
        fill = 60 if panel.stack else 8
        stacking = {"mode": "normal" if panel.stack else "none", "group": "A"}
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": fill,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": stacking,
        }
    if panel.kind == "timeline":
        defaults["custom"] = {"lineWidth": 0, "fillOpacity": 70, "spanNulls": False}
    last: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    options: dict[str, Any] = {
        "timeseries": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "stat": {**last, "graphMode": "area", "textMode": "auto"},
        # of a single series `auto` would show the value, a 1
        "state": {**last, "graphMode": "none", "textMode": "name"},
        "timeline": {
            "mergeValues": True,
            "showValue": "never",
            "rowHeight": 0.9,
            "legend": {"showLegend": False},
        },
        "table": {"showHeader": True},
    }[panel.kind]
    # not what held in the past, too
    once = {"table": {"instant": True, "format": "table"}, "state": {"instant": True}}.get(
        panel.kind, {}
    )
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": legend,
            **once,
        }
        for i, (expression, legend) in enumerate(panel.targets)
    ]
    return {
        "id": number,
        "type": {"state": "stat", "timeline": "state-timeline"}.get(panel.kind, panel.kind),
        "title": panel.title,
        "description": "\n".join(
            f"`{name}`: {FAMILIES[name].help}" for name in names if name in FAMILIES
        ),
        "datasource": SOURCE,
        "gridPos": {
            "x": x,
            "y": y,
            "w": panel.width,
            "h": {"stat": 4, "state": 4, "table": 4}.get(panel.kind, 8),
        },
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def dashboard(uid: str) -> dict[str, Any]:
    """One dashboard in Grafana's JSON model (schema 39, Grafana 10.4 and later)."""
    title, description, rows = BOARDS[uid]
    panels: list[dict[str, Any]] = []
    y = 0
    number = 0
    for row, content in rows.items():
        number += 1
        head = {
            "id": number,
            "type": "row",
            "title": row,
            "collapsed": row in COLLAPSED,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
        }
        panels.append(head)
        inside: list[dict[str, Any]] = head["panels"] if row in COLLAPSED else panels
        below, x, tallest = y + 1, 0, 0
        for panel in content:
            if x + panel.width > 24:
                x, below, tallest = 0, below + tallest, 0
            number += 1
            made = panel_json(panel, number, x, below)
            inside.append(made)
            x, tallest = x + panel.width, max(tallest, made["gridPos"]["h"])
        y = y + 1 if row in COLLAPSED else below + tallest
    one = {"multi": False, "includeAll": False}
    every = {
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "label": "Node",
            "type": "query",
            "datasource": SOURCE,
            "refresh": 2,
            "query": "label_values(swarmnode_build_info, instance)",
            **(one if uid == "node" else every),
        },
    ]
    return {
        "uid": f"swarmnode-{uid}",
        "title": title,
        "description": description,
        "tags": ["swarmnode"],
        "editable": True,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "links": [
            {
                "type": "dashboards",
                "tags": ["swarmnode"],
                "asDropdown": False,
                "title": "",
                "icon": "external link",
            }
        ],
        "annotations": {"list": []},
        "panels": panels,
    }


def metrics_table() -> str:
    """Markdown rows of every metric."""
    rows = [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {where(m)} |"
        f" {m.help} |"
        for m in METRICS
    ]
    return "\n".join(
        [
            "| metric | type | labels | below `snapshot` in `/status` | what |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )


def where(metric: Metric) -> str:
    """Where /status has the numbers of a metric; empty where it is worked out from several."""
    if callable(metric.source):
        return ""
    return ", ".join(
        f"`{path}`"
        for path in ([metric.source] if isinstance(metric.source, str) else metric.source.values())
    )


def alerts_table() -> str:
    """Markdown rows of every alert."""
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    rows = [
        f"| `{r['alert']}` | {r['labels']['severity']} | {r.get('for', 'at once')} |"
        f" {r['annotations']['description']} |"
        for r in rules
    ]
    return re.sub(
        r"\{\{.*?\}\}",
        "…",
        "\n".join(["| alert | severity | after | what it means |", "|---|---|---|---|", *rows]),
    )


def outputs() -> dict[Path, str]:
    """Every generated file with its text."""
    files = {
        DASHBOARDS / f"{uid}.json": json.dumps(dashboard(uid), indent=1, ensure_ascii=False) + "\n"
        for uid in BOARDS
    }
    text = MONITORING.read_text()
    for name, table in (("metrics", metrics_table()), ("alerts", alerts_table())):
        begin, end = (
            f"<!-- {name}: written by deploy/grafana/build.py -->\n",
            f"<!-- end of {name} -->",
        )
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}"
    files[MONITORING] = text
    return files


def main() -> int:
    for path, text in outputs().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
