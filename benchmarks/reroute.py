"""What would it cost to send a micro-batch through a stage of another crew, and what could it give?
`python -m benchmarks.reroute [--quick] [--json PATH] [--seeds N]`

Four crews of four stages, two layers each, start alike, train on data of their own, and average
each stage in random pairs every H steps (NoLoCo, the product's rule). At some moments since the
last averaging the first crew's policy is compared with itself where one stage's layers are another
crew's, which is what a re-routed micro-batch goes through: of the crew that it was averaged with
last, or of one that it was not.

    text     the language model of benchmarks.checkfree, supervised: an inner stage
    GRPO     the embedded policy eight layers deep (policy/build_deep.py): the layers of an end, for
    its inner ones do next to nothing

    KL, NLL            nats per token, over the whole vocabulary, on tokens of the policy (GRPO) or
    held-out text; the gate that a
                       restored stage has to pass allows 0.02 and 0.05
    outside the clip   share of tokens, as the policy draws them, whose importance ratio is not in
    [1 − ε, 1 + ε'] of training
    cosine             of the gradient that the other three stages get with the one that they should
    get

For comparison the policy without that stage, with its own stage of 20 steps ago, with the mean of
its own stage and its partner's (what averaging does), and the cosine of gradients of two of its own
batches. The second table is arithmetic: what share of its time a crew stands still, of which
re-routing cannot save more than all.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import cosine_similarity, kl_div, log_softmax

from benchmarks.forks import Size
from benchmarks.outer_rules import blend, outer_step
from benchmarks.recoveries import SETTINGS
from benchmarks.regimes import QUESTIONS_PER_TASK, adapt
from benchmarks.report import heading, table, write_json
from benchmarks.simulator import Arm, Node
from benchmarks.staged import Corpus, Staged, build, language, tasks
from benchmarks.tolerance import answer
from swarmnode.averaging.outer import OuterState, host_copy
from swarmnode.config import PolicyConfig, TaskConfig, TrainingConfig, WeightsConfig
from swarmnode.policy.build_deep import write_deep_model
from swarmnode.policy.build_tiny import SETTINGS as TASKS
from swarmnode.policy.build_tiny import SFT_BLOCK, questions
from swarmnode.policy.load import Policy, load_policy
from swarmnode.rl.objectives import EPSILON, EPSILON_HIGH, Objective, policy_loss
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import task_version
from swarmnode.trainer.batch import assemble, own_group
from swarmnode.weights.rule import make_rule
from swarmnode.wire.swarm import swarm_id

CREWS, STAGES, LAYERS = 4, 4, 8
PER = LAYERS // STAGES
OLD = 20
"""Steps: the oldest that a neighbour's checkpoint is."""
SHOWN = 0.05
"""Share of accepted format in the supervised steps: `moderate` of benchmarks.regimes."""
RATE = 1e-3
"""Of the text: that of fine-tuning in benchmarks.checkfree. GRPO has the product's default,
3e-4."""
PAUSES = (5.0, 7.0, 60.0, 600.0)
"""Seconds from a loss to the next step: as benchmarks.crew measured it, and where a stage is so
large that its copy takes long."""
LOSSES = (0.05, 0.10, 0.16)
"""Per stage and hour: the papers' rates."""


class Crew(Protocol):
    model: Any
    stages: tuple[int, ...]
    """Those that are looked at."""

    def train(self, step: int) -> None: ...

    def probe(self, step: int) -> Any:
        """New data of the crew's own, for the two below."""
        ...

    def distribution(self, probe: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities (tokens, vocabulary), what came next (tokens,))."""
        ...

    def loss(self, probe: Any) -> torch.Tensor:
        """What a step on `probe` goes backward from."""
        ...


class Text:
    """Learns `corpus`, in batches of its own."""

    stages = (1, 2)

    def __init__(self, model: Any, rate: float, corpus: Corpus, seed: int) -> None:
        self.model, self._staged, self._corpus, self._seed = (
            model,
            Staged(model, rate),
            corpus,
            seed,
        )

    def train(self, step: int) -> None:
        self._staged.step(self._corpus.batch(self._seed, step))

    def probe(self, step: int) -> torch.Tensor:
        return self._corpus.batch(self._seed + 500, step)

    @torch.no_grad()
    def distribution(self, probe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held_out = self._corpus.held_out
        return (
            log_softmax(self._staged.logits(held_out), -1).flatten(0, 1),
            held_out[:, 1:].flatten(),
        )

    def loss(self, probe: torch.Tensor) -> torch.Tensor:
        return self._staged.loss(probe)


class Grpo:
    """Learns from its own answers to its own questions, as a node that trains alone."""

    stages = (0, 3)

    def __init__(self, policy: Policy, number: int, seed: int, scorer: Scorer) -> None:
        self._names = TaskConfig().names
        swarm = swarm_id(f"reroute-{seed}", {n: task_version(n) for n in self._names})
        self.model, self._scorer = policy.model, scorer
        self._node = Node(number, policy, Arm("alone"), TrainingConfig(), swarm, seed)

    def _rows(self, groups: int) -> Any:
        done = answer(self._node, groups, self._names, self._scorer)
        return assemble(
            [own_group(sample, rewards) for sample, rewards in done], self._node.training.advantage
        )

    def train(self, step: int) -> None:
        self._node.updater.update(self._rows(self._node.training.groups_per_step))

    def probe(self, step: int) -> Any:
        """Of which something is learnt: ids (n, width) behind their prompts, where a completion's
        token comes next, advantages."""
        rows = self._rows(64)
        live = rows.informative(external=False)
        chosen = [rows.rows[i] for i in live]
        width = max(len(p) + len(c) for p, c in chosen)
        # padded behind, where attention does not look
        ids = torch.tensor([p + c + [0] * (width - len(p) - len(c)) for p, c in chosen])
        ours = torch.tensor(
            [[len(p) <= at < len(p) + len(c) for at in range(1, width)] for p, c in chosen]
        )
        return ids, ours, rows.advantages[live], self._logprobs(ids).detach()

    def _logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """(n, width − 1, vocabulary)."""
        return log_softmax(self.model(input_ids=ids, use_cache=False).logits[:, :-1], -1)

    @torch.no_grad()
    def distribution(self, probe: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, ours, _, _ = probe
        return self._logprobs(ids)[ours], ids[:, 1:][ours]

    def loss(self, probe: Any) -> torch.Tensor:
        ids, ours, advantages, old = probe
        objective, chosen = Objective.of(self._node.training), ids[:, 1:, None]
        return policy_loss(
            self._logprobs(ids).gather(2, chosen)[..., 0],
            old.gather(2, chosen)[..., 0],
            advantages,
            ours,
            objective,
            objective.normalizer(ours.sum(1).tolist()),
        ).loss


# ---- a stage of somebody else


def layers_of(model: Any, stage: int) -> list[nn.Module]:
    return list(model.model.layers)[stage * PER : (stage + 1) * PER]


@torch.no_grad()
def mean_of(mine: Any, theirs: Any, stage: int) -> list[nn.Module]:
    """What the two would average there."""
    layers = copy.deepcopy(layers_of(mine, stage))
    for layer, other in zip(layers, layers_of(theirs, stage), strict=True):
        for p, q in zip(layer.parameters(), other.parameters(), strict=True):
            p.lerp_(q, 0.5)
    return layers


@contextmanager
def through(model: Any, stage: int, layers: Sequence[nn.Module]) -> Iterator[None]:
    """With `layers` in the place of `stage`."""
    own = model.model.layers
    model.model.layers = nn.ModuleList([*own[: stage * PER], *layers, *own[(stage + 1) * PER :]])
    try:
        yield
    finally:
        model.model.layers = own


def gradient(crew: Crew, stage: int, layers: Sequence[nn.Module], probe: Any) -> torch.Tensor:
    """(parameters outside `stage`,) with `layers` in its place."""
    own = {id(p) for layer in layers_of(crew.model, stage) for p in layer.parameters()}
    others = [p for p in crew.model.parameters() if id(p) not in own]
    with through(crew.model, stage, layers):
        return torch.cat([part.flatten() for part in torch.autograd.grad(crew.loss(probe), others)])


def compare(crew: Crew, stage: int, layers: Sequence[nn.Module], probe: Any) -> dict[str, float]:
    """What the policy becomes with `layers` in the place of `stage`."""
    before, tokens = crew.distribution(probe)
    with through(crew.model, stage, layers):
        after = crew.distribution(probe)[0]
    ratio = (after - before).exp()
    outside = (ratio < 1 - EPSILON) | (ratio > 1 + EPSILON_HIGH)
    cosine = cosine_similarity(
        gradient(crew, stage, layers_of(crew.model, stage), probe),
        gradient(crew, stage, layers, probe),
        dim=0,
    )
    return {
        "kl": float(kl_div(after, before, reduction="batchmean", log_target=True)),
        "nll": float((before - after).gather(1, tokens[:, None]).mean()),
        "outside": float((before.exp() * outside).sum(-1).mean()),
        "cosine": float(cosine),
    }


def average(
    named: Sequence[dict[str, nn.Parameter]], outer: Sequence[OuterState], order: Sequence[int]
) -> None:
    """One outer step of all: the first of `order` with the second, the third with the fourth, …"""
    mine = [host_copy(parameters) for parameters in named]
    for i, j in [
        *zip(order[::2], order[1::2], strict=True),
        *zip(order[1::2], order[::2], strict=True),
    ]:
        outer_step(outer[i], blend(mine[i], mine[j]))
        outer[i].commit(named[i], mine[i])


def follow(
    crews: Sequence[Crew], every: int, rounds: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Rows {since, what, stage, kl, nll, outside, cosine} of crew 0, after the first outer step."""
    named = [dict(crew.model.named_parameters()) for crew in crews]
    outer = [OuterState(parameters, make_rule("noloco")) for parameters in named]
    past: deque[list[list[nn.Module]]] = deque(maxlen=OLD + 1)
    rows: list[dict[str, Any]] = []
    order = list(range(len(crews)))
    for step in range(rounds * every):
        since = step % every
        if step and since == 0:
            order = rng.sample(order, len(order))
            average(named, outer, order)
        past.append([copy.deepcopy(layers_of(crews[0].model, stage)) for stage in range(STAGES)])
        if step >= every and since in (0, every // 2, every - 1):
            at = order.index(0)
            partner = crews[order[at ^ 1]]
            stranger = next(crew for crew in crews if crew is not partner and crew is not crews[0])
            probe, other = crews[0].probe(step), crews[0].probe(step + 10_000)
            for stage in crews[0].stages:
                ways = {
                    f"its partner's, {since} steps after averaging": layers_of(
                        partner.model, stage
                    ),
                    f"another crew's, {since} steps after averaging": layers_of(
                        stranger.model, stage
                    ),
                    "left out": [],
                    "its own, 20 steps old": past[0][stage],
                    f"the mean of its own and its partner's, {since} steps after averaging": (
                        mean_of(crews[0].model, partner.model, stage)
                    ),
                }
                rows += [
                    {"what": what, "stage": stage} | compare(crews[0], stage, layers, probe)
                    for what, layers in ways.items()
                ]
                own = layers_of(crews[0].model, stage)
                noise = cosine_similarity(
                    gradient(crews[0], stage, own, probe),
                    gradient(crews[0], stage, own, other),
                    dim=0,
                )
                rows.append(
                    {"what": "its own, another batch", "stage": stage, "cosine": float(noise)}
                )
        for crew in crews:
            crew.train(step)
    return rows


def trunk(seed: int, corpus: Corpus, steps: int) -> Any:
    staged = Staged(build(seed), Size.rate)
    for i in range(steps):
        staged.step(corpus.batch(seed, i))
    return staged.model


def grpo(seed: int, scorer: Scorer) -> list[Crew]:
    with tempfile.TemporaryDirectory() as directory:
        path = write_deep_model(Path(directory) / "model", LAYERS, tied=False)
        start = load_policy(PolicyConfig(model=str(path), devices="cpu", threads=1))
    adapt(
        start,
        list(questions(TASKS, QUESTIONS_PER_TASK, SFT_BLOCK)),
        lambda task: SHOWN,
        f"reroute/{seed}",
    )
    return [Grpo(start.clone(), number, seed, scorer) for number in range(CREWS)]


# ---- the tables


def costs(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over moments and both stages; in brackets the range of the seeds' medians."""
    body = []
    kinds = ["its partner's", "another crew's", "the mean of its own and its partner's"]
    kind = lambda what: (
        (kinds.index(what.split(",")[0]), int(what.split()[-4]))
        if "after" in what
        else (len(kinds), 0)
    )
    whats = sorted(dict.fromkeys(r["what"] for r in rows), key=kind)
    for run in dict.fromkeys(r["run"] for r in rows):
        for what in whats:
            here = [r for r in rows if (r["run"], r["what"]) == (run, what)]
            both = [
                r["kl"] < SETTINGS.gate_kl and r["nll"] < SETTINGS.gate_nll
                for r in here
                if "kl" in r
            ]
            passed = f"{sum(both)} of {len(both)}" if both else "–"
            if here:
                body.append([run, what, *[by_seed(here, key) for key in FORMS], passed])
    return table(
        ["", "the stage is", "KL", "NLL", "outside the clip", "cosine", "passes the gate"], body
    )


FORMS: dict[str, Callable[[float], str]] = {
    "kl": lambda x: f"{abs(x):.4f}",
    "nll": lambda x: f"{x:+.4f}",
    "outside": lambda x: f"{x:.1%}",
    "cosine": lambda x: f"{x:.3f}",
}


def by_seed(rows: Sequence[dict[str, Any]], key: str) -> str:
    values = [
        [r[key] for r in rows if r["seed"] == seed and key in r]
        for seed in sorted({r["seed"] for r in rows})
    ]
    medians, show = [statistics.median(some) for some in values if some], FORMS[key]
    return (
        f"{show(statistics.median(medians))} [{show(min(medians))} … {show(max(medians))}]"
        if medians
        else "–"
    )


def still(losses: float, pause: float) -> float:
    """Share of its time in which a crew stands still: each loss of one of its stages stops all of
    them for `pause` seconds."""
    stopped = STAGES * losses * pause / 3600.0  # seconds of standing still per second of training
    return stopped / (1.0 + stopped)


def gains() -> str:
    rows = [
        [f"{pause:g} s", *[f"{still(losses, pause):.2%}" for losses in LOSSES]] for pause in PAUSES
    ]
    return table(
        [
            "from a loss to the next step",
            *[f"{losses:.0%} per hour and stage" for losses in LOSSES],
        ],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reroute",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="text only, one seed, short; under a minute"
    )
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="run nothing: print the tables of these results",
    )
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1, help="seed 0 was used to look at it")
    parser.add_argument("--runs", nargs="+", choices=("GRPO", "text"), default=("GRPO", "text"))
    parser.add_argument(
        "--rounds", type=int, default=3, help="of H steps each; the first is not measured"
    )
    args = parser.parse_args()
    if args.table:
        read = [row for path in args.table for row in json.loads(path.read_text())["results"]]
        print(costs(read), gains(), sep="\n\n")
        return
    torch.set_num_threads(1)
    every = 20 if args.quick else WeightsConfig().sync_every
    print(heading("reroute: a micro-batch through a stage of another crew"), flush=True)
    corpora, rows, started = (language(64), tasks(64, 400)), [], time.time()

    def run(name: str, seed: int, crews: Sequence[Crew]) -> None:
        rows.extend(
            {"run": name, "seed": seed} | row
            for row in follow(crews, every, args.rounds, random.Random(f"reroute {seed}"))
        )
        print(f"{time.time() - started:5.0f} s  {name}, seed {seed}", file=sys.stderr, flush=True)
        if args.json:
            write_json(args.json, rows)

    with Scorer() as scorer:
        seeds = range(args.first_seed, args.first_seed + (1 if args.quick else args.seeds))
        for seed in () if args.quick or "GRPO" not in args.runs else seeds:
            run("GRPO", seed, grpo(seed, scorer))
        for seed in seeds if "text" in args.runs else ():
            start = trunk(seed, corpora[0], 100 if args.quick else Size.trunk_steps)
            run(
                "text",
                seed,
                [
                    Text(copy.deepcopy(start), RATE, corpora[1], seed + 1000 * number)
                    for number in range(CREWS)
                ],
            )
    print(costs(rows), gains(), sep="\n\n", flush=True)


if __name__ == "__main__":
    main()
