"""Local distillation: a stage that is off learns to do what the lost one did, from what its
neighbours saw of it. Torch.

    inner stage, head    mean squared error of its output against what came to the stage after it,
    relative to that output's size
    tail                 squared error of the log-probabilities against those of then

Dense, and with nobody else's help. The rewards of a damaged policy have no gradient that would do
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from swarmnode.pipeline.activations import decode
from swarmnode.pipeline.frames import ActivationCodec, FrameLimits
from swarmnode.pipeline.learning import batch_of
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.policy.logprobs import Batch
from swarmnode.recovery.messages import Edge, Probe
from swarmnode.recovery.probes import work_of
from swarmnode.wire.tensors import unpack_logprobs

SMALLEST: Final = 0.01
"""A tensor that is smaller is treated as if it had this root mean square: a new adapter's B is
zero."""


@dataclass(frozen=True)
class Pair:
    """One committed micro-batch as the lost stage had it."""

    batch: Batch
    x: torch.Tensor | None
    """(R, H) that came to it; None for the head, which has the ids."""
    y: torch.Tensor
    """(R, H) that it made of it; at the tail (tokens,) log-probabilities."""
    temperature: float


@dataclass(frozen=True)
class Healing:
    steps: int
    before: float
    """Mean of the loss over all pairs."""
    after: float


def pairs_of(
    runtime: StageRuntime,
    edges: Sequence[Edge],
    probes: Sequence[Probe],
    limits: FrameLimits,
    codec: ActivationCodec,
    judged: int,
) -> list[Pair]:
    """What can be put together from neighbours' `edges` and, at the tail, `probes`; the newest
    last. They were checked.

    The last `judged` probes are left out: the stage is judged by them.
    """
    spec = runtime.spec
    number = lambda item: (item.step, item.micro_batch)  # a new roster counts micro-batches anew
    inputs = {number(edge): edge for edge in edges if edge.target == spec.index}
    outputs: dict[tuple[int, int], Edge | Probe] = {
        number(edge): edge for edge in edges if edge.source == spec.index
    }
    if spec.has_head:
        outputs = {number(probe): probe for probe in probes}
    judges = {number(probe) for probe in probes[-judged:]}
    out = []
    for key, after in sorted(outputs.items(), key=lambda item: item[0]):
        before = inputs.get(key)
        if key in judges:
            continue
        if before is None and not spec.has_embedding:
            continue
        if before is not None and (before.about, before.rows) != (after.about, after.rows):
            continue  # two neighbours that do not agree what it was
        work = work_of(after, limits)
        unpack = lambda edge: decode(edge.body, edge.rows, runtime.hidden_size, codec).to(
            runtime.device
        )
        y = (
            torch.tensor(unpack_logprobs(after.logprobs), device=runtime.device)
            if isinstance(after, Probe)
            else unpack(after)
        )
        x = None if spec.has_embedding else unpack(before)
        out.append(Pair(batch_of(work, runtime.device), x, y, work.temperature))
    return out


def heal(runtime: StageRuntime, pairs: Sequence[Pair], steps: int, rate: float) -> Healing:
    """`steps` of AdamW over `pairs` in turn, at `rate` of each tensor's root mean square, falling
    to zero. Where that did not help, the weights are as before.

    A tied embedding is left alone: the other end has it too. `pairs` is not empty.
    """
    shared = runtime.embedding()
    parameters = [p for p in runtime.parameters() if p is not shared]
    kept = [p.detach().clone() for p in parameters]
    before = _mean(runtime, pairs)
    sizes = [
        rate * max(float(p.detach().float().square().mean().sqrt()), SMALLEST) for p in parameters
    ]
    optimizer = torch.optim.AdamW([{"params": [p]} for p in parameters], weight_decay=0.0)
    for step in range(steps):
        for group, size in zip(optimizer.param_groups, sizes, strict=True):
            group["lr"] = size * (1.0 - step / steps)
        loss = _loss(runtime, pairs[step % len(pairs)])
        loss.backward()
        optimizer.step()
        for parameter in runtime.parameters():
            parameter.grad = None
    after = _mean(runtime, pairs)
    if not after < before:
        with torch.no_grad():
            for parameter, old in zip(parameters, kept, strict=True):
                parameter.copy_(old)
        after = before
    return Healing(steps, before, after)


@torch.no_grad()
def _mean(runtime: StageRuntime, pairs: Sequence[Pair]) -> float:
    return sum(float(_loss(runtime, pair)) for pair in pairs) / len(pairs)


def _loss(runtime: StageRuntime, pair: Pair) -> torch.Tensor:
    if runtime.spec.has_head:
        logprobs = runtime.logprobs(pair.batch, pair.x, pair.temperature)[0][
            pair.batch.completion_mask
        ]
        return (logprobs - pair.y).square().mean()
    out = runtime.hidden(pair.batch, pair.x)
    return (out - pair.y).square().mean() / pair.y.square().mean().clamp_min(1e-12)
