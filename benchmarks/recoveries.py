"""Every way to get a lost stage back that `benchmarks.checkfree` compares.

A recovery is (staged, stage, all lost stages, history, generator) → what to put there. It may look
at any stage that is not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from benchmarks.staged import STAGES, StageCopy, Staged
from swarmnode.errors import Refused
from swarmnode.stages.recovery import (
    LEARNING_RATE_FACTOR,
    Neighbour,
    RecoverySettings,
    neighbour_layers,
    synthesise,
)

SETTINGS = RecoverySettings()
"""What the product does if nobody says otherwise."""


@dataclass
class History:
    """What others kept before the loss."""

    now: list[StageCopy]
    checkpoints: dict[int, list[StageCopy]]
    """Steps of age → every stage then."""
    base: list[StageCopy]
    """Every stage of what was published last."""
    probes: list[torch.Tensor]
    """The last micro-batches, newest last, (BATCH, WINDOW + 1) each: by them the gate judges."""


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


def checkpoint(age: int, moments: bool = True) -> Recovery:
    """As the product keeps it: float32 with Adam's moments up to `exact_bytes`, bfloat16 without
    above."""

    def recover(
        staged: Staged, stage: int, lost: tuple[int, ...], history: History, rng: torch.Generator
    ) -> Recovered:
        kept = history.checkpoints[age][stage]
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


def synthesis(method: Literal["checkfree", "copy", "uniform", "identity"]) -> Recovery:
    """The product's, in paper mode: fresh optimizer, learning rate × 1.1, no warm-up. Embedding,
    norm and head are true copies.

        checkfree, copy   of an inner stage, and of an end
        uniform           checkfree with equal weights
        identity          the residual branches end in zero: the stage passes its input on
    """

    def recover(
        staged: Staged, stage: int, lost: tuple[int, ...], history: History, rng: torch.Generator
    ) -> Recovered:
        (before, after), spec = neighbours(staged, stage, lost), staged.specs[stage]
        ends = {n: t for n, t in history.now[stage].weights.items() if ".layers." not in n}
        if method == "identity":
            layers = neighbour_layers(before if before is not None else after, spec)
            return Recovered(StageCopy(pass_on(layers) | ends), LEARNING_RATE_FACTOR, warmup=0)
        if (method == "copy") != (spec.has_embedding or spec.has_head):
            raise Refused(f"{method} is not for stage {stage} of {STAGES}")
        if method == "uniform":
            before, after = (near and replace(near, squared_norm=1.0) for near in (before, after))
        made = synthesise(spec, before, after, ends=ends)
        return Recovered(StageCopy(made), LEARNING_RATE_FACTOR, warmup=0)

    return recover


def pass_on(layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return layers whose residual branches end in zero."""
    branch_ends = ("self_attn.o_proj.", "mlp.down_proj.")
    return {
        name: torch.zeros_like(t) if any(end in name for end in branch_ends) else t.clone()
        for name, t in layers.items()
    }


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
