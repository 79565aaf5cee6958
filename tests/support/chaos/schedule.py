"""A schedule of faults drawn from a seed and applied to a swarm of real nodes, with conditions
checked after each fault.

crashed    no process ended that was not killed: the supervisors' restart counts match the fault,
           and every logged error is explained by it
whole      every node answers, is connected to every other, took a further step, trained on a
           further group of a peer, and saved its state
kept       a restarted node continues from the last state reported as saved, under the same name
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.chaos.faults import FAULTS, Fault
from tests.support.chaos.nodes import ChaosNode, ChaosSwarm, swarm_of, until

START_SECONDS = 240.0
WHOLE_SECONDS = 240.0
"""Limit for the swarm to be whole again. The goal is GOAL_SECONDS, which a busy machine may
miss."""
GOAL_SECONDS = 30.0
SETTLE_SECONDS = 1.0
LINES = 5


@dataclass(frozen=True)
class Outcome:
    fault: str
    node: str
    seconds: float | None
    """Seconds from the kill, or from the end of a lasting fault, until the swarm was whole. None:
    not within WHOLE_SECONDS."""
    problems: tuple[str, ...] = ()


@dataclass
class ScheduleResult:
    seed: int
    nodes: int
    outcomes: list[Outcome] = field(default_factory=list)
    curves: list[dict[int, float]] = field(default_factory=list)
    """Held-out reward of each node by step."""

    @property
    def problems(self) -> list[str]:
        return [
            f"{one.fault} ({one.node}): {problem}"
            for one in self.outcomes
            for problem in one.problems
        ]


@dataclass(frozen=True)
class NodeReport:
    """The last report of a node."""

    step: int
    saved: int
    used: int
    """Groups of peers, in total."""
    connected: int
    works: bool
    restarts: dict[str, int]


def report_of(node: ChaosNode) -> NodeReport | None:
    """Return the node's report, or None while it does not answer or its trainer is not working."""
    snapshot = node.snapshot()
    report = (snapshot or {}).get("trainer", {}).get("report")
    if snapshot is None or report is None:
        return None
    works = snapshot["trainer"]["connected"] and report["phase"] not in ("loading", "draining")
    return NodeReport(
        report["step"],
        report["state_saved_step"],
        report["external_groups_total"],
        snapshot["network"]["peers"]["connected"],
        works,
        {name: count for name, count in snapshot["supervisor"]["restarts"].items() if count},
    )


def drawn(seed: int, long: bool, can_mount: bool, names: Sequence[str] = ()) -> list[Fault]:
    """Return the faults of a schedule in order: each once, or only those named."""
    faults = [
        one
        for one in FAULTS
        if (long or not one.long)
        and (can_mount or not one.needs_mount)
        and (not names or one.name in names)
    ]
    random.Random(f"chaos {seed}").shuffle(faults)
    return faults


def play(
    seed: int,
    directory: Path,
    *,
    nodes: int = 2,
    long: bool = False,
    names: Sequence[str] = (),
    tell: Callable = print,
) -> ScheduleResult:
    """Play the whole schedule. Later problems are in the outcomes.

    Raises:
        AssertionError: The swarm does not start.
    """
    played, rng = ScheduleResult(seed, nodes), random.Random(f"chaos of {seed}")
    with swarm_of(directory, nodes) as swarm:
        started = time.monotonic()
        first = whole(
            swarm, {node.name: NodeReport(0, 0, 0, 0, False, {}) for node in swarm.nodes}, started
        )
        assert first is not None, "the swarm did not start:\n" + "\n".join(
            f"{node.name} {report_of(node)}\n{node.log()[-1500:]}" for node in swarm.nodes
        )
        tell(f"seed {seed}: {nodes} nodes, whole {first:.1f} s after their start")
        for fault in drawn(seed, long, swarm.can_mount, names):
            outcome = done(fault, rng.choice(swarm.nodes), swarm, rng)
            played.outcomes.append(outcome)
            took = "never" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
            tell(
                f"  {fault.name} ({outcome.node}): whole after {took}"
                + "".join(f"\n    {problem}" for problem in outcome.problems)
            )
            if outcome.seconds is None:
                break
        swarm.stop()
        played.curves = [curve(node) for node in swarm.nodes]
        codes = [node.exit_code() for node in swarm.nodes]
        if any(codes):
            problem = f"after a stop request the nodes ended with {codes}"
            tell(f"  {problem}")
            played.outcomes.append(Outcome("their end", "all", None, (problem,)))
    return played


def done(fault: Fault, node: ChaosNode, swarm: ChaosSwarm, rng: random.Random) -> Outcome:
    """Apply `fault` to `node` and return the outcome."""
    before = {
        each.name: until(lambda each=each: report_of(each), START_SECONDS) for each in swarm.nodes
    }
    if not all(before.values()):
        return Outcome(fault.name, node.name, None, ("a node did not answer before it",))
    logged = {each.name: each.log_size() for each in swarm.nodes}
    # A killed node must get back to its earlier state.
    kills, began = bool(fault.restarts) or fault.restarts_node, time.monotonic()
    try:
        fault.act(swarm, node, rng)
    except AssertionError as error:
        return Outcome(fault.name, node.name, None, (str(error),))
    ended = time.monotonic()
    # Groups that were still in its queues are not new.
    at_end = {each.name: report_of(each) or before[each.name] for each in swarm.nodes}
    seconds = whole(swarm, before, began) if kills else whole(swarm, at_end, ended)
    problems = (
        [f"not whole within {WHOLE_SECONDS:.0f} s: {[report_of(each) for each in swarm.nodes]}"]
        if seconds is None
        else []
    )
    time.sleep(SETTLE_SECONDS)
    for each in swarm.nodes:
        hit, lines = each is node, logged_since(each, logged[each.name])
        expected = {} if hit and fault.restarts_node else dict(before[each.name].restarts)
        for name, count in fault.restarts.items() if hit else ():
            expected[name] = expected.get(name, 0) + count
        after = report_of(each)
        if after is not None and after.restarts != expected:
            problems.append(
                f"{each.name}: restarts {after.restarts}, not {expected}:"
                f" {each.log(logged[each.name])[-800:]}"
            )
        problems += [f"{each.name} logged {line}" for line in errors(lines, fault.explains)[:LINES]]
        problems += lost(each, lines, before[each.name])
    return Outcome(fault.name, node.name, seconds, tuple(problems))


def whole(swarm: ChaosSwarm, before: dict[str, NodeReport], since: float) -> float | None:
    """Return the seconds from `since` until every node was whole, or None after WHOLE_SECONDS."""
    left = list(swarm.nodes)

    def all_well() -> bool:
        left[:] = [
            node
            for node in left
            if not is_whole(report_of(node), before[node.name], len(swarm.nodes) - 1)
        ]
        return not left and all(
            (at := report_of(node)) is not None and at.connected == len(swarm.nodes) - 1
            for node in swarm.nodes
        )

    return time.monotonic() - since if until(all_well, WHOLE_SECONDS, 0.25) else None


def is_whole(at: NodeReport | None, before: NodeReport, others: int) -> bool:
    return (
        at is not None
        and at.works
        and at.connected == others
        and at.step > before.step
        and at.used > before.used
        and at.saved >= before.step
    )


def logged_since(node: ChaosNode, size: int) -> list[dict[str, Any]]:
    """Return the new lines of its log. A line that is no JSON record counts as an error."""
    found = []
    for line in node.log(size).splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            found.append({"level": "error", "event": line})
    return found


def errors(lines: Sequence[dict[str, Any]], explains: Sequence[str]) -> list[str]:
    """Return the errors that `explains` does not match."""
    bad = [
        line for line in lines if line.get("level") in ("error", "critical") or "exception" in line
    ]
    texts = [json.dumps(line, ensure_ascii=False)[:600] for line in bad]
    return [text for text in texts if not any(re.search(pattern, text) for pattern in explains)]


def lost(node: ChaosNode, lines: Sequence[dict[str, Any]], before: NodeReport) -> list[str]:
    """Return the problems with state that was reported as saved and is missing."""
    restored = [line["step"] for line in lines if line.get("event") == "restored"]
    problems = [
        f"{node.name} restored step {step}, but had reported step {before.saved} as saved"
        for step in restored
        if step < before.saved
    ]
    snapshot = node.snapshot()
    if snapshot is not None and snapshot["node"]["peer"] != node.peer:
        problems.append(f"{node.name} has another identity")
    return problems


def curve(node: ChaosNode) -> dict[int, float]:
    """Return held-out reward by step. For a step taken twice, the later value counts."""
    return {
        line["step"]: line["reward_held_out"]
        for line in node.steps()
        if line.get("reward_held_out") is not None
    }
