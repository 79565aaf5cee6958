"""The training loop. It continues without peers and without the network process.

    plan → sample I groups, score, publish → pull J groups, judge them → one update → average →
    save → report

Peers' groups are requested after sampling, so that they are recent. The loop waits for them for at
most a fifth of a second, and requests more once if too many are rejected. Groups that arrive later
are used in the next step.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import structlog

from swarmnode.config import Config
from swarmnode.drops import TrainerDrops
from swarmnode.errors import EngineGone, RestartWanted
from swarmnode.link.client import Link
from swarmnode.link.messages import Hello, Welcome
from swarmnode.pauses import PauseFlag, is_quiet
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row
from swarmnode.policy.trial import try_once
from swarmnode.process import Progress
from swarmnode.rl.split import AdaptiveSplit
from swarmnode.rollouts.trainer.batch import Rows, TrainingGroup, assemble
from swarmnode.rollouts.trainer.judge import Judgement
from swarmnode.swarm import rollback
from swarmnode.swarm.manifest_store import load_current
from swarmnode.tasks.client import Scorer
from swarmnode.trainer.checkpoints import Checkpoints
from swarmnode.trainer.engine import Engine, make_whole_policy, open_policy
from swarmnode.trainer.episodes import check_template
from swarmnode.trainer.evaluate import Evaluation, Size, evaluation_due, forget_other_questions
from swarmnode.trainer.external import ExternalGroups
from swarmnode.trainer.learning import LearningWatch
from swarmnode.trainer.rank_pool import on_device
from swarmnode.trainer.ranks import choose_devices, other_ranks
from swarmnode.trainer.records import Records, held_out_sample, own_sample, peers_samples
from swarmnode.trainer.reporting import (
    Reporter,
    StepResult,
    cut_rewarded_share,
    measures,
    reward_by_task,
    rounded,
)
from swarmnode.trainer.sampler import Experience, Sampler
from swarmnode.trainer.state import SEQUENCE_MARGIN, Counters
from swarmnode.trainer.update import UpdateStatistics
from swarmnode.weights.local import JOIN_SECONDS

log = structlog.get_logger("swarmnode.trainer")

STEP_LINE_SECONDS = 10.0
"""Shortest interval between two lines of the log about steps."""
STOP_SECONDS = 10.0
"""Time after which an evaluation begins no further batch, if the trainer is to stop."""
REST_SECONDS = 1.0
"""Interval between checks of whether a pause is over."""
IDENTITY_SECONDS = 1.0
"""Interval between progress reports while the trainer waits for the node's peer id."""
HEAD = "head"
"""Subdirectory of the trainer's directory with its state as the head of a crew."""


class Trainer:
    """The trainer of a node that holds the whole policy."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._stop = threading.Event()
        self.is_loading = True
        """True while there is nothing to save."""

    def stop(self) -> None:
        """Make `run` finish the step, save and return."""
        self._stop.set()

    def run(self) -> None:
        """Load or restore the policy, then train until `stop` is called or `max_steps` are done.

        Raises:
            LocalError: The model does not exist, does not fit or cannot be trained, or the state on
                disk belongs to another model.
        """
        config = self._config
        opened = load_current(config.node.data_dir)
        devices = choose_devices(config, self._loading)
        policy = open_policy(
            on_device(config, devices, 0).policy,
            opened.manifest if opened is not None else None,
            self._loading,
        )
        directory, alive = config.node.data_dir / "trainer", self._progress.alive
        with other_ranks(config, devices, alive) as make, Scorer(alive=alive) as scorer:
            self._run_trial(policy)
            counters = Counters()
            engine = make_whole_policy(
                config,
                policy,
                counters,
                lambda message: link.send(message),
                alive,
                len(devices),
                make,
            )
            link = Link(config.node.data_dir, lambda: loop.hello(), engine.receive)
            loop = Loop(
                config, engine, link, scorer, counters, directory, self._progress, self._stop
            )
            self.is_loading = False
            with link:
                loop.run()

    def _run_trial(self, policy: Policy) -> None:
        """Run a trial of the policy before training, or read the record of an earlier one.

        Raises:
            LocalError: The policy cannot be trained on this machine.
        """
        report = lambda part: self._progress(f"loading, trying the policy{part}")
        report("")
        cfg, path = self._config, self._config.node.data_dir / "trainer" / "trial.json"
        trial = try_once(
            cfg.policy,
            policy,
            cfg.training,
            path,
            self._progress.alive,
            lambda done, count: report(f", part {done} of {count}"),
        )
        log.info("trial", detail=str(trial))
        for warning in trial.warnings:
            log.warning("trial", detail=warning)

    def _loading(self, line: str) -> None:
        log.info("policy", detail=line)
        self._progress(f"loading policy: {line}")


class Loop:
    """The training loop of one engine.

    Args:
        counters: Initial counters, if there is no saved state.
        directory: Directory of the saved state.
        stop: Set from another thread to end the loop after the step.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        link: Link,
        scorer: Scorer,
        counters: Counters,
        directory: Path,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        """Build the loop and restore its state.

        Raises:
            StateError: The saved state is damaged or belongs to another model.
            Unavailable: The tasks are episodes, and the chat template does not support them.
        """
        training, sharing = config.training, config.sharing
        rng = engine.random_generator(training.seed)
        restored = engine.restore(directory, rng)
        if restored is not None:
            counters = restored
            counters.swarm = config.swarm.id or counters.swarm
            log.info("restored", step=counters.step, policy_version=counters.policy_version)
        counters.model = config.policy.model
        skip_used_numbers(counters, config.node.data_dir / "trainer")
        self._training = training
        self._engine = engine
        self._counters = counters
        self._oom_before = counters.oom_retries_total
        self._split = AdaptiveSplit(
            training.groups_per_step, counters.useful_per_step, shares=sharing.enabled
        )
        self._identity = Identity(link, counters, config.swarm.id)
        self._link = link
        self._lost_messages = 0
        check_template(engine.text, scorer, config.task.names)
        self._drops = drops = TrainerDrops()
        self._sampler = Sampler(training, config.task.names, engine, scorer, rng, counters, drops)
        self._external = ExternalGroups(
            link,
            engine,
            self._split,
            sharing,
            training.temperature,
            drops.external,
            scorer.score_many,
        )
        self._learning = LearningWatch(config)
        self._evaluation = Evaluation(config.task, training, scorer, drops.held_out)
        forget_other_questions(counters, self._evaluation.questions)
        self._checkpoints = Checkpoints(
            directory,
            training.save_every,
            engine,
            rng,
            counters,
            on_end=lambda: self._reporter.state_written(),
        )
        self._reporter = Reporter(progress, link, engine, scorer, self._checkpoints, counters)
        self._reporter.last = msgspec.structs.replace(
            self._reporter.last, max_steps=training.max_steps
        )
        self._unlogged: list[float] = []
        """Rewards of the steps since the last line of the log about steps."""
        self._next_line = float("-inf")
        self._records = Records(config.node.data_dir)
        self._pauses = Pauses(
            config.node.quiet_hours, PauseFlag(config.node.data_dir), training.step_interval, stop
        )

    def run(self) -> None:
        """Train until `stop` is set or `max_steps` are done. The link must be running.

        Raises:
            EngineGone: The engine cannot continue.
            RestartWanted: The node has moved to another swarm.
        """
        with self._checkpoints, closing(self._records):
            self._reporter.enter("loading")
            if not self._wait_for_identity():
                return
            try:
                self._train()
            except (EngineGone, RestartWanted):
                self._checkpoints.save(last=True)
                raise
            self._reporter.enter("draining")
            self._checkpoints.finish(lambda: self._reporter.alive("draining"))
            self._reporter.flush(2.0)

    def _train(self) -> None:
        self._wait_while_paused()
        if (
            self._fresh or self._counters.reward_held_out_start is None
        ) and not self._pauses.stop.is_set():
            self._evaluate()
        self._join()
        self._learning.start(self._fresh)
        while not self._finished() and self._wait_while_paused():
            started = time.monotonic()
            self.step()
            if self._pauses.stop.is_set():
                break
            self._average()
            size = evaluation_due(self._training, self._counters)
            if size and not self._finished():
                self._evaluate(size)
            self._checkpoints.save()
            self._pauses.until_next_step(started, self._reporter)
        if self._counters.step and self._counters.reward_held_out_step != self._counters.step:
            self._evaluate("small" if self._pauses.stop.is_set() else "full")

    def _wait_while_paused(self) -> bool:
        """Wait while the trainer is paused, and save the state. Return False if the trainer must
        stop."""
        rested = False
        while not self._pauses.stop.is_set() and (reasons := self._pauses.reasons()):
            rested = True
            self._pauses.rest(reasons, self._reporter)
            if self._checkpoints.saved_step != self._counters.step:
                self._checkpoints.save()
        if rested and not self._pauses.stop.is_set():
            log.info("resumed")
        return not self._pauses.stop.is_set()

    def hello(self) -> Hello:
        text = self._engine.text
        return Hello(
            model=text.fingerprint,
            tokenizer=text.tokenizer_hash,
            policy_version=self._counters.policy_version,
            tokens_per_text_byte=text.tokens_per_text_byte,
            pid=os.getpid(),
            replica=self._engine.facts(self._fresh),
        )

    # ---- start -----------------------------------------------------------------------------------

    def _wait_for_identity(self) -> bool:
        """Wait for the node's peer id, from which its questions are derived. The network process
        holds it.

        Returns:
            True as soon as the peer id is known, at once if it is known from an earlier run; False
            if the trainer must stop.
        """
        while not self._identity.adopt(IDENTITY_SECONDS):
            if self._counters.peer:
                return True
            if self._pauses.stop.is_set():
                return False
            self._reporter.alive("loading, waiting for the network process")
        return True

    def _join(self) -> None:
        """Wait up to JOIN_SECONDS for the state of a neighbour, if this node is untrained; longer
        if a state has been announced."""
        if not self._fresh:
            return
        late = time.monotonic() + JOIN_SECONDS
        self._reporter.show("asking neighbours for their state")
        while not self._pauses.stop.is_set() and not self._engine.wait_for_state(0.2, late):
            self._reporter.alive("loading, asking neighbours for their state")
            self._average(stepped=False)
        if self._average(stepped=False) and self._counters.step == 0:
            self._evaluate()

    @property
    def _fresh(self) -> bool:
        return self._counters.step == 0 and not any(self._counters.outer_clocks)

    def _finished(self) -> bool:
        return bool(self._training.max_steps) and self._counters.step >= self._training.max_steps

    # ---- one step --------------------------------------------------------------------------------

    def step(self) -> None:
        """Train once on own groups and peers' groups, each with G completions of one question."""
        started = time.monotonic()
        self._identity.adopt()

        # sample I groups and score them
        self._reporter.enter("generating")
        experience = self._sampler(self._split.own_groups)
        own = [row for group in experience.groups for row in group.rows]
        self._engine.remember([row for group in experience.groups for row in best_rows(group)], own)
        sampled = time.monotonic()

        # publish them, pull groups of peers, and judge these until J are accepted
        self._reporter.enter("training")
        self._external.publish(experience.messages)
        judgement = self._external.pull(self._counters.policy_version)

        # advantages (N,) and log-probabilities (N, T) of all N completions, one loss, one step
        fresh = [*experience.trained, *judgement.accepted]
        rows = self._rows(fresh)
        result = self._engine.update(rows)

        judgement.details.update(result.details)
        first = len(experience.trained)
        refused = {group - first: why for group, why in result.refused.items()}
        external = self._external.learnt(judgement, refused)
        self._counters.useful_per_step = self._split.smoothed
        self._count(experience, external, rows, result)
        done = StepResult(experience, external, result, started, sampled, time.monotonic())
        self._report(done, judgement)

    def _rows(self, groups: Sequence[TrainingGroup]) -> Rows:
        """Compute the advantages of all groups, and assemble their rows."""
        training = self._training
        return assemble(
            groups,
            training.advantage,
            mask_cut="mask_truncated" in training.options,
            per_sequence=training.loss_type == "grpo",
        )

    def _count(
        self,
        experience: Experience,
        external: list[TrainingGroup],
        rows: Rows,
        result: UpdateStatistics,
    ) -> None:
        c = self._counters
        c.step += 1
        c.policy_version += int(result.stepped)
        c.own_groups_total += len(experience.groups)
        c.external_groups_total += len(external)
        c.tokens_total += experience.tokens
        c.episodes_total += experience.played.episodes
        for group in external:
            c.note_use(group.peer)
        now = self._engine.statistics()
        c.oom_retries_total = self._oom_before + now.oom_retries
        drops = self._drops
        if result.stepped:
            drops.update.keep()
        else:
            drops.update.drop(result.skipped, step=c.step)
        drops.completion.keep(len(rows.rows) - len(rows.masked) - result.dropped_rows)
        drops.completion.drop("too_large", result.dropped_rows)
        drops.completion.drop("cut", len(rows.masked))
        lost = self._link.statistics().dropped_frames
        drops.message.drop("link_full", lost - self._lost_messages)
        self._lost_messages = lost

    def _report(self, done: StepResult, judgement: Judgement) -> None:
        """Report the step, and write measurements and samples to disk."""
        former = self._reporter.last.reward_by_task
        measured = measures(done)
        learning = self._learning.observe(
            [statistics.fmean(group.rewards) for group in done.experience.groups],
            measured["completion_cut_share"],
            done.update.entropy,
            done.update.stepped,
        )
        if learning.kind not in ("", self._reporter.last.learning):
            log.warning("learning", problem=learning.kind, detail=learning.text)
        self._reporter.last = msgspec.structs.replace(
            self._reporter.last,
            **measured,
            cut_rewarded_share=None
            if "mask_truncated" in self._training.options
            else cut_rewarded_share(done.experience.groups),
            reward_by_task=former | reward_by_task(done.experience.messages),
            learning=learning.kind,
            learning_problem=learning.text,
            drops=self._drops.statistics(),
        )
        self._reporter.enter("training", done.ended - done.started)
        last, now = self._reporter.last, time.time()
        self._records.step(now, last)
        for sample in peers_samples(now, last.step, judgement):
            self._records.sample(sample)
        if (made := done.experience).messages:
            self._records.sample(
                own_sample(now, last.step, made.prompts[0], made.messages[0], made.observations[0])
            )
        self._log_step()

    def _log_step(self) -> None:
        """Log the last step and the mean reward since the last line, at most once per
        STEP_LINE_SECONDS. steps.jsonl has all steps."""
        last, now = self._reporter.last, time.monotonic()
        if last.reward_own is not None:
            self._unlogged.append(last.reward_own)
        if now < self._next_line:
            return
        reward = statistics.fmean(self._unlogged) if self._unlogged else None
        self._next_line, self._unlogged = now + STEP_LINE_SECONDS, []
        # It fits a terminal of 80 columns.
        log.info(
            "step",
            step=last.step,
            reward=rounded(reward, 3),
            own=last.own_groups,
            peers=last.external_groups,
            seconds=rounded(last.step_seconds, 2),
        )

    # ---- between steps ---------------------------------------------------------------------------

    def _average(self, stepped: bool = True) -> bool:
        """Process averaging with other replicas; return True if the policy has changed."""
        return self._engine.average(
            self._reporter.connected, self._reporter.last.step_seconds or 0.0, stepped
        )

    def _evaluate(self, size: Size = "full") -> None:
        c, stop, late = self._counters, self._pauses.stop, time.monotonic() + STOP_SECONDS
        phase = "draining" if stop.is_set() else "evaluating"
        self._reporter.enter(phase)
        held_out = self._evaluation(
            self._engine,
            c,
            size,
            lambda done, count: self._reporter.show(f"evaluating {done} of {count}"),
            lambda: stop.is_set() and time.monotonic() > late,
        )
        if held_out is not None:
            reward = held_out.reward
            c.reward_held_out, c.reward_held_out_error = reward, held_out.error
            c.reward_held_out_step = c.step
            if c.reward_held_out_start is None:
                c.reward_held_out_start, c.reward_held_out_start_error = reward, held_out.error
            self._records.sample(held_out_sample(time.time(), c, held_out))
            error = rounded(held_out.error, 4)
            log.info("held out", step=c.step, reward=round(reward, 4), error=error)
        self._reporter.enter(phase)  # again, with the measurements


def skip_used_numbers(counters: Counters, trainer: Path) -> None:
    """Continue the group numbers and policy versions after all that this node may have used.

    A node is one peer with one series of numbers, whether it trains the whole policy, is the head
    of a crew, or trains beside a stage.
    """
    known = [*rollback.used_counters(trainer), *rollback.used_counters(trainer / HEAD)]
    if known:
        counters.sequence = (
            max([counters.sequence, *(numbers.sequence for numbers in known)]) + SEQUENCE_MARGIN
        )
        counters.policy_version = max(
            [counters.policy_version, *(numbers.policy_version for numbers in known)]
        )


def best_rows(group: TrainingGroup) -> list[Row]:
    """Return the completions with the highest reward of the group; none if all rewards are
    equal."""
    best = max(group.rewards)
    return (
        [row for row, reward in zip(group.rows, group.rewards, strict=True) if reward == best]
        if best > min(group.rewards)
        else []
    )


def check_swarm(welcome: Welcome | None, configured: str) -> None:
    """Compare the swarm of the network process, if it is known, with the configured one.

    Args:
        configured: Swarm id, hex; empty if none is configured.

    Raises:
        RestartWanted: The node has moved to another swarm.
    """
    if welcome is not None and configured and welcome.swarm.hex() != configured:
        raise RestartWanted("the node has moved to another swarm")


class Identity:
    """The node's peer id and swarm id, from which its questions are derived.

    Args:
        swarm: Configured swarm id, hex; empty if none is configured.
    """

    def __init__(self, link: Link, counters: Counters, swarm: str) -> None:
        self._link = link
        self._counters = counters
        self._swarm = swarm

    def adopt(self, seconds: float = 0.0) -> bool:
        """Copy the ids that the network process has sent into the counters, waiting up to
        `seconds`; return False if it has not sent them.

        Raises:
            RestartWanted: The node has moved to another swarm.
        """
        welcome = self._link.welcome(seconds)
        if welcome is None:
            return False
        check_swarm(welcome, self._swarm)
        self._counters.peer, self._counters.swarm = welcome.peer, welcome.swarm.hex()
        return True


class Pauses:
    """Pauses of the training loop.

    Args:
        quiet_hours: Hours without training, see `node.quiet_hours`.
        is_paused: Returns True while the operator has paused the node.
        step_interval: Least time between the starts of two steps, in seconds.
        stop: Event that ends every wait.
    """

    def __init__(
        self,
        quiet_hours: str,
        is_paused: Callable[[], bool],
        step_interval: float,
        stop: threading.Event,
    ) -> None:
        self.stop = stop
        self._quiet_hours = quiet_hours
        self._is_paused = is_paused
        self._step_interval = step_interval

    def reasons(self) -> Sequence[str]:
        """Return the present reasons to pause; none if the trainer may continue."""
        now = time.localtime()
        quiet = is_quiet(self._quiet_hours, now.tm_hour * 60 + now.tm_min)
        return [*(["quiet_hours"] if quiet else []), *(["owner"] if self._is_paused() else [])]

    def rest(self, reasons: Sequence[str], reporter: Reporter) -> None:
        """Wait REST_SECONDS. The model stays loaded."""
        if reporter.last.phase != "paused":
            log.info("paused", reasons=list(reasons))
            reporter.enter("paused")
        reporter.alive("paused")
        self.stop.wait(REST_SECONDS)

    def until_next_step(self, started: float, reporter: Reporter) -> None:
        """Wait until the interval since the step `started` is over."""
        while (
            not self.stop.is_set()
            and (left := started + self._step_interval - time.monotonic()) > 0
        ):
            self.stop.wait(min(left, 5.0))
            reporter.alive("paused")
