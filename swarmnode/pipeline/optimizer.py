"""What moves a stage's weights, and outlives the crews that it is in: AdamW, its learning rate, and
how the last step was taken. Torch."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import torch
import trio

from swarmnode.errors import DeviceError
from swarmnode.pipeline import faults
from swarmnode.pipeline.commit import Taken
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.rl.objectives import WEIGHT_DECAY


@dataclass
class LrScale:
    """Learning rate of one stage relative to the crew's."""

    factor: float = 1.0
    warmup: int = 0
    """Steps over which it rises to the factor, because the optimizer is new."""
    taken: int = 0

    def next(self) -> float:
        self.taken += 1
        return self.factor * (1.0 if self.taken >= self.warmup else self.taken / self.warmup)


class StageOptimizer:
    """most: no step is taken with a higher learning rate."""

    def __init__(self, runtime: StageRuntime, most: float = math.inf) -> None:
        self.adam = make_adam(runtime)
        self.lr_scale = LrScale()
        self.squared_norm = 0.0
        """The last raw gradient's over the layers, before clipping: CheckFree weights this stage by
        it."""
        self.last_commit = Taken()
        self.lock = threading.Lock()
        """Held while the weights move."""
        self.moving = trio.Lock()
        """Held from where a step is counted to where it is taken."""
        self._runtime = runtime
        self._most = most

    def measure(self) -> float | None:
        """Squared norm of the final gradients, to which the tail adds nothing for a tied embedding;
        None where it is not finite."""
        shared, index = self._runtime.embedding(), self._runtime.spec.index
        squared = layers = 0.0
        for name, parameter in self._runtime.model.named_parameters():
            if parameter.grad is not None and not (parameter is shared and index > 0):
                # the sum of squares is made on the host: MPS has no float64
                part = float(torch.linalg.vector_norm(parameter.grad.float())) ** 2
                squared += part
                layers += part if ".layers." in name else 0.0
        if not math.isfinite(squared):
            return None
        self.squared_norm = layers
        return squared

    def step(self, clip: float, learning_rate: float) -> bool:
        """Whether the learning rate was within the bound. Raises DeviceError where the device fails
        in the middle."""
        if self.adam is None:
            return True
        try:
            with self.lock:
                return self._move(self.adam, clip, learning_rate)
        except (RuntimeError, MemoryError) as error:
            if not faults.of_device(error):
                raise
            raise DeviceError(f"half of a step: {error}") from error

    def _move(self, adam: torch.optim.AdamW, clip: float, learning_rate: float) -> bool:
        for parameter in self._runtime.parameters():
            if parameter.grad is not None and clip < 1.0:
                parameter.grad.mul_(clip)
        own = self.lr_scale.next()
        rates = [learning_rate * (1.0 if group["shared"] else own) for group in adam.param_groups]
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = min(rate, self._most)
        adam.step()
        return max(rates) <= self._most


def make_adam(runtime: StageRuntime) -> torch.optim.AdamW | None:
    """The optimizer of what is trained here; None where that is nothing.

    A tied embedding goes at the crew's learning rate alone, or its two copies would part.
    """
    shared = runtime.embedding()
    own = [p for p in runtime.parameters() if p is not shared]
    groups = [
        {"params": params, "shared": ends}
        for params, ends in ((own, False), ([] if shared is None else [shared], True))
        if params
    ]
    return torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY) if groups else None
