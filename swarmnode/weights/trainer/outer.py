"""Slow weights φ and momentum δ of one replica, and the outer step. All are float32 on the host,
whatever dtype the policy computes in.

    every H inner steps (training steps):
        snapshot = host_copy(parameters)             while no optimizer step runs; partners fetch it
        slow = state.slow(snapshot)                  at the same time, φ and δ of the same tensors
        mean = gate(snapshot, partner's weights)     while inner steps continue
        prepared = prepare(state.rule, slow, mean)   while inner steps continue
        state.take(prepared)                         between two inner steps
        state.merge_parameters(parameters, snapshot) between the same two inner steps

`prepare` can run beside inner steps because no tensor of its arguments is ever changed in place.

A tensor that is not averaged in this step takes φ ← θ and keeps δ. So a node without partners
trains as if averaging were off.

The optimizer's moments are neither exchanged nor reset. Weights are set with `torch.where` and
`copy_`, not by multiplying with a mask: 0 × NaN is NaN, so a NaN could never be repaired.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from swarmnode.errors import StateError
from swarmnode.weights.rule import NOLOCO, Rule

Tensors = dict[str, torch.Tensor]


def unmoved(phi: Tensors) -> Tensors:
    """Return the tensors that `OuterState.load` expects, for these φ and δ = 0."""
    return {f"phi.{n}": t for n, t in phi.items()} | {
        f"delta.{n}": torch.zeros_like(t) for n, t in phi.items()
    }


def host_copy(
    parameters: Mapping[str, torch.Tensor], names: Iterable[str] | None = None
) -> Tensors:
    """Return float32 copies on the host of all `parameters`, or of those in `names`."""
    chosen = parameters if names is None else {name: parameters[name] for name in names}
    return {
        name: p.detach().to("cpu", torch.float32, copy=True).contiguous()
        for name, p in chosen.items()
    }


@dataclass(frozen=True)
class SlowWeights:
    """φ and δ of some tensors at one time, not copied: outer steps replace tensors and never change
    them in place."""

    phi: Tensors
    delta: Tensors


@dataclass(frozen=True)
class Prepared:
    """An outer step that is computed but not taken. Create it with `prepare`."""

    phi: Tensors
    delta: Tensors
    before: Tensors
    """φ at the start of the step."""


def prepare(
    rule: Rule,
    slow: SlowWeights,
    mean: Mapping[str, torch.Tensor],
    solo: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Prepared:
    """Compute an outer step (NoLoCo, arXiv 2506.10911, section 3.2, with γ = β).

    δ ← α δ + β (θ̄ − φ), φ ← φ + δ for the tensors in `mean`, and φ ← θ for those in `solo`.
    Changes nothing; may be called from any thread.

    Args:
        rule: α and β.
        slow: φ and δ of all these tensors.
        mean: θ̄ of the tensors that a partner shares, float32 on the host.
        solo: θ of other tensors, copied at the same time as `slow`. The step keeps references to
            them, so they must not change afterwards.

    Raises:
        ValueError: A tensor is not one of this replica, or the result is not finite.
    """
    phi, delta, before = {}, {}, {}
    for name, theta in {**solo, **mean}.items():
        if name not in slow.phi or theta.shape != slow.phi[name].shape:
            raise ValueError(f"{name} is no tensor of this replica, or has another shape")
        old = before[name] = slow.phi[name]
        if name not in mean:
            phi[name], delta[name] = theta, slow.delta[name]
        else:
            delta[name] = rule.alpha * slow.delta[name] + rule.beta * (theta - old)
            phi[name] = old + delta[name]
        if not bool(torch.isfinite(phi[name]).all()):
            raise ValueError(f"the outer step of {name} is not finite")
    return Prepared(phi, delta, before)


class OuterState:
    """φ and δ of a replica.

    A step that raises has changed nothing. `slow` and `tensors` may be called from any thread, all
    other methods only from the thread that changes the weights.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], rule: Rule = NOLOCO) -> None:
        self.rule = rule
        self.phi = host_copy(parameters)
        self.delta = {name: torch.zeros_like(p) for name, p in self.phi.items()}
        self._lock = threading.Lock()
        """Protects φ and δ, so that readers never see half of a step."""

    def slow(self, names: Collection[str]) -> SlowWeights:
        """Return the current φ and δ of the tensors in `names`."""
        with self._lock:
            return SlowWeights({n: self.phi[n] for n in names}, {n: self.delta[n] for n in names})

    def take(self, prepared: Prepared) -> bool:
        """Replace φ and δ with those of a prepared step. Return False, without effect, if φ has
        changed since `prepare`."""
        with self._lock:
            if any(self.phi[name] is not old for name, old in prepared.before.items()):
                return False
            self.phi.update(prepared.phi)
            self.delta.update(prepared.delta)
        return True

    @torch.no_grad()
    def merge_parameters(
        self, parameters: Mapping[str, torch.Tensor], snapshot: Mapping[str, torch.Tensor]
    ) -> None:
        """Set θ ← θ + φ − θ_snapshot for the tensors of `snapshot`, which keeps the inner steps
        since the snapshot.

        A weight that has not changed since the snapshot, or whose new value is not finite, becomes
        exactly φ.
        """
        for name, then in snapshot.items():
            now, phi = parameters[name], self.phi[name].to(parameters[name].device)
            then = then.to(now.device)
            moved = (phi - then).add_(now)
            still = now.float().eq(then).logical_or_(moved.isfinite().logical_not_())
            now.copy_(torch.where(still, phi, moved))

    @torch.no_grad()
    def adopt(self, parameters: Mapping[str, torch.Tensor], phi: Tensors) -> None:
        """Take φ of another replica with δ = 0, and set θ = φ."""
        copied = host_copy(phi)
        self._replace(copied, {name: torch.zeros_like(t) for name, t in copied.items()})
        for name, tensor in copied.items():
            parameters[name].copy_(tensor)

    def tensors(self) -> Tensors:
        """Return φ and δ for a checkpoint, not copied: `phi.<name>`, `delta.<name>`. Steps replace
        tensors, so these do not change while they are written."""
        with self._lock:
            return {f"phi.{n}": t for n, t in self.phi.items()} | {
                f"delta.{n}": t for n, t in self.delta.items()
            }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `tensors`.

        Raises:
            StateError: It belongs to another policy. Nothing is changed.
        """
        mine = self.tensors()
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in mine.items()}:
            raise StateError("outer state of another policy")
        self._replace(
            {n: tensors[f"phi.{n}"].clone() for n in self.phi},
            {n: tensors[f"delta.{n}"].clone() for n in self.delta},
        )

    def _replace(self, phi: Tensors, delta: Tensors) -> None:
        with self._lock:
            self.phi, self.delta = phi, delta
