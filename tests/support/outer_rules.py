"""Outer rules that no node runs, for benchmarks and tests.

noloco_two   the paper's form: δ ← α δ + β (θ̄ − φ̄) + γ (φ̄ − φ), which needs the partner's φ too
diloco       θ̄ over all replicas at once
off          no averaging: θ̄ = θ, so that φ follows θ
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from swarmnode.weights.rule import Rule
from swarmnode.weights.trainer.gate import Losses, examine, passes_probe
from swarmnode.weights.trainer.outer import OuterState, SlowWeights, Tensors, prepare

OFF: Final = Rule(0.0, 1.0)
DILOCO: Final = Rule(0.3, 0.7)


def blend(
    mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], weight: float = 0.5
) -> Tensors:
    """Return θ_i + w (θ_j − θ_i), without a gate."""
    return {name: t + weight * (theirs[name] - t) for name, t in mine.items()}


def average(replicas: Sequence[Mapping[str, torch.Tensor]]) -> Tensors:
    """Return the mean over replicas."""
    return {name: torch.stack([r[name] for r in replicas]).mean(0) for name in replicas[0]}


def outer_step(state: OuterState, mean: Mapping[str, torch.Tensor]) -> None:
    """Take one outer step at once. Raises ValueError as `outer.prepare` does."""
    assert state.take(
        prepare(state.rule, state.slow([name for name in mean if name in state.phi]), mean)
    )


def solo_step(state: OuterState, theta: Mapping[str, torch.Tensor]) -> None:
    """Take an outer step without a partner: φ ← θ, and δ is unchanged."""
    slow = state.slow(list(theta))
    assert state.take(prepare(state.rule, SlowWeights(slow.phi, slow.delta), {}, theta))


def outer_step_of_two_tensors(
    state: OuterState, mean: Mapping[str, torch.Tensor], mean_phi: Mapping[str, torch.Tensor]
) -> None:
    """Apply δ ← α δ + β (θ̄ − φ̄) + γ (φ̄ − φ), φ ← φ + δ: equation 2 of the paper, with the sign
    of its proof and γ = β."""
    rule = state.rule
    for name, theta in mean.items():
        slow = mean_phi[name]
        delta = (
            rule.alpha * state.delta[name]
            + rule.beta * (theta - slow)
            + rule.beta * (slow - state.phi[name])
        )
        state.delta[name], state.phi[name] = delta, state.phi[name] + delta


def judge(
    mine: Tensors,
    theirs: Tensors,
    *,
    weight: float = 0.5,
    adapter: bool = False,
    probe: Callable[[Mapping[str, torch.Tensor]], float] | None = None,
) -> tuple[str, Tensors | None]:
    """Run all checks of the gate at once.

    Args:
        probe: Returns the loss with these tensors, nats per token.

    Returns:
        (outcome, θ̄ or None).
    """
    found = examine(mine, theirs, weight=weight, adapter=adapter)
    if found.mean is None:
        return found.refusal, None
    if probe and not passes_probe(Losses(probe(mine), probe(found.mean))):
        return "probe", None
    return "accepted", found.mean
