"""Compare the learning of a node that samples with vLLM with a node that samples itself.

Both train an adapter of SmolLM2-135M-Instruct alone, one after the other, on the same questions
with the same settings and seed. The server is started with the command that
`swarmnode vllm-command` prints. SWARMNODE_VLLM names the Python of an environment with vLLM
(tests/support/served/install.sh).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib.report import columns, heading, make_parser, note, seeds_of, write_json
from swarmnode.demo.nodes import DemoNode
from swarmnode.gguf import SMOLLM2
from tests.support.served import real

TASK = "chat/json_fields"
RANK = 16
RUN_SECONDS = 3600.0


def settings_of(url: str, steps: int, seed: int) -> dict[str, Any]:
    return {
        "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
        "policy": {"model": SMOLLM2, "devices": "cpu", "threads": 1},
        "policy.lora": {"r": RANK, "lora_alpha": 32},
        "policy.server": {"url": url},
        "task": {"names": [TASK]},
        "training": {
            "learning_rate": 5e-4,
            "max_completion_length": 40,
            "num_generations": 8,
            "groups_per_step": 2,
            "max_steps": steps,
            "eval_every": steps,
            "seed": seed,
        },
        "sharing": {"enabled": False},
        "weights": {"rule": "off"},
        "stages": {"mode": "off"},
        "http": {"port": 0},
    }


def run(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a node until it ends after its last step, and return its figures."""
    node = DemoNode("served", directory, settings)
    node.start([])
    node.wait(RUN_SECONDS)
    lines = objects(node.log_file)
    steps = objects(directory / "log" / "steps.jsonl")

    def of(event: str) -> list[dict[str, Any]]:
        return [line for line in lines if line.get("event") == event]

    return {
        "rewards": [step["reward_own"] or 0.0 for step in steps],
        "seconds": [step["step_seconds"] for step in steps],
        "held_out": [[each["reward"], each["error"]] for each in of("held out")],
        "engines": [line["engine"] for line in of("engine")],
        "failures": len(of("the server does not sample, the own engine does")),
    }


def objects(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one per line."""
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def main() -> None:
    parser = make_parser("served", __doc__, quick="three steps, one seed", seeds=2)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds = 3, 1
    if not real.python():
        print("skipped: SWARMNODE_VLLM is not set")
        return
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)

        def arm(name: str, url: str, seed: int) -> None:
            settings = settings_of(url, args.steps, seed)
            found = run(directory / f"{name}-{seed}", settings)
            note(f"{name} {seed}: {found}")
            results.append({"engine": name, "seed": seed, **found})
            write_json(args.json, results)

        with real.running(SMOLLM2, directory / "vllm.txt", rank=RANK) as url:
            for seed in seeds_of(args):
                arm("vLLM", url, seed)
        for seed in seeds_of(args):
            arm("own", "", seed)
    results.sort(key=lambda row: row["seed"])
    third = max(args.steps // 3, 1)

    def mean(part: int) -> Any:
        rewards = slice(part * third, (part + 1) * third)
        return lambda row: f"{statistics.mean(row['rewards'][rewards] or [0.0]):.2f}"

    def held_out(place: int) -> Any:
        return lambda row: " ± ".join(f"{number:.3f}" for number in row["held_out"][place])

    print(heading("served: sampling with vLLM"))
    print(
        columns(
            results,
            {
                "seed": lambda row: row["seed"],
                "engine": lambda row: row["engine"],
                f"reward of the first {third} steps": mean(0),
                "the second": mean(1),
                "the third": mean(2),
                "held out before": held_out(0),
                "held out after": held_out(-1),
                "seconds a step, median": lambda row: f"{statistics.median(row['seconds']):.0f}",
                "failures": lambda row: row["failures"],
            },
        )
    )


if __name__ == "__main__":
    main()
