"""Dashboards, rules and documentation match the registry: named metrics exist, and existing metrics
are shown."""

from __future__ import annotations

import json
import random
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from swarmnode.observe.metrics import METRICS

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")

FAMILIES = {family.name: family for family in METRICS}


def panel_expressions() -> list[str]:
    """Return the expressions of all boards, including those in collapsed rows."""
    boards = [json.loads(path.read_text()) for path in DASHBOARDS.glob("*.json")]
    rows = [panel for board in boards for panel in board["panels"]]
    panels = [each for row in rows for each in (row, *row.get("panels", []))]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def rules() -> list[dict]:
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def family_of(name: str) -> str:
    return name if name in FAMILIES else re.sub(r"_(bucket|sum|count)$", "", name)


def names_in(expressions: list[str]) -> set[str]:
    return {
        family_of(name)
        for expression in expressions
        for name in re.findall(r"\bswarmnode_[a-z0-9_]+", expression)
    }


def promtool(*arguments: str) -> str:
    """Run promtool, which must succeed, and return its output."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_named_metric_exists() -> None:
    named = names_in(panel_expressions() + [rule["expr"] for rule in rules()])
    assert named - FAMILIES.keys() == set()
    assert len(named) > 50


def test_every_metric_is_on_a_panel() -> None:
    assert FAMILIES.keys() - names_in(panel_expressions()) == set()


def test_generated_files_are_up_to_date() -> None:
    outputs = runpy.run_path(str(ROOT / "deploy" / "grafana" / "build.py"))["outputs"]
    for path, text in outputs().items():
        assert path.read_text() == text, f"{path}: run python deploy/grafana/build.py"


MINUTES = 420
QUESTIONS = "swarmnode_reward{source=held_out,questions=%s}"
HEALTHY = {
    "up{job=swarmnode}": "1x420",
    "swarmnode_ready": "1x420",
    "swarmnode_peers{direction=in}": "1x420",
    "swarmnode_peers{direction=out}": "2x420",
    "swarmnode_peers_known": "5x420",
    "swarmnode_steps_total": "0+2x420",
    "swarmnode_policy_version": "0+1x420",
    "swarmnode_phase_seconds{phase=generating}": "20x420",
    "swarmnode_phase_seconds{phase=training}": "10x420",
    QUESTIONS % "1f0c2a77": "0.2+0.001x420",
    "swarmnode_reward_held_out_error": "0.05x420",
    "swarmnode_zero_advantage_share": "0.4x420",
    "swarmnode_learning_problem{problem=unmoved}": "0x420",
    "swarmnode_unsaved_steps": "2x420",
    "swarmnode_state_save_failed": "0x420",
    "swarmnode_rollouts_published_total": "0+8x420",
    "swarmnode_dropped_total{kind=group,reason=zero_advantage}": "0+8x420",
    "swarmnode_budget_paused{reason=quiet_hours}": "0x420",
    "swarmnode_restarts_total{process=trainer,reason=ended}": "0x420",
    "swarmnode_successor_waiting": "0x420",
    "swarmnode_event_loop_lag_seconds": "0.01x420",
}
"""Series of a node with two steps a minute, by name, sampled once a minute."""
TRAINING = ("steps", "policy", "phase", "reward", "zero", "learning", "unsaved", "state", "dropped")
CHANCE = random.Random(1)
UNUSUAL: dict[str, dict[str, str | None]] = {
    "fast steps": {
        "swarmnode_steps_total": "0+600x420",
        "swarmnode_policy_version": "0+600x420",
        "swarmnode_unsaved_steps": "600x420",
        "swarmnode_state_due_timestamp_seconds": "0+60x420",  # each scrape sees a new save
    },
    "steps of 40 minutes": {
        "swarmnode_steps_total": "0x40 1x39 2x39 3x39 4x39 5x39 6x39 7x39 8x39 9x39 10x39",
        "swarmnode_policy_version": "0x40 1x39 2x39 3x39 4x39 5x39 6x39 7x39 8x39 9x39 10x39",
        "swarmnode_phase_seconds{phase=generating}": "_x40 1800x380",
        "swarmnode_phase_seconds{phase=training}": "_x40 600x380",
        "swarmnode_rollouts_published_total": "0x40 8x39 16x39 24x39 32x39 40x39 48x39 56x39 64x39",
        "swarmnode_dropped_total{kind=group,reason=zero_advantage}": "0x420",
    },
    "restart": {
        **{
            name: f"{values.split('x')[0]}x98 _x3 {values.split('x')[0]}x318"
            for name, values in HEALTHY.items()
            if "+" not in values
        },
        "up{job=swarmnode}": "1x98 0x3 1x318",
        "swarmnode_ready": "1x98 _x3 0x10 1x308",
        "swarmnode_steps_total": "0+2x98 _x13 190+2x308",
        "swarmnode_policy_version": "0+1x98 _x13 95+1x308",
        "swarmnode_rollouts_published_total": "0+8x98 _x3 0+8x318",
        "swarmnode_dropped_total{kind=group,reason=zero_advantage}": "0+8x98 _x13 0+8x308",
    },
    "quiet hours": {
        "swarmnode_steps_total": "0+2x60 120x360",
        "swarmnode_policy_version": "0+1x60 60x360",
        "swarmnode_rollouts_published_total": "0+8x60 480x360",
        "swarmnode_dropped_total{kind=group,reason=zero_advantage}": "0+8x60 480x360",
        "swarmnode_budget_paused{reason=quiet_hours}": "0x60 1x360",
    },
    "a lone node": {
        "swarmnode_peers{direction=in}": "0x420",
        "swarmnode_peers{direction=out}": "0x420",
        "swarmnode_peers_known": "0x420",
        "swarmnode_rollouts_published_total": "0x420",
    },
    "a new swarm": {
        "swarmnode_ready": "0x8 1x412",
        "swarmnode_peers{direction=in}": "0x60 1x360",
        "swarmnode_peers{direction=out}": "0x420",
        "swarmnode_peers_known": "0x60 1x360",
        "swarmnode_steps_total": "_x8 0x20 1+2x392",
        "swarmnode_policy_version": "_x8 0x20 0+1x392",
        QUESTIONS % "1f0c2a77": "_x20 0.02+0.001x400",
    },
    "a bootstrap node": {
        name: None for name in HEALTHY if name.startswith(tuple(f"swarmnode_{t}" for t in TRAINING))
    },
    "few held-out questions": {
        QUESTIONS % "1f0c2a77": " ".join(
            f"{sum(CHANCE.random() < 0.3 for _ in range(32)) / 32}x9" for _ in range(42)
        ),
        "swarmnode_reward_held_out_error": "0.08x420",
    },
    "after a successor": {
        "up{job=swarmnode}": "1x119 0x1 1x299",
        "swarmnode_ready": "1x119 _ 0x3 1x295",
        "swarmnode_steps_total": "0+2x119 _x4 240+2x296",
        "swarmnode_policy_version": "0+1x119 _x4 120+1x296",
        QUESTIONS % "1f0c2a77": "0.88x119",
        QUESTIONS % "b2046e91": "_x124 0.35+0.0005x296",
        "swarmnode_successor_waiting": "0x90 1x29 _ 0x299",
    },
}
"""What differs on healthy nodes in an unusual state; None: the series does not exist."""


@needs_promtool
@pytest.mark.parametrize("state", UNUSUAL)
def test_no_alert_fires_on_a_healthy_node(tmp_path, state) -> None:
    series = {}
    for name, values in (HEALTHY | UNUSUAL[state]).items():
        metric, _, labels = name.rstrip("}").partition("{")
        pairs = [pair.split("=") for pair in [*filter(None, labels.split(",")), "instance=a"]]
        if values is not None:
            series[metric + "{" + ",".join(f'{key}="{value}"' for key, value in pairs) + "}"] = (
                values
            )
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": rule["alert"], "exp_alerts": []}
            for minute in range(10, MINUTES, 10)
            for rule in rules()
        ],
    }
    shutil.copy(PROMETHEUS / "rules.yml", tmp_path)
    path = tmp_path / "test.yml"
    whole = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}
    path.write_text(yaml.safe_dump(whole))
    promtool("test", "rules", str(path))


def test_every_alert_has_a_test_and_a_severity() -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    raised = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert raised == {rule["alert"] for rule in rules()}
    assert {rule["labels"]["severity"] for rule in rules()} == {"critical", "warning"}


@needs_promtool
@pytest.mark.parametrize("name", ["prometheus.yml", "kubernetes.yml"])
def test_promtool_accepts_configuration_and_rules(tmp_path, name) -> None:
    """Debian's Prometheus lacks Kubernetes discovery, so the pods become fixed targets. The rest is
    unchanged."""
    config = yaml.safe_load((PROMETHEUS / name).read_text())
    if config["scrape_configs"][0].pop("kubernetes_sd_configs", None) == [{"role": "pod"}]:
        config["scrape_configs"][0]["static_configs"] = [{"targets": ["10.0.0.1:9465"]}]
    for other in ("rules.yml", "nodes.yml"):
        shutil.copy(PROMETHEUS / other, tmp_path)
    (tmp_path / name).write_text(yaml.safe_dump(config))
    promtool("check", "config", "--lint=all", "--lint-fatal", str(tmp_path / name))


@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not installed")
@pytest.mark.parametrize(("severity", "receiver"), [("critical", "now"), ("warning", "daily")])
def test_amtool_routes_by_severity(severity, receiver) -> None:
    config = str(PROMETHEUS / "alertmanager.yml")
    route = ["config", "routes", "test", f"--config.file={config}", "alertname=SwarmnodeDown"]
    for arguments, said in (
        (["check-config", config], "SUCCESS"),
        ([*route, f"severity={severity}"], receiver),
    ):
        command = ["amtool", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert said in done.stdout.split()


def test_kubernetes_pods_are_found_by_label() -> None:
    text = (ROOT / "deploy" / "kubernetes" / "swarmnode.yaml").read_text()
    kinds = {document["kind"]: document for document in yaml.safe_load_all(text)}
    template = kinds["StatefulSet"]["spec"]["template"]
    scraping = yaml.safe_load((PROMETHEUS / "kubernetes.yml").read_text())["scrape_configs"][0]
    (relabel, _) = scraping["relabel_configs"]
    label, port = relabel["regex"].split(";")
    labels = template["metadata"]["labels"].items()
    keys = {re.sub(r"[^a-zA-Z0-9_]", "_", key) for key, value in labels if value == label}
    assert relabel["source_labels"][0].removeprefix("__meta_kubernetes_pod_label_") in keys
    assert port in [each["name"] for each in template["spec"]["containers"][0]["ports"]]


@needs_promtool
def test_promtool_runs_the_rule_tests() -> None:
    promtool("test", "rules", str(PROMETHEUS / "rules_test.yml"))


@needs_promtool
def test_promtool_parses_every_panel(tmp_path) -> None:
    made = [
        {"record": f"panel:{i}", "expr": text.replace("$__rate_interval", "5m")}
        for i, text in enumerate(panel_expressions())
    ]
    path = tmp_path / "panels.yml"
    text = yaml.safe_dump({"groups": [{"name": "panels", "rules": made}]})
    path.write_text(text.replace("$instance", ".*"))
    assert f"{len(made)} rules found" in promtool("check", "rules", str(path))
