"""What does a failure cost the policy? Real crews that lose stages, and the same crew undisturbed.
`python -m benchmarks.crew_paired
[--quick] [--seeds N …] [--json PATH]`

Two crews of four whole nodes with one model, one configuration, the same keys and seeds, one after
the other, to the same committed step. One is left alone. In the other trainers are killed -9 in the
midst of steps: of one stage after the other, of two neighbours at once, and at last everything of a
node; in a third the head's. A stage comes back from its own checkpoint or, with that deleted at the
kill as if the disk were lost, from its neighbours' checkpoints.

Then the policy is put together from the four stages' own files and asked what it was not trained
on: nats per token of the right answers to held-out questions, and the reward of its own.

The same run twice, and with other random numbers, say how much of a difference is none. Weights are
not averaged: there is no other crew.

Goal: within 0.02 nats of the paired run.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks import report
from swarmnode.config import Config
from swarmnode.demo.crew import write_model
from swarmnode.demo.nodes import DemoNode
from swarmnode.policy.load import Policy, load_policy, overwrite, trainable
from swarmnode.policy.logprobs import score
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.gym import GymTask
from swarmnode.tasks.registry import TASKS
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.evaluate import Evaluation
from swarmnode.trainer.state import Counters
from tests.support.whole_crew import (
    WholeCrew,
    checkpoint_of,
    checkpoint_steps,
    freeze,
    is_like,
    kill_trainers,
    like_nodes,
    policy_of,
    restored,
    start,
    until,
)

STEP_SECONDS = 1.0
"""Least time of a step, so that at the end four files of one step can be read."""
ATTEMPTS = 5
TEXT_BLOCK = 7
"""Of held-out questions: not that of the reward."""
TEXT_QUESTIONS = 32
"""Per task."""
REWARD_QUESTIONS = 8
FIRST_KILL, KILL_EVERY = 4, 3
"""Committed steps."""
OTHERS = [
    ("trainer", (1,)),
    ("trainer", (2,)),
    ("trainer", (3,)),
    ("neighbours", (1, 2)),
    ("node", (2,)),
]
HEAD = [("trainer", (0,))]
"""By itself: a head that begins again leaves group numbers out, so that what it asks from then on
is something else than in the pair."""


@dataclass(frozen=True)
class Arm:
    name: str
    kills: Sequence[tuple[str, tuple[int, ...]]] = ()
    disks: bool = True
    """Own checkpoints are left to who comes back."""
    checkpoint_every: int = 5
    other_numbers: bool = False


ARMS = [
    Arm("undisturbed"),
    Arm("undisturbed, again"),
    Arm("undisturbed, other random numbers", other_numbers=True),
    Arm("five kills, own checkpoints", OTHERS),
    Arm("five kills, neighbours' checkpoints, every 5 steps", OTHERS, disks=False),
    Arm(
        "five kills, neighbours' checkpoints, every 20 steps",
        OTHERS,
        disks=False,
        checkpoint_every=20,
    ),
    Arm("the head killed, own checkpoint", HEAD),
    Arm("the head killed, neighbours' checkpoints, every 5 steps", HEAD, disks=False),
]


@dataclass(frozen=True)
class Kill:
    kind: str
    stages: tuple[int, ...]
    at: int
    """Steps in all checkpoints at that moment."""
    lost: int
    """Of these, steps that the crew had to take again."""
    ages: tuple[int | None, ...]
    """Steps that each stage's weights lacked when it was back; None where that cannot be said."""
    sources: tuple[str, ...]
    seconds: float


@dataclass
class Run:
    seed: int
    arm: str
    kills: list[Kill] = field(default_factory=list)
    step: int = 0
    nats: float = float("nan")
    """Per token, of right answers."""
    reward: float = float("nan")
    apart: float = float("nan")
    """Largest difference of any weight to the paired run's."""
    layout: list[object] = field(default_factory=list)
    """Who held which layers in the end."""


@contextlib.contextmanager
def crew(directory: Path, model: Path, seed: int, arm: Arm) -> Iterator[WholeCrew]:
    nodes = like_nodes(
        directory,
        model,
        str(seed),
        training={"seed": seed + 1000 * arm.other_numbers, "step_interval": STEP_SECONDS},
        weights={"rule": "off"},
        stages={"checkpoint_every": arm.checkpoint_every},
    )
    try:
        yield WholeCrew(nodes, start(nodes))
    finally:
        # not in good order: who leaves last would take steps without the others' files
        for node in nodes:
            node.kill()


def train(
    directory: Path, model: Path, seed: int, arm: Arm, steps: int
) -> tuple[Run, dict[str, torch.Tensor]]:
    run, moments = Run(seed, arm.name), random.Random(seed)
    with crew(directory, model, seed, arm) as nodes:
        assert is_like(nodes), "another node leads"
        due = FIRST_KILL
        for kind, stages in arm.kills:
            until(lambda due=due: min(checkpoint_steps(nodes.nodes), default=0) >= due, nodes.story)
            time.sleep(moments.random() * STEP_SECONDS)
            run.kills.append(lose(nodes, kind, stages, arm.disks))
            due = run.kills[-1].at + KILL_EVERY
        files = freeze(nodes, steps)
        run.step, weights = policy_of(files, model)
        run.layout = sorted((stage, node.name) for stage, (node, _) in nodes.seen().items())
    return run, weights


def train_until_seen(
    directory: Path, model: Path, seed: int, arm: Arm, steps: int
) -> tuple[Run, dict[str, torch.Tensor]]:
    """On a busy machine another node may lead, and the last step can be over before it was looked
    at; then everything again."""
    for attempt in range(ATTEMPTS):
        try:
            return train(directory / str(attempt), model, seed, arm, steps)
        except AssertionError as error:
            print(f"again, {arm.name}: {error}", flush=True)
    raise SystemExit(f"{arm.name} was not measured in {ATTEMPTS} attempts")


def lose(crew: WholeCrew, kind: str, stages: Sequence[int], disks: bool) -> Kill:
    taken = 0

    def kill(holders: dict[int, DemoNode]) -> None:
        nonlocal taken
        lost = [holders[stage] for stage in stages]
        if kind == "node":
            lost[0].kill()
        else:
            kill_trainers(lost)
        taken = min(checkpoint_steps(crew.nodes))
        if not disks:
            for node in lost:
                checkpoint_of(node).unlink()
        if kind == "node":
            lost[0].start(crew.address)

    started = time.monotonic()
    _, after = crew.lose(kill)
    seconds = time.monotonic() - started
    told = [restored(after[stage][0]) for stage in stages]
    goes_on = max(t["step"] for t in told)
    ages = tuple(
        t["step"] - t["source_step"] if t["source_step"] is not None else None for t in told
    )
    return Kill(
        kind,
        tuple(stages),
        taken,
        max(0, taken - goes_on),
        ages,
        tuple(t["source"] for t in told),
        seconds,
    )


# ---- what the policy is worth --------------------------------------------------------------------


def answers(policy: Policy, names: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, ids of the right answer and its end), the same for every run."""
    rows = []
    for name in names:
        task = GymTask(TASKS[name])
        for index in range(TEXT_QUESTIONS):
            item = task.item(evaluation_seed(name, TEXT_BLOCK), index)
            rows.append(
                (policy.encode_prompt(item.prompt), policy.tokenize_completion(item.answer, "eos"))
            )
    return rows


def judge(
    config: Config, policy: Policy, weights: Mapping[str, torch.Tensor], scorer: Scorer, run: Run
) -> None:
    overwrite(trainable(policy.model), dict(weights))
    rows = answers(policy, config.task.names)
    told = [value for row in score(policy, rows, 1.0) for value in row]
    run.nats = -sum(told) / len(told)
    engine = make_whole_policy(config, policy, Counters(), lambda message: None)
    held_out = Evaluation(config.task, config.training, scorer)(engine, Counters())
    assert held_out is not None
    run.reward = held_out.reward


def measure(
    directory: Path, seeds: Sequence[int], steps: int, arms: Sequence[Arm], out: Path | None
) -> list[Run]:
    """Return all runs; those that are done are written to `out` whenever one is."""
    model = write_model(directory / "model")
    config = Config.model_validate(
        {
            "policy": {"model": str(model), "threads": 1, "devices": "cpu"},
            "weights": {"rule": "off"},
            "stages": {"mode": "off"},
            "task": {"held_out_per_task": REWARD_QUESTIONS},
            "node": {"data_dir": str(directory / "judge")},
        }
    )
    policy, runs = load_policy(config.policy), []
    base = trainable(policy.model)
    base = {name: tensor.clone() for name, tensor in base.items()}
    with Scorer() as scorer:
        for seed in seeds:
            start_of = Run(seed, "before training")
            judge(config, policy, base, scorer, start_of)
            runs.append(start_of)
            print(start_of, flush=True)
            first: dict[str, torch.Tensor] = {}
            for number, arm in enumerate(arms):
                run, weights = train_until_seen(
                    directory / f"{seed}-{number}", model, seed, arm, steps
                )
                judge(config, policy, weights, scorer, run)
                first = first or weights
                run.apart = max(float((weights[name] - first[name]).abs().max()) for name in first)
                runs.append(run)
                print(run, flush=True)
                if out is not None:
                    report.write_json(out, {"runs": [asdict(run) for run in runs]})
    return runs


def rows(runs: Sequence[Run], arms: Sequence[Arm]) -> list[list[str]]:
    paired = {run.seed: run for run in runs if run.arm == arms[0].name}
    out = []
    for name in dict.fromkeys(run.arm for run in runs):
        mine = [run for run in runs if run.arm == name]
        nats = [run.nats - paired[run.seed].nats for run in mine]
        kills = [kill for run in mine for kill in run.kills]
        sources = [source for kill in kills for source in kill.sources]
        ages = [age for kill in kills for age in kill.ages if age is not None]
        out.append(
            [
                name,
                str(len(mine)),
                ", ".join(f"{source} {sources.count(source)}" for source in sorted(set(sources)))
                or "–",
                str(max(kill.lost for kill in kills)) if kills else "–",
                f"{min(ages)} to {max(ages)}" if ages else "–",
                report.spread([run.nats for run in mine], 4),
                ", ".join(f"{n:+.4f}" for n in nats),
                report.spread([run.reward for run in mine], 3),
                ", ".join(f"{run.reward - paired[run.seed].reward:+.3f}" for run in mine),
                "yes"
                if all(run.apart == 0 for run in mine) and name != "before training"
                else "no",
            ]
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument(
        "--arms",
        type=int,
        nargs="+",
        default=list(range(len(ARMS))),
        help="which, in the order of the table; 0 is needed",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="one seed, ten steps, without kills and with one"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    arms = [ARMS[i] for i in options.arms]
    if options.quick:
        options.seeds, options.steps = [1], 10
        arms = [ARMS[0], Arm("one kill, own checkpoint", OTHERS[:1])]
    with tempfile.TemporaryDirectory(prefix="swarmnode-paired-") as directory:
        runs = measure(Path(directory), options.seeds, options.steps, arms, options.json)
    print(report.heading("crew, paired: what a failure costs the policy"))
    headers = [
        "run",
        "runs",
        "sources",
        "steps lost",
        "a stage lacked",
        "nats per token",
        "to the pair",
        "reward",
        "to the pair",
        "same",
    ]
    print(report.table(headers, rows(runs, arms)))


if __name__ == "__main__":
    main()
