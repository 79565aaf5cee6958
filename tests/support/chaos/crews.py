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
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnode.policy.build_deep import write_deep_model
from tests.support.chaos.nodes import TRAINER, ChaosNode, ChaosSwarm, stopped, swarm_of
from tests.support.chaos.schedule import Outcome, ScheduleResult, curve, logged_since
from tests.support.waiting import wait_for
from tests.support.whole_crew import (
    STAGES,
    WholeCrew,
    checkpoint_steps,
    kill_trainers,
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

    @property
    def where(self) -> str:
        return f"stages {' and '.join(map(str, self.stages))}" if self.stages else "all stages"

    def __str__(self) -> str:
        return f"{self.name}, {self.where}" + (f", {self.seconds:.0f} s" if self.seconds else "")


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

    def __init__(self, swarm: ChaosSwarm) -> None:
        super().__init__(swarm.nodes, [])
        self.swarm = swarm

    def curve(self) -> dict[int, float]:
        """Return the held-out reward by step, from the logs of all nodes, because any node may have
        led."""
        return {step: value for node in self.swarm.nodes for step, value in curve(node).items()}


@contextlib.contextmanager
def crew_of(directory: Path) -> Iterator[ChaosCrew]:
    model = write_deep_model(directory / "model", layers=2 * STAGES)
    changes = {"training": {"eval_every": 10}, "task": {"held_out_per_task": 32}}
    settings = whole_settings(model, 0, **changes)
    with swarm_of(directory, STAGES, small_disks=False, pace=0.2, settings=settings) as swarm:
        yield ChaosCrew(swarm)


def play(
    seed: int, directory: Path, *, long: bool = False, tell: Callable[[str], object] = print
) -> ScheduleResult:
    """Play the whole schedule. Raise AssertionError where the crew does not start."""
    played, rng = ScheduleResult(seed, STAGES), random.Random(f"crew {seed}")
    with crew_of(directory) as crew:
        wait_for(lambda: crew.at(FIRST_STEP), crew.story, WHOLE_SECONDS)
        before = crew.curve()
        for fault in schedule(rng, long):
            outcome = apply_fault(crew, fault)
            played.outcomes.append(outcome)
            took = "never" if outcome.seconds is None else f"after {outcome.seconds:.1f} s"
            tell(f"  {fault}: next step {took}" + "".join(f"; {one}" for one in outcome.problems))
            if outcome.seconds is None:
                return played
        last = max(crew.curve())
        after = lambda: [value for step, value in crew.curve().items() if step > last]
        first, end = before[max(before)], wait_for(after, crew.story, WHOLE_SECONDS)[0]
    tell(f"held-out reward {first:.3f} before the first fault, {end:.3f} at the end")
    if end < first - FALL:
        fell = f"held-out reward fell from {first:.3f} to {end:.3f}"
        played.outcomes.append(Outcome("all faults", "all stages", None, (fell,)))
    return played


def apply_fault(crew: ChaosCrew, fault: Fault) -> Outcome:
    """Apply `fault` to a running crew and wait for its next step."""
    seen = wait_for(lambda: crew.at(1), crew.story, WHOLE_SECONDS)
    former, kills = seen[0][1]["id"], not fault.seconds
    victims = [seen[stage][0] for stage in fault.stages]
    named = [node.peer for node in victims]
    sizes = {node: node.log_size() for node in crew.nodes}
    steps = {stage: view["step"] for stage, (_, view) in seen.items()}
    act(crew.swarm, fault, victims)
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
        wait_for(lambda: crew.at(newest + 1, former if kills else ""), crew.story, WHOLE_SECONDS)
    except AssertionError as error:
        return Outcome(fault.name, fault.where, None, (str(error),))
    seconds = time.monotonic() - began
    logs = {node: logged_since(node, sizes[node]) for node in crew.nodes}
    problems = [
        f"{node.name} continued at step {line['step']}, but step {least} was available"
        for node, lines in logs.items()
        for line in lines
        if line.get("event") == "assigned" and line["step"] < least
    ]
    if kills:
        survivors = [node for node in crew.nodes if node not in victims]
        problems += [
            f"the log of {node.name} names no member that was killed"
            for node in survivors
            if not any(names_one(line, named) for line in logs[node])
        ]
    return Outcome(fault.name, fault.where, seconds, tuple(problems))


def act(swarm: ChaosSwarm, fault: Fault, victims: Sequence[ChaosNode]) -> None:
    """Apply the fault and return when it is over."""
    match fault.name:
        case "kill -9 of trainers":
            kill_trainers(victims)
        case "kill -9 of the node" | "disk lost":
            for node in victims:
                node.kill()
                for path in node.data.iterdir() if fault.name == "disk lost" else ():
                    if path != node.config_file:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                swarm.start(node)
        case "node stopped":
            stopped([one for node in victims for one in node.family()], fault.seconds)
        case "trainer stopped":
            trainers = [node.process(TRAINER) for node in victims]
            stopped([one for one in trainers if one is not None], fault.seconds)
        case "network cut":
            for node in swarm.nodes:
                node.cable.cut()
            time.sleep(fault.seconds)
            for node in swarm.nodes:
                node.cable.repair()
        case _:
            raise ValueError(fault.name)


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
        tell = lambda line: print(line, flush=True)
        played = play(args.seed, Path(directory), long=args.long, tell=tell)
    for problem in played.problems:
        print(f"problem: {problem}")
    return 1 if played.problems else 0


if __name__ == "__main__":
    sys.exit(main())
