"""Stages lost again and again, made anew each time: part (d) of `benchmarks.checkfree`.

The papers compare the ways to make a stage after thousands of iterations with failures. One loss
(part (a)) cannot show what they saw: the layers of a run that lost nothing have nothing in common,
and an average of two is two strangers' average. Only a run that was averaged or copied many times
has stages that are alike, whose average is nearly each of them.

Every arm of a seed starts from the same weights, sees the same batches and loses the same inner
stages in the same iterations; what counts is its held-out loss less that of the run that lost
nothing, so arms are compared by differences within a seed.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from benchmarks.failures import ARMS, NO_FAILURE, Arm, restore, schedule
from benchmarks.forks import Size
from benchmarks.report import signed, table
from benchmarks.staged import STAGES, Corpus, Staged, build

RATE = 8e-3
"""Of a stage per iteration: what the authors configure for 16 %/h of their 1.5 B model."""
EVERY = 20
"""Iterations between two measurements."""
ORDER = ("CheckFree", "uniform average", "copy of a neighbour", "random", "zeros")
"""The papers', best first; zeros is where the authors' code for its baselines ends."""


def again(seed: int, size: Size, corpus: Corpus) -> list[dict[str, Any]]:
    """The run without failures, then one of each way, `size.repeated` iterations each."""
    lost = {
        i: stage
        for i, stage in schedule(seed, RATE, size.repeated).items()
        if 0 < stage < STAGES - 1
    }
    arms = {arm.name: arm for arm in ARMS}
    control = endure(NO_FAILURE, size, corpus, seed, {})
    rows = [control]
    for name in ORDER:
        row = endure(arms[name], size, corpus, seed, lost)
        rows.append(
            row
            | {
                "gaps": [
                    now - then for now, then in zip(row["curve"], control["curve"], strict=True)
                ]
            }
        )
    return rows


def endure(
    arm: Arm, size: Size, corpus: Corpus, seed: int, lost: Mapping[int, int]
) -> dict[str, Any]:
    """Trains `size.repeated` iterations. `curve`: held-out loss after every EVERY; the rest is of
    every loss, or of the end."""
    staged = Staged(build(seed), size.rate)
    curve, jumps, shares = [], [], []
    for i in range(size.repeated):
        if i in lost:
            shares.append(share(staged, lost[i]))
            before = staged.measure(corpus.held_out)
            restore(arm, staged, lost[i], None, seed * 1_000_003 + i)
            jumps.append(staged.measure(corpus.held_out) - before)
        staged.step(corpus.batch(seed, i))
        if (i + 1) % EVERY == 0:
            curve.append(staged.measure(corpus.held_out))
    return {
        "seed": seed,
        "arm": arm.name,
        "losses": sorted(lost),
        "curve": curve,
        "jumps": jumps,
        "shares": shares,
        "alike": alike(staged),
    }


def share(staged: Staged, stage: int) -> float | None:
    """ω of the stage before, of both neighbours' together: 0.5 is the uniform average. None:
    neither has a gradient."""
    before, after = staged.squared_norms[stage - 1], staged.squared_norms[stage + 1]
    return before / (before + after) if before + after else None


def alike(staged: Staged) -> float | None:
    """Mean cosine between the matrices of neighbouring inner stages. None: some are zero."""
    flat = [
        torch.cat([p.detach().flatten() for p in stage.values() if p.dim() == 2])
        for stage in staged.trained[1:-1]
    ]
    if not all(bool(v.any()) for v in flat):
        return None
    return statistics.fmean(
        float(cosine_similarity(a, b, dim=0)) for a, b in itertools.pairwise(flat)
    )


# ---- the tables


def late(row: dict[str, Any]) -> tuple[float, float | None]:
    """(loss above the control's, rise right after a loss), means of the second half; None: nothing
    was lost in it."""
    half = len(row["curve"]) * EVERY // 2
    jumps = [jump for i, jump in zip(row["losses"], row["jumps"], strict=True) if i >= half]
    return statistics.fmean(row["gaps"][half // EVERY :]), (
        statistics.fmean(jumps) if jumps else None
    )


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Each way by itself; then all pairs by seed, what should be worse less what should be better;
    then how unlike ω is."""
    by = {(row["arm"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    body = []
    for name in ORDER:
        mine = [by[name, seed] for seed in seeds]
        found = [late(row) for row in mine]
        gaps, jumps = [gap for gap, _ in found], [jump for _, jump in found if jump is not None]
        lost = statistics.median(len(row["losses"]) for row in mine)
        body.append(
            [
                name,
                signed(gaps),
                signed(jumps),
                signed([row["alike"] for row in mine if row["alike"] is not None], 2),
                f"{lost:g}",
            ]
        )
    lines = [
        table(["", "loss above the control's", "jump", "cosine of neighbours", "losses"], body),
        "",
    ]

    body = []
    for better, worse in itertools.combinations(ORDER, 2):
        pairs = [(late(by[worse, seed]), late(by[better, seed])) for seed in seeds]
        gaps = [w[0] - b[0] for w, b in pairs]
        jumps = [w[1] - b[1] for w, b in pairs if w[1] is not None and b[1] is not None]
        count = lambda values: f"{sum(v > 0 for v in values)} of {len(values)}"
        body.append(
            [f"{worse} less {better}", signed(gaps), count(gaps), signed(jumps), count(jumps)]
        )
    lines += [
        table(["within a seed", "loss", "as in the papers", "jump", "as in the papers"], body),
        "",
    ]

    shares = sorted(
        s for row in rows if row["arm"] == "CheckFree" for s in row["shares"] if s is not None
    )
    if shares:
        least, middle, most = (shares[int(q * (len(shares) - 1))] for q in (0.1, 0.5, 0.9))
        lines.append(
            f"CheckFree's weight of the stage before: median {middle:.2f}, 80 % within {least:.2f}"
            f" … {most:.2f}."
        )
    return "\n".join(lines)
