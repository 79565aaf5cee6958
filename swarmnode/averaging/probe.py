"""Whether averaged weights make the policy worse on sequences that no peer has seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from swarmnode.averaging.averaged import AveragedTensors
from swarmnode.averaging.gate import Losses
from swarmnode.averaging.outer import Tensors
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row
from swarmnode.policy.micro import MicroBatcher

PROBE_SEQUENCES: Final = 16
"""Own rewarded completions on which averaged weights must not be worse: enough that one of them does not decide."""
LEAST_PROBE: Final = 8
"""Sequences below which the probe says nothing."""

Answer = Callable[[Losses | None], None]
"""Takes the verdict, from any thread; None where there is none."""


class Probe(Protocol):
    def measure(self, mine: Tensors, mean: Tensors, answer: Answer) -> bool:
        """Measure the losses with either in the policy, between two steps; `answer` is called now or later.

        False: there is too little to judge by, and nobody will answer.
        """
        ...


class LossProbe:
    """Measures with a policy that is here as a whole, while the trainer's thread waits."""

    def __init__(self, policy: Policy, batcher: MicroBatcher, temperature: float, tensors: AveragedTensors) -> None:
        self._policy = policy
        self._batcher = batcher
        self._temperature = temperature
        self._tensors = tensors
        self._rows: deque[Row] = deque(maxlen=PROBE_SEQUENCES)

    def remember(self, rows: Sequence[Row]) -> None:
        """Keep own completions that earned their group's highest reward: averaged weights must not unlearn them."""
        self._rows.extend(rows)

    def measure(self, mine: Tensors, mean: Tensors, answer: Answer) -> bool:
        if len(self._rows) < LEAST_PROBE:
            return False
        before = {name: self._tensors.parameters[name].detach().clone() for name in mine}
        with self._tensors.lock:
            try:
                losses = Losses(self._loss(mine), self._loss(mean))
            finally:
                self._tensors.set(before)
        answer(losses)
        return True

    def _loss(self, tensors: Tensors) -> float:
        """Mean over the tokens of the sequences, nats."""
        self._tensors.set(tensors)
        values = [v for row in self._batcher.score(self._policy, list(self._rows), self._temperature) for v in row]
        return -sum(values) / max(1, len(values))
