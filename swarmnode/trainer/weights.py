"""The trainer's half of averaging, in the trainer's own thread: it alone moves weights, φ and δ,
and only between two steps.

    link's thread      `receive`: queues, or forgets a dropped exchange; returns at once
    worker's thread    everything slow (`weights_worker`): copy, encode, write; read, decode, gate;
    the outer step
    trainer's thread   everything else, here: probe, which needs the model ─▶ commit, all at once
    nothing waits for the network

What travels is in `weights.local`. Until a commit no weight has moved, so an exchange that ends for
whatever reason leaves the policy as it was, bit by bit; the commit itself is part of the same state
file as everything else, so a kill at any time loses it whole or not at all.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from swarmnode.averaging.averaged import AveragedTensors
from swarmnode.averaging.exchanges import Exchange, ExchangeTable
from swarmnode.averaging.gate import NORM_RATIO, AveragingGate, Examination, Losses, norm
from swarmnode.averaging.outer import OuterState, SlowWeights, Tensors, host_copy, unmoved
from swarmnode.averaging.payload_files import PayloadFiles
from swarmnode.averaging.probe import Probe
from swarmnode.config import WeightsConfig
from swarmnode.errors import StateError
from swarmnode.link.messages import WeightsReport
from swarmnode.trainer.state import Counters
from swarmnode.trainer.weights_worker import (
    Arrival,
    AverageMeasured,
    AveragingWorker,
    PayloadExamined,
    PrepareStep,
    ReplicaParts,
    StateRead,
    StepPrepared,
    WorkerFailed,
)
from swarmnode.weights import fragments, local
from swarmnode.weights.fingerprint import LoraShape
from swarmnode.weights.local import TAKEN
from swarmnode.weights.manifest import writing_seconds
from swarmnode.weights.rule import LARGEST_OUTER_STEP, counter_excess, make_rule, next_outer_step
from swarmnode.weights.schedule import OuterSchedule

log = logging.getLogger(__name__)

UNLEARNT = 6.0
"""Nats per token by which our own completions may be less likely under a neighbour's state. That of
a policy that had learnt for 25 outer steps made them 1.7 less likely; weights that are no policy of
a vocabulary of 100,000 make it 10 and more."""

MET = 64
"""Partners whose claims say whether our outer steps are right: those met last."""


@dataclass(frozen=True)
class Adoption:
    """A neighbour's state was taken and has not proved itself; with what it replaced."""

    peer: str
    reward: float | None
    """Held-out reward before it."""
    slow: SlowWeights
    outer_steps: list[int]


class Replica:
    """This node's replica among others.

    send: to the network process, from any thread. probe: judges averages. adapter: its shape, if
    one is trained.
    """

    def __init__(
        self,
        tensors: AveragedTensors,
        cfg: WeightsConfig,
        counters: Counters,
        data_dir: Path,
        *,
        send: Callable[[local.FromTrainer], None],
        probe: Probe,
        adapter: LoraShape | None = None,
    ) -> None:
        if cfg.rule == "off":
            raise ValueError("nothing is averaged")
        self._rule = cfg.rule
        self._adapter = adapter
        self._send = send
        self._probe = probe
        outer = OuterState(tensors.parameters, make_rule(cfg.rule))
        schedule = OuterSchedule(cfg.sync_every, len(tensors.parts))
        self._parts = ReplicaParts(
            tensors,
            outer,
            counters,
            ExchangeTable(),
            AveragingGate(grows=adapter is not None),
            schedule,
        )
        self._lags: OrderedDict[str, int] = OrderedDict()
        """By how many outer steps the partners met lately were behind us, as they claimed."""
        self._adoption: Adoption | None = None
        self._settled = threading.Event()
        self._coming = threading.Event()
        self._distance: float | None = None
        self._stalled = 0.0
        self.set_counters(counters)
        trains_a = adapter is not None and adapter.a_seed is None
        self._worker = AveragingWorker(
            self._parts, PayloadFiles(data_dir / local.DIRECTORY), trains_a, send
        )

    # ---- start -----------------------------------------------------------------------------------

    def set_counters(self, counters: Counters) -> None:
        """Keep the numbers that must survive this process in `counters`."""
        self._parts.counters = counters
        count = len(self._parts.tensors.parts)
        if len(counters.outer_clocks) != count:
            counters.outer_clocks = [max(counters.outer_clocks, default=0)] * count

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `tensors` gave; a state without it has φ = θ and δ = 0. Raises StateError
        for another policy's."""
        if not tensors:
            tensors = unmoved(host_copy(self._parts.tensors.parameters))
        self._parts.outer.load(tensors)

    def tensors(self) -> Tensors:
        """φ and δ for the state file, with what a revert needs, not copied: they never change under
        a writer."""
        return self._parts.outer.tensors() | self._parts.outer.undo_tensors()

    def facts(self, fresh: bool) -> local.ReplicaFacts:
        tensors = self._parts.tensors
        return local.ReplicaFacts(
            tensors.layout,
            len(tensors.parts),
            list(self._parts.counters.outer_clocks),
            fresh,
            self._adapter,
        )

    def wait_for_state(self, seconds: float, late: float = math.inf) -> bool:
        """Wait `seconds` at most. Whether the wait is over: it is known what there is to adopt, or
        it is `late` (monotonic), a neighbour would have written its state since, and none is on its
        way."""
        too_late = late + writing_seconds(self._parts.tensors.layout)
        return self._settled.wait(seconds) or (
            time.monotonic() >= too_late and not self._coming.is_set()
        )

    def close(self) -> None:
        self._worker.close()

    # ---- link's thread ---------------------------------------------------------------------------

    def receive(self, message: local.ToTrainer) -> None:
        """Take what the network process says."""
        match message:
            case local.DropExchange(session):
                self._parts.exchanges.drop(session)
            case local.AdoptState(peer=""):
                self._settled.set()
            case local.AdoptState(path=""):
                self._coming.set()
            case _:
                self._worker.submit(message)

    # ---- trainer's thread, between two steps -----------------------------------------------------

    def between_steps(self, connected: bool, step_seconds: float, stepped: bool = True) -> bool:
        """Do whatever has arrived; then say when an outer step is due. Whether the policy's weights
        have changed.

        stepped: a training step was taken since the last call. connected: there is a network
        process to find a partner.
        """
        started = time.monotonic()
        changed = False
        while self._worker.arrived:
            changed |= self._do(self._worker.arrived.popleft())
        if stepped and (due := self._parts.schedule.due(self._parts.counters.step)) is not None:
            if connected and self._parts.tensors.parts[due]:
                left = fragments.blocks_of(self._parts.schedule.left(due))
                self._send(
                    local.OuterStepDue(
                        due, self._parts.counters.outer_clocks[due], step_seconds, left
                    )
                )
            else:
                self._worker.submit(local.SoloStep(due))
        self._parts.counters.policy_version += int(changed)
        self._stalled += time.monotonic() - started
        return changed

    def _do(self, arrival: Arrival) -> bool:
        """Whether the policy's weights have changed."""
        match arrival:
            case WorkerFailed(error):
                raise error
            case PayloadExamined():
                self._judge(arrival)
            case AverageMeasured():
                self._measured(arrival)
            case StepPrepared(exchange):
                if exchange.session:
                    return self._commit(exchange)
                self._record(exchange)
            case StateRead():
                return self._adopt(arrival)
        return False

    # ---- an exchange -----------------------------------------------------------------------------

    def _judge(self, examined: PayloadExamined) -> None:
        exchange = self._parts.exchanges.get(examined.session)
        found = examined.found
        if exchange is None:  # dropped, or our weights have moved on without it
            self._end(None, examined.session, "local")
        elif found is None:
            self._parts.gate.refused(examined.outcome)
            # it has more to gain from us than we from it: it gets ours, and we step as if alone
            if examined.outcome == "lagging":
                self._note_claim(exchange)
                taken = self._parts.schedule.takes(exchange.fragment, exchange.snapshot)
                self._go_on(exchange, "lagging", {name: exchange.snapshot[name] for name in taken})
            else:
                self._end(exchange, exchange.session, examined.outcome)
        elif found.mean is None:
            self._conclude(exchange, found, None)
        else:
            self._note_claim(exchange)
            taken = self._parts.schedule.takes(exchange.fragment, found.mean)
            mine, mean = (
                {name: found.mine[name] for name in taken},
                {name: found.mean[name] for name in taken},
            )
            found = dataclasses.replace(found, mine=mine, mean=mean)
            answer = lambda losses: self._worker.arrived.append(
                AverageMeasured(exchange.session, found, losses)
            )
            if not self._probe.measure(mine, mean, answer):
                log.info(
                    "weights of %s are not taken: there is nothing of our own yet to judge them by",
                    exchange.peer,
                )
                self._end(exchange, exchange.session, "local")

    def _note_claim(self, exchange: Exchange) -> None:
        counters, lags = self._parts.counters, self._lags
        lags.pop(exchange.peer, None)
        lags[exchange.peer] = exchange.outer_step - (exchange.their_outer_step or 0)
        if len(lags) > MET:
            lags.popitem(last=False)
        wrong = counter_excess(lags.values())
        if wrong:
            believed = [max(0, clock - wrong) for clock in counters.outer_clocks]
            log.warning(
                "nearly everybody is far behind us: our outer steps are %s, not %s",
                believed,
                counters.outer_clocks,
            )
            with self._parts.tensors.lock:
                counters.outer_clocks = believed
            self._lags = OrderedDict((peer, lag - wrong) for peer, lag in lags.items())

    def _measured(self, measured: AverageMeasured) -> None:
        exchange = self._parts.exchanges.get(measured.session)
        if exchange is None or measured.losses is None:
            self._end(exchange, measured.session, "local")
        else:
            self._conclude(exchange, measured.found, measured.losses)

    def _conclude(self, exchange: Exchange, found: Examination, losses: Losses | None) -> None:
        decision = self._parts.gate.conclude(found, losses)
        if decision.outcome == "probe" and losses is not None:
            log.info(
                "weights of %s would make us worse: %.3f nats, not %.3f",
                exchange.peer,
                losses.after,
                losses.before,
            )
        if decision.mean is None:
            self._end(exchange, exchange.session, decision.outcome)
        else:
            self._distance = found.relative_distance  # of what was refused, anybody's guess
            self._go_on(exchange, decision.outcome, decision.mean)

    def _go_on(self, exchange: Exchange, outcome: str, taken: Tensors) -> None:
        """taken: what the outer step is of, at least; averages where `outcome` is of TAKEN."""
        exchange = dataclasses.replace(exchange, outcome=outcome)
        if self._parts.exchanges.update(exchange):
            mean = taken if outcome in TAKEN else {}
            leaves = self._parts.schedule.leaves(exchange.fragment, taken)
            alone = {
                name: theta
                for name, theta in exchange.snapshot.items()
                if name not in mean and (name in taken or not leaves)
            }
            self._worker.submit(PrepareStep(exchange, mean, alone))
        else:
            self._end(None, exchange.session, "local")

    def _commit(self, exchange: Exchange) -> bool:
        """Take the outer step with what a partner sent, unless the exchange was dropped or
        overtaken. Whether the policy's weights have changed."""
        if self._parts.exchanges.pop(exchange.session) is None or not self._step(exchange):
            self._end(None, exchange.session, "local")
            return False
        counters = self._parts.counters
        if exchange.outcome == "probation":
            counters.probation = False
        elif exchange.outcome in TAKEN:
            counters.revert = counters.revert.committed(exchange.peer)
        counters.exchanges_total += 1
        outer_step = counters.outer_clocks[exchange.fragment]
        self._send(
            local.ExchangeEnded(
                exchange.session,
                exchange.fragment,
                exchange.peer,
                exchange.outcome,
                True,
                outer_step,
            )
        )
        return exchange.outcome in TAKEN

    def _end(self, exchange: Exchange | None, session: bytes, outcome: str) -> None:
        """Without effect. exchange: None where it is not known any more."""
        self._parts.exchanges.pop(session)
        fragment, peer = (exchange.fragment, exchange.peer) if exchange is not None else (0, "")
        self._send(
            local.ExchangeEnded(
                session, fragment, peer, outcome, False, self._parts.counters.outer_clocks[fragment]
            )
        )

    def _record(self, exchange: Exchange) -> None:
        """Record the weights of a step without a partner, which moves none of them, unless an
        exchange, a revert or a neighbour's state came in between."""
        # a stage may have none of the fragment's layers
        if self._step(exchange) and exchange.snapshot:
            self._parts.counters.solo_steps_total += 1

    def _step(self, exchange: Exchange) -> bool:
        """Take the outer step that was prepared: of an exchange all of it, alone what is left to
        take. False where φ has moved since the copy was made, or where something that the exchange
        leaves has become due meanwhile."""
        parts, clocks, fragment, prepared = (
            self._parts,
            self._parts.counters.outer_clocks,
            exchange.fragment,
            exchange.prepared,
        )
        held = parts.tensors.names(fragment)
        if prepared is None:
            return False
        if not exchange.session:
            prepared = prepared.of(parts.schedule.takes(fragment, prepared.phi))
        if len(prepared.phi) < len(held) and not parts.schedule.leaves(fragment, prepared.phi):
            return False
        rest = parts.schedule.is_rest(fragment, prepared.phi)
        averaged = exchange.outcome in TAKEN
        with parts.tensors.lock:
            if not parts.outer.take(prepared, rest=rest, alone=not averaged):
                return False
            if averaged:
                parts.outer.commit(
                    parts.tensors.parameters,
                    {name: exchange.snapshot[name] for name in prepared.phi},
                )
            clocks[fragment] = next_outer_step(clocks[fragment], exchange.their_outer_step) - int(
                rest
            )
            parts.exchanges.drop_fragment(fragment)
            parts.schedule.stepped(fragment, prepared.phi, held, parts.counters.step)
        return True

    # ---- a neighbour's state ---------------------------------------------------------------------

    def _adopt(self, read: StateRead) -> bool:
        parts, outcome = self._parts, read.outcome
        if not outcome:
            outcome = self._replace(
                read,
                SlowWeights(
                    read.tensors,
                    {name: torch.zeros_like(phi) for name, phi in read.tensors.items()},
                ),
            )
        self._send(local.StateAdopted(read.peer, outcome, list(parts.counters.outer_clocks)))
        if outcome == "adopted":
            log.info("took the state of %s, %d outer steps", read.peer, read.outer_step)
            self._settled.set()
        return outcome == "adopted"

    def _replace(self, read: StateRead, slow: SlowWeights) -> str:
        """Become another replica, on probation. Of `outcomes.ADOPTIONS`."""
        parts, counters = self._parts, self._parts.counters
        if counters.step:
            return "local"  # it came too late: what was learnt here is not thrown away
        own, theirs = norm(parts.outer.phi), norm(slow.phi)
        if not math.isfinite(theirs):
            return "not_finite"
        if self._adapter is None and not own / NORM_RATIO <= theirs <= own * NORM_RATIO:
            return "norm_ratio"
        if read.outer_step > LARGEST_OUTER_STEP or not self._is_plausible(slow.phi):
            return "worse"
        own_slow = parts.outer.slow(list(parts.tensors.parameters))
        before = Adoption(
            read.peer, counters.reward_held_out, own_slow, list(counters.outer_clocks)
        )
        try:
            with parts.tensors.lock:
                parts.outer.adopt(parts.tensors.parameters, slow)
                parts.exchanges.clear()
        except StateError:
            return "not_finite"
        self._adoption = before
        self._lags.clear()
        counters.outer_clocks = [read.outer_step] * len(counters.outer_clocks)
        counters.probation = True
        return "adopted"

    def _is_plausible(self, phi: Tensors) -> bool:
        """Whether our own completions are still likely under a neighbour's weights: of a policy
        that has learnt for long they are less so, of none at all hardly."""
        verdicts: list[Losses | None] = []
        mine = host_copy(self._parts.tensors.parameters)
        if (
            not self._probe.measure(mine, phi, verdicts.append)
            or not verdicts
            or verdicts[0] is None
        ):
            log.warning(
                "a neighbour's state is not taken: there is nothing of our own to judge it by"
            )
            return False
        worse = verdicts[0].after - verdicts[0].before
        log.info(
            "a neighbour's state makes our own completions %.2f nats per token less likely", worse
        )
        return worse <= UNLEARNT

    # ---- held-out reward -------------------------------------------------------------------------

    def observe(self, reward: float) -> bool:
        """A held-out reward was measured. Whether an exchange or a state was taken back because of
        it."""
        adoption, self._adoption = self._adoption, None
        counters = self._parts.counters
        if adoption is not None and counters.revert.fell(reward, adoption.reward):
            self._give_up(adoption, reward)
            return True
        counters.revert, blamed = counters.revert.observed(reward)
        if not blamed:
            self._parts.outer.keep()
            return False
        return self._revert(blamed)

    def keep(self) -> None:
        """No reward is seen here that could take back what came so far: nothing is remembered for
        it."""
        self._parts.outer.keep()

    def _give_up(self, adoption: Adoption, reward: float) -> None:
        log.warning(
            "the state of %s is worse than what we had: %.3f, not %.3f",
            adoption.peer,
            reward,
            adoption.reward,
        )
        parts = self._parts
        with parts.tensors.lock:
            parts.outer.adopt(parts.tensors.parameters, adoption.slow)
            parts.exchanges.clear()
        parts.counters.outer_clocks = adoption.outer_steps
        parts.counters.policy_version += 1
        self._send(local.StateAdopted(adoption.peer, "worse", list(adoption.outer_steps)))

    def _revert(self, peers: tuple[str, ...]) -> bool:
        parts = self._parts
        with parts.tensors.lock:
            reverted = parts.outer.revert(parts.tensors.parameters)
            parts.exchanges.clear()
        if reverted:
            log.warning("held-out reward fell: what came of %s is taken back", ", ".join(peers))
            parts.counters.policy_version += 1
            for peer in peers:
                parts.gate.refused("reverted")
                self._send(local.ExchangeReverted(peer))
        return reverted

    # ---- for whoever watches ---------------------------------------------------------------------

    def report(self) -> WeightsReport:
        gate, outer, counters = (
            self._parts.gate.statistics(),
            self._parts.outer.statistics(),
            self._parts.counters,
        )
        return WeightsReport(
            rule=self._rule,
            fragments=len(counters.outer_clocks),
            outer_step=min(counters.outer_clocks),
            exchanges_total=counters.exchanges_total,
            solo_steps_total=counters.solo_steps_total,
            reverts_total=outer.reverts,
            distance=self._distance,
            clip_ratio=gate.clip_ratio,
            lag=self._worker.lag,
            momentum_norm=outer.momentum_norm,
            probation=counters.probation,
            outcomes=gate.outcomes,
            stall_seconds_total=self._stalled + self._worker.copy_seconds,
        )
