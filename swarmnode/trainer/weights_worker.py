"""The slow half of averaging in the trainer, in a thread of its own: copies, encodes, writes;
reads, decodes, examines, prepares.

    link's thread ─ submit ─▶ jobs ─▶ worker's thread ─▶ arrived ─▶ trainer's thread, between two
    steps

The worker moves no weight. It copies them while it holds the lock of whoever does, reads φ and δ,
which are replaced and never changed, and leaves what it has found to the trainer's thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarmnode.averaging import codecs, lora
from swarmnode.averaging.averaged import AveragedTensors
from swarmnode.averaging.exchanges import Exchange, ExchangeTable
from swarmnode.averaging.gate import AveragingGate, Examination, Losses, norm
from swarmnode.averaging.outer import OuterState, Tensors, prepare
from swarmnode.averaging.payload_files import PayloadFiles, mapped
from swarmnode.errors import BadMessage
from swarmnode.trainer.state import Counters
from swarmnode.weights import local
from swarmnode.weights.fragments import blocks_of
from swarmnode.weights.layout import Layout
from swarmnode.weights.manifest import STATE_CODEC, TensorHash
from swarmnode.weights.rule import mixing_weight, too_far_behind
from swarmnode.weights.schedule import OuterSchedule

log = logging.getLogger(__name__)

NAMED = ("names", "dtype", "shape", "not_finite")
"""Reasons against a payload that are outcomes by themselves."""


@dataclass
class ReplicaParts:
    """What the trainer's thread and the worker's both use. Who may change it, and how:"""

    tensors: AveragedTensors
    """Weights: the trainer's thread, while it holds `tensors.lock`."""
    outer: OuterState
    """φ and δ: the trainer's thread, while it holds `tensors.lock`."""
    counters: Counters
    """The trainer's thread; outer steps while it holds `tensors.lock`."""
    exchanges: ExchangeTable
    """Any thread: it has a lock of its own."""
    gate: AveragingGate
    """Any thread: it has a lock of its own."""
    schedule: OuterSchedule
    """The trainer's thread; what is left while it holds `tensors.lock`."""

    def copy(self, session: bytes, fragment: int, blocks: bytes | None = None) -> Exchange:
        """A new exchange of `fragment`, in the table where it has a session. Waits for the
        optimizer, which is nearly always at rest.

        blocks: what the partner holds, packed; None where there is none.
        """
        with self.tensors.lock:
            slow, snapshot = (
                self.outer.slow(self.tensors.names(fragment)),
                self.tensors.copy(fragment),
            )
            shared = (
                snapshot
                if blocks is None
                else {name: snapshot[name] for name in self.tensors.shared(fragment, blocks)}
            )
            # of the outer step that was counted already
            rest = self.schedule.is_rest(fragment, self.schedule.takes(fragment, shared))
            exchange = Exchange(
                session,
                fragment,
                snapshot,
                shared,
                slow,
                max(0, self.counters.outer_clocks[fragment] - int(rest)),
            )
            if session:
                self.exchanges.put(exchange)
        return exchange


# ---- jobs: messages of the network process, and these of our own ---------------------------------


@dataclass(frozen=True)
class PrepareStep:
    """The gate has decided: compute the outer step."""

    exchange: Exchange
    mean: Tensors
    """θ̄ of the tensors that are averaged."""
    alone: Tensors
    """θ of those that are only recorded."""


Job = (
    local.TakeSnapshot
    | local.ApplyPayload
    | local.SoloStep
    | local.WriteState
    | local.AdoptState
    | PrepareStep
)


# ---- what the trainer's thread gets, in `arrived` ------------------------------------------------


@dataclass(frozen=True)
class PayloadExamined:
    session: bytes
    found: Examination | None
    """None where it did not come to that."""
    outcome: str = ""
    """One of `outcomes.OUTCOMES`, where nothing was examined."""


@dataclass(frozen=True)
class AverageMeasured:
    """The probe's verdict."""

    session: bytes
    found: Examination
    losses: Losses | None


@dataclass(frozen=True)
class StepPrepared:
    exchange: Exchange


@dataclass(frozen=True)
class StateRead:
    """φ of somebody else."""

    peer: str
    outer_step: int
    """The claim of whose they are."""
    tensors: Tensors
    outcome: str = ""
    """One of `outcomes.ADOPTIONS`, where there is no state; empty where there is."""


@dataclass(frozen=True)
class WorkerFailed:
    error: Exception


Arrival = PayloadExamined | AverageMeasured | StepPrepared | StateRead | WorkerFailed


class AveragingWorker:
    """trains_a: adapters are averaged with their A. send: to the network process, from any
    thread."""

    def __init__(
        self,
        parts: ReplicaParts,
        files: PayloadFiles,
        trains_a: bool,
        send: Callable[[local.FromTrainer], None],
    ) -> None:
        self.arrived: deque[Arrival] = deque()
        """What the trainer's thread has to look at, in this order."""
        self.lag: float | None = None
        """Outer steps that the last partner was behind us; negative when ahead."""
        self.copy_seconds = 0.0
        """Time that a copy kept the optimizer from the weights, at most."""
        self._parts = parts
        self._files = files
        self._trains_a = trains_a
        self._send = send
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Have it done, soon, unless it is of an exchange that is dropped before its turn; from any
        thread."""
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=5.0)

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._do(job)
            except Exception as error:  # noqa: BLE001
                # it would end this thread unseen: the trainer is to fail of it, at its next step
                self.arrived.append(WorkerFailed(error))

    def _do(self, job: Job) -> None:
        match job:
            case local.TakeSnapshot(session) | local.ApplyPayload(session) if (
                self._parts.exchanges.is_dropped(session)
            ):
                pass  # nobody waits for it
            case local.TakeSnapshot(session, fragment, blocks):
                if self._is_ours(fragment):
                    self._publish(self._copy(session, fragment, blocks))
                else:
                    self._send(local.SnapshotWritten(session, fragment, "", 0))
            case local.ApplyPayload():
                if self._is_ours(job.fragment):
                    self.arrived.append(self._examine(job))
            case PrepareStep():
                self.arrived.append(StepPrepared(self._prepared(job)))
            case local.SoloStep(fragment):
                if self._is_ours(fragment):
                    exchange = self._copy(b"", fragment)
                    step = PrepareStep(exchange, {}, exchange.snapshot)
                    self.arrived.append(StepPrepared(self._prepared(step)))
            case local.WriteState():
                self._write_state()
            case local.AdoptState():
                self.arrived.append(read_state(job, self._parts.tensors.layout))

    def _is_ours(self, fragment: int) -> bool:
        return 0 <= fragment < len(self._parts.tensors.parts)

    def _copy(self, session: bytes, fragment: int, blocks: bytes | None = None) -> Exchange:
        began = time.monotonic()
        exchange = self._parts.copy(session, fragment, blocks)
        self.copy_seconds += time.monotonic() - began
        return exchange

    def _prepared(self, step: PrepareStep) -> Exchange:
        exchange = step.exchange
        prepared = prepare(self._parts.outer.rule, exchange.slow, step.mean, step.alone)
        return dataclasses.replace(exchange, prepared=prepared)

    def _publish(self, exchange: Exchange) -> None:
        learnt = norm(exchange.shared, minus=exchange.slow.phi)
        data = self._parts.tensors.encode(exchange.fragment, exchange.shared, learnt)
        if self._parts.exchanges.is_dropped(exchange.session):
            return
        path, blocks = self._files.write([data]), blocks_of(exchange.shared)
        self._send(
            local.SnapshotWritten(
                exchange.session, exchange.fragment, path, exchange.outer_step, blocks
            )
        )

    def _examine(self, message: local.ApplyPayload) -> PayloadExamined:
        """Read a partner's payload and do all of the gate but the probe, which is for between two
        steps."""
        session = message.session
        exchange = self._parts.exchanges.get(session)
        # The partner was served a copy of some seconds ago, or a commit has replaced φ since: our
        # side starts from the weights of now.
        if exchange is None:
            exchange = self._copy(session, message.fragment, message.blocks)
        exchange = dataclasses.replace(
            exchange, peer=message.peer, their_outer_step=message.outer_step
        )
        if not self._parts.exchanges.update(exchange):
            return PayloadExamined(session, None, "local")
        try:
            theirs = self._parts.tensors.decode(
                exchange.fragment, mapped(message.path), exchange.shared
            )
        except BadMessage as bad:
            log.warning("weights of %s: %s", message.peer, bad)
            return PayloadExamined(session, None, bad.reason if bad.reason in NAMED else "payload")
        except (OSError, ValueError) as error:
            log.warning("weights of %s could not be read: %s", message.peer, error)
            return PayloadExamined(session, None, "local")
        self.lag = float(exchange.outer_step - message.outer_step)
        if too_far_behind(self.lag):
            return PayloadExamined(session, None, "lagging")
        if self._trains_a and not lora.residual(exchange.shared, theirs).allowed:
            return PayloadExamined(session, None, "lora_residual")
        found = self._parts.gate.examine(
            exchange.peer,
            exchange.shared,
            theirs,
            weight=mixing_weight(self.lag),
            moved=norm(exchange.shared, minus=exchange.slow.phi),
            probation=self._parts.counters.probation,
        )
        return PayloadExamined(session, found)

    def _write_state(self) -> None:
        layout = self._parts.tensors.layout
        with self._parts.tensors.lock:
            phi, outer_step = dict(self._parts.outer.phi), min(self._parts.counters.outer_clocks)
        path = self._files.write(codecs.encoded(phi, layout, STATE_CODEC))
        self._send(
            local.StateWritten(
                path,
                outer_step,
                [TensorHash(spec.name, _hash_of(phi[spec.name])) for spec in layout],
            )
        )


def read_state(message: local.AdoptState, layout: Layout) -> StateRead:
    """φ that the network process has fetched, held to the hashes that were signed."""
    refused = lambda outcome: StateRead(message.peer, message.outer_step, {}, outcome)
    try:
        tensors = codecs.decode(mapped(message.path), layout, STATE_CODEC)
    except BadMessage:
        return refused("payload")
    except (OSError, ValueError):
        return refused("local")
    signed = {tensor.name: tensor.phi for tensor in message.tensors}
    if any(_hash_of(tensor) != signed.get(name) for name, tensor in tensors.items()):
        return refused("hash")
    return StateRead(message.peer, message.outer_step, tensors)


def _hash_of(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(codecs.to_bytes(codecs.bfloat16_bits(tensor), "<i2")).digest()
