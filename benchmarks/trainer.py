"""Compare a local step (sample, score, update) with a step of TRL's GRPOTrainer.

Both have the same model, tasks, batch, dtype, sampling, loss and optimizer settings, and one thread
on a CPU. Each runs in a process of its own: in one process, TRL's steps take a fifth longer. TRL is
timed between `on_step_begin` and `on_step_end`, without data loading and logging. Both score
through the same sandboxed scorer, and TRL gets its prompts ready made. Gradient checkpointing,
TRL's default, is off. Other load changes CPU seconds too, so compare them on a quiet machine.

    real rewards         as in a node: most groups earn nothing at first and are skipped
    every group useful   rewards 1, 0, 1, 0, …: both train on all completions
    a larger model       random weights, 32 new tokens: less Python, more arithmetic
    long prompts         the same with prompts of 17 to 185 tokens (mean 83). The product runs a
                         prompt once per group, TRL once per completion
    --real STEPS         SmolLM2-135M-Instruct, an adapter of rank 16, chat/json_fields: 2 groups of
                         8 with all groups useful and with real rewards, then 8 groups. An even
                         number, because the continuous engine samples for two steps at once
    --lengths            completions that end by chance (geometric, mean 100, at most 512), 3.5 M
                         parameters: both engines of the product against TRL with `generate` and
                         with transformers' continuous batching. The figure is tokens per CPU
                         second of each seed, since lengths of few completions differ by chance
    --shape NAME         on a GPU: random weights of a published shape (benchmarks/lib/shapes.py)

tests/unit/rl/test_trl.py compares loss and gradient of both on one batch.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import torch
import transformers
import trl
from transformers import PrinterCallback, TrainerCallback

from benchmarks.lib.report import columns, heading, make_parser, median_range, write_json
from benchmarks.lib.shapes import SHAPES, build, random_llama
from benchmarks.lib.trl_setup import grpo_config
from swarmnode.config import Config, LoraSettings, PolicyConfig, TrainingConfig, WeightsConfig
from swarmnode.policy import linear
from swarmnode.policy.load import Policy, load_policy
from swarmnode.rollouts.trainer.batch import assemble
from swarmnode.tasks.client import Scored, Scorer
from swarmnode.tasks.registry import task_version
from swarmnode.tasks.seeds import choose_task, task_seed
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import Counters
from swarmnode.wire.messages import TaskRef
from tools.build_tiny import build_tokenizer

G, B = 8, 8
PAGE = 32
"""Tokens of a page in transformers' continuous batching. The pages hold all completions at their
longest. By default it would allocate half of the free memory at every step."""
WARM = 2
"""Uncounted steps of each."""


@dataclass(frozen=True)
class Case:
    name: str
    steps: int
    new_tokens: int
    real_rewards: bool
    hidden: int = 0
    """Width of a random Llama; 0 is the embedded policy."""
    long_prompts: bool = False
    """One token per character, without the embedded tokenizer's phrases."""
    shape: str = ""
    """Name in SHAPES, instead of the embedded policy."""
    real: bool = False
    """SmolLM2 with an adapter, on chat/json_fields."""
    device: str = "cpu"
    dtype: str = "float32"
    tokens: int = TrainingConfig().per_device_train_tokens
    """Maximum number of tokens of the product's micro-batches. TRL runs its batch in one piece."""
    engines: tuple[str, ...] = ("",)
    """Engines of the product (`training.options`); empty lets the product choose."""
    paged: bool = False
    """TRL samples with transformers' continuous batching."""
    even: bool = False
    """Make all tokens about equally likely, so that lengths are geometric."""
    learning_rate: float = TrainingConfig().learning_rate
    groups: int = B
    ahead: int = 0
    """Steps of the product before the first compared one, which fill the continuous engine."""
    warm: int = WARM
    seed: int = 0

    @property
    def tasks(self) -> list[str]:
        return ["chat/json_fields"] if self.real else Config().task.names

    @property
    def lora(self) -> LoraSettings:
        return LoraSettings(r=16, lora_alpha=32) if self.real else LoraSettings()

    @property
    def training(self) -> TrainingConfig:
        return TrainingConfig(
            num_generations=G,
            groups_per_step=self.groups,
            max_completion_length=self.new_tokens,
            per_device_train_tokens=self.tokens,
            learning_rate=self.learning_rate,
        )


@dataclass
class Step:
    """One step of either side."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    sampling_seconds: float = 0.0
    """Seconds of sampling and scoring; the rest is the update. TRL's are not recorded."""
    sampling_cpu_seconds: float = 0.0
    """The same in CPU seconds. TRL's end when it requests rewards."""
    tokens: float = 0.0
    """Mean length of a completion."""
    reward: float = 0.0
    lag: float = 0.0
    """Mean updates between a group's first token and the step that learns from it."""
    useful: float = 0.0
    """Share of groups that the update trained on."""


@dataclass
class Result:
    """Counted steps of one engine of the product, and of TRL."""

    case: Case
    parameters: int
    engine: str
    ours: list[Step]
    trl: list[Step]

    def ratio(self, what: str) -> float:
        """Return TRL's time ÷ the product's. what: seconds or cpu_seconds."""
        return total(self.trl, what) / total(self.ours, what)

    def rate(self, steps: Sequence[Step]) -> float:
        """Return tokens per CPU second of a step."""
        return self.case.groups * G * total(steps, "tokens") / total(steps, "cpu_seconds")


def total(steps: Sequence[Step], what: str) -> float:
    return sum(getattr(step, what) for step in steps)


def swarm_of(case: Case) -> bytes:
    """Return the swarm id, from which the questions follow."""
    return bytes([case.seed]) * 32


def step_of_ours(case: Case, policy: Policy, scorer: Scorer, engine: str) -> Callable[[], Step]:
    """Return the product's local step, composed of the parts of `swarmnode.trainer.loop`."""
    training = case.training.model_copy(update={"options": [engine] if engine else []})
    config = Config(training=training, weights=WeightsConfig(rule="off"))
    counters = Counters(peer="ours", swarm=swarm_of(case).hex())
    trained = make_whole_policy(config, policy, counters, send=lambda message: None)
    sampler = Sampler(
        training,
        case.tasks,
        trained,
        scorer,
        policy.random_generator(case.seed),
        counters,
    )

    def step() -> Step:
        wall, cpu = now(), time.process_time()
        experience = sampler(case.groups)
        groups, sampled, sampled_cpu = experience.groups, now(), time.process_time()
        if not case.real_rewards:
            groups = [replace(g, rewards=alternating(len(g.rewards))) for g in groups]
        counters.policy_version += trained.update(assemble(groups, training.advantage)).stepped
        return Step(
            seconds=now() - wall,
            cpu_seconds=time.process_time() - cpu,
            sampling_seconds=sampled - wall,
            sampling_cpu_seconds=sampled_cpu - cpu,
            tokens=experience.tokens / sum(len(g.rows) for g in groups),
            reward=statistics.fmean(r for g in groups for r in g.rewards),
            lag=statistics.fmean(experience.lags),
            useful=statistics.fmean(len(set(g.rewards)) > 1 for g in groups),
        )

    return step


def now() -> float:
    """Return the time after all work on a GPU has completed."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def alternating(count: int) -> list[float]:
    return [float(i % 2 == 0) for i in range(count)]


class Stopwatch(TrainerCallback):
    """Times TRL's steps."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._start = (0.0, 0.0)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(Step())
        self._start = now(), time.process_time()

    def on_sampled(self, tokens: float) -> None:
        """Record that TRL has its completions, and their mean length."""
        self.steps[-1].sampling_cpu_seconds = time.process_time() - self._start[1]
        self.steps[-1].tokens = tokens

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps[-1].seconds = now() - self._start[0]
        self.steps[-1].cpu_seconds = time.process_time() - self._start[1]


def trl_trainer(
    case: Case, policy: Policy, scorer: Scorer, folder: str, watch: Stopwatch
) -> trl.GRPOTrainer:
    """Return a GRPOTrainer with the product's settings and other questions of the same tasks."""
    names = case.tasks
    refs = []
    for sequence in range((case.steps + case.warm) * case.groups):
        name = choose_task(names, swarm_of(case), "trl", sequence)
        seed, index = task_seed(swarm_of(case), "trl", sequence, name)
        refs.append(TaskRef(name, task_version(name), seed, index))
    prompts = [
        s.prompt for s in scorer.score_many([(r, []) for r in refs]) if isinstance(s, Scored)
    ]
    rendered = [
        policy.tokenizer.decode(policy.encode_prompt(p), skip_special_tokens=False) for p in prompts
    ]

    def reward(
        completions: list[str], number: list[int], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        """Score B questions × G completions, in the order of TRL's sampler."""
        asked = [(refs[number[i]], completions[i : i + G]) for i in range(0, len(completions), G)]
        watch.on_sampled(statistics.fmean(map(len, completion_ids)))
        rewards = [
            r
            for s in scorer.score_many(asked)
            for r in (s.rewards if isinstance(s, Scored) else [0.0] * G)
        ]
        watch.steps[-1].reward = statistics.fmean(rewards)
        return rewards if case.real_rewards else alternating(len(rewards))

    settings = grpo_config(
        folder,
        case.training,
        steps=case.steps + case.warm,
        seed=case.seed,
        use_cpu=case.device == "cpu",
        bf16=case.dtype == "bfloat16",
        use_transformers_continuous_batching=case.paged,
        transformers_continuous_batching_config=pages(case) if case.paged else None,
    )
    return trl.GRPOTrainer(
        policy.model,
        reward,
        settings,
        datasets.Dataset.from_dict({"prompt": rendered, "number": list(range(len(refs)))}),
        processing_class=policy.tokenizer,
        callbacks=[watch],
    )


def pages(case: Case) -> dict[str, int]:
    return {
        "page_size": PAGE,
        "num_blocks": case.groups * G * ((200 + case.new_tokens) // PAGE + 1),
        "max_batch_tokens": 2048,
    }


def run(case: Case) -> list[Result]:
    """Measure TRL and each engine of the product. Return a result for each engine."""
    size, theirs = in_process(case, "trl")
    return [
        Result(case, size, engine, in_process(case, engine)[1], theirs) for engine in case.engines
    ]


def in_process(case: Case, side: str) -> tuple[int, list[Step]]:
    """Run `take_steps` in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(take_steps, case, side).result()


def take_steps(case: Case, side: str) -> tuple[int, list[Step]]:
    """Return the number of parameters and the counted steps of `side`: trl, or an engine of the
    product."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if side == "trl":
        linear.SMALLEST = sys.maxsize  # TRL's model has torch's own products
    with Scorer() as scorer, tempfile.TemporaryDirectory() as folder:
        cfg = PolicyConfig(
            model=model_of(case, folder), devices=case.device, dtype=case.dtype, lora=case.lora
        )
        policy = load_policy(cfg)
        size = policy.statistics().parameters
        if side == "trl":
            watch = Stopwatch()
            trainer = trl_trainer(case, policy, scorer, folder, watch)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            return size, watch.steps[case.warm :]
        step = step_of_ours(case, policy, scorer, side)
        for _ in range((case.ahead if side != "lockstep" else 0) + case.warm):
            step()
        return size, [step() for _ in range(case.steps)]


def model_of(case: Case, folder: str) -> str:
    """Make the model of `case` and return its `policy.model`."""
    if case.real:
        return "smollm2"
    if not case.hidden and not case.shape:
        return "embedded"
    directory = Path(folder) / "model"
    if case.long_prompts:
        tokenizer = build_tokenizer(set())
    else:
        tokenizer = load_policy(PolicyConfig(devices="cpu")).tokenizer
    if case.shape:
        return build(case.shape, tokenizer, directory, case.device)
    head_scale = 0.1 if case.even else 1.0
    return random_llama(tokenizer, directory, case.hidden, seed=case.seed, head_scale=head_scale)


def show(results: list[Result]) -> str:
    ms = lambda steps, what: median_range([1000 * getattr(s, what) for s in steps], 0)
    mean = lambda steps, what: total(steps, what) / len(steps)
    speed = lambda r, steps: f"{r.case.groups * G * len(steps) / total(steps, 'seconds'):.1f}"
    last = lambda r, steps: (
        f"{statistics.fmean(s.reward for s in steps[-10:]):.2f}" if r.case.real_rewards else "–"
    )
    return columns(
        results,
        {
            "case": lambda r: r.case.name,
            "parameters": lambda r: f"{r.parameters:,}",
            "swarmnode, samples/s": lambda r: speed(r, r.ours),
            "TRL, samples/s": lambda r: speed(r, r.trl),
            "ratio": lambda r: f"{r.ratio('seconds'):.2f}",
            "ratio of CPU time": lambda r: f"{r.ratio('cpu_seconds'):.2f}",
            "swarmnode, CPU ms a step": lambda r: ms(r.ours, "cpu_seconds"),
            "of it sampling, scoring": lambda r: ms(r.ours, "sampling_cpu_seconds"),
            "TRL, CPU ms a step": lambda r: ms(r.trl, "cpu_seconds"),
            "of that sampling": lambda r: ms(r.trl, "sampling_cpu_seconds"),
            "tokens of a completion, swarmnode": lambda r: f"{mean(r.ours, 'tokens'):.0f}",
            "TRL's": lambda r: f"{mean(r.trl, 'tokens'):.0f}",
            "groups trained on": lambda r: f"{total(r.ours, 'useful') / len(r.ours):.0%}",
            "reward of last 10, swarmnode": lambda r: last(r, r.ours),
            "TRL": lambda r: last(r, r.trl),
        },
    )


def show_lengths(results: list[Result]) -> str:
    """Return a row for each seed, and the median ratio of each pair of engines."""
    mean = lambda steps, what, digits: f"{total(steps, what) / len(steps):.{digits}f}"
    name = lambda r: f"{r.engine}; TRL with {r.case.name}"
    ratio = lambda r: r.rate(r.ours) / r.rate(r.trl)
    shown = columns(
        results,
        {
            "engines": name,
            "seed": lambda r: r.case.seed,
            "mean length, swarmnode": lambda r: mean(r.ours, "tokens", 0),
            "TRL": lambda r: mean(r.trl, "tokens", 0),
            "lag, updates": lambda r: mean(r.ours, "lag", 1),
            "CPU s a step, swarmnode": lambda r: mean(r.ours, "cpu_seconds", 1),
            "of it sampling": lambda r: mean(r.ours, "sampling_cpu_seconds", 1),
            "CPU s a step, TRL": lambda r: mean(r.trl, "cpu_seconds", 1),
            "of that sampling": lambda r: mean(r.trl, "sampling_cpu_seconds", 1),
            "tokens per CPU s, swarmnode": lambda r: f"{r.rate(r.ours):.0f}",
            "tokens per CPU s, TRL": lambda r: f"{r.rate(r.trl):.0f}",
            "ratio": lambda r: f"{ratio(r):.2f}",
        },
    )
    medians = [
        f"* {kind}: {median_range([ratio(r) for r in results if name(r) == kind])} times as fast"
        for kind in dict.fromkeys(map(name, results))
    ]
    return "\n".join([shown, "", *medians])


def cases_of(args: Any) -> list[Case]:
    place: dict[str, Any] = {"device": args.device, "dtype": args.dtype}
    if args.shape:
        place |= {"shape": args.shape, "tokens": 65_536}
        steps = 2 if args.quick else 10
        short = Case(f"{args.shape}, short prompts, 32 new tokens", steps, 32, False, **place)
        long = replace(short, name="the same, long prompts", long_prompts=True)
        longer = replace(long, name="the same, 256 new tokens", steps=steps // 2, new_tokens=256)
        return [short] if args.quick else [short, long, longer]
    if args.real:
        useful = Case(
            "SmolLM2, every group useful",
            args.real,
            40,
            False,
            real=True,
            groups=2,
            warm=1,
            learning_rate=5e-4,
            **place,
        )
        rewarded = replace(useful, name="SmolLM2, real rewards", real_rewards=True)
        larger = replace(useful, name="SmolLM2, every group useful, 8 groups", groups=8)
        return [useful, rewarded, larger]
    if args.lengths:
        uneven = Case(
            "generate",
            args.lengths,
            512,
            False,
            hidden=256,
            long_prompts=True,
            even=True,
            learning_rate=1e-6,
            tokens=65_536,
            warm=0,
            ahead=3,
            groups=args.groups,
            engines=("lockstep", "continuous"),
            **place,
        )
        paged = replace(uneven, name="continuous batching", paged=True)
        return [replace(case, seed=seed) for seed in args.seeds for case in (uneven, paged)]
    steps = 15 if args.quick else 80
    small = Case("embedded policy, real rewards", steps, 8, True, **place)
    useful = replace(small, name="embedded policy, every group useful", real_rewards=False)
    if args.quick:
        return [small, useful]
    name = "random Llama, 256 wide, every group useful"
    larger = replace(useful, name=name, steps=12, new_tokens=32, hidden=256)
    return [
        small,
        useful,
        larger,
        replace(larger, name="the same, long prompts", long_prompts=True),
    ]


def main() -> None:
    parser = make_parser("trainer", __doc__, quick="few steps, without the larger model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--shape", default="", choices=("", *SHAPES))
    parser.add_argument("--real", type=int, default=0, metavar="STEPS", help="only SmolLM2")
    parser.add_argument(
        "--lengths",
        nargs="?",
        type=int,
        const=3,
        default=0,
        metavar="STEPS",
        help="only completions of random lengths",
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0], help="seeds of --lengths, below 256"
    )
    parser.add_argument("--groups", type=int, default=B, help="groups of a step, with --lengths")
    args = parser.parse_args()
    if args.real % 2:
        parser.error("--real: an even number of steps")
    results: list[Result] = []
    for case in cases_of(args):
        results += run(case)
        rows = results[-len(case.engines) :]  # each takes minutes
        print(show_lengths(rows) if args.lengths else show(rows), flush=True)
    print(heading(f"trainer: local step against TRL {trl.__version__} GRPOTrainer"))
    print(show_lengths(results) if args.lengths else show(results))
    write_json(args.json, {"trl": trl.__version__, "results": [asdict(r) for r in results]})


if __name__ == "__main__":
    main()
