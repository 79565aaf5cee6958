"""The trainer's half of averaging: copies weights for a partner, judges the partner's, and moves ours between two steps.

    any time         worker thread: copy (never while the optimizer moves the weights), encode, write; read, decode, gate; the outer step
    between steps    main thread:   probe, which needs the model ─▶ … ─▶ commit, all at once       nothing here waits for the network

What travels is in `weights.local`. Until a commit no weight has moved, so an exchange that ends for whatever reason leaves the policy as
it was, bit by bit; the commit itself is part of the same state file as everything else, so a kill at any time loses it whole or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import mmap
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swarmnode.averaging import codecs, lora
from swarmnode.averaging.gate import NORM_RATIO, Examined, Gate, norm
from swarmnode.averaging.outer import OuterState, Prepared, Tensors, host_copy
from swarmnode.config import WeightsConfig
from swarmnode.errors import BadMessage, StateError
from swarmnode.link.messages import WeightsReport
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row
from swarmnode.policy.micro import MicroBatcher
from swarmnode.trainer.state import Counters
from swarmnode.weights import fragments, local
from swarmnode.weights.fingerprint import LoraShape
from swarmnode.weights.layout import make_layout
from swarmnode.weights.manifest import TensorHash
from swarmnode.weights.rule import make_rule, mixing_weight, next_clock, too_far_behind
from swarmnode.weights.watch import RewardWatch

log = logging.getLogger(__name__)

EXCHANGES = 4
"""Exchanges whose copies are kept; the network process has one at a time, the rest are ones it gave up while we were busy."""
JOBS = 64
FILES = 64
"""Newest files of ours that are left to the network process; what it has open stays readable without a name."""
EARLY = 0.5
"""Of the time between two outer steps of a fragment: one taken so short a time ago counts for the one that is due now."""
PROBE_SEQUENCES = 16
"""Own rewarded completions on which averaged weights must not be worse: enough that one of them does not decide."""
LEAST_PROBE = 8
"""Sequences below which the probe says nothing."""
Losses = tuple[float, float]
"""Of our weights, and with the average in their place, nats per token."""
Ask = Callable[[Tensors, Tensors, Callable[[Losses | None], None]], bool]
"""(our tensors, their average, whom to tell) → whether anybody will be told, from any thread: None where there is no verdict."""


@dataclass
class Exchange:
    """One exchange of a fragment, from the copy to the commit."""

    fragment: int
    snapshot: Tensors
    """Our weights when the copy was made, float32 on the host."""
    clock: int
    peer: str = ""
    their_clock: int | None = None
    prepared: Prepared | None = None
    """The outer step with what the gate made of both; None before."""
    probation: bool = False


class Replica:
    """This node's replica among others. Make it before a saved state is restored: the base weights are the codec's anchor.

    lock: held by whoever moves the weights. send: to the network process, from any thread. adapter: its shape, if one is trained.
    ask: who judges an average where this process has not the whole policy.
    """

    def __init__(
        self, policy: Policy, cfg: WeightsConfig, counters: Counters, batcher: MicroBatcher, data_dir: Path, *,
        lock: threading.Lock, send: Callable[[local.FromTrainer], None], temperature: float = 1.0, adapter: LoraShape | None = None,
        ask: Ask = lambda mine, mean, tell: False,
    ) -> None:  # fmt: skip
        self._policy = policy
        self._cfg = cfg
        self._batcher = batcher
        self._directory = data_dir / local.DIRECTORY
        self._lock = lock
        self._send = send
        self._temperature = temperature
        self._ask = ask
        self._parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
        self._layout = make_layout((n, p.shape, str(p.dtype).removeprefix("torch.")) for n, p in self._parameters.items())
        self._parts = fragments.cut(self._layout, local.fragments_of(self._layout, cfg.fragments))
        fragments.check_schedule(max(cfg.sync_every, len(self._parts)), len(self._parts))
        self._names = [[spec.name for spec in part] for part in self._parts]
        self._stepped_at = [-self._cfg.sync_every] * len(self._parts)
        self._adapter = adapter
        base = host_copy(self._parameters) if cfg.codec == "int8" else {}
        self._anchors = [codecs.make_anchor({n: base[n] for n in names}) if base else None for names in self._names]
        self._outer = OuterState(self._parameters, make_rule(cfg.rule))
        self._gate = Gate()
        self._watch = RewardWatch()
        self._rows: deque[Row] = deque(maxlen=PROBE_SEQUENCES)
        self._mutex = threading.Lock()
        self._exchanges: OrderedDict[bytes, Exchange] = OrderedDict()
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(JOBS)
        self._arrived: deque[Callable[[], bool]] = deque()
        self._settled = threading.Event()
        self._last: str = ""
        self._adopted: tuple[str, float | None, dict, dict, list[int]] | None = None
        self._distance: float | None = None
        self._lag: float | None = None
        self._payload_bytes = 0
        self._stalled = self._held = 0.0
        self.counters(counters)
        self._written: deque[Path] = deque()
        self._thread = threading.Thread(target=self._work, name="weights", daemon=True)
        self._thread.start()

    # ---- start --------------------------------------------------------------------------------------------------------------------

    def counters(self, counters: Counters) -> None:
        """Where the numbers live that must survive this process."""
        self._counters = counters
        if len(counters.outer_clocks) != len(self._parts):
            counters.outer_clocks = [max(counters.outer_clocks, default=0)] * len(self._parts)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `tensors` gave; a state without it has φ = θ and δ = 0. Raises StateError for another policy's."""
        if tensors:
            self._outer.load(tensors)
        else:
            phi = host_copy(self._parameters)
            self._outer.load({f"phi.{n}": t for n, t in phi.items()} | {f"delta.{n}": torch.zeros_like(t) for n, t in phi.items()})

    def tensors(self) -> Tensors:
        """φ and δ for the state file, not copied: they never change under a writer."""
        with self._mutex:
            return self._outer.tensors()

    def facts(self, fresh: bool) -> local.ReplicaFacts:
        return local.ReplicaFacts(
            self._layout, self._cfg.codec, len(self._parts), list(self._counters.outer_clocks), fresh, self._adapter
        )  # fmt: skip

    def settled(self, seconds: float) -> bool:
        """Wait until the network process has said what there is to adopt; False after `seconds`."""
        return self._settled.wait(seconds)

    # ---- what the network process says ----------------------------------------------------------------------------------------------

    def receive(self, message: local.ToTrainer) -> None:
        """Called from the link's thread; returns at once."""
        match message:
            case local.TakeSnapshot():
                self._job(lambda: self._take(message.session, message.fragment))
            case local.JudgePayload():
                self._job(lambda: self._read(message))
            case local.CommitExchange():
                self._arrived.append(lambda: self._commit(message.session))
            case local.DropExchange():
                with self._mutex:
                    self._exchanges.pop(message.session, None)
            case local.SoloStep():
                self._job(lambda: self._solo(message.fragment))
            case local.WriteState():
                self._job(self._write_state)
            case local.AdoptState():
                self._job(lambda: self._read_state(message)) if message.peer else self._settled.set()

    def _job(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(queue.Full):  # whoever asked has a deadline
            self._jobs.put_nowait(work)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=5.0)

    # ---- worker thread --------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # it would end this thread unseen: the trainer is to fail of it, at its next step
                self._arrived.append(functools.partial(_raise, error))

    def _copy(self, fragment: int) -> Exchange:
        with self._lock:
            began = time.monotonic()
            copied = Exchange(fragment, host_copy(self._parameters, self._names[fragment]), self._counters.outer_clocks[fragment])
            self._held += time.monotonic() - began
        return copied

    def _take(self, session: bytes, fragment: int) -> None:
        if not 0 <= fragment < len(self._parts):
            return self._send(local.Snapshot(session, fragment, "", 0))
        exchange = self._copy(fragment)
        with self._mutex:
            self._exchanges[session] = exchange
            while len(self._exchanges) > EXCHANGES:
                self._exchanges.popitem(last=False)
        self._publish(session, exchange)

    def _publish(self, session: bytes, exchange: Exchange) -> None:
        fragment = exchange.fragment
        data = codecs.encode(
            exchange.snapshot, self._parts[fragment], self._cfg.codec, fragment=fragment, anchor=self._anchors[fragment]
        )  # fmt: skip
        self._payload_bytes = len(data)
        self._send(local.Snapshot(session, fragment, self._write([data]), exchange.clock))

    def _write(self, pieces: Sequence[bytes]) -> str:
        """Path of a new file; empty when there is no room. Not synced: it is worth nothing after a crash."""
        path = self._directory / f"out-{secrets.token_hex(8)}.bin"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.writelines(pieces)
            os.replace(temporary, path)
            self._written.append(path)
            while len(self._written) > FILES:  # the network process deletes what it has served; where there is none, nobody does
                self._written.popleft().unlink(missing_ok=True)
        except OSError as error:
            log.warning("weights not written: %s", error)
            return ""
        return str(path)

    def _read(self, message: local.JudgePayload) -> None:
        """A partner's payload → tensors, and all of the gate but the probe, which is for between two steps."""
        with self._mutex:
            exchange = self._exchanges.get(message.session)
        if exchange is None:  # a one-sided pull: our side of it starts now
            if not 0 <= message.fragment < len(self._parts):
                return
            exchange = self._copy(message.fragment)
            with self._mutex:
                self._exchanges[message.session] = exchange
        exchange.peer, exchange.their_clock = message.peer, message.clock
        fragment = exchange.fragment
        theirs: Tensors | None = None
        outcome = ""
        try:
            data = _mapped(Path(message.path))
            theirs = codecs.decode(data, self._parts[fragment], self._cfg.codec, fragment=fragment, anchor=self._anchors[fragment])
        except BadMessage as bad:
            log.warning("weights of %s: %s", message.peer, bad)
            outcome = "not_finite" if bad.reason == "not_finite" else bad.reason if bad.reason in ("names", "dtype", "shape") else "payload"
        except (OSError, ValueError) as error:
            log.warning("weights of %s could not be read: %s", message.peer, error)
            outcome = "local"
        found = self._examine(exchange, theirs) if theirs is not None else outcome
        self._arrived.append(lambda: self._judge(message.session, found))

    def _examine(self, exchange: Exchange, theirs: Tensors) -> Examined | str:
        """Of `outcomes.OUTCOMES` where that is clear without the gate."""
        assert exchange.their_clock is not None
        self._lag = float(exchange.clock - exchange.their_clock)
        if too_far_behind(self._lag):
            return "lagging"
        if self._adapter is not None and self._adapter.a_seed is None and not lora.residual(exchange.snapshot, theirs).allowed:
            return "lora_residual"
        with self._mutex:
            slow = {name: self._outer.phi[name] for name in exchange.snapshot}
        return self._gate.examine(
            exchange.peer, exchange.snapshot, theirs, time.monotonic(), weight=mixing_weight(self._lag),
            moved=norm(exchange.snapshot, minus=slow), fragment=exchange.fragment, probation=self._counters.probation,
        )  # fmt: skip

    def _prepare(self, session: bytes, exchange: Exchange, mean: Tensors, outcome: str) -> None:
        """The outer step that a commit will take; then we have all that it needs."""
        exchange.prepared = self._outer.prepare(mean)
        self._send(local.Gated(session, True, outcome, exchange.peer))

    def _solo(self, fragment: int) -> None:
        if 0 <= fragment < len(self._parts):
            exchange = self._copy(fragment)
            exchange.prepared = self._outer.prepare(exchange.snapshot)
            self._arrived.append(lambda: self._commit_solo(exchange))

    def _write_state(self) -> None:
        with self._mutex:
            tensors, clock = self._outer.tensors(), min(self._counters.outer_clocks)
        layout = local.state_layout(self._layout)
        hashes = {name: hashlib.sha256(codecs.to_bytes(tensor, "<f4")).digest() for name, tensor in tensors.items()}
        path = self._write([codecs.encode(tensors, layout, "float32")])
        entries = [TensorHash(s.name, hashes[f"phi.{s.name}"], hashes[f"delta.{s.name}"]) for s in self._layout]
        self._send(local.StateWritten(path, clock, entries))

    def read_state(self, message: local.AdoptState) -> tuple[Tensors, str]:
        """φ and δ of somebody else, and of `outcomes.ADOPTIONS` why they are none; empty where they are."""
        try:
            tensors = codecs.decode(_mapped(Path(message.path)), local.state_layout(self._layout), "float32")
        except BadMessage:
            return {}, "payload"
        except (OSError, ValueError):
            return {}, "local"
        said = {f"phi.{t.name}": t.phi for t in message.tensors} | {f"delta.{t.name}": t.delta for t in message.tensors}
        honest = all(hashlib.sha256(codecs.to_bytes(tensor, "<f4")).digest() == said.get(name) for name, tensor in tensors.items())
        return (tensors, "") if honest else ({}, "hash")

    def _read_state(self, message: local.AdoptState) -> None:
        tensors, outcome = self.read_state(message)
        self._arrived.append(lambda: self._adopt(message, tensors, outcome))

    # ---- main thread, between two steps ----------------------------------------------------------------------------------------------

    def between_steps(self, connected: bool, step_seconds: float, stepped: bool = True) -> bool:
        """Whatever has arrived; then says when an outer step is due. Whether the policy's weights have changed.

        stepped: a training step was taken since the last call. connected: there is a network process to find a partner.
        """
        started = time.monotonic()
        changed = False
        for _ in range(len(self._arrived)):
            changed |= self._arrived.popleft()()
        count = len(self._parts)
        every = max(self._cfg.sync_every, count)
        due = fragments.due(self._counters.step, every, count) if stepped else None
        if due is not None and self._counters.step - self._stepped_at[due] < every * EARLY:
            due = None  # a partner that proposed has had us take it a moment ago
        if due is not None and connected:
            self._send(local.Due(due, self._counters.outer_clocks[due], step_seconds))
        elif due is not None:
            self._job(lambda: self._solo(due))
        self._counters.policy_version += int(changed)
        self._stalled += time.monotonic() - started
        return changed

    def remember(self, rows: Sequence[Row]) -> None:
        """Own completions that earned their group's highest reward: what averaged weights must not unlearn."""
        self._rows.extend(rows)

    def observe(self, reward: float) -> bool:
        """A held-out reward was measured. Whether an exchange was taken back because of it."""
        if self._adopted is not None:
            peer, before, phi, delta, clocks = self._adopted
            self._adopted = None
            if before is not None and reward < before - self._watch.k * self._watch.sigma:
                log.warning("the state of %s is worse than what we had: %.3f, not %.3f", peer, reward, before)
                with self._lock, self._mutex:
                    self._outer.adopt(self._parameters, phi, delta)
                    self._exchanges.clear()
                self._counters.outer_clocks = clocks
                self._send(local.Adopted(peer, "worse", list(clocks)))
                return self._moved()
        worse = self._watch.observe(reward)
        if worse is None or worse != self._last:
            self._outer.keep()
            return False
        self._last = ""
        with self._lock, self._mutex:
            reverted = self._outer.revert(self._parameters)
            self._exchanges.clear()
        if reverted:
            log.warning("held-out reward fell: the exchange with %s is taken back", worse)
            self._gate.refused(worse, "reverted", time.monotonic())
            self._send(local.Gated(b"", False, "reverted", worse))
        return reverted and self._moved()

    def _moved(self) -> bool:
        self._counters.policy_version += 1
        return True

    def _judge(self, session: bytes, found: Examined | str) -> bool:
        now = time.monotonic()
        with self._mutex:
            exchange = self._exchanges.get(session)
        if exchange is None:  # dropped, or our weights have moved on without it
            self._send(local.Gated(session, False, "local", ""))
        elif isinstance(found, Examined) and found.mean is not None and self._ask(
            dict(found.mine), found.mean, lambda losses: self._arrived.append(lambda: self._told(session, found, losses))
        ):  # fmt: skip
            pass  # the verdict comes after a later step
        elif isinstance(found, Examined):
            probed = found.mean is not None and len(self._rows) >= LEAST_PROBE
            self._conclude(session, exchange, found, self._probe(found.mine, found.mean or {}) if probed else None)
        else:
            if found not in ("lagging", "local"):
                self._gate.refused(exchange.peer, found, now)
            # a peer that lags has more to gain from us than we from it: it gets ours, and we step as if alone
            self._end(session, exchange, found, exchange.snapshot if found == "lagging" else None)
        return False

    def _told(self, session: bytes, found: Examined, losses: Losses | None) -> bool:
        with self._mutex:
            exchange = self._exchanges.get(session)
        if exchange is None:
            self._send(local.Gated(session, False, "local", ""))
        elif losses is None:
            self._end(session, exchange, "local", None)
        else:
            self._conclude(session, exchange, found, losses)
        return False

    def _conclude(self, session: bytes, exchange: Exchange, found: Examined, losses: Losses | None) -> None:
        judged = self._gate.conclude(found, time.monotonic(), losses)
        exchange.probation = judged.outcome == "probation"
        self._distance = judged.relative_distance if judged.ok else self._distance  # of what was refused, anybody's guess
        if judged.outcome == "probe":
            log.info("weights of %s would make us worse: %.3f nats, not %.3f", exchange.peer, judged.loss_after, judged.loss_before)
        self._end(session, exchange, judged.outcome, judged.mean)

    def _end(self, session: bytes, exchange: Exchange, outcome: str, mean: Tensors | None) -> None:
        if mean is None:
            with self._mutex:
                self._exchanges.pop(session, None)
            self._send(local.Gated(session, False, outcome, exchange.peer))
        else:
            self._job(functools.partial(self._prepare, session, exchange, mean, outcome))

    def _probe(self, one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> tuple[float, float]:
        """Mean loss of our rewarded completions with either in the policy, nats per token; the policy is as before afterwards."""
        before = {name: self._parameters[name].detach().clone() for name in one}
        losses = []
        with self._lock:
            try:
                for tensors in (one, other):
                    self._set(tensors)
                    values = [v for row in self._batcher.score(self._policy, list(self._rows), self._temperature) for v in row]
                    losses.append(-sum(values) / max(1, len(values)))
            finally:
                self._set(before)
        return losses[0], losses[1]

    @torch.no_grad()
    def _set(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._parameters[name].copy_(tensor)

    def _commit(self, session: bytes) -> bool:
        with self._mutex:
            exchange = self._exchanges.pop(session, None)
        if exchange is None or not self._step(exchange):
            self._send(local.Gated(session, False, "local", ""))
            return False
        if exchange.probation:
            self._counters.probation = False
        else:
            self._watch.committed(exchange.peer)
            self._last = exchange.peer
        self._counters.exchanges_total += 1
        self._send(local.Committed(session, exchange.fragment, self._counters.outer_clocks[exchange.fragment]))
        return True

    def _commit_solo(self, exchange: Exchange) -> bool:
        while not self._step(exchange):  # an exchange, a revert or a neighbour's state came in between: once more, from where we are now
            exchange = self._copy(exchange.fragment)
            exchange.prepared = self._outer.prepare(exchange.snapshot)
        self._counters.solo_steps_total += 1
        self._last = ""
        self._job(lambda: self._publish(b"", exchange))
        return True

    def _step(self, exchange: Exchange) -> bool:
        """Take the outer step that was prepared, unless φ has moved since. Other copies of the fragment are of weights that are gone then:
        nothing may be corrected against them."""
        with self._lock, self._mutex:
            if exchange.prepared is None or not self._outer.take(exchange.prepared):
                return False
            self._outer.commit(self._parameters, exchange.snapshot)
            clocks = self._counters.outer_clocks
            clocks[exchange.fragment] = next_clock(clocks[exchange.fragment], exchange.their_clock)
            self._stepped_at[exchange.fragment] = self._counters.step
            for session in [s for s, other in self._exchanges.items() if other.fragment == exchange.fragment]:
                del self._exchanges[session]
        return True

    def _adopt(self, message: local.AdoptState, tensors: Tensors, outcome: str) -> bool:
        phi = {name: tensors[f"phi.{name}"] for name in self._parameters} if not outcome else {}
        delta = {name: tensors[f"delta.{name}"] for name in self._parameters} if not outcome else {}
        own = norm(self._outer.phi)
        if not outcome and not own / NORM_RATIO <= norm(phi) <= own * NORM_RATIO:
            outcome = "norm_ratio"
        if not outcome:
            before = (message.peer, self._counters.reward_held_out, self._outer.phi, self._outer.delta, list(self._counters.outer_clocks))
            try:
                with self._lock, self._mutex:
                    self._outer.adopt(self._parameters, phi, delta)
                    self._exchanges.clear()
            except StateError:
                outcome = "not_finite"
            else:
                outcome, self._adopted = "adopted", before
                self._counters.outer_clocks = [message.outer_step] * len(self._parts)
                self._counters.probation = True
                log.info("took the state of %s, %d outer steps", message.peer, message.outer_step)
        self._send(local.Adopted(message.peer, outcome, list(self._counters.outer_clocks)))
        if outcome == "adopted":
            self._settled.set()
        return outcome == "adopted"

    # ---- for whoever watches ----------------------------------------------------------------------------------------------------------

    def report(self) -> WeightsReport:
        gate, outer = self._gate.statistics(), self._outer.statistics()
        return WeightsReport(
            rule=self._cfg.rule, fragments=len(self._parts), outer_step=min(self._counters.outer_clocks),
            exchanges_total=self._counters.exchanges_total, solo_steps_total=self._counters.solo_steps_total, reverts_total=outer.reverts,
            distance=self._distance, clip_ratio=gate.clip_ratio, lag=self._lag, momentum_norm=outer.momentum_norm,
            probation=self._counters.probation, outcomes={name: n for name, n in gate.outcomes.items() if n},
            payload_bytes=self._payload_bytes, stall_seconds_total=self._stalled + self._held,
        )  # fmt: skip


def _raise(error: Exception) -> bool:
    raise error


def _mapped(path: Path) -> memoryview:
    """A file's bytes, not read before they are needed; unmapped with the last view of them."""
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
