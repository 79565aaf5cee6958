"""The slow part of weight averaging in the trainer, in its own thread: copies, encodes and writes
weights; reads, decodes and examines payloads; prepares outer steps.

    link's thread ─ submit ─▶ jobs ─▶ worker's thread ─▶ arrived ─▶ trainer's thread,
                                                                    between two steps

The worker changes no weights. It copies them under the optimizer's lock. It reads φ and δ without
copying, because an outer step replaces these tensors and never modifies them.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.latest import Latest
from swarmnode.weights import local
from swarmnode.weights.fragments import block_of
from swarmnode.weights.layout import Layout
from swarmnode.weights.local import MOST_SWAPS, STATE_CODEC
from swarmnode.weights.rule import mixing_weight, too_far_behind
from swarmnode.weights.schedule import OuterSchedule
from swarmnode.weights.trainer import codecs
from swarmnode.weights.trainer.averaged import AveragedTensors
from swarmnode.weights.trainer.gate import Examination, Losses, examine, norm
from swarmnode.weights.trainer.outer import (
    OuterState,
    Prepared,
    SlowWeights,
    Tensors,
    host_copy,
    prepare,
)
from swarmnode.weights.trainer.payload_files import PayloadFiles, mapped

log = logging.getLogger(__name__)

NAMED = ("shape", "not_finite")
"""Reasons of `BadMessage` that are also outcomes of a swap."""


# ---- swaps under way -----------------------------------------------------------------------------


DROPPED: Final = 1024
"""Ids of dropped swaps that are remembered. Fewer swaps can begin while the worker writes a
state."""


@dataclass(frozen=True)
class TrainerSwap:
    """The trainer's state of one swap of some blocks, or of a solo step."""

    session: bytes
    """Id of the swap; empty for a solo step."""
    fragment: int
    snapshot: Tensors
    """This node's weights of the blocks at the time of the copy, float32 on the host."""
    slow: SlowWeights
    """φ and δ at the time of the copy."""
    outer_step: int
    """`ReplicaParts.outer_step` of the blocks."""
    peer: str = ""
    their_outer_step: int | None = None
    """The partner's claim."""
    prepared: Prepared | None = None
    """The outer step with the tensors that passed the gate; None before."""
    outcome: str = ""
    """The gate's verdict, one of `weights.local.OUTCOMES`."""


class SwapTable:
    """Swaps under way in the trainer by id, at most MOST_SWAPS. A swap that is not in the table
    must not be applied. All methods are thread-safe."""

    def __init__(self) -> None:
        self._swaps = Latest[bytes, TrainerSwap](MOST_SWAPS)
        self._dropped: deque[bytes] = deque(maxlen=DROPPED)
        self._lock = threading.Lock()

    def put(self, swap: TrainerSwap) -> None:
        """Add a swap unless it was dropped before. Of more than MOST_SWAPS, remove the
        oldest."""
        with self._lock:
            if swap.session in self._dropped:
                return
            self._swaps[swap.session] = swap

    def get(self, session: bytes) -> TrainerSwap | None:
        with self._lock:
            return self._swaps.get(session)

    def update(self, swap: TrainerSwap) -> bool:
        """Replace the record of a swap. Return False if the swap was dropped meanwhile."""
        with self._lock:
            if swap.session not in self._swaps:
                return False
            self._swaps[swap.session] = swap
            return True

    def pop(self, session: bytes) -> TrainerSwap | None:
        with self._lock:
            return self._swaps.pop(session, None)

    def drop(self, session: bytes) -> None:
        """Remove a swap, and refuse it if it is added later."""
        with self._lock:
            self._swaps.pop(session, None)
            self._dropped.append(session)

    def is_dropped(self, session: bytes) -> bool:
        with self._lock:
            return session in self._dropped

    def drop_fragment(self, fragment: int) -> None:
        """Remove all swaps of `fragment`: their copies are of weights that no longer exist."""
        with self._lock:
            for session in [s for s, swap in self._swaps.items() if swap.fragment == fragment]:
                del self._swaps[session]

    def clear(self) -> None:
        with self._lock:
            self._swaps.clear()


# ---- state that both threads share ---------------------------------------------------------------


class AveragingCounters(msgspec.Struct):
    """Numbers of averaging that survive a restart, and those of the trainer that averaging reads or
    raises."""

    step: int = 0
    policy_version: int = 0
    outer_clocks: list[int] = []
    """Outer step counters, by block."""
    exchanges_total: int = 0
    solo_steps_total: int = 0


@dataclass
class ReplicaParts:
    """State that the trainer's and the worker's thread share. Each attribute states which thread
    may change it."""

    tensors: AveragedTensors
    """Weights. Changed by the trainer's thread, under `tensors.lock`."""
    outer: OuterState
    """φ and δ. Changed by the trainer's thread, under `tensors.lock`."""
    counters: AveragingCounters
    """Changed by the trainer's thread; the outer step counters under `tensors.lock`."""
    swaps: SwapTable
    """Changed by any thread; it has its own lock."""
    schedule: OuterSchedule
    """Changed by the trainer's thread."""
    is_adapter: bool
    """True if the weights are those of an adapter. Never changed."""

    def outer_step(self, names: Iterable[str]) -> int:
        """Return the number of outer steps of the block with the fewest, among the blocks of these
        tensors. Without tensors, among all."""
        blocks, clocks = {block_of(name) for name in names}, self.counters.outer_clocks
        of_each = zip(self.tensors.blocks, clocks, strict=True)
        return min((clock for block, clock in of_each if block in blocks), default=min(clocks))

    def copy(self, session: bytes, fragment: int, blocks: bytes) -> TrainerSwap:
        """Return a new swap with a copy of the weights of some blocks. With a session, add it to
        the table. Waits for an optimizer step in progress.

        Args:
            session: Session of the swap; empty for a solo step.
            blocks: Blocks of the fragment, as a bitmask (`fragments.pack`).
        """
        with self.tensors.lock:
            names = self.tensors.shared(fragment, blocks)
            snapshot = host_copy(self.tensors.parameters, names)
            slow, outer_step = self.outer.slow(names), self.outer_step(names)
            swap = TrainerSwap(session, fragment, snapshot, slow, outer_step)
            if session:
                self.swaps.put(swap)
        return swap


# ---- jobs: messages of the network process, and `PrepareStep` of the trainer's thread ------------


@dataclass(frozen=True)
class PrepareStep:
    """Compute the outer step of a swap that passed the gate."""

    swap: TrainerSwap
    mean: Tensors
    """θ̄ of its tensors; empty for a solo step."""


Job = (
    local.TakeSnapshot
    | local.ApplyPayload
    | local.SoloStep
    | local.WriteState
    | local.AdoptState
    | PrepareStep
)


# ---- results for the trainer's thread, in `arrived` ----------------------------------------------


@dataclass(frozen=True)
class PayloadExamined:
    """Result of the gate, except for the probe."""

    session: bytes
    found: Examination


@dataclass(frozen=True)
class AverageMeasured:
    """Result of the probe."""

    session: bytes
    found: Examination
    losses: Losses | None


@dataclass(frozen=True)
class StepPrepared:
    """An outer step that can be committed."""

    swap: TrainerSwap


@dataclass(frozen=True)
class StateRead:
    """φ of a neighbour."""

    peer: str
    outer_step: int
    """Outer step that the neighbour reports."""
    tensors: Tensors
    outcome: str = ""
    """Reason for which the state was rejected, one of `local.ADOPTIONS`; empty if it was read."""


@dataclass(frozen=True)
class WorkerFailed:
    """Exception in the worker's thread, which the trainer's thread raises."""

    error: Exception


Arrival = PayloadExamined | AverageMeasured | StepPrepared | StateRead | WorkerFailed


class AveragingWorker:
    """Thread that does the slow work of averaging.

    Args:
        send: Sends a message to the network process; called from any thread.
    """

    def __init__(
        self,
        parts: ReplicaParts,
        files: PayloadFiles,
        send: Callable[[local.FromTrainer], None],
    ) -> None:
        self.arrived: deque[Arrival] = deque()
        """Results for the trainer's thread, oldest first."""
        self.copy_seconds = 0.0
        """Total time of copies, an upper bound of the time for which they blocked the optimizer."""
        self._parts = parts
        self._files = files
        self._send = send
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; called from any thread. The job is skipped if its swap is dropped before
        it starts."""
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
                # The trainer's thread raises it; here it would only end this thread unnoticed.
                self.arrived.append(WorkerFailed(error))

    def _do(self, job: Job) -> None:
        match job:
            case local.TakeSnapshot(session) | local.ApplyPayload(session) if (
                self._parts.swaps.is_dropped(session)
            ):
                pass
            case local.TakeSnapshot(session, fragment, blocks):
                if self._holds(fragment):
                    self._publish(self._copy(session, fragment, blocks))
                else:
                    self._send(local.SnapshotWritten(session, fragment, "", 0))
            case local.ApplyPayload():
                if self._holds(job.fragment):
                    self.arrived.append(self._examine(job))
            case PrepareStep():
                self.arrived.append(StepPrepared(self._prepared(job)))
            case local.SoloStep(fragment, blocks):
                if self._holds(fragment):
                    step = PrepareStep(self._copy(b"", fragment, blocks), {})
                    self.arrived.append(StepPrepared(self._prepared(step)))
            case local.WriteState():
                self._write_state()
            case local.AdoptState():
                self.arrived.append(read_state(job, self._parts.tensors.layout))

    def _holds(self, fragment: int) -> bool:
        return 0 <= fragment < len(self._parts.tensors.parts)

    def _copy(self, session: bytes, fragment: int, blocks: bytes) -> TrainerSwap:
        began = time.monotonic()
        swap = self._parts.copy(session, fragment, blocks)
        self.copy_seconds += time.monotonic() - began
        return swap

    def _prepared(self, step: PrepareStep) -> TrainerSwap:
        swap, solo = step.swap, {} if step.mean else step.swap.snapshot
        prepared = prepare(self._parts.outer.rule, swap.slow, step.mean, solo)
        return dataclasses.replace(swap, prepared=prepared)

    def _publish(self, swap: TrainerSwap) -> None:
        learnt = norm(swap.snapshot, minus=swap.slow.phi)
        data = self._parts.tensors.encode(swap.fragment, swap.snapshot, learnt)
        if self._parts.swaps.is_dropped(swap.session):
            return
        path = self._files.write([data])
        self._send(local.SnapshotWritten(swap.session, swap.fragment, path, swap.outer_step))

    def _examine(self, message: local.ApplyPayload) -> PayloadExamined:
        """Read a partner's payload and run all checks of the gate except for the probe, which runs
        between two steps."""
        session = message.session
        refused = lambda why: PayloadExamined(session, Examination(why))
        swap = self._parts.swaps.get(session)
        if swap is None:  # a commit has replaced φ since the copy
            return refused("local")
        swap = dataclasses.replace(swap, peer=message.peer, their_outer_step=message.outer_step)
        if not self._parts.swaps.update(swap):
            return refused("local")
        try:
            theirs = self._parts.tensors.decode(swap.fragment, mapped(message.path), swap.snapshot)
        except BadMessage as bad:
            log.warning("weights of %s: %s", message.peer, bad)
            return refused(bad.reason if bad.reason in NAMED else "payload")
        except (OSError, ValueError) as error:
            log.warning("cannot read weights of %s: %s", message.peer, error)
            return refused("local")
        lag = float(swap.outer_step - message.outer_step)
        if too_far_behind(lag):
            return refused("lagging")
        found = examine(
            swap.snapshot,
            theirs,
            weight=mixing_weight(lag),
            adapter=self._parts.is_adapter,
        )
        return PayloadExamined(session, found)

    def _write_state(self) -> None:
        layout = self._parts.tensors.layout
        with self._parts.tensors.lock:
            phi, outer_step = dict(self._parts.outer.phi), min(self._parts.counters.outer_clocks)
        path = self._files.write(codecs.encode(phi, layout, STATE_CODEC))
        self._send(local.StateWritten(path, outer_step))


def read_state(message: local.AdoptState, layout: Layout) -> StateRead:
    """Read φ that the network process has fetched."""
    refused = lambda outcome: StateRead(message.peer, message.outer_step, {}, outcome)
    try:
        tensors = codecs.decode(mapped(message.path), layout, STATE_CODEC)
    except BadMessage:
        return refused("payload")
    except (OSError, ValueError):
        return refused("local")
    return StateRead(message.peer, message.outer_step, tensors)
