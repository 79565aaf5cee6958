"""Dashboards, rules and documentation against the registry: what they name exists, and what exists
is shown."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import yaml
from prometheus_client.exposition import generate_latest

from swarmnode.observe.collector import make_registry
from swarmnode.observe.metrics import METRICS
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.p2p.budget import BudgetStatistics
from swarmnode.stages.service import StagesStatistics
from swarmnode.weights.service import WeightsStatistics
from tests.support.snapshots import example

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")

FAMILIES = {family.name: family for family in METRICS}
MATCHER = re.compile(r"(swarmnode_[a-z0-9_]+)\{([^}]*)\}")
TARGET_LABELS = {"instance", "job", "le"}


def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "grafana_build", ROOT / "deploy" / "grafana" / "build.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def panels() -> list[dict]:
    return [
        panel
        for path in sorted(DASHBOARDS.glob("*.json"))
        for panel in flat(json.loads(path.read_text()))
    ]


def flat(board: dict) -> list[dict]:
    """The panels of a board, those inside closed rows as well."""
    return [each for panel in board["panels"] for each in (panel, *panel.get("panels", []))]


def panel_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def rule_expressions() -> list[str]:
    return [
        rule["expr"]
        for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
        for rule in group["rules"]
    ]


def family_of(name: str) -> str:
    return name if name in FAMILIES else re.sub(r"_(bucket|sum|count)$", "", name)


def names_in(expressions: list[str]) -> set[str]:
    return {
        family_of(name)
        for expression in expressions
        for name in re.findall(r"\bswarmnode_[a-z0-9_]+", expression)
    }


def promtool(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *arguments], input=stdin, capture_output=True, timeout=60, check=False
    )


def test_every_metric_that_is_named_exists() -> None:
    named = names_in(panel_expressions() + rule_expressions())
    assert named - FAMILIES.keys() == set()
    assert len(named) > 50


def test_every_metric_is_on_a_panel() -> None:
    assert FAMILIES.keys() - names_in(panel_expressions()) == set()


def test_histograms_are_asked_for_buckets_and_the_rest_is_not() -> None:
    for expression in panel_expressions() + rule_expressions():
        for name in re.findall(r"\bswarmnode_[a-z0-9_]+", expression):
            assert (name not in FAMILIES) == (FAMILIES[family_of(name)].kind == "histogram"), name


def test_labels_in_matchers_groupings_and_legends_exist() -> None:
    legends = [
        (target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel.get("targets", [])
    ]
    for expression, legend in legends + [(expression, "") for expression in rule_expressions()]:
        labels = (
            set().union(*(FAMILIES[name].labels for name in names_in([expression]))) | TARGET_LABELS
        )
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)) | set(
            re.findall(r"\{\{(\w+)\}\}", legend)
        )
        for grouping in re.findall(r"\b(?:by|without|ignoring|on)\s*\(([^)]*)\)", expression):
            used |= {label.strip() for label in grouping.split(",")}
        assert used <= labels, expression


def test_label_values_in_matchers_exist() -> None:
    scraped = generate_latest(make_registry(example)).decode()
    for expression in panel_expressions() + rule_expressions():
        for name, matchers in MATCHER.findall(expression):
            for label, value in re.findall(r'(\w+)="([^"$]*)"', matchers):
                assert re.search(
                    rf'^{name}\{{[^}}]*{label}="{re.escape(value)}"', scraped, re.MULTILINE
                ), (name, label, value)


def labels_of(expression: str) -> set[str]:
    """That tell the series of an expression's result apart, besides those that its matchers fix."""
    if expression.startswith(("sum(", "60 * sum(")):
        return set()
    if grouping := re.match(
        r"(?:60 \* )?(?:histogram_quantile\([0-9.]+, )?sum by \(([^)]*)\)", expression
    ):
        return {label.strip() for label in grouping.group(1).split(",")} - {"le"}
    (name, matchers), *_ = MATCHER.findall(expression)
    fixed = set(re.findall(r'(\w+)="', matchers))
    return ({*FAMILIES[name].labels} | {"instance"}) - fixed


def test_series_of_a_panel_are_told_apart_by_their_legends() -> None:
    """On the node's board by all but the node, of which it shows one."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        board = json.loads(path.read_text())
        (nodes,) = [
            variable for variable in board["templating"]["list"] if variable["name"] == "instance"
        ]
        assert nodes["multi"] == nodes["includeAll"] == (path.stem != "node")
        for panel in flat(board):
            for target in panel.get("targets", []) if panel["type"] != "table" else []:
                told = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) | (
                    set() if nodes["multi"] else {"instance"}
                )
                assert labels_of(target["expr"]) <= told, (
                    path.stem,
                    panel["title"],
                    target["expr"],
                )


def test_of_several_states_the_one_that_holds_is_named() -> None:
    """A stat without names shows the 1 of `== 1`, and over a range every state of the past; as
    lines they all lie at 1."""
    found = [
        panel
        for panel in panels()
        for target in panel.get("targets", [])
        if target["expr"].endswith("== 1")
    ]
    assert len(found) >= 5
    for panel in found:
        named = (
            panel["type"] == "stat"
            and panel["options"]["textMode"] == "name"
            and all(t["instant"] for t in panel["targets"])
        )
        assert named or panel["type"] == "state-timeline", panel["title"]


def test_generated_files_are_up_to_date() -> None:
    for path, text in build().outputs().items():
        assert path.read_text() == text, (
            f"{path.relative_to(ROOT)}: run python deploy/grafana/build.py"
        )


def test_on_a_plain_node_every_panel_of_an_open_row_has_data() -> None:
    """A node without crew, accelerator, reference policy and caps: what it has no numbers of is in
    rows that are closed."""
    s = example()
    report = msgspec.structs.replace(s.trainer.report, device_memory_bytes=None, kl=None)
    plain = msgspec.structs.replace(
        s,
        stages=StagesStatistics(),
        budget=BudgetStatistics(),
        weights=WeightsStatistics(),
        trainer=msgspec.structs.replace(
            s.trainer, report=msgspec.structs.replace(report, weights=None)
        ),
    )
    scraped = generate_latest(make_registry(lambda: plain)).decode()
    without = {
        family
        for family in FAMILIES
        if not re.search(rf"^{family}(_bucket)?[ {{]", scraped, re.MULTILINE)
    }
    assert len(without) > 20
    shown = [json.loads(path.read_text())["panels"] for path in sorted(DASHBOARDS.glob("*.json"))]
    asked = [
        (panel["title"], target["expr"])
        for board in shown
        for panel in board
        for target in panel.get("targets", [])
    ]
    assert [
        (title, expression) for title, expression in asked if names_in([expression]) & without
    ] == []
    closed = {
        panel["title"]: panel["panels"]
        for board in shown
        for panel in board
        if panel.get("collapsed")
    }
    assert closed.keys() == build().COLLAPSED.keys()
    assert all(
        any(names_in([t["expr"] for t in panel["targets"]]) & without for panel in inside)
        for inside in closed.values()
    )


def test_panels_do_not_overlap_and_have_a_description() -> None:
    boards = [json.loads(path.read_text())["panels"] for path in DASHBOARDS.glob("*.json")]
    for level in [
        *boards,
        *(row["panels"] for board in boards for row in board if row.get("panels")),
    ]:
        taken: set[tuple[int, int]] = set()
        for panel in level:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not cells & taken, panel["title"]
            assert at["x"] + at["w"] <= 24, panel["title"]
            assert panel["type"] == "row" or panel["description"], panel["title"]
            taken |= cells


def test_provisioning_points_at_the_dashboards() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    provider = yaml.safe_load((folder / "dashboards" / "swarmnode.yml").read_text())["providers"][0]
    assert provider["options"]["path"] in (ROOT / "docs" / "monitoring.md").read_text()
    assert (
        yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"][0][
            "type"
        ]
        == "prometheus"
    )


def test_every_alert_has_a_test_and_a_severity() -> None:
    rules = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    raised = {
        case["alertname"]
        for test in tests
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert raised == {rule["alert"] for rule in rules}
    assert {rule["labels"]["severity"] for rule in rules} == {"critical", "warning"}


@needs_promtool
def test_promtool_accepts_a_scrape() -> None:
    for snapshot in (example(), NodeSnapshot()):
        text = generate_latest(make_registry(lambda s=snapshot: s))
        done = promtool("check", "metrics", stdin=text)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@needs_promtool
@pytest.mark.parametrize("name", ["prometheus.yml", "kubernetes.yml"])
def test_promtool_accepts_the_configuration_and_its_rules(tmp_path, name) -> None:
    """Debian's Prometheus is built without Kubernetes: there the pods stand as fixed targets, and
    all the rest is as it is."""
    config = yaml.safe_load((PROMETHEUS / name).read_text())
    if config["scrape_configs"][0].pop("kubernetes_sd_configs", None) == [{"role": "pod"}]:
        config["scrape_configs"][0]["static_configs"] = [{"targets": ["10.0.0.1:9464"]}]
    for other in ("rules.yml", "nodes.yml"):
        shutil.copy(PROMETHEUS / other, tmp_path)
    (tmp_path / name).write_text(yaml.safe_dump(config))
    done = promtool("check", "config", "--lint=all", "--lint-fatal", str(tmp_path / name))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not installed")
@pytest.mark.parametrize(("severity", "receiver"), [("critical", "now"), ("warning", "daily")])
def test_amtool_accepts_the_sample_and_routes_by_severity(severity, receiver) -> None:
    config = str(PROMETHEUS / "alertmanager.yml")
    checked = subprocess.run(
        ["amtool", "check-config", config], capture_output=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    command = [
        "amtool",
        "config",
        "routes",
        "test",
        f"--config.file={config}",
        "alertname=SwarmnodeDown",
        f"severity={severity}",
    ]
    routed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert routed.stdout.strip() == receiver, routed.stderr


def test_kubernetes_pods_are_found_by_what_they_are_called_there() -> None:
    documents = list(
        yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "swarmnode.yaml").read_text())
    )
    (template,) = [
        document["spec"]["template"]
        for document in documents
        if document["kind"] in ("StatefulSet", "Deployment")
    ]
    (relabel, _) = yaml.safe_load((PROMETHEUS / "kubernetes.yml").read_text())["scrape_configs"][0][
        "relabel_configs"
    ]
    label, port = relabel["regex"].split(";")
    assert label in template["metadata"]["labels"].values()
    keys = {
        re.sub(r"[^a-zA-Z0-9_]", "_", key)
        for key, value in template["metadata"]["labels"].items()
        if value == label
    }
    assert relabel["source_labels"][0].removeprefix("__meta_kubernetes_pod_label_") in keys
    assert port in [
        each["name"] for container in template["spec"]["containers"] for each in container["ports"]
    ]


def test_what_an_alert_means_is_told_without_gaps() -> None:
    table = (
        (ROOT / "docs" / "monitoring.md")
        .read_text()
        .partition("<!-- alerts")[2]
        .partition("<!-- end of alerts")[0]
    )
    assert "…" not in table
    assert "{{" not in table


@needs_promtool
def test_promtool_runs_the_rule_tests() -> None:
    done = promtool("test", "rules", str(PROMETHEUS / "rules_test.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_parses_every_panel(tmp_path) -> None:
    expressions = [
        expression.replace("$__rate_interval", "5m").replace("$instance", ".*")
        for expression in panel_expressions()
    ]
    rules = [
        {"record": f"panel:{i}", "expr": expression} for i, expression in enumerate(expressions)
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(expressions)} rules found".encode() in done.stdout
