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
from swarmnode.policy.footprint import UNDO_WEIGHTS
from swarmnode.weights.rule import NOLOCO, Rule

Tensors = dict[str, torch.Tensor]
UNDO = "undo."


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
class OuterStatistics:
    """Counts of outer steps, and their current state."""

    steps: int
    """Outer steps taken."""
    reverts: int
    momentum_norm: float
    """‖δ‖ over all tensors."""


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
    squares: dict[str, float]
    """‖δ‖² of each tensor."""
    before: Tensors
    """φ at the start of the step."""


@dataclass(frozen=True)
class _Undo:
    """State before the first outer step since the last `discard_undo`, of all changed tensors."""

    phi: Tensors
    delta: Tensors
    weights: Tensors


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
    return Prepared(phi, delta, {n: _square(d) for n, d in delta.items()}, before)


class OuterState:
    """φ and δ of a replica.

    A step that raises has changed nothing. `revert` restores the state before the steps since the
    last `discard_undo`. `slow` and `tensors` may be called from any thread, all other methods only
    from the thread that changes the weights.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], rule: Rule = NOLOCO) -> None:
        self.rule = rule
        self.phi = host_copy(parameters)
        self.delta = {name: torch.zeros_like(p) for name, p in self.phi.items()}
        self._squares = dict.fromkeys(self.phi, 0.0)
        self._lock = threading.Lock()
        """Protects φ and δ, so that readers never see half of a step."""
        self._undo: _Undo | None = None
        self._steps = 0
        self._reverts = 0

    def slow(self, names: Collection[str]) -> SlowWeights:
        """Return the current φ and δ of the tensors in `names`."""
        with self._lock:
            return SlowWeights({n: self.phi[n] for n in names}, {n: self.delta[n] for n in names})

    def take(self, prepared: Prepared, *, solo: bool = False) -> bool:
        """Replace φ and δ with those of a prepared step.

        Args:
            prepared: The step.
            solo: True if the step has no partner's weights, so that it needs no revert.

        Returns:
            False if φ has changed since `prepare`; then the step changes nothing.
        """
        with self._lock:
            if any(self.phi[name] is not old for name, old in prepared.before.items()):
                return False
            if not solo:
                self._undo = self._undo_of(prepared)
            self.phi.update(prepared.phi)
            self.delta.update(prepared.delta)
            self._squares.update(prepared.squares)
            self._steps += 1
        return True

    def _undo_of(self, prepared: Prepared) -> _Undo:
        """Return the undo state after `prepared`: the oldest known φ and δ of each tensor.

        Above UNDO_WEIGHTS weights, only the tensors of `prepared` can be reverted.
        """
        undo = self._undo or _Undo({}, {}, {})
        phi = {**{n: self.phi[n] for n in prepared.phi}, **undo.phi}
        if sum(t.numel() for t in phi.values()) > max(
            UNDO_WEIGHTS, sum(t.numel() for t in prepared.phi.values())
        ):
            undo, phi = _Undo({}, {}, {}), {n: self.phi[n] for n in prepared.phi}
        return _Undo(
            phi, {**{n: self.delta[n] for n in prepared.phi}, **undo.delta}, dict(undo.weights)
        )

    @torch.no_grad()
    def merge_parameters(
        self, parameters: Mapping[str, torch.Tensor], snapshot: Mapping[str, torch.Tensor]
    ) -> None:
        """Set θ ← θ + φ − θ_snapshot for the tensors of `snapshot`, which keeps the inner steps
        since the snapshot.

        A weight that has not changed since the snapshot, or whose new value is not finite, becomes
        exactly φ.
        """
        if (undo := self._undo) is not None:
            undo.weights.update(
                host_copy(
                    parameters, [n for n in snapshot if n in undo.phi and n not in undo.weights]
                )
            )
        for name, then in snapshot.items():
            now, phi = parameters[name], self.phi[name].to(parameters[name].device)
            then = then.to(now.device)
            moved = (phi - then).add_(now)
            still = now.float().eq(then).logical_or_(moved.isfinite().logical_not_())
            now.copy_(torch.where(still, phi, moved))

    @torch.no_grad()
    def revert(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Restore weights, φ and δ as they were before the steps since the last `discard_undo`.

        Returns:
            False if there is nothing to restore.
        """
        undo, self._undo = self._undo, None
        if undo is None:
            return False
        with self._lock:
            self.phi.update(undo.phi)
            self.delta.update(undo.delta)
        self._squares.update({name: _square(tensor) for name, tensor in undo.delta.items()})
        for name, tensor in undo.weights.items():
            parameters[name].copy_(tensor)
        self._reverts += 1
        return True

    def discard_undo(self) -> None:
        """Forget the undo state: the steps so far are final."""
        self._undo = None

    @torch.no_grad()
    def adopt(self, parameters: Mapping[str, torch.Tensor], slow: SlowWeights) -> None:
        """Take φ and δ of another replica, and set θ = φ.

        Raises:
            StateError: They belong to another policy or are not finite. Nothing is changed.
        """
        for tensors in (slow.phi, slow.delta):
            if {n: t.shape for n, t in tensors.items()} != {
                n: t.shape for n, t in self.phi.items()
            }:
                raise StateError("outer state of another policy")
            if not all(bool(torch.isfinite(t).all()) for t in tensors.values()):
                raise StateError("outer state is not finite")
        phi, delta = host_copy(slow.phi), host_copy(slow.delta)
        self._replace(phi, delta)
        for name, tensor in phi.items():
            parameters[name].copy_(tensor)

    def tensors(self) -> Tensors:
        """Return φ and δ for a checkpoint, not copied: `phi.<name>`, `delta.<name>`. Steps replace
        tensors, so these do not change while they are written."""
        with self._lock:
            return {f"phi.{n}": t for n, t in self.phi.items()} | {
                f"delta.{n}": t for n, t in self.delta.items()
            }

    def undo_tensors(self) -> Tensors:
        """Return the undo state for a checkpoint, not copied: `undo.phi.<name>`,
        `undo.delta.<name>`, `undo.weights.<name>`; empty if there is nothing to revert."""
        if self._undo is None:
            return {}
        parts = {"phi": self._undo.phi, "delta": self._undo.delta, "weights": self._undo.weights}
        return {
            f"{UNDO}{part}.{n}": t for part, tensors in parts.items() for n, t in tensors.items()
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `tensors` and `undo_tensors`.

        Raises:
            StateError: It belongs to another policy. Nothing is changed.
        """
        undo = {n.removeprefix(UNDO): t for n, t in tensors.items() if n.startswith(UNDO)}
        mine, rest = self.tensors(), {n: t for n, t in tensors.items() if not n.startswith(UNDO)}
        if {n: t.shape for n, t in rest.items()} != {n: t.shape for n, t in mine.items()}:
            raise StateError("outer state of another policy")
        of = lambda part: {
            n.removeprefix(f"{part}."): t.clone()
            for n, t in undo.items()
            if n.startswith(f"{part}.")
        }
        kept = _Undo(of("phi"), of("delta"), of("weights"))
        if any(
            {n: t.shape for n, t in half.items()}
            != {n: self.phi[n].shape for n in kept.phi if n in self.phi}
            for half in (kept.phi, kept.delta, kept.weights)
        ):
            raise StateError("an outer step of another policy")
        self._replace(
            {n: tensors[f"phi.{n}"].clone() for n in self.phi},
            {n: tensors[f"delta.{n}"].clone() for n in self.delta},
        )
        self._undo = kept if kept.phi else None

    def statistics(self) -> OuterStatistics:
        return OuterStatistics(
            self._steps,
            self._reverts,
            sum(self._squares.values()) ** 0.5,
        )

    def _replace(self, phi: Tensors, delta: Tensors) -> None:
        with self._lock:
            self.phi, self.delta = phi, delta
        self._squares = {name: _square(tensor) for name, tensor in delta.items()}
        self._undo = None


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))
