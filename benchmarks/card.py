"""Measure training and sampling of a model of a published size on a GPU. `python -m benchmarks.card
[update] [sampling] [engines] [node] [crew]`. CUDA only.

Qwen2.5-7B's shape with random weights (`--shape`), our tokenizer, an adapter of rank 16. Nearly all
completions run to their longest.

    update     one row in an update, activations stored or recomputed: peak memory against
               `swarmnode plan`, seconds
    sampling   tokens per second by completions at once: both engines, and the int8 policy copy
    engines    completions of unequal lengths, of which only some fit at once, by either engine
    node       a whole node with a recipe (`--recipe`), with as much free memory as the recipe
               names; this process holds the rest. Phases, steps, peak memory, restarts
    crew       the same model in stages of `--members` whole nodes that share the card
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.lib.shapes import SHAPES, build
from benchmarks.lib.watched import REWARD, ROWS, Watched, run
from benchmarks.report import heading, table
from swarmnode.config import LoraSettings, PolicyConfig, TrainingConfig
from swarmnode.demo.nodes import START, DemoNode
from swarmnode.errors import DeviceError, Unavailable
from swarmnode.policy import logprobs
from swarmnode.policy.device import BASE_BITS
from swarmnode.policy.engine.continuous import Continuous
from swarmnode.policy.engine.keeper import answered
from swarmnode.policy.footprint import Method, Shape, footprint
from swarmnode.policy.generate import GroupSample, Sampling, generate
from swarmnode.policy.load import Policy, load_policy
from swarmnode.policy.micro import MicroBatcher, free_memory
from swarmnode.policy.quantised import build_quantised
from swarmnode.trainer.batch import TrainingGroup, assemble
from swarmnode.trainer.update import Updater

RANK, PROMPT, TOKENS = 16, 64, 96
ADAPTER = PolicyConfig(devices="cuda", dtype="bfloat16", lora=LoraSettings(r=RANK))
WAYS: dict[str, tuple[PolicyConfig, tuple[tuple[int, bool], ...]]] = {
    "LoRA 16": (ADAPTER, ((2560, False), (2560, True), (4608, True), (8704, True))),
    "LoRA 16, base in 4 bits": (
        ADAPTER.model_copy(update={"quantization": "4bit"}),
        ((2560, True),),
    ),
    "LoRA 16, base in 8 bits": (
        ADAPTER.model_copy(update={"quantization": "8bit"}),
        ((2560, True),),
    ),
    "all weights, moments in 8 bits": (
        PolicyConfig(devices="cuda", dtype="bfloat16", optim="adamw_8bit"),
        ((2560, True),),
    ),
    "all weights": (PolicyConfig(devices="cuda", dtype="bfloat16"), ((2560, True),)),
}
"""Name → training configuration, and cases (tokens of the row, activations recomputed)."""
ROWS_UNDER_WAY = (8, 64)
END_SECONDS = 15.0
"""A step may take minutes: a node that does not end in this time is killed."""
KNOWN = (
    "step_seconds",
    "generate_seconds",
    "train_seconds",
    "own_groups",
    "zero_advantage_share",
    "tokens_total",
    "device_memory_bytes",
    "micro_batch_tokens",
    "generation_tokens",
    "oom_retries_total",
    "reward_own",
)
"""Fields of the trainer's latest report that are printed."""
UPDATE = [
    "trained",
    "tokens",
    "recomputed",
    "plan, GB",
    "held, GB",
    "reserved, GB",
    "context, GB",
    "held ÷ plan",
    "s",
]
SAMPLING = ["what", "completions at once", "ms a step", "tokens/s", "GB beside the weights"]
ENGINES = ["engine", "mean length", "longest", "s", "tokens/s"]
QUESTIONS = [f"Tell me about the number {i}." for i in range(32)]


def used_bytes() -> int:
    """Return the bytes of the card that all processes use."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def update(
    name: str, policy: Policy, cfg: PolicyConfig, updater: Updater, length: int, recompute: bool
) -> list[object]:
    """Return a row: memory and seconds of the second update with one row of `length` tokens."""
    logprobs.needs_checkpointing = lambda *given: recompute
    answer = [5 + i % 90 for i in range(length - PROMPT)]
    rows = assemble(
        [
            TrainingGroup(
                [([5] * PROMPT, answer)] * 2, [[-1.0] * len(answer)] * 2, [0.0, 1.0], [0.0, 1.0]
            )
        ],
        "grpo",
    )
    updater.update(rows)
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    updater.update(rows)
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    context = used_bytes() - torch.cuda.memory_reserved()
    held, reserved = (
        torch.cuda.max_memory_allocated() + context,
        torch.cuda.max_memory_reserved() + context,
    )
    shape = Shape.of_config(policy.base.config.to_dict())
    plan = footprint(
        shape,
        Method("cuda", "bfloat16", cfg.lora.r, BASE_BITS[cfg.quantization], cfg.optim, recompute),
        length,
    ).total
    gb = [f"{each / 1e9:.1f}" for each in (plan, held, reserved)]
    return [
        name,
        length,
        "yes" if recompute else "no",
        *gb,
        f"{context / 1e9:.2f}",
        f"{held / plan:.2f}",
        f"{took:.2f}",
    ]


def updates(model: str, names: Sequence[str]) -> list[list[object]]:
    """Return the rows of each training configuration."""
    rows: list[list[object]] = []
    for name in names:
        cfg, cases = WAYS[name]
        try:
            policy = load_policy(cfg.model_copy(update={"model": model}))
            updater = Updater(
                policy,
                TrainingConfig(),
                MicroBatcher(max(length for length, _ in cases)),
                optim=cfg.optim,
            )
            rows += [update(name, policy, cfg, updater, *case) for case in cases]
        except (DeviceError, torch.OutOfMemoryError, ImportError, Unavailable) as error:
            rows.append([name, *["–"] * 7, str(error).partition("\n")[0][:80]])
        policy = updater = None  # type: ignore[assignment]
        free_memory()
        print(*rows[-1], flush=True)
    return rows


def continuous(
    policy: Policy, prompts: Sequence[str], asked: Sampling, rng: torch.Generator
) -> list[GroupSample]:
    """Sample as `generate` does, with the continuous engine."""
    return answered(Continuous(policy, MicroBatcher(2**20), asked, rng), prompts)


def sampling(
    name: str,
    policy: Policy,
    rows: int,
    sample: Callable[..., list[GroupSample]] = generate,
) -> list[object]:
    """Return a row: tokens per second with `rows` completions at once, the second time."""
    count = min(8, rows)
    asked = Sampling(count, TOKENS)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        groups = sample(policy, QUESTIONS[: rows // count], asked, policy.random_generator(0))
        torch.cuda.synchronize()
        took = time.perf_counter() - began
    steps = max(len(c.ids) for g in groups for c in g.completions)
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9
    print(name, rows, f"{took:.1f} s", flush=True)
    return [name, rows, f"{1000 * took / steps:.1f}", f"{rows * steps / took:.0f}", f"{peak:.2f}"]


def engines(policy: Policy) -> list[list[object]]:
    """Return a row for each engine: 128 completions of unequal lengths, 32 at once.

    Four tokens of some 500 end a completion, so that lengths are geometric."""
    ends = replace(policy, eos_ids=frozenset(range(10, 14)))
    asked, prompts = Sampling(8, 512), QUESTIONS[:16]
    room = 32 * (max(len(policy.encode_prompt(p)) for p in prompts) + asked.max_tokens)
    by: dict[str, Callable[[], list[GroupSample]]] = {
        "lockstep": lambda: MicroBatcher(room).generate(
            ends, prompts, asked, ends.random_generator(0)
        ),
        "continuous": lambda: answered(
            Continuous(ends, MicroBatcher(room), asked, ends.random_generator(0)), prompts
        ),
    }
    rows: list[list[object]] = []
    for name, sample in by.items():
        torch.cuda.synchronize()
        began = time.perf_counter()
        lengths = [len(c.ids) for group in sample() for c in group.completions]
        took = time.perf_counter() - began
        mean, most = sum(lengths) / len(lengths), max(lengths)
        rows.append([name, f"{mean:.0f}", most, f"{took:.1f}", f"{sum(lengths) / took:.0f}"])
        print(*rows[-1], flush=True)
    return rows


def copy_of(policy: Policy) -> Policy:
    weights = {
        name.replace(".base_layer", ""): tensor for name, tensor in policy.base.state_dict().items()
    }
    return replace(
        policy,
        model=build_quantised(policy.base.config, weights.__getitem__, policy.dtype, policy.device),
    )


def node(
    directory: Path,
    name: str,
    model: str,
    asked: argparse.Namespace,
    more: dict[str, dict[str, object]],
) -> DemoNode:
    sections: dict[str, dict[str, object]] = {
        "swarm": {"name": "card"},
        "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
        "policy": {"model": model},
        "task": {"names": ["data/long"]},
        'task.datasets."data/long"': {
            "source": str(directory / "rows.jsonl"),
            "verifier": "slow_reward:length",
        },
        "http": {"port": 0},
    }
    return RecipeNode(asked.recipe, name, directory / name, {**sections, **more})


class RecipeNode(DemoNode):
    def __init__(
        self, recipe: str, name: str, directory: Path, sections: dict[str, dict[str, object]]
    ) -> None:
        super().__init__(name, directory, sections)
        self._recipe = recipe

    def start(self, initial_peers: Sequence[str]) -> None:
        peers = [argument for peer in initial_peers for argument in ("--peer", peer)]
        self.launch(
            "-c", START, "run", "--recipe", self._recipe, "--config", str(self.config_file), *peers
        )


class WatchedOnCard(Watched):
    """Also records the peak memory of the card."""

    most = 0

    def look(self) -> None:
        super().look()
        self.most = max(self.most, used_bytes())


def held(gigabytes: float | None) -> torch.Tensor:
    """Allocate memory until the card has `gigabytes` free; None allocates nothing."""
    if gigabytes is None:
        return torch.empty(0)
    total = torch.cuda.mem_get_info()[1]
    return torch.empty(
        max(0, total - int(gigabytes * 1e9) - used_bytes()), dtype=torch.uint8, device="cuda"
    )


def whole(
    title: str, nodes: Sequence[DemoNode], asked: argparse.Namespace, gigabytes: float | None
) -> bool:
    """Run the nodes and print the results. Return True if all took a step without restarts."""
    kept = held(gigabytes)
    before = used_bytes()
    watched = run(nodes, asked.minutes, WatchedOnCard, END_SECONDS)
    print(heading(title), flush=True)
    print(
        table(
            ["node", "phase", "times", "seconds, median [least–greatest]"],
            [row for each in watched for row in each.rows()],
        )
    )
    well = True
    for each in watched:
        report, restarts = each.report, each.restarts()
        known = {name: report.get(name) for name in KNOWN}
        card = (
            f"{(each.most - before) / 1e9:.1f} GB of the card at most, of"
            f" {(torch.cuda.mem_get_info()[1] - before) / 1e9:.1f}"
        )
        steps = f"{each.step} steps in {asked.minutes} minutes, in {each.crews} crews"
        print(f"\n{each.node.name}: {steps}; restarts: {restarts}; {card}; {known}")
        well = well and each.step > 0 and not any(restarts.values())
        if asked.logs:
            print(each.node.log_file.read_text(errors="replace")[-asked.logs :], file=sys.stderr)
    del kept
    return well


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", default=["update", "sampling", "engines", "node", "crew"]
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--model", type=Path, help="directory of the model; made if it is missing")
    parser.add_argument("--minutes", type=float, default=4.0, help="minutes that whole nodes run")
    parser.add_argument("--recipe", default="24gb-7b-lora")
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument(
        "--logs",
        type=int,
        default=0,
        help="print so many last characters of each node's log to stderr",
    )
    parser.add_argument(
        "--ways", nargs="*", choices=sorted(WAYS), help="training configurations of `update`"
    )
    asked = parser.parse_args()
    well = True
    with tempfile.TemporaryDirectory(prefix="card-") as made:
        directory = Path(made)
        model = str(asked.model or directory / "model")
        if not (Path(model) / "config.json").exists():
            build(
                asked.shape, load_policy(PolicyConfig(devices="cpu")).tokenizer, Path(model), "cuda"
            )
            free_memory()
        (directory / "rows.jsonl").write_text(ROWS)
        (directory / "slow_reward.py").write_text(REWARD)
        if "sampling" in asked.parts:
            began = time.perf_counter()
            policy = load_policy(ADAPTER.model_copy(update={"model": model}))
            print(f"loaded and hashed in {time.perf_counter() - began:.0f} s", flush=True)
            rows = [sampling("the policy, bfloat16", policy, rows) for rows in ROWS_UNDER_WAY]
            rows += [
                sampling("the policy, continuous engine", policy, rows, continuous)
                for rows in ROWS_UNDER_WAY
            ]
            copy = copy_of(policy)
            del policy
            free_memory()
            rows += [sampling("a whole int8 copy", copy, rows) for rows in ROWS_UNDER_WAY]
            print(heading("card: sampling") + "\n" + table(SAMPLING, rows), flush=True)
            del copy
            free_memory()
        if "engines" in asked.parts:
            policy = load_policy(ADAPTER.model_copy(update={"model": model}))
            print(heading("card: engines") + "\n" + table(ENGINES, engines(policy)), flush=True)
            del policy
            free_memory()
        if "update" in asked.parts:
            print(
                heading("card: one row in an update")
                + "\n"
                + table(UPDATE, updates(model, asked.ways or list(WAYS))),
                flush=True,
            )
        if "node" in asked.parts:
            gigabytes = float(asked.recipe.partition("gb")[0])
            well &= whole(
                f"card: {asked.recipe}",
                [node(directory, "node0", model, asked, {})],
                asked,
                gigabytes,
            )
        if "crew" in asked.parts:
            crew: dict[str, dict[str, object]] = {
                "stages": {
                    "mode": "always",
                    "stages": asked.members,
                    "trust": ["anyone"],
                    "policy_copy": "memory",
                },
                "training": {"max_completion_length": 1024},
            }
            nodes = [
                node(directory, f"member{i}", model, asked, crew) for i in range(asked.members)
            ]
            well &= whole(f"card: a crew of {asked.members}", nodes, asked, None)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
