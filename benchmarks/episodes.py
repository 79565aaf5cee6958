"""Learning from episodes: `python -m benchmarks.episodes [--arms …] [--seeds N]`.

A policy of a million parameters (benchmarks/episodes_policy.py) that has seen random play of a game
learns to win it, alone and in a swarm of two. Nodes are simulated: the product's sampling, engine,
scorer child, signed envelopes, admission, replay of peers' episodes, judgement, split and update,
without sockets. Each seed has its own questions and random numbers.

    lake       FrozenLake 4x4 without slipping; actions are words
    guess      a number, one guess, and a tool that tells the number; actions are calls of tools

    alone      one node
    two nodes  each samples less, for what it learns from the other
    hostile    two nodes, and every round the forged episodes of `demo.liar` and episodes of a game
               that floods: how many were trained on, and whether anything raised
    engine     episodes per CPU second with rows kept between turns and with each turn prefilled
               again, in turn, for 6 turns of 32 tokens

Each run, one arm with one seed, appends a row to the file of `--rows`; runs that are in the file
are not repeated. `--table` prints the file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks import episodes_policy, toy_games
from benchmarks.episodes_policy import GAMES
from benchmarks.report import heading, machine, spread, table
from benchmarks.simulator import single_thread
from benchmarks.start_policy import build_model
from swarmnode.config import Config
from swarmnode.policy.engine import continuous
from swarmnode.policy.engine.continuous import Continuous
from swarmnode.policy.engine.slots import Slots
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import load_policy
from swarmnode.policy.micro import MicroBatcher
from swarmnode.rollouts.admission import Admission
from swarmnode.rollouts.groups import Candidate, ExternalGroup, answers
from swarmnode.tasks import registry
from swarmnode.tasks.client import Scored, Scorer
from swarmnode.tasks.frames import Episode
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.trainer.batch import assemble
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.episodes import answer_all, judged_text
from swarmnode.trainer.judge import judge, judge_until_full
from swarmnode.trainer.plan import StepPlan
from swarmnode.trainer.questions import Questions
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import Counters
from swarmnode.wire.envelope import peer_id, seal
from swarmnode.wire.ids import DOMAIN_ROLLOUT
from swarmnode.wire.messages import RolloutGroup, TaskRef
from tests.support.authors import forged_episodes

TASKS = {"lake": "toy_games:frozen_lake", "guess": "toy_games:Guess"}
FLOOD = "toy_games:flood"
LEARNING_RATES = {"lake": 1e-3, "guess": 5e-4}
"""By game: with 1e-3 the guessing game is unlearnt within 12 steps."""
TURNS = {TASKS[name]: game.turns for name, game in GAMES.items()} | {FLOOD: 32}
ROWS = Path(__file__).parent / "results" / "episodes.jsonl"
ARMS = ("alone", "two nodes", "hostile", "engine")
START_TIME = 1_700_000_000.0
ROUND_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is run."""

    steps: int = 48
    hostile_rounds: int = 6
    groups: int = 8
    """Groups of a step, B."""
    generations: int = 8
    learning_rate: float = 1e-3
    eval_every: int = 12
    eval_questions: int = 16
    """Held-out questions, four episodes each."""
    game: str = "lake"
    recipe: int = episodes_policy.RECIPE
    """Version of the start policy's recipe."""

    @property
    def task(self) -> str:
        return TASKS[self.game]

    @property
    def longest(self) -> int:
        """Tokens of an action at most."""
        return GAMES[self.game].longest


def config_of(size: Size, model: Path, folder: Path, tasks: Sequence[str]) -> Config:
    return Config.model_validate(
        {
            "node": {"data_dir": folder},
            "policy": {"model": str(model), "devices": "cpu"},
            "task": {
                "names": list(tasks),
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
    """One simulated node."""

    def __init__(
        self, config: Config, scorer: Scorer, clocks: Clocks, swarm: bytes, seed: int, index: int
    ) -> None:
        secret = hashlib.blake2b(f"episodes/{seed}/{index}".encode(), digest_size=32).digest()
        self.key = Ed25519PrivateKey.from_private_bytes(secret)
        self.peer = peer_id(self.key.public_key().public_bytes_raw())
        self.config, self.scorer, self.clocks, self.swarm = config, scorer, clocks, swarm
        self.policy = load_policy(config.policy)
        self.counters = Counters(peer=self.peer, swarm=swarm.hex())
        self.engine = make_whole_policy(config, self.policy, self.counters, lambda message: None)
        self.plan = StepPlan(config.training, config.sharing, self.counters)
        names = config.task.names
        self.sampler = Sampler(
            config.training,
            Questions(names, self.counters),
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
        self.learnt: list[str] = []
        """Authors of the external groups that were trained on."""
        self.held_out: list[dict[str, Any]] = []
        self.tokens = self.episodes = self.turns = 0
        self.environment = 0.0

    def step(self, now: float) -> list[RolloutGroup]:
        """One step of the trainer's loop; what it publishes."""
        training = self.config.training
        with self.clocks.sampling():
            experience = self.sampler(self.plan.own_groups)
        with self.clocks.timed("training"):
            judged = lambda groups: judge(
                groups, self.engine.text, self.engine.score, training.temperature
            )
            judgement, left = judge_until_full(self.pool, self.plan.external_room, judged)
            self.pool = left[: self.plan.groups]
            fresh = [*experience.trained, *judgement.accepted]
            rows = assemble([*fresh, *self.plan.replayed(fresh)], training.advantage)
            result = self.engine.update(rows)
        self.judged.update(outcome for _, outcome in judgement.outcomes)
        self.learnt += [group.peer for group in judgement.accepted]
        self.plan.observe(fresh, experience.groups)
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

    def receive(self, frame: bytes, now: float) -> str:
        """Take a peer's envelope as the product does; the reason where it is refused."""
        found = self.admission.check(frame, now)
        if not isinstance(found, Candidate):
            return found.reason
        (scored,) = self.scorer.score_many([(found.group.task, answers(found.group))])
        if not isinstance(scored, Scored):
            return "scorer"
        group = self.admission.check_scored(found, scored)
        if not isinstance(group, ExternalGroup):
            return group.reason
        self.pool.append(group)
        return ""

    def examine(self, size: Size) -> None:
        """Success rate: held-out questions, at temperature 1."""
        record: dict[str, Any] = {"step": self.counters.step, "tokens": self.tokens}
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
        record["success"] = round(
            fmean(r for one in scored if isinstance(one, Scored) for r in one.rewards), 4
        )
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
            "learnt_from_peers": len(self.learnt),
        }


class Clocks:
    """CPU seconds of this process by part, and wall seconds of sampling: the environments are in
    the scorer child, and are waited for."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.wall = 0.0
        self._samples = False

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.process_time()
        try:
            yield
        finally:
            self.seconds[part] += time.process_time() - started

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside, episodes are played for training."""
        started, self._samples = time.monotonic(), True
        try:
            with self.timed("generation"):
                yield
        finally:
            self.wall += time.monotonic() - started
            self._samples = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, prefill and decoding steps of the engine are timed."""
        prefill, advance = continuous.prefill, Slots.advance

        def timed_prefill(*args: Any, **keys: Any) -> Any:
            with self.timed("prefill" if self._samples else "elsewhere"):
                return prefill(*args, **keys)

        def timed_advance(slots: Slots, tokens: torch.Tensor) -> torch.Tensor:
            with self.timed("decode" if self._samples else "elsewhere"):
                return advance(slots, tokens)

        continuous.prefill, Slots.advance = timed_prefill, timed_advance  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            continuous.prefill, Slots.advance = prefill, advance  # type: ignore[method-assign]


def run(arm: str, seed: int, size: Size, model: Path, scorer: Scorer, folder: Path) -> Any:
    """Run one arm with one seed and return its row."""
    started, clocks = time.process_time(), Clocks()
    swarm = hashlib.blake2b(f"episodes swarm {seed}".encode(), digest_size=32).digest()
    row: dict[str, Any] = {"arm": arm, "seed": seed, "size": dataclasses.asdict(size)}
    wall = time.monotonic()
    with clocks.watching():
        if arm == "engine":
            row |= engine_speed(model, seed, folder)
        else:
            config = config_of(size, model, folder, [size.task])
            count = 1 if arm == "alone" else 2
            nodes = [Node(config, scorer, clocks, swarm, seed, i) for i in range(count)]
            if arm == "hostile":
                row |= hostile_rounds(nodes, size, seed, folder, model, scorer)
            else:
                learn(nodes, size)
            row["nodes"] = [node.as_dict() for node in nodes]
            row["episodes_per_second"] = round(
                sum(node.episodes for node in nodes) / max(clocks.seconds["generation"], 1e-9), 2
            )
    row["seconds"] = {part: round(value, 2) for part, value in clocks.seconds.items()}
    row["sampling_wall_seconds"] = round(clocks.wall, 2)
    row["cpu_seconds"] = round(time.process_time() - started)
    row["wall_seconds"] = round(time.monotonic() - wall)
    return row | {"machine": machine(), "date": time.strftime("%Y-%m-%d")}


def learn(nodes: Sequence[Node], size: Size) -> None:
    """All nodes take the same number of steps; each round's groups reach the others."""
    for step in range(size.steps):
        if step % size.eval_every == 0:
            for node in nodes:
                node.examine(size)
        now = START_TIME + step * ROUND_SECONDS
        published = [(node, node.step(now)) for node in nodes]
        for author, groups in published:
            for group in groups:
                share(author, group, [node for node in nodes if node is not author], now)
    for node in nodes:
        node.examine(size)


def share(author: Node, group: RolloutGroup, others: Sequence[Node], now: float) -> None:
    frame = seal(group, author.key, DOMAIN_ROLLOUT, author.swarm)
    for other in others:
        other.receive(frame, now)


def hostile_rounds(
    nodes: Sequence[Node], size: Size, seed: int, folder: Path, model: Path, scorer: Scorer
) -> dict[str, Any]:
    """Two honest nodes, and a third whose forged episodes reach both; and a game that floods."""
    config = config_of(size, model, folder, [size.task])
    liar = Node(config, scorer, Clocks(), nodes[0].swarm, seed, 2)
    sent: Counter[str] = Counter()
    admitted: Counter[str] = Counter()
    kinds = itertools.count()
    crashes = list[str]()
    for number in range(size.hostile_rounds):
        now = START_TIME + number * ROUND_SECONDS
        for author, groups in [(node, node.step(now)) for node in nodes]:
            for group in groups:
                share(author, group, [node for node in nodes if node is not author], now)
        own = [group for g in liar.step(now) if (group := forgeable(g)) is not None]
        for group in own:  # a number is used once, so that each is forged in one way
            ways = list(forged_episodes(group).items())
            name, (forged, _) = ways[next(kinds) % len(ways)]
            for node in nodes:
                sent[name] += 1
                try:
                    frame = seal(forged, liar.key, DOMAIN_ROLLOUT, liar.swarm)
                    reason = node.receive(frame, now)
                except Exception as error:  # that is what is counted
                    crashes.append(f"{name}: {type(error).__name__}: {error}")
                else:
                    admitted[name] += not reason
    flooded = flood(size, model, folder, scorer, seed)
    return {
        "forged": dict(sent),
        "admitted": {name: count for name, count in admitted.items() if count},
        "crashes": crashes,
        "trained_on": sum(node.learnt.count(liar.peer) for node in nodes),
        "flood": flooded,
    }


def forgeable(group: RolloutGroup) -> RolloutGroup | None:
    """The group with an episode first that ended by itself after two turns or more, and before its
    task's last; None where it has none."""
    fits = lambda c: c.finish == "eos" and 2 <= len(c.turns) < TURNS[group.task.id]
    first = next((c for c in group.completions if fits(c)), None)
    if first is None:
        return None
    others = [c for c in group.completions if c is not first]
    return msgspec.structs.replace(group, completions=[first, *others])


def flood(size: Size, model: Path, folder: Path, scorer: Scorer, seed: int) -> dict[str, Any]:
    """A node whose own game answers a megabyte each time and never ends."""
    node = Node(config_of(size, model, folder, [FLOOD]), scorer, Clocks(), b"f" * 32, seed, 3)
    longest = 0
    for number in range(2):
        groups = node.step(START_TIME + number)
        longest = max(longest, *(len(c.turns) for g in groups for c in g.completions), 0)
    return {
        "episodes": node.episodes,
        "turns_per_episode": round(node.turns / max(1, node.episodes), 2),
        "longest_published": longest,
    }


# ---- the engine ----------------------------------------------------------------------------------


class SixTurns:
    """Answers every action with a map of the lake, in this process and in no time, six times."""

    def score_many(self, items: Sequence[tuple[TaskRef, Any]]) -> list[Any]:
        return [
            Scored(
                "?",
                [0.0] * len(episodes),
                episodes=[
                    Episode(["\n".join(toy_games.LAKE)] * len(actions), len(actions) >= 6)
                    for actions in episodes
                ],
            )
            for _, episodes in items
        ]


class Fixed(Continuous):
    """An engine whose turns have 32 tokens: the last is the end, and no earlier one is."""

    def _step(self, version: int) -> list[Any]:
        ends, last = self._policy.eos_ids, min(self._policy.eos_ids)
        self._logits[:, sorted(ends)] = -1e4
        for slot, row in enumerate(self._active):
            if len(row.ids) == self._groups[row.request].most - 1:
                self._logits[slot] = -1e4
                self._logits[slot, last] = 1e4
        return super()._step(version)


class Forgetful(Fixed):
    """The same, and every turn is prefilled again."""

    def _keep(self, slot: int) -> None:
        pass


LARGE = dataclasses.replace(
    episodes_policy.SHAPE, name="4 M", hidden=256, layers=5, intermediate=704
)
"""Not trained: what it says is of no interest, and how long it talks is forced."""


def engine_speed(model: Path, seed: int, folder: Path, rounds: int = 4) -> dict[str, Any]:
    """Episodes per CPU second, alternating; both play equal lengths."""
    large = folder / "large"
    tokenizer = episodes_policy.build_tokenizer(GAMES["lake"])
    whole = build_model(LARGE, tokenizer)
    whole.generation_config.bos_token_id = None
    whole.save_pretrained(large)
    tokenizer.save_pretrained(large)
    cases = {
        f"{name}, {8 * groups} episodes at once": _speeds(path, seed, rounds, groups)
        for name, path, groups in (("1 M", model, 2), ("1 M", model, 4), ("4 M", large, 2))
    }
    factor = lambda each: round(fmean(each["kept"]) / fmean(each["prefilled again"]), 2)
    return {"engine": cases, "factor": {case: factor(each) for case, each in cases.items()}}


def _speeds(model: Path, seed: int, rounds: int, count: int) -> dict[str, list[float]]:
    policy = load_policy(
        Config.model_validate({"policy": {"model": str(model), "devices": "cpu"}}).policy
    )
    sampling = Sampling(8, 32)
    found: dict[str, list[float]] = {"kept": [], "prefilled again": []}
    ref = TaskRef("lake", "v", 0, 0)
    known = {"lake": SimpleNamespace(turns=6)}
    from swarmnode.trainer import episodes as module

    tasks, module.TASKS = module.TASKS, known  # type: ignore[assignment]
    prompt = toy_games.frozen_lake(0)[0]
    try:
        for number in range(rounds + 1):
            for name, kind in (("kept", Fixed), ("prefilled again", Forgetful)):
                engine = kind(
                    policy, MicroBatcher(2**20), sampling, policy.random_generator(seed + number)
                )
                started = time.process_time()
                groups = answer_all(engine, policy, SixTurns(), [(ref, prompt)] * count)  # type: ignore[arg-type]
                seconds = time.process_time() - started
                played = [c for g in groups if g for c in g.completions]
                if not all(len(c.turns) == 6 and len(c.turns[0].ids) == 32 for c in played):
                    lengths = [[len(turn.ids) for turn in c.turns] for c in played]
                    raise AssertionError(f"episodes are not of 6 turns of 32 tokens: {lengths}")
                if number:  # the first warms up
                    found[name].append(len(played) / seconds)
    finally:
        module.TASKS = tasks
    return {name: [round(x, 3) for x in values] for name, values in found.items()}


# ---- what is printed -----------------------------------------------------------------------------


def finished(path: Path, sizes: Sequence[Size]) -> list[dict[str, Any]]:
    """The rows of runs of these sizes."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    known = [dataclasses.asdict(size) for size in sizes]
    return [row for row in rows if row["size"] in known]


def show(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each game and arm that learns: mean ± s.d. over seeds, of a seed's nodes the
    mean."""
    lines = []
    for game, arm in itertools.product(GAMES, ("alone", "two nodes")):
        runs = [row for row in rows if (row["size"]["game"], row["arm"]) == (game, arm)]
        if not runs:
            continue

        def column(value: Callable[[Any], float], digits: int = 2, runs: Any = runs) -> str:
            return spread([fmean(value(node) for node in run["nodes"]) for run in runs], digits)

        part = lambda name, runs=runs: spread(
            [100 * run["seconds"].get(name, 0) / run["seconds"]["generation"] for run in runs], 0
        )
        lines.append(
            [
                game,
                arm,
                len(runs),
                column(lambda n: n["held_out"][0]["success"]),
                column(lambda n: n["held_out"][-1]["success"]),
                column(lambda n: n["tokens"] / 1e3, 0),
                spread([run["episodes_per_second"] for run in runs], 1),
                part("prefill"),
                part("decode"),
                spread(
                    [
                        100
                        * sum(n["environment_seconds"] for n in run["nodes"])
                        / run["sampling_wall_seconds"]
                        for run in runs
                    ],
                    0,
                ),
            ]
        )
    headers = [
        "game",
        "arm",
        "seeds",
        "success at the start",
        "success at the end",
        "own tokens, thousands",
        "episodes/CPU s of sampling",
        "prefill, % of CPU",
        "decode, % of CPU",
        "environments, % of wall time",
    ]
    parts = [table(headers, lines)] if lines else []
    for row in rows:
        if row["arm"] == "engine":
            parts += [
                f"engine, seed {row['seed']}, {case}: {row['engine'][case]}, {factor} times"
                for case, factor in row["factor"].items()
            ]
        if row["arm"] == "hostile":
            parts.append(
                f"{row['size']['game']}, hostile, seed {row['seed']}:"
                f" {sum(row['forged'].values())} forged groups, {row['trained_on']} trained on,"
                f" {len(row['crashes'])} crashes;"
                f" admitted: {row['admitted']}; flood: {row['flood']}"
            )
    return "\n\n".join(parts)


@contextlib.contextmanager
def games(folder: Path) -> Iterator[Scorer]:
    """A scorer that has the games: a module of the operator's, found on the path."""
    shutil.copy(toy_games.__file__, folder / "toy_games.py")
    sys.path.insert(0, str(folder))
    try:
        registry.install(list(TURNS), {task: {"turns": turns} for task, turns in TURNS.items()})
        with Scorer() as scorer:
            yield scorer
    finally:
        sys.path.remove(str(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Size.steps)
    parser.add_argument("--learning-rate", type=float, help="by default the game's")
    parser.add_argument("--games", nargs="+", choices=GAMES, default=list(GAMES))
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of finished runs")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    single_thread()
    rate = lambda game: args.learning_rate or LEARNING_RATES[game]
    sizes = [Size(args.steps, learning_rate=rate(game), game=game) for game in args.games]
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    done = {(row["arm"], row["size"]["game"], row["seed"]) for row in finished(args.rows, sizes)}
    left = [
        (arm, size, seed)
        for seed, size, arm in itertools.product(seeds, sizes, args.arms)
        if (arm, size.game, seed) not in done and (arm != "engine" or size is sizes[0])
    ]
    if left and not args.table:
        with tempfile.TemporaryDirectory() as name, games(Path(name)) as scorer:
            for arm, size, seed in left:
                model = episodes_policy.make(size.game)
                row = run(arm, seed, size, model, scorer, Path(name))
                args.rows.parent.mkdir(exist_ok=True)
                with args.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                last = [node["held_out"][-1:] for node in row.get("nodes", [])]
                print(
                    f"{size.game}, {arm}, seed {seed}: {last}, {row['cpu_seconds']} CPU s",
                    flush=True,
                )
    print(heading("episodes: two games"))
    print(show(finished(args.rows, sizes)))


if __name__ == "__main__":
    main()
