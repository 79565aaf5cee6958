"""A trainer process of the simulated crew: real `commit` and `fence`, and weights that are a hash of what was learnt."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from swarmnode.crew import local
from swarmnode.pipeline.commit import Answer, Confirm, Coordinator, Decided, Participant, Prepare, Take
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.frames import Place
from tests.support.crew_history import first_weight, next_weight, step_micro_batches

DEADLINE_SECONDS = 6.0
"""Of a proposal."""


@dataclass(frozen=True)
class Message:
    """A frame: `kind` is work, propose, acknowledge, commit, abort or done."""

    place: Place
    kind: str
    attempt: int = 0
    micro_batches: tuple[int, ...] = ()
    refused: Any = None


@dataclass
class Journal:
    """What a node has on disk of a stage."""

    crew: bytes = b""
    stage: int = 0
    step: int = 0
    weight: bytes = b""
    exact: bool = True


@dataclass
class Trainer:
    """`world` carries frames, statuses and delays: see `nemesis.World`."""

    world: Any
    node: str
    name: str
    """Of this process: never used again."""
    journal: Journal
    assigned: local.Assigned | None = None
    phase: str = "idle"
    participant: Participant = field(default_factory=Participant)
    weight: bytes = b""
    exact: bool = True
    """Whether every restoration that these weights come from was."""
    rung: str = ""
    settled: local.Settled | None = None
    stopping: bool = False
    """It still does something of the roster before, and says nothing of this one."""
    resumed: bool = False
    fence: Fence | None = None
    coordinator: Coordinator | None = None
    progress: int = 0
    learnt: tuple[int, ...] = ()
    in_step: bool = False
    """Head: a proposal is undecided, or its step not taken by all."""
    work: int = 0
    """Counts what was planned, so that what was planned before a new roster is dropped."""

    # ---- what the network process says ----------------------------------------------------------------------------------------

    def told(self, message: local.ToTrainer, now: float) -> None:
        match message:
            case local.Assigned():
                self._assigned(message, now)
            case local.Settled():
                if self.assigned is not None and message.roster_epoch == self.assigned.roster_epoch:
                    self.settled = message
                    self._settle(now)
            case local.Resumed():
                if self.assigned is not None and message.roster_epoch == self.assigned.roster_epoch:
                    self.resumed = True
                    self._begin_step(now)
            case local.Suspended():
                self.resumed = False
            case local.Released():
                self.assigned = self.fence = self.coordinator = self.settled = None
                self.phase, self.resumed, self.stopping, self.weight = "idle", False, False, b""
                self.work += 1

    def _assigned(self, assigned: local.Assigned, now: float) -> None:
        before, self.assigned = self.assigned, assigned
        self.settled, self.resumed, self.coordinator = None, False, None
        self.work += 1
        stage = assigned.stage
        place = Place(assigned.crew[:16], assigned.roster_epoch, stage, assigned.stage_epochs[stage], self.participant.step)
        self.fence = Fence(place, assigned.stage_epochs)
        same = before is not None and (before.crew, before.stage) == (assigned.crew, stage) and self.weight != b""
        self.stopping = assigned.held and same and self.phase not in ("idle", "loading", "failed")
        if self.stopping:
            self._later(self.world.rng.uniform(0.0, 0.5), "stopped")
            return
        self.phase, self.weight, self.rung, self.learnt = "loading", b"", "", ()
        self.report()
        self._later(self.world.rng.uniform(0.1, 1.5), "founded" if assigned.founding else "loaded")

    def _later(self, seconds: float, what: str) -> None:
        self.world.plan(seconds, self.node, self, (what, self.work))

    def woke(self, what: str, work: int, now: float) -> None:
        """Something planned is due."""
        if work != self.work or self.assigned is None:
            return
        if what == "stopped":
            self.phase, self.stopping = "ready", False
            self.report()
            self._settle(now)
        elif what == "founded":
            self.participant, self.weight, self.exact = Participant(), first_weight(self.assigned.stage), True
            self.phase = "ready"
            self.report()
            self._settle(now)
        elif what == "loaded":
            self._restore(now)
        elif what == "passed":
            self._pass_gate(now)
        elif what == "step":
            self._begin_step(now)
        elif what == "deadline" and self.coordinator is not None:
            self._decided(self.coordinator.tick(now), now)

    # ---- restoring ------------------------------------------------------------------------------------------------------------

    def _restore(self, now: float) -> None:
        assert self.assigned is not None
        stage, crew, journal = self.assigned.stage, self.assigned.crew, self.journal
        if self.world.fails_to_restore(self):
            self.phase = "failed"
            self.report()
            return
        if (journal.crew, journal.stage) == (crew, stage) and journal.weight:
            self.rung, self.participant, self.weight, self.exact = "R0", Participant(journal.step), journal.weight, journal.exact
        else:
            self.rung, self.participant, self.weight, self.exact = "R2", Participant(self.assigned.step), b"shadow", False
        self.phase = "probation"
        self.report()
        self._settle(now)

    def _pass_gate(self, now: float) -> None:
        if self.phase == "probation" and self.settled is not None:
            self.phase = "active"
            self.report()

    def _settle(self, now: float) -> None:
        """Once stopped and told where the crew stands."""
        settled = self.settled
        if settled is None or self.stopping or self.phase in ("loading", "active", "idle", "failed"):
            return
        step = self.participant.step
        if self.phase == "probation":
            if self.rung == "R0" and step != settled.step:
                self.exact = False
            if self.rung == "R2" and self.world.replica(self):  # the same stage of another crew, as it is after as many steps
                assert self.assigned is not None
                self.rung, self.weight, self.exact = "R1", self.world.history.weight(self.assigned.stage, settled.step), True
            self.participant = Participant(settled.step)
            self._write()
            self._later(self.world.rng.uniform(0.1, 1.0), "passed")
            return
        if step == settled.step - 1 and self.participant.phase == "prepared" and self.participant.attempt == settled.attempt:
            self._take(self.participant.commit(step, settled.attempt), now)
            step = self.participant.step
        if step != settled.step:  # behind for good
            self.phase, self.work = "loading", self.work + 1
            self.weight, self.learnt = b"", ()
            self.report()
            self._later(self.world.rng.uniform(0.1, 1.5), "loaded")
            return
        self.participant = Participant(step)
        self.learnt = ()
        self.phase = "active"
        self.report()

    # ---- a step ---------------------------------------------------------------------------------------------------------------

    def _place(self) -> Place:
        assert self.fence is not None
        place = self.fence.place
        return Place(place.crew, place.roster_epoch, place.stage, place.stage_epoch, self.participant.step)

    def _send(self, stage: int, kind: str, attempt: int = 0, micro_batches: tuple[int, ...] = (), refused: Any = None) -> None:
        assert self.assigned is not None
        message = Message(self._place(), kind, attempt, micro_batches, refused)
        if stage == self.assigned.stage:
            self._handle(stage, message, self.world.now)
        else:
            self.world.send_frame(self, self.assigned.members[stage], message)

    def _begin_step(self, now: float) -> None:
        if self.assigned is None or self.assigned.stage != 0 or not self.resumed or self.phase != "active":
            return
        stages = len(self.assigned.members)
        if self.coordinator is None:
            self.coordinator, self.in_step = Coordinator(stages, attempt=self.participant.attempt), False
        elif self.in_step:
            return
        self.in_step = True
        attempt = self.coordinator.begin(now + DEADLINE_SECONDS)
        self._later(DEADLINE_SECONDS + 0.01, "deadline")
        batches = step_micro_batches(self.participant.step)
        for kind in ("work", "propose"):
            for stage in reversed(range(stages)):
                self._send(stage, kind, attempt, batches)

    def receive(self, message: Message, sender: int, writer: str, now: float) -> None:
        """A frame from the trainer `writer`, which said that it is stage `sender`."""
        if self.fence is None or self.assigned is None or self.phase in ("idle", "loading", "failed"):
            return
        step = self.participant.step if message.kind == "work" else None
        if self.world.fence_check(self.fence, message.place, sender, step) is not None:
            return
        self.world.history.accepted(self.assigned.crew, sender, self.assigned.stage_epochs[sender], writer)
        self._handle(sender, message, now)

    def _handle(self, sender: int, message: Message, now: float) -> None:
        participant, attempt, step = self.participant, message.attempt, message.place.step
        if message.kind == "work":
            for micro_batch in message.micro_batches:
                if participant.may_accumulate(micro_batch):
                    participant.accumulated(micro_batch)
                    self.learnt = (*self.learnt, micro_batch)
            self.progress += 1
        elif message.kind == "propose":
            action = participant.propose(step, attempt, message.micro_batches)
            if isinstance(action, Prepare):
                action = participant.prepared(action.attempt, 1.0, now)
                self.report()
            if isinstance(action, Answer):
                self._send(0, "acknowledge", action.attempt, refused=action.refused)
                self.world.acknowledged(self)
            elif isinstance(action, Confirm):
                self._send(0, "done", action.attempt)
        elif message.kind == "commit":
            action = participant.commit(step, attempt)
            self._take(action, now)
        elif message.kind == "abort":
            if participant.abort(step, attempt) is not None:
                self.learnt = ()
        elif self.coordinator is not None and message.kind == "acknowledge":
            self._decided(self.coordinator.acknowledged(sender, attempt, message.refused, 1.0), now)
        elif self.coordinator is not None and message.kind == "done" and step in (participant.step, participant.step + 1):
            if self.coordinator.done(sender, attempt) and step == participant.step + 1:
                self._handle(0, Message(self._place(), "commit", attempt), now)
            if self.coordinator is not None and self.coordinator.settled and self.in_step:
                self.in_step = False
                self._later(self.world.step_seconds, "step")

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

    def _take(self, action: Take | Confirm | None, now: float) -> None:
        assert self.assigned is not None
        if isinstance(action, Take):
            step, batches = self.participant.step - 1, tuple(sorted(self.learnt))
            self.learnt = ()
            self.weight = next_weight(self.weight, step, batches)
            self.progress += 1
            self._write()
            history = self.world.history
            history.took(now, self.assigned.crew, self.assigned.stage, step, batches, self.name)
            if self.exact:
                history.check_weight(self.assigned.stage, step + 1, self.weight, self.name)
            self.report()
            if self.world.took(self):
                return
        if action is not None and self.settled is not None and self.phase == "active":
            self._send(0, "done", action.attempt)

    def _write(self) -> None:
        assert self.assigned is not None
        journal = self.journal
        journal.crew, journal.stage, journal.step = self.assigned.crew, self.assigned.stage, self.participant.step
        journal.weight, journal.exact = self.weight, self.exact

    def report(self) -> None:
        """Tell the network process how it is."""
        if self.assigned is None or self.stopping:
            return
        p = self.participant
        status = local.StageStatus(
            self.assigned.crew, self.assigned.roster_epoch, self.assigned.stage, self.phase, p.step, self.progress, self.rung,  # type: ignore[arg-type]
            prepared=p.phase == "prepared", attempt=p.attempt, clip=1.0, learning_rate=1e-3,
        )  # fmt: skip
        self.world.report(self, status)


def named_keys(name: str) -> tuple[Any, Any]:
    """Signatures that only whoever knows the name can make: enough where nobody forges."""

    def sign(data: bytes, who: str = name) -> bytes:
        return hashlib.blake2b(data, key=who.encode(), digest_size=64).digest()

    return sign, lambda peer, data, signature: sign(data, peer) == signature
