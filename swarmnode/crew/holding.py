"""The own trainer, and the stage that it has: what the others are told of it. Pure; no torch."""

from __future__ import annotations

from typing import Final

import msgspec

from swarmnode.crew import events as ev
from swarmnode.crew import local
from swarmnode.crew.detector import Progress
from swarmnode.crew.messages import Offer, Record, Status
from swarmnode.crew.settling import KEPT
from swarmnode.crew.view import View

VERSION_BITS: Final = 40
"""Of a status' number; the process' own start is above them."""

_Held = tuple[bytes, int, int]
"""(crew, stage, stage epoch)."""


class Holding:
    def __init__(self, slow_steps: float) -> None:
        self.trainer: ev.TrainerOffers | None = None
        self.status = Status()
        self.progress = Progress(slow_steps)
        self._held: _Held | None = None
        """What the trainer process has in memory."""
        self._claimed: _Held | None = None
        """What a trainer process before it had: the next record gives the present one another stage epoch."""
        self._version = 0

    def begin(self, start: int) -> None:
        """This process is the `start`th with the same memory: what it says is newer than what those before it said."""
        self._version = start << VERSION_BITS

    def set(self, status: Status) -> Status:
        """`status`, numbered."""
        self._version += 1
        self.status = msgspec.structs.replace(status, version=self._version)
        return self.status

    def knows(self, record: Record) -> bool:
        """Whether the crew of `record` has the trainer's model, and all of its layers."""
        if self.trainer is None:
            return False
        offering = self.trainer.offering
        return record.model == offering.model and sum(record.layers) == len(offering.cost.layers)

    def offer(self, incarnation: bytes) -> Offer:
        assert self.trainer is not None
        offering, capacity = self.trainer.offering, self.trainer.offering.capacity
        return Offer(
            offering.model, incarnation, capacity.memory, capacity.speed, capacity.hop_seconds,
            self.trainer.crew, self.trainer.stage, self.trainer.step,
        )  # fmt: skip

    def came(self, event: ev.TrainerOffers, view: View | None) -> Status | None:
        """The trainer is there. What that says to a crew in which we hold a stage."""
        self.trainer = event
        if event.fresh:
            self._held = None
            self.progress.restart()
        if view is None or view.stage is None or not self.knows(view.record):
            return None
        if event.fresh:
            self._claimed = (view.crew, view.stage, view.seat.stage_epoch)
            return Status("claiming")
        return msgspec.structs.replace(self.status, phase="stopping", broken=True)  # its streams may have ended with its link

    def left(self) -> Status:
        self.trainer = None
        return Status("absent", step=self.status.step)

    def said(self, said: local.StageStatus, view: View | None) -> Status | None:
        """What a report of the trainer says to the crew; None where it is not of this roster."""
        if view is None or self.trainer is None or said.phase == "idle" or self.status.phase in ("absent", "claiming"):
            return None
        if view.stage is None or (said.crew, said.roster_epoch, said.stage) != (view.crew, view.record.epoch, view.stage):
            return None
        phase = said.phase
        if self.status.phase == "stopping" and phase in ("active", "probation"):
            return None  # said before it heard of this roster
        if phase == "active" and (view.settled is None or said.step < view.settled.step):
            phase = "probation"  # nobody is active before it is known where the crew stands
        if phase in KEPT:
            self._held = (view.crew, view.stage, view.seat.stage_epoch)
        elif phase in ("loading", "failed"):
            self._held = None
        return Status(
            phase, said.step, said.prepared, said.attempt, said.clip, said.learning_rate, said.progress, said.load,
            journal=said.rung == "R0" and phase not in KEPT, broken=self.status.broken,
        )  # fmt: skip

    def under(self, view: View) -> tuple[Status, local.Assigned | None]:
        """Our stage as a new record begins, and what the trainer is to do about it."""
        record, stage = view.record, view.stage
        assert stage is not None
        here = (view.crew, stage, view.seat.stage_epoch)
        if not self.knows(record):
            return Status("absent", step=self.status.step), None
        if self._claimed == here:  # this record was made before our claim was heard
            return Status("claiming"), None
        self._claimed, held = None, self._held == here
        epochs, members = tuple(seat.stage_epoch for seat in record.seats), tuple(seat.peer for seat in record.seats)
        founding = view.seat.stage_epoch == 1 and record.step == 0 and not held
        assigned = local.Assigned(view.crew, record.epoch, stage, epochs, record.layers, members, record.step, founding, held, "")
        return Status("stopping" if held else "loading", step=self.status.step if held else 0), assigned

    @property
    def holds(self) -> bool:
        return self._held is not None

    def release(self) -> None:
        """We hold nothing any more."""
        self._held = self._claimed = None
        self.status = Status()
