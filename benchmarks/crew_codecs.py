"""Codec of activations against what is learnt: `python -m benchmarks.crew --codecs`.

The embedded policy eight layers deep in four stages, all in this process (`crew_copies`), sampled
token by token through the stages: runs that differ in the codec only. Gradients travel in bfloat16.
Held-out reward of the trained float32 policy at equal steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
import trio

from benchmarks import report
from benchmarks.crew_copies import learning, start
from swarmnode.stages.wire import ActivationCodec
from swarmnode.tasks.client import Scorer

CODECS: Final[tuple[ActivationCodec, ...]] = ("bfloat16", "int8")


def run(seeds: int, steps: int, out: Path | None, every: int = 20) -> None:
    torch.set_num_threads(1)
    begin, found = start(), []
    with Scorer() as scorer:
        for seed in range(1, 1 + seeds):
            for codec in CODECS:
                settings = replace(begin.settings, codec=codec)
                got = trio.run(
                    learning,
                    replace(begin, settings=settings),
                    "pipeline",
                    seed,
                    steps,
                    every,
                    scorer,
                )
                found.append({"codec": codec, "seed": seed, "held_out": got["held_out"]})
                print(found[-1], flush=True)
    print(report.heading("crew: codec of activations"))
    by = {(one["codec"], one["seed"]): one["held_out"] for one in found}
    values = lambda codec, step: [by[codec, seed][step] for seed in range(1, 1 + seeds)]
    less = lambda codec, step: [
        ours - theirs
        for ours, theirs in zip(values(codec, step), values(CODECS[0], step), strict=True)
    ]
    columns = [*((values, codec) for codec in CODECS), *((less, codec) for codec in CODECS[1:])]
    rows = [
        [str(step), *(report.spread(of(codec, step), 3) for of, codec in columns)]
        for step in sorted(found[0]["held_out"])
    ]
    header = ["step", *CODECS, *(f"{codec} − {CODECS[0]}" for codec in CODECS[1:])]
    print(report.table(header, rows))
    if out:
        report.write_json(out, {"runs": found})
