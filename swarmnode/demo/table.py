"""What a person sees of the demo: a live table on a terminal, a line now and then elsewhere, and
the verdict."""

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
"""Columns of a terminal from which on everything is shown; below, what an evening's spectator can
do without is left out."""


def table(nodes: Sequence[DemoNode], seconds: float, width: int = WIDE) -> Table:
    """One row per node. width: columns of the terminal; 80 are enough for the columns that
    matter."""
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
        rise = f"{_two(v.held_out_start)}→{_two(v.held_out)}" if v.held_out is not None else "–"
        out.add_row(
            node_and_peer(node),
            v.phase,
            str(v.step),
            str(v.peers),
            _two(v.reward_own),
            _two(v.reward_external),
            rise,
            str(v.used),
            str(sum(v.rejected.values())),
            _share(v.distance),
            *((str(v.published), str(v.admitted), str(v.exchanges)) if wide else ()),
        )
    return out


def slim_table(title: str, caption: str = "") -> Table:
    """A table whose frame takes no room from its columns."""
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
    """Name and the end of the peer id, as elsewhere."""
    return f"{node.name} {short_id(node.view.peer)}" if node.view.peer else node.name


def line(nodes: Sequence[DemoNode], seconds: float) -> str:
    """The same in one line."""
    parts = [
        f"{node.name} {node.view.phase} step {node.view.step} held-out {reward(node.view.held_out)}"
        f" used {node.view.used} apart {_share(node.view.distance)}"
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
    console.print(Text("the swarm learned" if ok else "not as it should be", "bold"))


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
