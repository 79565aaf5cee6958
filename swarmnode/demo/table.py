"""What a person sees of the demo: a live table on a terminal, a line now and then elsewhere, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.verdict import Finding


def table(nodes: Sequence[DemoNode], seconds: float) -> Table:
    """One row per node."""
    out = Table(title=f"swarmnode demo, {seconds:.0f} s", title_justify="left", expand=False)
    for heading in ("node", "peer", "phase"):
        out.add_column(heading)
    for heading in ("step", "peers", "own", "external", "held-out", "published", "admitted", "used", "rejected", "averaged", "apart"):
        out.add_column(heading, justify="right")
    for node in nodes:
        v = node.view
        rise = f"{reward(v.held_out_start)} → {reward(v.held_out)}" if v.held_out is not None else "–"
        out.add_row(
            node.name, f"…{v.peer[-6:]}" if v.peer else "–", v.phase, str(v.step), str(v.peers), reward(v.reward_own),
            reward(v.reward_external), rise, str(v.published), str(v.admitted), str(v.used), str(sum(v.rejected.values())),
            str(v.exchanges), _share(v.distance),
        )  # fmt: skip
    return out


def line(nodes: Sequence[DemoNode], seconds: float) -> str:
    """The same in one line."""
    parts = [
        f"{node.name} {node.view.phase} step {node.view.step} held-out {reward(node.view.held_out)} used {node.view.used} "
        f"apart {_share(node.view.distance)}"
        for node in nodes
    ]
    return f"{seconds:4.0f} s  " + " | ".join(parts)


def verdict_text(findings: Sequence[Finding]) -> Text:
    """Every finding with its mark, and the verdict."""
    text = Text()
    for finding in findings:
        text.append("  ok    " if finding.ok else "  FAIL  ", style="green" if finding.ok else "bold red")
        text.append(finding.text + "\n")
    ok = all(finding.ok for finding in findings)
    text.append("the swarm learned\n" if ok else "not as it should be\n", style="bold")
    return text


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"


def reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
