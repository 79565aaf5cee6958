"""How long training stands still for averaging: two real nodes at the default settings that average
with each other.

Standing still is everything between two training steps that is there for averaging (the probe,
commits), and, counted as if the optimizer had always been waiting for it, the copying of weights
for a partner: `swarmnode_weights_stall_seconds_total`. The share is of the wall time between the
first and the last reading; there is no evaluation in it, so nothing else dilutes it.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import report
from swarmnode.config import WeightsConfig
from swarmnode.demo.nodes import DemoNode

NODES = 2
LOOK_SECONDS = 1.0
START_SECONDS = 120.0
SETTINGS: dict[str, dict[str, Any]] = {
    "swarm": {"name": "stalls"},
    "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
    "policy": {"threads": 1},
    "training": {"eval_every": 1_000_000},
    "weights": {"rule": "noloco"},
    "http": {"port": 0},
}


def measure(outer_steps: int, seconds: float) -> dict[str, Any]:
    """Until every node has taken `outer_steps` (of one fragment each), or `seconds` are over."""
    with tempfile.TemporaryDirectory() as name:
        nodes = [
            DemoNode(
                f"node{i}",
                Path(name) / f"node{i}",
                {**SETTINGS, "training": {**SETTINGS["training"], "seed": i}},
            )
            for i in range(NODES)
        ]
        try:
            first: list[str] = []
            for node in nodes:
                node.start(first)
                first = first or node.wait_for_address(time.monotonic() + START_SECONDS)
            return _watch(nodes, outer_steps, seconds)
        finally:
            for node in nodes:
                node.stop()
            for node in nodes:
                node.wait(20)


def _watch(nodes: list[DemoNode], outer_steps: int, seconds: float) -> dict[str, Any]:
    first: dict[str, dict[str, float]] = {}
    last: dict[str, dict[str, float]] = {}
    late = time.monotonic() + START_SECONDS + seconds
    while time.monotonic() < late:
        for node in nodes:
            found = _read(node)
            # the first took the model's code from the disk
            if found is not None and found["exchanges"] + found["solo"] > 0:
                first.setdefault(node.name, found)
                last[node.name] = found
        done = [_outer(first[name], last[name]) for name in first]
        if len(done) == len(nodes) and min(done) >= outer_steps:
            break
        time.sleep(LOOK_SECONDS)
    return {
        "sync_every": WeightsConfig().sync_every,
        "nodes": {
            name: {key: last[name][key] - first[name][key] for key in last[name]} for name in first
        },
        "fragments": {name: last[name]["fragments"] for name in first},
    }


def _outer(first: dict[str, float], last: dict[str, float]) -> float:
    return last["exchanges"] + last["solo"] - first["exchanges"] - first["solo"]


def _read(node: DemoNode) -> dict[str, float] | None:
    with (
        contextlib.suppress(OSError, ValueError, TypeError),
        urllib.request.urlopen(f"{node.url}/status?points=1", timeout=5) as answer,
    ):
        found = json.load(answer)["snapshot"]["trainer"]["report"]
        weights = found["weights"]
        return {
            "at": time.monotonic(),
            "steps": found["step"],
            "exchanges": weights["exchanges_total"],
            "solo": weights["solo_steps_total"],
            "stalled": weights["stall_seconds_total"],
            "fragments": weights["fragments"],
        }
    return None


def share(node: dict[str, float]) -> float:
    """Of the wall time, 0 to 1."""
    return node["stalled"] / node["at"] if node["at"] else 0.0


def show(results: dict[str, Any]) -> str:
    rows = [
        [
            name,
            int(n["steps"]),
            f"{1000 * n['at'] / max(1, n['steps']):.0f}",
            int(n["exchanges"]),
            int(n["solo"]),
            f"{1000 * n['stalled'] / max(1, n['exchanges'] + n['solo']):.1f}",
            f"{100 * share(n):.2f} %",
        ]
        for name, n in results["nodes"].items()
    ]
    headers = [
        "node",
        "steps",
        "ms a step",
        "exchanges of a fragment",
        "taken alone",
        "ms stood still for each",
        "share (goal: under 1 %)",
    ]
    return (
        f"\nTraining, two nodes that average with each other, H = {results['sync_every']}:\n\n"
        + report.table(headers, rows)
    )
