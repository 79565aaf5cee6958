"""`make watch`: run a healthy swarm of real nodes under the shipped alert rules. No alert may fire.

The series in deploy/prometheus/rules_test.yml test the rules. This tests what nodes export.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.chaos.nodes import swarm_of, until
from tests.support.chaos.schedule import START_SECONDS, report_of
from tests.support.waiting import free_port

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
READY_SECONDS = 30.0
SETTINGS: dict[str, dict[str, object]] = {
    "swarm": {"name": "watch"},
    "policy": {"threads": 1},
    "training": {"groups_per_step": 4},
    "weights": {"sync_every": 10, "partners": "anyone"},
    "http": {"port": 0},
}
"""The embedded model with its own tasks, which it learns."""


@contextlib.contextmanager
def server(program: str, arguments: Sequence[str], directory: Path) -> Iterator[str]:
    """Run Prometheus or Alertmanager, and yield its URL once it is ready. Its log is in
    `directory`."""
    url = f"http://127.0.0.1:{free_port()}"
    log_file = directory / f"{Path(program).name}.log"
    command = [program, *arguments, f"--web.listen-address={url.removeprefix('http://')}"]
    with open(log_file, "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
    try:
        assert until(lambda: answers(f"{url}/-/ready"), READY_SECONDS), log_file.read_text()[-2000:]
        yield url
    finally:
        process.terminate()
        process.wait(20)


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def compose_configuration(targets: Sequence[str], alertmanager: str = "") -> dict[str, Any]:
    """Return compose's configuration of Prometheus with other addresses.

    Args:
        targets: host:port of the nodes.
        alertmanager: host:port of Alertmanager; none if empty.
    """
    config = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())
    assert config["rule_files"] == ["/etc/prometheus/rules.yml"]
    config["rule_files"] = [str(RULES)]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = list(targets)
    if alertmanager:
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager]
    else:
        del config["alerting"]
    return config


def query(url: str, expression: str) -> list[dict[str, str]]:
    """Return the labels of the series that Prometheus finds."""
    path = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    with urllib.request.urlopen(path, timeout=20) as answer:
        return [series["metric"] for series in json.load(answer)["data"]["result"]]


def watch(directory: Path, minutes: float, count: int, pace: float) -> int:
    """Run the swarm; print the alerts and what the rules read. Return 1 if an alert fired or the
    swarm was not healthy."""
    with swarm_of(directory, count, small_disks=False, pace=pace, settings=SETTINGS) as swarm:
        assert until(lambda: all(node.url for node in swarm.nodes), START_SECONDS)
        targets = [node.url.removeprefix("http://").rstrip("/") for node in swarm.nodes]
        config = directory / "prometheus.yml"
        config.write_text(yaml.safe_dump(compose_configuration(targets)))
        arguments = [f"--config.file={config}", f"--storage.tsdb.path={directory / 'series'}"]
        with server("prometheus", arguments, directory) as url:
            time.sleep(60 * minutes)
            alerts = query(
                url,
                "count by (alertstate, alertname, instance)"
                f" (count_over_time(ALERTS[{60 * minutes + 60:.0f}s]))",
            )
            scraped = {series["__name__"] for series in query(url, '{__name__=~"swarmnode_.+"}')}
        reports = [report_of(node) for node in swarm.nodes]
        swarm.stop()
    groups = yaml.safe_load(RULES.read_text())["groups"]
    named = {
        name
        for group in groups
        for rule in group["rules"]
        for name in re.findall(r"\bswarmnode_[a-z0-9_]+", rule["expr"])
    }
    rules = sum(len(group["rules"]) for group in groups)
    print(f"{count} nodes, {minutes:g} minutes, {rules} rules")
    for node, report in zip(swarm.nodes, reports, strict=True):
        print(f"  {node.name}: {report}")
    print(f"  exported: {len(named & scraped)} of {len(named)} metrics that the rules name")
    print(f"  not exported: {', '.join(sorted(named - scraped)) or 'none'}")
    for labels in alerts:
        print(f"  {labels['alertstate']}: {labels['alertname']} {labels['instance']}")
    firing = [labels for labels in alerts if labels["alertstate"] == "firing"]
    healthy = all(one and one.works and one.connected and not one.restarts for one in reports)
    print("no alert fired" if not firing else f"{len(firing)} alerts fired")
    if not healthy:
        print("the swarm was not healthy")
    return int(bool(firing) or not healthy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--pace", type=float, default=2.0, help="minimum seconds of a step")
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        sys.exit("make watch needs Prometheus (Debian: apt-get install prometheus)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the nodes too
    with tempfile.TemporaryDirectory(prefix="watch") as directory:
        return watch(Path(directory), options.minutes, options.nodes, options.pace)


if __name__ == "__main__":
    sys.exit(main())
