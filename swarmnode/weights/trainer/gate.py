"""The gate: checks of a partner's tensors θ_j before a weight of this node's θ_i changes
(`AveragingGate`, `LossProbe`).

The checks run in this order, and the first failure refuses the swap. d = θ_j − θ_i.

    values    finite, bounds; `weights.payload` has checked names, shapes and dtypes
    norms     ‖θ_j‖ within [½, 2] ‖θ_i‖, ‖d‖ ≤ 10 τ
    clip      θ̄ = θ_i + w · min(1, τ/‖d‖) · d, where τ² = Σ (2 × median of a block's accepted ‖d‖)²
    probe     the loss of θ̄ on own completions exceeds that of θ_i by at most ε

`examine` does everything except the probe. It needs no model, so it can run in another thread while
the model trains. `conclude` does the rest. `weights.local` defines the cost of each outcome in
reputation, `network.swaps` the backoff. The gate stores nothing about a peer but its distances in
the medians.

A hostile partner can still move the weights by at most w τ per swap, in a direction that the probe
does not detect. The clip is ClippedGossip's (arXiv 2202.01545), with a threshold that a node can
compute alone.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row
from swarmnode.policy.micro import MicroBatcher, RowTooLarge
from swarmnode.weights.fragments import block_of
from swarmnode.weights.trainer.averaged import AveragedTensors
from swarmnode.weights.trainer.outer import Tensors

CLIP: Final = 2.0
"""τ in units of the median of accepted distances."""
EPSILON: Final = 0.1
"""Upper bound of ε₀, nats per token. With 0.05 honest partners were refused, which cost more than
the hostile partners that it kept out (benchmarks/RESULTS.md)."""
ENTROPY_SHARE: Final = 0.1
"""Part of ε₀ that is proportional to the policy's loss on its own sequences, an estimate of its
entropy. For a policy at 0.3 nats per token, 0.1 nats would be a third of the entropy, and 100 nats
over an answer of 1,000 tokens."""
ERRORS: Final = 4.0
"""Part of ε₀ in standard errors of the probe. In a few short answers, a single token can dominate
the mean."""
FAR: Final = 10.0
"""Distance in units of τ from which a partner is refused."""
NORM_RATIO: Final = 2.0
"""Largest ratio of the norms of two honest replicas, either way."""
LARGEST: Final = 65504.0
"""Largest |weight|: the largest float16, far above any trained policy."""
WINDOW: Final = 32
"""Accepted distances per block in the median."""
WINDOW_PER_PEER: Final = 4
"""Maximum number of distances of one peer in a window, so that a peer cannot set its own
threshold."""
FIRST: Final = 4
"""Number of accepted distances that a median needs. Below this number, τ = 2 ‖θ_i − φ_i‖ and
`too_far` is not checked: this node may have trained for one step and the partner for fifty."""
EPSILON_RANGE: Final = 4.0
"""Upper bound of ε in units of ε₀. ε grows with the probe's usual change in accepted swaps, which
is large while a policy learns fast."""
LEAST_TAU: Final = 1e-4
"""Least τ in units of ‖θ_i‖. Without it, replicas that have become equal would refuse the first one
that learns."""
CHUNK: Final = 2**22
"""Elements that are converted to float64 at a time."""


@dataclass(frozen=True)
class Losses:
    """Result of the probe, nats per token."""

    before: float
    """Loss of this node's weights. The sequences are its own, so this estimates its entropy."""
    after: float
    """Loss of the averaged weights."""
    drift: float = 0.0
    """KL of this node's policy to the averaged one; 0 if the probe uses rewarded sequences."""
    error: float = 0.0
    """Standard error of `change` over the tokens of the probe."""

    @property
    def change(self) -> float:
        """The larger of the increase of the loss and `drift`, where there is one."""
        worse = self.after - self.before
        return max(worse, self.drift) if self.drift else worse


@dataclass(frozen=True)
class Examination:
    """Result of `examine`. If `refusal` is empty, the probe and `conclude` follow."""

    peer: str
    refusal: str
    """One of `weights.local.OUTCOMES`, or empty."""
    mine: Mapping[str, torch.Tensor] = field(default_factory=dict)
    mean: Tensors | None = None
    """θ̄."""
    relative_distance: float | None = None
    """‖d‖ / ‖θ_i‖."""
    scale: float = 0.0
    """min(1, τ/‖d‖)."""
    remembered: Mapping[int, float] = field(default_factory=dict)
    """Block → distance to add to its window."""


@dataclass(frozen=True)
class GateDecision:
    """Result of the gate. `mean` is θ̄; None if the swap is refused."""

    outcome: str
    """One of `weights.local.OUTCOMES`."""
    mean: Tensors | None = None


class AveragingGate:
    """Checks partners' tensors against this node's. All methods may be called from any thread.

    Args:
        grows: True for adapters. They start at 0, so the norms of two honest nodes may differ by
            more than NORM_RATIO. Such a swap is then refused as `too_far`, which costs no
            reputation, instead of as `norm_ratio`, which does.
    """

    def __init__(self, grows: bool = False) -> None:
        self._unequal = "too_far" if grows else "norm_ratio"
        self._distances: dict[int, deque[tuple[str, float]]] = {}
        self._changes: deque[tuple[str, float]] = deque(maxlen=WINDOW)
        self._lock = threading.Lock()
        self._scales = self._accepted = 0.0

    def examine(
        self,
        peer: str,
        mine: Mapping[str, torch.Tensor],
        theirs: Mapping[str, torch.Tensor],
        *,
        weight: float = 0.5,
        moved: float = 0.0,
    ) -> Examination:
        """Check the tensors of `peer`, without the probe. Changes nothing.

        Args:
            peer: The partner.
            mine: θ_i, float32 on the host.
            theirs: θ_j, float32 on the host.
            weight: w, from `weights.rule.mixing_weight`, clamped to [0, ½].
            moved: ‖θ_i − φ_i‖, this node's own progress. It replaces the medians until each has
                FIRST distances.
        """

        def refuse(outcome: str, relative: float | None = None) -> Examination:
            return Examination(peer, outcome, mine, relative_distance=relative)

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
        # New LoRA factors are almost 0, so the ratio of their norms means nothing. Then only the
        # distance is checked.
        if own > tau and not own / NORM_RATIO <= other <= own * NORM_RATIO:
            return refuse(self._unequal, relative)
        if known and distance > FAR * tau:
            return refuse("too_far", relative)
        scale = 1.0 if distance <= tau else tau / distance  # 0 if θ_i is 0 and has not moved
        step = scale * min(max(weight, 0.0), 0.5)
        mean = {name: t + step * (theirs[name] - t) for name, t in mine.items()}
        # Windows store clipped distances, so that one swap cannot raise the threshold far. Before
        # there is a threshold they store the full distances.
        limit = lambda block: (
            max(CLIP * (medians[block] or 0.0), LEAST_TAU * own) if known else math.inf
        )
        remembered = {block: min(distance, limit(block)) for block, distance in distances.items()}
        return Examination(peer, "", mine, mean, relative, scale, remembered)

    def conclude(self, found: Examination, losses: Losses | None = None) -> GateDecision:
        """Decide on a swap that was not refused. `losses` is None without a probe."""
        with self._lock:
            if losses is not None:
                change = losses.change
                if not change <= self._tolerance(losses):  # a NaN is refused too
                    return GateDecision("probe")
                _remember(self._changes, found.peer, abs(change))
            for block, distance in found.remembered.items():
                _remember(
                    self._distances.setdefault(block, deque(maxlen=WINDOW)), found.peer, distance
                )
            self._scales += found.scale
            self._accepted += 1
            return GateDecision("accepted" if found.scale == 1.0 else "clipped", found.mean)

    def medians(self, names: Iterable[str]) -> dict[int, float | None]:
        """Return the median accepted distance of each block of these tensors; None for a block with
        fewer than FIRST."""
        with self._lock:
            windows = {
                block: [d for _, d in self._distances.get(block, ())]
                for block in map(block_of, names)
            }
        return {
            block: statistics.median(window) if len(window) >= FIRST else None
            for block, window in windows.items()
        }

    @property
    def clip_ratio(self) -> float:
        """Mean of min(1, τ/‖d‖) over accepted swaps; 1 if nothing was clipped."""
        return self._scales / self._accepted if self._accepted else 1.0

    def _tolerance(self, losses: Losses) -> float:
        """Return ε, nats per token: twice the median change of accepted swaps, within [ε₀,
        EPSILON_RANGE ε₀]."""
        least = min(EPSILON, ENTROPY_SHARE * losses.before + ERRORS * losses.error)
        usual = (
            2 * statistics.median(c for _, c in self._changes)
            if len(self._changes) >= FIRST
            else 0.0
        )
        return min(max(least, usual), EPSILON_RANGE * least)


def threshold(medians: Mapping[int, float | None], own: float, moved: float) -> float:
    """Return τ, the norm up to which a difference is not clipped.

    Args:
        medians: Result of `AveragingGate.medians`.
        own: ‖θ_i‖.
        moved: ‖θ_i − φ_i‖, which replaces the medians if one is None.
    """
    known = [median for median in medians.values() if median is not None]
    return max(
        CLIP * (math.hypot(*known) if len(known) == len(medians) else moved), LEAST_TAU * own
    )


def norm(
    tensors: Mapping[str, torch.Tensor], minus: Mapping[str, torch.Tensor] | None = None
) -> float:
    """Return the Euclidean norm over all tensors, or of their difference to `minus`. It is computed
    in float64, so that finite tensors have a finite norm."""
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
    """Return the norm of the difference by block."""
    blocks: dict[int, list[str]] = {}
    for name in tensors:
        blocks.setdefault(block_of(name), []).append(name)
    return {
        block: norm({name: tensors[name] for name in names}, minus)
        for block, names in blocks.items()
    }


def _not_usable(theirs: Mapping[str, torch.Tensor]) -> str | None:
    """Return the outcome for values that are not finite or too large, or None."""
    for tensor in theirs.values():
        flat = tensor.reshape(-1)
        for start in range(0, flat.numel(), CHUNK):
            # `max` returns NaN if any element is NaN.
            largest = float(flat[start : start + CHUNK].abs().max())
            if not math.isfinite(largest):
                return "not_finite"
            if largest > LARGEST:
                return "bounds"
    return None


def _remember(window: deque[tuple[str, float]], peer: str, value: float) -> None:
    """Append a value of `peer`; it replaces the oldest one beyond WINDOW_PER_PEER of this peer."""
    of_peer = [entry for entry in window if entry[0] == peer]
    if len(of_peer) >= WINDOW_PER_PEER:
        window.remove(of_peer[0])
    window.append((peer, value))


# ---- probe ---------------------------------------------------------------------------------------


PROBE_SEQUENCES: Final = 16
"""Own completions that are measured; enough that a single one does not decide."""
LEAST_PROBE: Final = 8
"""Least number of completions for a verdict."""
LARGEST_LOG_RATIO: Final = 20.0

Answer = Callable[[Losses | None], None]
"""Receives the losses, from any thread; None if they could not be measured."""


class Probe(Protocol):
    """Measures averaged weights."""

    def measure(self, mine: Tensors, mean: Tensors, answer: Answer) -> bool:
        """Measure the losses of the policy with the weights `mine` and `mean`, between two steps.
        `answer` is called now or later.

        Returns:
            False if there are too few completions. `answer` is not called then, and the weights
            must not be accepted.
        """
        ...


def compare(before: Sequence[float], after: Sequence[float], rewarded: bool) -> Losses:
    """Return the losses of both policies.

    Args:
        before: Log-probabilities of the tokens under this node's policy, at least one.
        after: Log-probabilities of the same tokens under the averaged policy.
        rewarded: True if the completions were rewarded, so that the loss alone decides.
    """
    count = len(before)
    worse = [ours - theirs for ours, theirs in zip(before, after, strict=True)]
    losses = Losses(-sum(before) / count, -sum(after) / count, error=_error_of_mean(worse))
    if rewarded:
        return losses
    ratios = [min(-nats, LARGEST_LOG_RATIO) for nats in worse]
    drifts = [math.exp(r) - 1 - r for r in ratios]
    error = max(losses.error, _error_of_mean(drifts))
    return dataclasses.replace(losses, drift=sum(drifts) / count, error=error)


def _error_of_mean(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 if it is not finite."""
    count, mean = len(values), sum(values) / len(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, count - 1) / count)
    return error if math.isfinite(error) else 0.0


class LossProbe:
    """Probe for a node that holds the whole policy: it measures whether averaged weights make the
    policy worse on this node's own completions. The trainer's thread waits for it. Peers may know
    these completions, because rewarded groups are published.

    * If enough own completions were rewarded, it compares their loss under both policies: the
      averaged policy must not unlearn them.
    * Otherwise it takes any own completions and measures the KL divergence too. They were sampled
      from this node's policy p, so the mean of log p − log p̄ over their tokens estimates KL(p ‖ p̄)
      for the averaged policy p̄, and so does the mean of r − 1 − log r with r = p̄ / p, which is
      never negative.

    The second case covers a policy without any reward, where a hostile peer would otherwise be
    bounded by the gate's clip only. Without own completions, no weights are accepted.
    """

    def __init__(
        self, policy: Policy, batcher: MicroBatcher, temperature: float, tensors: AveragedTensors
    ) -> None:
        self._policy = policy
        self._batcher = batcher
        self._temperature = temperature
        self._tensors = tensors
        self._rewarded: deque[Row] = deque(maxlen=PROBE_SEQUENCES)
        self._own: deque[Row] = deque(maxlen=PROBE_SEQUENCES)

    def remember(self, rewarded: Sequence[Row], own: Sequence[Row]) -> None:
        """Store own completions.

        Args:
            rewarded: Completions with the highest reward of their group.
            own: All completions of a batch, of which a sample is stored.
        """
        completed = [row for row in own if row.tokens]
        self._rewarded.extend(row for row in rewarded if row.tokens)
        self._own.extend(completed[:: max(1, len(completed) // PROBE_SEQUENCES)])

    def measure(self, mine: Tensors, mean: Tensors, answer: Answer) -> bool:
        rewarded = len(self._rewarded) >= LEAST_PROBE
        rows = list(self._rewarded if rewarded else self._own)
        before = {name: self._tensors.parameters[name].detach().clone() for name in mine}
        while len(rows) >= LEAST_PROBE:
            with self._tensors.lock:
                try:
                    losses = compare(
                        self._logprobs(mine, rows), self._logprobs(mean, rows), rewarded
                    )
                except RowTooLarge as error:
                    rows.pop(error.row)
                    continue
                finally:
                    self._tensors.set(before)
            answer(losses)
            return True
        return False

    def _logprobs(self, tensors: Tensors, rows: list[Row]) -> list[float]:
        """Return the log-probabilities of the sampled tokens of all `rows`, concatenated."""
        self._tensors.set(tensors)
        scored = self._batcher.score(self._policy, rows, self._temperature)
        return [v for row, values in zip(rows, scored, strict=True) for v in row.at_sampled(values)]
