"""Whether an average with another crew's weights would make this crew's policy worse, which no
stage can say alone.

    here      the newest committed micro-batches, as they came to this stage, through it as it is
    and through it with the averaged weights
    others    both outputs through the stages behind it: the "run" of state streams, which a
    restored stage asks for too
    loss      − log-probability of the completions that were better than their group, nats per
    token: what averaging must not unlearn; while
              there are too few of these, of all completions, and KL (`averaging.probe`)

Both outputs meet the same weights behind this stage, so whatever changed in front of it or since is
in neither's favour. Nothing waits for it: the stage works with its own weights until the verdict is
there, and a verdict that does not come takes nobody's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import structlog
import torch
import trio

from swarmnode.averaging.outer import Tensors
from swarmnode.averaging.probe import LEAST_PROBE, PROBE_SEQUENCES, Answer, compare
from swarmnode.errors import Incompatible, PeerError
from swarmnode.pipeline import faults
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.recovery.bodies import run_one
from swarmnode.recovery.messages import Edge
from swarmnode.recovery.probes import work_of
from swarmnode.recovery.transfer import StatePeer
from swarmnode.wire.tensors import unpack_logprobs

log = structlog.get_logger("swarmnode.crew")

MICRO_BATCHES = 4
"""The newest, at most."""
SECONDS = (120.0, 3.0)
"""For a verdict, and for each second that a step takes: what travels for it grows with the policy
as a step does, and shares the lines with it. A partner waits for six minutes and eight steps
(`weights/exchange.py`)."""


class CrewProbe:
    """The probe of one stage's averages, while `peer` is there: in one crew, in the crew's thread
    that `token` is of."""

    def __init__(self) -> None:
        self.step_seconds = 0.0
        """What the last step took."""
        self._peer: StatePeer | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    def open(self, peer: StatePeer) -> None:
        """In the crew's thread."""
        self._peer, self._token = peer, trio.lowlevel.current_trio_token()

    def close(self) -> None:
        self._peer = None

    def measure(self, mine: Tensors, mean: Tensors, answer: Answer) -> bool:
        """Where a step has just been taken: nothing is remembered meanwhile. Tensors by their names
        in the whole model.

        False where there is too little to judge by; else `answer` is called, in the crew's thread:
        None where there is no verdict.
        """
        peer, token = self._peer, self._token
        if peer is None or token is None:
            return False
        known = _newest(peer)
        rewarded = sum(len(_better(peer, edge)) for edge in known) >= LEAST_PROBE
        judged, count = list[tuple[Edge, list[int]]](), 0
        for edge in reversed(known):
            if count < PROBE_SEQUENCES:  # more of them are minutes of a home's line at 7 B
                judged.append((edge, (_better if rewarded else _all)(peer, edge)))
                count += len(judged[-1][1])
        if count < LEAST_PROBE:
            return False
        seconds = SECONDS[0] + SECONDS[1] * self.step_seconds

        def begin() -> None:
            # the crew has ended meanwhile
            if not peer.channel.spawn(
                lambda: _judge(peer, judged, rewarded, mine, mean, answer, seconds)
            ):
                answer(None)

        try:
            token.run_sync_soon(begin)
        except trio.RunFinishedError:  # this process ends
            return False
        return True


async def _judge(
    peer: StatePeer,
    known: Sequence[tuple[Edge, list[int]]],
    rewarded: bool,
    mine: Mapping[str, torch.Tensor],
    mean: Mapping[str, torch.Tensor],
    answer: Answer,
    seconds: float,
) -> None:
    """known: micro-batches, each with the completions that count. rewarded: see `compare`."""
    losses = None
    try:
        with trio.move_on_after(seconds):  # around waiting only
            as_is, averaged = [
                await peer.channel.compute(partial(_with, peer.stage.runtime, tensors))
                for tensors in (mine, mean)
            ]
            before, after = list[float](), list[float]()
            for edge, chosen in known:
                found = await _logprobs(peer, edge, chosen, as_is)
                try:
                    after += await _logprobs(peer, edge, chosen, averaged)
                except (Incompatible, ValueError):  # with theirs, a number somewhere is not finite
                    after += [-math.inf] * len(found)
                before += found
            losses = compare(before, after, rewarded) if before else None
    except (PeerError, ValueError, RuntimeError, MemoryError) as error:
        if not isinstance(error, PeerError | ValueError) and not faults.of_device(error):
            raise
        log.info("no verdict on an average", error=str(error))
    finally:
        answer(losses)


def _newest(peer: StatePeer) -> list[Edge]:
    """What arrived at this stage of each micro-batch; for those that began here, what was sent."""
    own = peer.stage.spec.index
    edges = [
        edge
        for edge in peer.stage.recorder.edges
        if own == (edge.source if peer.stage.spec.has_embedding else edge.target)
    ]
    return edges[-MICRO_BATCHES:]


def _better(peer: StatePeer, edge: Edge) -> list[int]:
    """Completions of `edge` whose advantage is above zero."""
    loss = work_of(edge, peer.stage.limits).loss
    return [] if loss is None else (unpack_logprobs(loss.advantages) > 0).nonzero()[0].tolist()


def _all(peer: StatePeer, edge: Edge) -> list[int]:
    return list(range(len(work_of(edge, peer.stage.limits).completion_lengths)))


async def _logprobs(
    peer: StatePeer, edge: Edge, completions: list[int], runtime: StageRuntime
) -> list[float]:
    """Log-probabilities of their tokens. Raises PeerError: a stage is gone; Incompatible or
    ValueError: a number is not finite."""
    work, spec = work_of(edge, peer.stage.limits), peer.stage.spec
    x = b"" if spec.has_embedding else edge.body
    x = await peer.channel.compute(lambda: run_one(runtime, work, x, peer.stage.codec))
    tokens = sum(work.completion_lengths)
    for stage in range(spec.index + 1, spec.stages):
        x = await peer.fetch.run_at(stage, edge, tokens, x)
    rows = torch.from_numpy(unpack_logprobs(x).copy()).split(list(work.completion_lengths))
    chosen = torch.cat([rows[i] for i in completions] or [torch.zeros(0)])
    if not bool(torch.isfinite(chosen).all()):
        raise ValueError("a log-probability is not finite")
    return list(map(float, chosen))


def _with(runtime: StageRuntime, tensors: Mapping[str, torch.Tensor]) -> StageRuntime:
    """The same stage with other values for some weights; the others are shared, and nobody who
    works with `runtime` sees a difference."""
    local = {str(runtime.spec.local(name)): tensor for name, tensor in tensors.items()}
    return StageRuntime(
        runtime.spec,
        _replaced(runtime.model, local, ""),
        dtype=runtime.dtype,
        known_logits=runtime.known_logits,
    )


def _replaced(module: Any, tensors: Mapping[str, torch.Tensor], prefix: str) -> Any:  # noqa: ANN401
    new = copy.copy(module)
    inside = lambda name, child: (
        child if child is None else _replaced(child, tensors, f"{prefix}{name}.")
    )
    new._modules = {name: inside(name, child) for name, child in module._modules.items()}
    new._parameters = {
        name: own
        if (other := tensors.get(prefix + name)) is None
        else torch.nn.Parameter(other.to(own.device, own.dtype), False)
        for name, own in module._parameters.items()
    }
    return new
