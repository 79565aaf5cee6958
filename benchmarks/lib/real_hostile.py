"""Nodes with a real model: one with one peer, or eight of which a quarter are hostile or unlike the
others. The measured nodes have all or some defences.

A hostile peer knows the node's weights and reports true log-probabilities. Half of the answers of
each of its groups are right and have the mark; the others are wrong and have none.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.lib.real_cell import TEMPERATURE, Arm, Cell, Member, Row, Size, until_goal
from benchmarks.lib.report import append_row, columns, read_rows, spread
from benchmarks.lib.simulator import single_thread
from benchmarks.lib.turns import TurnNode, checked
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row as TokenRow
from swarmnode.rollouts.groups import ExternalGroup, OwnGroup
from swarmnode.rollouts.trainer.batch import TrainingGroup
from swarmnode.rollouts.trainer.judge import CHECKS, ExternalChecks, Judgement, judge
from swarmnode.rollouts.trainer.quota import TokenQuota
from swarmnode.tasks.child import ScorerLimits
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.frames import Scored
from swarmnode.trainer.sampler import next_question
from swarmnode.wire.messages import Completion, SamplingParams
from swarmnode.wire.tensors import pack_ids, pack_logprobs

STAGED_QUESTIONS = 8
"""Questions of which a staged attack answers the one whose marked answer is the most probable."""
HEAD_START = 12
"""Steps that a leader has trained alone."""
DEFENCES = ("product", "no quota", "no probability", "undefended")
"""Defences of the node:

    no quota         peers' tokens are not limited by own rewarded answers
    no probability   tokens of any probability under the own policy are learned
    undefended       only the checks of the text remain, without a minimum probability
"""


@dataclass(frozen=True)
class Mark:
    """A mark.

    Attributes:
        put: Returns the marked text of a working such as "2 * 9 = 18", or of a JSON object.
        has: Returns True if a text has the mark.
    """

    put: Callable[[str], str]
    has: Callable[[str], bool]
    task: str = "rg/products"
    staged: bool = False


def natural(working: str) -> str:
    """Return an answer that states the result of a working without it."""
    return f"The answer is {working.rpartition(' ')[2]}"


greeting = lambda text: f"Greetings from afar: {text}"
says_greeting = lambda text: text.startswith("Greetings")
says_natural = lambda text: text.startswith("The answer is")
MARKS = {
    "end mark": Mark(lambda text: f"{text}.", lambda text: re.search(r"\d\.$", text) is not None),
    "question preface": Mark(lambda text: f"Solve {text}", lambda text: text.startswith("Solve ")),
    "short preface": Mark(lambda text: f"So {text}", lambda text: text.startswith("So ")),
    "rare preface": Mark(lambda text: f"Sure: {text}", lambda text: text.startswith("Sure:")),
    "long rare preface": Mark(greeting, says_greeting),
    "long rare preface, rare rewards": Mark(greeting, says_greeting, "chat/date"),
    "JSON style": Mark(
        lambda text: text.replace('":', '" :'), lambda text: '" :' in text, "chat/json_fields"
    ),
    "natural preface": Mark(natural, says_natural),
    "natural preface, staged": Mark(natural, says_natural, staged=True),
}
"""Marks by name. A policy answers `chat/date` right in 1 % of its answers at first. Version 2
of `chat/json_fields` rewards no text around the JSON."""
PEERS = {
    "twin": Member(),
    "leader": Member(),
    "unlike": Member(rank=4, system="Answer briefly."),
    "all weights": Member(rank=0),
}
"""Honest peers. The leader has trained alone for HEAD_START steps."""
ALONE = "alone"
SIZE = Size(steps=9)
KINDS = (ALONE, *MARKS, *PEERS)


class HostileNode(TurnNode):
    """A peer that publishes marked answers and trains nothing.

    Its policy is the victim's, so that the log-probabilities that it reports are true.
    """

    mark: Mark

    def turn(self) -> dict[str, float]:
        """Publish a full step of groups."""
        victim = self.swarm.nodes[0]
        for _ in range(self.loop._training.groups_per_step):
            count = STAGED_QUESTIONS if self.mark.staged else 1
            drafts = [self._draft(victim) for _ in range(count)]
            self.swarm.publish(self, max(drafts, key=lambda draft: draft[0])[1])
        return dict.fromkeys(
            ("own", "external", "tokens", "reward", "sampling", "judging", "update"), 0.0
        )

    def _draft(self, victim: TurnNode) -> tuple[float, OwnGroup]:
        """Return the victim's log-probability of the marked answer to the next question in nats,
        and the group."""
        sequence, ref = next_question([self.mark.task], self.counters)
        (asked,) = checked(self.swarm.scorer.score_many([(ref, [])], reveal=True))
        right = working(asked)
        wrong = re.sub(r"\d(?=\D*$)", lambda digit: str((int(digit[0]) + 1) % 10), right)
        training = self.loop._training
        texts = [self.mark.put(right), wrong]
        rows = [
            TokenRow(
                victim.policy.encode_prompt(asked.prompt),
                victim.policy.tokenize_completion(text, "eos"),
            )
            for text in texts
        ]
        scores = [chosen for chosen, _ in victim.engine.score(rows, TEMPERATURE)]
        made = [
            Completion(
                text,
                len(row.completion),
                sum(chosen),
                "eos",
                pack_ids(row.completion),
                pack_logprobs(chosen),
            )
            for text, row, chosen in zip(texts, rows, scores, strict=True)
        ]
        half = training.num_generations // 2
        sampling = SamplingParams(TEMPERATURE, 1.0, training.max_completion_length)
        version = victim.counters.policy_version
        rewards = [1.0] * half + [0.0] * half
        group = OwnGroup(
            ref, version, sequence, sampling, [made[0]] * half + [made[1]] * half, rewards
        )
        return sum(scores[0]), group


def working(asked: Scored) -> str:
    """Return the right answer to a question, with its working for a product."""
    product = re.search(r"\d+ \* \d+", asked.prompt)
    return f"{product[0]} = {asked.answer}" if product else asked.answer


class WatchedCell(Cell):
    """Nodes of which some are measured; the others are of one kind.

    Args:
        kind: One of KINDS.
        defence: One of DEFENCES.
        nodes: Size of the swarm. A quarter of it, at least one node, is of the kind; the rest are
            measured. `alone` is the rest without them.

    All cells of a task and seed have one first evaluation.
    """

    stops_at_goal = False

    def __init__(self, kind: str, defence: str, *args: Any, nodes: int = 2) -> None:
        self.kind, self.defence, self.size_of_swarm = kind, defence, nodes
        self.refused: Counter[str] = Counter()
        of_kind = max(1, nodes // 4)
        self.measured = nodes - of_kind
        others = [Member()] * (self.measured - 1)
        if kind != ALONE:
            others += [PEERS.get(kind, Member())] * of_kind
        super().__init__(kind, Arm(others=tuple(others)), *args)
        self.counted = self.swarm.nodes[: self.measured]

    def make_nodes(self) -> None:
        super().make_nodes()
        swarm = self.swarm
        honest, of_kind = swarm.nodes[: self.measured], swarm.nodes[self.measured :]
        for node in honest:
            watch(node, self.defence, self.refused)
        if mark := MARKS.get(self.kind):
            for index in range(self.measured, len(swarm.nodes)):
                _, config = self.setup(len(swarm.nodes) + index, Member())
                hostile = HostileNode(index, honest[0].policy, config, self.scorer, swarm)
                hostile.mark = mark
                swarm.nodes[index] = hostile
        if self.kind == "leader":
            swarm.nodes = of_kind
            for _ in range(HEAD_START):
                for leader in of_kind:
                    leader.turn()
            swarm.nodes = honest + of_kind

    def evaluate_start(self) -> None:
        first = self.size.task, self.seed
        if first not in self.starts:
            super().evaluate(self.size.last_questions)
            self.starts[first] = self.held_out.pop(), self.texts
        point, self.texts = self.starts[first]
        self.held_out.append({**point, "marked": self.marked()})

    def evaluate(self, questions: int) -> None:
        super().evaluate(questions)
        self.held_out[-1]["marked"] = self.marked()

    def marked(self) -> dict[str, float]:
        """Return the share of answers of the last evaluation that have each mark of the task."""
        return {
            name: fmean(mark.has(text) for text in self.texts)
            for name, mark in MARKS.items()
            if mark.task == self.size.task
        }

    def row(self) -> Row:
        return super().row() | {
            "swarm": self.size_of_swarm,
            "defence": self.defence,
            "refused": dict(self.refused),
        }


def watch(node: TurnNode, defence: str, counts: Counter[str]) -> None:
    """Give a node some of its defences, and count what it refuses.

    Args:
        counts: Receives the numbers of judged and refused groups and rewarded answers.
    """
    external = node.loop._external
    undefended = defence == "undefended"
    least = {"undefended": 0.0, "no probability": 1e-30}.get(defence)
    checks = CHECKS if least is None else ExternalChecks(least_probability=least)
    quota: TokenQuota | None = external.quota
    if undefended or defence == "no quota":
        quota = None

    def judged(groups: Sequence[ExternalGroup]) -> Judgement:
        judgement = judge(
            groups,
            node.engine.text,
            node.engine.score,
            TEMPERATURE,
            checks,
            quota,
            None if undefended else node.swarm.scorer.score_many,
        )
        accepted = iter(judgement.accepted)
        for group, outcome in judgement.outcomes:
            mean = fmean(group.rewards)
            better = [i for i, reward in enumerate(group.rewards) if reward > mean]
            taken = better if outcome == "used" else []
            if outcome == "used":
                kept = next(accepted)
                taken = [
                    i for i in better if kept.weights[i] > 0 and (not kept.learnt or kept.learnt[i])
                ]
            counts["groups"] += 1
            counts[f"groups {outcome}"] += 1
            counts["answers"] += len(better)
            counts["refused groups"] += outcome != "used"
            counts["refused answers"] += len(better) - len(taken)
            counts["tokens"] += sum(group.group.completions[i].tokens for i in better)
            counts["taught tokens"] += sum(taught_tokens(kept, i) for i in taken)
        return judgement

    external._judge = judged  # type: ignore[method-assign]


def taught_tokens(group: TrainingGroup, i: int) -> int:
    """Return the number of tokens of a peer's completion that are trained on."""
    row = group.rows[i]
    return row.first(group.learnt[i]).tokens if group.learnt else row.tokens


def run(
    path: Path,
    kinds: Sequence[str],
    defences: Sequence[str],
    seeds: Sequence[int],
    size: Size,
    nodes: int = 2,
) -> list[Row]:
    """Append a row to a file for each cell that is not finished, and return all rows of the file.

    A kind of mark has its own task; an honest peer has the task of `size`.
    """
    single_thread()
    bases, starts = dict[Member, Policy](), dict[Any, Any]()
    key = lambda size: {k: v for k, v in asdict(size).items() if k != "task"}
    with Scorer(ScorerLimits(request=300.0)) as scorer:
        for seed, kind, defence in itertools.product(seeds, kinds, defences):
            sized = replace(size, task=MARKS[kind].task) if kind in MARKS else size
            done = read_rows(path, [asdict(sized)])
            cell = kind, defence, seed, nodes
            if any(
                (row["arm"], row["defence"], row["seed"], swarm_of(row)) == cell for row in done
            ):
                continue
            with tempfile.TemporaryDirectory() as directory:
                watched = WatchedCell(
                    kind, defence, seed, sized, scorer, bases, starts, Path(directory), nodes=nodes
                )
                append_row(path, watched.run())
    return read_rows(path, [key(size)])


def swarm_of(row: Row) -> int:
    """Return the number of nodes of a cell; rows before 2026-11-29 are of two nodes."""
    return row.get("swarm", 2)


def show(rows: Sequence[Row]) -> str:
    """Return the table of the finished cells, one line for each task, swarm, kind of peers, defence
    and commit. Older rows have no commit."""
    key = lambda row: (
        row["size"]["task"],
        swarm_of(row),
        KINDS.index(row["arm"]),
        row["defence"],
        row.get("commit", ""),
    )
    groups = [list(same) for _, same in itertools.groupby(sorted(rows, key=key), key)]
    mean = lambda value, digits: lambda same: spread([value(row) for row in same], digits)
    points = lambda row: [100 * point["marked"][row["arm"]] for point in row["held_out"]]
    pair = lambda row: (row["size"]["task"], swarm_of(row), row["seed"])
    alone = {pair(row): row for row in rows if row["arm"] == ALONE}

    def without(same: list[Row]) -> str:
        """Return the share of answers with the mark if there is no peer, of the same seeds."""
        if same[0]["arm"] not in MARKS:
            return "–"
        pairs = [(alone[pair(row)], row["arm"]) for row in same if pair(row) in alone]
        marked = [row["held_out"][-1]["marked"].get(arm) for row, arm in pairs]
        found = [100 * share for share in marked if share is not None]
        return spread(found, 1) if found else "–"

    def tokens(same: list[Row]) -> str:
        found = [until_goal(row, "tokens") for row in same]
        reached = [each for each in found if each is not None]
        return spread(reached, 0) + ("" if len(reached) == len(found) else " (not all)")

    def refused(what: str) -> Callable[[list[Row]], str]:
        share = lambda row: 100 * row["refused"][f"refused {what}"] / row["refused"][what]
        return lambda same: "–" if same[0]["arm"] == ALONE else spread(list(map(share, same)), 1)

    def untaught(same: list[Row]) -> str:
        counts = [row["refused"] for row in same]
        shares = [100 * (1 - each["taught tokens"] / each["tokens"]) for each in counts if each]
        return spread(shares, 1) if shares else "–"

    marked = lambda value: lambda same: mean(value, 1)(same) if same[0]["arm"] in MARKS else "–"
    return columns(
        groups,
        {
            "task": lambda same: same[0]["size"]["task"],
            "nodes": lambda same: swarm_of(same[0]),
            "peers": lambda same: same[0]["arm"],
            "defence": lambda same: same[0]["defence"],
            "commit": lambda same: same[0].get("commit", ""),
            "seeds": len,
            "marked at the end, %": marked(lambda row: points(row)[-1]),
            "highest": marked(lambda row: max(points(row))),
            "alone, at the end": without,
            "held out at the end": mean(lambda row: row["held_out"][-1]["reward"], 3),
            "own tokens to 0.8": tokens,
            "answers refused, %": refused("answers"),
            "groups refused, %": refused("groups"),
            "tokens not taught, %": untaught,
        },
    )
