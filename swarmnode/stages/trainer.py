"""The trainer of a node that holds one stage of a policy.

    CrewTrainer      main thread     entry point: offers this node, leads the training loop as head
    StageRunner      crew's thread   holds the assigned stage, one crew after another
    CrewPolicy       main thread     the engine of the head's training loop
    Stage            crew's thread   weights, optimizer and worker
    StageAveraging   crew's thread   averaging of the stage with other crews
    CrewModel                        tokenizer, memory and costs of the model

`StageRecovery` (`recovery.py`) restores the stage in the crew's thread. The link's thread delivers
messages of the network process.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast, get_args

import msgspec
import structlog
import torch
import trio
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from swarmnode.averaging.averaged import AveragedTensors
from swarmnode.averaging.gate import LEAST_PROBE, PROBE_SEQUENCES, Answer, compare
from swarmnode.averaging.lora import A_SEED, freeze_a, shares_a
from swarmnode.averaging.outer import UNDO, Tensors
from swarmnode.config import (
    Config,
    LoraSettings,
    PolicyConfig,
    TrainingConfig,
    WeightsConfig,
)
from swarmnode.errors import (
    ConfigError,
    DeviceError,
    EngineGone,
    Incompatible,
    LocalError,
    PeerError,
    PeerTimeout,
    Refused,
    SwarmNodeError,
)
from swarmnode.files import socket_address
from swarmnode.link.client import Link
from swarmnode.link.messages import Hello, WeightsReport
from swarmnode.pauses import PauseFlags
from swarmnode.policy.device import (
    HEADROOM,
    TRAINED_BYTES,
    Placement,
    count_parameters,
    devices,
    free_bytes,
    probe,
    set_up,
    update_bytes,
    without_float16,
)
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.engine.protocol import Generation
from swarmnode.policy.fingerprint import fingerprint, tokenizer_hash
from swarmnode.policy.footprint import (
    ITEM_BYTES,
    LOGITS_COPIES,
    UNDO_WEIGHTS,
    Method,
    Shape,
    host_bytes,
    layer_bytes,
    logits_tokens,
)
from swarmnode.policy.generate import GroupSample, SampledCompletion, Sampling
from swarmnode.policy.layers import report_layers
from swarmnode.policy.load import (
    config_directory,
    configured_ends,
    context_length,
    local_directory,
    lora_settings,
    offline,
)
from swarmnode.policy.logprobs import Row
from swarmnode.policy.micro import MicroBatcher, free_memory, is_oom, micro_batches
from swarmnode.policy.text import Chat, PolicyText, vocabulary
from swarmnode.process import Progress
from swarmnode.rl.objectives import WEIGHT_DECAY
from swarmnode.rollouts.groups import Outcome
from swarmnode.stages import wire
from swarmnode.stages.checkfree import LEARNING_RATE_FACTOR
from swarmnode.stages.crew import MembershipSettings
from swarmnode.stages.model import (
    LearnRow,
    StageOptimizer,
    StageRuntime,
    add_adapter,
    check_split,
    load_stage,
)
from swarmnode.stages.pipeline import (
    Head,
    Links,
    Observer,
    StageWorker,
    Wave,
    WorkerSettings,
    WorkRefused,
)
from swarmnode.stages.policy_copy import MemberSampler, PolicyCopy
from swarmnode.stages.recovery import (
    StageInput,
    StageRecovery,
    StateExchange,
    check_checkfree,
    read_work,
    recovery_settings,
    run_one,
)
from swarmnode.stages.wire import (
    CREW_BYTES,
    DEVICE_REASON,
    MAX_MICRO_BATCHES,
    ActivationCodec,
    Capacity,
    Fence,
    FrameLimits,
    HeldBlock,
    ModelCost,
    PartCost,
    Place,
    SocketOpen,
    StageAssignment,
    StageFault,
    StageStatus,
    StreamKind,
    TrainerOffer,
    close_streams,
    is_device_error,
    stage_memory,
    stage_specs,
)
from swarmnode.swarm.manifest import check_model
from swarmnode.swarm.manifest_store import load_current
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import TASKS
from swarmnode.trainer import state
from swarmnode.trainer.batch import Rows
from swarmnode.trainer.engine import EngineStatistics, adapter_shape
from swarmnode.trainer.judge import RowScores
from swarmnode.trainer.loop import HEAD, Loop, Pauses, Trainer
from swarmnode.trainer.state import Counters, Snapshot
from swarmnode.trainer.update import UpdateStatistics, normalizer, trained
from swarmnode.trainer.weights import Replica
from swarmnode.weights import local
from swarmnode.weights.fingerprint import LoraShape
from swarmnode.wire import headed
from swarmnode.wire.tensors import unpack_logprobs

log = structlog.get_logger("swarmnode.crew")
T = TypeVar("T")

# The trainer: it offers this node to crews, holds the assigned stage, and runs the training loop
# while it holds the first stage.

POLL_INTERVAL = 1.0
"""Interval between checks whether to lead or to sample, in seconds."""
REDUCED_OFFER = 0.8
"""After a stage did not fit, this share of its planned memory is offered."""


def make_trainer(config: Config, progress: Progress) -> Trainer | CrewTrainer:
    """Return a trainer of the whole policy if it fits or is configured, else of a stage.

    This reads no weights.

    Raises:
        LocalError: the model does not exist, or neither the policy nor a stage fits.
        ConfigError: the model cannot be split, and `stages.mode` is `always`.
    """
    if config.stages.mode == "off":
        return Trainer(config, progress)
    with config_directory(config.policy) as directory:
        placement = probe(config.policy)
        whole = fits_whole(config, directory, placement)
    if not whole and config.policy.server.url:
        log.warning("policy.server is not used: a crew samples through its stages")
    if not whole and len(devices(config.policy)) > 1:
        log.info("one device", detail=f"a member of a crew uses {placement.device} alone")
    return Trainer(config, progress) if whole else CrewTrainer(config, progress)


class CrewTrainer:
    """Trainer of a node that holds one stage of a policy."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self.policy_copy: PolicyCopy | None = None
        """Policy copy that this node samples from; None if it samples through the stages."""
        self._config = config
        self._progress = progress
        self._directory = config.node.data_dir / "trainer"
        self._stop = threading.Event()
        self._loop: Loop | None = None
        self._averaging: StageAveraging | None = None
        self._sampler: MemberSampler | None = None
        self._engine: CrewPolicy | None = None
        """Engine of the last crew that this node led. It has measured what the members can
        compute."""

    def stop(self) -> None:
        """Finish the present work, save and leave."""
        self._stop.set()

    def run(self) -> None:
        """Train until `stop` is called, or `max_steps` are taken and the head has ended.

        Raises:
            LocalError: the model does not exist or cannot be split.
            DeviceError: this node has no room for a stage.
        """
        c = self._config
        with contextlib.ExitStack() as stack:
            self._model = stack.enter_context(open_model(c, self._report_loading))
            self._trainer_offer = self._model.trainer_offer
            self._recovery = StageRecovery(
                self._directory,
                recovery_settings(c.stages),
                self._model,
                lambda: self._averaging,
                lambda step: (
                    self.policy_copy.status_fields(step) if self.policy_copy is not None else {}
                ),
                connect=lambda assignment: connect_all(assignment, "state"),
                owner=self._model.owner,
            )
            stack.callback(self._recovery.close)
            if c.stages.policy_copy in ("memory", "both"):
                exchange = lambda: self._recovery.exchange
                self.policy_copy = PolicyCopy(self._model, exchange, cached_tokens(c.training))
            self._link = Link(
                c.node.data_dir, self._greet, self._receive_weights, self._receive_stages
            )
            self._runner = StageRunner(
                self._build,
                self._recovery,
                self._link.send,
                self._progress,
                self._on_ready,
                self._reduce_offer,
                self._offer,
            )
            self._runner.start()  # before the link, which delivers messages to it
            stack.enter_context(self._link)
            stack.callback(self._runner.stop)
            self._train()
            self._link.flush(2.0)

    def _report_loading(self, line: str) -> None:
        log.info("policy", detail=line)
        self._progress("loading policy")

    def _train(self) -> None:
        """Lead the crew while this node is its head. Sample from the policy copy while it is a
        member."""
        c, scorer, may_average = self._config, None, False
        pauses = Pauses(c.node.quiet_hours, PauseFlags(c.node.data_dir), 0.0, self._stop).reasons
        with contextlib.ExitStack() as stack:
            while not self._stop.is_set() and not self._runner.finished(c.training.max_steps):
                lineage = self._runner.wait(self._waiting_lineage, POLL_INTERVAL)
                if (self._active_averaging() is not None) != may_average:
                    may_average = not may_average
                    self._link.send(self._hello())
                if lineage is None and (not self._may_sample() or pauses()):
                    continue
                try:
                    if scorer is None:
                        self._progress("loading tasks")
                        scorer = stack.enter_context(Scorer())
                    if lineage is not None:
                        self._lead(lineage, scorer)
                        return  # the trainer was stopped, or all steps are taken
                    self._sample(scorer)
                except EngineGone as gone:
                    log.info(
                        "stopped leading the crew" if lineage else "stopped sampling from the copy",
                        reason=str(gone),
                    )
                except (LocalError, OSError) as error:
                    if lineage is not None or self.policy_copy is None:
                        raise
                    log.warning(
                        "sampling from the policy copy failed, disabled until restart; the stage"
                        " continues",
                        error=str(error),
                    )
                    self.policy_copy.release()
                    self.policy_copy = self._sampler = self._engine = None

    def _waiting_lineage(self) -> bytes | None:
        """Return the lineage of the crew that waits for this node as its head; None without one."""
        return self._runner.led_lineage() if self._runner.head() is not None else None

    def _lead(self, lineage: bytes, scorer: Scorer) -> None:
        """Run the training loop while this node is the head of `lineage`."""
        c, engine = self._config, self._engine
        if engine is None or engine.lineage != lineage:
            engine = self._engine = CrewPolicy(
                c.training,
                self._model,
                self._runner,
                lineage,
                self._stop,
                self._active_averaging,
                self.policy_copy,
            )
        directory = self._directory / HEAD
        self._loop = Loop(
            c, engine, self._link, scorer, Counters(), directory, self._progress, self._stop
        )
        self._link.send(self._hello())
        try:
            self._loop.run()
        finally:
            self._loop = self._sampler = None
            if self.policy_copy is not None:
                self.policy_copy.release()

    def _may_sample(self) -> bool:
        """Return True if another node leads a working crew and this node has a policy copy."""
        return (
            self.policy_copy is not None
            and self._config.sharing.enabled
            and self._runner.may_average
            and self._runner.led_lineage() is None
        )

    def _sample(self, scorer: Scorer) -> None:
        """Sample from the policy copy, once in each step of the crew.

        Raises:
            EngineGone: the crew has ended.
            LocalError, OSError: sampling or saving failed.
        """
        c, stage = self._config, self._runner.stage
        if stage is None or self.policy_copy is None:
            return
        if self._sampler is None or self._sampler.lineage != stage.lineage:
            if self._sampler is not None:
                self.policy_copy.release()  # it is of the former lineage
            engine = MemberPolicy(
                c.training,
                self._model,
                self._runner,
                stage.lineage,
                self._stop,
                policy_copy=self.policy_copy,
            )
            self._sampler = MemberSampler(engine, c, self._link, scorer, self._directory)
        self._sampler.sample(stage.step, len(stage.layers))

    # ---- the stage -------------------------------------------------------------------------------

    def _build(self, assignment: StageAssignment) -> Stage:
        if self._averaging is not None:  # it is of the former stage
            self._averaging.close()
            self._averaging = None
        runtime = self._model.build(assignment.layers, assignment.stage)
        stage = Stage(assignment, runtime, self._model.settings(), self._model.limits())
        weights, terms = self._config.weights, self._model.terms
        if weights.rule != "off" and averaged_parameters(stage):
            self._averaging = StageAveraging(
                weights,
                adapter_shape(terms.lora, terms.frozen_a),
                self._config.node.data_dir,
                stage,
                self._link.send,
                lambda: self._link.statistics().connected,
                lambda: self._runner.may_average,
            )
        return stage

    def _on_ready(self, stage: Stage) -> None:
        """Start averaging: the stage has its weights."""
        if self._averaging is not None:
            self._averaging.begin(self._recovery.outer)
            # before the recorder, which stores what averaging changes
            stage.observers.insert(1, self._averaging)
        self._recovery.outer = {}  # averaging has copied it

    def _reduce_offer(self, assignment: StageAssignment) -> None:
        """Offer less memory from now on, so that a stage that did not fit is not planned again."""
        trainer_offer = self._trainer_offer
        if sum(assignment.layers) == len(trainer_offer.cost.layers):
            planned = stage_memory(trainer_offer.cost, assignment.layers, assignment.stage)
            memory = min(trainer_offer.capacity.memory, REDUCED_OFFER * planned)
            self._trainer_offer = msgspec.structs.replace(
                trainer_offer, capacity=replace(trainer_offer.capacity, memory=memory)
            )
            log.warning("stage did not fit, offering less memory", gib=round(memory / 2**30, 2))

    # ---- the link --------------------------------------------------------------------------------

    def _greet(self) -> Hello:
        """Send the stage's status or this node's offer, and return the first message of a new
        connection."""
        status = self._runner.status()
        if status is not None:
            self._link.send(status)
        else:
            self._offer(self._runner.stage)
        return self._hello()

    def _offer(self, stage: Stage | None) -> None:
        """Offer this node, which works in no crew, with the blocks that it holds."""
        in_memory = stage.held_block() if stage is not None else None
        held_blocks = (
            *([in_memory] if in_memory is not None else []),
            *self._recovery.held_blocks(),
        )
        self._link.send(msgspec.structs.replace(self._trainer_offer, held_blocks=held_blocks))

    def _hello(self) -> Hello:
        if self._loop is not None:
            return self._loop.hello()
        text, stage, averaging = self._model.text, self._runner.stage, self._active_averaging()
        return Hello(
            model=text.fingerprint,
            tokenizer=text.tokenizer_hash,
            policy_version=stage.step if stage is not None else 0,
            tokens_per_text_byte=text.tokens_per_text_byte,
            pid=os.getpid(),
            replica=averaging.facts(False) if averaging is not None else None,
        )

    def _active_averaging(self) -> StageAveraging | None:
        return self._averaging if self._runner.active else None

    def _receive_weights(self, message: local.ToTrainer) -> None:
        averaging = self._averaging
        if averaging is None:
            return
        starts = isinstance(message, local.TakeSnapshot | local.WriteState)
        # a stage of a crew that does not run yet starts no exchange
        if isinstance(message, local.AdoptState) or (
            self._runner.active and (self._runner.may_average or not starts)
        ):
            averaging.receive(message)
        else:
            averaging.refuse(message)

    def _receive_stages(self, message: wire.ToTrainer) -> None:
        self._runner.receive(message)


# Streams to the other stages, through Unix sockets of the network process.

CONNECT_SECONDS = 10.0
"""Deadline of a connection to the network process, which may be restarting."""
RETRY_SECONDS = 0.1
"""Wait before the next attempt."""


async def connect(assignment: StageAssignment, stage: int, kind: StreamKind) -> trio.abc.Stream:
    """Return a stream to the trainer of `stage`, which may open its end later.

    Raises:
        PeerError: the network process does not answer.
    """
    opened = headed.pack(SocketOpen(assignment.crew, stage, kind))
    with trio.move_on_after(CONNECT_SECONDS):
        while True:
            address, directory = socket_address(Path(assignment.socket))
            try:
                stream = await trio.open_unix_socket(address)
                try:
                    await stream.send_all(opened)
                except BaseException:
                    await trio.aclose_forcefully(stream)
                    raise
                return stream
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(RETRY_SECONDS)
            finally:
                if directory is not None:
                    os.close(directory)
    raise PeerError("the network process did not accept a stream to another stage in time")


async def connect_all(assignment: StageAssignment, kind: StreamKind) -> dict[int, trio.abc.Stream]:
    """Return a stream to every other stage, by stage.

    Raises:
        PeerError: the network process does not answer.
    """
    streams: dict[int, trio.abc.Stream] = {}
    try:
        for stage in range(len(assignment.members)):
            if stage != assignment.stage:
                streams[stage] = await connect(assignment, stage, kind)
    except BaseException:
        await close_streams(streams)
        raise
    return streams


# This node's stage in one crew after another: a trio program in a thread of its own.
#
#     StageAssignment   the previous session ends, and `run_stage` starts
#     CrewStart         all stages are active: the head may start
#     CrewEnd           the session ends; weights and optimizer stay in memory
#
# Other threads read its state through `wait`, and run the head's calls through `call_head`.

STATUS_SECONDS = 1.0


@dataclass
class StageSession:
    """State of this node's stage in one crew."""

    assignment: StageAssignment
    phase: wire.StagePhase = "loading"
    source: str = ""
    """One of `wire.SOURCES`."""
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
        send: Callable[[wire.FromTrainer], None],
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
        self._inbox, self._messages = trio.open_memory_channel[wire.ToTrainer](math.inf)
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
                        stage, assignment, partial(self._update, session)
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

    def _update(self, session: StageSession, phase: wire.StagePhase, source: str) -> None:
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

    def receive(self, message: wire.ToTrainer) -> None:
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

    async def _handle(self, message: wire.ToTrainer, nursery: trio.Nursery) -> None:
        session = self._session
        match message:
            case StageAssignment():
                await self._end_session()
                log.info(
                    "assigned", crew=message.crew.hex()[:16], step=message.step, stage=message.stage
                )
                self._session = StageSession(message)
                nursery.start_soon(self.run_stage, self._session)
            case wire.CrewStart() if (
                session is not None and message.crew == session.assignment.crew
            ):
                log.info("all stages are active")
                session.started = True
            case wire.CrewEnd():
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


# The engine of a crew's head. The training loop's calls run through the stages. A call that fails
# with its crew is repeated with the next crew.

WAIT_SECONDS = 1.0
"""Interval between checks whether to stop."""
CREW_WAIT_SECONDS = MembershipSettings().base_wait_seconds + 60.0
"""Longest wait of the head's loop for a crew."""
FIRST_TOKENS = 1024
"""Padded tokens of the first micro-batches of a crew whose speed is not known. For 16,384 tokens a
CPU stage can take many times the head's deadline."""
MICRO_BATCHES_PER_STAGE = 8
"""A step has about this many micro-batches per stage. With more of them, stages idle less."""
MIN_MICRO_BATCH_TOKENS = 1024
"""A micro-batch may have at least this many tokens, because a device is slow with smaller ones."""
SLOW_TOKEN_SECONDS = 0.1
"""If a token takes longer through all stages, a warning recommends sampling from a policy copy."""


class CrewPolicy:
    """Engine of the training loop at the head of a crew.

    Args:
        lineage: Lineage whose head this node is.
        stop: Ends all waiting.
        averaging: Returns the averaging of this node's stage; None if it is not averaged now.
        policy_copy: Policy copy that training samples from while it is recent enough.
    """

    def __init__(
        self,
        training: TrainingConfig,
        model: CrewModel,
        runner: StageRunner,
        lineage: bytes,
        stop: threading.Event,
        averaging: Callable[[], StageAveraging | None] = lambda: None,
        policy_copy: PolicyCopy | None = None,
    ) -> None:
        self.lineage = lineage
        self._training = training
        self._model = model
        self._runner = runner
        self._stop = stop
        self._averaging = averaging
        self._policy_copy = policy_copy
        self._recommended = False
        self._members: tuple[str, ...] = ()
        self._batcher = self._new_batcher()
        self._wave_tokens: int | None = None
        """Most padded tokens of a wave with the present members; None for the crew's limit."""
        self._owner = f"{model.text.fingerprint.hex()}/lora{model.policy.lora.r}/head"

    @property
    def text(self) -> PolicyText:
        """Tokenizer of the policy."""
        return self._model.text

    def _new_batcher(self) -> MicroBatcher:
        return MicroBatcher(self._training.per_device_train_tokens, first=FIRST_TOKENS)

    @property
    def _memory(self) -> MicroBatcher:
        """Micro-batch size that fits the present members. It is measured again when a member
        changes."""
        members = self._runner.members()
        if members and members != self._members:
            self._members, self._batcher = members, self._new_batcher()
            self._wave_tokens = None
        return self._batcher

    def statistics(self) -> EngineStatistics:
        """Return device, memory and micro-batch size."""
        device, memory = self._model.placement.device, self._memory.statistics()
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        dtype = str(self._model.placement.dtype).removeprefix("torch.")
        tokens = memory.tokens
        return EngineStatistics(str(device), dtype, peak, tokens, tokens, memory.oom_retries)

    def random_generator(self, seed: int) -> torch.Generator:
        """Return a generator for sampling."""
        return torch.Generator().manual_seed(seed)

    # ---- a step ----------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        """Sample from the policy copy if it is recent enough, else through the stages.

        Raises:
            DeviceError: a question and its answer exceed a wave, or a stage's device.
            EngineGone, PeerTimeout: there is no crew, see `_head`.
        """
        policy_copy, stage = self._policy_copy, self._runner.stage
        if prompts and policy_copy is not None and stage is not None:
            step = self._step()
            self._runner.run_soon(policy_copy.start_fetch, stage.layers, step)
            samples = policy_copy.sample(step, prompts, sampling, rng)
            if samples is not None:
                return samples
        return self._through_stages(prompts, sampling, rng)

    def generation(self, sampling: Sampling, rng: torch.Generator) -> Generation:
        """Return an engine that samples all prompts of a call together."""
        return Lockstep(
            lambda prompts, count: self.generate(prompts, sampling.with_generations(count), rng)
        )

    def _through_stages(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        if not prompts:
            return []
        encoded = [self.text.prompt_ids(prompt) for prompt in prompts]
        longest = max(map(len, encoded))
        room = self._model.limits().tokens
        room = min(room, self.text.context or room)
        if longest + sampling.max_tokens > room:
            raise DeviceError(
                f"an answer of {sampling.max_tokens} tokens to a question of {longest} tokens, and"
                f" a crew computes {room} at a time: set training.max_completion_length lower, or"
                " leave the question out of the dataset"
            )
        seed, s = int(torch.randint(2**62, (1,), generator=rng)), sampling
        ends, began, waves = self.text.eos_ids, time.monotonic(), None
        while waves is None:
            draw = random.Random(seed)  # a repeated call draws the same tokens
            work = lambda head, draw=draw: head.generate(
                encoded,
                s.num_generations,
                s.max_tokens,
                s.temperature,
                s.top_p,
                ends,
                draw,
                self._wave_tokens,
            )
            try:
                waves = self._call(self._head(), work)
            except WorkRefused as error:
                if not error.divisible:
                    self._report_too_large(error, f"an answer of {s.max_tokens} tokens")
                    continue
                most = self._wave_tokens or self._model.limits().tokens
                self._wave_tokens = max(longest + s.max_tokens, most // 2)
                log.warning("a stage refused a wave, halving waves", tokens=self._wave_tokens)
        tokens = max(len(ids) for wave in waves for ids in wave.ids)
        self._recommend_copy((time.monotonic() - began) / tokens)
        size, samples = s.num_generations, [c for wave in waves for c in self._completions(wave)]
        return [
            GroupSample(prompt, samples[size * q : size * (q + 1)])
            for q, prompt in enumerate(encoded)
        ]

    def _completions(self, wave: Wave) -> list[SampledCompletion]:
        return [
            SampledCompletion(
                ids, logprobs, self.text.decode(ids), "eos" if ids[-1] in wave.ends else "length"
            )
            for ids, logprobs in zip(wave.ids, wave.logprobs, strict=True)
        ]

    def _report_too_large(self, error: WorkRefused, work: str) -> None:
        """Log that a member cannot compute the smallest piece of work. The caller repeats the call;
        a member that refuses three calls in a row gets a strike, and the crew continues without it.

        Raises:
            DeviceError: this node's own device cannot compute it.
        """
        text = (
            f"{work} is too large for the device of stage {error.stage}, set"
            f" training.max_completion_length lower: {error}"
        )
        if error.stage == 0:
            raise DeviceError(text) from None
        log.warning(text)

    def _recommend_copy(self, token_seconds: float) -> None:
        """If sampling is slow, log once that a policy copy would be faster."""
        if (
            self._policy_copy is None
            and token_seconds > SLOW_TOKEN_SECONDS
            and not self._recommended
        ):
            self._recommended = True
            log.warning(
                "sampling sends every token through all stages; a node with room can sample from a"
                " copy of the policy",
                latency_seconds=round(token_seconds, 2),
                remedy='stages.policy_copy = "memory"',
            )

    def score(self, rows: Sequence[Row], temperature: float) -> list[RowScores]:
        """Return (log-probabilities, entropies) of the completion tokens of each row.

        Raises:
            DeviceError: one row exceeds the memory of a stage's device.
            EngineGone, PeerTimeout: there is no crew, see `_head`.
        """
        pairs = [(prompt, completion) for prompt, completion, *_ in rows]
        lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
        scored: list[RowScores] | None = None if rows else []
        while scored is None:
            head, memory = self._head(), self._memory
            tokens = _micro_batch_tokens(memory, lengths, head.stages)
            largest = memory.cut(lengths, tokens=tokens)
            work = lambda head, tokens=tokens: head.score(pairs, temperature, tokens)
            try:
                scored = self._call(head, work, largest)
            except WorkRefused as error:
                if not error.divisible:
                    self._report_too_large(error, f"a row of {max(lengths)} tokens")
                    continue
                memory.ran_out(largest)
        return scored

    def update(self, rows: Rows, rate: float | None = None) -> UpdateStatistics:
        """Take one step, as `Updater.update`.

        The agreement of own and peers' gradients is not measured, since no node has all gradients.

        Raises:
            EngineGone, PeerTimeout: there is no crew, see `_head`.
        """
        own, external = trained(rows, self._training)
        if not own and not external:
            return UpdateStatistics(stepped=False, skipped="no_signal")
        done = self._learn(rows, own + external, frozenset(), rate)
        if done.stepped or not own or not external:
            # stages do not report whose tokens were effective
            return replace(done, effective_own=None) if external else done
        # a peer's rows may be the reason; stages do not report whose rows they refuse
        refused: dict[int, Outcome] = dict.fromkeys(
            (rows.groups[i] for i in external), "no_gradient"
        )
        return replace(self._learn(rows, own, frozenset(refused), rate), refused=refused)

    def _learn(
        self, rows: Rows, indices: list[int], without: frozenset[int], rate: float | None
    ) -> UpdateStatistics:
        """Take one step with some of the rows. Repeat a step whose call ended with its crew.

        Args:
            indices: Rows to learn from.
            without: Groups that the normaliser ignores.
        """
        cfg = self._training
        learn = [
            LearnRow(
                *rows.rows[i][:2],
                rows.recorded(i),
                float(rows.advantages[i]),
                float(rows.weights[i]),
                rows.groups[i],
                sampled=rows.is_sampled(i),
            )
            for i in indices
        ]
        divisor, rate = normalizer(rows, cfg, without), cfg.learning_rate if rate is None else rate
        lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in learn]
        groups = [row.group for row in learn]
        before = math.inf
        while True:
            head = self._head()
            step = head.participant.step
            # A call that ends between the commit and the last `done` needs no wait. It always ends
            # with its crew, and a stage finishes a step that it has started before it offers its
            # weights. The next crew either continues after the step, and stages that are one step
            # behind count as if they had taken it (docs/stages.md, Limits). Or it continues before
            # the step, with weights that have not taken it, and the step is repeated here. So no
            # step is lost or taken twice.
            if step > before:
                return UpdateStatistics(stepped=True)
            before, tokens = step, self._update_tokens(lengths, groups, head.stages)
            largest = self._memory.cut(lengths, groups, tokens)
            sized = cfg.model_copy(update={"per_device_train_tokens": tokens})
            work = lambda head, sized=sized: head.update(learn, sized, divisor, rate)
            result = self._call(head, work, largest)
            if result is None:
                continue
            if result.refused is None:
                self._memory.passed(largest)
                return UpdateStatistics(
                    True,
                    result.loss,
                    result.clip_fraction,
                    None,
                    result.entropy,
                    result.grad_norm,
                    effective_own=result.effective,
                    rate_factor=result.rate_factor,
                )
            log.warning("crew refused a step", reason=result.refused, tokens=largest)
            if result.refused != DEVICE_REASON or not result.divisible:
                skipped = "not_finite" if result.refused == "not_finite" else "refused"
                return UpdateStatistics(stepped=False, skipped=skipped)
            self._memory.ran_out(largest)

    def _update_tokens(self, lengths: Sequence[int], groups: Sequence[int], stages: int) -> int:
        """Return the padded tokens of a micro-batch, so that a step has at most MICRO_BATCHES."""
        memory = self._memory
        tokens = _micro_batch_tokens(memory, lengths, stages)
        while (
            tokens < MAX_TOKENS and len(micro_batches(lengths, tokens, groups)) > MAX_MICRO_BATCHES
        ):
            tokens *= 2
        memory.tokens = max(memory.tokens, tokens)
        return tokens

    # ---- calls to the present head ---------------------------------------------------------------

    def _call(self, head: Head, work: Callable[[Head], Awaitable[T]], largest: int = 0) -> T | None:
        """Return the result of `work(head)`; None if it failed and the caller must repeat it.

        A failed call has ended with its crew, or a stage refused it. Every caller repeats it with
        the head of the next crew, see `_head`.

        Args:
            largest: Padded tokens of the largest micro-batch. After a timeout they are reduced.

        Raises:
            WorkRefused: a stage's device cannot compute a micro-batch or wave.
            EngineGone: the crew's thread has ended.
        """
        try:
            return self._runner.call_head(head, work)
        except PeerError as error:
            log.warning("call to the crew failed", error=str(error))
            if isinstance(error, WorkRefused) and error.device:
                raise
            if isinstance(error, PeerTimeout) and largest:
                self._memory.shrink(largest)
            return None

    def _step(self) -> int:
        """Return the steps that the crew has taken."""
        return self._head().participant.step

    def _head(self) -> Head:
        """Wait for a crew that runs, and return its head.

        The wait has no time limit while a crew is being restored, because a stage of a 7 B model
        takes half an hour over a home connection. The network process ends crews that make no
        progress.

        Raises:
            EngineGone: another node is the head, or this node stops.
            PeerTimeout: there was no crew for `CREW_WAIT_SECONDS`.
        """
        late = time.monotonic() + CREW_WAIT_SECONDS
        while True:
            head = self._runner.wait(self._runner.head, WAIT_SECONDS)
            if self._runner.lost_leadership(self.lineage):
                raise EngineGone("another node is the head now")
            if head is not None:
                return head
            if self._stop.is_set():
                raise EngineGone("stopping")
            if self._runner.led_lineage() == self.lineage:
                late = time.monotonic() + CREW_WAIT_SECONDS
            elif time.monotonic() > late:
                raise PeerTimeout(
                    f"there was no crew for {CREW_WAIT_SECONDS:.0f} s: see `swarmnode status` and"
                    " the log for the missing stages"
                )

    # ---- between steps: the stage averages by itself, so most methods do nothing -----------------

    def average(self, connected: bool, step_seconds: float, stepped: bool) -> bool:
        """Return False: the loop itself exchanges nothing."""
        return False

    def remember(self, rewarded: Sequence[Row], own: Sequence[Row]) -> None:
        """Do nothing: averages are judged by micro-batches (`AverageProbe`)."""

    def observe(self, reward: float) -> None:
        """Do nothing: a stage does not revert an exchange after held-out reward falls."""

    def facts(self, fresh: bool) -> local.ReplicaFacts | None:
        """Return the averaging state of this node's stage; None if it is not averaged."""
        averaging = self._averaging()
        return averaging.facts(False) if averaging is not None else None

    def averaging(self) -> WeightsReport | None:
        """Return the averaging statistics of this node's stage; None if it is not averaged."""
        averaging = self._averaging()
        return averaging.report() if averaging is not None else None

    def wait_for_state(self, seconds: float, late: float) -> bool:
        """Return True: the weights come from the crew."""
        return True

    # ---- across restarts -------------------------------------------------------------------------

    def restore(self, directory: Path, rng: torch.Generator) -> Counters:
        """Return this node's counters as a head: all of them for the same lineage, else only the
        used group numbers. The step is that of the crew.

        Raises:
            StateError: the saved counters belong to another model.
        """
        step, lineage = self._step(), self.lineage.hex()

        def use(counters: Counters, tensors: state.Tensors) -> None:
            if counters.crew == lineage:
                state.set_generator(rng, tensors[state.RNG])

        counters = state.recover(directory, self._owner, use) or Counters()
        if counters.crew != lineage:
            counters = Counters(
                sequence=counters.sequence, peer=counters.peer, swarm=counters.swarm, crew=lineage
            )
        counters.step = max(counters.step, step)
        counters.policy_version = max(counters.policy_version, step)
        return counters

    def snapshot(self, rng: torch.Generator, counters: Counters) -> Snapshot:
        """Return the tensors that `restore` reads after a restart."""
        return state.take_counters(rng, counters, self._owner)


def _micro_batch_tokens(memory: MicroBatcher, lengths: Sequence[int], stages: int) -> int:
    """Return the padded tokens of a micro-batch of rows of these lengths."""
    return min(
        memory.tokens,
        max(MIN_MICRO_BATCH_TOKENS, sum(lengths) // (MICRO_BATCHES_PER_STAGE * stages)),
    )


class MemberPolicy(CrewPolicy):
    """Engine of a member that is not the head. It samples from its policy copy only."""

    def _step(self) -> int:
        stage = self._runner.stage
        if stage is None or not self._runner.may_average:
            raise EngineGone("this node's crew does not run")
        return stage.step

    def _through_stages(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        raise EngineGone("the policy copy is not recent enough")


# The stage that this node holds, across crews: weights, optimizer, and a worker for each crew.

HEAD_SECONDS = 120.0
"""`Head.seconds`: shortest silence after which a call of the head fails."""


class StageMeter(Observer):
    """Runs a stage's computations in a thread, and measures their time."""

    def __init__(self) -> None:
        self.computing = 0
        """Number of computations that run now."""
        self.waited_share: float | None = None
        """Share of the last step's time without a computation."""
        self.tokens_per_second: float | None = None
        """Tokens that were run forward in the last step ÷ its time."""
        self.step_seconds = 0.0
        """Duration of the last step."""
        self._busy = 0.0
        self._since = time.monotonic()
        self._tokens = 0

    async def __call__(self, work: Callable[[], T]) -> T:
        self.computing += 1
        started = time.monotonic()
        try:
            return await trio.to_thread.run_sync(work)
        finally:
            self.computing -= 1
            self._busy += time.monotonic() - started

    def on_step_in_thread(self, worker: StageWorker) -> None:
        now, tokens = time.monotonic(), worker.runtime.tokens
        elapsed = self.step_seconds = max(now - self._since, 1e-9)
        self.waited_share = max(0.0, 1.0 - self._busy / elapsed)
        self.tokens_per_second = (tokens - self._tokens) / elapsed
        self._busy, self._since, self._tokens = 0.0, now, tokens


class Stage:
    """One stage of one lineage in this process. Its optimizer continues from crew to crew."""

    def __init__(
        self,
        assignment: StageAssignment,
        runtime: StageRuntime,
        settings: WorkerSettings,
        limits: FrameLimits,
    ) -> None:
        self.lineage, self.index, self.layers = (
            assignment.lineage,
            assignment.stage,
            assignment.layers,
        )
        self.runtime = runtime
        self.meter = StageMeter()
        self.optimizer = StageOptimizer(runtime, settings.learning_rate)
        self.observers: list[Observer] = [self.meter]
        self.source: str | None = None
        """One of `wire.SOURCES`; None until the stage has its weights."""
        self._settings = settings
        self._limits = limits
        self._first_step = assignment.step
        self._dropped: Counter[str] = Counter()
        self.worker = self._make_worker(assignment, {})

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.worker.participant.step

    def is_of(self, assignment: StageAssignment) -> bool:
        """Return True if this is the assigned block of layers of the assigned lineage."""
        return (self.lineage, self.index, self.layers) == (
            assignment.lineage,
            assignment.stage,
            assignment.layers,
        )

    def continue_at(self, assignment: StageAssignment) -> bool:
        """Continue at the crew's step if these weights are of that step or the one before.

        A stage that is one step behind counts as if it had taken the step. Losing one update of
        one stage costs less than returning all stages to an older step. The last worker must have
        stopped.

        Returns:
            True if the stage continues. Otherwise it is to be restored.
        """
        if not self.is_of(assignment) or self.source is None:
            return False
        behind = assignment.step - self.step
        if behind not in (0, 1):
            return False
        if behind:
            log.info("stage continues one step behind its crew", step=self.step)
        self.worker.participant.step = assignment.step
        return True

    def held_block(self) -> HeldBlock | None:
        """Return the block in memory, for this node's offer; None before the first step or restore.

        Weights that were restored from another node and have taken no step here count as a
        neighbour's, so that the plan prefers the node that trained them.
        """
        if self.step == 0 or self.source is None:
            return None
        own = self.source in ("", "memory", "checkpoint") or self.step > self._first_step
        where: wire.BlockLocation = "memory" if own else "neighbour"
        return HeldBlock(self.lineage, self.layers, self.index, self.step, where)

    def begin(
        self, assignment: StageAssignment, streams: dict[int, trio.abc.Stream]
    ) -> StageWorker:
        """Return a worker for a new crew, with the stage's weights and optimizer."""
        self._dropped = Counter(self.dropped())
        self.worker = self._make_worker(assignment, streams)
        for parameter in self.runtime.parameters():
            parameter.grad = None
        self.runtime.caches.clear()
        return self.worker

    def _make_worker(
        self, assignment: StageAssignment, streams: dict[int, trio.abc.Stream]
    ) -> StageWorker:
        place = Place(assignment.crew[:CREW_BYTES], self.index, assignment.step)
        links = Links(self.index, streams, self._limits)
        fence = Fence(place, len(assignment.layers))
        common = (self.runtime, links, fence, self._settings, self.meter, self.optimizer)
        worker = Head(*common, seconds=HEAD_SECONDS) if self.index == 0 else StageWorker(*common)
        worker.observers = self.observers
        return worker

    def progress(self) -> int:
        """Return a number that grows with each piece of work done."""
        return self.runtime.work_count + self.worker.links.frames_received + self.step

    def dropped(self) -> dict[str, int]:
        """Return the number of dropped frames in all crews, by reason."""
        return dict(self._dropped + self.worker.ignored_frames)

    def load(self) -> int:
        """Return the number of pieces of work that run or could run now.

        Work that waits for a gradient or a slow link does not count, because a restart of this
        trainer would not help it.
        """
        return self.meter.computing + self.worker.ready()


# Averaging of one stage (NoLoCo): `trainer.weights` with this stage's tensors, named as in the
# whole model.
#
# A stage pairs with any stage or whole policy that has a block of layers in common. Corrections
# apply right after a step, when no wave is in flight. A trained tied embedding is not averaged:
# both ends hold it.

CLOCKS = "clocks"
"""Name of the tensor of outer clocks in a checkpoint."""


class StageAveraging(Replica, Observer):
    """Averaging of a stage with other crews and whole nodes.

    It must be created while the stage has the base weights, since payloads are differences to them.

    Args:
        adapter: Shape of the adapter; None if all weights are trained.
        send: Sends a message to the network process.
        connected: Returns True while the network process is connected.
        may_average: Returns True while this stage may be averaged.
    """

    def __init__(
        self,
        cfg: WeightsConfig,
        adapter: LoraShape | None,
        data_dir: Path,
        stage: Stage,
        send: Callable[[local.FromTrainer], None],
        connected: Callable[[], bool] = lambda: True,
        may_average: Callable[[], bool] = lambda: True,
    ) -> None:
        self.probe = AverageProbe()
        self._connected = connected
        self._may_average = may_average
        self._since = time.monotonic()
        tensors, layers = averaged_parameters(stage), sum(stage.layers)
        super().__init__(
            AveragedTensors(tensors, cfg.fragments, stage.optimizer.lock, layers),
            cfg,
            Counters(),
            data_dir,
            send=send,
            probe=self.probe,
            adapter=adapter,
        )

    def begin(self, outer: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """Start averaging, after the stage got its weights.

        Args:
            outer: Tensors that `tensors` returned with these weights. If empty, the slow weights
                start from the stage's weights, without momentum.

        Raises:
            StateError: `outer` belongs to another stage.
        """
        tensors, counters = dict(outer), self._parts.counters
        clocks = tensors.pop(CLOCKS, None)
        self.restore(tensors)
        counters.outer_clocks = [] if clocks is None else clocks.tolist()
        self.set_counters(counters)  # resizes the clocks to one per fragment

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averaging state for a checkpoint: `phi.<name>`, `delta.<name>`, float32, and
        CLOCKS.

        The returned tensors do not change afterwards. Call it between two steps, in the thread
        that takes them.
        """
        tensors = {n: t for n, t in super().tensors().items() if not n.startswith(UNDO)}
        return {**tensors, CLOCKS: torch.tensor(self._parts.counters.outer_clocks)}

    def on_step_in_thread(self, worker: StageWorker) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._parts.counters.step, self.probe.step_seconds = worker.participant.step, seconds
        if self._may_average():
            self.between_steps(self._connected(), seconds, stepped=True)
            self.keep()  # only the head sees rewards

    def receive(self, message: local.ToTrainer) -> None:
        """Handle a message of the network process, in the link's thread."""
        if not isinstance(message, local.AdoptState):
            super().receive(message)
        elif message.path:
            # a stage of another crew among stages of this crew is not a policy
            clocks = list(self._parts.counters.outer_clocks)
            self._send(local.StateAdopted(message.peer, "local", clocks))

    def refuse(self, message: local.ToTrainer) -> None:
        """Answer that this stage is not averaged now.

        Without an answer, the network process would wait for minutes and refuse all other partners.
        """
        if isinstance(message, local.TakeSnapshot | local.ApplyPayload):
            fragment = message.fragment
            step = self._parts.counters.outer_clocks[fragment]
            self._send(local.SwapEnded(message.session, fragment, "", "local", False, step))
        elif isinstance(message, local.WriteState):
            self._send(local.StateWritten("", 0, []))


def averaged_parameters(stage: Stage) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of this stage that are averaged, by their names in the whole model."""
    spec, shared = stage.runtime.spec, stage.runtime.embedding()
    return {
        spec.whole_name(n): p
        for n, p in stage.runtime.model.named_parameters()
        if p.requires_grad and p is not shared
    }


# The probe of an average: does an average with another crew make this crew's policy worse?
#
#     this stage     runs the newest committed micro-batches with own and with averaged weights
#     later stages   run both outputs, by `RunMessage` on the state streams
#     loss           − log-probability of completions better than their group, nats per token; of
#                    all completions if there are too few of these, and KL (`averaging.gate`)
#
# The stage works with its own weights until the verdict arrives. Without a verdict the average is
# rejected.

VERDICT_SECONDS = (120.0, 3.0)
"""(a, b): the deadline of a verdict is a + b × the duration of a step, in seconds. A partner waits
for six minutes and eight steps (`weights/exchange.py`)."""


class AverageProbe:
    """Judges averages of one stage, while there is a crew."""

    def __init__(self) -> None:
        self.step_seconds = 0.0
        """Duration of the last step."""
        self._exchange: StateExchange | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    def open(self, exchange: StateExchange) -> None:
        """Start to judge with the state streams of `exchange`. Call it in the crew's thread."""
        self._exchange, self._token = exchange, trio.lowlevel.current_trio_token()

    def close(self) -> None:
        """Stop to judge: the crew has ended."""
        self._exchange = None

    def measure(self, mine: Tensors, mean: Tensors, answer: Answer) -> bool:
        """Start to compare two sets of weights, named as in the whole model.

        Call it right after a step, in the thread that took it.

        Args:
            mine: Weights of the stage.
            mean: Averaged weights.
            answer: Called in the crew's thread with the losses, or with None without a verdict.

        Returns:
            False if there are too few completions to judge by; then `answer` is not called.
        """
        exchange, token = self._exchange, self._token
        if exchange is None or token is None:
            return False
        known = list(exchange.stage.recorder.inputs)
        rewarded = (
            sum(len(_completions(exchange, edge, better=True)) for edge in known) >= LEAST_PROBE
        )
        judged, count = list[tuple[StageInput, list[int]]](), 0
        for edge in reversed(known):
            if count < PROBE_SEQUENCES:  # more take minutes over a home connection at 7 B
                judged.append((edge, _completions(exchange, edge, better=rewarded)))
                count += len(judged[-1][1])
        if count < LEAST_PROBE:
            return False
        seconds = VERDICT_SECONDS[0] + VERDICT_SECONDS[1] * self.step_seconds

        def begin() -> None:
            work = lambda: _judge(exchange, judged, rewarded, mine, mean, answer, seconds)
            if not exchange.channel.spawn(work):  # the crew has ended
                answer(None)

        try:
            token.run_sync_soon(begin)
        except trio.RunFinishedError:  # this process ends
            return False
        return True


async def _judge(
    exchange: StateExchange,
    known: Sequence[tuple[StageInput, list[int]]],
    rewarded: bool,
    mine: Mapping[str, torch.Tensor],
    mean: Mapping[str, torch.Tensor],
    answer: Answer,
    seconds: float,
) -> None:
    """Run the micro-batches with both sets of weights, and call `answer` with the losses.

    Args:
        known: Micro-batches, each with the completions that count.
        rewarded: See `averaging.gate.compare`.
        seconds: Deadline.
    """
    losses = None
    try:
        with trio.move_on_after(seconds):
            as_is, averaged = [
                await exchange.channel.compute(
                    partial(_with_tensors, exchange.stage.runtime, tensors)
                )
                for tensors in (mine, mean)
            ]
            before, after = list[float](), list[float]()
            for edge, chosen in known:
                found = await _logprobs(exchange, edge, chosen, as_is)
                try:
                    after += await _logprobs(exchange, edge, chosen, averaged)
                except (Incompatible, ValueError):  # a number with the average is not finite
                    after += [-math.inf] * len(found)
                before += found
            losses = compare(before, after, rewarded) if before else None
    except (PeerError, ValueError, RuntimeError, MemoryError) as error:
        if not isinstance(error, PeerError | ValueError) and not is_device_error(error):
            raise
        log.info("probe of an average failed, rejecting the average", error=str(error))
    finally:
        answer(losses)


def _completions(exchange: StateExchange, edge: StageInput, better: bool) -> list[int]:
    """Return the completions of `edge`; only those with an advantage above zero if `better`."""
    work = read_work(edge, exchange.stage.limits)
    if not better:
        return list(range(len(work.completion_lengths)))
    loss = work.loss
    return [] if loss is None else (unpack_logprobs(loss.advantages) > 0).nonzero()[0].tolist()


async def _logprobs(
    exchange: StateExchange, edge: StageInput, completions: list[int], runtime: StageRuntime
) -> list[float]:
    """Return the log-probabilities of the tokens of some completions.

    Raises:
        PeerError: a stage is gone.
        Incompatible, ValueError: a number is not finite.
    """
    work, spec = read_work(edge, exchange.stage.limits), exchange.stage.spec
    x = b"" if spec.has_embedding else edge.body
    x = await exchange.channel.compute(lambda: run_one(runtime, work, x, exchange.stage.codec))
    tokens = sum(work.completion_lengths)
    for stage in range(spec.index + 1, spec.stages):
        x = await exchange.fetch.run_at(stage, edge, tokens, x)
    rows = torch.from_numpy(unpack_logprobs(x).copy()).split(list(work.completion_lengths))
    chosen = torch.cat([rows[i] for i in completions] or [torch.zeros(0)])
    if not bool(torch.isfinite(chosen).all()):
        raise ValueError("a log-probability is not finite")
    return list(map(float, chosen))


def _with_tensors(runtime: StageRuntime, tensors: Mapping[str, torch.Tensor]) -> StageRuntime:
    """Return a runtime of the same stage with other values for some weights. It shares the other
    weights."""
    local = {str(runtime.spec.local_name(name)): tensor for name, tensor in tensors.items()}
    return StageRuntime(
        runtime.spec,
        _replaced(runtime.model, local, ""),
        dtype=runtime.dtype,
        known_logits=runtime.known_logits,
    )


def _replaced(module: Any, tensors: Mapping[str, torch.Tensor], prefix: str) -> Any:  # noqa: ANN401
    new = copy.copy(module)
    new._modules = {
        name: child and _replaced(child, tensors, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    new._parameters = {
        name: own
        if (other := tensors.get(prefix + name)) is None
        else torch.nn.Parameter(other.to(own.device, own.dtype), False)
        for name, own in module._parameters.items()
    }
    return new


# The model: tokenizer, costs of its parts, capacity of this node, and one stage. Tensors of other
# stages are read only to hash the files.

MAX_TOKENS = 16384
"""Most padded tokens of a micro-batch or wave. Protocol/04 fixes it for all crews."""
ASSUMED_WAVES = 4
"""Assumed number of waves in flight, which is at most the number of stages."""
PROMPT_TOKENS = 64
"""Assumed length of a question, for the size of the caches."""
SPEED_MATRIX_SIZE = 512
"""Side of the matrices that measure a machine's speed."""
SPEED_SECONDS = 0.1
"""Duration of that measurement."""
CHECKPOINT_BYTES = 2 * 3
"""Host memory per weight of a stage for checkpoints in bfloat16: the own one while it is written,
and those of both ring neighbours while they arrive."""


@dataclass(frozen=True)
class CrewTerms:
    """Settings that all members of a crew share. They are part of `CrewRecord.model`, so nodes with
    other terms form no crew."""

    codec: ActivationCodec
    recovery: Literal["checkpoints", "checkfree", "checkfree+"]
    lora: LoraSettings
    frozen_a: bool
    """True if all adapters have the same frozen A, see `averaging.lora.shares_a`."""
    learning_rate: float

    def hash(self, identity: bytes) -> bytes:
        """Return the hash, 32 bytes, of these terms and of a model.

        Args:
            identity: Fingerprint of architecture and base weights.
        """
        terms = {
            "codec": self.codec,
            "recovery": self.recovery,
            "lora": self.lora.model_dump() if self.lora.r else None,
            "shares_a": self.frozen_a,
            "weight_decay": WEIGHT_DECAY,
            "learning_rate": self.learning_rate,
        }
        text = json.dumps(terms, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(identity + text.encode(), digest_size=32).digest()


def crew_terms(config: Config) -> CrewTerms:
    """Return the shared settings of this node's configuration."""
    lora = config.policy.lora
    return CrewTerms(
        config.stages.codec,
        config.stages.recovery,
        lora,
        shares_a(lora, config.weights),
        config.training.learning_rate,
    )


@dataclass(frozen=True)
class CrewModel:
    """A model's directory, and facts about the model that do not depend on a stage."""

    directory: Path
    config: PretrainedConfig
    """Configuration in transformers."""
    text: PolicyText
    placement: Placement
    trainer_offer: TrainerOffer
    policy: PolicyConfig
    terms: CrewTerms

    @property
    def owner(self) -> str:
        """Name of the policy in saved state (`trainer.state.owner`)."""
        return state.owner(self.text.fingerprint, self.terms.lora.r, self.terms.frozen_a)

    def limits(self) -> FrameLimits:
        """Return the bounds of frames for this model."""
        return FrameLimits(
            hidden=int(self.config.hidden_size),
            vocab=int(self.config.vocab_size),
            tokens=MAX_TOKENS,
        )

    def settings(self) -> WorkerSettings:
        """Return the settings of a stage's worker."""
        terms = self.terms
        factor = 1.0 if terms.recovery == "checkpoints" else LEARNING_RATE_FACTOR
        return WorkerSettings(
            codec=terms.codec,
            swapped=terms.recovery == "checkfree+",
            learning_rate=terms.learning_rate * factor,
        )

    def build(self, layers: tuple[int, ...], index: int) -> StageRuntime:
        """Load stage `index` with the base model's weights, and an adapter if one is trained.

        Args:
            layers: Number of layers of each stage.

        Raises:
            ConfigError: the numbers do not add up to the model's layers.
            LocalError: a file is missing or damaged.
        """
        spec = stage_specs(self.config, layers)[index]
        lora = self.terms.lora.r > 0
        dtype = self.placement.dtype if lora else torch.float32
        stage = load_stage(self.directory, spec, dtype=dtype, device=self.placement.device)
        if lora:
            stage = add_adapter(stage, lora_settings(self.policy))
            if self.terms.frozen_a:
                freeze_a({spec.whole_name(name): p for name, p in stage.named_parameters()}, A_SEED)
        runtime = StageRuntime(
            spec, stage, dtype=self.placement.dtype, known_logits=self.text.known_logits
        )
        report_layers(stage, runtime.count_work)
        return runtime


@contextlib.contextmanager
def open_model(
    config: Config, report: Callable[[str], None] = lambda line: None
) -> Iterator[CrewModel]:
    """Open the configured model for use in stages.

    Args:
        report: Called with a line about each part of the work.

    Raises:
        LocalError: the model is missing or is not the swarm's, cannot be split, or the settings
            require a whole policy.
        DeviceError: this node has no room for one layer.
    """
    cfg, terms = config.policy, crew_terms(config)
    check_trainable(cfg, config.training, config.task.names)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    placement = without_float16(probe(cfg))
    set_up(placement.device)
    with local_directory(cfg, fits=False) as directory:
        hf = offline(cfg, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False))
        check_split(hf)
        check_checkfree(terms.recovery, config.stages.stages, adapter=terms.lora.r > 0)
        tokenizer = offline(
            cfg, lambda: AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        )
        report("hashing the base weights")
        ends = configured_ends(cfg, directory, hf, tokenizer)
        eos_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(ends)
        vocab_size, unused_ids = vocabulary(tokenizer, int(hf.vocab_size))
        text = PolicyText(
            tokenizer=tokenizer,
            fingerprint=fingerprint(directory),
            tokenizer_hash=tokenizer_hash(tokenizer),
            eos_id=eos_id,
            eos_ids=ends,
            pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_id,
            vocab_size=vocab_size,
            unused_ids=unused_ids,
            chat=Chat.of(cfg.chat, tokenizer),
            context=context_length(hf),
        )
        opened = load_current(config.node.data_dir)
        if opened is not None:
            check_model(opened.manifest, text.fingerprint, text.tokenizer_hash)
        cost = estimate_cost(config, hf, placement)
        memory = stage_room(config, hf, placement, cost)
        trainer_offer = TrainerOffer(
            terms.hash(text.fingerprint),
            Capacity(memory / HEADROOM, measure_speed(placement)),
            cost,
        )
        report(
            f"{cfg.model} in stages: at most {trainer_offer.capacity.memory / 2**30:.2f} GiB here;"
            f" {placement.reason}"
        )
        yield CrewModel(directory, hf, text, placement, trainer_offer, cfg, terms)


def check_trainable(
    policy: PolicyConfig, training: TrainingConfig, tasks: Sequence[str] = ()
) -> None:
    """Check that a crew supports the settings.

    Args:
        tasks: Names of the tasks that are trained on.

    Raises:
        Refused: a setting requires a whole policy. The message has the remedy.
    """
    episodes = [task for task in tasks if task in TASKS and TASKS[task].turns > 1]
    answer = training.max_completion_length
    longest, rows = answer + PROMPT_TOKENS, training.groups_per_step * training.num_generations
    for unsupported, remedy in (
        (
            training.beta > 0,
            "a KL penalty needs a second, frozen policy, which no crew holds: set training.beta to"
            " 0",
        ),
        (
            bool(episodes),
            f"{', '.join(episodes)}: a crew learns from whole answers, and the rows of an episode"
            " hold observations as well: leave the task out",
        ),
        (
            longest > MAX_TOKENS,
            f"a crew computes {MAX_TOKENS} tokens at a time, and an answer may have {answer}: set"
            f" training.max_completion_length to {MAX_TOKENS - 1024} or lower",
        ),
        (
            rows > MAX_MICRO_BATCHES * (MAX_TOKENS // longest),
            f"a step of {rows} answers of {answer} tokens is more than {MAX_MICRO_BATCHES}"
            f" micro-batches of {MAX_TOKENS}: set training.groups_per_step lower",
        ),
        (
            policy.quantization != "none",
            "stages are not quantised: set policy.quantization to none",
        ),
        (
            policy.optim != "adamw",
            "stages keep Adam's moments in 32 bits: set policy.optim to adamw",
        ),
    ):
        if unsupported:
            raise Refused(f"{remedy}, or set stages.mode to off")


# Memory: the bytes that a stage needs, and the bytes of this node.


def fits_whole(config: Config, directory: Path, placement: Placement) -> bool:
    """Return True if this node trains the whole policy by itself.

    Raises:
        DeviceError, ConfigError: the policy can be trained neither whole nor in stages.
    """
    policy, stages = config.policy, config.stages
    hf = offline(policy, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False))
    if stages.mode == "always":
        check_split(hf)
        return False
    room, need = capacity(config, placement), whole_bytes(policy, hf, placement)
    if stages.mode == "off" or room is None or need <= room:
        return True
    if (
        placement.device.type == "cuda"
        and policy.device == "auto"
        and not stages.capacity
        and torch.cuda.device_count() > 1
    ):
        return True  # `policy.device.fit` spreads it over all GPUs, or raises with the reason
    reason = (
        f"{policy.model}: its weights need about {need / 2**30:.1f} GiB to train,"
        f" {placement.device} has {room / 2**30:.1f} GiB"
    )
    try:
        check_split(hf)
    except ConfigError as error:
        raise DeviceError(f"{reason}, and {error}") from None
    layer = smallest_stage(estimate_cost(config, hf, placement))
    if layer > room:
        raise DeviceError(f"{reason}, and one layer alone needs {layer / 2**30:.1f} GiB")
    return False


def capacity(config: Config, placement: Placement) -> int | None:
    """Return the bytes of this node for a policy or stage; None if unknown."""
    limit, measured = config.stages.capacity, free_bytes(placement.device)
    if not limit or measured is None:
        return limit or measured
    return min(limit, measured)


def whole_bytes(policy: PolicyConfig, hf: PretrainedConfig, placement: Placement) -> int:
    """Return the bytes that loading the whole policy for training requires (`device.fit`)."""
    return update_bytes(policy, hf, placement)


def stage_room(
    config: Config, hf: PretrainedConfig, placement: Placement, cost: ModelCost
) -> float:
    """Return the bytes of this node for a stage, beside a policy copy.

    Raises:
        DeviceError: that is less than one layer needs.
    """
    room = capacity(config, placement)
    memory = float(room if room is not None else whole_bytes(config.policy, hf, placement))
    memory = within_host_memory(memory, config, placement)
    if config.stages.policy_copy not in ("memory", "both"):
        return memory
    copy, layer = HEADROOM * copy_memory(config, hf), smallest_stage(cost)
    if memory - copy < layer:
        raise DeviceError(
            f"stages.policy_copy: a copy in memory needs {copy / 2**30:.1f} GiB, training one layer"
            f" needs {layer / 2**30:.1f} GiB, and this node has {memory / 2**30:.1f} GiB: set it to"
            " off or disk"
        )
    return memory - copy


def within_host_memory(memory: float, config: Config, placement: Placement) -> float:
    """Return `memory` bytes of the device, or less if the host memory is too small to save and
    average a stage of that size."""
    free = free_bytes(torch.device("cpu"))
    if config.policy.lora.r or free is None or placement.device.type == "cpu":
        return memory
    return min(memory, free * TRAINED_BYTES / host_bytes_per_weight(config.weights))


def host_bytes_per_weight(weights: WeightsConfig) -> int:
    """Return the host bytes per trained weight for saving, averaging and checkpoints.

    A stage sees no reward, so it stores only one fragment of the weights before an exchange.
    """
    parts, many = weights.fragments, weights.fragments * UNDO_WEIGHTS
    averaging = host_bytes(many, parts if weights.rule != "off" else 0)
    return sum(averaging) // many + CHECKPOINT_BYTES


def copy_memory(config: Config, hf: PretrainedConfig) -> float:
    """Return the bytes of an int8 policy copy, with its adapter and caches."""
    parameters, edges = count_parameters(hf)
    caches = Shape.of_config(hf.to_dict()).cache_bytes * cached_tokens(config.training)
    return parameters + 4.0 * config.policy.lora.r * edges + caches


def estimate_cost(config: Config, hf: PretrainedConfig, placement: Placement) -> ModelCost:
    """Return the costs of the model's parts in training; on a CPU also for saving and averaging.

    Activations are those of the smallest micro-batch, the longest row alone, because the head
    halves larger ones that do not fit. A layer stores its input and is recomputed in the backward
    pass, see `StageRuntime`.
    """
    cfg, rank, kind = config.training, config.policy.lora.r, placement.device.type
    shape = Shape.of_config(hf.to_dict())
    beside = host_bytes_per_weight(config.weights) if kind == "cpu" else 0
    per_weight = placement.dtype.itemsize if rank else TRAINED_BYTES + beside
    method = Method(kind, str(placement.dtype).removeprefix("torch."), rank, checkpointing=True)
    longest = PROMPT_TOKENS + cfg.max_completion_length
    state = 4.0 * shape.hidden * longest  # hidden states from one stage to the next
    gradients = ITEM_BYTES[method.dtype] * (2 * shape.hidden + 3 * shape.intermediate)
    compute = (layer_bytes(shape, method) + gradients) * longest
    cache = shape.cache_bytes / shape.layers * cached_tokens(cfg)
    table = shape.vocabulary * shape.hidden
    # the gradient of a trained embedding or head exists twice while it is added
    copy = 0.0 if rank else 4.0 * table
    at_once = min(longest, logits_tokens(shape.vocabulary, kind))
    logits = 4.0 * shape.vocabulary * LOGITS_COPIES * at_once
    layer = PartCost(
        shape.layer_parameters * per_weight + cache + state, float(shape.layer_parameters)
    )
    # embedding and head are not computed at the same time as a layer
    return ModelCost(
        embedding=PartCost(table * per_weight + max(0.0, copy - compute), 0.0),
        layers=(layer,) * shape.layers,
        head=PartCost(table * per_weight + max(0.0, logits + copy - compute), float(table)),
        stage=compute + ASSUMED_WAVES * state,
    )


def smallest_stage(cost: ModelCost) -> float:
    """Return the bytes of a stage with one layer, including headroom."""
    return HEADROOM * (cost.stage + cost.layers[0].memory)


def cached_tokens(cfg: TrainingConfig) -> int:
    """Return the number of tokens in the caches of a step's samples."""
    rows = cfg.groups_per_step * cfg.num_generations
    return min(rows * (PROMPT_TOKENS + cfg.max_completion_length), ASSUMED_WAVES * MAX_TOKENS)


def measure_speed(placement: Placement) -> float:
    """Return the floating-point operations per second of a matrix product, as a power of two.

    The rounding gives crews of similar machines the same blocks, so that their stages can be
    averaged.
    """
    size = SPEED_MATRIX_SIZE
    dtype = placement.dtype if placement.device.type != "cpu" else torch.float32
    a = torch.ones(size, size, device=placement.device, dtype=dtype)
    float((a @ a).sum())  # the first product also starts the device
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < SPEED_SECONDS or not done:
        for _ in range(4):
            b = a @ a
        float(b.sum())
        done += 4
    return 2.0 ** round(math.log2(done * 2.0 * size**3 / spent))
