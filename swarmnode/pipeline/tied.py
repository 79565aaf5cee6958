"""A tied embedding's gradient: each end of a crew has half of it, and sends it to the other
exactly: both must stay one tensor. Torch."""

from __future__ import annotations

import torch

from swarmnode.pipeline import frames
from swarmnode.pipeline.activations import decode, encode
from swarmnode.pipeline.context import StageContext


class TiedEmbedding:
    """One end's share in the sum, for one attempt at a step at a time."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._theirs: tuple[int, torch.Tensor, int] | None = None
        """(attempt, the other half, its rows so far)."""
        self._left: tuple[int, torch.Tensor, int] | None = None
        """(attempt, our half, the next row to send)."""

    @property
    def other_end(self) -> int:
        return self._context.stages - 1 if self._context.index == 0 else 0

    @property
    def sends(self) -> bool:
        """Whether a part of our half is left to send, and there is room for it."""
        return self._left is not None and not self._context.links.full(self.other_end)

    def begin(self, attempt: int, shared: torch.nn.Parameter) -> None:
        """Our half is to be sent, part by part, when there is room; it stays as it is, whatever
        `shared.grad` is by then.

        Raises ValueError for a gradient that is not finite.
        """
        gradient = torch.zeros_like(shared) if shared.grad is None else shared.grad
        if not bool(torch.isfinite(gradient).all()):
            raise ValueError("the embedding's gradient is not finite")
        self._left = (attempt, gradient, 0)

    def send_part(self) -> None:
        assert self._left is not None
        attempt, gradient, first = self._left
        self._left = None
        at = self._context
        with at.caught(
            lambda reason: at.links.send(0, frames.Acknowledge(at.place, attempt, reason, 0.0))
        ):
            part = gradient[first : first + at.links.limits.tokens].float()
            body, after = encode(part, "float32"), first + len(part)
            at.links.send(
                self.other_end, frames.Embedding(at.place, attempt, first, len(part)), body
            )
            self._left = (attempt, gradient, after) if after < len(gradient) else None

    def take_part(self, frame: frames.Embedding, body: bytes) -> bool:
        """Whether it is the next part of the other half. Raises BadMessage."""
        participant, shared = self._context.participant, self._context.runtime.embedding()
        if frame.place.step != participant.step or frame.attempt < participant.attempt:
            return False
        assert shared is not None
        if self._theirs is None or self._theirs[0] != frame.attempt:
            self._theirs = (frame.attempt, torch.zeros(shared.shape), 0)
        attempt, half, rows = self._theirs
        if frame.first != rows:  # streams keep order, so anything else is a repetition
            return False
        half[rows : rows + frame.rows] = decode(
            body, frame.rows, self._context.runtime.hidden_size, "float32"
        )
        self._theirs = (attempt, half, rows + frame.rows)
        return True

    def add(self, attempt: int, shared: torch.nn.Parameter) -> bool:
        """Add the other half to our gradient. False where it is not all there."""
        if self._theirs is None or self._theirs[0] != attempt or self._theirs[2] < len(shared):
            return False
        theirs = self._theirs[1].to(shared.device, shared.dtype)
        shared.grad = theirs if shared.grad is None else shared.grad + theirs
        self._theirs = None
        return True

    def clear(self) -> None:
        self._theirs = self._left = None
