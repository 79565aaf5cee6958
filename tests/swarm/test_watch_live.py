"""Prometheus as packaged by Debian watches a running swarm of two: every query of every dashboard
returns data."""

import contextlib
import functools
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import trio
import yaml

from swarmnode.config import HttpConfig
from swarmnode.observe.http import serve_http
from tests.support.forked_node import ForkedNode
from tests.support.snapshots import example_at

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.swarm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed"),
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
    "training": {
        "step_interval": 1.0,
        "eval_every": 5,
        "save_every": 1.0,
    },
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
    log_path = directory / "prometheus.log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={path}",
                f"--storage.tsdb.path={directory / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            late = time.monotonic() + 120
            while not (
                listens := re.search(r'"Listening on".* address=(\S+)', log_path.read_text())
            ):
                assert time.monotonic() < late, log_path.read_text()
                time.sleep(0.1)
            yield f"http://{listens[1]}"
        finally:
            process.terminate()
            process.wait(20)


@contextlib.contextmanager
def member_of_a_crew():
    """Yield the address of a simulated node with a stage. A real crew would need minutes to produce
    its series."""
    stop, begun, where = [], threading.Event(), []
    at = time.monotonic() - 300

    async def serve():
        async with trio.open_nursery() as nursery:
            snapshot = lambda: example_at(min(600.0, time.monotonic() - at))
            where.append(
                await nursery.start(
                    lambda task_status: serve_http(
                        HttpConfig(port=0), snapshot, task_status=task_status
                    )
                )
            )
            stop.append(
                functools.partial(
                    trio.lowlevel.current_trio_token().run_sync_soon, nursery.cancel_scope.cancel
                )
            )
            begun.set()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert begun.wait(120)
    try:
        yield where[0].removeprefix("http://")
    finally:
        stop[0]()
        thread.join()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """Return the URL of a Prometheus that has watched a swarm of two until no series was missing,
    or for SECONDS, and the missing series."""
    directory = tmp_path_factory.mktemp("watched")
    settings = [{**NODE, "training": {**NODE["training"], "seed": i}} for i in range(2)]
    nodes = [ForkedNode(f"node{i}", directory / f"node{i}", settings[i]) for i in range(2)]
    try:
        nodes[0].start([])
        known = nodes[0].wait_for_address(time.monotonic() + 240)
        for node in nodes[1:]:
            node.start(known)
        for node in nodes[1:]:
            node.wait_for_address(time.monotonic() + 240)
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


def test_every_node_shows_the_swarm(prometheus):
    url, _ = prometheus
    made_up = 'on (instance) swarmnode_node_info{swarm_name="local"}'  # the member of a crew
    found = query_api(url, "/api/v1/query", query=f"swarmnode_claimed_peers unless {made_up}")[
        "result"
    ]
    claimed = {each["metric"]["instance"]: float(each["value"][1]) for each in found}
    assert len(claimed) == 2
    assert max(claimed.values()) == 1
