"""Feeds targets what coverage suggests: `python -m tests.fuzz admission http --runs 1000000`. Needs
`pip install atheris`.

One after the other, each in a process of its own. A target stops at the first input after which
anything comes out that it did not promise, writes it beside, and prints it. What is found belongs
into tests/fuzz/corpus, where the suite replays it, and into the protocol's vectors.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["swarmnode", "msgspec"]):
    from tests.fuzz.targets import TARGETS, seeds

LONGEST_SECONDS = 60
"""For one input, by the wall clock: on a busy machine a process may stand still for seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("targets", choices=sorted(TARGETS), nargs="+", metavar="target")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument(
        "--seconds",
        type=int,
        default=0,
        help="stop after that many, however many runs it were; 0 is no bound",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=int, default=8192, help="bytes of an input")
    asked = parser.parse_args()
    failed = []
    for target in asked.targets:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        child = os.fork()  # what is fed with ends its process
        if not child:
            fuzz(target, asked)
        if os.waitpid(child, 0)[1]:
            failed.append(target)
        print(
            f"{target}: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before:.0f} s"
            " of CPU",
            flush=True,
        )
    if failed:
        sys.exit(f"something came out of {', '.join(failed)}")


def fuzz(target: str, asked: argparse.Namespace) -> None:
    """Does not return."""
    make, refusals = TARGETS[target]
    feed = make()

    def one(data: bytes) -> None:
        with contextlib.suppress(refusals):
            feed(data)

    with tempfile.TemporaryDirectory() as directory:
        for number, seed in enumerate(seeds()):
            (Path(directory) / str(number)).write_bytes(seed)
        most = [
            f"-runs={asked.runs}",
            f"-max_total_time={asked.seconds}",
            f"-max_len={asked.longest}",
            f"-timeout={LONGEST_SECONDS}",
        ]
        atheris.Setup(
            [
                sys.argv[0],
                *most,
                "-rss_limit_mb=2048",
                f"-seed={asked.seed}",
                f"-artifact_prefix={os.getcwd()}/",
                directory,
            ],
            one,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
