"""Compare the learning of a node that samples with vLLM with a node that samples itself.

Two nodes share one policy: one samples with a vLLM server, the other with its own engine.
SWARMNODE_VLLM names the Python of an environment with vLLM (tests/support/served/install.sh). The
policy is the embedded one with wider heads (tests/support/served/wide.py), because vLLM on a CPU
has no kernel for the embedded policy's heads.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.lib.report import columns, heading, make_parser, seeds_of, write_json
from swarmnode.demo.nodes import DemoNode
from swarmnode.model_defaults import EMBEDDED_POLICY
from tests.support.served import real
from tests.support.served.wide import widen

START_SECONDS = 300.0
POLL_SECONDS = 2.0


def settings_of(policy: Path, url: str, steps: int, seed: int) -> dict[str, dict[str, object]]:
    return {
        "swarm": {"name": "served"},
        "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
        "policy": {"model": str(policy), "devices": "cpu", "threads": 1},
        "policy.server": {"url": url},
        "training": {
            "learning_rate": EMBEDDED_POLICY.learning_rate,
            "max_completion_length": EMBEDDED_POLICY.max_completion_length,
            "max_steps": steps,
            "eval_every": 10,
            "save_every": 10.0,
            "seed": seed,
        },
        "weights": {"rule": "noloco", "sync_every": 20},
        "http": {"port": 0},
        "log": {"level": "info"},
    }


def report_of(node: DemoNode) -> dict[str, Any]:
    with urllib.request.urlopen(f"{node.url}/status?points=1", timeout=10) as answer:
        return json.load(answer)["snapshot"]["trainer"].get("report") or {}


def run(policy: Path, url: str, directory: Path, steps: int, seed: int) -> list[dict[str, Any]]:
    """Return the latest report of each node."""
    nodes = [
        DemoNode("served", directory / "served", settings_of(policy, url, steps, 2 * seed)),
        DemoNode("own", directory / "own", settings_of(policy, "", steps, 2 * seed + 1)),
    ]
    last: list[dict[str, Any]] = [{}, {}]
    try:
        nodes[0].start([])
        nodes[1].start(nodes[0].wait_for_address(time.monotonic() + START_SECONDS)[:1])
        while any(node.alive() for node in nodes):  # a node ends after max_steps
            time.sleep(POLL_SECONDS)
            for index, node in enumerate(nodes):
                try:
                    found = report_of(node)
                except (OSError, ValueError):
                    continue
                if found.get("step") and found.get("phase") != "loading":
                    last[index] = found
    finally:
        for node in nodes:
            node.stop()
        for node in nodes:
            node.wait(60)
    return last


def main() -> None:
    parser = make_parser("served", __doc__, quick="ten steps, one seed", seeds=3)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds = 10, 1
    if "SWARMNODE_VLLM" not in os.environ:
        print("skipped: SWARMNODE_VLLM is not set")
        return
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        policy = widen(directory / "policy")
        with real.running(policy, directory / "vllm.txt", rank=0) as url:
            for seed in seeds_of(args):
                reports = run(policy, url, directory / str(seed), args.steps, seed)
                for name, report in zip(("served", "own"), reports, strict=True):
                    results.append({"node": name, "seed": seed, "report": report})
                write_json(args.json, results)
    number = lambda key: (
        lambda row: f"{value:.3g}" if isinstance(value := row["report"].get(key), float) else "–"
    )
    field = lambda key: lambda row: row["report"].get(key, "–")
    server = lambda key: lambda row: (row["report"].get("server") or {}).get(key, "–")
    print(heading("served: sampling with vLLM"))
    print(
        columns(
            results,
            {
                "seed": lambda row: row["seed"],
                "node": lambda row: row["node"],
                "steps": field("step"),
                "held out at the start": number("reward_held_out_start"),
                "held out": number("reward_held_out"),
                "engine": field("engine"),
                "own gap": number("own_gap"),
                "loads": server("loads"),
                "failures": server("failures"),
                "groups of the other used": field("external_groups_total"),
            },
        )
    )


if __name__ == "__main__":
    main()
