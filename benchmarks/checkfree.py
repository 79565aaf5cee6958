"""Measure the loss after a stage is lost and restored from each source.

A tiny Llama of eight one-layer stages (benchmarks/lib/staged.py) loses one stage or two adjacent
ones. Every recovery continues with the same batches as the run that lost nothing, so that a
difference of a hundredth of a nat is visible.

    ordinary order   an inner stage, the first, the last, and two adjacent stages
    swapped order    half of each batch in CheckFree+'s order, which the copies of the ends need

`jump` is the held-out loss right after the recovery minus the loss before. `gap` is the held-out
loss minus the control's after the same number of further steps. KL is over the whole vocabulary on
the newest micro-batches. CheckFree and the copies are the product's, `swarmnode.stages.trainer`.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import kl_div, log_softmax

from benchmarks.lib.report import heading, make_parser, note, seeds_of, signed, table, write_json
from benchmarks.lib.staged import STAGES, Corpus, StageCopy, Staged, build, language
from swarmnode.errors import Refused
from swarmnode.stages.trainer.checkfree import LEARNING_RATE_FACTOR, NeighbourLayers, synthesise
from swarmnode.stages.trainer.stage_checkpoints import RecoverySettings

SETTINGS = RecoverySettings()
PROBES = 8
"""Number of the last micro-batches on which the KL is measured."""
AGES = (20, 50)
"""Steps by which a neighbour's checkpoint is older than the loss."""
INNER, FIRST, LAST = "an inner stage", "the first stage", "the last stage"
PLACES = {INNER: (3,), FIRST: (0,), LAST: (7,), "two adjacent stages": (3, 4)}


@dataclass(frozen=True)
class Size:
    trunk_steps: int = 500
    """Steps before a stage is lost."""
    marks: tuple[int, ...] = (0, 10, 30, 60)
    """Steps after the loss at which the held-out loss is measured."""
    rate: float = 3e-3
    windows: int = 64
    """Held-out windows."""


FULL, QUICK = Size(), Size(100, (0, 10), windows=32)


# ---- the recoveries


@dataclass
class History:
    """Checkpoints that peers stored before the loss."""

    now: list[StageCopy]
    checkpoints: dict[int, list[StageCopy]]
    """Age in steps → every stage then."""
    probes: list[torch.Tensor]
    """The newest micro-batches, each (BATCH, WINDOW + 1)."""


@dataclass(frozen=True)
class Recovered:
    copy: StageCopy
    factor: float | None = None
    """Factor of the learning rate."""
    warmup: int = SETTINGS.warmup_steps
    """Warm-up steps of a fresh optimizer. The paper has none."""


Recovery = Callable[[Staged, int, tuple[int, ...], History, torch.Generator], Recovered]
"""(model, stage, all lost stages, history, generator) → the restored stage. Raises Refused."""


def exact(staged: Staged, stage: int, lost: object, history: History, rng: object) -> Recovered:
    return Recovered(history.now[stage])


def checkpoint(age: int) -> Recovery:
    """Restore a neighbour's checkpoint of `age` steps ago: float32 with Adam's moments."""
    return lambda staged, stage, lost, history, rng: Recovered(history.checkpoints[age][stage])


def synthesis(method: Literal["checkfree", "copy"]) -> Recovery:
    """Make the layers from the neighbours': fresh optimizer, learning rate × 1.1, no warm-up.

    Embedding, norm and head are true copies.

    Args:
        method: checkfree for inner stages, copy for the first and last stage.
    """

    def recover(
        staged: Staged, stage: int, lost: tuple[int, ...], history: History, rng: object
    ) -> Recovered:
        spec = staged.specs[stage]
        if (method == "copy") != (spec.has_embedding or spec.has_head):
            raise Refused(f"{method} is not for stage {stage} of {STAGES}")
        before, after = (neighbour(staged, i, lost) for i in (stage - 1, stage + 1))
        ends = {n: t for n, t in history.now[stage].weights.items() if ".layers." not in n}
        made = synthesise(spec, before, after, ends=ends)
        return Recovered(StageCopy(made), LEARNING_RATE_FACTOR, warmup=0)

    return recover


def neighbour(staged: Staged, stage: int, lost: tuple[int, ...]) -> NeighbourLayers | None:
    if not 0 <= stage < STAGES or stage in lost:
        return None
    weights = {n: p.detach() for n, p in staged.trained[stage].items()}
    return NeighbourLayers(weights, staged.squared_norms[stage])


def random_layers(
    staged: Staged, stage: int, lost: object, history: History, rng: torch.Generator
) -> Recovered:
    """Restore layers as at the start of the run: the papers' baseline."""
    std = staged.model.config.initializer_range
    layers = {
        n: torch.ones_like(p) if p.dim() == 1 else torch.randn(p.shape, generator=rng) * std
        for n, p in staged.trained[stage].items()
        if ".layers." in n
    }
    weights = {**history.now[stage].weights, **layers}
    return Recovered(StageCopy(weights), LEARNING_RATE_FACTOR, warmup=0)


METHODS: dict[str, Recovery] = {
    "exact, with Adam": exact,
    **{f"checkpoint, {age} steps old": checkpoint(age) for age in AGES},
    "CheckFree": synthesis("checkfree"),
    "random": random_layers,
}


# ---- one loss


@dataclass(frozen=True)
class Trunk:
    """A run up to the loss, and the checkpoints of its stages."""

    staged: Staged
    checkpoint: Any
    history: History


def grow(staged: Staged, corpus: Corpus, seed: int, steps: int) -> Trunk:
    """Train `steps` steps."""
    checkpoints: dict[int, list[StageCopy]] = {}
    copies = lambda: [staged.copy_of(i) for i in range(STAGES)]
    for i in range(steps):
        staged.step(corpus.batch(seed, i))
        if (left := steps - 1 - i) in AGES:
            checkpoints[left] = copies()
    probes = [corpus.batch(seed, i) for i in range(max(0, steps - PROBES), steps)]
    return Trunk(staged, staged.checkpoint(), History(copies(), checkpoints, probes))


def fork(trunk: Trunk, lost: tuple[int, ...], recovery: Recovery) -> None:
    """Return to the end of the trunk, lose the stages `lost` and recover them. Raises Refused."""
    staged = trunk.staged
    staged.roll_back(trunk.checkpoint)
    for stage in lost:
        staged.lose(stage)
    rng = torch.Generator().manual_seed(lost[0])
    found = {stage: recovery(staged, stage, lost, trunk.history, rng) for stage in lost}
    for stage, recovered in found.items():
        staged.put(stage, recovered.copy, factor=recovered.factor, warmup=recovered.warmup)


def follow(
    trunk: Trunk, corpus: Corpus, seed: int, first: int, marks: Sequence[int]
) -> dict[int, float]:
    """Return the held-out loss after each of `marks` further steps, from batch `first` on."""
    losses = {}
    for step in range(max(marks) + 1):
        if step in marks:
            losses[step] = trunk.staged.measure(corpus.held_out)
        if step < max(marks):
            trunk.staged.step(corpus.batch(seed, first + step))
    return losses


@torch.no_grad()
def probe(
    trunk: Trunk, before: list[torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], float]:
    """Return (log-probabilities at the probes, KL(before ‖ now) per token), in nats."""
    staged, probes = trunk.staged, trunk.history.probes
    now = [log_softmax(staged.logits(tokens), -1).flatten(0, 1) for tokens in probes]
    moved = [
        float(kl_div(n, b, reduction="batchmean", log_target=True))
        for n, b in zip(now, before or now, strict=True)
    ]
    return now, statistics.fmean(moved)


def compare(
    trunk: Trunk,
    corpus: Corpus,
    seed: int,
    first: int,
    marks: Sequence[int],
    wanted: Iterable[tuple[str, str, Recovery]],
) -> list[dict[str, Any]]:
    """Return one row for each of `wanted`: (place, method, recovery)."""
    trunk.staged.roll_back(trunk.checkpoint)
    before, _ = probe(trunk)
    control = follow(trunk, corpus, seed, first, marks)
    rows = []
    for place, name, recovery in wanted:
        row: dict[str, Any] = {"seed": seed, "place": place, "method": name}
        rows.append(row)
        try:
            fork(trunk, PLACES[place], recovery)
            _, moved = probe(trunk, before)
        except Refused as error:
            row["refused"] = str(error)
            continue
        losses = follow(trunk, corpus, seed, first, marks)
        row |= {
            "jump": losses[0] - control[0],
            "gap": {m: losses[m] - control[m] for m in marks if m},
            "kl": moved,
        }
    return rows


def run_seed(seed: int, size: Size) -> list[dict[str, Any]]:
    """Return the rows of one seed."""
    torch.set_num_threads(1)
    text = language(size.windows)
    places = PLACES if size == FULL else {INNER: PLACES[INNER]}
    ordinary = [(place, *method) for place in places for method in METHODS.items()]
    swapped = [(INNER, "CheckFree", METHODS["CheckFree"])]
    swapped += [(place, "copy (CheckFree+)", synthesis("copy")) for place in (FIRST, LAST)]
    rows: list[dict[str, Any]] = []
    for part, wanted in (("ordinary order", ordinary), ("swapped order", swapped)):
        staged = Staged(build(seed), size.rate, swapped=part == "swapped order")
        trunk = grow(staged, text, seed, size.trunk_steps)
        compared = compare(trunk, text, seed, size.trunk_steps, size.marks, wanted)
        rows.extend({"part": part} | row for row in compared)
    return rows


# ---- the tables


def tables(rows: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for part, place in dict.fromkeys((r["part"], r["place"]) for r in rows):
        some = [r for r in rows if (r["part"], r["place"]) == (part, place)]
        lines += [f"### {part}, lost: {place}", "", place_table(some), ""]
    return "\n".join(lines)


def place_table(rows: list[dict[str, Any]]) -> str:
    marks = sorted({m for r in rows for m in r.get("gap", {})})
    body = []
    for method in dict.fromkeys(r["method"] for r in rows):
        done = [r for r in rows if r["method"] == method and "jump" in r]
        if not done:
            body.append([method, "refused", *["–"] * (len(marks) + 1)])
            continue
        body.append(
            [
                method,
                signed([r["jump"] for r in done]),
                *[signed([r["gap"][m] for r in done]) for m in marks],
                f"{statistics.median(r['kl'] for r in done):.4f}",
            ]
        )
    return table(["", "jump", *[f"gap after {m}" for m in marks], "KL"], body)


def main() -> None:
    parser = make_parser(
        "checkfree",
        __doc__,
        quick="one seed, short, inner stages only",
        seeds=3,
        first_seed=1,  # seed 0 chose the sizes
    )
    parser.add_argument("--processes", type=int, default=2, help="processes of one thread each")
    args = parser.parse_args()
    args.seeds = 1 if args.quick else args.seeds
    size = QUICK if args.quick else FULL
    print(heading("checkfree: loss after a stage is lost and restored"), flush=True)
    rows: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        for found in pool.map(run_seed, seeds_of(args), [size] * args.seeds):
            rows += found
            note(f"{len(rows)} rows")
            write_json(args.json, {"size": vars(size), "rows": rows})
    print(tables(rows), flush=True)


if __name__ == "__main__":
    main()
