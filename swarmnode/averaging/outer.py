"""φ and δ of one replica, and the step that moves them. float32 on the host, whatever the policy computes in.

    trainer, every H inner steps                               when
    snapshot = host_copy(parameters)                           while the optimizer stands still; this is what partners are served
    mean = what the gate made of snapshot and the partner's    while inner steps go on, as bytes travel (solo: the snapshot itself)
    prepared = state.prepare(mean)                             likewise: nothing that it reads is ever changed in place
    state.take(prepared); state.commit(parameters, snapshot)   between two inner steps; `step` is prepare and take

The optimizer's moments are neither exchanged nor reset. Weights are set with `copy_`: multiplying a NaN by zero leaves a NaN, and a replica
that caught one could never be healed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from swarmnode.errors import StateError
from swarmnode.weights.rule import Rule

Tensors = dict[str, torch.Tensor]


def host_copy(parameters: Mapping[str, torch.Tensor], names: Iterable[str] | None = None) -> Tensors:
    """Independent float32 copies on the host of all `parameters`, or of those in `names`."""
    chosen = parameters if names is None else {name: parameters[name] for name in names}
    return {name: p.detach().to("cpu", torch.float32, copy=True).contiguous() for name, p in chosen.items()}


def blend(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], weight: float = 0.5) -> Tensors:
    """θ_i + w (θ_j − θ_i), ungated: for tests, benchmarks and our own tensors."""
    return {name: t + weight * (theirs[name] - t) for name, t in mine.items()}


def average(replicas: Sequence[Mapping[str, torch.Tensor]]) -> Tensors:
    """Mean over replicas, for `diloco` and for a merge before export."""
    return {name: torch.stack([r[name] for r in replicas]).mean(0) for name in replicas[0]}


@dataclass(frozen=True)
class OuterStatistics:
    rule: str
    steps: int
    """Outer steps taken."""
    reverts: int
    momentum_norm: float
    """‖δ‖ over all tensors."""
    revertible: bool


@dataclass(frozen=True)
class _Before:
    """Everything the last step changed, as it was."""

    phi: Tensors
    delta: Tensors
    weights: Tensors


@dataclass(frozen=True)
class Prepared:
    """An outer step that has been computed and not been taken. Make it with `OuterState.prepare`."""

    phi: Tensors
    delta: Tensors
    squares: dict[str, float]
    """‖δ‖² of each tensor."""
    before: Tensors
    """φ that it starts from."""


class OuterState:
    """The slow half of a replica.

    A step that raises has changed nothing. One earlier state is kept for `revert`. `prepare` may run in another thread; everything else is
    for whoever moves the weights.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], rule: Rule) -> None:
        self.rule = rule
        self.phi = host_copy(parameters)
        self.delta = {name: torch.zeros_like(p) for name, p in self.phi.items()}
        self._squares = dict.fromkeys(self.phi, 0.0)
        self._lock = threading.Lock()
        """φ and δ of one moment, never half of each."""
        self._before: _Before | None = None
        self._steps = 0
        self._reverts = 0

    def step(self, mean: Mapping[str, torch.Tensor], mean_phi: Mapping[str, torch.Tensor] | None = None) -> None:
        """One outer step; arguments and errors as of `prepare`."""
        self.take(self.prepare(mean, mean_phi))

    def prepare(self, mean: Mapping[str, torch.Tensor], mean_phi: Mapping[str, torch.Tensor] | None = None) -> Prepared:
        """δ ← α δ + β (θ̄ − φ), φ ← φ + δ for the tensors in `mean`: all, or one fragment's. Changes nothing yet.

        mean: θ̄, float32 on the host. mean_phi: mean of φ over the pair, only for `noloco_two`, whose form is
        δ ← α δ + β (θ̄ − φ̄) + γ (φ̄ − φ) (paper, equation 2 with the sign of its proof).
        Raises ValueError when a shape is not ours or the result is not finite.
        """
        rule = self.rule
        if (mean_phi is None) == (rule.name == "noloco_two"):
            raise ValueError("mean_phi goes with noloco_two and only with it")
        with self._lock:
            slow_before, delta_before = dict(self.phi), dict(self.delta)
        phi, delta, before = {}, {}, {}
        for name, theta in mean.items():
            if name not in slow_before or theta.shape != slow_before[name].shape:
                raise ValueError(f"{name} is not a tensor of this replica")
            old = before[name] = slow_before[name]
            if rule.alpha == 0 and rule.beta == 1:  # gossip: exactly the mean, not the mean up to rounding
                phi[name], delta[name] = theta.clone(), torch.zeros_like(old)
            else:
                if mean_phi is None:
                    delta[name] = rule.alpha * delta_before[name] + rule.beta * (theta - old)
                else:
                    slow = mean_phi[name]
                    delta[name] = rule.alpha * delta_before[name] + rule.beta * (theta - slow) + rule.gamma * (slow - old)
                phi[name] = old + delta[name]
            if not bool(torch.isfinite(phi[name]).all()):
                raise ValueError(f"{name} would not be finite")
        return Prepared(phi, delta, {n: _square(d) for n, d in delta.items()}, before)

    def take(self, prepared: Prepared) -> bool:
        """φ and δ become what was prepared. False, and nothing changes, where φ has moved since."""
        with self._lock:
            if any(self.phi[name] is not old for name, old in prepared.before.items()):
                return False
            self._before = _Before({n: self.phi[n] for n in prepared.phi}, {n: self.delta[n] for n in prepared.phi}, {})
            self.phi.update(prepared.phi)
            self.delta.update(prepared.delta)
            self._squares.update(prepared.squares)
            self._steps += 1
        return True

    @torch.no_grad()
    def commit(self, parameters: Mapping[str, torch.Tensor], snapshot: Mapping[str, torch.Tensor]) -> None:
        """θ ← φ for the tensors of `snapshot`, keeping the inner steps taken since it was made: θ += φ − θ_snapshot.

        Where nothing moved in the meantime the weights become φ bit by bit, and where a weight is not finite it becomes φ as well.
        """
        if self._before is not None:
            self._before.weights.update(host_copy(parameters, snapshot))
        for name, then in snapshot.items():
            now, phi = parameters[name], self.phi[name].to(parameters[name].device)
            then = then.to(now.device)
            moved = (phi - then).add_(now)
            still = now.float().eq(then).logical_or_(moved.isfinite().logical_not_())
            now.copy_(torch.where(still, phi, moved))

    @torch.no_grad()
    def revert(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Back to before the last step and its commit: weights, φ and δ of its tensors. False where there is nothing to go back to."""
        before, self._before = self._before, None
        if before is None:
            return False
        with self._lock:
            self.phi.update(before.phi)
            self.delta.update(before.delta)
        self._squares.update({name: _square(tensor) for name, tensor in before.delta.items()})
        for name, tensor in before.weights.items():
            parameters[name].copy_(tensor)
        self._reverts += 1
        return True

    def keep(self) -> None:
        """The last step has proved itself: forget what was before it."""
        self._before = None

    @torch.no_grad()
    def adopt(self, parameters: Mapping[str, torch.Tensor], phi: Mapping[str, torch.Tensor], delta: Mapping[str, torch.Tensor]) -> None:
        """Become another replica: its φ, δ, and θ = φ.

        Raises StateError, having changed nothing, when they are another policy's or not finite.
        """
        for tensors in (phi, delta):
            if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in self.phi.items()}:
                raise StateError("outer state of another policy")
            if not all(bool(torch.isfinite(t).all()) for t in tensors.values()):
                raise StateError("outer state is not finite")
        slow, momentum = host_copy(phi), host_copy(delta)
        with self._lock:
            self.phi, self.delta = slow, momentum
        self._squares = {name: _square(tensor) for name, tensor in self.delta.items()}
        self._before = None
        for name, tensor in self.phi.items():
            parameters[name].copy_(tensor)

    def tensors(self) -> Tensors:
        """What a restart needs, not copied: `phi.<name>`, `delta.<name>`. Steps replace tensors, so these never change under a writer."""
        return {f"phi.{n}": t for n, t in self.phi.items()} | {f"delta.{n}": t for n, t in self.delta.items()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `tensors` gave. Raises StateError, having changed nothing, when it is another policy's."""
        mine = self.tensors()
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in mine.items()}:
            raise StateError("outer state of another policy")
        with self._lock:
            self.phi = {n: tensors[f"phi.{n}"].clone() for n in self.phi}
            self.delta = {n: tensors[f"delta.{n}"].clone() for n in self.delta}
        self._squares = {name: _square(tensor) for name, tensor in self.delta.items()}
        self._before = None

    def statistics(self) -> OuterStatistics:
        return OuterStatistics(self.rule.name, self._steps, self._reverts, sum(self._squares.values()) ** 0.5, self._before is not None)


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))
