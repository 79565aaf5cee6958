"""Whose text is refused? `python -m benchmarks.tolerance [--quick] [--json PATH] [--seeds N]`

A drawn group of our own model is refused when the median |difference of log-probability| per token
(`spot_check`) or the mean surprise
above our entropy (`surprise_check`) is beyond a tolerance. Honest nodes drift apart while they
train, so the tolerances have to let that pass. Two nodes start alike and train alone, on other
questions; their groups that carry a signal are judged by the policies of both at many moments.
Made-up text is judged by the same policies:

    payload, claimed         a payload in front of right answers, claimed to be sampled with
    confidence
    payload, truthful        the same, with the log-probabilities that the judge's own policy gives
    it
    characters, truthful     random characters, as long as answers are
    k of 8 payload           a group of which the other completions were sampled honestly, all
    truthful
"""

from __future__ import annotations

import argparse
import random
import statistics
import string
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.regimes import start_policies
from benchmarks.report import heading, table, write_json
from benchmarks.simulator import PAYLOAD, Arm, Node
from swarmnode.config import PolicyConfig, TaskConfig, TrainingConfig
from swarmnode.policy.load import Policy, load_policy, overwrite, trainable
from swarmnode.policy.logprobs import Row
from swarmnode.rl.corrections import excess_surprise, spot_check, surprise_check
from swarmnode.rollouts.groups import is_useful
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import task_version
from swarmnode.trainer.batch import assemble, own_group
from swarmnode.trainer.judge import ExternalChecks
from swarmnode.wire.swarm import swarm_id
from swarmnode.wire.tensors import pack_logprobs, unpack_logprobs

MOMENTS = (0, 5, 10, 20, 50, 100, 200)
"""Steps at which groups are kept and judged."""
REGIMES = ("sparse", "two easy tasks")
EASY = ("builtin/copy", "builtin/sum")
"""Nearly always solved in the end: the policy leaves its start further behind than anywhere
else."""
CLAIMED = -0.3
"""Log-probability that a liar claims of each token."""
SWEEP = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)


@dataclass(frozen=True)
class Group:
    rows: list[Row]
    claimed: list[list[float]]
    """The sender's log-probabilities, as they come off the wire."""


@dataclass(frozen=True)
class Kept:
    """A node at one moment."""

    state: dict[str, torch.Tensor]
    groups: list[Group]


@dataclass(frozen=True)
class Size:
    moments: tuple[int, ...] = MOMENTS
    asked: int = 96
    """Questions at a moment; those whose rewards differ are kept."""
    judged: int = 24
    """Groups judged of those, at most."""


def live(node: Node, names: Sequence[str], scorer: Scorer, size: Size) -> dict[int, Kept]:
    """Trains `node` alone to the last moment."""
    kept = {}
    for step in range(max(size.moments) + 1):
        if step in size.moments:
            state = {
                name: tensor.detach().clone()
                for name, tensor in trainable(node.policy.model).items()
            }
            useful = [
                sample
                for sample, rewards in answer(node, size.asked, names, scorer)
                if is_useful(rewards)
            ]
            kept[step] = Kept(state, [sent(sample) for sample in useful[: size.judged]])
        if step < max(size.moments):
            done = answer(node, node.training.groups_per_step, names, scorer)
            node.updater.update(
                assemble([own_group(s, rewards) for s, rewards in done], node.training.advantage)
            )
    return kept


def answer(
    node: Node, count: int, names: Sequence[str], scorer: Scorer
) -> list[tuple[Any, list[float]]]:
    """(group, rewards) of the node's next `count` questions."""
    refs = [ref for ref, _ in node.ask(count, names)]
    samples = node.sample([q.prompt for q in scored(scorer, [(ref, []) for ref in refs])])
    answers = [(ref, [c.text for c in s.completions]) for ref, s in zip(refs, samples, strict=True)]
    return [(s, r.rewards) for s, r in zip(samples, scored(scorer, answers), strict=True)]


def scored(scorer: Scorer, items: Sequence[Any]) -> list[Any]:
    """Raises the scorer's error: with honest addresses there is none."""
    results = scorer.score_many(items)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def sent(sample: Any) -> Group:
    """As it arrives: log-probabilities lose a little on the wire."""
    rows = [(list(sample.prompt_ids), list(c.ids)) for c in sample.completions]
    return Group(
        rows, [unpack_logprobs(pack_logprobs(c.logprobs)).tolist() for c in sample.completions]
    )


# ---- the judge


def distances(
    policy: Policy, node: Node, groups: Sequence[Group], truthful: bool = False
) -> list[tuple[float, float]]:
    """(median |Δ log-probability|, mean surprise) of each group: what the two checks compare with
    their tolerances.

    `truthful`: the sender claims just what the judge's policy gives.
    """
    flat = iter(
        node.batcher.score_with_entropy(
            policy, [row for g in groups for row in g.rows], node.training.temperature
        )
    )
    found = []
    for group in groups:
        judged = [next(flat) for _ in group.rows]
        ours = torch.tensor([x for chosen, _ in judged for x in chosen])
        entropy = torch.tensor([x for _, spread in judged for x in spread])
        theirs = ours if truthful else torch.tensor([x for row in group.claimed for x in row])
        found.append((float((ours - theirs).abs().median()), float((-ours - entropy).mean())))
        check(found[-1], ours, theirs, entropy)
    return found


def check(
    found: tuple[float, float], ours: torch.Tensor, theirs: torch.Tensor, entropy: torch.Tensor
) -> None:
    """The product's own checks have to say of this group what `found` says."""
    for tolerance in SWEEP:
        assert spot_check(ours, theirs, tolerance) == (found[0] <= tolerance)
        assert surprise_check(excess_surprise(ours, entropy), tolerance) == (found[1] <= tolerance)


def made_up(
    policy: Policy, honest: Sequence[Group], rng: random.Random
) -> Iterable[tuple[str, list[Group], bool]]:
    """(name, groups, whether their log-probabilities are the judge's own) of every attack, on the
    questions of `honest` groups."""

    def groups(change: Callable[[int, Row], Row]) -> list[Group]:
        made = []
        for group in honest:
            rows = [change(i, row) for i, row in enumerate(group.rows)]
            made.append(Group(rows, [[CLAIMED] * len(ids) for _, ids in rows]))
        return made

    def payload(row: Row) -> Row:
        prompt, ids = row
        text = policy.decode([i for i in ids if i not in policy.eos_ids])
        return prompt, policy.tokenize_completion(f"{PAYLOAD}<answer>{text}</answer>", "eos")

    def characters(i: int, row: Row) -> Row:
        text = "".join(
            rng.choice(string.ascii_letters + string.digits) for _ in range(max(1, len(row[1]) - 1))
        )
        return row[0], policy.tokenize_completion(text, "eos")

    everywhere = groups(lambda i, row: payload(row))
    yield "payload, claimed", everywhere, False
    yield "payload, truthful", everywhere, True
    yield "characters, truthful", groups(characters), True
    for count in (4, 2, 1):
        yield (
            f"{count} of 8 payload",
            groups(lambda i, row, count=count: payload(row) if i < count else row),
            True,
        )


# ---- one seed


def measure(seed: int, regime: str, size: Size, scorer: Scorer) -> list[dict[str, Any]]:
    """Rows {kind, apart or step, distances}."""
    easy = regime == "two easy tasks"
    names = list(EASY) if easy else TaskConfig().names
    start = (
        load_policy(PolicyConfig(devices="cpu", threads=1))
        if easy
        else start_policies(regime, seed, 1)[0]
    )
    swarm = swarm_id(f"tolerance-{seed}", {n: task_version(n) for n in names})
    nodes = [Node(i, start.clone(), Arm("alone"), TrainingConfig(), swarm, seed) for i in range(2)]
    lives = [live(node, names, scorer, size) for node in nodes]
    judge, node, rng = start.clone(), nodes[0], random.Random(f"tolerance {seed}")
    rows: list[dict[str, Any]] = []

    def note(kind: str, steps: int, found: list[tuple[float, float]]) -> None:
        rows.append(
            {"seed": seed, "regime": regime, "kind": kind, "steps": steps, "distances": found}
        )

    for at in size.moments:
        for mine, other in ((0, 1), (1, 0)):
            overwrite(trainable(judge.model), lives[mine][at].state)
            note("trained apart, both", at, distances(judge, node, lives[other][at].groups))
            for then in size.moments:
                kind = (
                    "sender behind by"
                    if then < at
                    else "sender ahead by"
                    if then > at
                    else "same policy"
                )
                note(kind, abs(at - then), distances(judge, node, lives[mine][then].groups))
            for attack, groups, truthful in made_up(judge, lives[mine][at].groups[:8], rng):
                note(attack, at, distances(judge, node, groups, truthful))
    return rows


# ---- the tables


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def refused(found: Sequence[Sequence[float]], spot: float, surprise: float) -> str:
    count = sum(gap > spot or extra > surprise for gap, extra in found)
    return f"{count / len(found):.1%}" if found else "–"


HONEST = ("same policy", "sender behind by", "sender ahead by", "trained apart, both")
SHOWN = {0, 20, 50, 100, 200}
ATTACKS = (
    "payload, claimed",
    "payload, truthful",
    "characters, truthful",
    "4 of 8 payload",
    "2 of 8 payload",
    "1 of 8 payload",
)


def tables(rows: list[dict[str, Any]]) -> str:
    usual = ExternalChecks()
    lines: list[str] = []
    for regime in dict.fromkeys(r["regime"] for r in rows):
        here = [r for r in rows if r["regime"] == regime]
        body = []
        for kind in HONEST:
            for steps in sorted({r["steps"] for r in here if r["kind"] == kind} & SHOWN):
                body.append(
                    line(
                        f"{kind} {steps}",
                        [r for r in here if (r["kind"], r["steps"]) == (kind, steps)],
                        usual,
                    )
                )
        body += [
            line(attack, [r for r in here if r["kind"] == attack], usual) for attack in ATTACKS
        ]
        headers = [
            "sender and judge, steps",
            "groups",
            "median Δ",
            "by seed",
            "99 %",
            "most",
            "surprise",
            "by seed",
            "99 %",
            "most",
            "refused",
        ]
        lines += [f"### {regime}", "", table(headers, [row for row in body if row[1]]), ""]
    return "\n".join([*lines, sweep(rows)])


def line(name: str, rows: list[dict[str, Any]], usual: ExternalChecks) -> list[Any]:
    found = [d for r in rows for d in r["distances"]]
    cells: list[str] = []
    for which in (0, 1):
        values = [d[which] for d in found]
        by_seed = [
            statistics.median(some)
            for s in sorted({r["seed"] for r in rows})
            if (some := [d[which] for r in rows if r["seed"] == s for d in r["distances"]])
        ]
        if values:
            cells += [
                f"{statistics.median(values):.2f}",
                f"{min(by_seed):.2f} … {max(by_seed):.2f}",
            ]
            cells += [f"{quantile(values, 0.99):.2f}", f"{max(values):.2f}"]
    return [
        name,
        len(found),
        *cells,
        refused(found, usual.spot_check_tolerance, usual.surprise_tolerance),
    ]


def sweep(rows: list[dict[str, Any]]) -> str:
    """What each tolerance refuses, over all regimes, seeds and moments: of honest groups, which is
    an error, and of made-up ones."""
    honest = lambda r, most: r["kind"] not in ATTACKS and r["steps"] <= most
    of = lambda wanted: [d for r in rows if wanted(r) for d in r["distances"]]
    near, far = of(lambda r: honest(r, 20)), of(lambda r: honest(r, max(MOMENTS)))
    attacks = {a: of(lambda r, a=a: r["kind"] == a) for a in ATTACKS}
    body = []
    for name, place in (("spot check", 0), ("surprise", 1)):
        for tolerance in SWEEP:
            pair = (tolerance, float("inf")) if place == 0 else (float("inf"), tolerance)
            body.append(
                [
                    f"{name} {tolerance:g}",
                    *[refused(found, *pair) for found in (near, far, *attacks.values())],
                ]
            )
    return "### what a tolerance refuses\n\n" + table(
        ["tolerance", "honest, to 20 steps", "honest, all", *ATTACKS], body
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tolerance",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one seed, 20 steps; under a minute")
    parser.add_argument("--json", type=Path, help="write all distances there")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size, seeds = (Size((0, 10, 20), 48, 12), 1) if args.quick else (Size(), args.seeds)
    print(heading("tolerance: whose text is refused?"), flush=True)
    rows: list[dict[str, Any]] = []
    started = time.time()
    with Scorer() as scorer:
        for seed in range(args.first_seed, args.first_seed + seeds):
            for regime in REGIMES:
                rows += measure(seed, regime, size, scorer)
                print(
                    f"{time.time() - started:5.0f} s  seed {seed}, {regime}",
                    file=sys.stderr,
                    flush=True,
                )
                if args.json:
                    write_json(args.json, rows)
    print(tables(rows), flush=True)


if __name__ == "__main__":
    main()
