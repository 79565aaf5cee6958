"""The order of a stage's forwards and backwards. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Literal

# 1F1B (PipeDream-Flush, arXiv 2104.04473 §2.2.1) with twice the paper's limit of micro-batches in
# flight. A stage runs a backward whenever it can. It runs a forward only while fewer than
# 2 × (stages − its index) of its micro-batches wait for their gradient. Transfers between homes
# take about as long as the computation, so with the paper's limit a stage would idle until
# gradients arrive. In a swapped crew only stage 0 has the limit: limits at both ends would
# deadlock.

Visit = tuple[int, int]
"""(micro-batch, index of the hop in its route)."""
WorkItem = tuple[Literal["forward", "backward", "learn"], Visit]
"""`learn` is the last stage's forward, loss and backward in one."""
LimitRule = Literal["limited", "exempt", "last"]
"""Relation of a forward to the limit of micro-batches in flight. `limited`: the forward waits for
the limit and counts towards it. `exempt`: it does neither. `last`: it is the route's last forward,
which has no gradient to wait for."""

IN_FLIGHT_FACTOR: Final = 2
"""Factor of the paper's limit of micro-batches in flight."""


class Schedule:
    """Order of one stage's forwards and backwards. A micro-batch that visits a stage twice is two
    visits."""

    def __init__(self, stage: int, stages: int) -> None:
        self.waiting: deque[tuple[Visit, LimitRule]] = deque()
        """Forwards that have arrived and have not run."""
        self.in_flight: dict[Visit, LimitRule] = {}
        """Visits that wait for their gradient."""
        self._max_in_flight = IN_FLIGHT_FACTOR * (stages - stage)
        self._backwards: deque[Visit] = deque()
        self._seen: set[Visit] = set()

    def forward_arrived(self, micro_batch: Visit, limit: LimitRule) -> bool:
        """Add a forward. Return False if it was added before in this step."""
        if micro_batch in self._seen:
            return False
        self._seen.add(micro_batch)
        self.waiting.append((micro_batch, limit))
        return True

    def backward_arrived(self, micro_batch: Visit) -> bool:
        """Add a backward. Return False if no such visit waits for its gradient."""
        if micro_batch not in self.in_flight or micro_batch in self._backwards:
            return False
        self._backwards.append(micro_batch)
        return True

    def next(self, blocked: Callable[[Visit], bool] = lambda micro_batch: False) -> WorkItem | None:
        """Remove and return the next piece of work; None if there is none.

        Args:
            blocked: Returns True if the next link of a visit is full. It delays forwards only.
        """
        if self._backwards:
            micro_batch = self._backwards.popleft()
            del self.in_flight[micro_batch]
            return "backward", micro_batch
        ready = next(self._may_begin(blocked), None)
        if ready is None:
            return None
        self.waiting.remove(ready)
        micro_batch, limit = ready
        if limit == "last":
            return "learn", micro_batch
        self.in_flight[micro_batch] = limit
        return "forward", micro_batch

    def ready(self, blocked: Callable[[Visit], bool] = lambda micro_batch: False) -> int:
        """Return the number of pieces of work that `next` could return. Callable from any
        thread."""
        return len(self._backwards) + sum(1 for _ in self._may_begin(blocked))

    def _may_begin(self, blocked: Callable[[Visit], bool]) -> Iterator[tuple[Visit, LimitRule]]:
        full = (
            sum(limit == "limited" for limit in list(self.in_flight.values()))
            >= self._max_in_flight
        )
        for micro_batch, limit in list(self.waiting):
            if limit == "last" or not ((full and limit == "limited") or blocked(micro_batch)):
                yield micro_batch, limit

    def clear(self) -> None:
        """Forget the step."""
        self.waiting.clear()
        self._backwards.clear()
        self.in_flight.clear()
        self._seen.clear()
