"""Is a slow node left alone? `python -m benchmarks.slow [--minutes 60] [--answer 64] [--members
2]`: whole nodes, with a model of a real shape.

Qwen2.5-0.5B's shape with random weights, trained in float32 by one core: a pass takes seconds to
minutes, an evaluation minutes. Its task rewards long answers, so that there is something to train
on; all that is not named here is as a node has it. The supervisor ends a process that says nothing
for 30 s, or for four of its longest steps. Whoever is ended so starts again from its last state,
and is ended again at the same place: the node learns nothing for ever. Nothing may be started again
here.

With `--members` the model is held in stages by so many nodes, and nobody may leave the crew because
somebody is slow either.

The exit code is 1 if anything was, if there was another crew, or if a node did not end by itself
when it was asked to.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.report import heading, middle, table
from benchmarks.shapes import SHAPES, build
from swarmnode.config import PolicyConfig
from swarmnode.demo.nodes import DemoNode
from swarmnode.policy.load import load_policy
from tests.support.chaos.nodes import changed_environment, until
from tests.support.whole_crew import snapshot, start

LOOK_SECONDS = 1.0
LOAD_SECONDS, END_SECONDS = 600.0, 1800.0
"""To load the model, and to end the step under way and save."""


ROWS = "".join(f'{{"prompt": "Tell me about the number {i}.", "answer": ""}}\n' for i in range(200))
REWARD = """
def length(prompts, completions, **columns):
    return [min(1.0, len(completion) / 1000) for completion in completions]
"""


def nodes_of(directory: Path, asked: argparse.Namespace) -> list[DemoNode]:
    model = build(
        asked.shape, load_policy(PolicyConfig(devices="cpu")).tokenizer, directory / "model"
    )
    (directory / "rows.jsonl").write_text(ROWS)
    (directory / "slow_reward.py").write_text(REWARD)
    return [_node(directory, f"node{i}", model, asked) for i in range(asked.members)]


def _node(directory: Path, name: str, model: str, asked: argparse.Namespace) -> DemoNode:
    stages = (
        {"stages": {"mode": "always", "stages": asked.members, "trust": "anyone"}}
        if asked.members > 1
        else {}
    )
    return DemoNode(
        name,
        directory / name,
        {
            "swarm": {"name": "slow"},
            "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
            "policy": {"model": model, "devices": "cpu", "threads": 1},
            "policy.lora": {"r": asked.rank},
            "task": {"names": ["data/long"]},
            'task.datasets."data/long"': {
                "source": str(directory / "rows.jsonl"),
                "verifier": "slow_reward:length",
            },
            "training": {
                "max_completion_length": asked.answer,
                "learning_rate": 1e-6,
                "eval_every": 2,
            },
            "http": {"port": 0},
            **stages,
        },
    )


class Watched:
    """Phases of a node one after the other, with their seconds, its steps, and the crews that it
    was in."""

    def __init__(self, node: DemoNode) -> None:
        self.node = node
        self.phases: list[tuple[str, float]] = []
        self.step = self.crews = 0
        self.report: dict[str, Any] = {}
        """The trainer's last."""
        self._since = time.monotonic()
        self._phase = "starting"

    def look(self) -> None:
        self.node.ask()
        now, phase, told = time.monotonic(), self.node.view.phase, snapshot(self.node)
        self.step = max(self.step, self.node.view.step, self.node.view.stage_step)
        if told is not None:
            self.crews, self.report = (
                told["stages"]["events"]["formed"],
                told["trainer"].get("report") or self.report,
            )
        if phase != self._phase:
            self.phases.append((self._phase, now - self._since))
            self._phase, self._since = phase, now

    def rows(self) -> list[list[object]]:
        names = dict.fromkeys(name for name, _ in self.phases if name not in ("starting", "down"))
        took = {
            name: [seconds for phase, seconds in self.phases if phase == name] for name in names
        }
        return [
            [self.node.name, name, len(seconds), middle(seconds, 0)]
            for name, seconds in took.items()
        ]

    def again(self) -> dict[str, int]:
        """Process → how often the supervisor has started it again."""
        counted = self.node.directory / "run" / "supervisor.json"
        processes = json.loads(counted.read_text())["processes"] if counted.exists() else {}
        return {name: process["restarts"] for name, process in processes.items()}


W = TypeVar("W", bound=Watched)


def run(
    nodes: Sequence[DemoNode],
    minutes: float,
    watch: Callable[[DemoNode], W],
    patience: float = END_SECONDS,
) -> list[W]:
    """What was seen until they had ended by themselves, or were killed: `patience` seconds after
    they were asked to end."""
    watched = [watch(node) for node in nodes]
    with changed_environment(PYTHONPATH=str(nodes[0].directory.parent)):
        start(nodes)
    try:
        until(
            lambda: all(node.url or not node.alive() for node in nodes), LOAD_SECONDS, LOOK_SECONDS
        )
        ends = time.monotonic() + 60 * minutes
        while time.monotonic() < ends and all(node.alive() for node in nodes):
            for each in watched:
                each.look()
            time.sleep(LOOK_SECONDS)
        for node in nodes:
            node.stop()
        for node in nodes:
            node.wait(patience)
    finally:
        for node in nodes:
            node.kill()
    return watched


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--answer", type=int, default=64, help="tokens, at most")
    parser.add_argument(
        "--rank", type=int, default=0, help="of an adapter; 0 trains all weights, which takes 20 GB"
    )
    parser.add_argument(
        "--members",
        type=int,
        default=1,
        help="nodes that hold the model in stages, each with a core",
    )
    asked = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="slow-"))
    try:
        watched = run(nodes_of(directory, asked), asked.minutes, Watched)
        print(heading("slow: is a slow node left alone?"))
        print(
            table(
                ["node", "phase", "times", "seconds, median [least–greatest]"],
                [row for each in watched for row in each.rows()],
            )
        )
        bad = False
        for each in watched:
            again, code = each.again(), each.node.exit_code()
            ends = "killed" if code is None or code < 0 else f"ended with {code}"
            steps = f"{each.step} steps in {asked.minutes:.0f} minutes, in {each.crews} crews"
            print(f"\n{each.node.name}: {steps}; started again: {again}; {ends}.")
            if (
                code != 0
                or not again
                or any(again.values())
                or each.step == 0
                or each.crews != (asked.members > 1)
            ):
                bad = True
                print(each.node.log_file.read_text(errors="replace")[-4000:], file=sys.stderr)
        return int(bad)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
