"""Output of the demo: a live table on a terminal, otherwise lines, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.verdict import Finding
from swarmnode.observe.status import short_id

WIDE = 120
"""Least width of a terminal for all columns. Narrower terminals show the important ones."""
SHOWN_SECONDS = 3.0
"""Time in a phase from which it is shown."""
ANSWER_CHARACTERS = 200
"""Length of a shown question or answer."""


def table(
    nodes: Sequence[DemoNode], clock: str, steps: int | None = None, width: int = WIDE
) -> Table:
    """Return a table with one row per node.

    Args:
        clock: Time since the start, and the time that is left.
        steps: Number of steps of the demo; None if it ends by the clock.
        width: Width of the terminal, at least 80.
    """
    wide = width >= WIDE
    out = slim_table(f"swarmnode demo, {clock}")
    out.add_column("node")
    out.add_column("phase")
    for heading in ("step", "own", "peers'", "held-out", "used", "averaged", "rejected"):
        out.add_column(heading, justify="right")
    for heading in ("peers", "published", "admitted") if wide else ():
        out.add_column(heading, justify="right")
    for node in nodes:
        report, rollouts = node.report, node.status.rollouts
        counts = (node.status.network.peers.connected, rollouts.published)
        out.add_row(
            node_and_peer(node) if wide else node.name,
            phase(node),
            step(node, steps),
            short(report.reward_own),
            short(report.reward_external),
            f"{short(node.rise.before)}→{short(node.rise.after)}",
            str(report.external_groups_total),
            str(node.averaging.exchanges_total),
            str(sum(rollouts.admission.rejected.values())),
            *(map(str, (*counts, rollouts.admission.admitted)) if wide else ()),
        )
    return out


def phase(node: DemoNode) -> str:
    """Return what the node is doing, with the time if it takes long."""
    seconds = node.pace.phase_seconds
    return f"{node.phase} {seconds:.0f} s" if seconds >= SHOWN_SECONDS else node.phase


def step(node: DemoNode, steps: int | None) -> str:
    """Return the number of completed steps, `n of m` if the demo has `steps` steps."""
    done = node.report.step
    return str(done) if steps is None else f"{min(done, steps)} of {steps}"


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
    peer = node.status.node.peer
    return f"{node.name} {short_id(peer)}" if peer else node.name


def status_line(nodes: Sequence[DemoNode], clock: str, steps: int | None = None) -> str:
    """Return the status of all nodes as one line, see `table`."""
    return f"{clock}: " + " | ".join(_status(node, steps) for node in nodes)


def _status(node: DemoNode, steps: int | None) -> str:
    report, after, swaps = node.report, node.rise.after, node.averaging.exchanges_total
    if after is None:
        return f"{node.name} {phase(node)}"
    return (
        f"{node.name} {phase(node)}, step {step(node, steps)}, reward {short(report.reward_own)},"
        f" held-out {short(after)}, used {report.external_groups_total}, averaged {swaps}"
    )


def answers(nodes: Sequence[DemoNode]) -> str:
    """Return the first held-out question with the first answer of each node at its last
    evaluation. Before training, all nodes answer alike."""
    found = [(node.name, pair) for node in nodes if (pair := node.answers()) is not None]
    if not found:
        return ""
    _, (before, _) = found[0]
    answered = [("before", before)]
    answered += [(f"{name} now", last) for name, (first, last) in found if last.step > first.step]
    width = max(len("question"), *(len(name) for name, _ in answered))
    lines = [f"{'question':{width}}  {_one_line(before.prompt)}"]
    for name, sample in answered:
        answer = sample.completions[0]
        lines.append(f"{name:{width}}  {_one_line(answer.text)}  (reward {short(answer.reward)})")
    return "\n".join(lines)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= ANSWER_CHARACTERS else f"{line[:ANSWER_CHARACTERS]}…"


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


def short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
