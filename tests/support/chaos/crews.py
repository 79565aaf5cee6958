"""Faults drawn from a seed for a crew of four real nodes on loopback, and four conditions.

    python -m tests.support.chaos.crews --seed 17          replay the short schedule
    python -m tests.support.chaos.crews --seed 17 --long   every fault

running    after each fault the crew takes a further step within WHOLE_SECONDS
kept       it continues from no older step than the survivors' memories and own checkpoints have
named      after a kill, the log of every survivor names a member that was killed
learnt     at the end, held-out reward is at most FALL lower than before the first fault
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swarmnode.demo.nodes import DemoNode
from swarmnode.p2p import identity
from swarmnode.policy.build_deep import write_deep_model
from tests.support.cable import Cable
from tests.support.forked_node import ForkedNode, runs
from tests.support.whole_crew import (
    STAGES,
    WholeCrew,
    checkpoint_steps,
    kill_trainers,
    until,
    whole_settings,
)

WHOLE_SECONDS = 180.0
"""The longest wait for the next step. Four trainers may start at once on two busy cores."""
FIRST_STEP = 11
"""The first evaluation has taken place."""
FALL = 0.1
"""Two evaluations of an unchanged policy differ by up to this held-out reward."""
STOP_SECONDS = 30.0
CUT_SECONDS = 10.0
LONG_CUT_SECONDS = 150.0


@dataclass(frozen=True)
class Fault:
    """A fault, the stages whose holders it hits, and its duration."""

    name: str
    stages: tuple[int, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        stages = f", stages {' and '.join(map(str, self.stages))}" if self.stages else ""
        return self.name + stages + (f", {self.seconds:.0f} s" if self.seconds else "")


@dataclass(frozen=True)
class Outcome:
    fault: Fault
    seconds: float | None
    """Seconds from the end of the fault to the next committed step. None: no step in time."""
    problems: tuple[str, ...] = ()


@dataclass
class ScheduleResult:
    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    held_out: tuple[float, float] = (0.0, 0.0)
    """Held-out reward before the first fault, and at the end."""


def schedule(rng: random.Random, long: bool) -> list[Fault]:
    """Return the faults in their order."""
    one, two = rng.randrange(STAGES), tuple(sorted(rng.sample(range(STAGES), 2)))
    if not long:
        return [
            Fault("kill -9 of trainers", two),
            Fault("disk lost", (one,)),
            Fault("trainer stopped", (one,), STOP_SECONDS),
            Fault("network cut", (), CUT_SECONDS),
        ]
    pairs = itertools.combinations(range(STAGES), 2)
    faults = [
        *(Fault("kill -9 of trainers", (stage,)) for stage in range(STAGES)),
        *(Fault("kill -9 of trainers", pair) for pair in pairs),
        *(Fault("kill -9 of the node", (stage,)) for stage in range(STAGES)),
        *(Fault("disk lost", (stage,)) for stage in range(STAGES)),
        Fault("node stopped", (one,), STOP_SECONDS),
        Fault("trainer stopped", (one,), STOP_SECONDS),
        Fault("network cut", (), CUT_SECONDS),
        Fault("network cut", (), LONG_CUT_SECONDS),
    ]
    rng.shuffle(faults)
    return faults


class ChaosCrew(WholeCrew):
    """Four nodes with a cable in front of each."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.cables: list[Cable] = []
        nodes = []
        for number in range(STAGES):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self.cables.append(Cable(port))
            network = {
                "listen_addrs": [f"/ip4/127.0.0.1/tcp/{port}"],
                "announce_addrs": [f"/ip4/127.0.0.1/tcp/{self.cables[-1].port}"],
                "mdns": False,
            }
            settings = whole_settings(
                model,
                number,
                network=network,
                training={"eval_every": 10},
                task={"held_out_per_task": 32},
            )
            nodes.append(ForkedNode(f"node{number}", directory / f"node{number}", settings))
        super().__init__(nodes, [])

    def start(self, node: DemoNode) -> None:
        """Start a node that knows the others' addresses."""
        peers = []
        for cable, other in zip(self.cables, self.nodes, strict=True):
            if other is not node:
                peer = identity.load_or_create(other.directory / "identity.key").peer_id
                peers.append(f"/ip4/127.0.0.1/tcp/{cable.port}/p2p/{peer}")
        node.start(peers)

    def end(self) -> None:
        for node in self.nodes:
            node.kill()
        for cable in self.cables:
            cable.close()

    def curve(self) -> dict[int, float]:
        """Return the held-out reward by step, from the logs of all nodes, because any node may have
        led."""
        found: dict[int, float] = {}
        for node in self.nodes:
            for path in (node.directory / "log").glob("steps.jsonl*"):
                for line in _records(path.read_text(errors="replace")):
                    if (value := line.get("reward_held_out")) is not None:
                        found[line["step"]] = value
        return found


@contextlib.contextmanager
def crew_of(directory: Path) -> Iterator[ChaosCrew]:
    model = write_deep_model(directory / "model", layers=2 * STAGES)
    crew = ChaosCrew(directory, model)
    try:
        for node in crew.nodes:
            crew.start(node)
        yield crew
    finally:
        crew.end()


def play(
    seed: int, directory: Path, *, long: bool = False, tell: Callable[[str], object] = print
) -> ScheduleResult:
    """Play the whole schedule. Raise AssertionError where the crew does not start."""
    played, rng = ScheduleResult(), random.Random(f"crew {seed}")
    with crew_of(directory) as crew:
        until(lambda: crew.at(FIRST_STEP), crew.story, WHOLE_SECONDS)
        before = crew.curve()
        for fault in schedule(rng, long):
            outcome = apply_fault(crew, fault)
            played.outcomes.append(outcome)
            took = "never" if outcome.seconds is None else f"after {outcome.seconds:.1f} s"
            tell(f"  {fault}: next step {took}" + "".join(f"; {one}" for one in outcome.problems))
            played.problems += [f"{fault}: {problem}" for problem in outcome.problems]
            if outcome.seconds is None:
                return played
        last = max(crew.curve())
        after = lambda: [value for step, value in crew.curve().items() if step > last]
        values = until(after, crew.story, WHOLE_SECONDS)
        played.held_out = before[max(before)], values[0]
    if values[0] < played.held_out[0] - FALL:
        played.problems.append(f"held-out reward fell from {played.held_out[0]:.3f} to {values[0]}")
    return played


def apply_fault(crew: ChaosCrew, fault: Fault) -> Outcome:
    """Apply `fault` to a running crew and wait for its next step."""
    seen = until(lambda: crew.at(1), crew.story, WHOLE_SECONDS)
    former, kills = seen[0][1]["id"], not fault.seconds
    peers = {stage: peer_of(node) for stage, (node, _) in seen.items()}
    victims = [seen[stage][0] for stage in fault.stages]
    sizes = {node.name: node.log_file.stat().st_size for node in crew.nodes}
    steps = {stage: view["step"] for stage, (_, view) in seen.items()}
    act(crew, fault, victims)
    began = time.monotonic()
    # Newest state left: memories of survivors, and own checkpoints unless lost.
    for stage, node in zip(fault.stages, victims, strict=True):
        if kills:
            steps[stage] = max(checkpoint_steps([node]), default=0)
    if fault.name == "disk lost":
        steps = {stage: step for stage, step in steps.items() if stage not in fault.stages}
    least = min(steps.values())
    newest = max(steps.values())
    try:
        until(lambda: crew.at(newest + 1, former if kills else ""), crew.story, WHOLE_SECONDS)
    except AssertionError as error:
        return Outcome(fault, None, (str(error),))
    seconds = time.monotonic() - began
    logs = {node: log_since(node, sizes[node.name]) for node in crew.nodes}
    problems = [
        f"{node.name} continued at step {line['step']}, but step {least} was available"
        for node, lines in logs.items()
        for line in lines
        if line.get("event") == "assigned" and line["step"] < least
    ]
    if kills:
        named = [peers[stage] for stage in fault.stages]
        survivors = [node for node in crew.nodes if node not in victims]
        problems += [
            f"the log of {node.name} names no member that was killed"
            for node in survivors
            if not any(names_one(line, named) for line in logs[node])
        ]
    return Outcome(fault, seconds, tuple(problems))


def act(crew: ChaosCrew, fault: Fault, victims: Sequence[DemoNode]) -> None:
    """Apply the fault and return when it is over."""
    match fault.name:
        case "kill -9 of trainers":
            kill_trainers(victims)
        case "kill -9 of the node":
            for node in victims:
                node.kill()
                crew.start(node)
        case "disk lost":
            for node in victims:
                node.kill()
                for path in node.directory.iterdir():
                    if path not in (node.config_file, node.log_file):
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                crew.start(node)
        case "node stopped" | "trainer stopped":
            for node in victims:
                assert node.pid is not None
                family = [psutil.Process(node.pid), *psutil.Process(node.pid).children(True)]
                if fault.name == "trainer stopped":
                    family = [p for p in family if runs(p, "swarmnode.trainer")]
                _stop(family, fault.seconds)
        case "network cut":
            for cable in crew.cables:
                cable.cut()
            time.sleep(fault.seconds)
            for cable in crew.cables:
                cable.repair()
        case _:
            raise ValueError(fault.name)


def _stop(family: Sequence[psutil.Process], seconds: float) -> None:
    for process in family:
        process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


def peer_of(node: DemoNode) -> str:
    return identity.load_or_create(node.directory / "identity.key").peer_id


def log_since(node: DemoNode, size: int) -> list[dict[str, Any]]:
    with open(node.log_file, "rb") as file:
        file.seek(size)
        return _records(file.read().decode(errors="replace"))


def _records(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def names_one(line: dict[str, Any], peers: Sequence[str]) -> bool:
    """Return True if the line reports the end of a crew and names one of `peers`."""
    event = str(line.get("event", ""))
    return event.startswith("crew ended") and any(peer in event for peer in peers)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.chaos.crews", description=__doc__
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--long", action="store_true", help="every fault")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos") as directory:
        played = play(
            args.seed, Path(directory), long=args.long, tell=lambda line: print(line, flush=True)
        )
    print(
        f"held-out reward {played.held_out[0]:.3f} before the first fault, {played.held_out[1]:.3f}"
        " at the end"
    )
    for problem in played.problems:
        print(f"problem: {problem}")
    return 1 if played.problems else 0


if __name__ == "__main__":
    sys.exit(main())
