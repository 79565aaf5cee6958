"""The trainer's part of weight averaging. Only the trainer's thread changes θ, φ and δ, and only
between two steps.

    link's thread      `receive`: queues a message or drops a swap; returns at once
    worker's thread    slow work (`worker`): copy, encode, write; read, decode, gate;
                       prepare the outer step
    trainer's thread   `between_steps`: probe, which needs the model ─▶ commit. It never waits for
                       the network.

The calls of one swap, in order; those of the worker are marked w:

    TakeSnapshot ─▶ w `_copy`, `_publish` ─▶ SnapshotWritten
    ApplyPayload ─▶ w `_examine` ─▶ `_on_examined` ─▶ probe ─▶ `_on_losses`
                 ─▶ `_schedule_step` ─▶ w `_prepared` ─▶ `_commit`, `_step` ─▶ SwapEnded

The messages are defined in `weights.local`. No weight changes before the commit, so a swap that
fails leaves the policy bit-identical. The commit is saved in the same state file as everything
else, so after a kill it is either complete or absent.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from swarmnode.config import WeightsConfig
from swarmnode.weights import fragments, local
from swarmnode.weights.fingerprint import LoraShape
from swarmnode.weights.local import WeightsReport, writing_seconds
from swarmnode.weights.rule import LARGEST_OUTER_STEP, next_outer_step
from swarmnode.weights.schedule import OuterSchedule
from swarmnode.weights.trainer.averaged import AveragedTensors
from swarmnode.weights.trainer.gate import NORM_RATIO, Losses, Probe, norm, passes_probe
from swarmnode.weights.trainer.outer import (
    OuterState,
    Tensors,
    host_copy,
    unmoved,
)
from swarmnode.weights.trainer.payload_files import PayloadFiles
from swarmnode.weights.trainer.worker import (
    Arrival,
    AverageMeasured,
    AveragingCounters,
    AveragingWorker,
    PayloadExamined,
    PrepareStep,
    ReplicaParts,
    StateRead,
    StepPrepared,
    SwapTable,
    TrainerSwap,
    WorkerFailed,
)

log = logging.getLogger(__name__)

MAX_LOSS_INCREASE = 6.0
"""Largest increase of the loss on own completions, in nats per token, with which a neighbour's
state is adopted. The state of a policy after 25 outer steps increased it by 1.7. Arbitrary weights
with a vocabulary of 100,000 increase it by 10 or more."""


class Replica:
    """This node's replica of the policy.

    Args:
        send: Sends a message to the network process; called from any thread.
        probe: Measures averaged weights.
        adapter: Shape of the adapter, if one is trained.
    """

    def __init__(
        self,
        tensors: AveragedTensors,
        cfg: WeightsConfig,
        counters: AveragingCounters,
        data_dir: Path,
        *,
        send: Callable[[local.FromTrainer], None],
        probe: Probe,
        adapter: LoraShape | None = None,
    ) -> None:
        if cfg.rule == "off":
            raise ValueError("weights.rule is off: there is no replica")
        self._adapter = adapter
        self._send = send
        self._probe = probe
        outer = OuterState(tensors.parameters)
        schedule = OuterSchedule(cfg.sync_every, len(tensors.parts), tensors.blocks)
        self._parts = ReplicaParts(
            tensors, outer, counters, SwapTable(), schedule, adapter is not None
        )
        self._settled = threading.Event()
        self._announced = threading.Event()
        self._distance: float | None = None
        self._stalled = 0.0
        self.set_counters(counters)
        self._worker = AveragingWorker(self._parts, PayloadFiles(data_dir / local.DIRECTORY), send)

    # ---- start -----------------------------------------------------------------------------------

    def set_counters(self, counters: AveragingCounters) -> None:
        """Store the numbers that must survive a restart in `counters`."""
        self._parts.counters = counters
        count = len(self._parts.tensors.blocks)
        if len(counters.outer_clocks) != count:
            counters.outer_clocks = [max(counters.outer_clocks, default=0)] * count

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore φ and δ from the result of `tensors`. An empty mapping means φ = θ and δ = 0.

        Raises:
            StateError: The tensors belong to another policy.
        """
        if not tensors:
            tensors = unmoved(host_copy(self._parts.tensors.parameters))
        self._parts.outer.load(tensors)

    def tensors(self) -> Tensors:
        """Return φ and δ for the state file. They are not copied, because outer steps replace
        tensors and never modify them."""
        return self._parts.outer.tensors()

    def facts(self, fresh: bool) -> local.ReplicaFacts:
        """Return the description of this replica for the network process.

        Args:
            fresh: True if the policy has not been trained.
        """
        tensors = self._parts.tensors
        return local.ReplicaFacts(
            tensors.layout,
            len(tensors.parts),
            self.outer_steps(),
            fresh,
            self._adapter,
        )

    def outer_steps(self) -> list[int]:
        """Return the outer steps of each fragment: of its block with the fewest."""
        parts = self._parts
        return [parts.outer_step(spec.name for spec in part) for part in parts.tensors.parts]

    def wait_for_state(self, seconds: float, late: float = math.inf) -> bool:
        """Wait at most `seconds`; return True if the wait for a neighbour's state is over.

        It is over when a state was adopted, when no state is available, or when no state has been
        announced by `late` plus the time that a neighbour needs to write its state.

        Args:
            late: Monotonic time in seconds.
        """
        deadline = late + writing_seconds(self._parts.tensors.layout)
        return self._settled.wait(seconds) or (
            time.monotonic() >= deadline and not self._announced.is_set()
        )

    def close(self) -> None:
        self._worker.close()

    # ---- link's thread ---------------------------------------------------------------------------

    def receive(self, message: local.ToTrainer) -> None:
        """Handle a message of the network process; return at once."""
        match message:
            case local.DropSwap(session):
                self._parts.swaps.drop(session)
            case local.AdoptState(peer=""):
                self._settled.set()
            case local.AdoptState(path=""):
                self._announced.set()
            case _:
                self._worker.submit(message)

    # ---- trainer's thread, between two steps -----------------------------------------------------

    def between_steps(self, connected: bool, step_seconds: float, stepped: bool = True) -> bool:
        """Handle all results of the worker, then report a due outer step.

        Args:
            connected: True if a network process is connected, which can find a partner.
            stepped: True if a training step was taken since the last call.

        Returns:
            True if the policy's weights have changed.
        """
        started = time.monotonic()
        changed = False
        while self._worker.arrived:
            changed |= self._dispatch(self._worker.arrived.popleft())
        step = self._parts.counters.step
        if stepped and (due := self._parts.schedule.due(step)) is not None:
            fragment, blocks = due[0], fragments.pack(due[1])
            if connected:
                outer_step = self.outer_steps()[fragment]
                self._send(local.OuterStepDue(fragment, outer_step, step, step_seconds, blocks))
            else:
                self._worker.submit(local.SoloStep(fragment, blocks))
        self._parts.counters.policy_version += int(changed)
        self._stalled += time.monotonic() - started
        return changed

    def _dispatch(self, arrival: Arrival) -> bool:
        """Handle one result of the worker; return True if the policy's weights have changed."""
        match arrival:
            case WorkerFailed(error):
                raise error
            case PayloadExamined():
                self._on_examined(arrival)
            case AverageMeasured():
                self._on_losses(arrival)
            case StepPrepared(swap):
                if swap.session:
                    return self._commit(swap)
                self._record(swap)
            case StateRead():
                return self._adopt(arrival)
        return False

    # ---- a swap ----------------------------------------------------------------------------------

    def _on_examined(self, examined: PayloadExamined) -> None:
        swap, found = self._parts.swaps.get(examined.session), examined.found
        if swap is None:  # it was dropped, or another commit has replaced φ
            self._end(None, examined.session, "local")
        elif found.refusal == "lagging":
            # The partner receives this node's weights; this node takes a solo step.
            self._schedule_step(swap, "lagging", {})
        elif found.mean is None:
            self._end(swap, swap.session, found.refusal)
        else:
            answer = lambda losses: self._worker.arrived.append(
                AverageMeasured(swap.session, found, losses)
            )
            if not self._probe.measure(swap.snapshot, found.mean, answer):
                log.info(
                    "rejected weights of %s: too few own completions to probe them",
                    swap.peer,
                )
                self._end(swap, swap.session, "local")

    def _on_losses(self, measured: AverageMeasured) -> None:
        swap, found, losses = (
            self._parts.swaps.get(measured.session),
            measured.found,
            measured.losses,
        )
        if swap is None or losses is None:
            self._end(swap, measured.session, "local")
            return
        if found.mean is None or not passes_probe(losses):
            log.info(
                "rejected weights of %s: probe loss %.3f -> %.3f nats per token",
                swap.peer,
                losses.before,
                losses.after,
            )
            self._end(swap, swap.session, "probe")
        else:
            self._distance = found.relative_distance  # meaningful for accepted weights only
            self._schedule_step(swap, "accepted", found.mean)

    def _schedule_step(self, swap: TrainerSwap, outcome: str, mean: Tensors) -> None:
        """Have the worker prepare the outer step.

        Args:
            outcome: `accepted` or `lagging`.
            mean: θ̄; empty for a step with this node's weights alone.
        """
        swap = dataclasses.replace(swap, outcome=outcome)
        if self._parts.swaps.update(swap):
            self._worker.submit(PrepareStep(swap, mean))
        else:
            self._end(None, swap.session, "local")

    def _commit(self, swap: TrainerSwap) -> bool:
        """Take the prepared outer step of a swap, unless the swap was dropped or φ has
        changed. Return True if the policy's weights have changed."""
        if self._parts.swaps.pop(swap.session) is None or not self._step(swap):
            self._end(None, swap.session, "local")
            return False
        counters = self._parts.counters
        counters.exchanges_total += 1
        outer_step = self.outer_steps()[swap.fragment]
        self._send(
            local.SwapEnded(
                swap.session,
                swap.fragment,
                swap.peer,
                swap.outcome,
                True,
                outer_step,
            )
        )
        return swap.outcome == "accepted"

    def _end(self, swap: TrainerSwap | None, session: bytes, outcome: str) -> None:
        """End a swap without a commit.

        Args:
            swap: None if it is not in the table any more.
        """
        self._parts.swaps.pop(session)
        fragment, peer = (swap.fragment, swap.peer) if swap is not None else (0, "")
        outer_step = self.outer_steps()[fragment]
        self._send(local.SwapEnded(session, fragment, peer, outcome, False, outer_step))

    def _record(self, swap: TrainerSwap) -> None:
        """Take a solo step, which changes φ and δ but no weight, unless φ has changed since it was
        prepared."""
        if self._step(swap):
            self._parts.counters.solo_steps_total += 1

    def _step(self, swap: TrainerSwap) -> bool:
        """Take a prepared outer step of a swap's or a solo step's blocks. Return False, without
        effect, if φ has changed since the copy was made."""
        parts, averaged = self._parts, swap.outcome == "accepted"
        if swap.prepared is None:
            return False
        blocks = {fragments.block_of(name) for name in swap.snapshot}
        with parts.tensors.lock:
            if not parts.outer.take(swap.prepared):
                return False
            if averaged:
                parts.outer.merge_parameters(parts.tensors.parameters, swap.snapshot)
            clocks = zip(parts.tensors.blocks, parts.counters.outer_clocks, strict=True)
            parts.counters.outer_clocks = [
                next_outer_step(clock, swap.their_outer_step) if block in blocks else clock
                for block, clock in clocks
            ]
            parts.swaps.drop_fragment(swap.fragment)
            parts.schedule.stepped(blocks, parts.counters.step)
        return True

    # ---- a neighbour's state ---------------------------------------------------------------------

    def _adopt(self, read: StateRead) -> bool:
        outcome = read.outcome or self._become(read)
        self._send(local.StateAdopted(read.peer, outcome, self.outer_steps()))
        if outcome == "adopted":
            log.info("adopted the state of %s, %d outer steps", read.peer, read.outer_step)
            self._settled.set()
        return outcome == "adopted"

    def _become(self, read: StateRead) -> str:
        """Replace the weights by a neighbour's; return one of `local.ADOPTIONS`."""
        parts, counters = self._parts, self._parts.counters
        if counters.step:
            return "local"  # too late: a policy that was trained here is not discarded
        own, theirs = norm(parts.outer.phi), norm(read.tensors)
        if not math.isfinite(theirs):
            return "not_finite"
        if self._adapter is None and not own / NORM_RATIO <= theirs <= own * NORM_RATIO:
            return "norm_ratio"
        if read.outer_step > LARGEST_OUTER_STEP or not self._is_plausible(read.tensors):
            return "worse"
        with parts.tensors.lock:
            parts.outer.adopt(parts.tensors.parameters, read.tensors)
            parts.swaps.clear()
        counters.outer_clocks = [read.outer_step] * len(counters.outer_clocks)
        return "adopted"

    def _is_plausible(self, phi: Tensors) -> bool:
        """Return True if the loss on own completions increases by at most MAX_LOSS_INCREASE under a
        neighbour's weights."""
        verdicts: list[Losses | None] = []
        mine = host_copy(self._parts.tensors.parameters)
        if (
            not self._probe.measure(mine, phi, verdicts.append)
            or not verdicts
            or verdicts[0] is None
        ):
            log.warning("rejected a neighbour's state: too few own completions to probe it")
            return False
        worse = verdicts[0].after - verdicts[0].before
        log.info(
            "a neighbour's state increases the loss on own completions by %.2f nats per token",
            worse,
        )
        return worse <= MAX_LOSS_INCREASE

    # ---- statistics ------------------------------------------------------------------------------

    def report(self) -> WeightsReport:
        counters = self._parts.counters
        return WeightsReport(
            fragments=len(self._parts.tensors.parts),
            outer_step=min(counters.outer_clocks),
            exchanges_total=counters.exchanges_total,
            solo_steps_total=counters.solo_steps_total,
            distance=self._distance,
            stall_seconds_total=self._stalled + self._worker.copy_seconds,
        )
