"""What a member remembers of the last micro-batches that were committed: by it a recovered stage is
judged, and healed. Torch.

    probes    at the tail: token ids and log-probabilities of then; it gives copies to its ring
    neighbours, so that they outlive any one
              of head and tail
    edges     at every stage: activations as they arrived and as they were sent on. What arrived at
    stage i + 1 and what left stage i − 1
              are what a lost stage i has to turn into each other.

Nothing is computed for it, and activations are kept as the bytes that travelled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from swarmnode.pipeline.frames import FrameLimits
from swarmnode.pipeline.observer import Observer
from swarmnode.pipeline.routes import Routes
from swarmnode.pipeline.spec import StageSpec
from swarmnode.pipeline.work import MicroBatch, read_micro_batch
from swarmnode.pipeline.worker import StageWorker
from swarmnode.recovery.messages import Edge, Probe
from swarmnode.recovery.sources import RecoverySettings
from swarmnode.wire import strict
from swarmnode.wire.tensors import pack_logprobs


@dataclass
class _Pending:
    about: bytes
    source: int
    arrived: bytes
    target: int | None = None
    sent: bytes = b""
    logprobs: bytes = b""


@dataclass
class Recorder(Observer):
    """Remembers for stage `spec`. Swapped micro-batches are left out: they are not run as the
    policy is."""

    spec: StageSpec
    settings: RecoverySettings
    probes: list[Probe] = field(default_factory=list)
    """The newest, oldest first: own ones at the tail, the tail's elsewhere."""
    edges: deque[Edge] = field(default_factory=deque)
    ends: dict[int, tuple[int, dict[str, torch.Tensor]]] = field(default_factory=dict)
    """Paper mode: end stage, our own or the one beside us → (step, true copies of its embedding, or
    norm and head)."""
    copy: tuple[int, bytes, bytes] | None = None
    """(steps, step hash, bytes) of `LocalStage.copy`, if anybody has asked since the last step."""
    _pending: dict[int, _Pending] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._routes = Routes(self.spec.stages, self.settings.mode == "checkfree+")

    def received(self, micro_batch: int, about: bytes, sender: int, body: bytes) -> None:
        if self._routes.of(micro_batch) == self._routes.of(0):
            self._pending[micro_batch] = _Pending(about, sender, body)
            self._trim()

    def sent(self, micro_batch: int, receiver: int, body: bytes) -> None:
        if micro_batch in self._pending:
            self._pending[micro_batch].target, self._pending[micro_batch].sent = receiver, body
            self._trim()

    def _trim(self) -> None:
        """A step may have a thousand micro-batches: no more of them is kept while it lasts than
        afterwards."""
        while len(self._pending) > self.settings.memory:
            del self._pending[next(iter(self._pending))]
        size = sum(len(seen.arrived) + len(seen.sent) for seen in self._pending.values())
        for seen in self._pending.values():
            if size <= self.settings.pair_bytes:
                return
            size -= len(seen.arrived) + len(seen.sent)
            seen.arrived, seen.sent, seen.target = b"", b"", None

    def learnt(self, micro_batch: int, logprobs: torch.Tensor) -> None:
        if micro_batch in self._pending:
            self._pending[micro_batch].logprobs = pack_logprobs(logprobs.numpy())

    def committed(self, worker: StageWorker) -> None:
        self.copy = None
        step = worker.participant.step - 1
        for number, seen in sorted(self._pending.items()):
            rows = strict.decode(seen.about, MicroBatch).rows
            if seen.logprobs:
                self.probes.append(Probe(number, step, rows, seen.about, seen.logprobs))
            if seen.arrived:
                self.edges.append(
                    Edge(number, step, seen.source, self.spec.index, rows, seen.about, seen.arrived)
                )
            if seen.target is not None:
                self.edges.append(
                    Edge(number, step, self.spec.index, seen.target, rows, seen.about, seen.sent)
                )
        self._pending.clear()
        del self.probes[: -self.settings.memory]
        while (
            len(self.edges) > 2 * self.settings.memory
            or sum(len(edge.body) for edge in self.edges) > self.settings.pair_bytes
        ):
            self.edges.popleft()

    def dropped(self) -> None:
        self._pending.clear()


def work_of(item: Probe | Edge, limits: FrameLimits) -> MicroBatch:
    """The micro-batch that a peer's probe or edge is of. Raises BadMessage as
    `work.read_micro_batch` does."""
    return read_micro_batch(item.about, item.rows, limits, "learn")
