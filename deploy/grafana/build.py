"""Write the Grafana dashboards and the tables of docs/monitoring.md.

Run it after a change of swarmnode/observe/metrics.py, deploy/prometheus/rules.yml or this file:

    python deploy/grafana/build.py

A panel has a title, expressions with legends, and a unit. Its description is the help text of its
metrics. tests/deploy checks that the written files are up to date and that each metric is on a
panel.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from swarmnode.observe.metrics import METRICS

ROOT = Path(__file__).parents[2]
DASHBOARDS = Path(__file__).parent / "dashboards"
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
MONITORING = ROOT / "docs" / "monitoring.md"

I = 'instance=~"$instance"'  # noqa: E741 - short, because it is in every expression

SIGNED = (
    "Reward of peers' groups minus own",
    "Peers' clocks ahead of this one",
)
"""Panels whose axis goes below 0."""


@dataclass(frozen=True)
class Panel:
    title: str
    targets: tuple[tuple[str, str], ...]
    """Pairs of expression and legend. A legend may use {{label}}."""
    unit: str = "short"
    kind: str = "timeseries"
    """timeseries, stat or table; `state`: the name of the present state; `timeline`: a bar for each
    state over time."""
    stack: bool = False
    top: float | None = None
    """Upper end of the axis."""
    width: int = 8


def p(title: str, *targets: str | tuple[str, str], **options: Any) -> Panel:
    """Return a panel. The legend of an expression without one is the instance."""
    return Panel(
        title, tuple(t if isinstance(t, tuple) else (t, "{{instance}}") for t in targets), **options
    )


def rate(metric: str, by: str = "") -> str:
    """Return the rate per second, summed over all labels but `by` and the instance."""
    inside = f"rate({metric}{{{I}}}[$__rate_interval])"
    return f"sum by (instance{', ' + by if by else ''}) ({inside})"


def total(metric: str, by: str) -> str:
    """Return the rate per second of all nodes together, by the labels `by`."""
    return f"sum by ({by}) (rate({metric}{{{I}}}[$__rate_interval]))"


def quantile(q: float, metric: str) -> str:
    return (
        f"histogram_quantile({q}, sum by (instance, le)"
        f" (rate({metric}_bucket{{{I}}}[$__rate_interval])))"
    )


def gauge(metric: str, **labels: str) -> str:
    matchers = [I, *(f'{name}="{value}"' for name, value in labels.items())]
    return f"{metric}{{{', '.join(matchers)}}}"


ALERTS = p(
    "Alerts",
    (f"sum by (alertstate, severity, alertname, instance) (ALERTS{{{I}}})", ""),
    kind="table",
    width=24,
)
"""The alerts of deploy/prometheus/rules.yml, from the series that Prometheus writes for them."""

NODE: dict[str, list[Panel]] = {
    "State": [
        ALERTS,
        p("Ready", gauge("swarmnode_ready"), kind="stat", unit="bool_yes_no", width=3),
        p(
            "Trainer",
            (f"{gauge('swarmnode_trainer_phase')} == 1", "{{phase}}"),
            kind="state",
            width=5,
        ),
        p(
            "Held-out reward",
            (gauge("swarmnode_reward", source="held_out"), "questions {{questions}}"),
            kind="stat",
            width=4,
        ),
        p("Policy version", gauge("swarmnode_policy_version"), kind="stat", width=4),
        p("Steps a crash would lose", gauge("swarmnode_unsaved_steps"), kind="stat", width=4),
        p(
            "Restarts, last day",
            (f"sum by (process) (increase(swarmnode_restarts_total{{{I}}}[1d]))", "{{process}}"),
            kind="stat",
            width=4,
        ),
        p("Node", gauge("swarmnode_node_info"), kind="table", width=24),
    ],
    "Learning": [
        p(
            "Reward",
            (gauge("swarmnode_reward"), "{{source}} ({{questions}})"),
            (
                f"{gauge('swarmnode_reward', source='held_out')} - ignoring(source, questions)"
                f" 2 * {gauge('swarmnode_reward_held_out_error')}",
                "held_out − 2 standard errors ({{questions}})",
            ),
            (
                f"{gauge('swarmnode_reward', source='held_out')} + ignoring(source, questions)"
                f" 2 * {gauge('swarmnode_reward_held_out_error')}",
                "held_out + 2 standard errors ({{questions}})",
            ),
            top=1,
            width=12,
        ),
        p("Reward by task", (gauge("swarmnode_task_reward"), "{{task}}"), top=1, width=12),
        p(
            "Groups without advantage",
            gauge("swarmnode_zero_advantage_share"),
            unit="percentunit",
            top=1,
            width=6,
        ),
        p("Entropy", gauge("swarmnode_entropy"), width=6),
        p("Gradient norm", gauge("swarmnode_gradient_norm"), width=6),
        p(
            "Completion length, tokens",
            (gauge("swarmnode_completion_tokens"), "{{statistic}}"),
            width=6,
        ),
        p(
            "Completions cut at the length limit",
            (gauge("swarmnode_completion_cut_share"), "cut"),
            (gauge("swarmnode_cut_rewarded_share"), "cut, with reward 1"),
            unit="percentunit",
            top=1,
            width=6,
        ),
        p("Steps per minute", f"60 * {rate('swarmnode_steps_total')}", width=6),
        p(
            "Failed rewards per hour",
            (f"sum by (task) (increase(swarmnode_reward_errors_total{{{I}}}[1h]))", "{{task}}"),
            (
                f"sum by (task) (increase(swarmnode_sandbox_refusals_total{{{I}}}[1h]))",
                "{{task}}: refused by the sandbox",
            ),
            width=6,
        ),
        p(
            "Dropped per hour",
            (
                f"sum by (kind, reason) (increase(swarmnode_dropped_total{{{I}}}[1h])) > 0",
                "{{kind}}: {{reason}}",
            ),
            width=24,
        ),
    ],
    "Speed": [
        p(
            "Duration of a step",
            (quantile(0.5, "swarmnode_step_seconds"), "median"),
            (quantile(0.95, "swarmnode_step_seconds"), "p95"),
            unit="s",
        ),
        p("Parts of a step", (gauge("swarmnode_phase_seconds"), "{{phase}}"), unit="s", stack=True),
        p(
            "Tokens per second",
            (gauge("swarmnode_tokens_per_second"), "per second of a step"),
            (rate("swarmnode_tokens_total", "use"), "{{use}}, overall"),
        ),
        p("Memory", (gauge("swarmnode_process_memory_bytes"), "{{process}}"), unit="bytes"),
        p(
            "CPU",
            (rate("swarmnode_process_cpu_seconds_total", "process"), "{{process}}"),
            unit="percentunit",
        ),
        p(
            "Log-probabilities: engine against trainer, nats",
            gauge("swarmnode_sampler_gap"),
        ),
    ],
    "Supervision": [
        p(
            "Restarts per hour",
            (f"increase(swarmnode_restarts_total{{{I}}}[1h])", "{{process}} {{reason}}"),
        ),
        p(
            "Out-of-memory retries per hour",
            f"increase(swarmnode_out_of_memory_retries_total{{{I}}}[1h])",
        ),
        p("Event loop lag", gauge("swarmnode_event_loop_lag_seconds"), unit="s"),
        p(
            "The last save of the state failed",
            gauge("swarmnode_state_save_failed"),
            unit="bool_yes_no",
            top=1,
        ),
        p(
            "A save is overdue",
            f"time() - {gauge('swarmnode_state_due_timestamp_seconds')}",
            unit="s",
        ),
        p(
            "Disk of the data directory",
            (gauge("swarmnode_disk_free_bytes"), "free"),
            (gauge("swarmnode_disk_size_bytes"), "size"),
            unit="bytes",
        ),
        p("Peers' clocks ahead of this one", gauge("swarmnode_clock_offset_seconds"), unit="s"),
        p(
            "A successor swarm waits",
            gauge("swarmnode_successor_waiting"),
            unit="bool_yes_no",
            top=1,
        ),
    ],
    "Optional features": [
        p("Peak memory of the accelerator", gauge("swarmnode_device_memory_bytes"), unit="bytes"),
        p(
            "Inference server samples",
            gauge("swarmnode_server_sampling"),
            unit="bool_yes_no",
            top=1,
        ),
        p(
            "Failures of the inference server per hour",
            (f"increase(swarmnode_server_failures_total{{{I}}}[1h])", "{{reason}}"),
        ),
        p(
            "Sampling time spent in environments",
            gauge("swarmnode_environment_share"),
            unit="percentunit",
            top=1,
        ),
        p(
            "Learning problem",
            (f"{gauge('swarmnode_learning_problem')} == 1", "{{problem}}"),
            kind="state",
        ),
    ],
    "Stage": [
        p("Crew", (f"{gauge('swarmnode_crew_state')} == 1", "{{state}}"), kind="state", width=6),
        p("Stage", gauge("swarmnode_stage_index"), kind="stat", width=4),
        p(
            "Phase",
            (f"{gauge('swarmnode_stage_phase')} == 1", "{{phase}}"),
            kind="state",
            width=6,
        ),
        p(
            "Restorations by source, last day",
            (
                f"sum by (source) (increase(swarmnode_stage_restorations_total{{{I}}}[1d]))",
                "{{source}}",
            ),
            kind="stat",
            width=8,
        ),
        p(
            "Age of the newest checkpoint at a neighbour, steps",
            gauge("swarmnode_stage_checkpoint_age_steps"),
        ),
        p(
            "Share of the time spent waiting",
            (gauge("swarmnode_stage_bubble_share"), "for other stages"),
            (rate("swarmnode_stage_throttled_seconds_total"), "for the byte budget"),
            unit="percentunit",
        ),
        p(
            "Refused between stages",
            (rate("swarmnode_stage_refusals_total", "kind, reason"), "{{kind}}: {{reason}}"),
            unit="ops",
        ),
    ],
}

SWARM: dict[str, list[Panel]] = {
    "Alerts": [ALERTS],
    "Does sharing help": [
        p(
            "Held-out reward",
            (gauge("swarmnode_reward", source="held_out"), "{{instance}} ({{questions}})"),
            top=1,
            width=12,
        ),
        p(
            "Reward of peers' groups minus own",
            (
                f"{gauge('swarmnode_reward', source='external')} - ignoring(source)"
                f" {gauge('swarmnode_reward', source='own')}",
                "{{instance}} ({{questions}})",
            ),
            width=12,
        ),
        p(
            "Groups trained on per minute",
            (f"60 * {rate('swarmnode_trained_groups_total', 'source')}", "{{instance}} {{source}}"),
            width=12,
        ),
        p(
            "Effective sample size",
            (gauge("swarmnode_effective_sample_share"), "{{instance}} {{source}}"),
            unit="percentunit",
            top=1,
        ),
    ],
    "Rollouts": [
        p(
            "Groups from peers, by verdict",
            (total("swarmnode_rollouts_admission_total", "verdict"), "{{verdict}}"),
            unit="ops",
            stack=True,
        ),
        p(
            "Groups of peers, by the trainer's judgement",
            (total("swarmnode_rollouts_judged_total", "outcome"), "{{outcome}}"),
            unit="ops",
        ),
        p("Groups published", rate("swarmnode_rollouts_published_total"), unit="ops"),
        p(
            "Age of used groups, policy versions",
            (quantile(0.5, "swarmnode_rollout_staleness_versions"), "{{instance}} median"),
            (quantile(0.95, "swarmnode_rollout_staleness_versions"), "{{instance}} p95"),
        ),
        p("Groups in the pool", gauge("swarmnode_pool_groups")),
        p(
            "Responses to peers' polls and fetches",
            (total("swarmnode_rollouts_served_total", "outcome"), "{{outcome}}"),
            unit="ops",
        ),
    ],
    "Weights": [
        p(
            "Outer steps and attempts per minute",
            (f"60 * {total('swarmnode_weights_exchanges_total', 'outcome')}", "{{outcome}}"),
            stack=True,
        ),
        p(
            "Failed swaps per hour, by cause",
            (
                f"sum by (cause) (increase(swarmnode_weights_failures_total{{{I}}}[1h]))",
                "{{cause}}",
            ),
        ),
        p(
            "Partners' weights per minute, by outcome at the gate",
            (f"60 * {total('swarmnode_weights_judged_total', 'outcome')}", "{{outcome}}"),
        ),
        p(
            "Distance of the last partner",
            gauge("swarmnode_weights_distance"),
            unit="percentunit",
            width=6,
        ),
        p("Possible partners", gauge("swarmnode_weights_candidates"), width=6),
        p(
            "Time for which training stood still",
            rate("swarmnode_weights_stall_seconds_total"),
            unit="percentunit",
        ),
    ],
    "Crews": [
        p(
            "Crew",
            (f"{gauge('swarmnode_crew_state')} == 1", "{{instance}} {{state}}"),
            kind="timeline",
        ),
        p("Time since the crew last ran", gauge("swarmnode_crew_stopped_seconds"), unit="s"),
        p("Other nodes that offer to hold a stage", gauge("swarmnode_crew_offers")),
        p(
            "Events per hour, as members count them",
            (f"sum by (event) (increase(swarmnode_crew_events_total{{{I}}}[1h]))", "{{event}}"),
            width=12,
        ),
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
            width=12,
        ),
    ],
    "Claims of peers, not verified": [
        p("Nodes with a recent summary", gauge("swarmnode_claimed_peers"), width=12),
        p(
            "Median of their held-out rewards",
            gauge("swarmnode_claimed_reward_median"),
            top=1,
            width=12,
        ),
    ],
    "Network": [
        p(
            "Peers",
            (gauge("swarmnode_peers"), "{{instance}} {{direction}}"),
            (gauge("swarmnode_peers_known"), "{{instance}} known"),
        ),
        p(
            "Can strangers dial the node?",
            (f"{gauge('swarmnode_reach')} == 1", "{{instance}} {{verdict}}"),
            kind="timeline",
        ),
        p("Relays of a private node", gauge("swarmnode_relays")),
        p(
            "Dials and hole punches",
            (
                total("swarmnode_dials_total", "method, outcome"),
                "{{method}} {{outcome}}",
            ),
            unit="ops",
        ),
        p(
            "Requests",
            (
                total("swarmnode_requests_total", "direction, outcome"),
                "{{direction}} {{outcome}}",
            ),
            unit="ops",
        ),
        p(
            "Bytes",
            (
                total("swarmnode_network_bytes_total", "protocol, direction"),
                "{{protocol}} {{direction}}",
            ),
            unit="Bps",
        ),
        p("Bytes carried as a relay", rate("swarmnode_relay_bytes_total"), unit="Bps"),
    ],
    "Budget": [
        p(
            "Sharing paused by",
            (f"{gauge('swarmnode_budget_paused')} == 1", "{{instance}} {{reason}}"),
            kind="timeline",
        ),
        p(
            "Bytes this month",
            (gauge("swarmnode_budget_month_bytes"), "{{instance}} {{direction}}"),
            (gauge("swarmnode_budget_month_limit_bytes"), "{{instance}} limit"),
            unit="bytes",
        ),
        p(
            "Skipped because of a cap",
            (rate("swarmnode_budget_refusals_total", "action"), "{{instance}} {{action}}"),
            unit="ops",
        ),
    ],
}

SECURITY: dict[str, list[Panel]] = {
    "Refused groups": [
        p(
            "Rejected, by reason",
            (
                "sum by (reason) (rate(swarmnode_rollouts_admission_total"
                f'{{{I}, verdict="rejected"}}[$__rate_interval]))',
                "{{reason}}",
            ),
            unit="ops",
            stack=True,
            width=12,
        ),
        p(
            "Ignored, by reason",
            (
                "sum by (reason) (rate(swarmnode_rollouts_admission_total"
                f'{{{I}, verdict="ignored"}}[$__rate_interval]))',
                "{{reason}}",
            ),
            unit="ops",
            stack=True,
            width=12,
        ),
        p(
            "Examined by the trainer, by outcome",
            (total("swarmnode_rollouts_judged_total", "outcome"), "{{outcome}}"),
            unit="ops",
            width=12,
        ),
        p(
            "False listings per hour",
            (
                f"sum by (kind) (increase(swarmnode_rollouts_false_listings_total{{{I}}}[1h]))",
                "{{kind}}",
            ),
            width=12,
        ),
    ],
    "Peers": [
        p("Excluded peers", (gauge("swarmnode_peers_excluded"), "{{instance}} {{state}}")),
        p(
            "Requests of peers, by outcome",
            (
                "sum by (outcome) (rate(swarmnode_requests_total"
                f'{{{I}, direction="in"}}[$__rate_interval]))',
                "{{outcome}}",
            ),
            unit="ops",
        ),
        p(
            "Own groups that were not shared",
            (
                "sum by (reason) (rate(swarmnode_dropped_total"
                f'{{{I}, kind="group"}}[$__rate_interval]))',
                "{{reason}}",
            ),
            unit="ops",
        ),
    ],
    "Defences": [
        p(
            "Guards around libp2p",
            (total("swarmnode_guard_firings_total", "guard"), "{{guard}}"),
            unit="ops",
        ),
        p(
            "Scorers replaced per hour",
            (f"increase(swarmnode_scorer_restarts_total{{{I}}}[1h])", "{{instance}} {{process}}"),
        ),
        p(
            "Memory of the network process",
            gauge("swarmnode_process_memory_bytes", process="network"),
            unit="bytes",
        ),
    ],
    "Between stages": [
        p(
            "Refused between stages",
            (total("swarmnode_stage_refusals_total", "kind, reason"), "{{kind}}: {{reason}}"),
            unit="ops",
            width=24,
        ),
    ],
}

BOARDS = {
    "node": ("swarmnode: node", "One node: its state, learning, speed and failures.", NODE),
    "swarm": (
        "swarmnode: swarm",
        "All nodes: what they exchange with each other and with peers, and whether it helps.",
        SWARM,
    ),
    "security": (
        "swarmnode: security",
        "What peers sent that this swarm refuses, and the defences that stopped it.",
        SECURITY,
    ),
}
COLLAPSED = {
    "Optional features": ("an accelerator, an inference server, tasks of several turns"),
    "Stage": "only for a node in a crew",
    "Weights": "only with weights.rule on",
    "Crews": "only for nodes in a crew",
    "Budget": "only with caps, a monthly limit or quiet hours",
    "Between stages": "only for nodes in a crew",
}
"""Rows that are closed at first, because many nodes have no data for them, and when they do."""
FAMILIES = {metric.name: metric for metric in METRICS}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def metric_names(expression: str) -> list[str]:
    """Return the names of the metrics that an expression reads."""
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
        # with `auto`, a single series would show its value, 1
        "state": {**last, "graphMode": "none", "textMode": "name"},
        "timeline": {
            "mergeValues": True,
            "showValue": "never",
            "rowHeight": 0.9,
            "legend": {"showLegend": False},
        },
        "table": {"showHeader": True},
    }[panel.kind]
    # a range query would also show past states
    once = {"table": {"instant": True, "format": "table"}, "state": {"instant": True}}.get(
        panel.kind, {}
    )
    made: dict[str, Any] = {}
    if panel is ALERTS:
        hidden = {"Time": True, "Value": True}
        made["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
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
        )
        or "Alerts that fire or are pending. docs/monitoring.md has the remedies.",
        "datasource": SOURCE,
        "gridPos": {
            "x": x,
            "y": y,
            "w": panel.width,
            "h": 6 if panel is ALERTS else {"stat": 4, "state": 4, "table": 4}.get(panel.kind, 8),
        },
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
        **made,
    }


def dashboard(uid: str) -> dict[str, Any]:
    """Return a dashboard in Grafana's JSON model (schema 39, Grafana 10.4 and later)."""
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
            "query": "label_values(swarmnode_node_info, instance)",
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
        "annotations": {"list": [NEW_QUESTIONS]},
        "panels": panels,
    }


held_out = gauge("swarmnode_reward", source="held_out")
NEW_QUESTIONS = {
    "name": "Other held-out questions",
    "datasource": SOURCE,
    "enable": True,
    "iconColor": "orange",
    "expr": f"{held_out} unless {held_out} offset 2m",
    "step": "60s",
    "titleFormat": "{{instance}}: held-out questions {{questions}}",
}
"""A mark where the tasks of a node change; rewards on its two sides are not comparable."""


def metrics_table() -> str:
    """Return a Markdown table of all metrics, with the first sentence of each help text."""
    rows = [
        f"| `{m.name}{'{' + ', '.join(m.labels) + '}' if m.labels else ''}` |"
        f" {re.split(r'(?<=[.]) ', m.help)[0]} |"
        for m in METRICS
    ]
    return "\n".join(["| metric{labels} | meaning |", "|---|---|", *rows])


def alerts_table() -> str:
    """Return a Markdown table of all alerts."""
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    rows = []
    for rule in rules:
        meaning, _, remedy = rule["annotations"]["description"].partition(" Remedy: ")
        remedy = remedy[0].upper() + remedy[1:]
        rows.append(f"| `{rule['alert']}` | {rule['labels']['severity']} | {meaning} | {remedy} |")
    head = ["| alert | severity | meaning | remedy |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


def outputs() -> dict[Path, str]:
    """Return each generated file with its text."""
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
