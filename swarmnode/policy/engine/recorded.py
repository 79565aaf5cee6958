"""Decoding steps of a changing set of rows as CUDA graphs, one graph per shape.

A graph has fixed shapes, but the number and length of active rows change. So both are rounded up:
with multiples of 16 rows and 256 columns, 13 rows of up to 90 tokens run as 16 rows and 256
columns, and the excess is masked. A shape is launched without a graph the first time, recorded the
second time, and replayed afterwards (`policy.decode` measures the gain). A recording lives for one
call of the engine: it reads the weights that autocast has cast, and it needs no memory during
training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarmnode.policy.decode import record, recordable, side_stream
from swarmnode.policy.model import Policy

ROWS = 16
"""The number of rows of a recorded step is a multiple of this."""
COLUMNS = 256
"""The number of columns of a recorded step is a multiple of this."""

Step = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(tokens (R,), places (R,), width) → (R, V) logits; see `Slots`."""
Shape = tuple[int, int]
"""(rows, columns)."""


@dataclass
class Recording:
    """A recorded step of one shape, with the memory that it reads and writes."""

    tokens: torch.Tensor
    places: torch.Tensor
    logits: torch.Tensor
    graph: torch.cuda.CUDAGraph | None = None


class RecordedSteps:
    """The recordings of one engine."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._recordings: dict[Shape, Recording] = {}
        self._works: bool | None = None
        """True if this policy's steps can be recorded; None before the first step."""

    def shape(self, rows: int, columns: int) -> Shape | None:
        """Return the rounded-up shape for `rows` rows of `columns` tokens, or None if steps cannot
        be recorded."""
        if self._works is None:
            self._works = recordable(self._policy)
        if not self._works:
            return None
        return -(-rows // ROWS) * ROWS, -(-columns // COLUMNS) * COLUMNS

    def clear(self) -> None:
        self._recordings.clear()

    def step(
        self, step: Step, tokens: torch.Tensor, places: torch.Tensor, shape: Shape
    ) -> torch.Tensor:
        """Run one step of `shape`.

        The step also runs unused slots, to fill the shape. They write column 0 of their memory,
        which the next row in that slot overwrites.

        Returns:
            Logits (n, V), valid until the next step.
        """
        rows, width = shape
        recording = self._recordings.get(shape)
        is_new = recording is None
        if recording is None:
            unused = tokens.new_zeros(rows)
            recording = Recording(unused, unused.clone(), torch.zeros(0))
            self._recordings[shape] = recording
        recording.tokens[: len(tokens)] = tokens
        recording.places.zero_()
        recording.places[: len(tokens)] = places

        def work() -> None:
            recording.logits = step(recording.tokens, recording.places, width)

        if not is_new and recording.graph is None:
            recording.graph = record(self._policy, work)
            self._works = recording.graph is not None
        if recording.graph is not None:
            recording.graph.replay()
        else:  # the first time, and where recording failed
            with side_stream(self._policy.device):
                work()
        return recording.logits[: len(tokens)]
