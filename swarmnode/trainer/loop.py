"""The trainer process: sample, share, learn, save; one step after the other, whatever the network does.

    split → ask the network for J groups → sample I groups, score, publish → judge the J → one update → save → report

The network process is asked at the start of a step and its answer taken at the end of sampling, so a step never waits
for it. What arrives late is there for the next step.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import psutil
import structlog

from swarmnode.config import Config
from swarmnode.errors import LocalError
from swarmnode.link.client import Link
from swarmnode.link.messages import Hello, Report
from swarmnode.policy.logprobs import Row
from swarmnode.process import Progress
from swarmnode.quiet_hours import is_quiet
from swarmnode.rl.split import OWN_SHARE, AdaptiveSplit, floor_groups
from swarmnode.rl.utility import UtilityGuard
from swarmnode.rollouts.groups import ExternalGroup, Judged
from swarmnode.tasks.client import Scorer
from swarmnode.trainer import state
from swarmnode.trainer.batch import Judgement, Rows, TrainingGroup, assemble, judge
from swarmnode.trainer.engine import Engine, EngineGone, WholePolicy, open_policy
from swarmnode.trainer.evaluate import Evaluation
from swarmnode.trainer.pace import fitted
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import SEQUENCE_MARGIN, Counters, Saver
from swarmnode.trainer.update import UpdateStatistics

log = structlog.get_logger("swarmnode.trainer")

ANSWER_SECONDS = 0.05
"""How long a step waits for groups that the network process has but has not handed over yet."""
REST_SECONDS = 5.0
"""Between two looks at the clock in quiet hours."""
IDENTITY_SECONDS = 1.0
"""Between two signs of progress while the network process has not said who we are."""
COMPLAIN_SECONDS = 30.0
"""Between two complaints that the state cannot be saved."""
HEAD = "head"
"""Below the trainer's directory: what it was as a crew's head."""


class Trainer:
    """A whole policy and everything that changes it. `run` returns when `stop` was called or `max_steps` are done."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._stop = threading.Event()

    def stop(self) -> None:
        """Finish the step, save and leave."""
        self._stop.set()

    def run(self) -> None:
        """Load or restore the policy, then train.

        Raises:
            LocalError: the model does not exist or fit, or the state on disk is another model's.
        """

        def say(line: str) -> None:
            log.info("policy", detail=line)
            self._progress("loading policy")

        counters = Counters()
        engine = WholePolicy(self._config, open_policy(self._config, say), counters, lambda message: link.send(message))
        link = Link(self._config.node.data_dir, lambda: loop.hello(), engine.receive)
        loop = Loop(self._config, self._progress, self._stop, engine, link, counters, self._config.node.data_dir / "trainer")
        with Scorer() as scorer, link:
            loop.run(scorer)


class Loop:
    """Sample, share, learn, save, with an engine. Takes back what is in `directory`, if anything is. Raises StateError where it cannot."""

    def __init__(
        self, config: Config, progress: Progress, stop: threading.Event, engine: Engine, link: Link, counters: Counters, directory: Path
    ) -> None:  # fmt: skip
        self._config = config
        self._cfg = config.training
        self._progress = progress
        self._stop = stop
        self._engine = engine
        self._link = link
        self._counters = counters
        self._directory = directory
        self._backlog: list[ExternalGroup] = []
        self._report = Report(phase="loading")
        self._complain_at = float("-inf")
        self._rng = engine.random_generator(self._cfg.seed)
        self._restore()

    def run(self, scorer: Scorer) -> None:
        """Until `stop` or `max_steps`. The link has been entered. Raises EngineGone."""
        self._scorer = scorer
        self._saver = Saver(self._directory)
        try:
            self._say("loading")
            if not self._wait_for_identity():
                return
            self._progress("loading evaluation")
            self._evaluation = Evaluation(self._config.task, self._cfg, self._scorer)
            self._sampler = Sampler(self._config, self._engine, self._scorer, self._rng, self._counters)
            if self._counters.reward_held_out_start is None:
                self._evaluate()
            self._join()
            while not self._stop.is_set() and not self._finished():
                if self._rested():
                    continue
                started = time.monotonic()
                self._step()
                self._average()
                if self._counters.step % self._cfg.eval_every == 0:
                    self._evaluate()
                self._save()
                self._pace(started)
            self._say("draining")
            self._save(last=True)
            self._link.flush(2.0)
        except EngineGone:
            self._save(last=True)
            raise
        finally:
            self._saver.close()

    def hello(self) -> Hello:
        text = self._engine.text
        return Hello(
            model=text.fingerprint, tokenizer=text.tokenizer_hash, policy_version=self._counters.policy_version,
            vocab_size=text.vocab_size, pid=os.getpid(), replica=self._engine.facts(self._fresh),
        )  # fmt: skip

    # ---- start --------------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        restored = self._engine.restore(self._directory, self._rng)
        if restored is not None:
            self._counters = restored
            self._counters.swarm = self._config.swarm.id or restored.swarm
            log.info("restored", step=restored.step, policy_version=restored.policy_version)
        top = self._config.node.data_dir / "trainer"  # as a whole node and as a crew's head it is one peer with one series of numbers
        used = state.used_sequences(top, top / HEAD)
        if restored is not None or used:
            self._counters.sequence = max(self._counters.sequence, used) + SEQUENCE_MARGIN
        self._oom_before = self._counters.oom_retries_total
        self._guard = UtilityGuard(external_scale=self._counters.external_scale)
        before = self._counters.groups_per_step or self._cfg.groups_per_step
        self._batch = fitted(before, 0.0, self._cfg.target_step_seconds, self._cfg.groups_per_step)
        batch = self._cfg.groups_per_step
        self._split = AdaptiveSplit(batch, floor_groups(batch, OWN_SHARE), smoothed=self._counters.useful_per_step, share=OWN_SHARE)
        self._split.resize(self._groups)

    def _join(self) -> None:
        """A node that has learnt nothing yet would rather start where its neighbours are; nobody waits for longer than configured."""
        if not self._fresh:
            return
        late = time.monotonic() + self._config.weights.join_seconds
        while not self._stop.is_set() and time.monotonic() < late and not self._engine.wait_for_state(0.2):
            self._progress("loading, asking neighbours for their state")
            self._average(stepped=False)
        if self._average(stepped=False) and self._counters.step == 0:
            self._evaluate()

    @property
    def _fresh(self) -> bool:
        return self._counters.step == 0 and not any(self._counters.outer_clocks)

    def _average(self, stepped: bool = True) -> bool:
        """Outer steps, and whatever the network process has said about them. Whether the policy has changed."""
        return self._engine.average(self._link.statistics().connected, self._report.step_seconds or 0.0, stepped)

    def _wait_for_identity(self) -> bool:
        """Our questions follow from the node's peer id, which the network process holds. Known from an earlier run, nobody waits."""
        while not self._adopt_identity(IDENTITY_SECONDS):
            if self._counters.peer:
                return True
            if self._stop.is_set():
                return False
            self._progress("loading, waiting for the network process")
        return True

    def _adopt_identity(self, seconds: float) -> bool:
        welcome = self._link.welcome(seconds)
        if welcome is None:
            return False
        if self._config.swarm.id and welcome.swarm.hex() != self._config.swarm.id:
            raise LocalError("the node has moved to another swarm; starting again with its manifest")
        self._counters.peer, self._counters.swarm = welcome.peer, welcome.swarm.hex()
        return True

    # ---- one step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        started = time.monotonic()
        self._adopt_identity(0.0)
        sharing = self._config.sharing.enabled
        own_count = self._split.own_groups if sharing else self._groups
        room = self._split.external_room if sharing else 0
        if room > len(self._backlog):
            self._link.request_external(room - len(self._backlog), self._counters.policy_version)

        experience = self._sampler(own_count)
        self._engine.remember([row for group in experience.groups for row in best_rows(group)])
        if sharing:
            for message in experience.messages:
                self._link.send(message)
        sampled = time.monotonic()

        judgement = self._take_external(room)
        groups = [*experience.groups, *judgement.accepted]
        rows = assemble(groups, self._cfg.advantage)
        result = self._engine.update(rows, self._counters.step)
        self._count(experience.tokens, experience.groups, judgement.accepted, result)
        self._measure(experience.groups, judgement, rows, result)
        ended = time.monotonic()
        self._fit(ended - started)
        self._report = msgspec.structs.replace(
            self._report,
            step_seconds=ended - started,
            generate_seconds=sampled - started,
            train_seconds=ended - sampled,
            tokens_per_second=experience.tokens / max(sampled - started, 1e-9),
        )
        self._say("training", ended - started)

    def _take_external(self, room: int) -> Judgement:
        arrived, useful = self._link.take_external(ANSWER_SECONDS) if room else ([], 0)
        waiting = self._backlog + arrived
        drawn, self._backlog = waiting[:room], waiting[room : room + self._cfg.groups_per_step]
        judgement = judge(drawn, self._engine.text, self._engine.score, self._cfg.temperature)
        for group, outcome in judgement.outcomes:
            self._link.send(Judged(group.content, group.peer, outcome))
        self._split.observe(useful, len(drawn), len(judgement.accepted))
        return judgement

    def _count(self, tokens: int, own: list[TrainingGroup], external: list[TrainingGroup], result: UpdateStatistics) -> None:
        c = self._counters
        c.step += 1
        c.policy_version += int(result.stepped)
        c.own_groups_total += len(own)
        c.external_groups_total += len(external)
        c.tokens_total += tokens
        for group in external:
            c.peers_used[group.peer] = c.peers_used.get(group.peer, 0) + 1
        now = self._engine.statistics()
        learnt = now.micro_batch_tokens < self._cfg.per_device_train_tokens
        c.micro_batch_tokens = now.micro_batch_tokens if learnt else 0  # so that a larger setting counts after a restart
        c.groups_per_step = self._batch
        c.oom_retries_total = self._oom_before + now.oom_retries
        c.useful_per_step = self._split.smoothed

    def _measure(self, own: list[TrainingGroup], judgement: Judgement, rows: Rows, result: UpdateStatistics) -> None:
        external = judgement.accepted
        total = len(own) + len(external)
        share = len(external) / total if total else None
        reward_own = _mean([r for g in own for r in g.rewards])
        if self._config.sharing.enabled:
            self._split.external_scale = self._guard.observe(reward_own, result.agreement, share or 0.0)
            self._counters.external_scale = self._split.external_scale
        self._report = msgspec.structs.replace(
            self._report,
            reward_own=reward_own,
            reward_external=_mean([r for g in external for r in g.rewards]),
            loss=result.loss,
            entropy=result.entropy,
            kl=result.kl,
            clip_fraction=result.clip_fraction,
            grad_norm=result.grad_norm,
            learning_rate=self._engine.learning_rate(self._counters.step - 1),
            zero_advantage_share=rows.zero_advantage_share,
            external_share=share,
            correction_mean=_mean([w for g in external for w in g.weights]),
            own_groups=len(own),
            external_groups=len(external),
            gradient_agreement=result.agreement,
        )

    # ---- between steps ------------------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        self._say("evaluating")
        reward = self._evaluation(self._engine)
        c = self._counters
        if reward is not None:
            c.reward_held_out, c.held_out_step = reward, c.step
            if c.reward_held_out_start is None:
                c.reward_held_out_start = reward
            if self._config.sharing.enabled:
                self._split.external_scale = self._guard.observe(None, None, self._report.external_share or 0.0, reward)
            log.info("held out", step=c.step, reward=round(reward, 4))
            self._engine.observe(reward)
        self._say("evaluating")

    def _save(self, last: bool = False) -> None:
        if last or self._saver.idle:
            self._saver.submit(self._engine.snapshot(self._rng, self._counters))
        now = time.monotonic()
        if self._saver.error and now >= self._complain_at:
            log.error("state not saved", error=self._saver.error, saved_step=self._saver.saved_step)
            self._complain_at = now + COMPLAIN_SECONDS

    @property
    def _groups(self) -> int:
        """Groups of the next step, B."""
        return max(1, round(self._batch))

    def _fit(self, seconds: float) -> None:
        """Fewer groups where a step took longer than it should, more where it need not be so few."""
        self._batch = fitted(self._batch, seconds, self._cfg.target_step_seconds, self._cfg.groups_per_step)
        if self._groups != self._split.batch:
            log.info("groups per step", groups=self._groups, step_seconds=round(seconds, 2))
            self._split.resize(self._groups)

    def _rested(self) -> bool:
        """Wait a little if these are quiet hours, and say whether they were. The model stays loaded."""
        now = time.localtime()
        if not is_quiet(self._config.node.quiet_hours, now.tm_hour * 60 + now.tm_min):
            return False
        if self._report.phase != "paused":
            log.info("quiet hours", hours=self._config.node.quiet_hours)
            self._say("paused")
        self._progress("paused")
        self._stop.wait(REST_SECONDS)
        return True

    def _pace(self, started: float) -> None:
        while not self._stop.is_set() and (left := started + self._cfg.step_interval - time.monotonic()) > 0:
            self._stop.wait(min(left, 5.0))
            self._progress("paused")

    def _finished(self) -> bool:
        return bool(self._cfg.max_steps) and self._counters.step >= self._cfg.max_steps

    def _say(self, phase: str, step_seconds: float | None = None) -> None:
        """Tell supervisor and network process where we are."""
        self._progress(phase, step_seconds)
        c, statistics = self._counters, self._engine.statistics()
        self._report = msgspec.structs.replace(
            self._report,
            phase=phase,
            step=c.step,
            policy_version=c.policy_version,
            reward_held_out=c.reward_held_out,
            reward_held_out_start=c.reward_held_out_start,
            held_out_step=c.held_out_step,
            own_groups_total=c.own_groups_total,
            external_groups_total=c.external_groups_total,
            tokens_total=c.tokens_total,
            external_scale=self._split.external_scale,
            device=statistics.device,
            dtype=statistics.dtype,
            device_memory_bytes=statistics.device_memory_bytes,
            memory_bytes=psutil.Process().memory_info().rss,
            oom_retries_total=c.oom_retries_total,
            micro_batch_tokens=statistics.micro_batch_tokens,
            scorer_restarts_total=max(0, self._scorer.statistics().starts - 1),
            state_saved_step=self._saver.saved_step,
            peers_used=dict(c.peers_used),
            weights=self._engine.averaging(),
        )
        self._link.send(self._report)


def best_rows(group: TrainingGroup) -> list[Row]:
    """Completions that earned more than others of their group."""
    best = max(group.rewards)
    return [row for row, reward in zip(group.rows, group.rewards, strict=True) if reward == best] if best > min(group.rewards) else []


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
