"""What a peer's tensors go through before one of our weights moves, in this order; the first
failure ends it.

    like mine?         names, dtype, shape, bounds → finite → norms: ‖θ_j‖ within [½, 2] ‖θ_i‖, ‖d‖
    ≤ 10 τ
    clip               θ̄ = θ_i + w · min(1, τ/‖d‖) · d,   d = θ_j − θ_i,   τ² = Σ (2 × running
    median of accepted ‖d‖ of a block)²
    probe              loss of θ̄ on sequences that no peer has seen, not worse than that of θ_i by
    more than ε

`examine` is everything but the probe and needs no model, so another thread can do it while the
model trains; `conclude` is the rest. Sizes were checked before anything was allocated
(`weights.payload`). What an outcome costs its sender is in `weights.local`, and how long it is left
alone in `weights.exchange`; the gate judges each exchange by itself.

After the commit `revert_monitor` decides whether to take it back. What is left to a hostile partner
is a nudge of at most w τ per exchange, in a direction that does not hurt on the probe
(ClippedGossip, arXiv 2202.01545, with a threshold that a node can compute by itself).
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from swarmnode.averaging.outer import Tensors
from swarmnode.weights.fragments import block_of
from swarmnode.weights.local import OUTCOMES, TAKEN

CLIP: Final = 2.0
EPSILON: Final = 0.1
"""Least ε of a policy of one nat per token or more: nats per token that averaged weights may be
worse on the probe. At 0.05 honest partners were refused, which cost more than the hostile ones that
it kept out (benchmarks/RESULTS.md)."""
ENTROPY_SHARE: Final = 0.1
"""Least ε of a policy of less entropy, in units of that: 0.1 nats of 0.3 per token would be another
policy, and over the 1,000 tokens of an answer any."""
ERRORS: Final = 4.0
"""Standard errors of the probe that the least ε has on top: in a few short answers, one token
decides."""
FAR: Final = 10.0
"""Distance in units of τ that no honest replica has."""
NORM_RATIO: Final = 2.0
LARGEST: Final = 65504.0
"""Largest |weight|: that of float16, which no trained policy comes near."""
WINDOW: Final = 32
"""Accepted distances per block that the median runs over."""
WINDOW_PER_PEER: Final = 4
"""Most of these from one peer: an eager peer must not set the threshold that it is held to."""
FIRST: Final = 4
"""Accepted distances before the median is believed. Until then τ is 2 ‖θ_i − φ_i‖, and nobody is
called far away: we may have trained for one step and the partner for fifty."""
EPSILON_RANGE: Final = 4.0
"""ε grows with what honest exchanges do to the probe (a policy that learns fast moves it up and
down), but no further than this times the least ε."""
LEAST_TAU: Final = 1e-4
"""Least τ in units of ‖θ_i‖. Replicas that have become equal would otherwise call the first one
that learns an attacker."""
CHUNK: Final = 2**22


@dataclass(frozen=True)
class Losses:
    """Nats per token on the probe's sequences."""

    before: float
    """Loss of our weights as they are. The sequences are our own, so that it estimates the entropy
    of our policy."""
    after: float
    """Loss with the average in their place."""
    drift: float = 0.0
    """KL of our policy to the averaged one, nats per token; 0 where the sequences are ones that
    earned a reward."""
    error: float = 0.0
    """Standard error of `change`, over the tokens of the probe."""

    @property
    def change(self) -> float:
        """By how much the average is worse, in whichever way it is worse."""
        worse = self.after - self.before
        return max(worse, self.drift) if self.drift else worse


@dataclass(frozen=True)
class Examination:
    """What `examine` found. `refusal` empty: the probe and `conclude` come next."""

    peer: str
    refusal: str
    mine: Mapping[str, torch.Tensor]
    mean: Tensors | None = None
    """The average that the probe has to look at; for a newcomer not what will be taken."""
    relative_distance: float | None = None
    """‖d‖ / ‖θ_i‖."""
    scale: float = 0.0
    """min(1, τ/‖d‖)."""
    remembered: Mapping[int, float] = field(default_factory=dict)
    """Distance of each block that goes into its median."""
    probation: bool = False


@dataclass(frozen=True)
class GateDecision:
    """`mean` is θ̄, None where the exchange is refused: take a solo outer step then."""

    outcome: str
    """One of `outcomes.OUTCOMES`."""
    mean: Tensors | None = None

    @property
    def ok(self) -> bool:
        return self.mean is not None


@dataclass(frozen=True)
class GateStatistics:
    outcomes: dict[str, int]
    """Counts by outcome, of those that occurred."""
    clip_ratio: float
    """Mean of min(1, τ/‖d‖) over accepted exchanges; 1 when nothing was clipped."""
    relative_distance: float | None
    """Distance of the last exchange that was measured."""
    tau: dict[int, float]
    """Threshold by block."""


class AveragingGate:
    """Judges peers' tensors against ours. Every method may be called from any thread.

    grows: an honest node's may have twice the norm of another's, as those of an adapter do, which
    starts at 0.
    """

    def __init__(self, grows: bool = False) -> None:
        self._unequal = "too_far" if grows else "norm_ratio"
        self._distances: dict[int, deque[tuple[str, float]]] = {}
        self._changes: deque[tuple[str, float]] = deque(maxlen=WINDOW)
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._scales = 0.0
        self._relative: float | None = None

    def examine(
        self,
        peer: str,
        mine: Mapping[str, torch.Tensor],
        theirs: Mapping[str, torch.Tensor],
        *,
        weight: float = 0.5,
        moved: float = 0.0,
        probation: bool = False,
    ) -> Examination:
        """Look at `theirs` from `peer`; both are float32 on the host and neither is changed. Counts
        nothing.

        weight: `rule.mixing_weight`, clamped to [0, ½]. moved: ‖θ_i − φ_i‖, how far we came by
        ourselves: stands in for the median until enough was accepted. probation: look at the mean
        with ½, and have `conclude` give θ_i itself (for newcomers).
        """

        def refuse(outcome: str, relative: float | None = None) -> Examination:
            return Examination(peer, outcome, mine, relative_distance=relative)

        if refusal := _unlike(mine, theirs):
            return refuse(refusal)
        own = norm(mine)
        if not math.isfinite(own):
            return refuse("own_not_finite")
        if refusal := _not_usable(theirs):
            return refuse(refusal)
        medians = self.medians(mine)
        tau = threshold(medians, own, moved)
        known = None not in medians.values()
        distances = _by_block(theirs, mine)
        other, distance = norm(theirs), math.hypot(*distances.values())
        relative = distance / own if own > 0 else None
        # young LoRA factors are all but zero, and their ratio says nothing; then the distance
        # decides
        if own > tau and not own / NORM_RATIO <= other <= own * NORM_RATIO:
            return refuse(self._unequal, relative)
        if known and distance > FAR * tau:
            return refuse("too_far", relative)
        scale = 1.0 if distance <= tau else tau / distance  # 0 where neither of us has a weight yet
        step = scale * (0.5 if probation else min(max(weight, 0.0), 0.5))
        mean = {name: t + step * (theirs[name] - t) for name, t in mine.items()}
        # clipped, so that no accepted exchange can raise the threshold by more than the others
        # would; whole while there is no threshold
        limit = lambda block: (
            max(CLIP * (medians[block] or 0.0), LEAST_TAU * own) if known else math.inf
        )
        remembered = {block: min(distance, limit(block)) for block, distance in distances.items()}
        return Examination(peer, "", mine, mean, relative, scale, remembered, probation)

    def conclude(self, found: Examination, losses: Losses | None = None) -> GateDecision:
        """Decide about what was examined, and count it. losses: None where nothing is probed."""
        with self._lock:
            if found.relative_distance is not None:
                self._relative = found.relative_distance
            if found.mean is None:
                return self._ended(found.refusal)
            if losses is not None:
                change = losses.change
                if not change <= self._tolerance(losses):  # a NaN is refused too
                    return self._ended("probe")
                _remember(self._changes, found.peer, abs(change))
            for block, distance in found.remembered.items():
                _remember(
                    self._distances.setdefault(block, deque(maxlen=WINDOW)), found.peer, distance
                )
            self._scales += found.scale
            if found.probation:
                return self._ended("probation", dict(found.mine))
            return self._ended("accepted" if found.scale == 1.0 else "clipped", found.mean)

    def refused(self, outcome: str) -> None:
        """Count what others than the gate found: payload, lagging, lora_residual, reverted. Raises
        KeyError for no outcome."""
        OUTCOMES[outcome]
        with self._lock:
            self._ended(outcome)

    def medians(self, names: Iterable[str]) -> dict[int, float | None]:
        """Distance of what was accepted of these tensors, by block; None where that was too
        little."""
        with self._lock:
            windows = {
                block: [d for _, d in self._distances.get(block, ())]
                for block in map(block_of, names)
            }
        return {
            block: statistics.median(window) if len(window) >= FIRST else None
            for block, window in windows.items()
        }

    def statistics(self) -> GateStatistics:
        with self._lock:
            taken = sum(self._outcomes[o] for o in (*TAKEN, "probation"))
            return GateStatistics(
                outcomes=dict(self._outcomes),
                clip_ratio=self._scales / taken if taken else 1.0,
                relative_distance=self._relative,
                tau={
                    block: CLIP * statistics.median(d for _, d in window)
                    for block, window in self._distances.items()
                },
            )

    def _tolerance(self, losses: Losses) -> float:
        """ε, nats per token."""
        least = min(EPSILON, ENTROPY_SHARE * losses.before + ERRORS * losses.error)
        usual = (
            2 * statistics.median(c for _, c in self._changes)
            if len(self._changes) >= FIRST
            else 0.0
        )
        return min(max(least, usual), EPSILON_RANGE * least)

    def _ended(self, outcome: str, mean: Tensors | None = None) -> GateDecision:
        self._outcomes[outcome] += 1
        return GateDecision(outcome, mean)


def threshold(medians: Mapping[int, float | None], own: float, moved: float) -> float:
    """τ, the length up to which a difference of tensors is taken whole. medians: as
    `AveragingGate.medians`; own: their norm."""
    known = [median for median in medians.values() if median is not None]
    return max(
        CLIP * (math.hypot(*known) if len(known) == len(medians) else moved), LEAST_TAU * own
    )


def norm(
    tensors: Mapping[str, torch.Tensor], minus: Mapping[str, torch.Tensor] | None = None
) -> float:
    """Euclidean norm over all tensors, of their difference where `minus` is given; in float64, so
    that nothing finite overflows."""
    total = 0.0
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        other = None if minus is None else minus[name].reshape(-1)
        for start in range(0, flat.numel(), CHUNK):  # a float64 copy of one chunk only
            part = flat[start : start + CHUNK].double()
            if other is not None:
                part -= other[start : start + CHUNK]
            total += float(part.dot(part))
    return math.sqrt(total) if total >= 0 else math.nan


def _by_block(
    tensors: Mapping[str, torch.Tensor], minus: Mapping[str, torch.Tensor]
) -> dict[int, float]:
    """Norm of the difference in each block."""
    blocks: dict[int, list[str]] = {}
    for name in tensors:
        blocks.setdefault(block_of(name), []).append(name)
    return {
        block: norm({name: tensors[name] for name in names}, minus)
        for block, names in blocks.items()
    }


def _unlike(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> str | None:
    if mine.keys() != theirs.keys():
        return "names"
    if any(
        theirs[n].dtype != t.dtype or theirs[n].layout != torch.strided for n, t in mine.items()
    ):
        return "dtype"
    if any(theirs[n].shape != t.shape for n, t in mine.items()):
        return "shape"
    return None


def _not_usable(theirs: Mapping[str, torch.Tensor]) -> str | None:
    for tensor in theirs.values():
        flat = tensor.reshape(-1)
        for start in range(0, flat.numel(), CHUNK):
            # a NaN anywhere is the maximum
            largest = float(flat[start : start + CHUNK].abs().max())
            if not math.isfinite(largest):
                return "not_finite"
            if largest > LARGEST:
                return "bounds"
    return None


def _remember(window: deque[tuple[str, float]], peer: str, value: float) -> None:
    of_peer = [entry for entry in window if entry[0] == peer]
    if len(of_peer) >= WINDOW_PER_PEER:
        window.remove(of_peer[0])
    window.append((peer, value))
