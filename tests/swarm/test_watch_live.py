"""Prometheus as packaged by Debian watches a running swarm of two: every query of every dashboard
returns data."""

import contextlib
import json
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client import start_http_server

from swarmnode.observe.collector import make_registry
from tests.support.forked_node import ForkedNode
from tests.support.snapshots import example_at
from tests.support.watch import server
from tests.support.whole_crew import start

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

ROOT = Path(__file__).parents[2]
NODE = {
    "swarm": {"name": "watched"},
    "network": {
        "listen_addrs": ["/ip4/127.0.0.1/tcp/0"],
        "mdns": False,
        "upload_bytes_per_second": 2**30,
        "download_bytes_per_second": 2**30,
        "monthly_bytes": 2**40,
    },
    "policy": {"threads": 1},
    "training": {"step_interval": 1.0, "eval_every": 5, "save_every": 1.0},
    "weights": {"sync_every": 6, "fragments": 2, "partners": "anyone"},
    "http": {"port": 0},
}
"""A node with every feature of the panels enabled: averaging, caps."""
EXEMPT = {
    "swarmnode_device_memory_bytes": "no accelerator here",
    "swarmnode_budget_paused": "only while sharing is paused",
    "swarmnode_environment_share": "only with tasks of several turns",
    "swarmnode_server_failures_total": "only with an inference server",
    "swarmnode_server_sampling": "only with an inference server",
    "swarmnode_rollouts_false_listings_total": "no peer lies",
    "swarmnode_state_due_timestamp_seconds": "no save is due",
    "swarmnode_learning_problem": "the policy learns",
    "ALERTS": "no alert is pending",
}
"""Metrics and labels whose panels may be empty on a healthy CPU node, and the reason."""
SECONDS = 240.0


MADE_UP = re.compile(r"swarmnode_(?:crew_|stage_|clock_offset_seconds)")
"""Metrics that two nodes cannot show: crews and peers' clocks."""


def queries(nodes, member):
    """Yield (dashboard, panel, query) of every target as Grafana sends it: for `nodes`, and for
    `member` where it is about crews."""
    found = []
    for path in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")):
        rows = json.loads(path.read_text())["panels"]
        for panel in [each for row in rows for each in (row, *row.get("panels", []))]:
            for target in panel.get("targets", []):
                who = [member] if MADE_UP.search(target["expr"]) else nodes
                query = (
                    target["expr"]
                    .replace("$__rate_interval", "15s")
                    .replace("$instance", "|".join(map(re.escape, who)))
                )
                query = query.replace("\\", "\\\\")  # a string in a query
                found.append((path.stem, panel["title"], query))
    return found


def query_api(url, path, **parameters):
    """Return an answer of Prometheus's HTTP API, or None while it does not listen."""
    try:
        with urllib.request.urlopen(
            f"{url}{path}?{urllib.parse.urlencode(parameters)}", timeout=5
        ) as answer:
            return json.load(answer)["data"]
    except (OSError, urllib.error.URLError):
        return None


@contextlib.contextmanager
def watching(directory, targets):
    """Run Prometheus with the repository's configuration, scraping `targets` each second. Yield its
    URL."""
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ROOT / "deploy" / "prometheus" / "rules.yml")]
    nodes = directory / "nodes.yml"
    nodes.write_text(yaml.safe_dump([{"targets": targets}]))
    config["scrape_configs"][0]["file_sd_configs"] = [{"files": [str(nodes)]}]
    del config["alerting"]  # no alert manager runs
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    arguments = [f"--config.file={path}", f"--storage.tsdb.path={directory / 'data'}"]
    with server("prometheus", arguments, directory) as url:
        yield url


@contextlib.contextmanager
def member_of_a_crew():
    """Yield the address of a simulated node with a stage. A real crew would need minutes to produce
    its series."""
    at = time.monotonic() - 300
    registry = make_registry(lambda: example_at(min(600.0, time.monotonic() - at)))
    node, _ = start_http_server(0, "127.0.0.1", registry)
    yield f"127.0.0.1:{node.server_port}"
    node.shutdown()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """Return the URL of a Prometheus that has watched a swarm of two until no series was missing,
    or for SECONDS, and the missing series."""
    directory = tmp_path_factory.mktemp("watched")
    settings = [{**NODE, "training": {**NODE["training"], "seed": i}} for i in range(2)]
    nodes = [ForkedNode(f"node{i}", directory / f"node{i}", settings[i]) for i in range(2)]
    try:
        start(nodes, 240)
        real = [node.url.removeprefix("http://") for node in nodes]
        with member_of_a_crew() as member, watching(directory, [*real, member]) as url:
            missing, deadline = queries(real, member), time.monotonic() + SECONDS
            while time.monotonic() < deadline and any(not exempt(query) for *_, query in missing):
                time.sleep(1)
                missing = [
                    each
                    for each in missing
                    if not (query_api(url, "/api/v1/query", query=each[2]) or {}).get("result")
                ]
            yield url, missing
    finally:
        for node in nodes:
            node.kill()  # draining is tested elsewhere


def exempt(query):
    return any(name in query for name in EXEMPT)


def test_every_dashboard_query_returns_a_series(prometheus):
    _, missing = prometheus
    assert [each for each in missing if not exempt(each[2])] == []


def test_scrapes_all_nodes_without_critical_alerts(prometheus):
    url, _ = prometheus
    targets = query_api(url, "/api/v1/targets")["activeTargets"]
    assert [(target["health"], target["lastError"]) for target in targets] == [("up", "")] * 3
    alerts = query_api(url, "/api/v1/alerts")["alerts"]
    assert [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"] == []


def test_rules_evaluate_against_real_series(prometheus):
    url, _ = prometheus
    rules = [rule for group in query_api(url, "/api/v1/rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 15
    assert {
        rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"
    } == {}
