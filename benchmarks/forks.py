"""One stage lost, once: parts (a) and (c) of `benchmarks.checkfree`.

A run is forked where a stage is lost. Every fork goes on with the same batches as the run that lost
nothing, its paired control, so that differences of a hundredth of a nat mean something. `jump` is
the held-out loss right after recovery minus that before; `gap` the held-out loss minus the
control's after the same number of further steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import kl_div, log_softmax

from benchmarks import recoveries as ways
from benchmarks.recoveries import SETTINGS, History, Recovered, Recovery
from benchmarks.staged import STAGES, Corpus, StageCopy, Staged
from swarmnode.errors import Refused

PLACES = {
    "an inner stage": (3,),
    "the first stage": (0,),
    "the last stage": (7,),
    "two adjacent stages": (3, 4),
}
AGES = (20, 50)


@dataclass(frozen=True)
class Size:
    trunk_steps: int = 500
    """Before a stage is lost in part (a)."""
    steps: int = 200
    """Without failures to the target of part (b)."""
    repeated: int = 800
    """Of every run of part (d)."""
    tuned_steps: int = 120
    marks: tuple[int, ...] = (0, 10, 30, 60)
    """Steps after a loss at which the held-out loss is taken."""
    rate: float = 3e-3
    tuned_rate: float = 1e-3
    adapter_rate: float = 4e-3
    rank: int = 8
    quick: bool = False


METHODS: dict[str, Recovery] = {
    "exact, with Adam": ways.exact,
    "exact, Adam fresh": ways.exact_fresh,
    "checkpoint, 20 steps old": ways.checkpoint(20),
    "checkpoint, 50 steps old": ways.checkpoint(50),
    "checkpoint in bfloat16 without Adam, 20 steps old": ways.checkpoint(20, moments=False),
    "base weights": ways.base,
    "CheckFree": ways.synthesis("checkfree"),
    "uniform average": ways.synthesis("uniform"),
    "identity": ways.synthesis("identity"),
    "copy of a neighbour": ways.with_true_ends(ways.copied),
    "random": ways.with_true_ends(ways.random_again),
}


@dataclass(frozen=True)
class Trunk:
    """A run up to the point where forks begin, and what it and its neighbours kept."""

    staged: Staged
    checkpoint: Any
    history: History


def grow(
    staged: Staged,
    corpus: Corpus,
    seed: int,
    first: int,
    steps: int,
    base: list[StageCopy] | None = None,
) -> Trunk:
    """Trains `steps` steps from batch `first` on. `base`: what was published before; None:
    half-way's weights."""
    checkpoints: dict[int, list[StageCopy]] = {}
    everything = lambda: [staged.copy_of(i) for i in range(STAGES)]
    for i in range(steps):
        staged.step(corpus.batch(seed, first + i))
        left = steps - 1 - i
        if left in AGES:
            checkpoints[left] = everything()
        if base is None and i + 1 == steps // 2:
            base = everything()
    assert base is not None
    probes = [corpus.batch(seed, first + i) for i in range(max(0, steps - SETTINGS.probes), steps)]
    return Trunk(staged, staged.checkpoint(), History(everything(), checkpoints, base, probes))


def fork(trunk: Trunk, lost: tuple[int, ...], recovery: Recovery) -> None:
    """Go back to the fork, without the stages `lost`, and recover them. Raises Refused."""
    staged = trunk.staged
    staged.roll_back(trunk.checkpoint)
    for stage in lost:
        staged.lose(stage)
    rng = torch.Generator().manual_seed(lost[0])
    found: dict[int, Recovered] = {
        stage: recovery(staged, stage, lost, trunk.history, rng) for stage in lost
    }
    for stage, recovered in found.items():
        staged.put(stage, recovered.copy, factor=recovered.factor, warmup=recovered.warmup)


def follow(
    trunk: Trunk, corpus: Corpus, seed: int, first: int, marks: Sequence[int]
) -> dict[int, float]:
    """Held-out loss after each of `marks` further steps, from batch `first` on."""
    staged, losses = trunk.staged, {}
    for step in range(max(marks) + 1):
        if step in marks:
            losses[step] = staged.measure(corpus.held_out)
        if step < max(marks):
            staged.step(corpus.batch(seed, first + step))
    return losses


@torch.no_grad()
def probe(
    trunk: Trunk, before: list[torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], float, float]:
    """(log-probabilities of every character at the probes, KL(before ‖ now) per token, loss on
    them), nats."""
    staged, probes = trunk.staged, trunk.history.probes
    now = [log_softmax(staged.logits(tokens), -1).flatten(0, 1) for tokens in probes]
    moved = [
        float(kl_div(n, b, reduction="batchmean", log_target=True))
        for n, b in zip(now, before or now, strict=True)
    ]
    return (
        now,
        sum(moved) / len(moved),
        sum(staged.measure(tokens) for tokens in probes) / len(probes),
    )


def compare(
    trunk: Trunk,
    corpus: Corpus,
    seed: int,
    first: int,
    marks: Sequence[int],
    wanted: Iterable[tuple[str, tuple[int, ...], Recovery]],
) -> list[dict[str, Any]]:
    """Return one row per (name, lost stages, recovery): what it cost, against the control that lost
    nothing."""
    trunk.staged.roll_back(trunk.checkpoint)
    before, _, loss_before = probe(trunk)
    control = follow(trunk, corpus, seed, first, marks)
    rows = []
    for name, lost, recovery in wanted:
        row: dict[str, Any] = {"seed": seed, "lost": list(lost), "method": name}
        rows.append(row)
        try:
            fork(trunk, lost, recovery)
            _, moved, loss = probe(trunk, before)
        except Refused as error:
            row["refused"] = str(error)
            continue
        losses = follow(trunk, corpus, seed, first, marks)
        row |= {
            "jump": losses[0] - control[0],
            "gap": {m: losses[m] - control[m] for m in marks if m},
            "loss": losses[0],
            "kl": moved,
            "nll_rise": loss - loss_before,
            "gate": passes(moved, loss - loss_before),
        }
    return rows


def passes(moved: float, rise: float) -> bool:
    """The product's gate; it estimates KL from tokens that the policy drew, where this has it over
    the whole vocabulary."""
    return moved < SETTINGS.gate_kl and rise < SETTINGS.gate_nll
