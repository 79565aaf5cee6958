"""What must be true of crews whatever fails: the history of a simulated swarm is held to it while
it happens.

steps       of one crew every stage takes each step once, and all the same micro-batches
hashes      whoever is at one step hash took the same step from the same hash; two stages of a crew
that runs are at the same
weights     of one block at one hash there is one set of weights, wherever every restoration was
exact
crews       a record is signed by each of its members, and each of them had signed nothing else then
nothing     lost: what runs in the end is not behind what live nodes could have gone on from
fences      a node computes for its own crew and for no other
calm        a crew whose members are well ends for nobody outside it, and stands still for nobody
outside it
"""

from __future__ import annotations

from collections import Counter
from typing import Any


class Violation(AssertionError):
    """Raised when something that must be true is not."""


class History:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        """Of virtual time, when it ended."""
        self.learnt: set[bytes] = set()
        """Step hashes of steps that were taken."""
        self._steps: dict[tuple[bytes, int], tuple[tuple[int, ...], bytes]] = {}
        self._taken: set[tuple[bytes, int, int]] = set()
        self._weights: dict[tuple[tuple[int, int], bytes], bytes] = {}

    def note(self, now: float, what: str, *details: object) -> None:
        self.counts[what] += 1

    def took(
        self, crew: bytes, stage: int, stages: int, weights: Any, micro_batches: tuple[int, ...]
    ) -> None:
        """Stage `stage` of `crew` is at `weights` now."""
        key = crew, weights.step
        self.learnt.add(weights.hash)
        known = self._steps.setdefault(key, (micro_batches, weights.hash))
        if known != (micro_batches, weights.hash):
            raise Violation(
                f"stage {stage} took step {weights.step} with {micro_batches}, another stage with"
                f" {known[0]}"
            )
        if (crew, stage, weights.step) in self._taken:
            raise Violation(f"stage {stage} took step {weights.step} twice")
        self._taken.add((crew, stage, weights.step))
        if all((crew, other, weights.step) in self._taken for other in range(stages)):
            self.counts["steps"] += 1
        if weights.exact:
            found = self._weights.setdefault((weights.block, weights.hash), weights.weight)
            if found != weights.weight:
                raise Violation(f"two weights of layers {weights.block} at step {weights.step}")
