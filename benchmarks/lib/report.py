"""The command line, tables and JSON files that all benchmarks share."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def make_parser(
    name: str, doc: str, *, quick: str, seeds: int = 0, first_seed: int = 0, json: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with the common options: `--quick`, `--json`, `--seeds`, `--first-seed`.

    Args:
        name: Name of the module in `benchmarks`.
        doc: The module's docstring.
        quick: Description of the quick form.
        seeds: Default number of seeds; 0 leaves both options of seeds out.
        json: Add `--json`.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    if json:
        parser.add_argument("--json", type=Path, help="also write the results to this file")
    if seeds:
        parser.add_argument("--seeds", type=int, default=seeds, help=f"number of seeds ({seeds})")
        parser.add_argument("--first-seed", type=int, default=first_seed)
    return parser


def seeds_of(args: argparse.Namespace) -> range:
    """Return the seeds that the options ask for."""
    return range(args.first_seed, args.first_seed + args.seeds)


def note(line: str) -> None:
    """Print progress to stderr."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def columns(items: Sequence[T], cells: Mapping[str, Callable[[T], object]]) -> str:
    """Return a table with one row for each item. `cells` maps a header to the cell of an item."""
    return table(list(cells), [[cell(item) for cell in cells.values()] for item in items])


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table, padded for a terminal: numbers to the right, text to the left."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [
        max(len(h), *(len(r[i]) for r in cells)) if cells else len(h) for i, h in enumerate(headers)
    ]
    numeric = [
        bool(cells) and all(r[i][:1].isdigit() or r[i][:1] in "-+–." for r in cells)
        for i in range(len(headers))
    ]
    pad = lambda text, i: text.rjust(widths[i]) if numeric[i] else text.ljust(widths[i])
    line = lambda row: "| " + " | ".join(pad(c, i) for i, c in enumerate(row)) + " |"
    rule = (
        "|"
        + "|".join(
            "-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True)
        )
        + "|"
    )
    return "\n".join([line(headers), rule, *map(line, cells)])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return `mean ± sample standard deviation`, or a single value alone."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def signed(values: Sequence[float], digits: int = 3) -> str:
    """Return `median [least … greatest]`, signed: for differences."""
    if not values:
        return "–"
    median = f"{statistics.median(values):+.{digits}f}"
    return (
        f"{median} [{min(values):+.{digits}f} … {max(values):+.{digits}f}]"
        if len(values) > 1
        else median
    )


def median_range(values: Sequence[float], digits: int = 2) -> str:
    """Return `median [least–greatest]`: for times, which have a long tail."""
    if not values:
        return "–"
    return (
        f"{statistics.median(values):.{digits}f}"
        f" [{min(values):.{digits}f}–{max(values):.{digits}f}]"
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that `share` of the values do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, -(-len(ranked) * int(share * 100) // 100) - 1)]


def machine() -> str:
    """Return the machine in words: usable cores, architecture, GPU."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    gpu = "no GPU"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")
        gpu = ", ".join(n.strip() for n in names if n.strip()) or gpu
    return f"{cores} cores {platform.machine().replace('_', '-')}, {gpu}"


def commit() -> str:
    """Return the short hash of the checkout's commit, with `+` if a file differs from it; empty
    without git."""
    where = Path(__file__).parent
    shown = subprocess.run(
        ["git", "describe", "--always", "--abbrev=8", "--dirty=+", "--exclude=*"],
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
    )
    return shown.stdout.strip()


def command() -> str:
    """Return the command line of this process."""
    module = sys.modules["__main__"].__spec__
    name = (
        f"python -m {module.name.removesuffix('.__main__')}" if module else f"python {sys.argv[0]}"
    )
    return " ".join([name, *sys.argv[1:]])


def heading(title: str) -> str:
    """Return the first lines of a printed result."""
    return f"## {title}\n\n{time.strftime('%Y-%m-%d')} · {machine()} · `{command()}`\n"


def rounded(value: Any) -> Any:
    """Return `value` with all floating-point numbers in it rounded to four digits."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def value_at(points: Sequence[tuple[float, float]], budget: float) -> float | None:
    """Return y where x reaches `budget`, linear between the points (x, y); None if it never
    does."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= budget <= x1:
            return y0 + (y1 - y0) * ((budget - x0) / (x1 - x0) if x1 > x0 else 1.0)
    return None


def mean_until(points: Sequence[tuple[float, float]], budget: float) -> float | None:
    """Return the mean of y while x goes from 0 to `budget`: the area under a learning curve. None
    if x never gets there."""
    end = value_at(points, budget)
    if end is None:
        return None
    known = [point for point in points if point[0] < budget] + [(budget, end)]
    area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(known))
    return area / budget


def count_until(axis: Sequence[float], budget: float, counts: Sequence[float]) -> float:
    """Return the sum of the per-round `counts` until the sum of the per-round `axis` reaches
    `budget`."""
    total = done = 0.0
    for step, count in zip(axis, counts, strict=True):
        if total + step > budget and step > 0:
            return done + count * (budget - total) / step
        total += step
        done += count
    return done


def read_rows(path: Path, sizes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines whose `size` has all fields of one of `sizes`."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if any(size.items() <= row["size"].items() for size in sizes)]


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a file of JSON lines."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_json(path: Path | None, results: Any) -> None:
    """Write results with machine, date, command and version in one atomic step. Do nothing without
    a path."""
    if path is None:
        return
    document = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine(),
        "python": platform.python_version(),
        "command": command(),
        "results": results,
    }
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(temporary, path)
