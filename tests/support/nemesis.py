"""Crews under a seeded nemesis, in virtual time: `python -m tests.support.nemesis --seed 17`
replays one schedule.

Real `control`, `commit`, `fence` and `blame` of every node over a simulated network. A schedule
draws the size of the crew, how bad the network is, strangers that lie, and faults: processes killed
(with and without their disk, for good or for a while), stopped and resumed, cut off in one
direction or both, killed while they load or between acknowledging and commit, two neighbours at
once, everybody at once, clocks that run at other speeds. `crew_history` holds what happens to what
must be true, and raises Violation.

    faults    the above, with lying strangers in half of the schedules
    calm      lying strangers and free nodes alone: no crew that runs may end or stand still
    member    one member lies: it goes on without it, or in spite of it
    members   two lie, in turn, or each at every other step, so that every second or third is taken:
    it goes on without them
    losses    nobody lies and no message is lost; one outage after the other, and after each a crew
    begins at the newest step of which there
              is a copy of every block: some are cut off for a second to an hour, all processes are
              killed at once, one disk of them is gone besides, or each member in turn is drained
              and replaced by a new node
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from swarmnode.stages import wire
from swarmnode.stages.crew import Means, Phase, State, advance
from swarmnode.stages.wire import (
    NO_HASH,
    Copy,
    Fence,
    Founded,
    Member,
    ModelCost,
    Part,
    Record,
    Settings,
    Signed,
    Taken,
    peers_of,
)
from tests.support.crew_history import History, Violation
from tests.support.crew_trainer import (
    COPY_EVERY,
    MODEL,
    Block,
    Disk,
    Message,
    Trainer,
    Weights,
    named_keys,
)

SETTINGS = Settings(
    tick_seconds=1.0,
    heartbeat_seconds=2.0,
    offer_seconds=3.0,
    gather_seconds=2.0,
    turn_seconds=2.0,
    exact_seconds=8.0,
    join_seconds=5.0,
    gone_seconds=4.0,
    evict_seconds=13.0,
    prepare_seconds=40.0,
    step_seconds=60.0,
    lost_seconds=60.0,
    bar_seconds=3.0,
)
FAULT_SECONDS = 25.0
"""During which faults begin; what they break is mended soon after."""
BOUND_SECONDS = 240.0
"""After the last fault, until everybody runs or is free because it must be. Each liar adds
`step_seconds`: one that holds the head's place and answers is not to be told from a slow head
before, and before that nobody has seen anything of it. So it can cost whoever does not know it so
much, once; what it costs later is bounded by how long it is left out then. A member that keeps its
work and has a neighbour blamed beside it is KEEPER of these: each head has to see it beside two
others, and of five nodes that want to hold four stages few are left. Two that lie have three times
as much."""
KEEPER = 8
KINDS = ("faults", "calm", "member", "members", "losses")
SPARES = {"faults": (0, 0, 1, 1, 2), "members": (2, 3), "losses": (0, 0, 1)}
LIARS = {"member": 1, "members": 2}
"""Members that lie."""
LONGEST_OUTAGE_SECONDS = 3600.0


@dataclass
class Node:
    name: str
    rate: float
    """Of its clock."""
    state: State | None = None
    """None while its network process is down."""
    means: Means | None = None
    life: int = 0
    trainer: Trainer | None = None
    trainer_life: int = 0
    disk: Disk = field(default_factory=Disk)
    stopped_until: float = 0.0
    offset: float = 0.0
    dead: bool = False
    lies: bool = False
    turn: int = 0
    """Of two that lie in turn."""


class World:
    """One schedule. `run` ends when everybody is at rest after the faults, or raises Violation."""

    step_seconds = 1.0

    def __init__(
        self,
        seed: int,
        kind: str = "faults",
        *,
        fence_check: Any = Fence.check,
        encode: bool = False,
        **options: Any,
    ) -> None:
        self.rng = rng = random.Random(f"{kind} {seed}")
        self.seed, self.kind, self.now = seed, kind, 0.0
        self._fence_check, self._encode, self._advance = (
            fence_check,
            encode,
            options.get("advance", advance),
        )
        self._greedy = bool(options.get("greedy"))
        """Strangers offer more than anybody, and refuse what they are asked to sign; nobody says
        how many stages there are to be."""
        self.history = History()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.stages = rng.choice((1, 2, 2, 3, 3, 3, 4, 4))
        self.spares = rng.choice(SPARES.get(kind, (1, 2)))
        if kind in ("member", "losses"):
            self.stages = max(2, self.stages)
        if kind == "members":
            self.stages = max(3, self.stages)
        bad = kind == "faults"
        self.loss = rng.choice((0.0, 0.0, 0.02, 0.1, 0.3)) if bad else 0.0
        self.copies = rng.choice((0.0, 0.0, 0.1)) if bad else 0.0
        self.delay = rng.choice((0.02, 0.05, 0.3))
        self.frames_overtake = bad and rng.random() < 0.1
        self.failing = rng.choice((0.0, 0.0, 0.0, 0.2)) if bad else 0.0
        self.liars = (
            [f"x{i}" for i in range(rng.choice((1, 2, 3)))]
            if kind == "calm" or (kind != "losses" and rng.random() < 0.5)
            else []
        )
        self.quiet_from = FAULT_SECONDS + 10.0 if kind != "losses" else math.inf
        self._begins_at = 0
        """Where nothing is cut off: the step that a crew has to begin at, or a newer one."""
        self.cut: set[tuple[str, str]] = set()
        self._last_frame: dict[tuple[str, str, bytes], float] = {}
        self._triggers: dict[str, list[str]] = {}
        self._first_step: dict[bytes, int] = {}
        self._draining: set[str] = set()
        self._seen: list[Founded] = []
        """Crews that there were: what a liar replays."""
        self._newest = 0
        """The step that live nodes could have gone on from when the faults were over."""
        self._free_since: dict[str, float] = {}
        self._known: dict[bytes, int] = {}
        """Crew → the step that its members and those free for long could have gone on from when it
        was founded."""
        self._as_new: set[bytes] = set()
        """Lineages of which some live node was as far as that: where nodes suffice for one crew
        only, one of them has to be given up."""
        self.nodes: dict[str, Node] = {}
        part = Part(1.0, 1.0)
        self.cost = ModelCost(part, (part,) * self.stages, part, batch_bytes=1e6, crossings=8.0)
        self.settings = Settings(
            **{
                **{f: getattr(SETTINGS, f) for f in SETTINGS.__struct_fields__},
                "stages": self.stages,
            }
        )
        if self._greedy and self.stages < 4:  # nodes have room for one cut alone
            self.settings = replace(self.settings, stages=0)
        for number in range(self.stages + self.spares):
            rate = rng.choice((1.0, 1.0, 0.98, 1.03)) if bad else 1.0
            self._add(
                f"n{number}",
                rate,
                0.0 if number < self.stages or rng.random() < 0.5 else rng.uniform(5, 25),
            )
        for name in self.liars:
            self.after(rng.uniform(0.1, 2.0), self._lie, name)

    def speed_of(self, name: str) -> float:
        return 1.0 + int(name[1:]) / 100

    def memory_of(self, name: str) -> float:
        """Of a stage of this cut, and not of two."""
        return 3.5 if self.stages == 1 else 2.5

    # ---- time ------------------------------------------------------------------------------------

    def at(self, when: float, function: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (max(when, self.now), self._count, function, args))

    def after(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, function, *args)

    def run(self) -> History:
        if self.kind == "faults":
            self._plan_faults()
        elif self.kind in LIARS:
            for number in range(LIARS[self.kind]):
                self.at(8.0, self._turn_coat, number)
        elif self.kind == "losses":
            self.at(self.rng.uniform(15.0, 40.0), self._outage, self.rng.choice((1, 1, 2, 3)))
        looked = -1
        while self._queue:
            when, _, function, args = heapq.heappop(self._queue)
            if when > self.quiet_from and int(when) != looked:
                if looked < 0:
                    self._newest, self._as_new = self._could_go_on_from(self._live())
                looked = int(when)
                if self._at_rest():
                    self._check_end()
                    return self.history
                if when > self.quiet_from + self._bound():
                    break
            self.now = when
            function(*args)
        if not any(node.state is not None for node in self.nodes.values()):
            return self.history  # the faults left nobody
        if self.kind == "members" and self._learns_slowly():
            self.history.note(self.now, "slow head")
            return self.history
        raise Violation(
            "no end: " + "; ".join(self._describe(node) for node in self.nodes.values())
        )

    def _bound(self) -> float:
        """Seconds, see BOUND_SECONDS."""
        keeps = any(node.trainer is not None and node.trainer.keeps for node in self.nodes.values())
        times = {"member": KEEPER if keeps else 1, "members": 3 * KEEPER}.get(self.kind, 0)
        return BOUND_SECONDS + self.settings.step_seconds * (len(self.liars) + times)

    def _describe(self, node: Node) -> str:
        state = node.state
        if state is None:
            return f"{node.name} down"
        crew = (
            f"{state.crew.id.hex()[:6]} at {state.crew.record.step} {state.crew.own.phase}"
            if state.crew
            else ""
        )
        copies = [
            f"{c.first}-{c.last}@{c.step}{c.where[0]}"
            for c in (state.offering.copies if state.offering else ())
        ]
        return f"{node.name} {state.phase.value} {crew} {copies}"

    def _at_rest(self) -> bool:
        """Whoever is in a crew runs with all that it names, and takes steps; the others are too few
        for another crew.

        Where a member lies: a crew without it takes steps.
        """
        if self.kind in LIARS:
            return any(self._goes_on_without_a_liar(node) for node in self.nodes.values())
        free = 0
        for node in self.nodes.values():
            state = node.state
            if node.lies:
                continue
            if state is None or state.crew is None:
                free += state is not None and node.name not in self._draining and not node.dead
                continue
            crew = state.crew
            if state.phase != Phase.RUNNING or node.stopped_until > self.now:
                return False
            for peer in peers_of(crew.record):
                if peer in self.liars:
                    return False
                other = self.nodes[peer].state
                if (
                    other is None
                    or other.crew is None
                    or other.crew.id != crew.id
                    or other.phase != Phase.RUNNING
                ):
                    return False
            head = self.nodes[peers_of(crew.record)[0]].trainer
            first = self._first_step.setdefault(crew.id, head.participant.step if head else 0)
            if head is None or head.participant.step < first + 2:
                return False
        return free < self.stages

    def _learns_slowly(self) -> bool:
        """Whether a liar leads, and honest nodes have taken a step in twenty seconds: nobody can
        tell it from a slow machine."""
        live = self._live()
        crews = [
            crew.record
            for node in live
            if node.state is not None and (crew := node.state.crew) is not None
        ]
        heads = {peers_of(record)[0] for record in (self._seen[-1].record, *crews)}
        led = any(node.lies for name, node in self.nodes.items() if name in heads)
        return (
            led
            and max(
                (node.trainer.participant.step for node in live if node.trainer is not None),
                default=0,
            )
            > self.now / 20
        )

    def _goes_on_without_a_liar(self, node: Node) -> bool:
        crew = node.state.crew if node.state is not None else None
        if (
            crew is None
            or node.trainer is None
            or any(
                peer not in self.nodes or self.nodes[peer].lies for peer in peers_of(crew.record)
            )
        ):
            return False
        if node.state.phase != Phase.RUNNING:  # before, its trainer is at another step
            return False
        first = self._first_step.setdefault(crew.id, node.trainer.participant.step)
        return node.trainer.participant.step >= first + 3

    def _live(self) -> list[Node]:
        return [
            n
            for n in self.nodes.values()
            if n.state is not None and not n.dead and not n.lies and n.name not in self._draining
        ]

    def _could_go_on_from(self, live: list[Node]) -> tuple[int, set[bytes]]:
        """The newest step whose every block one of `live` has exactly, if they are enough; the
        lineages that are as far."""
        found: dict[tuple[bytes, int, bytes], set[Block]] = {}
        for node in live:
            for weights in [
                *node.disk.all(),
                *([node.trainer.held] if node.trainer and node.trainer.held else []),
            ]:
                if weights.hash in self.history.learnt:  # what a liar names is nobody's loss
                    found.setdefault((weights.lineage, weights.step, weights.hash), set()).add(
                        weights.block
                    )
        step = max(
            (step for (_, step, _), held in found.items() if len(held) == self.stages), default=0
        )
        return (
            (step, {lineage for lineage, at, _ in found if at >= step})
            if len(live) >= self.stages
            else (0, set())
        )

    def _is_known(self, node: Node) -> bool:
        """Whether everybody has heard for a while of what it offers."""
        assert node.state is not None
        return (
            node.state.crew is None
            and self.now - self._free_since[node.name] > 2 * self.settings.offer_seconds
        )

    def _check_end(self) -> None:
        """A crew that was founded without those who had more, since they were in another one just
        then, is nobody's fault."""
        running = [
            n.state.crew.id
            for n in self._live()
            if n.state is not None and n.state.crew is not None
        ]
        step = min(self._newest, max((self._known[crew] for crew in running), default=0))
        held = [
            n.trainer.held
            for n in self._live()
            if n.state is not None and n.state.crew is not None and n.trainer is not None
        ]
        reached = [
            weights.step
            for weights in held
            if weights is not None and weights.lineage in self._as_new
        ]
        if self.kind not in LIARS and step > 0 and held and max(reached, default=-1) < step:
            raise Violation(
                f"step {step} could have been gone on from, and what runs is at"
                f" {sorted({w.step for w in held if w})}"
            )

    # ---- nodes -----------------------------------------------------------------------------------

    def _add(self, name: str, rate: float, when: float) -> None:
        self.nodes[name] = Node(name, rate, offset=self.rng.uniform(0, 1000))
        self.at(when, self.boot, name)

    def boot(self, name: str) -> None:
        node = self.nodes[name]
        if node.state is not None or node.dead:
            return
        node.life += 1
        self._free_since[name] = self.now
        self._draining.discard(name)
        sign, verify = named_keys(name)
        node.state, node.means = (
            State(name),
            Means(self.settings, sign, verify, random.Random(self.rng.randrange(2**60))),
        )
        self.history.note(self.now, "boot", name)
        for other in self.nodes.values():
            if other is not node and other.state is not None:
                self.after(
                    self.rng.uniform(0.01, 0.3), self._meet, name, node.life, other.name, other.life
                )
        for liar in self.liars:
            self.after(
                self.rng.uniform(0.01, 0.3), self.event, name, node.life, wire.PeerBack(liar)
            )
        self.after(self.rng.uniform(0.1, 1.0), self._tick, name, node.life)
        if node.trainer is None:
            self.start_trainer(name, self.rng.uniform(0.2, 2.0))

    def _meet(self, a: str, a_life: int, b: str, b_life: int) -> None:
        if (a, b) in self.cut or (b, a) in self.cut:
            self.after(1.0, self._meet, a, a_life, b, b_life)
            return
        self.event(a, a_life, wire.PeerBack(b))
        self.event(b, b_life, wire.PeerBack(a))

    def _tick(self, name: str, life: int) -> None:
        node = self.nodes[name]
        if node.life != life or node.state is None:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._tick, name, life)
            return
        self.event(name, life, wire.Tick())
        self.after(self.settings.tick_seconds / node.rate, self._tick, name, life)

    def event(self, name: str, life: int, event: wire.Event) -> wire.CrewAnswer | None:
        """Hand an event to a node's control and carry out what it wants. Returns its answer, where
        there is one."""
        node = self.nodes[name]
        if node.state is None or node.means is None or node.life != life:
            return None
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self.event, name, life, event)
            return None
        answer, before, phase = None, node.state.crew, node.state.phase
        node.state, actions = self._advance(
            node.state, event, self.now * node.rate + node.offset, node.means
        )
        crew = node.state.crew
        well = (
            self.kind == "calm"
            and before is not None
            and phase == Phase.RUNNING
            and before.members.keys() <= self.nodes.keys()
        )
        if well and node.state.phase != Phase.RUNNING:
            raise Violation(f"a crew that was well did not go on at {name}: {event}")
        if crew is None and before is not None:
            self._free_since[name] = self.now
        if crew is not None and (before is None or before.id != crew.id):
            self._seen.append(crew.founded)
            if crew.id not in self._known:
                members = peers_of(crew.record)
                self._known[crew.id], _ = self._could_go_on_from(
                    [n for n in self._live() if n.name in members or self._is_known(n)]
                )
            if crew.record.step < self._begins_at:
                raise Violation(
                    f"a crew begins at step {crew.record.step}, and everything of step"
                    f" {self._begins_at} was there"
                )
        for action in actions:
            match action:
                case wire.SendAnswer():
                    answer = action.message
                case wire.Send():
                    self._send(node, action.peer, action.message)
                case wire.Note():
                    self.history.note(self.now, action.what, name, action.detail)
                case _:
                    if node.trainer is not None and node.trainer.linked:
                        node.trainer.notified(action, self.now)
        return answer

    # ---- messages between network processes ------------------------------------------------------

    def _lost(self, a: str, b: str) -> bool:
        return (a, b) in self.cut or (
            self.loss > 0 and self.now < self.quiet_from and self.rng.random() < self.loss
        )

    def _latency(self) -> float:
        return self.rng.random() * self.delay + 0.001

    def _send(self, node: Node, peer: str, message: wire.Request) -> None:
        if self._encode:
            message = wire.decode_request(wire.encode_message(message))
        if node.lies:
            message = self._twisted(node, message)
        if peer in self.liars:
            self.after(self._latency(), self._liar_answers, node.name, node.life, peer, message)
            return
        if peer not in self.nodes or self._lost(node.name, peer):
            return
        for _ in range(2 if self.copies and self.rng.random() < self.copies else 1):
            self.after(
                self._latency(),
                self._arrive,
                node.name,
                node.life,
                peer,
                self.nodes[peer].life,
                message,
                self.now,
            )

    def _arrive(
        self,
        a: str,
        a_life: int,
        b: str,
        b_life: int,
        message: wire.Request,
        asked: float = 0.0,
    ) -> None:
        node = self.nodes[b]
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._arrive, a, a_life, b, b_life, message, asked)
            return
        answer = self.event(b, b_life, wire.Received(a, message))
        if answer is None or self._lost(b, a):
            return
        if self._encode:
            answer = wire.decode_answer(wire.encode_message(answer))
        if a in self.nodes:
            back = self._latency()
            self.after(
                back,
                self.event,
                a,
                a_life,
                wire.Answered(b, message, answer, seconds=(self.now + back - asked) / 2),
            )

    # ---- liars -----------------------------------------------------------------------------------

    def _lie(self, name: str) -> None:
        """A stranger says something to somebody; it knows every crew and lineage that there ever
        was, and its own keys."""
        self.after(self.rng.uniform(0.2, 2.0), self._lie, name)
        target = self.rng.choice(sorted(self.nodes))
        node = self.nodes[target]
        if node.state is not None:
            self.after(
                self._latency(),
                self._arrive,
                name,
                0,
                target,
                node.life,
                self._lie_of(name, target),
            )

    def _lie_of(self, name: str, target: str) -> wire.Request:
        rng, sign = self.rng, named_keys(name)[0]
        seen = rng.choice(self._seen) if self._seen else None
        lineage = seen.record.lineage if seen is not None else b"l" * 32
        crew = wire.crew_id(seen.record) if seen is not None else b"c" * 32
        step = rng.choice((0, 1, 7, 10**15))
        point = (
            NO_HASH
            if step == 0
            else rng.choice(
                (b"h" * 32, seen.record.previous if seen and seen.record.step else b"h" * 32)
            )
        )
        others = [peer for peer in sorted(self.nodes) if peer != target]
        peers = rng.sample([name, target, *others], min(self.stages, 2 + len(others)))
        if self._greedy:
            return wire.Offer(MODEL, rng.choice((2.5, 1e9)), 1e9, 0.0, ())
        record = Record(
            lineage,
            MODEL,
            point,
            step,
            Taken(),
            tuple(Member(peer, 1) for peer in peers),
            rng.randbytes(8),
        )
        match rng.randrange(7):
            case 0:
                copies = (
                    tuple(
                        Copy(lineage, i, i + 1, step, point, "memory", Taken(), b"")
                        for i in range(self.stages)
                    )
                    if step
                    else ()
                )
                return wire.Offer(MODEL, 1e9, 1e9, 0.0, copies)
            case 1:
                return wire.Propose(record)
            case 2:
                return Founded(record, tuple(Signed(peer, sign(crew)) for peer in peers))
            case 3:
                return seen if seen is not None else wire.Leave(crew)
            case 4:
                return wire.Heartbeat(
                    crew, wire.Status(rng.choice(("absent", "active", "failed")), step, 3)
                )
            case 5:
                return wire.Leave(crew, "because")
        return wire.Offer(MODEL, 0.0, 0.0, 0.0)

    def _liar_answers(self, a: str, a_life: int, liar: str, request: wire.Request) -> None:
        """It signs whatever it is asked to sign and never joins, or signs nothing."""
        answer: wire.CrewAnswer = wire.Noted()
        match request:
            case wire.Propose(record):
                crew = wire.crew_id(record)
                answer = wire.Signature(crew, named_keys(liar)[0](wire.member_bytes(crew)))
                if self._greedy:
                    answer = wire.Refuse(self.rng.choice(("busy", "crew", "trust")), crew)
            case wire.Heartbeat(crew) if self.rng.random() < 0.5:
                answer = wire.Alive(crew, wire.Status("active", 10**9, 1))
        self.event(
            a, a_life, wire.Answered(liar, request, answer, seconds=5.0 if liar == "x1" else 0.0)
        )

    def _turn_coat(self, number: int) -> None:
        """A member lies from now on: it refuses steps, keeps its work to itself, or, alone, says
        what is not so of itself."""
        inside = [
            n
            for n in self.nodes.values()
            if n.state is not None and n.state.crew is not None and n.state.crew.stage > 0
        ]
        members = [n for n in inside if not n.lies]
        if not members:
            self.after(2.0, self._turn_coat, number)
            return
        node = self.rng.choice(members)
        node.lies, node.turn = True, number
        self.history.note(self.now, "liar", node.name)
        self._corrupt(node)

    def _corrupt(self, node: Node) -> None:
        if node.trainer is None:
            return
        if self.kind == "members":
            lie, node.trainer.turns = (
                self.rng.choice(("refuses", "keeps")),
                self.rng.choice(((2, node.turn), (2, 0), (3, node.turn))),
            )
        else:
            lie = self.rng.choice(("refuses", "keeps", "says", "says"))
        node.trainer.refuses, node.trainer.keeps = lie == "refuses", lie == "keeps"

    def whose(self, head: Trainer, silent: Set[int]) -> Set[int]:
        """Whom the head finds when it asks who has the work: a liar that has it and says that its
        neighbour does has both blamed."""
        assert head.assigned is not None
        members = head.assigned.members
        for stage in sorted(silent):
            node = self.nodes.get(members[stage])
            if node is not None and node.trainer is not None and node.trainer.keeps:
                beside = [other for other in (stage - 1, stage + 1) if 0 < other < len(members)]
                return {stage, *self.rng.sample(beside, min(1, len(beside)))}
        return silent

    def _twisted(self, node: Node, message: wire.Request) -> wire.Request:
        if (
            node.trainer is not None and (node.trainer.refuses or node.trainer.keeps)
        ) or self.rng.random() < 0.5:
            return message
        match message:
            case wire.Heartbeat(crew, status):
                phase = self.rng.choice(("absent", "active", "probation", "failed"))
                return wire.Heartbeat(
                    crew,
                    wire.Status(
                        phase, self.rng.choice((0, status.step, 10**12)), self.rng.randrange(9)
                    ),
                )
            case wire.Propose():
                return self._lie_of(node.name, self.rng.choice(sorted(self.nodes)))
        return message

    # ---- trainers --------------------------------------------------------------------------------

    def start_trainer(self, name: str, seconds: float) -> None:
        node = self.nodes[name]
        node.trainer_life += 1
        self.after(seconds, self._trainer_up, name, node.trainer_life)

    def _trainer_up(self, name: str, trainer_life: int) -> None:
        node = self.nodes[name]
        if node.trainer_life != trainer_life or node.dead:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._trainer_up, name, trainer_life)
            return
        if node.state is None:
            self.after(0.5, self._trainer_up, name, trainer_life)
            return
        node.trainer = Trainer(self, name, f"{name}/{trainer_life}", node.disk)
        if node.lies:
            self._corrupt(node)
        self.offers(node.trainer)

    def kill_trainer(self, name: str, seconds: float) -> None:
        """And start another one after so long."""
        node = self.nodes[name]
        if node.trainer is None:
            return
        self.history.note(self.now, "kill trainer", name)
        node.trainer.assigned, node.trainer.work, node.trainer = None, -1, None
        self.after(0.001, self.event, name, node.life, wire.TrainerLeft())
        self._streams_end(name)
        self.start_trainer(name, seconds)

    def offers(self, trainer: Trainer) -> None:
        node = self.nodes[trainer.node]
        if node.trainer is trainer:
            self.after(0.001, self._said, trainer, node.life, trainer.offering())

    def report(self, trainer: Trainer, status: wire.StageStatus) -> None:
        node = self.nodes[trainer.node]
        if node.trainer is trainer:
            self.after(0.001, self._said, trainer, node.life, status)
        if status.phase == "loading":
            self._trigger("loading", trainer.node)

    def blames(self, trainer: Trainer, blames: wire.Blames) -> None:
        self.after(0.001, self._said, trainer, self.nodes[trainer.node].life, blames)

    def _said(self, trainer: Trainer, life: int, event: wire.Event) -> None:
        if self.nodes[trainer.node].trainer is trainer and trainer.linked:
            self.event(trainer.node, life, event)

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

    def copies_at(self, assigned: wire.Assigned, block: Block) -> list[Weights]:
        """What the members of a crew have of a block, in reach."""
        found = []
        for peer in assigned.members:
            node = self.nodes.get(peer)
            if (
                node is not None
                and node.trainer is not None
                and (peer, assigned.members[assigned.stage]) not in self.cut
            ):
                found += [
                    w for w in node.disk.all() if (w.lineage, w.block) == (assigned.lineage, block)
                ]
        return found

    def took_step(self, trainer: Trainer, weights: Weights, micro_batches: tuple[int, ...]) -> None:
        a = trainer.assigned
        assert a is not None
        if not self.nodes[trainer.node].lies:
            self.history.took(a.crew[:16], a.stage, len(a.layers), weights, micro_batches)
        if self.rng.random() < 0.9:  # a disk that is busy skips one
            trainer.disk.journal = weights
        if weights.step % COPY_EVERY == 0:
            for neighbour in {(a.stage - 1) % len(a.layers), (a.stage + 1) % len(a.layers)} - {
                a.stage
            }:
                self.after(
                    self.rng.uniform(0.1, 2.0),
                    self._keep,
                    trainer.node,
                    a.members[neighbour],
                    weights,
                )

    def _keep(self, source: str, target: str, weights: Weights) -> None:
        node = self.nodes.get(target)
        if node is None or node.trainer is None or (source, target) in self.cut:
            return
        mine = node.trainer.held
        known = node.disk.copies.get(weights.block)
        if (
            mine is not None
            and mine.lineage == weights.lineage
            and (known is None or known.lineage != weights.lineage or known.step < weights.step)
        ):
            node.disk.copies[weights.block] = weights
            if node.trainer.assigned is None:
                self.offers(node.trainer)

    def send_frame(self, trainer: Trainer, peer: str, message: Message) -> None:
        """Frames arrive in order unless the schedule says otherwise, in whatever crew the receiver
        is by then: only fences stop them."""
        name = trainer.node
        if peer not in self.nodes or self.nodes[name].trainer is not trainer:
            return  # a liar takes frames and answers none
        crew = trainer.assigned.crew if trainer.assigned is not None else b""
        if (name, peer) in self.cut or self.nodes[peer].trainer is None:
            self.after(self.rng.uniform(0.01, 2.0), self._stream_breaks, name, peer, crew)
            return
        when = (
            self.now
            + self._latency()
            + (self.rng.random() * 5 if self.kind == "faults" and self.rng.random() < 0.05 else 0.0)
        )
        if not self.frames_overtake:
            stream = name, peer, message.place.crew
            when = self._last_frame[stream] = max(when, self._last_frame.get(stream, 0.0) + 1e-6)
        for _ in range(2 if self.copies and self.rng.random() < self.copies else 1):
            self.at(when, self._frame_arrives, peer, self.nodes[peer].trainer, message)

    def _frame_arrives(self, name: str, trainer: Trainer, message: Message) -> None:
        node = self.nodes[name]
        if node.trainer is not trainer:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._frame_arrives, name, trainer, message)
            return
        trainer.receive(message, message.place.stage, self.now)

    def _stream_breaks(self, a: str, b: str, crew: bytes) -> None:
        self.event(a, self.nodes[a].life, wire.StreamLost(b, crew))
        if (b, a) not in self.cut:
            self.event(b, self.nodes[b].life, wire.StreamLost(a, crew))

    def _streams_end(self, name: str) -> None:
        """Everybody who is in a crew with `name` notices that its streams are gone."""
        for other in self.nodes.values():
            if (
                other.name != name
                and other.state is not None
                and (crew := other.state.crew) is not None
                and name in crew.members
            ):
                self.after(
                    self._latency(),
                    self.event,
                    other.name,
                    other.life,
                    wire.StreamLost(name, crew.id),
                )

    def fence_check(self, fence: Fence, place: Any, sender: int, step: int | None) -> str | None:
        return self._fence_check(fence, place, sender, step)

    def fails_to_restore(self, trainer: Trainer) -> bool:
        return self.failing > 0 and self.now < self.quiet_from and self.rng.random() < self.failing

    # ---- faults ----------------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        rng = self.rng
        kinds = (
            self._kill,
            self._kill,
            self._kill_trainers,
            self._stop,
            self._cut_off,
            self._cut_off,
            self._neighbours,
            self._everybody,
            self._kill_on,
            self._kill_on,
            self._break_link,
            self._drain,
        )
        for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5))):
            self.at(rng.uniform(4.0, FAULT_SECONDS), rng.choice(kinds))
        self.at(FAULT_SECONDS + 10.0, self._mend)

    def _mend(self) -> None:
        self.cut.clear()
        self._triggers.clear()

    def _some(self) -> str:
        members = [
            n.name for n in self.nodes.values() if n.state is not None and n.state.crew is not None
        ]
        return self.rng.choice(members or list(self.nodes))

    def kill(self, name: str) -> None:
        """A whole node: sometimes its connections are reset, sometimes it is merely silent; it
        comes back or not, with its disk or not."""
        if self.nodes[name].state is not None:
            self._down(
                name, self.rng.random() < 0.3, self.rng.random() < 0.3, self.rng.random() < 0.8
            )

    def _down(self, name: str, loses: bool, silent: bool, back: bool) -> None:
        node = self.nodes[name]
        self.history.note(self.now, "kill", name, loses, silent, back)
        node.state, node.trainer, node.stopped_until = None, None, 0.0
        node.trainer_life += 1
        if loses:
            node.disk = Disk()
        if not silent:
            for other in self.nodes.values():
                if other.state is not None:
                    self.after(
                        self._latency(), self.event, other.name, other.life, wire.PeerGone(name)
                    )
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
        """SIGSTOP of a whole node for a while; then it goes on as if nothing had been."""
        node = self.nodes[self._some()]
        node.stopped_until = max(
            node.stopped_until, self.now + self.rng.choice((3.0, 10.0, 20.0, 40.0))
        )
        self.history.note(self.now, "stop", node.name)
        self.quiet_from = max(self.quiet_from, node.stopped_until)

    def _cut_off(self) -> None:
        """One direction between two, or everything to or from one, or a split down the middle."""
        rng, names = self.rng, list(self.nodes)
        a, how = self._some(), rng.randrange(4)
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
        self.cut |= {pair for pair in pairs if pair[0] != pair[1]}
        self.after(rng.choice((2.0, 8.0, 30.0)), self.cut.difference_update, pairs)
        for x, y in pairs:
            state = self.nodes[x].state
            if rng.random() < 0.5 and state is not None and state.crew is not None:
                self.after(rng.uniform(0.01, 3.0), self._stream_breaks, x, y, state.crew.id)

    def _neighbours(self) -> None:
        """Two adjacent stages at the same moment."""
        state = self.nodes[self._some()].state
        if state is None or state.crew is None:
            return
        peers = peers_of(state.crew.record)
        for peer in sorted(
            {peers[state.crew.stage], peers[(state.crew.stage + 1) % len(peers)]}
            & self.nodes.keys()
        ):
            if self.rng.random() < 0.5:
                self.kill(peer)
            else:
                self.kill_trainer(peer, self.rng.uniform(0.5, 3.0))

    def _everybody(self) -> None:
        if self.rng.random() < 0.4:
            self.history.note(self.now, "everybody")
            for name in self.nodes:
                self.kill(name)

    # ---- outages ---------------------------------------------------------------------------------

    def _outage(self, left: int) -> None:
        """Something that must cost nothing that was learnt and still is on some disk; then another
        one, `left` in all."""
        rng, self._begins_at = self.rng, 0
        how = rng.choice(("cut", "everybody", "disk", "replace"))
        nodes = self._live()
        live = [node.name for node in nodes]
        self.history.note(self.now, how, *live)
        if how == "replace":
            members = [
                name
                for name in live
                if (state := self.nodes[name].state) is not None and state.crew is not None
            ]
            # nobody is in a crew, and nobody can be
            self._replace(members, left) if members else self._over(left)
            return
        seconds = rng.uniform(1.0, 10.0)
        if how == "cut":
            seconds = math.exp(rng.uniform(0.0, math.log(LONGEST_OUTAGE_SECONDS)))
            side = set(rng.sample(live, rng.randrange(1, max(2, len(live)))))
            self.cut |= {(x, y) for x in live for y in live if (x in side) != (y in side)}
        else:
            without = rng.choice(live) if how == "disk" else None
            for name in live:
                self._down(name, name == without, silent=True, back=False)
                self.nodes[name].dead = False
                self.after(rng.uniform(0.5, seconds), self.boot, name)
            self._begins_at = self._could_go_on_from(nodes)[0]
        self.after(seconds + 5.0, self._over, left)

    def _replace(self, members: list[str], left: int) -> None:
        """The first of `members` leaves for good, with its disk, and a new node comes; when they
        run again, the next one."""
        name, rest = members[0], members[1:]
        node = self.nodes[name]
        if node.state is not None:
            self._draining.add(name)
            self.event(name, node.life, wire.Drain("its person is leaving"))
            self.after(2.0, self._down, name, True, False, False)
        self._add(f"n{len(self.nodes)}", 1.0, self.now + self.rng.uniform(0.5, 5.0))
        self.after(10.0, self._over, left, rest)

    def _over(self, left: int, members: list[str] | None = None) -> None:
        self.cut.clear()
        self._begins_at = self._could_go_on_from(self._live())[0]
        self._wait(left, members or [], self.now)

    def _wait(self, left: int, members: list[str], since: float) -> None:
        """Until they run again; then what is next."""
        if not self._at_rest() or self.now - since < 20.0:
            if self.now - since > BOUND_SECONDS:
                raise Violation(
                    "no end: " + "; ".join(self._describe(node) for node in self.nodes.values())
                )
            self.after(1.0, self._wait, left, members, since)
        elif members:
            self._begins_at = 0
            self._replace(members, left)
        elif left > 1:
            self._outage(left - 1)
        else:
            self.quiet_from = self.now

    def _kill_on(self) -> None:
        """Kill when a stage begins to load, between an acknowledgement and the commit, or when a
        step was taken by the first."""
        what = self.rng.choice(("loading", "acknowledge", "took"))
        self._triggers.setdefault(what, []).append(self.rng.choice(("it", "head", "both")))
        if self.rng.random() < 0.5:
            self.kill_trainer(self._some(), 1.0)

    def _trigger(self, what: str, name: str) -> bool:
        waiting, state = self._triggers.get(what), self.nodes[name].state
        if not waiting:
            return False
        who = waiting.pop()
        self.history.note(self.now, f"kill while {what}", name, who)
        names = {name} if who == "it" else set()
        if state is not None and state.crew is not None and who != "it":
            names |= {peers_of(state.crew.record)[0]} | ({name} if who == "both" else set())
        whole = self.rng.random() < 0.5
        for victim in sorted(names & set(self.nodes)):
            (
                self.after(0.0, self.kill, victim)
                if whole
                else self.after(0.0, self.kill_trainer, victim, self.rng.uniform(0.3, 3.0))
            )
        return bool(names)

    def acknowledged(self, trainer: Trainer) -> None:
        if trainer.assigned is not None and trainer.assigned.stage > 0:
            self._trigger("acknowledge", trainer.node)

    def dies_after_step(self, trainer: Trainer) -> bool:
        """Whether the process dies right after its step, before it says so."""
        return self._trigger("took", trainer.node) and self.rng.random() < 0.5

    def _break_link(self) -> None:
        """The trainer's connection breaks and comes back; its process goes on."""
        node = self.nodes[self._some()]
        if node.trainer is not None:
            node.trainer.linked = False
            self.event(node.name, node.life, wire.TrainerLeft())
            self.after(self.rng.uniform(0.1, 4.0), self._relink, node.name, node.trainer)

    def _relink(self, name: str, trainer: Trainer) -> None:
        node = self.nodes[name]
        if node.trainer is trainer and node.state is not None:
            trainer.linked = True
            if trainer.assigned is not None:  # it has not heard that its crew is over
                trainer.notified(wire.Released("the link was down"), self.now)
            else:
                self.offers(trainer)

    def _drain(self) -> None:
        node = self.nodes[self._some()]
        if node.state is not None:
            self.history.note(self.now, "drain", node.name)
            self._draining.add(node.name)
            self.event(node.name, node.life, wire.Drain("asked to"))


def check(seed: int, kind: str = "faults", **options: Any) -> History:
    """Run one schedule. Raises Violation with the seed and how to replay it."""
    world = World(seed, kind, **options)
    try:
        history = world.run()
        history.seconds = world.now
        return history
    except Exception as error:
        raise Violation(
            f"{kind} {seed} at {world.now:.3f} s: {error}\n  python -m tests.support.nemesis --kind"
            f" {kind} --seed {seed}"
        ) from error


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, help="replay this one and print what happens")
    parser.add_argument("--kind", choices=KINDS, default=None)
    parser.add_argument("--schedules", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    if options.seed is not None:
        return _replay(options.seed, options.kind or "faults")
    began, failures, steps = time.process_time(), 0, 0
    for kind in (options.kind,) if options.kind else KINDS:
        ends, slow = [], 0
        for seed in range(options.first, options.first + options.schedules):
            try:
                history = check(seed, kind)
            except Violation as error:
                failures += 1
                print(error)
                continue
            steps, slow = steps + history.counts["steps"], slow + history.counts["slow head"]
            ends.append(history.seconds)
        if ends:
            shares = ", ".join(
                f"{share} % {sorted(ends)[len(ends) * share // 100]:.0f}"
                for share in (50, 75, 95, 99)
            )
            print(
                f"{kind}: seconds until the end: {shares}, longest {max(ends):.0f}; {slow} led by a"
                " liar that is slow"
            )
    print(
        f"{options.schedules} schedules of each kind, {steps} steps taken by all, {failures}"
        f" failures, {time.process_time() - began:.1f} CPU seconds"
    )
    return 1 if failures else 0


def _replay(seed: int, kind: str) -> int:
    world = World(seed, kind, encode=True)
    print(
        f"{world.stages} stages, {world.spares} spares, liars {world.liars}, loss {world.loss},"
        f" copies {world.copies}, delay {world.delay}"
    )
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


if __name__ == "__main__":
    sys.exit(main())
