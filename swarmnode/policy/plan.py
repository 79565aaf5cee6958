"""Training methods for a model and their memory, as `swarmnode plan` prints them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from swarmnode.model_shape import Shape
from swarmnode.policy.footprint import ITEM_BYTES, Footprint, Method, Optim, footprint, micro_batch

CARDS = (8, 12, 16, 24, 32, 48, 80, 141)
"""Common memory sizes of GPUs, in GB."""
CARD_BYTES = 10**9
"""Usable bytes per nominal GB. A GPU has slightly more, and its driver uses some of it."""


@dataclass(frozen=True)
class PlannedMethod:
    """A training method with its memory."""

    name: str
    method: Method
    row: Footprint
    """Memory with one row per micro-batch."""
    micro_batch: int
    """Tokens of the largest micro-batch that fits; 0 if a row does not fit, or if the memory is
    unknown."""

    @property
    def card(self) -> int | None:
        """Size of the smallest GPU on which one row fits, in GB; None if it fits on none."""
        return next((size for size in CARDS if self.row.total <= size * CARD_BYTES), None)


LAYER_SECONDS = 0.43e-3
"""Time of one layer in a decoding step on a GPU, without reading its weights: 655 tokens/s of eight
answers of a 7 B model with 28 layers on an H200."""
CARD_BYTES_PER_SECOND = 1e12
"""Memory bandwidth of a GPU of 24 GB, such as an RTX 3090."""
CPU_SHARE = 0.4
"""Speed of decoding on a CPU as a share of that of a matrix product, with ten answers of SmolLM2
at once."""
UPDATE_SHARE = 1.0
"""Duration of an update in relation to that of sampling; 1.0 to 1.5 with SmolLM2 on a CPU."""


def step_seconds(
    shape: Shape, dtype: str, answers: int, tokens: int, operations: float | None
) -> float:
    """Estimate the duration of a training step: sampling and update. It is correct to a factor of
    about three.

    Args:
        answers: Answers of the step, sampled together.
        tokens: Tokens of each answer.
        operations: Floating-point operations per second of a matrix product on the CPU; None for a
            GPU.
    """
    if operations is None:
        reading = shape.parameters * ITEM_BYTES[dtype] / CARD_BYTES_PER_SECOND
        sampling = tokens * (shape.layers * LAYER_SECONDS + reading)
    else:
        sampling = answers * tokens * 2 * shape.parameters / (CPU_SHARE * operations)
    return sampling * (1 + UPDATE_SHARE)


def measure_operations() -> float:
    """Return the floating-point operations per second of a matrix product on this machine."""
    size = 1024
    matrix = np.ones((size, size), np.float32)
    matrix @ matrix  # starts the threads
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def methods(device: str, dtype: str, rank: int) -> list[tuple[str, Method]]:
    """Return (name, method) of all training methods, those with the least loss of quality first."""
    plain = Method(device, dtype)
    kinds = [("all weights", plain)]
    optims: list[Optim] = ["adamw"]
    if device == "cuda":  # bitsandbytes
        optims.append("adamw_8bit")
    adapters = [(f"LoRA {rank}", replace(plain, lora_rank=rank))]
    if device == "cuda":
        adapters += [
            (f"LoRA {rank}, base in {bits} bits", replace(plain, lora_rank=rank, base_bits=bits))
            for bits in (8, 4)
        ]
    whole = [(name, replace(method, optim=optim)) for name, method in kinds for optim in optims]
    return [
        (name, replace(method, checkpointing=checkpointing))
        for name, method in [*whole, *adapters]
        for checkpointing in (False, True)
    ]


def choices(
    shape: Shape, device: str, dtype: str, rank: int, length: int, memory: int | None
) -> list[PlannedMethod]:
    """Return all training methods with their memory.

    Args:
        length: Tokens per row, including the prompt.
        memory: Memory of the device in bytes; None if it is unknown.
    """
    found = []
    for name, method in methods(device, dtype, rank):
        tokens = micro_batch(shape, method, memory) if memory is not None else 0
        found.append(
            PlannedMethod(
                name, method, footprint(shape, method, length), tokens if tokens >= length else 0
            )
        )
    return found


def best(found: list[PlannedMethod]) -> PlannedMethod | None:
    """Return the first method that fits; None if none fits. Methods without activation
    checkpointing come first."""
    return next((choice for choice in found if choice.micro_batch), None)


def settings(choice: PlannedMethod) -> list[str]:
    """Return the settings for a method, each as key=value. Activation checkpointing has no setting;
    it is used if memory is short."""
    method, found = choice.method, []
    if method.lora_rank:
        found.append(f"policy.lora.r={method.lora_rank}")
    if method.base_bits:
        found.append(f'policy.quantization="{method.base_bits}bit"')
    if method.optim != "adamw":
        found.append(f'policy.optim="{method.optim}"')
    return found
