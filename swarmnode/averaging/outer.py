"""φ and δ of one replica, and the step that moves them. float32 on the host, whatever the policy
computes in.

    trainer, every H inner steps                               when
    snapshot = host_copy(parameters)                           while the optimizer stands still;
    this is what partners are served
    slow = state.slow(snapshot)                                in the same moment: φ and δ that go
    with it
    mean = what the gate made of snapshot and the partner's    while inner steps go on, as bytes
    travel
    prepared = prepare(state.rule, slow, mean)                 likewise: nothing that it reads is
    ever changed in place
    state.take(prepared); state.commit(parameters, snapshot)   between two inner steps

A tensor that no partner shares is only recorded, φ ← θ, and keeps its momentum: a node that meets
nobody trains as if nothing were averaged.

The optimizer's moments are neither exchanged nor reset. Weights are set with `copy_`: multiplying a
NaN by zero leaves a NaN, and a replica that caught one could never be healed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from swarmnode.errors import StateError
from swarmnode.policy.footprint import UNDO_WEIGHTS
from swarmnode.weights.rule import Rule

Tensors = dict[str, torch.Tensor]
UNDO = "undo."


def unmoved(phi: Tensors) -> Tensors:
    """What `OuterState.load` takes for slow weights without momentum: φ, and δ = 0."""
    return {f"phi.{n}": t for n, t in phi.items()} | {
        f"delta.{n}": torch.zeros_like(t) for n, t in phi.items()
    }


def host_copy(
    parameters: Mapping[str, torch.Tensor], names: Iterable[str] | None = None
) -> Tensors:
    """Independent float32 copies on the host of all `parameters`, or of those in `names`."""
    chosen = parameters if names is None else {name: parameters[name] for name in names}
    return {
        name: p.detach().to("cpu", torch.float32, copy=True).contiguous()
        for name, p in chosen.items()
    }


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
class SlowWeights:
    """φ and δ of some tensors in one moment: the tensors themselves, which are replaced and never
    changed."""

    phi: Tensors
    delta: Tensors


@dataclass(frozen=True)
class Prepared:
    """An outer step that has been computed and not been taken. Make it with `prepare`."""

    phi: Tensors
    delta: Tensors
    squares: dict[str, float]
    """‖δ‖² of each tensor."""
    before: Tensors
    """φ that it starts from."""

    def of(self, names: Collection[str]) -> Prepared:
        """The same for the tensors in `names` alone."""
        phi, delta = {n: self.phi[n] for n in names}, {n: self.delta[n] for n in names}
        return Prepared(
            phi, delta, {n: self.squares[n] for n in names}, {n: self.before[n] for n in names}
        )


@dataclass(frozen=True)
class _Undo:
    """Everything that steps changed, as it was before the first of them."""

    phi: Tensors
    delta: Tensors
    weights: Tensors


def prepare(
    rule: Rule,
    slow: SlowWeights,
    mean: Mapping[str, torch.Tensor],
    alone: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Prepared:
    """Compute δ ← α δ + β (θ̄ − φ), φ ← φ + δ for the tensors in `mean`, and φ ← θ for those in
    `alone`. Changes nothing; for any thread.

    Args:
        mean: θ̄ of the tensors that a partner shares, float32 on the host.
        alone: θ of other tensors, of the same moment as `slow`. Nobody may change them afterwards.

    Raises:
        ValueError: A shape is not ours, or the result is not finite.
    """
    phi, delta, before = {}, {}, {}
    for name, theta in {**alone, **mean}.items():
        if name not in slow.phi or theta.shape != slow.phi[name].shape:
            raise ValueError(f"{name} is not a tensor of this replica")
        old = before[name] = slow.phi[name]
        if name not in mean:
            phi[name], delta[name] = theta, slow.delta[name]
        # gossip: exactly the mean, not the mean up to rounding
        elif rule.alpha == 0 and rule.beta == 1:
            phi[name], delta[name] = theta.clone(), torch.zeros_like(old)
        else:
            delta[name] = rule.alpha * slow.delta[name] + rule.beta * (theta - old)
            phi[name] = old + delta[name]
        if not bool(torch.isfinite(phi[name]).all()):
            raise ValueError(f"{name} would not be finite")
    return Prepared(phi, delta, {n: _square(d) for n, d in delta.items()}, before)


class OuterState:
    """The slow half of a replica.

    A step that raises has changed nothing. What was before the steps since the last `keep` is there
    for `revert`. `slow` and `tensors` may be called from any thread; everything else is for whoever
    moves the weights.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], rule: Rule) -> None:
        self.rule = rule
        self.phi = host_copy(parameters)
        self.delta = {name: torch.zeros_like(p) for name, p in self.phi.items()}
        self._squares = dict.fromkeys(self.phi, 0.0)
        self._lock = threading.Lock()
        """φ and δ of one moment, never half of each."""
        self._undo: _Undo | None = None
        self._steps = 0
        self._reverts = 0

    def slow(self, names: Collection[str]) -> SlowWeights:
        """φ and δ of the tensors in `names`, now."""
        with self._lock:
            return SlowWeights({n: self.phi[n] for n in names}, {n: self.delta[n] for n in names})

    def take(self, prepared: Prepared, *, rest: bool = False, alone: bool = False) -> bool:
        """φ and δ become what was prepared. False, and nothing changes, where φ has moved since.

        A revert takes it back with the steps before it, but for those that went before
        UNDO_WEIGHTS. rest: it belongs to the last step, which was of other tensors. alone: nobody
        else's weights are in it, and by itself it needs no revert.
        """
        with self._lock:
            if any(self.phi[name] is not old for name, old in prepared.before.items()):
                return False
            if not alone:
                self._undo = self._undo_of(prepared, rest)
            self.phi.update(prepared.phi)
            self.delta.update(prepared.delta)
            self._squares.update(prepared.squares)
            self._steps += 1
        return True

    def _undo_of(self, prepared: Prepared, rest: bool) -> _Undo:
        """What a revert needs once `prepared` is taken: of each tensor the oldest that is known."""
        undo = self._undo or _Undo({}, {}, {})
        phi = {**{n: self.phi[n] for n in prepared.phi}, **undo.phi}
        if not rest and sum(t.numel() for t in phi.values()) > max(
            UNDO_WEIGHTS, sum(t.numel() for t in prepared.phi.values())
        ):
            undo, phi = _Undo({}, {}, {}), {n: self.phi[n] for n in prepared.phi}
        return _Undo(
            phi, {**{n: self.delta[n] for n in prepared.phi}, **undo.delta}, dict(undo.weights)
        )

    @torch.no_grad()
    def commit(
        self, parameters: Mapping[str, torch.Tensor], snapshot: Mapping[str, torch.Tensor]
    ) -> None:
        """θ ← φ for the tensors of `snapshot`, keeping the inner steps taken since it was made: θ
        += φ − θ_snapshot.

        Where nothing moved in the meantime the weights become φ bit by bit, and where a weight is
        not finite it becomes φ as well.
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
        """Back to before the steps since `keep` and their commits: weights, φ and δ. False where
        there is nothing to go back to."""
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

    def keep(self) -> None:
        """The steps have proved themselves: forget what was before them."""
        self._undo = None

    @torch.no_grad()
    def adopt(self, parameters: Mapping[str, torch.Tensor], slow: SlowWeights) -> None:
        """Become another replica: its φ, δ, and θ = φ.

        Raises StateError, having changed nothing, when they are another policy's or not finite.
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
        """What a restart needs, not copied: `phi.<name>`, `delta.<name>`. Steps replace tensors, so
        these never change under a writer."""
        with self._lock:
            return {f"phi.{n}": t for n, t in self.phi.items()} | {
                f"delta.{n}": t for n, t in self.delta.items()
            }

    def undo_tensors(self) -> Tensors:
        """What `revert` needs after a restart, not copied: `undo.phi.<name>`, `undo.delta.<name>`,
        `undo.weights.<name>`; empty where there is nothing to take back."""
        if self._undo is None:
            return {}
        parts = {"phi": self._undo.phi, "delta": self._undo.delta, "weights": self._undo.weights}
        return {
            f"{UNDO}{part}.{n}": t for part, tensors in parts.items() for n, t in tensors.items()
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `tensors` gave, and `undo_tensors`. Raises StateError, having changed
        nothing, when it is another policy's."""
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
            self.rule.name,
            self._steps,
            self._reverts,
            sum(self._squares.values()) ** 0.5,
            self._undo is not None,
        )

    def _replace(self, phi: Tensors, delta: Tensors) -> None:
        with self._lock:
            self.phi, self.delta = phi, delta
        self._squares = {name: _square(tensor) for name, tensor in delta.items()}
        self._undo = None


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))
