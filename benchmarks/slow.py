"""Is a slow node left alone? `python -m benchmarks.slow [--minutes 60] [--answer 64]`: a whole node, with a model of a real shape.

Qwen2.5-0.5B's shape with random weights, trained in float32 by one core: a pass takes seconds to minutes, an evaluation minutes. Its
task rewards long answers, so that there is something to train on; all that is not named here is as a node has it. The supervisor ends a
process that says nothing for 30 s, or for four of its longest steps. Whoever is ended so starts again from its last state, and is ended
again at the same place: the node learns nothing for ever. Nothing may be started again here.

The exit code is 1 if anything was, or if the node did not end by itself when it was asked to.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import heading, middle, table
from benchmarks.shapes import SHAPES, build
from swarmnode.config import PolicyConfig
from swarmnode.demo.nodes import DemoNode
from swarmnode.policy.load import load_policy
from tests.support.chaos.nodes import changed_environment, until

LOOK_SECONDS = 1.0
LOAD_SECONDS, END_SECONDS = 600.0, 1800.0
"""To load the model, and to end the step under way and save."""


ROWS = "".join(f'{{"prompt": "Tell me about the number {i}.", "answer": ""}}\n' for i in range(200))
REWARD = """
def length(prompts, completions, **columns):
    return [min(1.0, len(completion) / 1000) for completion in completions]
"""


def node_of(directory: Path, shape: str, answer: int, rank: int) -> DemoNode:
    model = build(shape, load_policy(PolicyConfig(device="cpu")).tokenizer, directory / "model")
    (directory / "rows.jsonl").write_text(ROWS)
    (directory / "slow_reward.py").write_text(REWARD)
    return DemoNode("slow", directory / "data", {
        "swarm": {"name": "slow"},
        "network": {"mdns": False},
        "policy": {"model": model, "device": "cpu", "threads": 1},
        "policy.lora": {"r": rank},
        "task": {"names": ["data/long"]},
        'task.datasets."data/long"': {"source": str(directory / "rows.jsonl"), "verifier": "slow_reward:length"},
        "training": {"max_completion_length": answer, "learning_rate": 1e-6, "eval_every": 2, "eval_budget": 1.0},
        "http": {"port": 0},
    })  # fmt: skip


class Watched:
    """Phases of the node one after the other, with their seconds, and what its supervisor has counted last."""

    def __init__(self, node: DemoNode) -> None:
        self.node = node
        self.phases: list[tuple[str, float]] = []
        self.step = 0
        self._since = time.monotonic()
        self._phase = "starting"

    def look(self) -> None:
        self.node.ask()
        now, phase = time.monotonic(), self.node.view.phase
        self.step = max(self.step, self.node.view.step)
        if phase != self._phase:
            self.phases.append((self._phase, now - self._since))
            self._phase, self._since = phase, now

    def rows(self) -> list[list[object]]:
        names = dict.fromkeys(name for name, _ in self.phases if name not in ("starting", "down"))
        took = {name: [seconds for phase, seconds in self.phases if phase == name] for name in names}
        return [[name, len(seconds), middle(seconds, 0)] for name, seconds in took.items()]


def run(node: DemoNode, minutes: float) -> Watched:
    """What was seen until it had ended by itself, or was killed."""
    watched = Watched(node)
    with changed_environment(PYTHONPATH=str(node.directory.parent)):
        node.start([])
    try:
        until(lambda: node.url or not node.alive(), LOAD_SECONDS, LOOK_SECONDS)
        ends = time.monotonic() + 60 * minutes
        while time.monotonic() < ends and node.alive():
            watched.look()
            time.sleep(LOOK_SECONDS)
        node.stop()
        node.wait(END_SECONDS)
    finally:
        node.kill()
    return watched


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--answer", type=int, default=64, help="tokens, at most")
    parser.add_argument("--rank", type=int, default=0, help="of an adapter; 0 trains all weights, which takes 20 GB")
    asked = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="slow-"))
    try:
        node = node_of(directory, asked.shape, asked.answer, asked.rank)
        watched, code = run(node, asked.minutes), node.exit_code()
        counted = node.directory / "run" / "supervisor.json"
        processes = json.loads(counted.read_text())["processes"] if counted.exists() else {}
        print(heading("slow: is a slow node left alone?"))
        print(table(["phase", "times", "seconds, median [least–greatest]"], watched.rows()))
        again = {name: process["restarts"] for name, process in processes.items()}
        ends = "killed" if code is None or code < 0 else f"ended with {code}"
        print(f"\n{watched.step} steps in {asked.minutes:.0f} minutes; started again: {again}; {ends}.")
        bad = code != 0 or not again or any(again.values()) or watched.step == 0
        if bad:
            print(node.log_file.read_text(errors="replace")[-4000:], file=sys.stderr)
        return int(bad)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
