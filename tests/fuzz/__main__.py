"""Coverage-guided fuzzing: `python -m tests.fuzz admission http --runs 1000000`. Needs `pip install
atheris`.

Targets run one after another, each in its own process. A target stops at the first input that
raises an undeclared error, writes the input to a file, and prints it. Add findings to
tests/fuzz/corpus, which the suite replays, and to the protocol's vectors.
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
"""Wall-clock limit for one input. On a busy machine a process may be stopped for seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("targets", choices=sorted(TARGETS), nargs="+", metavar="target")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument(
        "--seconds", type=int, default=0, help="stop after this many seconds; 0 is no limit"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=int, default=8192, help="bytes of an input")
    asked = parser.parse_args()
    failed = []
    for target in asked.targets:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        child = os.fork()  # atheris ends its process
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
        sys.exit(f"undeclared errors in {', '.join(failed)}")


def fuzz(target: str, asked: argparse.Namespace) -> None:
    """Fuzz one target. Does not return."""
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
