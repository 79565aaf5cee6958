"""The engine of the training loop at the head of a crew."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from swarmnode.config import TrainingConfig
from swarmnode.errors import DeviceError, EngineGone, PeerError, PeerTimeout
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.engine.protocol import Generation
from swarmnode.policy.generate import GroupSample, SampledCompletion, Sampling
from swarmnode.policy.logprobs import Row
from swarmnode.policy.micro import MicroBatcher, micro_batches
from swarmnode.policy.text import PolicyText
from swarmnode.rollouts.groups import Outcome
from swarmnode.rollouts.trainer.batch import Rows
from swarmnode.rollouts.trainer.judge import RowScores
from swarmnode.stages.crew_messages import BASE_WAIT_SECONDS
from swarmnode.stages.stage_frames import DEVICE_REASON, MAX_MICRO_BATCHES
from swarmnode.stages.trainer.crew_model import MAX_TOKENS, CrewModel
from swarmnode.stages.trainer.head import Head, Wave, WorkRefused
from swarmnode.stages.trainer.policy_copy import PolicyCopy
from swarmnode.stages.trainer.runner import StageRunner
from swarmnode.stages.trainer.stage_averaging import StageAveraging
from swarmnode.stages.trainer.stage_batches import LearnRow
from swarmnode.trainer import state
from swarmnode.trainer.engine import EngineStatistics
from swarmnode.trainer.state import Counters, Snapshot
from swarmnode.trainer.update import UpdateStatistics, normalizer, trained
from swarmnode.weights import local
from swarmnode.weights.local import WeightsReport

log = structlog.get_logger("swarmnode.crew")
T = TypeVar("T")


# The engine of a crew's head. The training loop's calls run through the stages. A call that fails
# with its crew is repeated with the next crew.

WAIT_SECONDS = 1.0
"""Interval between checks whether to stop."""
CREW_WAIT_SECONDS = BASE_WAIT_SECONDS + 60.0
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
        """Maximum number of padded tokens of a wave with the present members; None for the limit of
        the crew."""
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
            step = self._head().participant.step
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

    def update(self, rows: Rows) -> UpdateStatistics:
        """Take one step, as `Updater.update`.

        Raises:
            EngineGone, PeerTimeout: there is no crew, see `_head`.
        """
        drawn = {rows.groups[i] for i in rows.informative(external=True)}
        rows = without_masked_tokens(rows)
        own, external = trained(rows)
        lost = drawn - {rows.groups[i] for i in external}
        refused: dict[int, Outcome] = dict.fromkeys(lost, "improbable")
        if not own and not external:
            return UpdateStatistics(stepped=False, skipped="no_signal", refused=refused)
        done = replace(self._learn(rows, own + external, frozenset()), refused=refused)
        if done.stepped or not own or not external:
            # stages do not report whose tokens were effective
            return replace(done, effective_own=None) if external else done
        # a peer's rows may be the reason; stages do not report whose rows they refuse
        refused |= dict.fromkeys((rows.groups[i] for i in external), "no_gradient")
        return replace(self._learn(rows, own, frozenset(refused)), refused=refused)

    def _learn(self, rows: Rows, indices: list[int], without: frozenset[int]) -> UpdateStatistics:
        """Take one step with some of the rows. Repeat a step whose call ended with its crew.

        Args:
            indices: Rows to learn from.
            without: Groups that the normaliser ignores.
        """
        cfg = self._training
        learn = [
            LearnRow(
                *rows.rows[i][:2],
                rows.sampler_logprobs[i],
                float(rows.advantages[i]),
                float(rows.weights[i]),
                rows.groups[i],
            )
            for i in indices
        ]
        divisor, rate = normalizer(rows, cfg, without), cfg.learning_rate
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
                    entropy=result.entropy,
                    grad_norm=result.grad_norm,
                    effective_own=result.effective,
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
        step, lineage = self._head().participant.step, self.lineage.hex()

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


def without_masked_tokens(rows: Rows) -> Rows:
    """Return the rows cut before their first masked token, since a crew's messages have no mask.

    A row must not be empty, so one that begins with a masked token keeps that token, with weight 0.
    """
    counts = [
        row.sampled.index(False) if False in row.sampled else len(row.completion)
        for row in rows.rows
    ]
    return replace(
        rows,
        rows=[row.first(max(n, 1)) for row, n in zip(rows.rows, counts, strict=True)],
        sampler_logprobs=[
            each[: max(n, 1)] for each, n in zip(rows.sampler_logprobs, counts, strict=True)
        ],
        weights=rows.weights * (torch.tensor(counts) > 0),
    )
