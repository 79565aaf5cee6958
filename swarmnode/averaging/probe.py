"""The probe: measures whether averaged weights make the policy worse on own completions, which no
peer has seen.

* If enough own completions were rewarded, it compares their loss under both policies: the averaged
  policy must not unlearn them.
* Otherwise it takes any own completions and measures the KL divergence too. They were sampled from
  this node's policy p, so the mean of log p − log p̄ over their tokens estimates KL(p ‖ p̄) for the
  averaged policy p̄, and so does the mean of r − 1 − log r with r = p̄ / p, which is never negative.

The second case covers a policy without any reward, where a hostile peer would otherwise be bounded
by the gate's clip only. Without own completions, no weights are accepted.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from swarmnode.averaging.averaged import AveragedTensors
from swarmnode.averaging.gate import Losses
from swarmnode.averaging.outer import Tensors
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row
from swarmnode.policy.micro import MicroBatcher, RowTooLarge

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
    """Probe for a node that holds the whole policy. The trainer's thread waits for it."""

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
