"""Decoding steps of rows that come and go, as CUDA graphs: one for each shape.

A graph is of fixed shapes, and rows under way change in number and length. So both are rounded up:
a step of 13 rows whose longest has 90 tokens is one of 16 rows and 128 columns, and what is beyond
is masked. A shape is launched the first time, recorded the second time, and replayed from then on
(`policy.decode` says what that saves). Recordings live for one call of the engine: they read the
weights as autocast has cast them, and nothing of them has to fit beside training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarmnode.policy.decode import record, recordable, side_stream
from swarmnode.policy.model import Policy

ROWS = 16
"""Rows of a recorded step are a multiple of this."""
COLUMNS = 256
"""Columns of a recorded step are a multiple of this."""

Step = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(tokens (R,), places (R,), width) → (R, V) logits; see `Slots`."""
Shape = tuple[int, int]
"""(rows, columns)."""


@dataclass
class Recording:
    """A step of one shape, with the memory that it reads and writes."""

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
        """None before the first step."""

    def shape(self, rows: int, columns: int) -> Shape | None:
        """Return the shape of the step that `rows` with `columns` tokens take; None if steps cannot
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
        """Run one step of `shape`. Slots beyond the rows are run too: they write column 0 of slots
        that nobody uses, which whoever takes the slot overwrites.

        Returns:
            (n, V) logits, valid until the next step.
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
