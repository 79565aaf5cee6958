"""This node's stage in one crew after another: a trio program in a thread of its own.

    StageAssignment   the previous session ends, and `run_stage` starts
    CrewStart         all stages are active: the head may start
    CrewEnd           the session ends; weights and optimizer stay in memory

`StageRunner._load_and_work` has the order: memory, build, restore, connect, work. Other threads
read the state through `wait`, and run the head's calls through `call_head`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar, cast, get_args

import msgspec
import structlog
import trio

from swarmnode.errors import DeviceError, EngineGone, PeerError, SwarmNodeError
from swarmnode.policy.micro import free_memory, is_oom
from swarmnode.process import Progress
from swarmnode.stages.crew_messages import (
    CrewEnd,
    CrewStart,
    FromTrainer,
    StageAssignment,
    StageFault,
    StagePhase,
    StageStatus,
    ToTrainer,
)
from swarmnode.stages.stage_frames import is_device_error
from swarmnode.stages.trainer.head import Head
from swarmnode.stages.trainer.links import close_streams, connect_all
from swarmnode.stages.trainer.restore import StageRecovery
from swarmnode.stages.trainer.stage import Stage

log = structlog.get_logger("swarmnode.crew")
T = TypeVar("T")

STATUS_SECONDS = 1.0


@dataclass
class StageSession:
    """State of this node's stage in one crew."""

    assignment: StageAssignment
    phase: StagePhase = "loading"
    source: str = ""
    """One of `SOURCES`."""
    reason: str = ""
    """Cause of the stage's failure."""
    faulted: bool = False
    """True after a fault was reported: the crew ends soon."""
    started: bool = False
    """True if all stages are active."""
    source_seconds: float | None = None
    """Seconds from the assignment until the stage had its weights."""
    since: float = field(default_factory=time.monotonic)
    """Start of the session."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Scope of the whole session."""
    call: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Scope of the head's present call, which ends with the session."""
    over: trio.Event = field(default_factory=trio.Event)
    """Set when no task of the session runs any more."""

    @property
    def active(self) -> bool:
        """True while the stage can take steps."""
        return self.phase == "active" and not self.over.is_set()


class StageRunner:
    """Holds the assigned stage, in a thread of its own.

    Args:
        build: Returns a stage with the base model's weights. Called in a worker thread.
        recovery: Restores the stage.
        send: Sends a message to the network process. Callable from any thread.
        progress: Reports progress to the supervisor.
        on_ready: Called when the stage has its own weights.
        on_out_of_memory: Called when an assigned stage did not fit this node's memory.
        offer: Called with the stage in memory when the crew has ended, in a worker thread.
    """

    def __init__(
        self,
        build: Callable[[StageAssignment], Stage],
        recovery: StageRecovery,
        send: Callable[[FromTrainer], None],
        progress: Progress,
        on_ready: Callable[[Stage], None] = lambda stage: None,
        on_out_of_memory: Callable[[StageAssignment], None] = lambda assignment: None,
        offer: Callable[[Stage | None], None] = lambda stage: None,
    ) -> None:
        self.stage: Stage | None = None
        self._build = build
        self._on_ready = on_ready
        self._on_out_of_memory = on_out_of_memory
        self._offer = offer
        self._recovery = recovery
        self._send = send
        self._progress = progress
        self._session: StageSession | None = None
        self._changed = threading.Condition()
        self._inbox, self._messages = trio.open_memory_channel[ToTrainer](math.inf)
        self._token: trio.lowlevel.TrioToken | None = None
        self._error: BaseException | None = None
        """Error that ended the thread."""
        self._thread = threading.Thread(target=self._run_thread, name="crew", daemon=True)

    # ---- the assigned stage, from load to clean-up -----------------------------------------------

    async def run_stage(self, session: StageSession) -> None:
        """Hold one stage in one crew until the session is cancelled or fails.

        Failures:
            out of memory, device error: the stage is dropped and reported as failed
            a peer is lost: the fault is reported, and the next crew tries again
            no source, damaged files: the stage is reported as failed
        """
        failure = None
        try:
            with session.scope:
                await self._load_and_work(session)
        except Exception as raised:
            failure = _failure_of(raised)
            if failure is None:  # a defect of this program ends the process
                raise
        finally:
            session.over.set()
            session.call.cancel()
        # outside the handler: the exception's frames hold the stage's memory
        if failure is not None:
            self._handle_failure(session, *failure)
        log.info(
            "stage session ended", crew=session.assignment.crew.hex()[:16], phase=session.phase
        )

    async def _load_and_work(self, session: StageSession) -> None:
        # load
        assignment, stage = session.assignment, self.stage
        in_memory = stage is not None and stage.continue_at(assignment)
        if stage is None or not in_memory:
            stage = None  # memory may not hold two stages
            self._replace_stage(None)
            await trio.to_thread.run_sync(self._recovery.prepare, assignment)
            stage = await trio.to_thread.run_sync(self._build, assignment)
            self._recovery.stage_built(stage)
            self._replace_stage(stage)
        async with self._recovery.open(assignment, stage):
            # restore
            if in_memory:
                session.source = "memory" if assignment.step else ""
            else:
                if assignment.step:
                    session.source = await self._recovery.restore(
                        stage, assignment, partial(self._update, session, "loading")
                    )
                self._on_ready(stage)
                stage.source = session.source
            session.source_seconds = time.monotonic() - session.since
            log.info(
                "stage ready",
                stage=stage.index,
                source=session.source or "base",
                seconds=round(session.source_seconds, 2),
            )
            # connect
            streams = await connect_all(assignment, "frames")
            try:
                # work
                worker = stage.begin(assignment, streams)
                self._recovery.attach(assignment, worker)
                self._update(session, "active", session.source)
                await worker.run()
            finally:
                await close_streams(streams)

    def _handle_failure(self, session: StageSession, kind: FailureKind, reason: str) -> None:
        if kind == "peer":
            # with this stage as the cause, the crew ends without a strike for any member
            self._report_fault(session, session.assignment.stage, reason)
            return
        if kind != "source":
            self._replace_stage(None)  # its weights must be neither offered nor saved
            self._recovery.forget()
            free_memory()
        if kind == "memory":
            self._on_out_of_memory(session.assignment)
        log.error("stage failed", reason=reason)
        session.reason = reason[:128]
        self._update(session, "failed", session.source)

    def _replace_stage(self, stage: Stage | None) -> None:
        with self._changed:
            self.stage = stage
        self._send_status()

    def _update(self, session: StageSession, phase: StagePhase, source: str) -> None:
        with self._changed:
            session.phase, session.source = phase, source
        self._send_status()

    # ---- from other threads ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, and wait until it handles messages."""
        self._thread.start()
        self.wait(lambda: self._token is not None, math.inf)

    def stop(self, seconds: float = 10.0) -> None:
        """End the session and the thread. Wait for at most `seconds`."""
        self.run_soon(self._inbox.close)
        self._thread.join(seconds)

    def receive(self, message: ToTrainer) -> None:
        """Handle a message of the network process, without waiting."""
        self.run_soon(self._inbox.send_nowait, message)

    def run_soon(self, work: Callable[..., object], *args: object) -> None:
        """Call `work(*args)` in the crew's thread, without waiting."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(work, *args)

    def wait(self, what: Callable[[], T | None], seconds: float) -> T | None:
        """Return the first true value of `what()`, evaluated at each change; None after `seconds`.

        Raises:
            BaseException: the error that ended the thread.
        """
        with self._changed:
            found = self._changed.wait_for(
                lambda: self._error or what(), min(seconds, threading.TIMEOUT_MAX)
            )
        if self._error is not None:
            raise self._error
        return cast("T | None", found) or None

    def call_head(self, head: Head, work: Callable[[Head], Awaitable[T]]) -> T:
        """Run `await work(head)` in the crew's thread and return its result.

        Raises:
            PeerError: the head's crew has ended.
            EngineGone: the thread has ended.
            Exception: what `work` raises.
        """

        async def call() -> T:
            session, stage = self._session, self.stage
            if session is None or stage is None or stage.worker is not head or not session.active:
                raise PeerError("the crew has ended")
            session.call = trio.CancelScope()
            with session.call:
                return await work(head)
            raise PeerError("the crew has ended")

        assert self._token is not None
        try:
            return trio.from_thread.run(call, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            if self._error is not None:
                raise self._error from None
            raise EngineGone("the crew's thread has ended") from None

    def head(self) -> Head | None:
        """Return the worker of stage 0 if this node holds it and its crew runs; otherwise None."""
        stage = self.stage
        worker = stage.worker if stage is not None and self.may_average else None
        return worker if isinstance(worker, Head) and worker.usable else None

    def led_lineage(self) -> bytes | None:
        """Return the lineage whose first stage this node holds or loads; None if there is none."""
        session = self._session
        if session is None or session.assignment.stage != 0:
            return None
        return session.assignment.lineage

    def lost_leadership(self, lineage: bytes) -> bool:
        """Return True if this node is in a crew and is not the head of `lineage`."""
        return self._session is not None and self.led_lineage() != lineage

    def members(self) -> tuple[str, ...]:
        """Return the peer ids of the present crew by stage; empty if there is none."""
        session = self._session
        return session.assignment.members if session is not None else ()

    def finished(self, limit: int) -> bool:
        """Return True if `limit` steps are taken and no crew needs this stage any more.

        The head evaluates after the last step, and needs all stages for that.

        Args:
            limit: 0 for no limit.
        """
        stage = self.stage
        more = stage.step - limit if stage is not None and limit else -1
        return more > 0 or (more == 0 and self._session is None)

    @property
    def active(self) -> bool:
        """True while the stage can take steps."""
        session = self._session
        return session is not None and session.active

    @property
    def may_average(self) -> bool:
        """True if all stages of this node's crew are active."""
        session = self._session
        return session is not None and session.active and session.started

    def status(self) -> StageStatus | None:
        """Return the status of the stage; None without a crew."""
        session, stage = self._session, self.stage
        if session is None:
            return None
        a = session.assignment
        status = StageStatus(
            a.crew,
            a.stage,
            session.phase,
            step=a.step,
            progress=self._recovery.progress(),
            source=session.source,
            source_seconds=session.source_seconds,
            reason=session.reason,
            load=int(session.phase == "loading"),
            state_refused=self._recovery.refused(),
        )
        if stage is None or session.phase == "loading" or not stage.is_of(a):
            return status
        return msgspec.structs.replace(
            status,
            step=stage.step,
            progress=stage.progress(),
            bubble_share=stage.meter.waited_share,
            tokens_per_second=stage.meter.tokens_per_second,
            load=stage.load(),
            dropped=stage.dropped(),
            **self._recovery.status_fields(stage.step),
        )

    # ---- the thread ------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # noqa: BLE001 - raised again in `wait` and `call_head`
            self._error = error
        self._notify()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._notify()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_status)
            async for message in self._messages:
                await self._handle(message, nursery)
            self._send_status()  # it reports the last step
            await self._end_session()
            nursery.cancel_scope.cancel()

    async def _handle(self, message: ToTrainer, nursery: trio.Nursery) -> None:
        session = self._session
        match message:
            case StageAssignment():
                await self._end_session()
                log.info(
                    "assigned", crew=message.crew.hex()[:16], step=message.step, stage=message.stage
                )
                self._session = StageSession(message)
                nursery.start_soon(self.run_stage, self._session)
            case CrewStart() if session is not None and message.crew == session.assignment.crew:
                log.info("all stages are active")
                session.started = True
            case CrewEnd():
                log.info("released", reason=message.reason)
                await self._end_session()
                self._session = None
                await trio.to_thread.run_sync(self._offer, self.stage)
        self._send_status()

    async def _end_session(self) -> None:
        """End all tasks of the present session. Weights and optimizer stay."""
        if self._session is not None:
            self._session.scope.cancel()
            await self._session.over.wait()

    async def _report_status(self) -> None:
        """Send a status each second. Report to the supervisor if the stage made progress or has no
        work."""
        shown = steps = -1
        while True:
            await trio.sleep(STATUS_SECONDS)
            self._send_status()
            session, status = self._session, self.status()
            if session is not None and (fault := self._fault(session)) is not None:
                self._report_fault(session, *fault)
            if session is None or status is None:
                self._progress("waiting for a crew")
            elif status.phase == "loading":
                self._progress("loading a stage")
            elif status.step != steps and self.stage is not None:
                steps = status.step
                self._progress(f"stage {status.stage}", self.stage.meter.step_seconds or None)
            elif status.load == 0 or status.progress != shown:
                self._progress(f"stage {status.stage}")
            shown = status.progress if status is not None else -1

    def _fault(self, session: StageSession) -> tuple[int | None, str] | None:
        worker = self.stage.worker if self.stage is not None and session.active else None
        return (worker.fault if worker is not None else None) or self._recovery.fault()

    def _report_fault(self, session: StageSession, stage: int | None, reason: str) -> None:
        """Report to the network process, once, that this crew cannot continue."""
        if not session.faulted:
            session.faulted = True
            blamed = "unknown" if stage is None else stage
            log.warning("crew cannot continue", stage=blamed, reason=reason)
            self._send(StageFault(session.assignment.crew, stage, reason[:128]))

    def _send_status(self) -> None:
        status = self.status()
        if status is not None:
            self._send(status)
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


FailureKind = Literal["memory", "device", "source", "peer"]
"""Kinds of failures, the most serious first. `source`: no source of the weights can be used."""


def _failure_of(raised: Exception) -> tuple[FailureKind, str] | None:
    """Return (kind, reason) of the most serious error in `raised`; None for a defect of this
    program."""
    errors = _leaves(raised)
    if not all(isinstance(error, SwarmNodeError) or is_device_error(error) for error in errors):
        return None
    found: dict[FailureKind, str] = {}
    kind: FailureKind
    for error in errors:
        reason = str(error)
        if is_oom(error) or (error.__cause__ is not None and is_oom(error.__cause__)):
            kind, reason = "memory", reason if isinstance(error, DeviceError) else "out of memory"
        elif isinstance(error, PeerError):
            kind = "peer"
        elif isinstance(error, DeviceError):
            kind = "device"
        elif isinstance(error, SwarmNodeError):
            kind = "source"
        else:
            line, _, _ = reason.strip().partition("\n")
            kind, reason = "device", f"the device: {line}"
        found.setdefault(kind, reason)
    return next((kind, found[kind]) for kind in get_args(FailureKind) if kind in found)


def _leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in a group, however deeply nested."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
