"""Tables of results for reading, and JSON with machine, date and command."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
    middle = f"{statistics.median(values):+.{digits}f}"
    return (
        f"{middle} [{min(values):+.{digits}f} … {max(values):+.{digits}f}]"
        if len(values) > 1
        else middle
    )


def middle(values: Sequence[float], digits: int = 2) -> str:
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


def write_json(path: Path, results: Any) -> None:
    """Write results with machine, date, command and version in one atomic step."""
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
