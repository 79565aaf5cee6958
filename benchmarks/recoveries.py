"""Every way to get a lost stage back that `benchmarks.checkfree` compares.

What the product refuses is forced here, to measure what refusing saves.

A recovery is (staged, stage, all lost stages, history, generator) → what to put there. It may look
at any stage that is not lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from swarmnode.stages.transfer import Method, Neighbour, RecoverySettings, Run, synthesise

from benchmarks.staged import STAGES, WINDOW, StageCopy, Staged
from swarmnode.errors import Refused
from swarmnode.policy.logprobs import Batch
from swarmnode.stages.model import StageRuntime, build_stage, packing
from swarmnode.stages.recovery import Pair, heal
from tests.support.split_models import whole_state

SETTINGS = RecoverySettings()
"""What the product does if nobody says otherwise."""


@dataclass
class History:
    """What others kept before the loss."""

    now: list[StageCopy]
    shadows: dict[int, list[StageCopy]]
    """Steps of age → every stage then."""
    base: list[StageCopy]
    """Every stage of what was published last."""
    probes: list[torch.Tensor]
    """The last micro-batches, newest last, (BATCH, WINDOW + 1) each: by them the gate judges."""
    pairs: list[list[Pair]]
    """Stage → what came to it and what it made of it in the micro-batches before the probes: its
    neighbours have that."""


@dataclass(frozen=True)
class Recovered:
    copy: StageCopy
    factor: float | None = None
    """Of the learning rate."""
    warmup: int = SETTINGS.warmup_steps
    """Steps, where the optimizer is fresh. The paper has none."""


Recovery = Callable[[Staged, int, tuple[int, ...], History, torch.Generator], Recovered]


def exact(
    staged: Staged, stage: int, lost: tuple[int, ...], history: History, rng: torch.Generator
) -> Recovered:
    return Recovered(history.now[stage])


def exact_fresh(
    staged: Staged, stage: int, lost: tuple[int, ...], history: History, rng: torch.Generator
) -> Recovered:
    return Recovered(history.now[stage].without_moments())


def shadow(age: int, moments: bool = True) -> Recovery:
    """As the product keeps it: float32 with Adam's moments up to `exact_bytes`, bfloat16 without
    above."""

    def recover(
        staged: Staged, stage: int, lost: tuple[int, ...], history: History, rng: torch.Generator
    ) -> Recovered:
        kept = history.shadows[age][stage]
        return Recovered(kept if moments else kept.without_moments(torch.bfloat16))

    return recover


def base(
    staged: Staged, stage: int, lost: tuple[int, ...], history: History, rng: torch.Generator
) -> Recovered:
    return Recovered(history.base[stage].without_moments())


def neighbours(
    staged: Staged, stage: int, lost: tuple[int, ...]
) -> tuple[Neighbour | None, Neighbour | None]:
    def neighbour(i: int) -> Neighbour | None:
        if not 0 <= i < STAGES or i in lost:
            return None
        return Neighbour(
            {n: p.detach() for n, p in staged.trained[i].items()}, staged.squared_norms[i]
        )

    return neighbour(stage - 1), neighbour(stage + 1)


def synthesis(method: Method, run: Run = Run(swapped=True)) -> Recovery:  # noqa: B008  (frozen)
    """The product's, in paper mode: fresh optimizer, learning rate × 1.1, no warm-up. Embedding,
    norm and head are true copies.

    The default `run` claims to be trained with swapped stages, so that copies at the ends can be
    measured where they are refused.
    """

    def recover(
        staged: Staged, stage: int, lost: tuple[int, ...], history: History, rng: torch.Generator
    ) -> Recovered:
        before, after = neighbours(staged, stage, lost)
        ends = {n: t for n, t in history.now[stage].weights.items() if ".layers." not in n}
        made = synthesise(method, staged.specs[stage], before, after, run, ends=ends, paper=True)
        return Recovered(StageCopy(made.state), made.learning_rate_factor, warmup=0)

    return recover


def with_true_ends(
    layers: Callable[[Staged, int, tuple[int, ...], torch.Generator], dict[str, torch.Tensor]],
) -> Recovery:
    """A baseline that makes the layers only; the rest as in `synthesis`."""

    def recover(
        staged: Staged, stage: int, lost: tuple[int, ...], history: History, rng: torch.Generator
    ) -> Recovered:
        kept = history.now[stage].weights
        return Recovered(StageCopy(kept | layers(staged, stage, lost, rng)), factor=1.1, warmup=0)

    return recover


def copied(
    staged: Staged, stage: int, lost: tuple[int, ...], rng: torch.Generator
) -> dict[str, torch.Tensor]:
    """The stage before, or the one after where that is lost or missing: the papers' baseline
    `copy`, at any stage."""
    sources = [i for i in (stage - 1, stage + 1) if 0 <= i < STAGES and i not in lost]
    if not sources:
        raise Refused("no neighbour is left")
    return {n: p.detach().clone() for n, p in staged.trained[sources[0]].items() if ".layers." in n}


def random_again(
    staged: Staged, stage: int, lost: tuple[int, ...], rng: torch.Generator
) -> dict[str, torch.Tensor]:
    """As at the start of the run."""
    std = staged.model.config.initializer_range
    draw = lambda p: (
        torch.ones_like(p) if p.dim() == 1 else torch.randn(p.shape, generator=rng) * std
    )
    return {n: draw(p.detach()) for n, p in staged.trained[stage].items() if ".layers." in n}


def zeroed(
    staged: Staged, stage: int, lost: tuple[int, ...], rng: torch.Generator
) -> dict[str, torch.Tensor]:
    """Every weight zero, norms included: such a block has no gradient and stays so. The authors'
    code ends there for its baselines."""
    return {n: torch.zeros_like(p) for n, p in staged.trained[stage].items() if ".layers." in n}


# ---- healing


@torch.no_grad()
def seen_by_neighbours(staged: Staged, batches: list[torch.Tensor]) -> list[list[Pair]]:
    """Stage → pairs of the policy as it is now. Each window is a prompt of one character and a
    completion of the rest."""
    found: list[list[Pair]] = [[] for _ in range(STAGES)]
    for tokens in batches:
        rows, ones = len(tokens), torch.ones(len(tokens), WINDOW, dtype=torch.bool)
        batch = Batch(tokens[:, :1], ones[:, :1].long(), torch.arange(rows), tokens[:, 1:], ones)
        out = staged.model(input_ids=tokens[:, :-1], use_cache=False, output_hidden_states=True)
        packed = [packing(batch).pack(h[:, :1], h[:, 1:]) for h in out.hidden_states]
        chosen = torch.log_softmax(out.logits, -1).gather(2, tokens[:, 1:, None])[..., 0]
        for i in range(STAGES):
            after = chosen[ones] if i == STAGES - 1 else packed[i + 1]
            found[i].append(Pair(batch, packed[i] if i else None, after, 1.0))
    return found


def distil(staged: Staged, stage: int, lost: tuple[int, ...], history: History) -> None:
    """The product's local distillation of a recovered stage. Raises Refused where the neighbours
    that saw it are lost too."""
    if set(lost) & {stage - 1, stage + 1}:
        raise Refused("the neighbour that saw what the stage did is lost too")
    spec, named = staged.specs[stage], staged.trained[stage]
    model = build_stage(
        staged.model.config, spec, lambda name: named[str(spec.local(name))].detach().clone()
    )
    heal(
        StageRuntime(spec, model),
        history.pairs[stage],
        SETTINGS.healing_steps,
        SETTINGS.healing_rate,
    )
    healed = {str(spec.local(name)): tensor for name, tensor in whole_state(spec, model).items()}
    staged.put(stage, StageCopy(healed), warmup=SETTINGS.warmup_steps)
