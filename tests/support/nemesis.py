"""Crews under a seeded nemesis, in virtual time: `python -m tests.support.nemesis --seed 17` replays one schedule.

Real `control`, `commit` and `fence` of every node over a simulated network. A schedule draws the size of the crew, how bad the network is,
and faults: processes killed (with and without their memory, for good or for a while), stopped past their lease and resumed, cut off in one
direction or both, killed while they load or between acknowledging and commit, two neighbours at once, everybody at once, clocks that run at
other speeds. `crew_history` holds what happens to what must be true, and raises Violation.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from swarmnode.crew import events as ev
from swarmnode.crew import local, messages
from swarmnode.crew.control import CrewControl
from swarmnode.crew.events import Settings
from swarmnode.crew.plan import Capacity, ModelCost, Part
from swarmnode.pipeline.fence import Fence
from tests.support.crew_history import History, Violation
from tests.support.crew_trainer import Journal, Message, Trainer, named_keys

MODEL = bytes(32)
SETTINGS = Settings(
    tick_seconds=1.0, heartbeat_seconds=2.0, offer_seconds=3.0, gather_seconds=2.0, request_seconds=1.5, gone_seconds=4.0,
    evict_seconds=13.0, restart_seconds=15.0, stuck_seconds=20.0, wait_seconds=40.0, lease_seconds=30.0, witness_seconds=6.0,
)  # fmt: skip
FAULT_SECONDS = 25.0
"""During which faults begin; what they break is mended soon after."""
BOUND_SECONDS = 150.0
"""After the last fault, until everybody runs or has left."""


@dataclass
class Node:
    name: str
    rate: float
    """Of its clock."""
    control: CrewControl | None = None
    life: int = 0
    trainer: Trainer | None = None
    trainer_life: int = 0
    memory: bytes = b""
    journal: Journal = field(default_factory=Journal)
    stopped_until: float = 0.0
    offset: float = 0.0
    dead: bool = False
    heard_by: dict[str, float] = field(default_factory=dict)
    """By each peer, when what it has answered was sent: the lease as somebody from outside sees it."""


class World:
    """One schedule. `run` ends when everybody is settled after the faults, or raises Violation."""

    step_seconds = 1.0

    def __init__(
        self, seed: int, *, control: Callable[..., CrewControl] = CrewControl, fence_check: Any = Fence.check, encode: bool = False
    ):
        self.rng = random.Random(seed)
        self.seed, self.now = seed, 0.0
        self._make_control, self._fence_check, self._encode = control, fence_check, encode
        self.history = History()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        rng = self.rng
        self.stages, self.spares = self.draw_sizes()
        self.loss = rng.choice((0.0, 0.0, 0.02, 0.1, 0.3))
        self.copies = rng.choice((0.0, 0.0, 0.1))
        self.delay = rng.choice((0.02, 0.05, 0.3))
        self.frames_overtake = rng.random() < 0.1
        self.failing = rng.choice((0.0, 0.0, 0.0, 0.2))
        self.replicas = rng.random() < 0.3
        self.quiet_from = 1e9
        self.cut: dict[tuple[str, str], float] = {}
        self._last_frame: dict[tuple[str, str, int], float] = {}
        self._triggers: dict[str, list[str]] = {}
        self._first_step: dict[tuple[bytes, int], int] = {}
        self._draining: set[str] = set()
        self.nodes: dict[str, Node] = {}
        part = Part(1.0, 1.0)
        self.cost = ModelCost(part, (part,) * self.stages, part)
        self.settings = Settings(**{**{f: getattr(SETTINGS, f) for f in SETTINGS.__struct_fields__}, "stages": self.stages})
        for number in range(self.stages + self.spares):
            rate = rng.choice((1.0, 1.0, 0.98, 1.03))
            self._add(f"n{number}", rate, 0.0 if number < self.stages or rng.random() < 0.5 else rng.uniform(5, 25))

    def draw_sizes(self) -> tuple[int, int]:
        """Stages of the crew, and nodes more than that."""
        stages = self.rng.choice((1, 2, 2, 3, 3, 3, 3, 4, 4))
        if self.rng.random() < 0.3:  # enough for two crews; those of an even number compete for witnesses
            return self.rng.choice((2, 2, stages)), max(2, stages) + self.rng.choice((0, 0, 1, 2))
        return stages, self.rng.choice((0, 0, 1, 1, 2))

    # ---- time -----------------------------------------------------------------------------------------------------------------

    def at(self, when: float, function: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (max(when, self.now), self._count, function, args))

    def after(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, function, *args)

    def next_event(self) -> tuple[float, int, Callable[..., None], tuple[Any, ...]]:
        return heapq.heappop(self._queue)

    def run(self) -> History:
        self._plan_faults()
        step, ended = -1, False
        while self._queue:
            when, _, function, args = self.next_event()
            if when > self.quiet_from and int(when) != step:
                step = int(when)
                if self._quiet():
                    ended = True
                    break
                if when > self.quiet_from + BOUND_SECONDS:
                    break
            self.now = when
            function(*args)
        if not ended and (self._queue or not self._quiet()):
            raise Violation("no end: " + "; ".join(self._describe(node) for node in self.nodes.values()))
        return self.history

    def _describe(self, node: Node) -> str:
        control = node.control
        if control is None:
            return f"{node.name} down"
        slots = ",".join(f"{slot.peer}:{slot.stage_epoch}:{slot.state}" for slot in control.statistics().slots)
        return f"{node.name} {control.state} {control.roster.epoch if control.roster else ''} [{slots}] {control._own.status.phase}"

    def _quiet(self) -> bool:
        """Whoever has a seat runs with all that its crew names, and takes steps; the others are too few for another crew."""
        free = 0
        for node in self.nodes.values():
            control = node.control
            if control is None or control.roster is None or control.stage is None:
                free += control is not None and node.name not in self._draining
                continue
            if not control.running:
                return False
            for seat in control.roster.seats:
                other = self.nodes[seat.peer].control
                if other is None or other.roster is None or not other.running or other.roster != control.roster:
                    return False
            head = self.nodes[control.roster.seats[0].peer].trainer
            first = self._first_step.setdefault((control.acceptor.crew, control.roster.epoch), head.participant.step if head else 0)
            if head is None or head.participant.step < first + 2:
                return False
        return free < self.stages

    # ---- nodes ----------------------------------------------------------------------------------------------------------------

    def _add(self, name: str, rate: float, when: float) -> None:
        self.nodes[name] = Node(name, rate, offset=self.rng.uniform(0, 1000))
        self.at(when, self.boot, name)

    def boot(self, name: str) -> None:
        node = self.nodes[name]
        if node.control is not None or node.dead:
            return
        node.life += 1
        self._draining.discard(name)
        sign, verify = named_keys(name)
        rng = random.Random(self.rng.randrange(2**60))
        node.control = self._make_control(name, sign, verify, self.settings, rng, node.memory)
        node.heard_by = {}
        self.history.note(self.now, "boot", name, node.memory != b"")
        for other in self.nodes.values():
            if other is not node and other.control is not None:
                self.after(self.rng.uniform(0.01, 0.3), self._meet, name, node.life, other.name, other.life)
        self.after(self.rng.uniform(0.1, 1.0), self._tick, name, node.life)
        self.start_trainer(name, self.rng.uniform(0.2, 2.0))

    def _meet(self, a: str, a_life: int, b: str, b_life: int) -> None:
        if (a, b) in self.cut or (b, a) in self.cut:
            self.after(1.0, self._meet, a, a_life, b, b_life)
            return
        self.event(a, a_life, ev.PeerBack(b))
        self.event(b, b_life, ev.PeerBack(a))

    def _tick(self, name: str, life: int) -> None:
        node = self.nodes[name]
        if node.life != life or node.control is None:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._tick, name, life)
            return
        self.event(name, life, ev.Tick())
        averages = self.rng.random() < 0.3 and node.control is not None and node.control.may_average
        if averages and node.trainer is not None:
            self.history.averaged(self.now, name, node.trainer.phase, self._lease_left(node))
        self.after(self.settings.tick_seconds / node.rate, self._tick, name, life)

    def _lease_left(self, node: Node) -> float:
        """Seconds until half a lease after the last moment at which a majority heard the node."""
        control = node.control
        assert control is not None
        assert control.roster is not None
        voters = messages.voters_of(control.roster)
        times = sorted((self.now if voter.peer == node.name else node.heard_by.get(voter.peer, 0.0) for voter in voters), reverse=True)
        return times[len(times) // 2] + self.settings.lease_seconds / 2 / node.rate + 1.5 * self.settings.tick_seconds - self.now

    def event(self, name: str, life: int, event: ev.Event) -> messages.Answer | None:
        """Hand an event to a node's control and carry out what it wants. Returns its answer, where there is one."""
        node = self.nodes[name]
        control = node.control
        if control is None or node.life != life:
            return None
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self.event, name, life, event)
            return None
        known, crew, me = control.acceptor.chain, control.acceptor.crew, control.acceptor.me
        answer = None
        actions = control.handle(event, self.now * node.rate + node.offset)
        if control.acceptor.chain is not known and control.acceptor.chain:
            self.history.adopted(self.now, name, control.acceptor.chain)
            for voter in messages.voters_of(control.acceptor.chain[-1].record):
                node.heard_by[voter.peer] = self.now
        if crew not in (messages.NO_CREW, control.acceptor.crew) and control.acceptor.me == me:
            self.history.moved(me, crew, control.stage)
            self._trigger("moved", name)
        for action in actions:
            match action:
                case ev.Answer():
                    answer = action.message
                    if isinstance(answer, messages.Vote):
                        self._note_vote(node, answer)
                    if isinstance(answer, messages.Vote | messages.Promise) and answer.epoch > 1:
                        self.history.spoke(answer.crew, control.acceptor.me)
                case ev.Send():
                    self._send(node, action.peer, action.message)
                case ev.Persist():
                    node.memory = action.memory
                case ev.TellTrainer():
                    if isinstance(action.message, local.Settled) and node.trainer is not None:
                        keeping = {t.name for n in self.nodes.values() if (t := n.trainer) is not None and t.phase in ("ready", "active")}
                        self.history.settled(control.acceptor.crew, action.message.roster_epoch, action.message.step, keeping)
                    if node.trainer is not None:
                        node.trainer.told(action.message, self.now)
                case ev.RestartTrainer():
                    self.kill_trainer(name, self.rng.uniform(1, 3))
                case ev.Note():
                    self.history.note(self.now, action.what, name)
        return answer

    def _note_vote(self, node: Node, vote: messages.Vote) -> None:
        self.history.voted(node.name, vote.crew, vote.epoch, vote.ballot, vote.incarnation, vote.hash)

    # ---- messages between network processes -----------------------------------------------------------------------------------

    def _lost(self, a: str, b: str) -> bool:
        return (a, b) in self.cut or (self.loss > 0 and self.now < self.quiet_from and self.rng.random() < self.loss)

    def _latency(self) -> float:
        return self.rng.random() * self.delay + 0.001

    def _send(self, node: Node, peer: str, message: messages.Request) -> None:
        if self._encode:
            message = messages.decode_request(messages.encode_message(message))
        if peer not in self.nodes or self._lost(node.name, peer):
            return
        other = self.nodes[peer]
        times = 2 if self.copies and self.rng.random() < self.copies else 1
        for _ in range(times):
            self.after(self._latency(), self._arrive, node.name, node.life, peer, other.life, message, self.now)

    def _arrive(self, a: str, a_life: int, b: str, b_life: int, message: messages.Request, sent: float) -> None:
        node = self.nodes[b]
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._arrive, a, a_life, b, b_life, message, sent)
            return
        answer = self.event(b, b_life, ev.Received(a, message))
        if answer is None or self._lost(b, a):
            return
        if self._encode:
            answer = messages.decode_answer(messages.encode_message(answer))
        if isinstance(answer, messages.Alive):
            self.after(self._latency(), self._alive, a, a_life, b, message, answer, sent)
        else:
            self.after(self._latency(), self.event, a, a_life, ev.Answered(b, message, answer))

    def _alive(self, a: str, a_life: int, b: str, message: messages.Request, answer: messages.Alive, sent: float) -> None:
        node = self.nodes[a]
        if node.life == a_life:
            node.heard_by[b] = max(sent, node.heard_by.get(b, 0.0))
        self.event(a, a_life, ev.Answered(b, message, answer))

    # ---- trainers -------------------------------------------------------------------------------------------------------------

    def start_trainer(self, name: str, seconds: float) -> None:
        node = self.nodes[name]
        node.trainer_life += 1
        self.after(seconds, self._trainer_up, name, node.life, node.trainer_life)

    def _trainer_up(self, name: str, life: int, trainer_life: int) -> None:
        node = self.nodes[name]
        if node.control is None or (node.life, node.trainer_life) != (life, trainer_life):
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._trainer_up, name, life, trainer_life)
            return
        node.trainer = Trainer(self, name, f"{name}/{life}.{trainer_life}", node.journal)
        offering = local.Offering(MODEL, Capacity(100.0, 1.0 + int(name[1:]) / 100), self.cost)
        journal = node.journal
        self.event(name, life, ev.TrainerOffers(offering, True, journal.crew or messages.NO_CREW, journal.stage, journal.step))

    def kill_trainer(self, name: str, seconds: float) -> None:
        """And start another one after so long."""
        node = self.nodes[name]
        if node.trainer is None or node.control is None:
            return
        self.history.note(self.now, "kill trainer", name)
        node.trainer.assigned, node.trainer.work = None, -1
        node.trainer = None
        self.after(0.001, self.event, name, node.life, ev.TrainerLeft())
        self._streams_end(name)
        self.start_trainer(name, seconds)

    def report(self, trainer: Trainer, status: local.StageStatus) -> None:
        node = self.nodes[trainer.node]
        if node.trainer is trainer:
            self.after(0.001, self._reported, trainer, node.life, status)
        if status.phase == "loading":
            self._trigger("loading", trainer.node)

    def _reported(self, trainer: Trainer, life: int, status: local.StageStatus) -> None:
        if self.nodes[trainer.node].trainer is trainer:
            self.event(trainer.node, life, ev.TrainerStatus(status))

    def plan(self, seconds: float, name: str, trainer: Trainer, what: tuple[str, int]) -> None:
        self.after(seconds, self._woke, name, trainer, what)

    def _woke(self, name: str, trainer: Trainer, what: tuple[str, int]) -> None:
        node = self.nodes[name]
        if node.trainer is not trainer:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._woke, name, trainer, what)
            return
        trainer.woke(*what, self.now)

    def send_frame(self, trainer: Trainer, peer: str, message: Message) -> None:
        """Frames arrive in order unless the schedule says otherwise, at whatever roster the receiver is by then: only fences stop them."""
        name = trainer.node
        if peer not in self.nodes or self.nodes[name].trainer is not trainer:
            return
        if (name, peer) in self.cut or self.nodes[peer].trainer is None:
            self.after(self.rng.uniform(0.01, 2.0), self._stream_breaks, name, peer, message.place.roster_epoch)
            return
        when = self.now + self._latency() + (self.rng.random() * 5 if self.rng.random() < 0.05 else 0.0)
        if not self.frames_overtake:
            stream = name, peer, message.place.roster_epoch
            when = self._last_frame[stream] = max(when, self._last_frame.get(stream, 0.0) + 1e-6)
        for _ in range(2 if self.copies and self.rng.random() < self.copies else 1):
            self.at(when, self._frame_arrives, peer, self.nodes[peer].trainer, message, trainer.name)

    def _frame_arrives(self, name: str, trainer: Trainer, message: Message, writer: str) -> None:
        node = self.nodes[name]
        if node.trainer is not trainer:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._frame_arrives, name, trainer, message, writer)
            return
        trainer.receive(message, message.place.stage, writer, self.now)

    def _stream_breaks(self, a: str, b: str, epoch: int) -> None:
        self.event(a, self.nodes[a].life, ev.StreamLost(b, epoch))
        if (b, a) not in self.cut:
            self.event(b, self.nodes[b].life, ev.StreamLost(a, epoch))

    def _streams_end(self, name: str) -> None:
        """Everybody who shares a roster with `name` notices that its streams are gone."""
        for other in self.nodes.values():
            control = other.control
            if other.name != name and control is not None and control.roster is not None and control.stage is not None:
                epoch = control.roster.epoch
                if any(seat.peer == name for seat in control.roster.seats):
                    self.after(self._latency(), self.event, other.name, other.life, ev.StreamLost(name, epoch))

    def fence_check(self, fence: Fence, place: Any, sender: int, step: int | None) -> str | None:
        return self._fence_check(fence, place, sender, step)

    def fails_to_restore(self, trainer: Trainer) -> bool:
        return self.failing > 0 and self.now < self.quiet_from and self.rng.random() < self.failing

    def replica(self, trainer: Trainer) -> bool:
        return self.replicas

    # ---- faults ---------------------------------------------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        rng = self.rng
        kinds = (
            self._kill, self._kill, self._kill_trainers, self._stop, self._cut_off, self._cut_off, self._neighbours, self._everybody,
            self._kill_on, self._kill_on, self._stop_trainer_link, self._drain,
        )  # fmt: skip
        for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5))):
            self.at(rng.uniform(4.0, FAULT_SECONDS), rng.choice(kinds))
        self.at(FAULT_SECONDS + 10.0, self._mend)
        self.quiet_from = FAULT_SECONDS + 10.0

    def _mend(self) -> None:
        self.cut.clear()
        self._triggers.clear()

    def _some(self) -> str:
        members = [n.name for n in self.nodes.values() if n.control is not None and n.control.stage is not None]
        return self.rng.choice(members or list(self.nodes))

    def kill(self, name: str) -> None:
        """A whole node: sometimes its connections are reset, sometimes it is merely silent; it comes back or not, remembering or not."""
        node = self.nodes[name]
        if node.control is None:
            return
        forgets, silent, back = self.rng.random() < 0.4, self.rng.random() < 0.3, self.rng.random() < 0.8
        self.history.note(self.now, "kill", name, forgets, silent, back)
        node.control, node.trainer = None, None
        node.stopped_until = 0.0
        if forgets:
            node.memory = b""
            if self.rng.random() < 0.5:
                node.journal = Journal()
        if not silent:
            for other in self.nodes.values():
                if other.control is not None:
                    self.after(self._latency(), self.event, other.name, other.life, ev.PeerGone(name))
            self._streams_end(name)
        if back:
            self.after(self.rng.choice((0.5, 3.0, 8.0)) + self.rng.random(), self.boot, name)
        else:
            node.dead = True

    def _kill(self) -> None:
        self.kill(self._some())

    def _kill_trainers(self) -> None:
        for _ in range(self.rng.choice((1, 1, 2))):
            self.kill_trainer(self._some(), self.rng.choice((0.5, 2.0, 30.0)))

    def _stop(self) -> None:
        """SIGSTOP of a whole node, past its lease or not; then it goes on as if nothing had been."""
        node = self.nodes[self._some()]
        node.stopped_until = max(node.stopped_until, self.now + self.rng.choice((3.0, 10.0, 20.0, 40.0)))
        self.history.note(self.now, "stop", node.name)
        self.quiet_from = max(self.quiet_from, node.stopped_until)

    def _cut_off(self) -> None:
        """One direction between two, or everything to or from one, or a split down the middle."""
        rng, names = self.rng, list(self.nodes)
        a = self._some()
        how = rng.randrange(4)
        if how == 0:
            pairs = [(a, rng.choice(names))]
        elif how == 1:
            pairs = [(a, b) for b in names]
        elif how == 2:
            pairs = [(b, a) for b in names]
        else:
            side = set(rng.sample(names, len(names) // 2))
            pairs = [(x, y) for x in names for y in names if (x in side) != (y in side)]
        self.history.note(self.now, "cut", how, a)
        for pair in pairs:
            if pair[0] != pair[1]:
                self.cut[pair] = 1.0
        self.after(rng.choice((2.0, 8.0, 30.0)), self._heal, pairs)
        for x, y in pairs:
            if rng.random() < 0.5:
                node = self.nodes[x]
                if node.control is not None and node.control.roster is not None:
                    self.after(rng.uniform(0.01, 3.0), self._stream_breaks, x, y, node.control.roster.epoch)

    def _heal(self, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            self.cut.pop(pair, None)

    def _neighbours(self) -> None:
        """Two adjacent stages at the same moment."""
        a = self.nodes[self._some()]
        roster = a.control.roster if a.control is not None else None
        if roster is None or a.control is None or a.control.stage is None:
            return
        stage = a.control.stage
        self.history.note(self.now, "neighbours", a.name)
        for peer in sorted({a.name, roster.seats[(stage + 1) % len(roster.seats)].peer} - {""}):
            if self.rng.random() < 0.5:
                self.kill(peer)
            else:
                self.kill_trainer(peer, self.rng.uniform(0.5, 3.0))

    def _everybody(self) -> None:
        if self.rng.random() < 0.4:
            self.history.note(self.now, "everybody")
            for name in self.nodes:
                self.kill(name)

    def _kill_on(self) -> None:
        """Kill when a stage begins to load, between an acknowledgement and the commit, when a step was taken by the first, or when a
        witness goes to another crew."""
        what = self.rng.choice(("loading", "acknowledge", "took", "moved"))
        self._triggers.setdefault(what, []).append(self.rng.choice(("it", "head", "both")))
        if self.rng.random() < 0.5:
            self.kill_trainer(self._some(), 1.0)

    def _trigger(self, what: str, name: str) -> bool:
        waiting = self._triggers.get(what)
        if not waiting:
            return False
        who = waiting.pop()
        self.history.note(self.now, f"kill while {what}", name, who)
        names = {name} if who == "it" else set()
        control = self.nodes[name].control
        if control is not None and control.roster is not None and who != "it":
            names |= {control.roster.seats[0].peer} | ({name} if who == "both" else set())
        whole = self.rng.random() < 0.5
        for victim in sorted(names & set(self.nodes)):
            self.after(0.0, self.kill, victim) if whole else self.after(0.0, self.kill_trainer, victim, self.rng.uniform(0.3, 3.0))
        return bool(names)

    def acknowledged(self, trainer: Trainer) -> None:
        if trainer.assigned is not None and trainer.assigned.stage > 0:
            self._trigger("acknowledge", trainer.node)

    def took(self, trainer: Trainer) -> bool:
        """Whether the process dies right after its step, before it says so."""
        return self._trigger("took", trainer.node) and self.rng.random() < 0.5

    def _stop_trainer_link(self) -> None:
        """The trainer's connection breaks and comes back; its process goes on."""
        node = self.nodes[self._some()]
        if node.trainer is None:
            return
        self.event(node.name, node.life, ev.TrainerLeft())
        self.after(self.rng.uniform(0.1, 4.0), self._relink, node.name, node.life, node.trainer)

    def _relink(self, name: str, life: int, trainer: Trainer) -> None:
        node = self.nodes[name]
        if node.trainer is trainer and node.life == life:
            offering = local.Offering(MODEL, Capacity(100.0, 1.0), self.cost)
            self.event(name, life, ev.TrainerOffers(offering, False))
            trainer.report()

    def _drain(self) -> None:
        node = self.nodes[self._some()]
        if node.control is not None:
            self.history.note(self.now, "drain", node.name)
            self._draining.add(node.name)
            self.event(node.name, node.life, ev.Drain("asked to"))


def check(seed: int, **options: Any) -> History:
    """Run one schedule. Raises Violation with the seed and how to replay it."""
    world = World(seed, **options)
    try:
        return world.run()
    except Exception as error:
        raise Violation(f"seed {seed} at {world.now:.3f} s: {error}\n  python -m tests.support.nemesis --seed {seed}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, help="replay this one and print what happens")
    parser.add_argument("--schedules", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    if options.seed is not None:
        world = World(options.seed, encode=True)
        print(f"{world.stages} stages, {world.spares} spares, loss {world.loss}, copies {world.copies}, delay {world.delay}")
        note = world.history.note

        def loud(now: float, what: str, *details: object) -> None:
            print(f"{now:9.3f}  {what:12} {' '.join(map(str, details))}")
            note(now, what, *details)

        world.history.note = loud  # type: ignore[method-assign]
        try:
            world.run()
        except Violation as error:
            print(f"VIOLATION at {world.now:.3f}: {error}")
            return 1
        return 0
    began, failures, steps = time.process_time(), 0, 0
    for seed in range(options.first, options.first + options.schedules):
        try:
            steps += check(seed).counts.get("steps", 0)
        except Violation as error:
            failures += 1
            print(error)
    print(f"{options.schedules} schedules, {steps} steps taken by all, {failures} failures, {time.process_time() - began:.1f} CPU seconds")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
