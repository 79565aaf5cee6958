"""Output of the demo: a line for all nodes every few seconds, answers, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.verdict import Finding

ANSWER_CHARACTERS = 200
"""Length of a shown question or answer."""


def status_line(nodes: Sequence[DemoNode], steps: int | None = None) -> str:
    """Return the status of all nodes as one line.

    Args:
        steps: Number of steps of the demo; None if it ends by the clock.
    """
    return " | ".join(_status(node, steps) for node in nodes)


def _status(node: DemoNode, steps: int | None) -> str:
    report, after, swaps = node.report, node.rise.after, node.averaging.exchanges_total
    if after is None:
        return f"{node.name} {node.phase}"
    step = str(report.step) if steps is None else f"{min(report.step, steps)} of {steps}"
    return (
        f"{node.name} {node.phase}, step {step}, reward {short(report.reward_own)},"
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


def print_verdict(findings: Sequence[Finding]) -> None:
    """Print each finding with its mark, then the verdict."""
    for finding in findings:
        print(f"  {'ok  ' if finding.ok else 'FAIL'}  {finding.text}")
    ok = all(finding.ok for finding in findings)
    print("the swarm learned" if ok else "the demo failed, see the lines marked FAIL")


def short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
