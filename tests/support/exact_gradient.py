"""The exact gradient of a tiny policy, and mean and variance of every off-policy estimator of it.

All completions, of at most two tokens, are enumerated, so nothing is sampled. The policy is trained
by its exact gradient (Adam); completions are those of the policy `lag` steps before. The estimators
are the product's own loss and weights (`rl.objectives`, `rl.corrections`).

    bias       |E[estimate] − exact| ÷ |exact|
    deviation  sqrt(trace of the covariance of one completion's estimate) ÷ |exact|
    effective  effective sample size ÷ sample size of the weights, by token
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from swarmnode.config import TrainingConfig
from swarmnode.rl.corrections import (
    Correction,
    Level,
    effective_share,
    importance_weights,
    sequence_correction,
)
from swarmnode.rl.objectives import Objective, policy_loss

WORDS = 8
"""Size of the vocabulary; token 0 ends the completion."""
LAGS = (0, 1, 2, 4, 8, 16, 32)
"""Steps between the sampling policy and the trained one."""
RIGHT = 0.1
"""Share of rewarded completions."""
LEARNING_RATE = 0.05
"""Adam's. In 32 steps the policy goes from one success in ten to most."""
FLOORS = (0.1, 0.5, 0.8)


@dataclass(frozen=True)
class World:
    """All N completions and their rewards."""

    first: torch.Tensor
    """(N,)."""
    second: torch.Tensor
    """(N,), 0 where there is no second token."""
    mask: torch.Tensor
    """(N, 2) bool."""
    rewards: torch.Tensor
    """(N,)."""


def make_world(seed: int) -> tuple[World, torch.Tensor]:
    """Return a world and the logits (WORDS + 1, WORDS) of a policy: row 0 for the first token, row
    1 + a for the second token after a."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [(0, 0, False)] + [(a, b, True) for a in range(1, WORDS) for b in range(WORDS)]
    first, second = torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])
    mask = torch.stack(
        [torch.ones(len(pairs), dtype=torch.bool), torch.tensor([p[2] for p in pairs])], 1
    )
    rewards = torch.zeros(len(pairs), dtype=torch.float64)
    rewards[
        torch.randperm(len(pairs), generator=generator)[: max(2, round(RIGHT * len(pairs)))]
    ] = 1.0
    return World(first, second, mask, rewards), torch.randn(
        WORDS + 1, WORDS, generator=generator, dtype=torch.float64
    )


def logprobs_of(world: World, logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token, (N, 2); 0 where there is none."""
    rows = logits.log_softmax(-1)
    return torch.stack(
        [rows[0, world.first], rows[1 + world.first, world.second] * world.mask[:, 1]], 1
    )


def trained(world: World, logits: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Return the policy after 0, 1, … `steps` steps of exact gradient ascent."""
    logits = logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
    policies = [logits.detach().clone()]
    for _ in range(steps):
        optimizer.zero_grad()
        (-(logprobs_of(world, logits).sum(1).exp() * world.rewards).sum()).backward()
        optimizer.step()
        policies.append(logits.detach().clone())
    return policies


@dataclass(frozen=True)
class Estimator:
    """Inputs of `policy_loss` for completions of `sampler` when the policy is `now`."""

    old: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(now, sampler), each (N, T) → denominator of the ratio."""
    weights: Callable[[World, torch.Tensor, torch.Tensor], torch.Tensor]
    """(world, now, sampler) → weights (N, T)."""
    objective: Objective


def estimators() -> dict[str, Estimator]:
    clips = lambda name: Objective.of(TrainingConfig(loss_type=name))
    now_itself = lambda now, sampler: now
    the_sampler = lambda now, sampler: sampler
    ones = lambda world, now, sampler: torch.ones_like(now)

    def corrected(kind: Correction, level: Level) -> Estimator:
        weights = lambda world, now, sampler: importance_weights(
            now, sampler, world.mask, kind, level
        ).double()
        return Estimator(now_itself, weights, clips("dapo"))

    def foreign(floor: float, masks: bool) -> Estimator:
        def weights(world: World, now: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
            some = sequence_correction(
                now.sum(1), sampler.sum(1), world.mask.sum(1), floor=floor if masks else 0.0
            ).double()
            return (some if masks else some.clamp(min=floor)).unsqueeze(1).expand_as(now)

        return Estimator(now_itself, weights, clips("dapo"))

    known = {
        "uncorrected": Estimator(now_itself, ones, clips("dapo")),
        "ratio against the sampler, clipped (dapo)": Estimator(the_sampler, ones, clips("dapo")),
        "gspo against the sampler": Estimator(the_sampler, ones, clips("gspo")),
        "cispo against the sampler": Estimator(the_sampler, ones, clips("cispo")),
    }
    known |= {
        f"{kind}, {level}": corrected(kind, level)
        for level in get_args(Level)
        for kind in get_args(Correction)
    }
    known |= {f"at most 1, at least {floor:g}": foreign(floor, masks=False) for floor in FLOORS}
    known |= {f"at most 1, masked below {floor:g}": foreign(floor, masks=True) for floor in FLOORS}
    return known


def measure(
    world: World,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    jacobian: torch.Tensor,
    estimator: Estimator,
) -> dict[str, float]:
    """Return exact bias, deviation and effective share.

    Args:
        ours, theirs: Log-probabilities (N, 2) of the policy and of the sampler.
        jacobian: (N, 2, P), of `ours`.
    """
    drawn = theirs.sum(1).exp()  # (N,) probability of each completion under the sampler
    # a large group's mean is the sampler's expectation
    worth = world.rewards - (drawn * world.rewards).sum()
    exact = torch.einsum("n,n,ntp->p", ours.sum(1).exp(), world.rewards, jacobian)

    weights = estimator.weights(world, ours, theirs) * world.mask
    leaf = ours.clone().requires_grad_()
    # per completion: a loss that averages over a sequence is multiplied by its length
    loss = policy_loss(
        leaf,
        estimator.old(ours, theirs),
        worth,
        world.mask,
        estimator.objective,
        1.0,
        weights=weights,
    ).loss
    (per_token,) = torch.autograd.grad(-loss, leaf)
    if estimator.objective.loss_type in ("grpo", "gspo"):
        per_token = per_token * world.mask.sum(1, keepdim=True)
    each = torch.einsum("nt,ntp->np", per_token, jacobian)  # (N, P)
    mean = (drawn.unsqueeze(1) * each).sum(0)
    variance = (drawn * (each - mean).square().sum(1)).sum()
    tokens = (drawn.unsqueeze(1) * world.mask).sum()
    total, squares = ((drawn.unsqueeze(1) * weights**power).sum() for power in (1, 2))
    size = float(exact.norm())
    return {
        "bias": float((mean - exact).norm()) / size,
        "deviation": float(variance.sqrt()) / size,
        "effective": effective_share(float(total), float(squares), float(tokens)) or 0.0,
        "divergence": float((drawn * (theirs - ours).sum(1)).sum() / tokens),
    }


def run(seed: int, lags: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for every estimator and lag of one seed."""
    world, start = make_world(seed)
    policies = trained(world, start, max(LAGS))
    ours = logprobs_of(world, policies[-1])
    jacobian = torch.autograd.functional.jacobian(
        lambda logits: logprobs_of(world, logits), policies[-1]
    ).flatten(2)
    return [
        {
            "seed": seed,
            "lag": lag,
            "estimator": name,
            **measure(world, ours, logprobs_of(world, policies[-1 - lag]), jacobian, estimator),
        }
        for lag in lags
        for name, estimator in estimators().items()
    ]
