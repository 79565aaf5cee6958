"""The trainer of a node that holds one stage of a policy.

    CrewTrainer     main thread     leads the training loop while this node is the crew's head
    StageRunner     crew's thread   holds the assigned stage, one crew after another
    CrewPolicy      main thread     the engine of the head's loop
    StageRecovery   crew's thread   checkpoints and restoration
    Stage           crew's thread   weights, optimizer, worker; its averaging with other crews
    CrewModel                       tokenizer, memory and costs of the model

The link's thread delivers messages of the network process.
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
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from swarmnode.averaging.averaged import AveragedTensors
from swarmnode.averaging.lora import A_SEED, freeze_a, shares_a
from swarmnode.averaging.outer import UNDO, Tensors
from swarmnode.averaging.probe import LEAST_PROBE, PROBE_SEQUENCES, Answer, compare
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
    Unavailable,
)
from swarmnode.files import socket_address
from swarmnode.link.client import Link
from swarmnode.link.messages import Hello, WeightsReport
from swarmnode.pauses import Told
from swarmnode.policy.device import (
    HEADROOM,
    TRAINED_BYTES,
    Placement,
    count_parameters,
    free_bytes,
    needed_bytes,
    probe,
    set_up,
)
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.engine.protocol import Generation
from swarmnode.policy.fingerprint import fingerprint, tokenizer_hash, weight_files
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
from swarmnode.policy.generate import GroupSample, Sampled, Sampling
from swarmnode.policy.layers import report_layers
from swarmnode.policy.load import (
    config_directory,
    configured_ends,
    context_of,
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
from swarmnode.stages.model import (
    LearnRow,
    StageOptimizer,
    StageRuntime,
    adapt,
    check_split,
    load_stage,
)
from swarmnode.stages.pipeline import (
    TOO_MUCH,
    CannotScore,
    CrewSettings,
    Head,
    Links,
    Observer,
    StageWorker,
    Wave,
    gradient_codec,
)
from swarmnode.stages.policy_copy import MemberSampler, WholeCopy
from swarmnode.stages.recovery import (
    LEARNING_RATE_FACTOR,
    Edge,
    Run,
    StageRecovery,
    StatePeer,
    check_paper,
    recovery_settings,
    run_one,
    work_of,
)
from swarmnode.stages.wire import (
    CREW_BYTES,
    MICRO_BATCHES,
    ActivationCodec,
    Assigned,
    Capacity,
    Copy,
    Fence,
    FrameLimits,
    Kind,
    ModelCost,
    Offering,
    Open,
    Place,
    StageFault,
    StageStatus,
    activation_bytes,
    is_device_error,
    model_cost,
    stage_memory,
    stage_specs,
)
from swarmnode.swarm.manifest import check_model
from swarmnode.swarm.manifest_store import stored
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import TASKS
from swarmnode.trainer import state
from swarmnode.trainer.batch import Rows
from swarmnode.trainer.engine import EngineStatistics, adapter_shape
from swarmnode.trainer.judge import Scored
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
# The trainer: offers itself to a crew, holds the assigned stage, trains while it holds the first.

POLL_INTERVAL = 1.0
REDUCED_OFFER = 0.8
"""After a stage did not fit, this share of its planned memory is offered."""


def make_trainer(config: Config, progress: Progress) -> Trainer | CrewTrainer:
    """Return a trainer of the whole policy where it fits or is configured, else of a stage.

    Reads no weights. Raises LocalError, ConfigError.
    """
    if config.stages.mode == "off":
        return Trainer(config, progress)
    with config_directory(config.policy) as directory:
        whole = fits_whole(config, directory, probe(config.policy))
    return Trainer(config, progress) if whole else CrewTrainer(config, progress)


class CrewTrainer:
    """The trainer of a node that holds one stage of a policy."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self.copy: WholeCopy | None = None
        """What this node samples from; None if it samples through the stages."""
        self._config = config
        self._progress = progress
        self._directory = config.node.data_dir / "trainer"
        self._stop = threading.Event()
        self._loop: Loop | None = None
        self._averaging: StageAveraging | None = None
        self._sampler: MemberSampler | None = None
        self._engine: CrewPolicy | None = None
        """Of the last crew that this node led; it knows what its members can compute."""

    def stop(self) -> None:
        """Finish the work under way, save and leave."""
        self._stop.set()

    def run(self) -> None:
        """Train until `stop` is called, or `max_steps` are taken and the head has ended.

        Raises:
            LocalError: the model does not exist or cannot be held in stages.
            DeviceError: a stage does not fit.
        """
        c = self._config
        with contextlib.ExitStack() as stack:
            self._model = stack.enter_context(open_model(c, self._report_loading))
            self._offering = self._model.offering
            self._recovery = StageRecovery(
                self._directory,
                recovery_settings(c.stages),
                self._model,
                lambda: self._averaging,
                lambda step: self.copy.facts(step) if self.copy is not None else {},
                connect=lambda assigned: connect_all(assigned, "state"),
                owner=self._model.owner,
            )
            stack.callback(self._recovery.close)
            if c.stages.policy_copy in ("memory", "both"):
                peer = lambda: self._recovery.peer
                self.copy = WholeCopy(self._model, peer, cached_tokens(c.training))
            self._link = Link(
                c.node.data_dir, self._greet, self._receive_weights, self._receive_stages
            )
            self._runner = StageRunner(
                self._build,
                self._recovery,
                self._link.send,
                self._progress,
                self._built,
                self._reduce_offer,
                self._offer,
            )
            self._runner.start()  # before the link, which delivers to it
            stack.enter_context(self._link)
            stack.callback(self._runner.stop)
            self._train()
            self._link.flush(2.0)

    def _report_loading(self, line: str) -> None:
        log.info("policy", detail=line)
        self._progress("loading policy")

    def _train(self) -> None:
        """Lead the crew while this node is its head, sample beside it while it is a member."""
        c, scorer, averages = self._config, None, False
        pauses = Pauses(c.node.quiet_hours, Told(c.node.data_dir), 0.0, self._stop).reasons
        with contextlib.ExitStack() as stack:
            while not self._stop.is_set() and not self._runner.finished(c.training.max_steps):
                lineage = self._runner.wait(self._leads, POLL_INTERVAL)
                if (self._active_averaging() is not None) != averages:
                    averages = not averages
                    self._link.send(self._hello())
                if lineage is None and (not self._may_sample() or pauses()):
                    continue
                try:
                    if scorer is None:
                        self._progress("loading tasks")
                        scorer = stack.enter_context(Scorer())
                    if lineage is not None:
                        self._lead(lineage, scorer)
                        return  # stopped, or all steps are taken
                    self._sample(scorer)
                except EngineGone as gone:
                    log.info(
                        "stopped leading the crew" if lineage else "stopped sampling from the copy",
                        reason=str(gone),
                    )
                except (LocalError, OSError) as error:
                    if lineage is not None or self.copy is None:
                        raise
                    log.warning(
                        "sampling from the policy copy failed, disabled until restart; the stage"
                        " continues",
                        error=str(error),
                    )
                    self.copy.release()
                    self.copy = self._sampler = self._engine = None

    def _leads(self) -> bytes | None:
        """Return the lineage whose crew waits for this node as its head."""
        return self._runner.leads() if self._runner.head() is not None else None

    def _lead(self, lineage: bytes, scorer: Scorer) -> None:
        """Run the training loop as long as this node is the head of `lineage`."""
        c, engine = self._config, self._engine
        if engine is None or engine.lineage != lineage:
            engine = self._engine = CrewPolicy(
                c.training,
                self._model,
                self._runner,
                lineage,
                self._stop,
                c.stages.wait_seconds,
                self._active_averaging,
                self.copy,
            )
        directory = self._directory / HEAD
        self._loop = Loop(
            c, engine, self._link, scorer, Counters(), directory, self._progress, self._stop
        )
        self._link.send(self._hello())
        try:
            self._loop.run(c.weights.join_seconds)
        finally:
            self._loop = self._sampler = None
            if self.copy is not None:
                self.copy.release()

    def _may_sample(self) -> bool:
        """Return True if another node leads a working crew and this one has a copy to sample."""
        return (
            self.copy is not None
            and self._config.sharing.enabled
            and self._runner.averages
            and self._runner.leads() is None
        )

    def _sample(self, scorer: Scorer) -> None:
        """Sample from the copy, once in each step of the crew.

        Raises EngineGone, LocalError, OSError.
        """
        c, stage = self._config, self._runner.stage
        if stage is None or self.copy is None:
            return
        if self._sampler is None or self._sampler.lineage != stage.lineage:
            if self._sampler is not None:
                self.copy.release()  # it is the other lineage's
            engine = MemberPolicy(
                c.training,
                self._model,
                self._runner,
                stage.lineage,
                self._stop,
                0.0,
                copy=self.copy,
            )
            self._sampler = MemberSampler(engine, c, self._link, scorer, self._directory)
        self._sampler.sample(stage.step, len(stage.layers))

    # ---- the stage -------------------------------------------------------------------------------

    def _build(self, assigned: Assigned) -> Stage:
        if self._averaging is not None:  # it refers to the stage before
            self._averaging.close()
            self._averaging = None
        runtime = self._model.build(assigned.layers, assigned.stage)
        stage = Stage(assigned, runtime, self._model.settings(), self._model.limits())
        weights, terms = self._config.weights, self._model.terms
        if weights.rule != "off" and averaged(stage):
            self._averaging = StageAveraging(
                weights,
                adapter_shape(terms.lora, terms.frozen_a),
                self._config.node.data_dir,
                stage,
                self._link.send,
                lambda: self._link.statistics().connected,
                lambda: self._runner.averages,
            )
        return stage

    def _built(self, stage: Stage) -> None:
        """Start averaging: the stage has its weights."""
        if self._averaging is not None:
            self._averaging.begin(self._recovery.outer)
            # before the observers that store what it changes
            stage.observers.insert(1, self._averaging)
        self._recovery.outer = {}  # averaging has its own copies

    def _reduce_offer(self, assigned: Assigned) -> None:
        """Offer less from now on, so that a stage that does not fit is not planned again."""
        offering = self._offering
        if sum(assigned.layers) == len(offering.cost.layers):
            planned = stage_memory(offering.cost, assigned.layers, assigned.stage)
            memory = min(offering.capacity.memory, REDUCED_OFFER * planned)
            self._offering = msgspec.structs.replace(
                offering, capacity=replace(offering.capacity, memory=memory)
            )
            log.warning("stage did not fit, offering less memory", gib=round(memory / 2**30, 2))

    # ---- the link --------------------------------------------------------------------------------

    def _greet(self) -> Hello:
        """Return the first message of a new connection, and send what the runner has."""
        status = self._runner.status()
        if status is not None:
            self._link.send(status)
        else:
            self._offer(self._runner.stage)
        return self._hello()

    def _offer(self, stage: Stage | None) -> None:
        """Offer this node, which works in no crew, with its copies of stages."""
        copy = stage.copy() if stage is not None else None
        copies = (*([copy] if copy is not None else []), *self._recovery.copies())
        self._link.send(msgspec.structs.replace(self._offering, copies=copies))

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
        gives = isinstance(message, local.TakeSnapshot | local.WriteState)
        # a suspended stage gives nothing away; an exchange under way may end
        if isinstance(message, local.AdoptState) or (
            self._runner.active and (self._runner.averages or not gives)
        ):
            averaging.receive(message)
        else:
            averaging.refuse(message)

    def _receive_stages(self, message: wire.ToTrainer) -> None:
        self._runner.receive(message)


# Streams to the other stages, through Unix sockets of the network process.

CONNECT_SECONDS = 10.0
"""To a socket on this machine; the network process may be restarting."""
RETRY_SECONDS = 0.1


async def connect(assigned: Assigned, stage: int, kind: Kind) -> trio.abc.Stream:
    """Open a stream to the trainer of `stage`, which need not be there yet.

    Raises PeerError if the network process does not answer.
    """
    opened = headed.pack(Open(assigned.crew, stage, kind))
    with trio.move_on_after(CONNECT_SECONDS):
        while True:
            address, directory = socket_address(Path(assigned.socket))
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


async def connect_all(assigned: Assigned, kind: Kind) -> dict[int, trio.abc.Stream]:
    """Open a stream to every other stage. Raises PeerError."""
    streams: dict[int, trio.abc.Stream] = {}
    try:
        for stage in range(len(assigned.members)):
            if stage != assigned.stage:
                streams[stage] = await connect(assigned, stage, kind)
    except BaseException:
        await close_all(streams)
        raise
    return streams


async def close_all(streams: Mapping[int, trio.abc.Stream]) -> None:
    with trio.CancelScope(shield=True):
        for stream in streams.values():
            await trio.aclose_forcefully(stream)


# This node's stage in one crew after another: a trio program in a thread of its own.
#
#     Assigned    the previous session ends; `run_stage` begins
#     Resumed     all stages are active: the head may start
#     Suspended   nothing starts, received frames wait
#     Released    the session ends; weights and optimizer stay in memory
#
# Other threads read its state through `wait`; only the head's calls come from outside (`ask`).

STATUS_SECONDS = 1.0


@dataclass
class StageSession:
    """This node's part in one crew."""

    assigned: Assigned
    phase: wire.StagePhase = "loading"
    source: str = ""
    """One of `wire.SOURCES`."""
    reason: str = ""
    """Why the stage failed."""
    faulted: bool = False
    """A fault was reported. The crew ends soon."""
    resumed: bool = False
    """All stages are active, and the crew is not suspended."""
    suspended: bool = False
    source_seconds: float | None = None
    gate_kl: float | None = None
    since: float = field(default_factory=time.monotonic)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    call: trio.CancelScope = field(default_factory=trio.CancelScope)
    """The present call of the head, which ends with the session."""
    over: trio.Event = field(default_factory=trio.Event)
    """Nothing of it runs any more."""

    @property
    def active(self) -> bool:
        return self.phase == "active" and not self.over.is_set()


class StageRunner:
    """Holds the assigned stage, in a thread of its own.

    Args:
        build: makes a stage with the base model's weights; called in a worker thread.
        built: called when the stage has its own weights.
        send: sends a message to the network process; callable from any thread.
        lacked: called when an assigned stage did not fit this node's memory.
        offer: called in a worker thread when there is no crew, with the stage in memory.
    """

    def __init__(
        self,
        build: Callable[[Assigned], Stage],
        recovery: StageRecovery,
        send: Callable[[wire.FromTrainer], None],
        progress: Progress,
        built: Callable[[Stage], None] = lambda stage: None,
        lacked: Callable[[Assigned], None] = lambda assigned: None,
        offer: Callable[[Stage | None], None] = lambda stage: None,
    ) -> None:
        self.stage: Stage | None = None
        self._build = build
        self._built = built
        self._lacked = lacked
        self._offer = offer
        self._recovery = recovery
        self._send = send
        self._progress = progress
        self._session: StageSession | None = None
        self._changed = threading.Condition()
        self._inbox, self._messages = trio.open_memory_channel[wire.ToTrainer](math.inf)
        self._token: trio.lowlevel.TrioToken | None = None
        self._error: BaseException | None = None
        """What ended the thread, if it was an error."""
        self._thread = threading.Thread(target=self._run_thread, name="crew", daemon=True)

    # ---- the assigned stage, from load to clean-up -----------------------------------------------

    async def run_stage(self, session: StageSession) -> None:
        """Hold one stage in one crew until the session is cancelled or fails.

        out of memory, device error   the stage is dropped and reported as failed
        a peer is lost                the fault is reported; the next crew tries again
        no source, damaged files      the stage is reported as failed
        """
        failure = None
        try:
            with session.scope:
                await self._load_and_work(session)
        except Exception as raised:
            failure = _failure_of(raised)
            if failure is None:  # a defect of ours ends the process
                raise
        finally:
            session.over.set()
            session.call.cancel()
        # outside the handler: the exception's frames hold the stage's memory
        if failure is not None:
            self._handle_failure(session, *failure)
        log.info("stage session ended", crew=session.assigned.crew.hex()[:16], phase=session.phase)

    async def _load_and_work(self, session: StageSession) -> None:
        # load
        assigned, stage = session.assigned, self.stage
        in_memory = stage is not None and stage.follow(assigned)
        if stage is None or not in_memory:
            stage = None  # there may be no room for two
            self._replace_stage(None)
            await trio.to_thread.run_sync(self._recovery.prepare, assigned)
            stage = await trio.to_thread.run_sync(self._build, assigned)
            self._recovery.built(stage)
            self._replace_stage(stage)
        async with self._recovery.open(assigned, stage):
            # restore
            if in_memory:
                session.source = "memory" if assigned.step else ""
            else:
                if assigned.step:
                    session.source, session.gate_kl = await self._recovery.restore(
                        stage, assigned, partial(self._update, session)
                    )
                self._built(stage)
                stage.source = session.source
            session.source_seconds = time.monotonic() - session.since
            log.info(
                "stage ready",
                stage=stage.index,
                source=session.source or "base",
                seconds=round(session.source_seconds, 2),
            )
            # connect
            streams = await connect_all(assigned, "frames")
            try:
                # work
                worker = stage.begin(assigned, streams)
                worker.links.inbox.pause(session.suspended)
                self._recovery.attach(assigned, worker)
                self._update(session, "active", session.source)
                await worker.run()
            finally:
                await close_all(streams)

    def _handle_failure(self, session: StageSession, kind: FailureKind, reason: str) -> None:
        if kind == "peer":
            # with the own stage as the cause, the crew ends without a strike for any member
            self._report_fault(session, session.assigned.stage, reason)
            return
        if kind != "source":
            self._replace_stage(None)  # what is in memory is neither offered nor saved
            self._recovery.forget()
            free_memory()
        if kind == "memory":
            self._lacked(session.assigned)
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
        """Start the thread; its program runs when this returns."""
        self._thread.start()
        self.wait(lambda: self._token is not None, math.inf)

    def stop(self, seconds: float = 10.0) -> None:
        self.run_soon(self._inbox.close)
        self._thread.join(seconds)

    def receive(self, message: wire.ToTrainer) -> None:
        """Handle a message of the network process; returns at once."""
        self.run_soon(self._inbox.send_nowait, message)

    def run_soon(self, work: Callable[..., object], *args: object) -> None:
        """Call `work(*args)` in the crew's thread, soon."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(work, *args)

    def wait(self, what: Callable[[], T | None], seconds: float) -> T | None:
        """Return the first true value of `what()`, evaluated at each change; None after `seconds`.

        Raises the error that ended the thread, if there was one.
        """
        with self._changed:
            found = self._changed.wait_for(
                lambda: self._error or what(), min(seconds, threading.TIMEOUT_MAX)
            )
        if self._error is not None:
            raise self._error
        return cast("T | None", found) or None

    def ask(self, head: Head, work: Callable[[Head], Awaitable[T]]) -> T:
        """Return `await work(head)`, run in the crew's thread.

        Raises what `work` raises, PeerError when the head's crew ends meanwhile, and EngineGone
        when the thread has ended.
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
        """Return the head that may begin something now: of stage 0, active, not suspended."""
        stage = self.stage
        worker = stage.worker if stage is not None and self.averages else None
        return worker if isinstance(worker, Head) and worker.usable else None

    def leads(self) -> bytes | None:
        """Return the lineage whose first stage is ours or is being loaded; None otherwise."""
        session = self._session
        if session is None or session.assigned.stage != 0:
            return None
        return session.assigned.lineage

    def leads_no_more(self, lineage: bytes) -> bool:
        """Return True if there is a crew whose head for `lineage` is another node."""
        return self._session is not None and self.leads() != lineage

    def members(self) -> tuple[str, ...]:
        """Return the peer ids of the present crew by stage; empty if there is none."""
        session = self._session
        return session.assigned.members if session is not None else ()

    def finished(self, limit: int) -> bool:
        """Return True if `limit` steps are taken and nobody needs our stage afterwards.

        The head evaluates after the last step and needs all stages for that. 0 means no limit.
        """
        stage = self.stage
        more = stage.step - limit if stage is not None and limit else -1
        return more > 0 or (more == 0 and self._session is None)

    @property
    def active(self) -> bool:
        session = self._session
        return session is not None and session.active

    @property
    def averages(self) -> bool:
        """Whether this stage is active and its crew not suspended."""
        session = self._session
        return session is not None and session.active and session.resumed

    def status(self) -> StageStatus | None:
        session, stage = self._session, self.stage
        if session is None:
            return None
        a = session.assigned
        status = StageStatus(
            a.crew,
            a.stage,
            session.phase,
            step=a.step,
            progress=self._recovery.progress(),
            source=session.source,
            source_seconds=session.source_seconds,
            gate_kl=session.gate_kl,
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
            **self._recovery.facts(stage.step),
        )

    # ---- the thread ------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # noqa: BLE001 - raised again in `wait` and `ask`
            self._error = error
        self._notify()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._notify()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat)
            async for message in self._messages:
                await self._handle(message, nursery)
            self._send_status()  # the last step
            await self._end_session()
            nursery.cancel_scope.cancel()

    async def _handle(self, message: wire.ToTrainer, nursery: trio.Nursery) -> None:
        session = self._session
        match message:
            case Assigned():
                await self._end_session()
                log.info(
                    "assigned", crew=message.crew.hex()[:16], step=message.step, stage=message.stage
                )
                self._session = StageSession(message)
                nursery.start_soon(self.run_stage, self._session)
            case wire.Suspended() if session is not None:
                log.info("suspended", reason=message.reason)
                self._suspend(session, True)
            case wire.Resumed() if session is not None and message.crew == session.assigned.crew:
                log.info("resumed")
                self._suspend(session, False)
            case wire.Released():
                log.info("released", reason=message.reason)
                await self._end_session()
                self._session = None
                await trio.to_thread.run_sync(self._offer, self.stage)
        self._send_status()

    def _suspend(self, session: StageSession, suspended: bool) -> None:
        session.resumed, session.suspended = not suspended, suspended
        if self.stage is not None and session.active:
            self.stage.worker.links.inbox.pause(suspended)

    async def _end_session(self) -> None:
        """End everything of the present crew; weights and optimizer stay."""
        if self._session is not None:
            self._session.scope.cancel()
            await self._session.over.wait()

    async def _beat(self) -> None:
        """Send a status each second; report progress to the supervisor when there is some, or
        nothing to do."""
        shown = -1
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
            elif status.load == 0 or status.progress != shown:
                self._progress(f"stage {status.stage}")
            shown = status.progress if status is not None else -1

    def _fault(self, session: StageSession) -> tuple[int | None, str] | None:
        worker = self.stage.worker if self.stage is not None and session.active else None
        return (worker.fault if worker is not None else None) or self._recovery.fault()

    def _report_fault(self, session: StageSession, stage: int | None, reason: str) -> None:
        """Tell the network process, once, that this crew cannot continue."""
        if not session.faulted:
            session.faulted = True
            blamed = "unknown" if stage is None else stage
            log.warning("crew cannot continue", stage=blamed, reason=reason)
            self._send(StageFault(session.assigned.crew, stage, reason[:128]))

    def _send_status(self) -> None:
        status = self.status()
        if status is not None:
            self._send(status)
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


FailureKind = Literal["memory", "device", "source", "peer"]
"""From the most to the least serious."""


def _failure_of(raised: Exception) -> tuple[FailureKind, str] | None:
    """Return (kind, reason) of the most serious error in `raised`; None for a defect of ours."""
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


# The engine of a crew's head. The training loop's calls go through the stages; a call that fails
# with its crew is repeated with the next one.

WAIT_SECONDS = 1.0
"""Between two checks whether to stop."""
FIRST_TOKENS = 1024
"""Padded tokens of the first micro-batches in a crew whose speed is not known. 16,384 tokens can
take a CPU stage many times the head's deadline."""
PIECES = 8
"""A step is cut into this many micro-batches per stage: with more of them stages idle less."""
LEAST_TOKENS = 1024
"""But a micro-batch is allowed at least this many tokens: a device is slow with smaller ones."""
SLOW_TOKEN = 0.1
"""If a token takes more seconds through all stages, a warning recommends sampling from a copy."""


class CrewPolicy:
    """The policy of a crew, at its head.

    Args:
        lineage: the lineage whose head this node is.
        stop: ends all waiting.
        wait_seconds: how long to wait for a crew.
        averaging: returns our own stage's averaging, if it is averaged now.
        copy: what training samples from, if it is recent enough.
    """

    def __init__(
        self,
        training: TrainingConfig,
        model: CrewModel,
        runner: StageRunner,
        lineage: bytes,
        stop: threading.Event,
        wait_seconds: float,
        averaging: Callable[[], StageAveraging | None] = lambda: None,
        copy: WholeCopy | None = None,
    ) -> None:
        self.lineage = lineage
        self._training = training
        self._model = model
        self._runner = runner
        self._stop = stop
        self._wait_seconds = wait_seconds
        self._averaging = averaging
        self._copy = copy
        self._advised = False
        self._members: tuple[str, ...] = ()
        self._batcher = self._new_batcher()
        self._owner = f"{model.text.fingerprint.hex()}/lora{model.policy.lora.r}/head"

    @property
    def text(self) -> PolicyText:
        return self._model.text

    def _new_batcher(self) -> MicroBatcher:
        return MicroBatcher(self._training.per_device_train_tokens, first=FIRST_TOKENS)

    @property
    def _memory(self) -> MicroBatcher:
        """How many tokens the present members compute at a time. With another member it is measured
        again."""
        members = self._runner.members()
        if members and members != self._members:
            self._members, self._batcher = members, self._new_batcher()
        return self._batcher

    def statistics(self) -> EngineStatistics:
        device, memory = self._model.placement.device, self._memory.statistics()
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        dtype = str(self._model.placement.dtype).removeprefix("torch.")
        tokens = memory.tokens
        return EngineStatistics(str(device), dtype, peak, tokens, tokens, memory.oom_retries)

    def random_generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    # ---- a step ----------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        """Sample from this node's copy if it is recent enough, else through the stages."""
        copy, stage = self._copy, self._runner.stage
        if prompts and copy is not None and stage is not None:
            step = self._step()
            self._runner.run_soon(copy.follow, stage.layers, step)
            samples = copy.sample(step, prompts, sampling, rng)
            if samples is not None:
                return samples
        return self._through_stages(prompts, sampling, rng)

    def generation(self, sampling: Sampling, rng: torch.Generator) -> Generation:
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
            draw = random.Random(seed)  # the next crew draws the same tokens
            work = lambda head, draw=draw: head.generate(
                encoded, s.num_generations, s.max_tokens, s.temperature, s.top_p, ends, draw
            )
            waves = self._call(self._head(), work)
        tokens = max(len(ids) for wave in waves for ids in wave.ids)
        self._advise((time.monotonic() - began) / tokens)
        size, samples = s.num_generations, [c for wave in waves for c in self._completions(wave)]
        return [
            GroupSample(prompt, samples[size * q : size * (q + 1)])
            for q, prompt in enumerate(encoded)
        ]

    def _completions(self, wave: Wave) -> list[Sampled]:
        return [
            Sampled(
                ids, logprobs, self.text.decode(ids), "eos" if ids[-1] in wave.ends else "length"
            )
            for ids, logprobs in zip(wave.ids, wave.logprobs, strict=True)
        ]

    def _advise(self, token_seconds: float) -> None:
        """Log once that a copy of the policy would be faster."""
        if self._copy is None and token_seconds > SLOW_TOKEN and not self._advised:
            self._advised = True
            log.warning(
                "sampling sends every token through all stages; a node with room can sample from a"
                " copy of the policy",
                latency_seconds=round(token_seconds, 2),
                remedy='stages.policy_copy = "memory"',
            )

    def score(self, rows: Sequence[Row], temperature: float) -> list[Scored]:
        pairs = [(prompt, completion) for prompt, completion, *_ in rows]
        lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
        scored: list[Scored] | None = None if rows else []
        while scored is None:
            head, memory = self._head(), self._memory
            tokens = _micro_batch_tokens(memory, lengths, head.stages)
            largest = memory.cut(lengths, tokens=tokens)
            work = lambda head, tokens=tokens: head.score(pairs, temperature, tokens)
            try:
                scored = self._call(head, work, largest)
            except CannotScore as error:
                if not error.divisible:
                    raise DeviceError(
                        f"a row of {max(lengths)} tokens is too large for a stage's device, set"
                        f" training.max_completion_length lower: {error}"
                    ) from None
                memory.ran_out(largest)
        return scored

    def update(self, rows: Rows, rate: float | None = None) -> UpdateStatistics:
        """Take one step, as `Updater.update`. How far own and peers' gradients agree is not
        measured, since no node has them all."""
        own, external = trained(rows, self._training)
        if not own and not external:
            return UpdateStatistics(stepped=False, skipped="no_signal")
        done = self._learn(rows, own + external, frozenset(), rate)
        if done.stepped or not own or not external:
            # stages do not report whose tokens were effective
            return replace(done, effective_own=None) if external else done
        # a peer's rows may be why no step was taken; stages do not report whose
        refused: dict[int, Outcome] = dict.fromkeys(
            (rows.groups[i] for i in external), "no_gradient"
        )
        return replace(self._learn(rows, own, frozenset(refused), rate), refused=refused)

    def _learn(
        self, rows: Rows, indices: list[int], without: frozenset[int], rate: float | None
    ) -> UpdateStatistics:
        """Take one step with `indices` of the rows. without: groups that the normaliser ignores."""
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
            if step > before:  # the crew that failed had taken this step
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
            if result.refused != TOO_MUCH or not result.divisible:
                skipped = "not_finite" if result.refused == "not_finite" else "refused"
                return UpdateStatistics(stepped=False, skipped=skipped)
            self._memory.ran_out(largest)

    def _update_tokens(self, lengths: Sequence[int], groups: Sequence[int], stages: int) -> int:
        """Return the padded tokens of a micro-batch, so that a step has at most MICRO_BATCHES."""
        memory = self._memory
        tokens = _micro_batch_tokens(memory, lengths, stages)
        while tokens < TOKENS and len(micro_batches(lengths, tokens, groups)) > MICRO_BATCHES:
            tokens *= 2
        memory.tokens = max(memory.tokens, tokens)
        return tokens

    # ---- the present head ------------------------------------------------------------------------

    def _call(self, head: Head, work: Callable[[Head], Awaitable[T]], largest: int = 0) -> T | None:
        """Return the result of `work(head)`, or None if it failed and is to be called again.

        The next head may be of another crew: a failure ends the crew, a refusal only when a stage
        repeats it, see `Head`.

        Args:
            largest: padded tokens of the largest micro-batch; after a timeout there are fewer.

        Raises:
            CannotScore: it is too much for a stage's device.
            EngineGone: the crew's thread has ended.
        """
        try:
            return self._runner.ask(head, work)
        except PeerError as error:
            log.warning("call to the crew failed", error=str(error))
            if isinstance(error, CannotScore) and error.too_much:
                raise
            if isinstance(error, PeerTimeout) and largest:
                self._memory.shrink(largest)
            return None

    def _step(self) -> int:
        """Return the steps that the crew has taken."""
        return self._head().participant.step

    def _head(self) -> Head:
        """Wait for a crew that works and return its head.

        While a crew is being restored there is no bound: a stage of a 7 B model takes half an hour
        over a home's line, and the network process ends crews that make no progress.

        Raises:
            EngineGone: another node is the head, or this node stops.
            PeerTimeout: there was no crew for `wait_seconds` and a minute.
        """
        limit = self._wait_seconds + 60.0
        late = time.monotonic() + limit
        while True:
            head = self._runner.wait(self._runner.head, WAIT_SECONDS)
            if self._runner.leads_no_more(self.lineage):
                raise EngineGone("another node is the head now")
            if head is not None:
                return head
            if self._stop.is_set():
                raise EngineGone("stopping")
            if self._runner.leads() == self.lineage:
                late = time.monotonic() + limit
            elif time.monotonic() > late:
                raise PeerTimeout(
                    f"there was no crew for {limit:.0f} s: see `swarmnode status` and the log"
                    " for the missing stages"
                )

    # ---- between steps ---------------------------------------------------------------------------

    def average(self, connected: bool, step_seconds: float, stepped: bool) -> bool:
        """Return False: each stage averages by itself after a step."""
        return False

    def remember(self, rewarded: Sequence[Row], own: Sequence[Row]) -> None:
        pass

    def observe(self, reward: float) -> None:
        pass

    def facts(self, fresh: bool) -> local.ReplicaFacts | None:
        averaging = self._averaging()
        return averaging.facts(False) if averaging is not None else None

    def averaging(self) -> WeightsReport | None:
        averaging = self._averaging()
        return averaging.report() if averaging is not None else None

    def wait_for_state(self, seconds: float, late: float) -> bool:
        return True

    # ---- across restarts -------------------------------------------------------------------------

    def restore(self, directory: Path, rng: torch.Generator) -> Counters:
        """Return this node's counters as a head: all of them for the same lineage, else only the
        used group numbers. The step is the crew's."""
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
        return state.take_counters(rng, counters, self._owner)


def _micro_batch_tokens(memory: MicroBatcher, lengths: Sequence[int], stages: int) -> int:
    """Return the padded tokens of a micro-batch of rows of these lengths."""
    return min(memory.tokens, max(LEAST_TOKENS, sum(lengths) // (PIECES * stages)))


class MemberPolicy(CrewPolicy):
    """The policy of a crew at another member, which samples from its copy only."""

    def _step(self) -> int:
        stage = self._runner.stage
        if stage is None or not self._runner.averages:
            raise EngineGone("no crew works here")
        return stage.step

    def _through_stages(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        raise EngineGone("no copy is recent enough")


# The stage that this node holds, across crews: weights, optimizer, and a worker for each crew.

HEAD_SECONDS = 120.0
"""A head's call fails when no work arrives for so long, or for four times the longest wait."""


class Meter(Observer):
    """Runs a stage's computations in a thread and measures the time that they take."""

    def __init__(self) -> None:
        self.computing = 0
        """Computations under way."""
        self.waited_share: float | None = None
        """Share of the last step's time in which nothing was computed."""
        self.tokens_per_second: float | None = None
        """In the last step's time."""
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

    def committed(self, worker: StageWorker) -> None:
        now, tokens = time.monotonic(), worker.runtime.tokens
        elapsed = max(now - self._since, 1e-9)
        self.waited_share = max(0.0, 1.0 - self._busy / elapsed)
        self.tokens_per_second = (tokens - self._tokens) / elapsed
        self._busy, self._since, self._tokens = 0.0, now, tokens


class Stage:
    """One stage of one lineage in this process. Its optimizer continues from crew to crew."""

    def __init__(
        self, assigned: Assigned, runtime: StageRuntime, settings: CrewSettings, limits: FrameLimits
    ) -> None:
        self.lineage, self.index, self.layers = assigned.lineage, assigned.stage, assigned.layers
        self.runtime = runtime
        self.meter = Meter()
        self.optimizer = StageOptimizer(runtime, settings.learning_rate)
        self.observers: list[Observer] = [self.meter]
        self.source: str | None = None
        """One of `wire.SOURCES`; None until the stage has its weights."""
        self._settings = settings
        self._limits = limits
        self._first_step = assigned.step
        self._dropped: Counter[str] = Counter()
        self.worker = self._make_worker(assigned, {})

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.worker.participant.step

    def is_of(self, assigned: Assigned) -> bool:
        """Return True if this is the assigned block of layers of the assigned lineage."""
        return (self.lineage, self.index, self.layers) == (
            assigned.lineage,
            assigned.stage,
            assigned.layers,
        )

    def follow(self, assigned: Assigned) -> bool:
        """Continue at the crew's step if these weights are of it or of the step before.

        A stage that is one step behind counts as if it had taken the step. Losing one update of
        one stage costs less than returning all stages to an older step. Call it when the last
        worker has stopped.

        Returns:
            Whether the weights serve the crew. If not, the stage is to be restored.
        """
        if not self.is_of(assigned) or self.source is None:
            return False
        behind = assigned.step - self.step
        if behind not in (0, 1):
            return False
        if behind:
            log.info("stage continues one step behind its crew", step=self.step)
        self.worker.participant.step = assigned.step
        return True

    def copy(self) -> Copy | None:
        """Return what to offer of the weights in memory; None before the first step or restore.

        Weights from elsewhere that have taken no step here count as a neighbour's, so that the
        planner prefers a node that trained them.
        """
        if self.step == 0 or self.source is None:
            return None
        own = self.source in ("", "memory", "checkpoint") or self.step > self._first_step
        spec = self.runtime.spec
        return Copy(
            self.lineage, spec.first, spec.last, self.step, "memory" if own else "neighbour"
        )

    def begin(self, assigned: Assigned, streams: dict[int, trio.abc.Stream]) -> StageWorker:
        """Return a worker for a new crew, with the stage's weights and optimizer. `run` it."""
        self._dropped = Counter(self.dropped())
        self.worker = self._make_worker(assigned, streams)
        for parameter in self.runtime.parameters():
            parameter.grad = None
        self.runtime.sessions.clear()
        return self.worker

    def _make_worker(self, assigned: Assigned, streams: dict[int, trio.abc.Stream]) -> StageWorker:
        place = Place(assigned.crew[:CREW_BYTES], self.index, assigned.step)
        links = Links(self.index, streams, self._limits)
        fence = Fence(place, len(assigned.layers))
        common = (self.runtime, links, fence, self._settings, self.meter, self.optimizer)
        worker = (
            Head(*common, seconds=HEAD_SECONDS, step_seconds=assigned.step_seconds)
            if self.index == 0
            else StageWorker(*common)
        )
        worker.observers = self.observers
        return worker

    def progress(self) -> int:
        """Return a number that grows with each piece of work done."""
        return self.runtime.worked + self.worker.links.frames_received + self.step

    def dropped(self) -> dict[str, int]:
        """Return the frames that were ignored, in all crews, by reason."""
        return dict(self._dropped + self.worker.dropped)

    def load(self) -> int:
        """Return the number of pieces of work in hand.

        Work that waits for a gradient or a slow link does not count: a new trainer would not do
        it sooner.
        """
        return self.meter.computing + self.worker.ready()


# Averaging of one stage (NoLoCo): `trainer.weights` over this stage's tensors, by the names of the
# whole model.
#
# A stage pairs with any stage or whole policy that has a block of layers in common. Corrections
# apply right after a step, when no wave is in flight. A trained tied embedding is not averaged:
# both ends hold it.

CLOCKS = "clocks"


class StageAveraging(Replica, Observer):
    """Averaging of a stage with other crews and whole nodes.

    Create it while the stage has the base weights: payloads are differences to them.

    Args:
        connected: returns True while there is a network process.
        averages: returns True while this stage may be averaged.
    """

    def __init__(
        self,
        cfg: WeightsConfig,
        adapter: LoraShape | None,
        data_dir: Path,
        stage: Stage,
        send: Callable[[local.FromTrainer], None],
        connected: Callable[[], bool] = lambda: True,
        averages: Callable[[], bool] = lambda: True,
    ) -> None:
        self.probe = CrewProbe()
        self._connected = connected
        self._averages = averages
        self._since = time.monotonic()
        tensors, layers = averaged(stage), sum(stage.layers)
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
        """Start averaging: the stage has its weights.

        Args:
            outer: what `tensors` returned with these weights. If it is empty, the slow weights
                are the stage's own, without momentum.

        Raises:
            StateError: `outer` belongs to another stage.
        """
        tensors, counters = dict(outer), self._parts.counters
        clocks = tensors.pop(CLOCKS, None)
        self.restore(tensors)
        counters.outer_clocks = [] if clocks is None else clocks.tolist()
        self.set_counters(counters)  # sets their number to that of the fragments

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what a restart needs: `phi.<name>`, `delta.<name>`, float32, and CLOCKS.

        The tensors never change afterwards. Call it between two steps, in the thread that takes
        them.
        """
        tensors = {n: t for n, t in super().tensors().items() if not n.startswith(UNDO)}
        return {**tensors, CLOCKS: torch.tensor(self._parts.counters.outer_clocks)}

    def committed(self, worker: StageWorker) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._parts.counters.step, self.probe.step_seconds = worker.participant.step, seconds
        if self._averages():  # not after the last step of a suspended crew
            self.between_steps(self._connected(), seconds, stepped=True)
            self.keep()  # only the head sees rewards

    def receive(self, message: local.ToTrainer) -> None:
        """Handle a message of the network process, in the link's thread."""
        if not isinstance(message, local.AdoptState):
            super().receive(message)
        elif message.path:
            # one stage of another crew among stages of ours is not a policy
            clocks = list(self._parts.counters.outer_clocks)
            self._send(local.StateAdopted(message.peer, "local", clocks))

    def refuse(self, message: local.ToTrainer) -> None:
        """Answer that nothing is averaged now.

        Without an answer the network process would wait for minutes and refuse all other
        partners.
        """
        if isinstance(message, local.TakeSnapshot | local.ApplyPayload):
            fragment = message.fragment
            step = self._parts.counters.outer_clocks[fragment]
            self._send(local.ExchangeEnded(message.session, fragment, "", "local", False, step))
        elif isinstance(message, local.WriteState):
            self._send(local.StateWritten("", 0, []))


def averaged(stage: Stage) -> dict[str, torch.nn.Parameter]:
    """Return the averaged parameters of this stage by their names in the whole model."""
    spec, shared = stage.runtime.spec, stage.runtime.embedding()
    return {
        spec.whole(n): p
        for n, p in stage.runtime.model.named_parameters()
        if p.requires_grad and p is not shared
    }


# The probe of an average: does another crew's average make this crew's policy worse?
#
#     here      the newest committed micro-batches through this stage, with own and averaged weights
#     others    both outputs through the stages behind it, by `Run` on the state streams
#     loss      − log-probability of completions better than their group, nats per token; of
#               all completions while there are too few, and KL (`averaging.probe`)
#
# The stage works with its own weights until the verdict arrives. Without a verdict the average is
# rejected.

PROBE_MICRO_BATCHES = 4
"""Most micro-batches in a probe; the newest are taken."""
VERDICT_SECONDS = (120.0, 3.0)
"""Deadline of a verdict: fixed, and for each second that a step takes. A partner waits for six
minutes and eight steps (`weights/exchange.py`)."""


class CrewProbe:
    """The probe of one stage's averages, while there is a crew."""

    def __init__(self) -> None:
        self.step_seconds = 0.0
        """Duration of the last step."""
        self._peer: StatePeer | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    def open(self, peer: StatePeer) -> None:
        """Start to serve, in the crew's thread."""
        self._peer, self._token = peer, trio.lowlevel.current_trio_token()

    def close(self) -> None:
        self._peer = None

    def measure(self, mine: Tensors, mean: Tensors, answer: Answer) -> bool:
        """Start to compare two sets of weights, by their names in the whole model.

        Call it right after a step, in the thread that took it. `answer` is called in the crew's
        thread, with None if there is no verdict.

        Returns:
            False if there are too few completions to judge by; `answer` is not called then.
        """
        peer, token = self._peer, self._token
        if peer is None or token is None:
            return False
        known = _newest(peer)
        rewarded = sum(len(_completions(peer, edge, better=True)) for edge in known) >= LEAST_PROBE
        judged, count = list[tuple[Edge, list[int]]](), 0
        for edge in reversed(known):
            if count < PROBE_SEQUENCES:  # more take minutes of a home's line at 7 B
                judged.append((edge, _completions(peer, edge, better=rewarded)))
                count += len(judged[-1][1])
        if count < LEAST_PROBE:
            return False
        seconds = VERDICT_SECONDS[0] + VERDICT_SECONDS[1] * self.step_seconds

        def begin() -> None:
            work = lambda: _judge(peer, judged, rewarded, mine, mean, answer, seconds)
            if not peer.channel.spawn(work):  # the crew has ended
                answer(None)

        try:
            token.run_sync_soon(begin)
        except trio.RunFinishedError:  # this process ends
            return False
        return True


async def _judge(
    peer: StatePeer,
    known: Sequence[tuple[Edge, list[int]]],
    rewarded: bool,
    mine: Mapping[str, torch.Tensor],
    mean: Mapping[str, torch.Tensor],
    answer: Answer,
    seconds: float,
) -> None:
    """known: micro-batches, each with the completions that count. rewarded: see `compare`."""
    losses = None
    try:
        with trio.move_on_after(seconds):
            as_is, averaged = [
                await peer.channel.compute(partial(_with, peer.stage.runtime, tensors))
                for tensors in (mine, mean)
            ]
            before, after = list[float](), list[float]()
            for edge, chosen in known:
                found = await _logprobs(peer, edge, chosen, as_is)
                try:
                    after += await _logprobs(peer, edge, chosen, averaged)
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


def _newest(peer: StatePeer) -> list[Edge]:
    """Return the newest committed micro-batches as they came to this stage."""
    return list(peer.stage.recorder.edges)[-PROBE_MICRO_BATCHES:]


def _completions(peer: StatePeer, edge: Edge, better: bool) -> list[int]:
    """Return the completions of `edge`; only those with an advantage above zero if `better`."""
    work = work_of(edge, peer.stage.limits)
    if not better:
        return list(range(len(work.completion_lengths)))
    loss = work.loss
    return [] if loss is None else (unpack_logprobs(loss.advantages) > 0).nonzero()[0].tolist()


async def _logprobs(
    peer: StatePeer, edge: Edge, completions: list[int], runtime: StageRuntime
) -> list[float]:
    """Return the log-probabilities of the completions' tokens.

    Raises PeerError: a stage is gone; Incompatible or ValueError: a number is not finite.
    """
    work, spec = work_of(edge, peer.stage.limits), peer.stage.spec
    x = b"" if spec.has_embedding else edge.body
    x = await peer.channel.compute(lambda: run_one(runtime, work, x, peer.stage.codec))
    tokens = sum(work.completion_lengths)
    for stage in range(spec.index + 1, spec.stages):
        x = await peer.fetch.run_at(stage, edge, tokens, x)
    rows = torch.from_numpy(unpack_logprobs(x).copy()).split(list(work.completion_lengths))
    chosen = torch.cat([rows[i] for i in completions] or [torch.zeros(0)])
    if not bool(torch.isfinite(chosen).all()):
        raise ValueError("a log-probability is not finite")
    return list(map(float, chosen))


def _with(runtime: StageRuntime, tensors: Mapping[str, torch.Tensor]) -> StageRuntime:
    """Return the same stage with other values for some weights; it shares the others."""
    local = {str(runtime.spec.local(name)): tensor for name, tensor in tensors.items()}
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


# The model that this node cannot hold alone: tokenizer, costs of its parts, capacity, and one
# stage. Tensors of other stages are read only to hash the files.

TOKENS = 16384
"""Most padded tokens of a micro-batch or wave in any crew."""
WAVES = 4
"""Assumed number of waves under way at a time: as many as stages."""
PROMPT_TOKENS = 64
"""Assumed length of a question, for the size of the caches."""
CROSSINGS_OF_AN_UPDATE = 4
"""To the last stage and back, once for scores and once for gradients."""
SPEED_SIZE = 512
"""Side of the matrices that measure a machine's speed."""
SPEED_SECONDS = 0.1
CHECKPOINT_BYTES = 2 * 3
"""Host memory for each weight of a stage: bfloat16 of the own checkpoint while it is written and of
both ring neighbours' while they arrive."""


@dataclass(frozen=True)
class CrewTerms:
    """Settings that all members of a crew have alike. Nodes with other terms name another model, so
    they never meet."""

    codec: ActivationCodec
    recovery: Literal["copies", "checkfree", "checkfree+"]
    lora: LoraSettings
    frozen_a: bool
    """Adapters have one A everywhere, see `averaging.lora.shares_a`."""
    learning_rate: float

    def hash(self, identity: bytes) -> bytes:
        """Return 32 bytes. identity: fingerprint of architecture and base weights."""
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
    """A model's directory, and what this node knows of the model before it holds a stage."""

    directory: Path
    config: PretrainedConfig
    """transformers'."""
    text: PolicyText
    placement: Placement
    offering: Offering
    pretrained: bool
    """Whether the base model was trained. A stage of an untrained one is no use to a crew that has
    taken steps."""
    policy: PolicyConfig
    terms: CrewTerms

    @property
    def owner(self) -> str:
        return state.owner(self.text.fingerprint, self.terms.lora.r, self.terms.frozen_a)

    def limits(self) -> FrameLimits:
        return FrameLimits(
            hidden=int(self.config.hidden_size), vocab=int(self.config.vocab_size), tokens=TOKENS
        )

    def settings(self) -> CrewSettings:
        terms = self.terms
        factor = 1.0 if terms.recovery == "copies" else LEARNING_RATE_FACTOR
        return CrewSettings(
            base=self.text.fingerprint,
            codec=terms.codec,
            swapped=terms.recovery == "checkfree+",
            learning_rate=terms.learning_rate * factor,
        )

    def build(self, layers: tuple[int, ...], index: int) -> StageRuntime:
        """Load stage `index` with the base model's weights, and an adapter if one is trained.

        Raises:
            ConfigError: the layers are not the model's.
            LocalError: a file is missing or damaged.
        """
        spec = stage_specs(self.config, layers)[index]
        lora = self.terms.lora.r > 0
        dtype = self.placement.dtype if lora else torch.float32
        stage = load_stage(self.directory, spec, dtype=dtype, device=self.placement.device)
        if lora:
            stage = adapt(stage, lora_settings(self.policy))
            if self.terms.frozen_a:
                freeze_a({spec.whole(name): p for name, p in stage.named_parameters()}, A_SEED)
        runtime = StageRuntime(
            spec, stage, dtype=self.placement.dtype, known_logits=self.text.known_logits
        )
        report_layers(stage, runtime.works)
        return runtime


@contextlib.contextmanager
def open_model(
    config: Config, report: Callable[[str], None] = lambda line: None
) -> Iterator[CrewModel]:
    """Open the configured model for use in stages.

    Raises:
        LocalError: the model is missing, is not the swarm's, cannot be split, or is to be trained
            in a way that a crew cannot.
    """
    cfg, terms = config.policy, crew_terms(config)
    check_trainable(cfg, config.training, config.task.names)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    placement = probe(cfg)
    set_up(placement.device)
    with local_directory(cfg, fits=False) as directory:
        hf = offline(cfg, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False))
        check_split(hf)
        pretrained = not is_untrained(directory)
        run = Run(pretrained=pretrained, adapter=terms.lora.r > 0)
        check_paper(terms.recovery, config.stages.stages, run)
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
            context=context_of(hf),
        )
        opened = stored(config.node.data_dir)
        if opened is not None:
            check_model(opened.manifest, text.fingerprint, text.tokenizer_hash)
        cost = cost_of(config, hf, placement)
        memory = stage_room(config, hf, placement, cost)
        offering = Offering(
            terms.hash(text.fingerprint),
            Capacity(memory / HEADROOM, measure_speed(placement)),
            cost,
        )
        report(
            f"{cfg.model} in stages: at most {offering.capacity.memory / 2**30:.2f} GiB here;"
            f" {placement.reason}"
        )
        yield CrewModel(directory, hf, text, placement, offering, pretrained, cfg, terms)


def is_untrained(directory: Path) -> bool:
    """Return True if the weights are as initialised: every norm's scale is exactly one.

    Raises Unavailable for a damaged file.
    """
    try:
        for file in weight_files(directory):
            with safe_open(file, framework="pt") as tensors:
                norms = [name for name in tensors.keys() if name.endswith("norm.weight")]  # noqa: SIM118
                if not all(bool((tensors.get_tensor(name) == 1).all()) for name in norms):
                    return False
    except SafetensorError as error:
        raise Unavailable(f"{directory} is damaged: {error}") from None
    return True


def check_trainable(
    policy: PolicyConfig, training: TrainingConfig, tasks: Sequence[str] = ()
) -> None:
    """Raise Refused for settings that only a whole policy supports.

    Args:
        tasks: Names of the tasks that are trained on.
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
            longest > TOKENS,
            f"a crew computes {TOKENS} tokens at a time, and an answer may have {answer}: set"
            f" training.max_completion_length to {TOKENS - 1024} or lower",
        ),
        (
            rows > MICRO_BATCHES * (TOKENS // longest),
            f"a step of {rows} answers of {answer} tokens is more than {MICRO_BATCHES}"
            f" micro-batches of {TOKENS}: set training.groups_per_step lower",
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


# Memory: what a stage needs and what this node has.


def fits_whole(config: Config, directory: Path, placement: Placement) -> bool:
    """Return True if this node trains the policy by itself.

    Raises DeviceError or ConfigError if it can be trained neither whole nor in stages.
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
    layer = smallest_stage(cost_of(config, hf, placement))
    if layer > room:
        raise DeviceError(f"{reason}, and one layer alone needs {layer / 2**30:.1f} GiB")
    return False


def capacity(config: Config, placement: Placement) -> int | None:
    """Return the bytes for a policy or stage; None if unknown."""
    limit, measured = config.stages.capacity, free_bytes(placement.device)
    if not limit or measured is None:
        return limit or measured
    return min(limit, measured)


def whole_bytes(policy: PolicyConfig, hf: PretrainedConfig, placement: Placement) -> int:
    """Return the bytes to train the whole policy here, without saving and averaging."""
    parameters, edges = count_parameters(hf)
    return needed_bytes(parameters, policy.lora.r * edges, placement.dtype, optim=policy.optim)


def stage_room(
    config: Config, hf: PretrainedConfig, placement: Placement, cost: ModelCost
) -> float:
    """Return the bytes that this node has for a stage, beside a copy of the whole policy.

    Raises DeviceError if that is less than one layer.
    """
    room = capacity(config, placement)
    memory = float(room if room is not None else whole_bytes(config.policy, hf, placement))
    memory = within_host_memory(memory, config, placement)
    if config.stages.policy_copy not in ("memory", "both"):
        return memory
    copy, layer = HEADROOM * copy_memory(config, hf), smallest_stage(cost)
    if memory - copy < layer:
        raise DeviceError(
            f"stages.policy_copy: a copy in memory needs {copy / 2**30:.1f} GiB and one layer to"
            f" train {layer / 2**30:.1f} GiB, and {memory / 2**30:.1f} GiB are here: set it to off"
            " or disk"
        )
    return memory - copy


def within_host_memory(memory: float, config: Config, placement: Placement) -> float:
    """Return `memory` bytes of the device, or less if the machine's own memory has no room for what
    is saved and averaged of a stage of that size."""
    free = free_bytes(torch.device("cpu"))
    if config.policy.lora.r or free is None or placement.device.type == "cpu":
        return memory
    return min(memory, free * TRAINED_BYTES / kept_bytes(config.weights))


def kept_bytes(weights: WeightsConfig) -> int:
    """Return the host bytes for each trained weight beside training: to save, to average, and for
    checkpoints. A stage sees no reward, so it keeps one fragment of what came before an
    exchange."""
    parts, many = weights.fragments, weights.fragments * UNDO_WEIGHTS
    averaging = host_bytes(many, parts if weights.rule != "off" else 0)
    return sum(averaging) // many + CHECKPOINT_BYTES


def copy_memory(config: Config, hf: PretrainedConfig) -> float:
    """Return the bytes of a whole int8 copy to sample from, with its adapter and caches."""
    parameters, edges = count_parameters(hf)
    tokens = cached_tokens(config.training)
    caches = model_cost(hf, batch_tokens=1, cached_tokens=tokens, weight_bytes=0, trained_bytes=0)
    adapter = 4.0 * config.policy.lora.r * edges
    return parameters + adapter + sum(layer.memory for layer in caches.layers)


def cost_of(config: Config, hf: PretrainedConfig, placement: Placement) -> ModelCost:
    """Return what the parts of the model cost in training; on a CPU also to save and average.

    Activations are those of the smallest possible micro-batch, the longest row alone: the head
    halves larger ones that do not fit. Layers keep their input and are recomputed one by one, see
    `StageRuntime`. The bytes between two stages are those of a full micro-batch.
    """
    cfg, rank, kind = config.training, config.policy.lora.r, placement.device.type
    shape, tokens = Shape.of_config(hf.to_dict()), min(cfg.per_device_train_tokens, TOKENS)
    beside = kept_bytes(config.weights) if kind == "cpu" else 0
    cost = model_cost(
        hf,
        batch_tokens=tokens,
        cached_tokens=cached_tokens(cfg),
        weight_bytes=placement.dtype.itemsize if rank else 4,
        trained_bytes=0 if rank else TRAINED_BYTES - 4 + beside,
    )
    method = Method(kind, str(placement.dtype).removeprefix("torch."), rank, checkpointing=True)
    longest = PROMPT_TOKENS + cfg.max_completion_length
    state = 4.0 * shape.hidden * longest  # hidden states from one stage to the next
    gradients = ITEM_BYTES[method.dtype] * (2 * shape.hidden + 3 * shape.intermediate)
    layer = (layer_bytes(shape, method) + gradients) * longest
    # the gradient of a trained embedding or head exists twice while it is added
    table = 0.0 if rank else 4.0 * shape.vocabulary * shape.hidden
    at_once = min(longest, logits_tokens(shape.vocabulary, kind))
    head = 4.0 * shape.vocabulary * LOGITS_COPIES * at_once + table
    # embedding and head are not computed at the same time as a layer
    more = lambda part, size: replace(part, memory=part.memory + max(0.0, size))
    batches = max(1.0, sampled_tokens(cfg) / tokens)
    codecs = (config.stages.codec, gradient_codec(config.stages.codec))
    return replace(
        cost,
        stage=layer + WAVES * state,
        embedding=more(cost.embedding, table - layer),
        layers=tuple(more(part, state) for part in cost.layers),
        head=more(cost.head, head - layer),
        batch_bytes=float(sum(activation_bytes(codec, tokens, shape.hidden) for codec in codecs)),
        batches=batches,
        crossings=(cfg.max_completion_length + CROSSINGS_OF_AN_UPDATE) / batches,
    )


def smallest_stage(cost: ModelCost) -> float:
    """Return the bytes of a stage with one layer, headroom included."""
    return HEADROOM * (cost.stage + cost.layers[0].memory)


def sampled_tokens(cfg: TrainingConfig) -> int:
    """Return the assumed tokens of a step's samples."""
    rows = cfg.groups_per_step * cfg.num_generations
    return rows * (PROMPT_TOKENS + cfg.max_completion_length)


def cached_tokens(cfg: TrainingConfig) -> int:
    """Return the tokens in the caches of a step's samples."""
    return min(sampled_tokens(cfg), WAVES * TOKENS)


def measure_speed(placement: Placement) -> float:
    """Return the floating-point operations per second of a matrix product, to a power of two.

    The rounding makes crews of like machines split alike, so that their stages can be averaged.
    """
    size = SPEED_SIZE
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
