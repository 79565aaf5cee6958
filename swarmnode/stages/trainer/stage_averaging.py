"""Averaging of one stage with other crews and whole nodes (NoLoCo), and the probe of an average."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog
import torch
import trio

from swarmnode.config import WeightsConfig
from swarmnode.errors import Incompatible, PeerError
from swarmnode.stages.stage_frames import is_device_error
from swarmnode.stages.trainer.local_stage import run_one
from swarmnode.stages.trainer.pipeline import Observer, StageWorker
from swarmnode.stages.trainer.stage import Stage
from swarmnode.stages.trainer.stage_checkpoints import StageInput, read_work
from swarmnode.stages.trainer.stage_model import StageRuntime
from swarmnode.stages.trainer.state_exchange import StateExchange
from swarmnode.weights import local
from swarmnode.weights.fingerprint import LoraShape
from swarmnode.weights.trainer.averaged import AveragedTensors
from swarmnode.weights.trainer.gate import LEAST_PROBE, PROBE_SEQUENCES, Answer, compare
from swarmnode.weights.trainer.outer import Tensors
from swarmnode.weights.trainer.replica import Replica
from swarmnode.weights.trainer.worker import AveragingCounters
from swarmnode.wire.tensors import unpack_logprobs

log = structlog.get_logger("swarmnode.crew")


# Averaging of one stage (NoLoCo): `weights.trainer.replica` with this stage's tensors, named as in
# the whole model.
#
# A stage pairs with any stage or whole policy that has a block of layers in common. Corrections
# apply right after a step, when no wave is in flight. A trained tied embedding is not averaged:
# both ends hold it.

CLOCKS = "clocks"
"""Name of the tensor of outer clocks in a checkpoint."""


class StageAveraging(Replica, Observer):
    """Averaging of a stage with other crews and whole nodes.

    It must be created while the stage has the base weights, since payloads are differences to them.

    Args:
        adapter: Shape of the adapter; None if all weights are trained.
        send: Sends a message to the network process.
        connected: Returns True while the network process is connected.
        may_average: Returns True while this stage may be averaged.
    """

    def __init__(
        self,
        cfg: WeightsConfig,
        adapter: LoraShape | None,
        data_dir: Path,
        stage: Stage,
        send: Callable[[local.FromTrainer], None],
        connected: Callable[[], bool] = lambda: True,
        may_average: Callable[[], bool] = lambda: True,
    ) -> None:
        self.probe = AverageProbe()
        self._connected = connected
        self._may_average = may_average
        self._since = time.monotonic()
        tensors, layers = averaged_parameters(stage), sum(stage.layers)
        super().__init__(
            AveragedTensors(tensors, cfg.fragments, stage.optimizer.lock, layers),
            cfg,
            AveragingCounters(),
            data_dir,
            send=send,
            probe=self.probe,
            adapter=adapter,
        )

    def begin(self, outer: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """Start averaging, after the stage got its weights.

        Args:
            outer: Tensors that `tensors` returned with these weights. If empty, the slow weights
                start from the stage's weights, without momentum.

        Raises:
            StateError: `outer` belongs to another stage.
        """
        tensors, counters = dict(outer), self._parts.counters
        clocks = tensors.pop(CLOCKS, None)
        self.restore(tensors)
        counters.outer_clocks = [] if clocks is None else clocks.tolist()
        self.set_counters(counters)  # resizes the clocks to one per block

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averaging state for a checkpoint: `phi.<name>`, `delta.<name>`, float32, and
        CLOCKS.

        The returned tensors do not change afterwards. Call it between two steps, in the thread
        that takes them.
        """
        return {**super().tensors(), CLOCKS: torch.tensor(self._parts.counters.outer_clocks)}

    def on_step_in_thread(self, worker: StageWorker) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._parts.counters.step, self.probe.step_seconds = worker.participant.step, seconds
        if self._may_average():
            self.between_steps(self._connected(), seconds, stepped=True)

    def receive(self, message: local.ToTrainer) -> None:
        """Handle a message of the network process, in the link's thread."""
        if not isinstance(message, local.AdoptState):
            super().receive(message)
        elif message.path:
            # a stage of another crew among stages of this crew is not a policy
            self._send(local.StateAdopted(message.peer, "local", self.outer_steps()))

    def refuse(self, message: local.ToTrainer) -> None:
        """Answer that this stage is not averaged now.

        Without an answer, the network process would wait for minutes and refuse all other partners.
        """
        if isinstance(message, local.TakeSnapshot | local.ApplyPayload):
            fragment = message.fragment
            step = self.outer_steps()[fragment]
            self._send(local.SwapEnded(message.session, fragment, "", "local", False, step))
        elif isinstance(message, local.WriteState):
            self._send(local.StateWritten("", 0))


def averaged_parameters(stage: Stage) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of this stage that are averaged, by their names in the whole model."""
    spec, shared = stage.runtime.spec, stage.runtime.embedding()
    return {
        spec.whole_name(n): p
        for n, p in stage.runtime.model.named_parameters()
        if p.requires_grad and p is not shared
    }


# The probe of an average: does an average with another crew make this crew's policy worse?
#
#     this stage     runs the newest committed micro-batches with own and with averaged weights
#     later stages   run both outputs, by `RunMessage` on the state streams
#     loss           − log-probability of completions better than their group, nats per token; of
#                    all completions if there are too few of these
#
# The stage works with its own weights until the verdict arrives. Without a verdict the average is
# rejected.

VERDICT_SECONDS = (120.0, 3.0)
"""(a, b): the deadline of a verdict is a + b × the duration of a step, in seconds. A partner waits
for six minutes and eight steps (`weights/network/swaps.py`)."""


class AverageProbe:
    """Judges averages of one stage, while there is a crew."""

    def __init__(self) -> None:
        self.step_seconds = 0.0
        """Duration of the last step."""
        self._exchange: StateExchange | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    def open(self, exchange: StateExchange) -> None:
        """Start to judge with the state streams of `exchange`. Call it in the crew's thread."""
        self._exchange, self._token = exchange, trio.lowlevel.current_trio_token()

    def close(self) -> None:
        """Stop to judge: the crew has ended."""
        self._exchange = None

    def measure(self, mine: Tensors, mean: Tensors, answer: Answer) -> bool:
        """Start to compare two sets of weights, named as in the whole model.

        Call it right after a step, in the thread that took it.

        Args:
            mine: Weights of the stage.
            mean: Averaged weights.
            answer: Called in the crew's thread with the losses, or with None without a verdict.

        Returns:
            False if there are too few completions to judge by; then `answer` is not called.
        """
        exchange, token = self._exchange, self._token
        if exchange is None or token is None:
            return False
        known = list(exchange.stage.recorder.inputs)
        rewarded = (
            sum(len(_completions(exchange, edge, better=True)) for edge in known) >= LEAST_PROBE
        )
        judged, count = list[tuple[StageInput, list[int]]](), 0
        for edge in reversed(known):
            if count < PROBE_SEQUENCES:  # more take minutes over a home connection at 7 B
                judged.append((edge, _completions(exchange, edge, better=rewarded)))
                count += len(judged[-1][1])
        if count < LEAST_PROBE:
            return False
        seconds = VERDICT_SECONDS[0] + VERDICT_SECONDS[1] * self.step_seconds

        def begin() -> None:
            work = lambda: _judge(exchange, judged, mine, mean, answer, seconds)
            if not exchange.channel.spawn(work):  # the crew has ended
                answer(None)

        try:
            token.run_sync_soon(begin)
        except trio.RunFinishedError:  # this process ends
            return False
        return True


async def _judge(
    exchange: StateExchange,
    known: Sequence[tuple[StageInput, list[int]]],
    mine: Mapping[str, torch.Tensor],
    mean: Mapping[str, torch.Tensor],
    answer: Answer,
    seconds: float,
) -> None:
    """Run the micro-batches with both sets of weights, and call `answer` with the losses.

    Args:
        known: Micro-batches, each with the completions that count.
        seconds: Deadline.
    """
    losses = None
    try:
        with trio.move_on_after(seconds):
            as_is, averaged = [
                await exchange.channel.compute(
                    partial(_with_tensors, exchange.stage.runtime, tensors)
                )
                for tensors in (mine, mean)
            ]
            before, after = list[float](), list[float]()
            for edge, chosen in known:
                found = await _logprobs(exchange, edge, chosen, as_is)
                try:
                    after += await _logprobs(exchange, edge, chosen, averaged)
                except (Incompatible, ValueError):  # a number with the average is not finite
                    after += [-math.inf] * len(found)
                before += found
            losses = compare(before, after) if before else None
    except (PeerError, ValueError, RuntimeError, MemoryError) as error:
        if not isinstance(error, PeerError | ValueError) and not is_device_error(error):
            raise
        log.info("probe of an average failed, rejecting the average", error=str(error))
    finally:
        answer(losses)


def _completions(exchange: StateExchange, edge: StageInput, better: bool) -> list[int]:
    """Return the completions of `edge`; only those with an advantage above zero if `better`."""
    work = read_work(edge, exchange.stage.limits)
    if not better:
        return list(range(len(work.completion_lengths)))
    loss = work.loss
    return [] if loss is None else (unpack_logprobs(loss.advantages) > 0).nonzero()[0].tolist()


async def _logprobs(
    exchange: StateExchange, edge: StageInput, completions: list[int], runtime: StageRuntime
) -> list[float]:
    """Return the log-probabilities of the tokens of some completions.

    Raises:
        PeerError: a stage is gone.
        Incompatible, ValueError: a number is not finite.
    """
    work, spec = read_work(edge, exchange.stage.limits), exchange.stage.spec
    x = b"" if spec.has_embedding else edge.body
    x = await exchange.channel.compute(lambda: run_one(runtime, work, x, exchange.stage.codec))
    tokens = sum(work.completion_lengths)
    for stage in range(spec.index + 1, spec.stages):
        x = await exchange.fetch.run_at(stage, edge, tokens, x)
    rows = torch.from_numpy(unpack_logprobs(x).copy()).split(list(work.completion_lengths))
    chosen = torch.cat([rows[i] for i in completions] or [torch.zeros(0)])
    if not bool(torch.isfinite(chosen).all()):
        raise ValueError("a log-probability is not finite")
    return list(map(float, chosen))


def _with_tensors(runtime: StageRuntime, tensors: Mapping[str, torch.Tensor]) -> StageRuntime:
    """Return a runtime of the same stage with other values for some weights. It shares the other
    weights."""
    local = {str(runtime.spec.local_name(name)): tensor for name, tensor in tensors.items()}
    return StageRuntime(
        runtime.spec,
        _replaced(runtime.model, local, ""),
        dtype=runtime.dtype,
        known_logits=runtime.known_logits,
    )


def _replaced(module: Any, tensors: Mapping[str, torch.Tensor], prefix: str) -> Any:  # noqa: ANN401
    new = copy.copy(module)
    new._modules = {
        name: child and _replaced(child, tensors, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    new._parameters = {
        name: own
        if (other := tensors.get(prefix + name)) is None
        else torch.nn.Parameter(other.to(own.device, own.dtype), False)
        for name, own in module._parameters.items()
    }
    return new
