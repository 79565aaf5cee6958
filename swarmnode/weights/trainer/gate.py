"""The gate: checks of a partner's tensors θ_j before a weight of this node's θ_i changes
(`examine`, `LossProbe`, `passes_probe`).

The checks run in this order, and the first failure refuses the swap.

    values    finite, bounds; `weights.payload` has checked names, shapes and dtypes
    norms     ‖θ_j‖ within [½, 2] ‖θ_i‖, except for adapters
    probe     the loss of θ̄ = θ_i + w (θ_j − θ_i) on own completions exceeds that of θ_i by at most
              `tolerance`

`examine` does everything except the probe. It needs no model, so it can run in another thread while
the model trains. The probe runs between two steps. `weights.local` defines the cost of each outcome
in reputation, `network.swaps` the backoff.

The gate refuses broken partners: NaN, another model, damaged weights. It does not stop a hostile
partner; by default, all partners are known peers (docs/security.md).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row
from swarmnode.policy.micro import MicroBatcher, RowTooLarge
from swarmnode.weights.trainer.averaged import AveragedTensors
from swarmnode.weights.trainer.outer import Tensors

NORM_RATIO: Final = 2.0
"""Largest ratio of the norms of two honest replicas, either way."""
LARGEST: Final = 65504.0
"""Largest |weight|: the largest float16, far above any trained policy."""
CHUNK: Final = 2**22
"""Elements that are converted to float64 at a time."""


@dataclass(frozen=True)
class Examination:
    """Result of `examine`."""

    refusal: str = ""
    """One of `weights.local.OUTCOMES`; empty if the probe follows."""
    mean: Tensors | None = None
    """θ̄; None if the swap is refused."""
    relative_distance: float | None = None
    """‖θ_j − θ_i‖ / ‖θ_i‖; None if the swap is refused or θ_i is 0."""


def examine(
    mine: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    *,
    weight: float = 0.5,
    adapter: bool = False,
) -> Examination:
    """Check a partner's tensors, without the probe. Changes nothing.

    Args:
        mine: θ_i, float32 on the host.
        theirs: θ_j, float32 on the host.
        weight: w, from `weights.rule.mixing_weight`.
        adapter: True for the tensors of an adapter. They start at 0, so the norms of two honest
            replicas may differ by more than NORM_RATIO and are not compared.
    """
    own = norm(mine)
    if not math.isfinite(own):
        return Examination("own_not_finite")
    if refusal := _not_usable(theirs):
        return Examination(refusal)
    if not adapter and not own / NORM_RATIO <= norm(theirs) <= own * NORM_RATIO:
        return Examination("norm_ratio")
    mean = {name: t + weight * (theirs[name] - t) for name, t in mine.items()}
    relative = norm(theirs, minus=mine) / own if own > 0 else None
    return Examination("", mean, relative)


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


# ---- probe ---------------------------------------------------------------------------------------


PROBE_SEQUENCES: Final = 16
"""Own completions that are measured; enough that a single one does not decide."""
LEAST_PROBE: Final = 8
"""Minimum number of completions for a verdict."""
MAX_INCREASE: Final = 0.1
"""Largest tolerance, nats per token. One broken fragment raised the loss of a published model by
more than 5 nats. With 0.05, honest partners were refused (benchmarks/RESULTS.md)."""
INCREASE_PER_LOSS: Final = 0.1
"""Part of the tolerance that is proportional to the policy's loss on its own completions, an
estimate of its entropy. At 0.3 nats per token, 0.1 nats would be a third of the entropy."""
INCREASE_PER_ERROR: Final = 4.0
"""Part of the tolerance in standard errors of the probe. In a few short answers, a single token can
dominate the mean."""


@dataclass(frozen=True)
class Losses:
    """Result of the probe, nats per token."""

    before: float
    """Loss of this node's weights."""
    after: float
    """Loss of the averaged weights."""
    error: float = 0.0
    """Standard error of `after` − `before` over the tokens of the probe."""


def passes_probe(losses: Losses) -> bool:
    """Return True if the averaged weights may be taken. A NaN does not pass."""
    return losses.after - losses.before <= tolerance(losses)


def tolerance(losses: Losses) -> float:
    """Return the largest accepted increase of the loss, nats per token."""
    share = INCREASE_PER_LOSS * losses.before + INCREASE_PER_ERROR * losses.error
    return min(MAX_INCREASE, share)


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


def compare(before: Sequence[float], after: Sequence[float]) -> Losses:
    """Return the losses of both policies.

    Args:
        before: Log-probabilities of the tokens under this node's policy, at least one.
        after: Log-probabilities of the same tokens under the averaged policy.
    """
    count = len(before)
    worse = [ours - theirs for ours, theirs in zip(before, after, strict=True)]
    return Losses(-sum(before) / count, -sum(after) / count, _error_of_mean(worse))


def _error_of_mean(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 if it is not finite."""
    count, mean = len(values), sum(values) / len(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, count - 1) / count)
    return error if math.isfinite(error) else 0.0


class LossProbe:
    """Probe for a node that holds the whole policy: it measures whether averaged weights make the
    policy worse on this node's own completions. The trainer's thread waits for it.

    It takes completions that were rewarded, or any own completions while fewer than LEAST_PROBE
    were rewarded. Those were sampled from this node's policy, so the increase of their loss
    estimates the KL divergence to the averaged policy, and broken weights fail before the first
    reward, too. With fewer than LEAST_PROBE own completions, no weights are accepted.
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
        rows = list(self._rewarded if len(self._rewarded) >= LEAST_PROBE else self._own)
        before = {name: self._tensors.parameters[name].detach().clone() for name in mine}
        while len(rows) >= LEAST_PROBE:
            with self._tensors.lock:
                try:
                    losses = compare(self._logprobs(mine, rows), self._logprobs(mean, rows))
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
