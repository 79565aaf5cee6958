"""`python -m benchmarks.served [--steps N] [--seeds N]`: two nodes with one policy, of which one
samples with a vLLM server and the other with its own engine. Do both learn?

SWARMNODE_VLLM names the Python of an environment with vLLM (tests/support/served/install.sh). The
policy is the embedded one with wider heads (tests.support.served.wide), since vLLM on a CPU has no
kernel for its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.request
from pathlib import Path

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


def report_of(node: DemoNode) -> dict[str, object]:
    with urllib.request.urlopen(f"{node.url}/status?points=1", timeout=10) as answer:
        return json.load(answer)["snapshot"]["trainer"].get("report") or {}


def run(policy: Path, url: str, directory: Path, steps: int, seed: int) -> list[dict[str, object]]:
    """The last report of each node."""
    nodes = [
        DemoNode("served", directory / "served", settings_of(policy, url, steps, 2 * seed)),
        DemoNode("own", directory / "own", settings_of(policy, "", steps, 2 * seed + 1)),
    ]
    last: list[dict[str, object]] = [{}, {}]
    try:
        nodes[0].start([])
        nodes[1].start(nodes[0].wait_for_address(time.monotonic() + START_SECONDS)[:1])
        while any(node.alive() for node in nodes):  # each ends after its last step
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        policy = widen(directory / "policy")
        with real.running(policy, directory / "vllm.txt", rank=0) as url:
            for seed in range(options.seeds):
                began = time.monotonic()
                found = run(policy, url, directory / str(seed), options.steps, seed)
                for name, report in zip(("served", "own"), found, strict=True):
                    server = report.get("server") or {}
                    assert isinstance(server, dict)
                    print(
                        f"seed {seed} {name:>6}: step {report.get('step')}, held out"
                        f" {_number(report.get('reward_held_out_start'))} →"
                        f" {_number(report.get('reward_held_out'))}; engine {report.get('engine')},"
                        f" own gap {_number(report.get('own_gap'))},"
                        f" effective {_number(report.get('effective_own'))},"
                        f" loads {server.get('loads')}, failures {server.get('failures')},"
                        f" {report.get('external_groups_total')} groups of the other used",
                        flush=True,
                    )
                print(f"  {time.monotonic() - began:.0f} s", flush=True)


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "–"


if __name__ == "__main__":
    main()
