"""1F1B: which micro-batch a stage works on next. Pure; no torch.

A stage goes backward whenever it can, and forward only while fewer than 2 × (stages − its index) of
its micro-batches wait for their gradient. This is the 1F1B order (PipeDream-Flush, arXiv 2104.04473
§2.2.1) with twice the room: the bubble of a pipeline that runs all forwards first, (S − 1) / (M + S
− 1), with the inputs of at most 2 S micro-batches kept instead of M. Once the room is enough where
a frame arrives when it is sent; on a home's line it takes as long as computing it, and a stage
would wait for gradients that are on their way. It needs neither the number of micro-batches nor
anybody's clock, and a frame that comes late or twice changes the order and nothing else.

In a swapped run (`routes.py`) stages wait for each other in both directions, and a limit at each of
them would let them wait for ever. There only the head limits, where a micro-batch begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Literal

Visit = tuple[int, int]
"""(micro-batch, which hop of its route)."""
Work = tuple[Literal["forward", "backward", "learn"], Visit]
"""What to do with which micro-batch. `learn` is the tail's forward, loss and backward in one."""
Limit = Literal["counted", "free", "learn"]
"""Whether a forward waits for room. What is learnt at once needs none."""


ROOM: Final = 2
"""Times what 1F1B needs among stages that are not apart."""
MOST: Final = 32
"""Where there is more room than 1F1B needs: at the next stage what a step that failed has left
counts too (`limits.STAGE_WAITING`)."""


class Schedule:
    """A micro-batch that visits a stage twice has two names."""

    def __init__(self, stage: int, stages: int) -> None:
        self.waiting: deque[tuple[Visit, Limit]] = deque()
        """Forwards that came and were not yet run."""
        self.in_flight: dict[Visit, Limit] = {}
        """Micro-batches whose gradient is awaited: inputs kept."""
        self._room = max(stages - stage, min(ROOM * (stages - stage), MOST))
        self._backwards: deque[Visit] = deque()
        self._seen: set[Visit] = set()

    def forward_arrived(self, micro_batch: Visit, limit: Limit) -> bool:
        """False, and nothing changes, where it came before in this step."""
        if micro_batch in self._seen:
            return False
        self._seen.add(micro_batch)
        self.waiting.append((micro_batch, limit))
        return True

    def backward_arrived(self, micro_batch: Visit) -> bool:
        """False, and nothing changes, where no such micro-batch waits for its gradient."""
        if micro_batch not in self.in_flight or micro_batch in self._backwards:
            return False
        self._backwards.append(micro_batch)
        return True

    def next(self, blocked: Callable[[Visit], bool] = lambda micro_batch: False) -> Work | None:
        """What to do now, and it counts as done; None while there is nothing but to wait. No
        forward of a micro-batch that is `blocked`, because there is no room where its activations
        would go; what is learnt at once and every backward are never held up by that.
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
        if limit == "learn":
            return "learn", micro_batch
        self.in_flight[micro_batch] = limit
        return "forward", micro_batch

    def ready(self, blocked: Callable[[Visit], bool] = lambda micro_batch: False) -> int:
        """Pieces of work that `next` would give: what waits for others is none. From any thread."""
        return len(self._backwards) + sum(1 for _ in self._may_begin(blocked))

    def _may_begin(self, blocked: Callable[[Visit], bool]) -> Iterator[tuple[Visit, Limit]]:
        full = sum(limit == "counted" for limit in list(self.in_flight.values())) >= self._room
        for micro_batch, limit in list(self.waiting):
            if limit == "learn" or not ((full and limit == "counted") or blocked(micro_batch)):
                yield micro_batch, limit

    def clear(self) -> None:
        """The step is over, one way or the other."""
        self.waiting.clear()
        self._backwards.clear()
        self.in_flight.clear()
        self._seen.clear()
