"""This node's stage in a crew, as the network process assigns it: one trio program in a thread of
its own, whatever the loop does.

    Assigned    what was under way ends. Stage in memory, and at the crew's step hash: active; else
    loading, probation, active
    Resumed     the head begins
    Suspended   the gate is shut: nothing is begun, nothing that others send is acted on
    Released    the session ends; weights and optimizer stay in memory, and others are told what is
    there

The thread's state is read by others through `wait`, and only the head's calls come from outside
(`thread.call`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import structlog
import trio

from swarmnode.crew import local
from swarmnode.crew.local import Assigned, StageStatus
from swarmnode.errors import DeviceError, PeerError, SwarmNodeError
from swarmnode.pipeline import faults
from swarmnode.pipeline.head import Head
from swarmnode.policy.micro import free_memory, is_oom
from swarmnode.process import Progress
from swarmnode.trainer.crew.stage import Stage
from swarmnode.trainer.crew.streams import Gate, close_all, connect_all
from swarmnode.trainer.crew.trio_thread import TrioThread

if TYPE_CHECKING:
    from swarmnode.trainer.crew.recovery import StageRecovery

log = structlog.get_logger("swarmnode.crew")

T = TypeVar("T")
STATUS_SECONDS = 1.0


Notify = Callable[[local.StagePhase, str], None]
"""What is being done now: phase, and source of `local.RUNGS`."""


def _first(group: BaseExceptionGroup) -> BaseException:
    """The first error in it, however many nurseries it came through."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass
class StageSession:
    assigned: Assigned
    since: float = field(default_factory=time.monotonic)
    phase: local.StagePhase = "loading"
    reason: str = ""
    source: str = ""
    restore_seconds: float | None = None
    probe_kl: float | None = None
    gate: Gate = field(default_factory=Gate)
    resumed: bool = False
    """All stages are active: the head may begin."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    over: trio.Event = field(default_factory=trio.Event)
    """Nothing of it runs any more."""


class StageRunner:
    """build(assigned): makes the stage with the base's weights, in a thread. built(stage): it has
    its own now. send: to the network process, from any thread. lacked(assigned): this stage does
    not fit our device. offer(stage): there is no crew, and this is in memory; in a thread."""

    def __init__(
        self,
        build: Callable[[Assigned], Stage],
        recovery: StageRecovery,
        send: Callable[[local.FromTrainer], None],
        progress: Progress,
        built: Callable[[Stage], None] = lambda stage: None,
        lacked: Callable[[Assigned], None] = lambda assigned: None,
        offer: Callable[[Stage | None], None] = lambda stage: None,
    ) -> None:
        self._build = build
        self._built = built
        self._lacked = lacked
        self._offer = offer
        self._recovery = recovery
        self._send = send
        self._progress = progress
        self._changed = threading.Condition()
        self._waiting: deque[local.ToTrainer] = deque()
        self.thread = TrioThread("crew", self._run, self._notify_all)
        self._session: StageSession | None = None
        self.stage: Stage | None = None
        self._shown = -1

    # ---- from other threads ----------------------------------------------------------------------

    def receive(self, message: local.ToTrainer) -> None:
        """From the link's thread; returns at once."""
        with self._changed:
            self._waiting.append(message)
        self.thread.wake()

    def wait(self, what: Callable[[], T | None], seconds: float) -> T | None:
        """The first true value of `what()`, which is asked at each change; None after `seconds`.
        Raises what ended the thread."""
        with self._changed:
            found: list[T] = []

            def look() -> bool:
                got = what()
                if got:
                    found.append(got)
                return bool(got) or self.thread.death is not None

            self._changed.wait_for(look, seconds)
        self.thread.check()
        return found[0] if found else None

    def head(self) -> Head | None:
        """The member that may begin something now: of stage 0, active, not suspended."""
        stage = self.stage
        member = stage.worker if stage is not None and self.averages else None
        return member if isinstance(member, Head) and member.usable else None

    def leads(self) -> bytes | None:
        """The lineage whose first stage we hold, or are about to; None otherwise."""
        session = self._session
        return (
            session.assigned.lineage
            if session is not None and session.assigned.stage == 0
            else None
        )

    def members(self) -> tuple[str, ...]:
        """Peer ids in the present crew, by stage; empty where there is none."""
        session = self._session
        return session.assigned.members if session is not None else ()

    def leads_no_more(self, lineage: bytes) -> bool:
        """Whether there is a crew in which we do not hold the first stage of `lineage`; between two
        crews there is none."""
        return self._session is not None and self.leads() != lineage

    def finished(self, limit: int) -> bool:
        """Whether `limit` steps are taken (0 is none to take), and nobody needs our stage for what
        comes after the last one, such as the head's evaluation: the crew is over, or has gone on to
        a step that is none of ours."""
        stage = self.stage
        more = stage.step - limit if stage is not None and limit else -1
        return more > 0 or (more == 0 and self._session is None)

    @property
    def active(self) -> bool:
        session = self._session
        return session is not None and session.phase == "active"

    @property
    def averages(self) -> bool:
        """Whether this stage may be averaged with others': not while it has yet to show what it is,
        nor while it is suspended."""
        session = self._session
        return session is not None and session.phase == "active" and session.resumed

    def status(self) -> StageStatus | None:
        session, stage = self._session, self.stage
        if session is None:
            return None
        a = session.assigned
        if stage is None or not stage.is_of(a) or session.phase in ("loading", "probation"):
            return StageStatus(
                a.crew,
                a.stage,
                session.phase,
                step=a.step,
                progress=self._recovery.progress(),
                rung=session.source,
                reason=session.reason,
                load=1,
                state_refused=self._recovery.refused(),
            )
        return StageStatus(
            a.crew,
            a.stage,
            session.phase,
            step=stage.step,
            progress=stage.progress(),
            rung=session.source,
            rung_seconds=session.restore_seconds,
            probe_kl=session.probe_kl,
            bubble_share=stage.meter.waited_share,
            tokens_per_second=stage.meter.tokens_per_second,
            reason=session.reason,
            load=stage.load(),
            dropped=stage.dropped(),
            state_refused=self._recovery.refused(),
            **self._recovery.facts(stage.step),
        )

    # ---- the thread ------------------------------------------------------------------------------

    def _notify_all(self) -> None:
        with self._changed:
            self._changed.notify_all()

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat)
            while not self.thread.ending:
                while self._waiting:
                    await self._handle(self._waiting.popleft(), nursery)
                await self.thread.woken()
            self._send_status()  # where it stopped
            await self._leave("stopping")
            nursery.cancel_scope.cancel()

    async def _handle(self, message: local.ToTrainer, nursery: trio.Nursery) -> None:
        session = self._session
        match message:
            case Assigned():
                await self._leave("another crew")
                with self._changed:
                    self._session = StageSession(message)
                log.info(
                    "assigned", crew=message.crew.hex()[:16], step=message.step, stage=message.stage
                )
                nursery.start_soon(self._hold, self._session)
            case local.Suspended() if session is not None:
                log.info("suspended", reason=message.reason)
                session.gate.shut()
                session.resumed = False
            case local.Resumed() if session is not None and message.crew == session.assigned.crew:
                log.info("resumed")
                session.gate.let()
                session.resumed = True
            case local.Released():
                log.info("released", reason=message.reason)
                await self._leave("released")
                with self._changed:
                    self._session = None
                await trio.to_thread.run_sync(self._offer, self.stage)
        self._send_status()

    async def _leave(self, why: str) -> None:
        """Everything of the present crew ends; weights and optimizer stay, and what was
        promised."""
        session = self._session
        if session is None:
            return
        session.scope.cancel()
        await session.over.wait()
        if self.stage is not None and isinstance(self.stage.worker, Head):
            self.stage.worker.gone(0, why)  # whoever waits for it

    async def _hold(self, session: StageSession) -> None:
        assigned, broken, short = session.assigned, "", False
        try:
            with session.scope:
                try:
                    await self._run_session(session)
                except* DeviceError as group:
                    error = _first(group)
                    broken, short = (
                        str(error),
                        error.__cause__ is not None and is_oom(error.__cause__),
                    )
                except* SwarmNodeError as group:
                    # also layers that are not the model's, whoever assigned them
                    self._failed(session, str(_first(group)))
                if broken:
                    self._give_up(assigned, broken, short)
                    self._failed(session, broken)
        finally:
            session.over.set()
            log.info(
                "stage session ended",
                stage=assigned.stage,
                crew=assigned.crew.hex()[:16],
                phase=session.phase,
            )

    async def _run_session(self, session: StageSession) -> None:
        assigned, stage = session.assigned, self.stage
        held = stage is not None and stage.is_of(assigned) and await stage.follow(assigned)
        if stage is None or not held:
            stage = None  # there may be no room for two
            with self._fitting(assigned):
                stage = await self._load(session)
        assert stage is not None
        async with self._recovery.open(assigned, stage):
            if not held:
                with self._fitting(assigned):
                    await self._restore(session, stage)
            streams = await connect_all(assigned, "frames", session.gate)
            try:
                worker = stage.begin(assigned, streams)
                self._recovery.attach(assigned, worker)
                self._enter(session, "active")
                await worker.run()
            finally:
                with trio.CancelScope(shield=True):
                    await close_all(streams)

    @contextlib.contextmanager
    def _fitting(self, assigned: Assigned) -> Iterator[None]:
        """What the device cannot do is a stage that cannot be had here. Another process would not
        do better, and would try for ever.

        Raises DeviceError.
        """
        try:
            yield
            return
        except (RuntimeError, MemoryError) as error:
            if not faults.of_device(error):
                raise
            short, why = is_oom(error), str(error).strip().split("\n")[0]
        reason = "out of memory" if short else f"the device: {why}"
        self._give_up(assigned, reason, short)
        raise DeviceError(reason)

    def _give_up(self, assigned: Assigned, reason: str, short: bool) -> None:
        """What is in memory is no stage: not offered, not gone on with, not written down. short:
        for lack of memory."""
        stage = self.stage
        with self._changed:
            self.stage = None
        if stage is not None and isinstance(stage.worker, Head):
            stage.worker.gone(0, reason)  # whoever waits for it
        self._recovery.forget()
        del stage
        free_memory()
        if short:
            self._lacked(assigned)

    async def _load(self, session: StageSession) -> Stage:
        """A stage that is not in memory, with the base's weights."""
        assigned = session.assigned
        with self._changed:
            self.stage = None
        self._send_status()
        await trio.to_thread.run_sync(self._recovery.prepare, assigned)
        stage = await trio.to_thread.run_sync(self._build, assigned)
        self._recovery.built(stage)
        with self._changed:
            self.stage = stage
        return stage

    async def _restore(self, session: StageSession, stage: Stage) -> None:
        assigned = session.assigned

        def notify(phase: local.StagePhase, source: str) -> None:
            session.source = source
            self._enter(session, phase)

        if assigned.step:
            try:
                session.source, session.probe_kl = await self._recovery.restore(
                    stage, assigned, notify
                )
            except PeerError as error:
                log.warning("restoring needs somebody who is gone", error=str(error))
                await trio.sleep_forever()  # the next crew says with whom to try again
            stage.source = session.source
        self._built(stage)
        session.restore_seconds = time.monotonic() - session.since
        log.info(
            "stage restored",
            stage=stage.index,
            rung=session.source or "base",
            seconds=round(session.restore_seconds, 2),
        )

    def _enter(self, session: StageSession, phase: local.StagePhase) -> None:
        with self._changed:
            session.phase = phase
        self._send_status()

    def _failed(self, session: StageSession, reason: str) -> None:
        log.error("the stage is lost", reason=reason)
        session.reason = reason[:128]
        self._enter(session, "failed")

    # ---- for whoever watches ---------------------------------------------------------------------

    def _send_status(self) -> None:
        status = self.status()
        if status is not None:
            self._send(status)
        self._notify_all()

    async def _beat(self) -> None:
        """A status a second; and a sign of progress for the supervisor while there is progress, or
        nothing to do."""
        while True:
            await trio.sleep(STATUS_SECONDS)
            self._send_status()
            status = self.status()
            if status is None:
                self._progress("waiting for a crew")
                continue
            self._blame()
            if status.phase in ("loading", "probation"):
                self._progress("loading a stage")
            elif status.load == 0 or status.progress != self._shown:
                self._progress(f"stage {status.stage}")
            self._shown = status.progress

    def _blame(self) -> None:
        """The head's verdict, if it has come to one, that no step comes of a stage."""
        session, stage = self._session, self.stage
        if (
            session is not None
            and stage is not None
            and isinstance(stage.worker, Head)
            and stage.worker.blamed is not None
        ):
            self._send(local.Blames(session.assigned.crew, *stage.worker.blamed))
