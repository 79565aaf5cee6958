"""Measure what each source of a lost stage costs a crew of four.

A Llama of random weights, in which each layer is a function of its own, is the hard case for
synthesis: the neighbours carry no information about the lost layer. All members, streams and files
are real, in one process. KL(before ‖ restored) and the rise of the NLL are in nats per completion
token, on the rows of the last step.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
import trio
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.lib.report import heading, make_parser, seeds_of, table, write_json
from swarmnode.config import TrainingConfig
from swarmnode.stages.state_messages import state_bytes
from swarmnode.stages.trainer.pipeline import WorkerSettings
from swarmnode.stages.trainer.stage_batches import LearnRow
from swarmnode.stages.trainer.stage_checkpoints import RecoverySettings
from tests.support.crew import Crew
from tests.support.lost_stages import Fleet, quiet

STEPS, AGE, ROWS, LOST = 12, 8, 24, 1
RATE = 1e-5
CFG = TrainingConfig(per_device_train_tokens=64)
BASE = RecoverySettings(checkpoint_every=10**6, seconds=60.0)
SOURCES = {  # name → (settings, whether the disk survives)
    "own checkpoint": (BASE, True),
    "neighbour's, of the last step, full": (replace(BASE, checkpoint_every=1), False),
    "neighbour's, of the last step, small": (
        replace(BASE, checkpoint_every=1, full_bytes=0),
        False,
    ),
    f"neighbour's, {STEPS - AGE} steps old, full": (replace(BASE, checkpoint_every=AGE), False),
    f"neighbour's, {STEPS - AGE} steps old, small": (
        replace(BASE, checkpoint_every=AGE, full_bytes=0),
        False,
    ),
    "checkfree": (replace(BASE, mode="checkfree"), False),
}
"""Source → settings, and whether the own disk survives."""


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
    seed: int, settings: RecoverySettings, disk: bool
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
                await crew.head.update(rows_of(1000 * seed + number), CFG, 100.0, RATE)
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
    parser = make_parser("recovery", __doc__, quick="one seed", seeds=3)
    args = parser.parse_args()
    if args.quick:
        args.seeds = 1
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        settings = WorkerSettings()
        fleet = Fleet(model_of(0), [1, 1, 1, 1], Path(folder), settings, BASE)
        full, small = (state_bytes(fleet.layouts[LOST], form) for form in ("full", "small"))
        fleet.close()
    print(heading("recovery: cost of each source of a lost stage"))
    print(f"Checkpoint of {small // 2:,} weights: {full:,} bytes full, {small:,} small\n")
    rows = []
    for name, (settings, disk) in SOURCES.items():
        results = [trio.run(measure, seed, settings, disk) for seed in seeds_of(args)]
        kl, rise, seconds = map(fmean, list(zip(*results, strict=True))[:3])
        rows.append([name, f"{kl:.2g}", f"{rise:+.2g}", f"{1000 * seconds:.0f}"])
        print(*rows[-1], flush=True)
    headers = ["source", "KL", "rise of the NLL", "ms"]
    print("\n" + table(headers, rows))
    write_json(args.json, [dict(zip(headers, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
