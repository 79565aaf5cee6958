"""Measure learning from episodes of several turns, alone and in a swarm of two.

A policy of a million parameters that has seen random play of a game
(benchmarks/lib/games_policy.py) learns to win it. Nodes are simulated without sockets, with the
product's sampling, engine, scorer child, signed envelopes, admission, replay of peers' episodes,
judgement, split and update. Each seed has its own questions and random numbers.

    lake    FrozenLake 4x4 without slipping; actions are words
    guess   a number, one guess, and a tool that returns the number; actions are tool calls

Success is the mean reward of held-out episodes at temperature 1. Each run, one arm with one seed,
appends a row to the file of `--rows`; finished runs are not repeated. `--table` prints the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.lib import games_policy, toy_games
from benchmarks.lib.games_policy import GAMES
from benchmarks.lib.report import (
    append_row,
    columns,
    heading,
    machine,
    make_parser,
    read_rows,
    seeds_of,
    spread,
)
from benchmarks.lib.simulator import make_key, single_thread
from swarmnode.config import Config
from swarmnode.policy.engine.continuous import Continuous
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import load_policy
from swarmnode.policy.micro import MicroBatcher
from swarmnode.rl.split import AdaptiveSplit
from swarmnode.rollouts.groups import Candidate, ExternalGroup, answers, is_useful
from swarmnode.rollouts.network.admission import Admission
from swarmnode.rollouts.trainer.batch import assemble
from swarmnode.rollouts.trainer.judge import judge, judge_until_full
from swarmnode.tasks import registry
from swarmnode.tasks.client import Scored, Scorer
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.episodes import answer_all, judged_text
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import Counters
from swarmnode.wire.envelope import peer_id, seal
from swarmnode.wire.ids import DOMAIN_ROLLOUT
from swarmnode.wire.messages import RolloutGroup, TaskRef

TASKS = {"lake": "toy_games:frozen_lake", "guess": "toy_games:Guess"}
TURNS = {TASKS[name]: game.turns for name, game in GAMES.items()}
LEARNING_RATES = {"lake": 1e-3, "guess": 5e-4}
"""Learning rate of each game. With 1e-3 the guessing game is unlearned within 12 steps."""
ROWS = Path(__file__).parent / "results" / "episodes.jsonl"
ARMS = {"alone": 1, "two nodes": 2}
"""Arm → number of nodes."""
START_TIME = 1_700_000_000.0
ROUND_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of the experiment."""

    steps: int = 48
    groups: int = 8
    """Groups of a step, B."""
    generations: int = 8
    learning_rate: float = 1e-3
    eval_every: int = 12
    eval_questions: int = 16
    """Held-out questions, with four episodes each."""
    game: str = "lake"
    recipe: int = games_policy.RECIPE
    """Version of the start policy."""

    @property
    def task(self) -> str:
        return TASKS[self.game]

    @property
    def longest(self) -> int:
        """Maximum number of tokens of an action."""
        return GAMES[self.game].longest


def config_of(size: Size, model: Path, folder: Path) -> Config:
    return Config.model_validate(
        {
            "node": {"data_dir": folder},
            "policy": {"model": str(model), "devices": "cpu"},
            "task": {
                "names": [size.task],
                "modules": list(TURNS),
                "settings": {task: {"turns": turns} for task, turns in TURNS.items()},
            },
            "weights": {"rule": "off"},
            "training": {
                "learning_rate": size.learning_rate,
                "groups_per_step": size.groups,
                "num_generations": size.generations,
                "max_completion_length": size.longest,
                "options": ["continuous"],
            },
        }
    )


class Node:
    """A simulated node."""

    def __init__(self, config: Config, scorer: Scorer, swarm: bytes, seed: int, index: int) -> None:
        self.key = make_key(f"episodes/{seed}/{index}")
        self.peer = peer_id(self.key.public_key().public_bytes_raw())
        self.config, self.scorer, self.swarm = config, scorer, swarm
        self.policy = load_policy(config.policy)
        self.counters = Counters(peer=self.peer, swarm=swarm.hex())
        self.engine = make_whole_policy(config, self.policy, self.counters, lambda message: None)
        self.split = AdaptiveSplit(config.training.groups_per_step, shares=config.sharing.enabled)
        names = config.task.names
        self.sampler = Sampler(
            config.training,
            names,
            self.engine,
            scorer,
            self.policy.random_generator(1009 * seed + index),
            self.counters,
        )
        self.admission = Admission(swarm, self.peer, names, config.sharing)
        text = self.engine.text
        self.admission.set_policy(text.fingerprint, text.tokenizer_hash, text.tokens_per_text_byte)
        self.pool: list[ExternalGroup] = []
        self.judged: Counter[str] = Counter()
        self.external_groups = 0
        """Peers' groups that were trained on."""
        self.held_out: list[dict[str, Any]] = []
        self.tokens = self.episodes = self.turns = 0
        self.sampling_cpu = self.sampling_wall = self.environment = 0.0
        """Seconds. Environments run in the scorer child, which sampling waits for."""

    def step(self, now: float) -> list[RolloutGroup]:
        """Take one step of the trainer's loop and return the groups that it publishes."""
        training = self.config.training
        wall, cpu = time.monotonic(), time.process_time()
        experience = self.sampler(self.split.own_groups)
        self.sampling_wall += time.monotonic() - wall
        self.sampling_cpu += time.process_time() - cpu
        judged = lambda groups: judge(
            groups, self.engine.text, self.engine.score, training.temperature
        )
        judgement, left = judge_until_full(self.pool, self.split.external_room, judged)
        self.pool = left[: self.split.batch]
        rows = assemble([*experience.trained, *judgement.accepted], training.advantage)
        result = self.engine.update(rows)
        self.judged.update(outcome for _, outcome in judgement.outcomes)
        self.external_groups += len(judgement.accepted)
        self.split.observe(sum(is_useful(group.rewards) for group in judgement.accepted))
        self.counters.step += 1
        self.counters.policy_version += result.stepped
        played = experience.played
        self.tokens += experience.tokens
        self.episodes += played.episodes
        self.turns += played.turns
        self.environment += played.environment_seconds
        return [self._group(message, now) for message in experience.messages]

    def _group(self, message: Any, now: float) -> RolloutGroup:
        text = self.engine.text
        return RolloutGroup(
            message.task,
            text.fingerprint,
            text.tokenizer_hash,
            message.policy_version,
            int(now * 1000),
            message.sequence,
            message.sampling,
            message.completions,
        )

    def receive(self, frame: bytes, now: float) -> None:
        """Take a peer's envelope through admission, replay and scoring into the pool."""
        found = self.admission.check(frame, now)
        if isinstance(found, Candidate):
            (scored,) = self.scorer.score_many([(found.group.task, answers(found.group))])
            if isinstance(scored, Scored):
                group = self.admission.check_scored(found, scored)
                if isinstance(group, ExternalGroup):
                    self.pool.append(group)

    def evaluate(self, size: Size) -> None:
        """Measure the success in held-out episodes."""
        seed, version = evaluation_seed(size.task), registry.task_version(size.task)
        refs = [TaskRef(size.task, version, seed, i) for i in range(size.eval_questions)]
        asked = [
            (ref, one.prompt)
            for ref, one in zip(refs, self.scorer.score_many([(r, []) for r in refs]), strict=True)
            if isinstance(one, Scored)
        ]
        engine = Continuous(
            self.policy,
            MicroBatcher(16384),
            Sampling(4, size.longest),
            self.policy.random_generator(7),
        )
        groups = [g for g in answer_all(engine, self.policy, self.scorer, asked) if g]
        scored = self.scorer.score_many(
            [
                (ref, [judged_text(c) for c in group.completions])
                for (ref, _), group in zip(asked, groups, strict=True)
            ]
        )
        success = fmean(r for one in scored if isinstance(one, Scored) for r in one.rewards)
        record = {"step": self.counters.step, "tokens": self.tokens, "success": round(success, 4)}
        self.held_out.append(record)

    def as_dict(self) -> dict[str, Any]:
        return {
            "held_out": self.held_out,
            "tokens": self.tokens,
            "episodes": self.episodes,
            "turns_per_episode": round(self.turns / max(1, self.episodes), 2),
            "environment_seconds": round(self.environment, 2),
            "admission": self.admission.statistics().outcomes,
            "judged": dict(self.judged),
            "learnt_from_peers": self.external_groups,
        }


def run(arm: str, seed: int, size: Size, model: Path, scorer: Scorer, folder: Path) -> Any:
    """Run one arm with one seed and return its row."""
    started = time.process_time()
    swarm = hashlib.blake2b(f"episodes swarm {seed}".encode(), digest_size=32).digest()
    config = config_of(size, model, folder)
    nodes = [Node(config, scorer, swarm, seed, index) for index in range(ARMS[arm])]
    learn(nodes, size)
    return {
        "arm": arm,
        "seed": seed,
        "size": dataclasses.asdict(size),
        "nodes": [node.as_dict() for node in nodes],
        "episodes_per_second": round(
            sum(node.episodes for node in nodes) / sum(node.sampling_cpu for node in nodes), 2
        ),
        "sampling_wall_seconds": round(sum(node.sampling_wall for node in nodes), 2),
        "cpu_seconds": round(time.process_time() - started),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
    }


def learn(nodes: Sequence[Node], size: Size) -> None:
    """Take the same number of steps with every node. After a round each group reaches the
    others."""
    for step in range(size.steps):
        if step % size.eval_every == 0:
            for node in nodes:
                node.evaluate(size)
        now = START_TIME + step * ROUND_SECONDS
        published = [(node, node.step(now)) for node in nodes]
        for author, groups in published:
            for group in groups:
                frame = seal(group, author.key, DOMAIN_ROLLOUT, author.swarm)
                for node in nodes:
                    if node is not author:
                        node.receive(frame, now)
    for node in nodes:
        node.evaluate(size)


def show(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line for each game and arm: mean ± s.d. over seeds. The value of a seed
    is the mean of its nodes."""
    kinds = dict.fromkeys((row["size"]["game"], row["arm"]) for row in rows)
    runs_of = lambda kind: [row for row in rows if (row["size"]["game"], row["arm"]) == kind]
    mean = lambda value, digits=2: (
        lambda kind: spread(
            [fmean(value(node) for node in run["nodes"]) for run in runs_of(kind)], digits
        )
    )
    environments = lambda run: (
        100 * sum(n["environment_seconds"] for n in run["nodes"]) / run["sampling_wall_seconds"]
    )
    cells: dict[str, Callable[[tuple[str, str]], object]] = {
        "game": lambda kind: kind[0],
        "arm": lambda kind: kind[1],
        "seeds": lambda kind: len(runs_of(kind)),
        "success at the start": mean(lambda n: n["held_out"][0]["success"]),
        "success at the end": mean(lambda n: n["held_out"][-1]["success"]),
        "own tokens, thousands": mean(lambda n: n["tokens"] / 1e3, 1),
        "episodes/CPU s of sampling": lambda kind: spread(
            [run["episodes_per_second"] for run in runs_of(kind)], 1
        ),
        "environments, % of sampling": lambda kind: spread(
            [environments(run) for run in runs_of(kind)], 0
        ),
    }
    return columns(list(kinds), cells)


@contextlib.contextmanager
def games(folder: Path) -> Iterator[Scorer]:
    """Yield a scorer that has the games: a module of the operator's, found on the path."""
    shutil.copy(toy_games.__file__, folder / "toy_games.py")
    sys.path.insert(0, str(folder))
    try:
        registry.install(list(TURNS), {task: {"turns": turns} for task, turns in TURNS.items()})
        with Scorer() as scorer:
            yield scorer
    finally:
        sys.path.remove(str(folder))


def main() -> None:
    parser = make_parser(
        "episodes", __doc__, quick="one game, two steps, no file", seeds=3, json=False
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--games", nargs="+", choices=GAMES, default=list(GAMES))
    parser.add_argument("--steps", type=int, default=Size.steps)
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of finished runs")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    single_thread()
    sizes = [Size(args.steps, learning_rate=LEARNING_RATES[game], game=game) for game in args.games]
    with tempfile.TemporaryDirectory() as name:
        if args.quick:
            sizes = [Size(2, groups=4, eval_questions=2)]
            args.seeds, args.rows = 1, Path(name) / "rows.jsonl"
        known = [dataclasses.asdict(size) for size in sizes]
        done = {(r["arm"], r["size"]["game"], r["seed"]) for r in read_rows(args.rows, known)}
        left = [
            (arm, size, seed)
            for seed, size, arm in itertools.product(seeds_of(args), sizes, args.arms)
            if (arm, size.game, seed) not in done
        ]
        if left and not args.table:
            with games(Path(name)) as scorer:
                for arm, size, seed in left:
                    model = games_policy.make(size.game)
                    row = run(arm, seed, size, model, scorer, Path(name))
                    append_row(args.rows, row)
                    last = [node["held_out"][-1]["success"] for node in row["nodes"]]
                    seconds = row["cpu_seconds"]
                    print(f"{size.game}, {arm}, seed {seed}: {last}, {seconds} CPU s", flush=True)
        rows = [row for row in read_rows(args.rows, known) if row["arm"] in ARMS]
    print(heading("episodes: learning from two games"))
    print(show(rows))


if __name__ == "__main__":
    main()
