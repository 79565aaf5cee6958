"""Whether averaged weights make the policy worse on sequences that no peer has seen.

    own completions that were rewarded    loss: what was learnt must not be unlearnt
    any own completions, while of these   loss and KL: they were drawn from our policy, so that the
    mean of log p − log p̄ over their tokens
    there are too few                     is its KL to the averaged one, and r − 1 − log r (r = p̄ /
    p) likewise, whichever way p̄ went

So there is a judgement while nothing has been rewarded yet, where the clip alone lets a hostile
peer in. Without any own completion nothing is taken.
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
"""Own completions on which averaged weights must not be worse: enough that one of them does not
decide."""
LEAST_PROBE: Final = 8
"""Sequences below which the probe says nothing."""
LARGEST_LOG_RATIO: Final = 20.0

Answer = Callable[[Losses | None], None]
"""Takes the verdict, from any thread; None where there is none."""


class Probe(Protocol):
    def measure(self, mine: Tensors, mean: Tensors, answer: Answer) -> bool:
        """Measure the losses with either in the policy, between two steps; `answer` is called now
        or later.

        False: there is too little to judge by, nobody will answer, and nothing may be taken.
        """
        ...


def compare(before: Sequence[float], after: Sequence[float], rewarded: bool) -> Losses:
    """What log-probabilities of the same tokens under our policy and under the averaged one mean;
    not empty, and equally many."""
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
    """Standard error of the mean; 0 where it cannot be known."""
    count, mean = len(values), sum(values) / len(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, count - 1) / count)
    return error if math.isfinite(error) else 0.0


class LossProbe:
    """Measures with a policy that is here as a whole, while the trainer's thread waits."""

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
        """Keep own completions: those that earned their group's highest reward, which averaged
        weights must not unlearn, and of all of a batch some."""
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
        """Log-probabilities of the sampled tokens of `rows`, one after the other."""
        self._tensors.set(tensors)
        scored = self._batcher.score(self._policy, rows, self._temperature)
        return [v for row, values in zip(rows, scored, strict=True) for v in row.at_sampled(values)]
