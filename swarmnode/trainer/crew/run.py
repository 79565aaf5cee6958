"""A trainer whose policy does not fit it: offers itself to a crew, holds the stage that it is
given, and trains when that is the first.

main thread      waits; as the head it runs the loop that a whole policy runs, over a `CrewPolicy`
crew's thread    `StageRunner`: the stage, its streams, its recovery
link's thread    what the network process says goes to both
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace

import msgspec
import structlog

from swarmnode.config import Config
from swarmnode.crew import local as stages
from swarmnode.crew.local import Assigned
from swarmnode.crew.plan import stage_memory
from swarmnode.errors import EngineGone, LocalError
from swarmnode.link.client import Link
from swarmnode.link.messages import Hello
from swarmnode.pauses import Told
from swarmnode.policy.device import probe
from swarmnode.policy.load import config_directory
from swarmnode.process import Progress
from swarmnode.swarm.manifest import members_choose
from swarmnode.swarm.manifest_store import stored
from swarmnode.tasks.client import Scorer
from swarmnode.trainer.crew.average import StageAveraging, averaged
from swarmnode.trainer.crew.copies import WholeCopy
from swarmnode.trainer.crew.model import cached_tokens, crew_terms, fits_whole, open_model
from swarmnode.trainer.crew.policy import CrewPolicy
from swarmnode.trainer.crew.recovery import StageRecovery, recovery_settings
from swarmnode.trainer.crew.runner import StageRunner
from swarmnode.trainer.crew.sampling import MemberPolicy, MemberSampler
from swarmnode.trainer.crew.stage import Stage
from swarmnode.trainer.engine import adapter_shape
from swarmnode.trainer.loop import HEAD, Identity, Loop, Pauses, Trainer
from swarmnode.trainer.questions import Questions
from swarmnode.trainer.state import Counters
from swarmnode.weights import local

log = structlog.get_logger("swarmnode.crew")

POLL_INTERVAL = 1.0
LESS = 0.8
"""This share of what a stage that did not fit should have needed is offered from then on."""


def make_trainer(config: Config, progress: Progress) -> Trainer | CrewTrainer:
    """Whole where the policy fits, or is to be; else in a crew. Reads no weights. Raises
    LocalError, ConfigError."""
    if config.stages.mode == "off":
        return Trainer(config, progress)
    with config_directory(config.policy) as directory:
        whole = fits_whole(
            config.policy,
            config.stages,
            config.training,
            config.weights,
            directory,
            probe(config.policy),
        )
    return Trainer(config, progress) if whole else CrewTrainer(config, progress)


class CrewTrainer:
    """`run` returns when `stop` was called, or `max_steps` are done in the crew and its head has
    ended, or goes on."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._stop = threading.Event()
        self._loop: Loop | None = None
        self._averaging: StageAveraging | None = None
        self.copy: WholeCopy | None = None
        """What this node samples from; None where it is to go through the stages."""
        self._beside: MemberSampler | None = None
        self._engine: CrewPolicy | None = None
        """The last crew's that this node led: of the same lineage it goes on with what it knows of
        its members."""

    def stop(self) -> None:
        """Finish what is under way, save and leave."""
        self._stop.set()

    def run(self) -> None:
        """Raises LocalError: the model does not exist or cannot be held in stages; DeviceError: a
        stage does not fit."""
        with contextlib.ExitStack() as stack:
            c = self._config
            terms = crew_terms(c.stages, c.policy.lora, c.weights, c.training)
            self._model = stack.enter_context(
                open_model(
                    c.policy, c.stages, c.training, c.weights, terms, c.node.data_dir, self._loading
                )
            )
            settings = recovery_settings(c.stages, self._model.run)
            directory = c.node.data_dir / "trainer"
            more: Callable[[int], dict[str, int]] = lambda step: (
                self.copy.facts(step) if self.copy is not None else {}
            )
            self._recovery = StageRecovery(
                directory, settings, self._model, lambda: self._averaging, self._seek, more
            )
            if c.stages.keep_policy in ("memory", "both"):
                self.copy = WholeCopy(
                    self._model, lambda: self._recovery.peer, cached_tokens(c.training)
                )
            self._link = Link(
                self._config.node.data_dir, self._hello, self._about_weights, self._about_crew
            )
            self._offering = self._model.offering
            self._runner = StageRunner(
                self._build,
                self._recovery,
                self._link.send,
                self._progress,
                self._built,
                self._lacked,
                self._offer,
            )
            stack.callback(self._recovery.close)
            stack.enter_context(self._link)
            self._runner.thread.start()
            stack.callback(self._runner.thread.stop)
            self._wait_and_lead()
            self._link.flush(2.0)

    def _loading(self, line: str) -> None:
        log.info("policy", detail=line)
        self._progress("loading policy")

    def _wait_and_lead(self) -> None:
        scorer: Scorer | None = None
        rests = Pauses(
            self._config.node.quiet_hours, Told(self._config.node.data_dir), 0.0, self._stop
        ).reasons
        with contextlib.ExitStack() as stack:
            averages = False
            while not self._stop.is_set() and not self._runner.finished(
                self._config.training.max_steps
            ):
                crew = self._runner.wait(self._leads, POLL_INTERVAL)
                if (self._averages() is not None) != averages:
                    averages = not averages
                    self._link.send(self._hello_now())
                if crew is None and (not self._may_sample() or rests()):
                    continue
                try:
                    if scorer is None:
                        self._progress("loading tasks")
                        scorer = stack.enter_context(Scorer())
                    if crew is None:
                        self._sample(scorer)
                        continue
                    self._lead(crew, scorer)
                    # it was to stop, or has taken all its steps: steps in which there was nothing
                    # to learn are none of the crew's
                    return
                except EngineGone as gone:
                    log.info(
                        "not the head any more" if crew is not None else "nothing is sampled",
                        reason=str(gone),
                    )
                except (LocalError, OSError) as error:
                    if crew is not None or self.copy is None:
                        raise
                    log.warning("the copy is given up, the stage is not", error=str(error))
                    self.copy.release()
                    self.copy = self._beside = self._engine = None

    def _leads(self) -> bytes | None:
        """The crew that waits for us to begin."""
        return self._runner.leads() if self._runner.head() is not None else None

    def _lead(self, crew: bytes, scorer: Scorer) -> None:
        """The loop, as long as this node is the head of `crew`."""
        engine = self._engine
        if engine is None or engine.lineage != crew:
            engine = self._engine = CrewPolicy(
                self._config.training,
                self._model,
                self._runner,
                crew,
                self._stop,
                self._config.stages.wait_seconds,
                self._averages,
                self.copy,
            )
        directory = self._config.node.data_dir / "trainer" / HEAD
        self._loop = Loop(
            self._config,
            engine,
            self._link,
            scorer,
            Counters(),
            directory,
            self._progress,
            self._stop,
        )
        self._link.send(self._hello_now())
        try:
            self._loop.run(self._config.weights.join_seconds)
        finally:
            self._loop = self._beside = None
            if self.copy is not None:
                self.copy.release()

    def _may_sample(self) -> bool:
        """Whether another leads a crew that works, and samples of ours can get to it."""
        return (
            self.copy is not None
            and self._config.sharing.enabled
            and self._runner.averages
            and self._runner.leads() is None
        )

    def _sample(self, scorer: Scorer) -> None:
        """Once in each step of the crew, from our copy. Raises EngineGone, LocalError, OSError."""
        c, stage = self._config, self._runner.stage
        if stage is None or self.copy is None:
            return
        if self._beside is None or self._beside.lineage != stage.lineage:
            if self._beside is not None:
                self.copy.release()  # it may be of as many steps of the other one
            engine = MemberPolicy(
                c.training,
                self._model,
                self._runner,
                stage.lineage,
                self._stop,
                0.0,
                copy=self.copy,
            )
            choose = members_choose(stored(c.node.data_dir), c.task.names, c.training.options)
            self._beside = MemberSampler(
                stage.lineage,
                engine,
                c.training,
                lambda counters: Questions(
                    c.task.names, counters, choose, "curriculum" in c.training.options
                ),
                lambda counters: Identity(self._link, counters, c.swarm.id),
                self._link,
                scorer,
                c.node.data_dir / "trainer",
            )
        self._beside.sample(stage)

    # ---- the stage -------------------------------------------------------------------------------

    def _build(self, assigned: Assigned) -> Stage:
        # and with it, the stage before: there may be no room for two
        if self._averaging is not None:
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
        """It has its weights: from here on it averages."""
        if self._averaging is not None:
            self._averaging.begin(self._recovery.outer)
            # before whoever keeps copies of what it makes
            stage.observers.insert(1, self._averaging)
        self._recovery.outer = {}  # averaging has its own copies

    def _lacked(self, assigned: Assigned) -> None:
        """It was planned for this node, and does not fit. From now on less is offered, or the same
        would be planned again."""
        offering = self._offering
        if sum(assigned.layers) == len(offering.cost.layers):
            memory = min(
                offering.capacity.memory,
                LESS * stage_memory(offering.cost, assigned.layers, assigned.stage),
            )
            self._offering = msgspec.structs.replace(
                offering, capacity=replace(offering.capacity, memory=memory)
            )
            log.warning("less is offered", gib=round(memory / 2**30, 2))

    # ---- the link --------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        """What a new connection begins with."""
        status = self._runner.status()
        if status is not None:
            self._link.send(status)
        else:
            self._offer(self._runner.stage)
        return self._hello_now()

    def _offer(self, stage: Stage | None) -> None:
        """This node works in no crew, and this much is here."""
        copy = stage.copy() if stage is not None else None
        copies = (*([copy] if copy is not None else []), *self._recovery.copies())
        self._link.send(msgspec.structs.replace(self._offering, copies=copies))

    def _hello_now(self) -> Hello:
        loop = self._loop
        if loop is not None:
            return loop.hello()
        text, stage, averaging = self._model.text, self._runner.stage, self._averages()
        return Hello(
            model=text.fingerprint,
            tokenizer=text.tokenizer_hash,
            policy_version=stage.step if stage is not None else 0,
            tokens_per_text_byte=text.tokens_per_text_byte,
            pid=os.getpid(),
            replica=averaging.facts() if averaging is not None else None,
        )

    def _seek(self) -> None:
        """The stage looks for its state in other crews: it averages with nobody, but has to be
        known to whoever could give it."""
        if self._averaging is not None:
            self._link.send(
                msgspec.structs.replace(self._hello_now(), replica=self._averaging.facts())
            )

    def _averages(self) -> StageAveraging | None:
        """Nobody else's weights are mixed with those of a stage that has not shown what it is."""
        return self._averaging if self._runner.active else None

    def _about_weights(self, message: local.ToTrainer) -> None:
        averaging = self._averaging
        gives = isinstance(message, local.TakeSnapshot | local.WriteState)
        if averaging is None:
            return
        if isinstance(message, local.AdoptState) or (
            self._runner.active and (self._runner.averages or not gives)
        ):
            averaging.receive(message)
        else:  # nothing is given away; what is under way may end
            averaging.refuse(message)

    def _about_crew(self, message: stages.ToTrainer) -> None:
        self._runner.receive(message)
