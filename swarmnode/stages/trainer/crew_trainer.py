"""The trainer of a node that holds one stage of a policy.

    CrewTrainer      main thread     entry point: offers this node, leads the training loop as head
    StageRunner      crew's thread   holds the assigned stage, one crew after another
    CrewPolicy       main thread     the engine of the head's training loop
    Stage            crew's thread   weights, optimizer and worker
    StageAveraging   crew's thread   averaging of the stage with other crews
    CrewModel                        tokenizer, memory and costs of the model

`StageRecovery` restores the stage in the crew's thread. The link's thread delivers
messages of the network process.
"""

from __future__ import annotations

import contextlib
import os
import threading

import msgspec
import structlog

from swarmnode.config import Config
from swarmnode.errors import EngineGone
from swarmnode.link.client import Link
from swarmnode.link.messages import Hello
from swarmnode.policy.convert import prepare
from swarmnode.policy.device import devices, probe
from swarmnode.policy.load import config_directory
from swarmnode.process import Progress
from swarmnode.stages.crew_messages import StageAssignment
from swarmnode.stages.specs import stage_memory
from swarmnode.stages.trainer.crew_model import cached_tokens, fits_whole, open_model
from swarmnode.stages.trainer.crew_policy import CrewPolicy
from swarmnode.stages.trainer.policy_copy import PolicyCopy
from swarmnode.stages.trainer.restore import StageRecovery
from swarmnode.stages.trainer.runner import StageRunner
from swarmnode.stages.trainer.stage import Stage
from swarmnode.stages.trainer.stage_averaging import StageAveraging, averaged_parameters
from swarmnode.stages.trainer.stage_checkpoints import recovery_settings
from swarmnode.tasks.client import Scorer
from swarmnode.trainer import state
from swarmnode.trainer.loop import HEAD, Loop, Trainer, check_swarm
from swarmnode.trainer.state import Counters
from swarmnode.weights import local

log = structlog.get_logger("swarmnode.crew")

POLL_INTERVAL = 1.0
"""Interval between checks whether to lead, in seconds."""
REDUCED_OFFER = 0.8
"""After a stage did not fit, this share of its planned memory is offered."""


def make_trainer(config: Config, progress: Progress) -> Trainer | CrewTrainer:
    """Return a trainer of the whole policy if it fits or is configured, else of a stage.

    This reads no weights, but converts a GGUF file that has not been converted yet.

    Raises:
        LocalError: the model does not exist, or neither the policy nor a stage fits.
        ConfigError: the model cannot be split, and `stages.mode` is `always`.
    """
    prepare(config.policy.model, lambda line: report_conversion(line, progress))
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


def report_conversion(line: str, progress: Progress) -> None:
    """Log progress of a conversion, and report it to the supervisor."""
    log.info("policy", detail=line)
    progress(f"loading, {line}")


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
            RestartWanted: the node has moved to another swarm.
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
            )
            stack.callback(self._recovery.close)
            if c.stages.policy_copy in ("memory", "both"):
                exchange = lambda: self._recovery.exchange
                self.policy_copy = PolicyCopy(self._model, exchange, cached_tokens(c.training))
            self._link = Link(
                c.node.data_dir,
                self._greet,
                self._receive_weights,
                lambda message: runner.receive(message),
            )
            runner = self._runner = StageRunner(
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
        """Lead the crew while this node is its head."""
        c, scorer, may_average = self._config, None, False
        with contextlib.ExitStack() as stack:
            while not self._stop.is_set() and not self._runner.finished(c.training.max_steps):
                lineage = self._runner.wait(self._waiting_lineage, POLL_INTERVAL)
                check_swarm(self._link.welcome(0.0), c.swarm.id)
                if (self._active_averaging() is not None) != may_average:
                    may_average = not may_average
                    self._link.send(self._hello())
                if lineage is None:
                    continue
                if scorer is None:
                    self._progress("loading tasks")
                    scorer = stack.enter_context(Scorer())
                try:
                    self._lead(lineage, scorer)
                    return  # the trainer was stopped, or all steps are taken
                except EngineGone as gone:
                    log.info("stopped leading the crew", reason=str(gone))

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
            self._loop = None
            if self.policy_copy is not None:
                self.policy_copy.release()

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
                state.adapter_shape(terms.lora),
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
            memory = min(trainer_offer.memory, REDUCED_OFFER * planned)
            self._trainer_offer = msgspec.structs.replace(trainer_offer, memory=memory)
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
