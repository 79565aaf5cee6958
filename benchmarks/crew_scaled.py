"""A 7 B crew at home, sixty times smaller, and so are the lines: `python -m benchmarks.crew
--scaled`. Root, since each node has a network namespace of its own.

Four whole nodes hold a policy of 7 B's proportions and random weights as four stages. Its weights,
and the bytes of a step's activations, are a sixtieth of what a 7 B policy and 64 × (256 + 1,024)
tokens have; what a node's line carries, each way, is the same share of 50 Mbit/s, and what comes to
a node comes 50 ms late. So what is as long as its bytes by the line takes as long as it would at 7
B, and every deadline is the product's. The kernel's buffers are smaller by as much, and no packet
is lost. What has a number of bytes of its own (heartbeats, headers, listings, packets) weighs sixty
times what it does there, and two cores compute for all: this is harder than the real thing.

The first steps go over lines sixty times as fast, until both ring neighbours have a snapshot of
each stage. Then, seen from outside: seconds of each step, and what the lines sent meanwhile,
snapshots included; then a stage's trainer is killed -9 with its own disk gone: seconds until its
weights are there, and until the next step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks import report
from benchmarks.crew import STAGES
from benchmarks.crew_distance import RATE, FarCrew, Line, Settings, far_crew
from benchmarks.shapes import SHAPES, build
from benchmarks.slow import REWARD, ROWS
from swarmnode.config import PolicyConfig
from swarmnode.policy.load import load_policy
from tests.support.chaos.nodes import changed_environment
from tests.support.netns import missing

SHAPE = "sixtieth-of-7b"
WHOLE, WHOLE_RATE = 7e9, 50e6
"""Weights, and bits per second."""
KERNEL_BYTES = 2 * 1024 * 1024
"""A connection's buffer: three times what is on its way at 50 Mbit/s and 100 ms there and back."""
QUEUE = "4s"
"""What waits before a line. Its packets have 1,500 bytes as always: of 400 ms of it only 30 would
fit, and a heartbeat's would be lost sixty times as often as on the real one. So nothing is lost,
and buffers bound what waits."""
ANSWER = 54
"""Tokens: eight groups' prompts of some 25 and their 64 answers are a sixtieth of 67,600 rows of
4,096 values then, as rows of 1,280. Few wide layers: two cores compute a step in about what its
bytes take."""
PATIENCE = 3600.0


def settings_in(directory: Path, rank: int, copies: bool) -> Callable[[int], Settings]:
    model = build(SHAPE, load_policy(PolicyConfig(devices="cpu")).tokenizer, directory / "model")
    (directory / "rows.jsonl").write_text(ROWS)
    (directory / "slow_reward.py").write_text(REWARD)
    return lambda number: {
        "swarm": {"name": "scaled"},
        "network": {"mdns": False},
        "policy": {"model": model, "devices": "cpu", "threads": 1},
        "policy.lora": {"r": rank},
        "task": {"names": ["data/long"], "held_out_per_task": 1},
        'task.datasets."data/long"': {
            "source": str(directory / "rows.jsonl"),
            "verifier": "slow_reward:length",
        },
        "training": {
            "max_completion_length": ANSWER,
            "learning_rate": 1e-6,
            "eval_every": 10_000,
            "seed": number,
        },
        "stages": {
            "mode": "always",
            "stages": STAGES,
            "trust": "anyone",
            "checkpoint_every": 1,
            "policy_copy": "memory" if copies else "off",
            "codec": "int8",
        },
        "http": {"port": 0},
    }


def line() -> tuple[Line, float]:
    """The line of each node, and its share of the line of a 7 B policy's home."""
    with torch.device("meta"):
        weights = sum(
            tensor.numel()
            for tensor in AutoModelForCausalLM.from_config(SHAPES[SHAPE]).parameters()
        )
    share = weights / WHOLE
    return Line(round(WHOLE_RATE * share / 1000), "4kb", QUEUE, round(KERNEL_BYTES * share)), share


HEADERS = [
    "step",
    "s",
    "MB of the busiest line",
    "of the least busy one",
    "MB of snapshots, all lines",
]


class Watched:
    """What the nodes' lines and status pages say of a crew."""

    def __init__(self, crew: FarCrew) -> None:
        self.crew = crew

    def _sent(self) -> tuple[list[int], int]:
        """(bytes of each node's line, bytes of state of all)."""
        return [node.sent_bytes() for node in self.crew.nodes], sum(
            node.view.state_bytes for node in self.crew.nodes
        )

    def step(self) -> list[str]:
        """A row for the next step."""
        before, (lines, states) = min(self.crew.steps()), self._sent()
        took = self.crew.wait(lambda: min(self.crew.steps()) > before, PATIENCE)
        now, states_now = self._sent()
        sent = [(after - then) / 1e6 for after, then in zip(now, lines, strict=True)]
        seconds = "–" if took is None else f"{took:.0f}"
        return [
            str(before + 1),
            seconds,
            f"{max(sent):.1f}",
            f"{min(sent):.1f}",
            f"{(states_now - states) / 1e6:.1f}",
        ]

    def kept(self) -> bool:
        """Whether every stage has a snapshot at a neighbour."""
        views = [self.crew.holder(stage).view for stage in range(STAGES)]
        return all(
            view.checkpoint_age is not None and view.checkpoint_age < view.stage_step
            for view in views
        )


def run(milliseconds: int, steps: int, losses: int, rank: int, copies: bool) -> None:
    """Measure and print. Raises SystemExit where there can be no namespaces, or no crew gets so
    far."""
    if why := missing():
        raise SystemExit(why)
    shrunk, share = line()
    title = (
        f"crew: a 7 B policy at home, {1 / share:.0f} times smaller, {shrunk.rate} kbit/s per node,"
        f" {milliseconds} ms"
    )
    print(report.heading(title), flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="swarmnode-scaled-") as made,
        changed_environment(PYTHONPATH=made),
    ):
        directory = Path(made)
        with far_crew(
            directory,
            milliseconds,
            settings_in(directory, rank, copies),
            replace(shrunk, rate=RATE),
        ) as crew:
            watched = Watched(crew)
            if crew.wait(watched.kept, PATIENCE) is None:
                raise SystemExit(
                    f"no crew, or no snapshots: {[node.last_words() for node in crew.nodes]}"
                )
            crew.line(shrunk)
            watched.step()  # the one under way
            rows = []
            for _ in range(steps):
                rows.append(watched.step())
                print(*rows[-1], flush=True)
            print(report.table(HEADERS, rows))
            for stage in range(1, 1 + losses):
                lost = crew.lose("disk", (stage,), PATIENCE)
                print(
                    f"\nStage {stage}: {lost}, restored after"
                    f" {crew.holder(stage).view.source_seconds} s.",
                    flush=True,
                )
