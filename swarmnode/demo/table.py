"""Output of the demo: a live table on a terminal, otherwise lines, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.verdict import Finding
from swarmnode.observe.top import short_id

WIDE = 120
"""Least width of a terminal for all columns. Narrower terminals show the important ones."""


def table(nodes: Sequence[DemoNode], seconds: float, width: int = WIDE) -> Table:
    """Return a table with one row per node.

    Args:
        seconds: Seconds since the start of the demo.
        width: Width of the terminal, at least 80.
    """
    wide = width >= WIDE
    out = slim_table(f"swarmnode demo, {seconds:.0f} s")
    out.add_column("node")
    out.add_column("phase")
    for heading in ("step", "peers", "own", "peers'", "held-out", "used", "rejected", "apart"):
        out.add_column(heading, justify="right")
    for heading in ("published", "admitted", "averaged") if wide else ():
        out.add_column(heading, justify="right")
    for node in nodes:
        v = node.view
        start, end = _format_short(v.held_out_start), _format_short(v.held_out)
        out.add_row(
            node_and_peer(node),
            v.phase,
            str(v.step),
            str(v.peers),
            _format_short(v.reward_own),
            _format_short(v.reward_external),
            f"{start}→{end}" if v.held_out is not None else "–",
            str(v.used),
            str(sum(v.rejected.values())),
            _format_percent(v.distance),
            *((str(v.published), str(v.admitted), str(v.exchanges)) if wide else ()),
        )
    return out


def slim_table(title: str, caption: str = "") -> Table:
    """Return a table without a frame around its columns."""
    return Table(
        title=title,
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        pad_edge=False,
    )


def node_and_peer(node: DemoNode) -> str:
    """Return the name of a node and the end of its peer id."""
    return f"{node.name} {short_id(node.view.peer)}" if node.view.peer else node.name


def status_line(nodes: Sequence[DemoNode], seconds: float) -> str:
    """Return the status of all nodes as one line."""
    parts = [
        f"{node.name} {node.view.phase} step {node.view.step} held-out {reward(node.view.held_out)}"
        f" used {node.view.used} apart {_format_percent(node.view.distance)}"
        for node in nodes
    ]
    return f"{seconds:4.0f} s  " + " | ".join(parts)


def print_verdict(console: Console, findings: Sequence[Finding]) -> None:
    """Print each finding with its mark, then the verdict.

    A terminal wraps long findings under their own text. A file gets one finding per line.
    """
    for finding in findings:
        mark = Text("  ok    ", "green") if finding.ok else Text("  FAIL  ", "bold red")
        if console.is_terminal:
            row = Table.grid()
            row.add_column(width=len(mark))
            row.add_column(overflow="fold")
            row.add_row(mark, Text(finding.text))
            console.print(row)
        else:
            console.print(mark + Text(finding.text), soft_wrap=True)
    ok = all(finding.ok for finding in findings)
    console.print(
        Text("the swarm learned" if ok else "the demo failed, see the lines marked FAIL", "bold")
    )


def _format_percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _format_short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
