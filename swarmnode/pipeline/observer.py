"""What a member tells of its training, to whoever keeps copies, measures or averages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from swarmnode.pipeline.worker import StageWorker


class Observer:
    """This one listens to nothing. All but `committed` are called between two computations."""

    def received(self, micro_batch: int, about: bytes, sender: int, body: bytes) -> None:
        """A micro-batch to learn from came. about: `work.MicroBatch`; body: activations in the
        crew's codec, empty at the start."""

    def sent(self, micro_batch: int, receiver: int, body: bytes) -> None:
        """Its activations went on."""

    def learnt(self, micro_batch: int, logprobs: torch.Tensor) -> None:
        """Tail: log-probabilities (tokens,) of what it is learnt from, before the step."""

    def committed(self, worker: StageWorker) -> None:
        """The step is taken: `worker.participant.step` of them now. Where the member computes;
        nothing else does meanwhile. What the device cannot do of it (`faults.of_device`) is
        counted, and left out."""

    def stepped(self) -> None:
        """After `committed`, in the member's task."""

    def dropped(self) -> None:
        """Everything that was received since the last step will be in none."""
