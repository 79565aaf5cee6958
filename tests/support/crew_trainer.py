"""A trainer process of the simulated crew: real `commit` and `fence`, and weights that are a hash
of what was learnt."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from swarmnode.stages import wire
from swarmnode.stages.pipeline import Blame, Verdict
from swarmnode.stages.wire import (
    NO_HASH,
    Capacity,
    Coordinator,
    Copy,
    Decided,
    Fence,
    Next,
    Participant,
    Place,
    StepAnswer,
    Taken,
)
from tests.support.crew_history import Violation

DEADLINE_SECONDS = 6.0
"""Of a proposal."""
COPY_EVERY = 5
"""Steps between two copies at the neighbours."""
MODEL = bytes(32)

Block = tuple[int, int]
NOTHING = Taken()


def first_weight(block: Block) -> bytes:
    return hashlib.blake2b(b"base" + bytes(block), digest_size=16).digest()


def next_weight(weight: bytes, step: int, micro_batches: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(weight + repr((step, micro_batches)).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Message:
    """A frame: `kind` is propose, work, acknowledge, commit, abort or done."""

    place: Place
    kind: str
    attempt: int = 0
    micro_batches: tuple[int, ...] = ()
    refused: Any = None


@dataclass(frozen=True)
class Weights:
    """A stage as of one step."""

    lineage: bytes
    block: Block
    step: int
    hash: bytes
    weight: bytes
    taken: Taken = NOTHING
    exact: bool = True
    """Whether every restoration that these weights come from was."""

    def copy(self, where: Any, next_hash: bytes = b"") -> Copy:
        return Copy(self.lineage, *self.block, self.step, self.hash, where, self.taken, next_hash)


@dataclass
class Disk:
    """What a node has on disk: its journal, and copies for its neighbours."""

    journal: Weights | None = None
    copies: dict[Block, Weights] = field(default_factory=dict)

    def all(self) -> list[Weights]:
        return [*([self.journal] if self.journal else []), *self.copies.values()]


@dataclass
class Trainer:
    """`world` carries frames, statuses and delays: see `nemesis.World`."""

    world: Any
    node: str
    name: str
    """Of this process: never used again."""
    disk: Disk
    assigned: wire.Assigned | None = None
    phase: str = "idle"
    participant: Participant = field(default_factory=Participant)
    held: Weights | None = None
    """What is in memory, as of the last step."""
    own: bool = False
    """It has taken a step with what it holds, or has it from its own journal: else it keeps a copy,
    and has learnt nothing."""
    linked: bool = True
    """To its network process."""
    rung: str = ""
    resumed: bool = False
    fence: Fence | None = None
    coordinator: Coordinator | None = None
    deadline: float = 0.0
    """Of its attempt."""
    blame: Blame | None = None
    progress: int = 0
    learnt: tuple[int, ...] = ()
    proposed: frozenset[int] | None = None
    """What the present attempt is made of; None until the head has said."""
    early: tuple[int, ...] = ()
    """Micro-batches that came before the head had said so."""
    in_step: bool = False
    work: int = 0
    """Counts what was planned, so that what was planned before is dropped."""
    refuses: bool = False
    """It says at every step that its gradient is none."""
    keeps: bool = False
    """It takes its work, and does none of it."""
    turns: tuple[int, int] = (1, 0)
    """Attempts of which it spoils one by either, and which one of them."""

    # ---- what the network process says -----------------------------------------------------------

    def notified(self, message: wire.ToTrainer, now: float) -> None:
        match message:
            case wire.Assigned():
                self._assigned(message, now)
            case wire.Resumed():
                if self.assigned is not None and message.crew == self.assigned.crew:
                    self.resumed = True
                    self._begin_step(now)
            case wire.Suspended():
                self.resumed = False
            case wire.Released():
                self.assigned = self.fence = self.coordinator = None
                self.phase, self.resumed = "idle", False
                self.work += 1
                self._later(self.world.rng.uniform(0.0, 0.5), "stopped")

    def offering(self) -> wire.Offering:
        copies = [weights.copy("neighbour") for weights in self.disk.copies.values()]
        if self.disk.journal is not None:
            copies.append(self.disk.journal.copy("disk"))
        if self.held is not None and self.held.step > 0:
            copies.append(
                self.held.copy("memory" if self.own else "neighbour", self.participant.next_hash)
            )
        return wire.Offering(
            MODEL,
            Capacity(self.world.memory_of(self.node), self.world.speed_of(self.node)),
            self.world.cost,
            tuple(copies),
        )

    def _assigned(self, assigned: wire.Assigned, now: float) -> None:
        self.assigned, self.resumed, self.coordinator, self.in_step = assigned, False, None, False
        self.work += 1
        start = sum(assigned.layers[: assigned.stage])
        block = start, start + assigned.layers[assigned.stage]
        held = self.held
        if held is not None and (held.lineage, held.block) == (assigned.lineage, block):
            if self.participant.next_hash == assigned.hash:
                self._take(
                    self.participant.commit(self.participant.step, self.participant.attempt),
                    now,
                    assigned.taken,
                )
            if self.participant.hash == assigned.hash:
                self._enter("R0", self.held, now)
                return
        self.own = False
        self.held, self.phase = None, "loading"
        self._drop()
        self.report()
        self._later(self.world.rng.uniform(0.1, 1.5), "loaded")

    def _later(self, seconds: float, what: str) -> None:
        self.world.plan(seconds, self.node, self, (what, self.work))

    def woke(self, what: str, work: int, now: float) -> None:
        """Something planned is due."""
        if work != self.work:
            return
        if what == "stopped":
            self.world.offers(self)
        elif self.assigned is None:
            return
        elif what == "loaded":
            self._restore(now)
        elif what == "passed" and self.phase == "probation":
            self.phase = "active"
            self.report()
        elif what == "step":
            self._begin_step(now)
        elif what == "deadline" and self.coordinator is not None:
            silent = self.coordinator.silent
            decided = self.coordinator.give_up("timeout") if now >= self.deadline else None
            if decided is not None and self.blame is not None:
                self._blamed(self.blame.silent(self.world.whose(self, silent - {0})))
            self._decided(decided, now)

    # ---- restoring -------------------------------------------------------------------------------

    def _restore(self, now: float) -> None:
        assert self.assigned is not None
        a = self.assigned
        start = sum(a.layers[: a.stage])
        block = start, start + a.layers[a.stage]
        if self.world.fails_to_restore(self):
            self.phase = "failed"
            self.report()
            return
        if a.step == 0:
            self._enter("", Weights(a.lineage, block, 0, NO_HASH, first_weight(block)), now)
            return
        here = [
            w
            for w in self.disk.all()
            if (w.lineage, w.block) == (a.lineage, block) and w.step <= a.step
        ]
        sources = [("R0", w) for w in here] + [
            ("R2", w) for w in self.world.copies_at(a, block) if w.step <= a.step
        ]
        exact = [(rung, w) for rung, w in sources if w.hash == a.hash]
        if exact:
            self.own = exact[0][1] is self.disk.journal
            self._enter(*exact[0], now)
        elif sources:
            rung, older = max(sources, key=lambda one: one[1].step)
            self._enter(rung, replace(older, step=a.step, hash=a.hash, exact=False), now)
        else:  # the base's, or made of its neighbours'
            self._enter(
                "R3",
                Weights(a.lineage, block, a.step, a.hash, first_weight(block), exact=False),
                now,
            )

    def _enter(self, rung: str, weights: Weights | None, now: float) -> None:
        assert self.assigned is not None
        assert weights is not None
        a = self.assigned
        self.rung, self.held, self.phase = rung, weights, "probation"
        self._drop()
        self.participant = Participant(a.step, a.hash, a.crew[:16])
        self.fence = Fence(Place(a.crew[:16], a.stage, a.step), len(a.layers))
        self.blame = Blame(len(a.layers), lambda: self.world.now)
        self.report()
        self._later(self.world.rng.uniform(0.1, 1.0), "passed")

    # ---- a step ----------------------------------------------------------------------------------

    def _place(self) -> Place:
        assert self.fence is not None
        return Place(self.fence.place.crew, self.fence.place.stage, self.participant.step)

    def _send(
        self,
        stage: int,
        kind: str,
        attempt: int = 0,
        micro_batches: tuple[int, ...] = (),
        refused: Any = None,
    ) -> None:
        assert self.assigned is not None
        message = Message(self._place(), kind, attempt, micro_batches, refused)
        if stage == self.assigned.stage:
            self._handle(stage, message, self.world.now)
        else:
            self.world.send_frame(self, self.assigned.members[stage], message)

    def _begin_step(self, now: float) -> None:
        if (
            self.assigned is None
            or self.assigned.stage != 0
            or not self.resumed
            or self.phase != "active"
        ):
            return
        stages = len(self.assigned.members)
        if self.coordinator is None:
            self.coordinator, self.in_step = (
                Coordinator(stages, attempt=self.participant.attempt),
                False,
            )
        elif self.in_step:
            return
        self.in_step = True
        attempt, self.deadline = self.coordinator.begin(), now + DEADLINE_SECONDS
        self._later(DEADLINE_SECONDS + 0.01, "deadline")
        # new ones at each attempt
        batches = tuple(self.participant.step * 1000 + attempt * 10 + i for i in range(3))
        for kind in ("propose", "work"):
            for stage in reversed(range(stages)):
                self._send(stage, kind, attempt, batches)

    def receive(self, message: Message, sender: int, now: float) -> None:
        """A frame of a trainer which said that it is stage `sender`."""
        if (
            self.fence is None
            or self.assigned is None
            or self.phase in ("idle", "loading", "failed")
        ):
            return
        step = self.participant.step if message.kind == "work" else None
        if self.world.fence_check(self.fence, message.place, sender, step) is None:
            if message.place.crew != self.assigned.crew[:16]:
                raise Violation(f"{self.node} computes for a crew that it is not in")
            self._handle(sender, message, now)

    def _handle(self, sender: int, message: Message, now: float) -> None:
        participant, attempt, step = self.participant, message.attempt, message.place.step
        if message.kind == "work":
            self._work(message.micro_batches, now)
        elif message.kind == "propose" and not (self.keeps and self._its_turn(attempt)):
            self._proposed(attempt, participant.propose(step, attempt, message.micro_batches), now)
            if (participant.step, participant.attempt, participant.phase) == (
                step,
                attempt,
                "open",
            ):
                early, self.early, self.proposed = self.early, (), frozenset(message.micro_batches)
                self._work(early, now)
        elif message.kind == "commit":
            self._take(participant.commit(step, attempt), now, Taken(attempt, 1.0, 1e-3))
        elif message.kind == "abort":
            if participant.abort(step, attempt):
                self._drop()
        elif self.coordinator is not None and message.kind == "acknowledge":
            if (
                message.refused is not None
                and self.blame is not None
                and attempt == self.coordinator.attempt
            ):
                self._blamed(self.blame.refused({sender}, str(message.refused)))
            if self.coordinator is not None:
                self._decided(
                    self.coordinator.acknowledged(sender, attempt, message.refused, 1.0), now
                )
        elif (
            self.coordinator is not None
            and message.kind == "done"
            and step in (participant.step, participant.step + 1)
        ):
            if self.coordinator.done(sender, attempt) and step == participant.step + 1:
                self._handle(0, Message(self._place(), "commit", attempt), now)
            if self.coordinator is not None and not self.coordinator.unfinished and self.in_step:
                self.in_step = False
                if self.blame is not None:
                    self.blame.taken({})
                self._later(self.world.step_seconds, "step")

    def _work(self, micro_batches: tuple[int, ...], now: float) -> None:
        """What the head has not proposed waits, and is dropped where the proposal does not name it:
        it is of an attempt that is over."""
        if self.proposed is None:
            self.early += micro_batches
            return
        for micro_batch in micro_batches:
            if micro_batch in self.proposed and self.participant.may_accumulate(micro_batch):
                self.participant.accumulated(micro_batch)
                self.learnt = (*self.learnt, micro_batch)
        self.progress += 1
        self._proposed(self.participant.attempt, self.participant.complete(), now)

    def _its_turn(self, attempt: int) -> bool:
        of, which = self.turns
        return attempt % of == which

    def _drop(self) -> None:
        self.learnt, self.proposed, self.early = (), None, ()

    def _proposed(self, attempt: int, action: Next | StepAnswer | None, now: float) -> None:
        if action == "prepare":
            action = self.participant.prepared(
                attempt, None if self.refuses and self._its_turn(attempt) else 1.0, now
            )
        if isinstance(action, StepAnswer):
            self._send(0, "acknowledge", action.attempt, refused=action.refused)
            self.world.acknowledged(self)
        elif action == "confirm":
            self._send(0, "done", attempt)

    def _blamed(self, verdict: Verdict | None) -> None:
        if verdict is not None and self.assigned is not None:
            self.world.blames(self, wire.Blames(self.assigned.crew, *verdict))

    def _decided(self, decided: Decided | None, now: float) -> None:
        if decided is None:
            return
        kind = "abort" if decided.refused else "commit"
        assert self.assigned is not None
        alone = len(self.assigned.members) == 1
        for stage in decided.stages:
            if kind == "abort" or stage != 0 or alone:
                self._send(stage, kind, decided.attempt)
        if kind == "abort" and self.in_step:
            self.in_step = False
            self._later(self.world.step_seconds, "step")

    def _take(self, action: Next | None, now: float, taken: Taken) -> None:
        assert self.assigned is not None
        if action == "take":
            assert self.held is not None
            batches = tuple(sorted(self.learnt))
            self._drop()
            weight = next_weight(self.held.weight, self.participant.step - 1, batches)
            self.own = True
            self.held = replace(
                self.held,
                step=self.participant.step,
                hash=self.participant.hash,
                weight=weight,
                taken=taken,
            )
            self.progress += 1
            self.world.took_step(self, self.held, batches)
            if self.phase == "active":
                self.report()
            if self.world.dies_after_step(self):
                return
        if action is not None and self.phase == "active":
            self._send(0, "done", taken.attempt)

    def report(self) -> None:
        """Tells the network process how it is."""
        if self.assigned is None:
            return
        a, p = self.assigned, self.participant
        self.world.report(
            self, wire.StageStatus(a.crew, a.stage, self.phase, p.step, self.progress, self.rung)
        )  # type: ignore[arg-type]


def named_keys(name: str) -> tuple[Any, Any]:
    """Signatures that only whoever knows the name can make: enough where nobody forges."""

    def sign(data: bytes, who: str = name) -> bytes:
        return hashlib.blake2b(data, key=who.encode(), digest_size=64).digest()

    return sign, lambda peer, data, signature: sign(data, peer) == signature
