"""Measure which of the known defects the suite detects.

    python -m tests.mutations [--only TEXT] [--wide] [--json FILE]

Each mutation in `*.toml` beside this file puts one defect into one file of the checkout. The runner
applies one at a time, runs the tests that the mutation names, and restores the file. A mutation is
detected if one of these tests fails. With `--wide`, a mutation that survives is tried against all
unit and conformance tests as well.

Run it in a clean clone with an environment of its own, so that child processes import the mutated
code: the file is changed in place.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import cache_from_source
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WIDE_TESTS = ("tests/unit", "tests/conformance")
TIMEOUT_SECONDS = 900.0
NO_TESTS_COLLECTED = 5


@dataclass(frozen=True)
class Mutation:
    """One defect, and the tests that should detect it."""

    name: str
    """Unique name of the defect, in plain words."""
    file: str
    """Path from the root of the checkout."""
    before: str
    """Text that occurs once in `file`."""
    after: str
    breaks: str
    """Behaviour that the defect breaks for a user or a peer."""
    tests: list[str]
    """Arguments for pytest: files, folders or test ids."""
    plane: str = ""
    """Name of the TOML file."""

    def apply(self) -> str:
        """Return the text of `file` with the defect.

        Raises:
            ValueError: `before` does not occur exactly once.
        """
        path = ROOT / self.file
        text = path.read_text() if path.exists() else ""
        if text.count(self.before) != 1:
            raise ValueError(f"the text to replace occurs {text.count(self.before)} times")
        return text.replace(self.before, self.after)


@dataclass(frozen=True)
class Outcome:
    """Result of the suite for one mutation."""

    name: str
    plane: str
    verdict: str
    """`detected`, `survived`, `detected elsewhere` (by `--wide` only) or `not applicable`."""
    by: str
    """The first test that failed, or the reason."""
    seconds: float


def load(folder: Path = HERE) -> list[Mutation]:
    """Return the mutations of all TOML files in `folder`, ordered by file name and position."""
    return [
        Mutation(**entry, plane=path.stem)
        for path in sorted(folder.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["mutations"]
    ]


def first_failure(tests: Sequence[str], workers: int) -> str | None:
    """Run pytest until the first failure and return it, or None if all tests pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else []
    try:
        done = subprocess.run(
            [*command, *tests], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    if done.returncode == NO_TESTS_COLLECTED:
        raise ValueError("the named tests do not exist")
    lines = [
        line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))
    ]
    named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (named or lines or [f"exit code {done.returncode}"])[0][:200]


def score(mutation: Mutation, wide: bool, workers: int) -> Outcome:
    """Apply `mutation`, run its tests and restore the file."""
    started = time.monotonic()
    path = ROOT / mutation.file

    def outcome(verdict: str, by: str) -> Outcome:
        seconds = round(time.monotonic() - started, 1)
        return Outcome(mutation.name, mutation.plane, verdict, by, seconds)

    try:
        mutated = mutation.apply()
    except ValueError as error:
        return outcome("not applicable", str(error))
    original, bytecode = path.read_bytes(), Path(cache_from_source(str(path)))
    try:
        path.write_text(mutated)
        bytecode.unlink(missing_ok=True)
        if failed := first_failure(mutation.tests, workers):
            return outcome("detected", failed)
        if wide and (failed := first_failure(WIDE_TESTS, workers)):
            return outcome("detected elsewhere", failed)
        return outcome("survived", "")
    except ValueError as error:
        return outcome("not applicable", str(error))
    finally:
        path.write_bytes(original)
        # It would be valid for the original: the same size, written in the same second.
        bytecode.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", default="", help="mutations whose plane or name contains this")
    parser.add_argument("--wide", action="store_true", help="try survivors against all unit tests")
    parser.add_argument("--workers", type=int, default=1, help="pytest processes")
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    args = parser.parse_args()
    chosen = [m for m in load() if args.only in m.plane or args.only in m.name]
    healthy = sorted({test for mutation in chosen for test in mutation.tests})
    if failed := first_failure(healthy, args.workers):
        print(f"these tests fail without any mutation: {failed}", file=sys.stderr)
        return 1
    outcomes = []
    for mutation in chosen:
        outcomes.append(score(mutation, args.wide, args.workers))
        last = outcomes[-1]
        print(f"{last.verdict:<18} {last.plane}: {last.name} ({last.seconds:.0f} s) {last.by}")
        sys.stdout.flush()
        if args.json:
            args.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    detected = sum(each.verdict.startswith("detected") for each in outcomes)
    print(f"{detected} of {len(outcomes)} detected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
