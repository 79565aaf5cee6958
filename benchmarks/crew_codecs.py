"""How activations and gradients travel, and what is learnt: `python -m benchmarks.crew --codecs`.

The embedded policy eight layers deep in four stages, all in this process (`crew_copies`), sampled
token by token through the stages: runs that differ in nothing but the codecs. Held-out reward of
the trained float32 policy at equal steps.
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

CODECS: Final[tuple[tuple[ActivationCodec, ActivationCodec], ...]] = (
    ("bfloat16", "bfloat16"),
    ("int8", "bfloat16"),
    ("int8", "int8"),
)
"""(activations, gradients)."""


def run(seeds: int, steps: int, out: Path | None, every: int = 20) -> None:
    torch.set_num_threads(1)
    begin, found = start(), []
    with Scorer() as scorer:
        for seed in range(1, 1 + seeds):
            for codec, gradient in CODECS:
                settings = replace(begin.settings, codec=codec, gradient_codec=gradient)
                got = trio.run(
                    learning,
                    replace(begin, settings=settings),
                    "pipeline",
                    seed,
                    steps,
                    every,
                    scorer,
                )
                found.append(
                    {
                        "codec": codec,
                        "gradient": gradient,
                        "seed": seed,
                        "held_out": got["held_out"],
                    }
                )
                print(found[-1], flush=True)
    print(report.heading("crew: how activations and gradients travel"))
    by = {(one["codec"], one["gradient"], one["seed"]): one["held_out"] for one in found}
    values = lambda codecs, step: [by[*codecs, seed][step] for seed in range(1, 1 + seeds)]
    less = lambda codecs, step: [
        ours - theirs
        for ours, theirs in zip(values(codecs, step), values(CODECS[0], step), strict=True)
    ]
    columns = [*((values, codecs) for codecs in CODECS), *((less, codecs) for codecs in CODECS[1:])]
    rows = [
        [str(step), *(report.spread(of(codecs, step), 3) for of, codecs in columns)]
        for step in sorted(found[0]["held_out"])
    ]
    names = [" / ".join(codecs) for codecs in CODECS]
    print(report.table(["step", *names, *(f"{name} − {names[0]}" for name in names[1:])], rows))
    if out:
        report.write_json(out, {"runs": found})
