"""What does each source of a lost stage cost a crew of four? `python -m benchmarks.recovery
[--quick]`

A Llama of random weights, each layer a function of its own, is the hard case for synthesis: the
neighbours say nothing of the lost layer. All members, streams and files are real, in one process.
KL(before ‖ restored) and the rise of the NLL are in nats per completion token, on the rows of the
last step.

With `--faults`: seconds until a swarm of whole nodes has recovered from each fault of processes,
disks, cables and clocks (tests/support/chaos).
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import trio
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnode.config import TrainingConfig
from swarmnode.stages.model import LearnRow
from swarmnode.stages.pipeline import WorkerSettings
from swarmnode.stages.recovery import RecoverySettings
from swarmnode.stages.wire import state_bytes
from tests.support.chaos.__main__ import schedules
from tests.support.crew import Crew
from tests.support.lost_stages import Fleet, quiet

STEPS, AGE, ROWS, LOST = 12, 8, 24, 1
CFG = TrainingConfig(per_device_train_tokens=64)
BASE = RecoverySettings(checkpoint_every=10**6, seconds=60.0)
SOURCES = {  # name → (settings, whether the disk survives)
    "own checkpoint": (BASE, True),
    "neighbour's, of the last step, exact": (replace(BASE, checkpoint_every=1), False),
    "neighbour's, of the last step, small": (
        replace(BASE, checkpoint_every=1, exact_bytes=0),
        False,
    ),
    f"neighbour's, {STEPS - AGE} steps old, exact": (replace(BASE, checkpoint_every=AGE), False),
    f"neighbour's, {STEPS - AGE} steps old, small": (
        replace(BASE, checkpoint_every=AGE, exact_bytes=0),
        False,
    ),
    "checkfree": (replace(BASE, mode="checkfree"), False),
}


def model_of(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # the next token is neither certain nor uniform
    return model


def rows_of(seed: int) -> list[LearnRow]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(2, 60, (n,), generator=generator).tolist()
    return [
        LearnRow(draw(14 + i % 3), draw(1 + i % 5), [-4.0] * (1 + i % 5), 1.0 - i % 3, 1.0, i)
        for i in range(ROWS)
    ]


async def measure(
    seed: int, settings: RecoverySettings, disk: bool, rate: float
) -> tuple[float, float, float, str]:
    """Return (KL, rise of the NLL, seconds of the recovery, error)."""
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(
            model_of(seed),
            [1, 1, 1, 1],
            Path(directory),
            WorkerSettings("float32"),
            settings,
        )
        async with fleet.up() as crew:
            assert crew is not None
            for number in range(STEPS):
                await crew.head.update(rows_of(1000 * seed + number), CFG, 100.0, rate)
                fleet.stations[LOST].store.flush()
            await quiet()
            before = await logprobs(crew, seed)
        fleet.kill(LOST, disk)
        started = time.perf_counter()
        async with fleet.up() as crew:
            seconds = time.perf_counter() - started
            error = str(fleet.failed.get(LOST, ""))
            shift = await logprobs(crew, seed) - before if crew is not None else before * torch.nan
        fleet.close()
        return float((shift.expm1() - shift).mean()), float(-shift.mean()), seconds, error


async def logprobs(crew: Crew, seed: int) -> torch.Tensor:
    """Return the log-probabilities of all completion tokens of the last step."""
    rows = [(row.prompt_ids, row.completion_ids) for row in rows_of(1000 * seed + STEPS - 1)]
    scores = await crew.head.score(rows, CFG.temperature)
    return torch.tensor([logprob for row, _ in scores for logprob in row], dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument(
        "--faults",
        action="store_true",
        help="instead: faults of whole nodes, as in `make chaos`",
    )
    parser.add_argument("--first", type=int, default=1, help="first seed of --faults")
    parser.add_argument("--nodes", type=int, default=2, help="nodes of --faults")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.seeds = 1
    if chosen.faults:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without unmounting
        sys.exit(
            schedules(
                range(chosen.first, chosen.first + chosen.seeds),
                chosen.nodes,
                short=chosen.quick,
                alone=True,
            )
        )
    torch.set_num_threads(1)
    layout = Fleet(
        model_of(0), [1, 1, 1, 1], Path(tempfile.mkdtemp()), WorkerSettings(), BASE
    ).layouts[LOST]
    print(
        f"a stage of {state_bytes(layout, 'small') // 2:,} weights: a checkpoint of"
        f" {state_bytes(layout, 'exact'):,} bytes exact, {state_bytes(layout, 'small'):,} small"
    )
    for name, (settings, disk) in SOURCES.items():
        results = [
            trio.run(measure, seed, settings, disk, chosen.rate) for seed in range(chosen.seeds)
        ]
        kl, rise, seconds = (
            sum(part) / len(results) for part in list(zip(*results, strict=True))[:3]
        )
        print(f"{name:36s} KL {kl:9.2g}   NLL {rise:+9.2g}   {1000 * seconds:6.0f} ms", flush=True)


if __name__ == "__main__":
    main()
