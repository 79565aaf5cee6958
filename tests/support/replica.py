"""The averaging of a node without a model: the real network half and the real trainer half, with a
few random tensors as the policy.

    async with averaging(network, directory) as node:        # network: of testing.hosts
        node.due()                                           # as after H steps
        await until(lambda: node.outcome("applied"))

Steps run only on request: `node.step()` changes the weights as an optimizer would. The work between
two steps runs every few milliseconds on the trio thread, which is also the trainer's main thread.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import trio

from swarmnode.config import WeightsConfig
from swarmnode.p2p.network import Libp2pNetwork
from swarmnode.policy.load import Policy
from swarmnode.policy.micro import MicroBatcher
from swarmnode.swarm.known import KnownPeers
from swarmnode.trainer.state import Counters
from swarmnode.weights import local
from swarmnode.weights.network.service import WeightService
from swarmnode.weights.trainer.averaged import AveragedTensors
from swarmnode.weights.trainer.gate import Answer, Losses, LossProbe
from swarmnode.weights.trainer.outer import Tensors
from swarmnode.weights.trainer.replica import Replica

SWARM = b"\x21" * 32
BASE = b"\x22" * 32
TOKENIZER = b"\x23" * 32
BETWEEN_SECONDS = 0.005
CONFIG = WeightsConfig(fragments=1)


class Tiny(torch.nn.Module):
    """`layers.0.w` and `layers.1.w`, (64, 64) each, with the same initial values on all nodes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.w = torch.nn.Parameter(torch.randn(64, 64, generator=generator))


class Judge:
    """Stands in for MicroBatcher.score. The loss is the distance from `ideal`, the weights at
    construction."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.ideal = {n: p.detach().clone() for n, p in model.named_parameters()}

    def score(self, policy: Any, rows: list[Any], temperature: float) -> list[list[float]]:
        loss = sum(
            float((p.detach() - self.ideal[n]).norm()) for n, p in policy.model.named_parameters()
        )
        return [[-loss]] * len(rows)


class OptionalProbe(LossProbe):
    """A probe for tests that do not measure one."""

    def measure(self, mine: Tensors, mean: Tensors, answer: Answer) -> bool:
        if not super().measure(mine, mean, answer):
            answer(Losses(0.0, 0.0))
        return True


def probe_of(model: torch.nn.Module, judge: Judge, tensors: AveragedTensors) -> LossProbe:
    """Return a probe with `judge` in place of a policy's log-probabilities. Without remembered rows
    every average passes."""
    return OptionalProbe(
        cast("Policy", SimpleNamespace(model=model)), cast("MicroBatcher", judge), 1.0, tensors
    )


class TrainerHalf:
    """The trainer's half of a node's averaging. The test takes its steps.

    Args:
        parameters: Of a policy, or of a stage of one with `layers` layers.
        probe: Made of the tensors.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        cfg: WeightsConfig,
        directory: Path,
        probe: Callable[[AveragedTensors], Any],
        send: Callable[[local.FromTrainer], None],
        *,
        seed: int = 0,
        step: int = 1,
        layers: int | None = None,
        **options: Any,
    ) -> None:
        self.parameters = parameters
        self.counters = Counters(step=step)
        self.tensors = AveragedTensors(parameters, cfg.fragments, threading.Lock(), layers)
        self.probe = probe(self.tensors)
        self.replica = Replica(
            self.tensors, cfg, self.counters, directory, send=send, probe=self.probe, **options
        )
        self._generator = torch.Generator().manual_seed(seed)

    def step(self, size: float = 0.01, seed: int | None = None) -> None:
        """Take an optimizer step. seed: of this step alone."""
        generator = self._generator if seed is None else torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
        self.counters.step += 1

    def weights(self) -> Tensors:
        return {n: p.detach().clone() for n, p in self.parameters.items()}

    def phi(self) -> Tensors:
        """Return the slow weights."""
        return {
            n.removeprefix("phi."): t
            for n, t in self.replica.tensors().items()
            if n.startswith("phi.")
        }


class Node(TrainerHalf):
    """The averaging of one node. hold: kinds of messages that the trainer handles late."""

    def __init__(
        self,
        network: Libp2pNetwork,
        directory: Path,
        cfg: WeightsConfig,
        seed: int,
        fresh: bool,
        known: KnownPeers,
    ) -> None:
        self.network = network
        model = Tiny()
        self.judge = Judge(model)
        self.hold: set[type] = set()
        self.to_trainer: list[local.ToTrainer] = []
        self.service = WeightService(
            network,
            SWARM,
            cfg,
            known,
            directory,
            self._send_to_trainer,
        )
        self._token = trio.lowlevel.current_trio_token()
        probe = partial(probe_of, model, self.judge)
        super().__init__(
            dict(model.named_parameters()),
            cfg,
            directory,
            probe,
            self._send,
            seed=seed,
            step=int(not fresh),
        )
        self.fresh = fresh

    def connect(self) -> None:
        """Send the trainer's Hello."""
        self.service.set_policy(self.replica.facts(self.fresh), BASE, TOKENIZER)

    def due(self, fragment: int = 0, step_seconds: float = 0.01) -> None:
        outer_step, blocks = self.replica.outer_steps()[fragment], self.blocks()
        self.service.receive(
            local.OuterStepDue(fragment, outer_step, self.counters.step, step_seconds, blocks)
        )

    def blocks(self) -> bytes:
        return self.replica.facts(self.fresh).blocks()

    def outcome(self, name: str) -> int:
        return self.service.statistics().outcomes[name]

    def candidates(self) -> int:
        return self.service.statistics().candidates

    def _send_to_trainer(self, message: local.ToTrainer) -> bool:
        self.to_trainer.append(message)
        if type(message) not in self.hold:
            self.replica.receive(message)
        return True

    def _send(self, message: local.FromTrainer) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self.service.receive, message)

    async def run(self) -> None:
        while True:
            self.replica.between_steps(True, 0.01, stepped=False)
            await trio.sleep(BETWEEN_SECONDS)


@contextlib.asynccontextmanager
async def averaging(
    network: Libp2pNetwork,
    directory: Path,
    *,
    cfg: WeightsConfig = CONFIG,
    seed: int = 0,
    fresh: bool = False,
    known: KnownPeers = KnownPeers(everyone=True),  # noqa: B008
) -> AsyncIterator[Node]:
    """Yield a running node with its trainer connected."""
    node = Node(network, directory, cfg, seed, fresh, known)
    async with trio.open_nursery() as nursery:
        await nursery.start(node.service.run)
        nursery.start_soon(node.run)
        node.connect()
        try:
            yield node
        finally:
            nursery.cancel_scope.cancel()
            node.replica.close()


def settle(receive: Callable[[local.ToTrainer], None], sent: list[local.FromTrainer]) -> None:
    """Wait until the worker of a replica has handled all earlier messages. It answers a request
    that it cannot serve in order."""
    ping = local.SnapshotWritten(secrets.token_bytes(16), 99, "", 0)
    receive(local.TakeSnapshot(ping.session, ping.fragment, b""))
    deadline = time.monotonic() + 10
    while ping not in sent:
        assert time.monotonic() < deadline, "the worker is stuck"
        time.sleep(0.001)
    sent.remove(ping)


def identical(one: Tensors, other: Tensors) -> bool:
    """Return True if all tensors are equal bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())
