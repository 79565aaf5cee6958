"""The engine of a crew's head: what the loop asks of its policy goes through the stages, and is
asked again when a stage was lost.

Nothing that the loop began is lost with a stage but the work of one step: a wave and a score are
repeated, and an update is either found taken when the crew is together again, or repeated with the
same rows.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from swarmnode.config import TrainingConfig
from swarmnode.errors import DeviceError, EngineGone, PeerError, PeerTimeout
from swarmnode.link.messages import WeightsReport
from swarmnode.pipeline.blame import PATIENCE
from swarmnode.pipeline.commit import Participant
from swarmnode.pipeline.frames import MICRO_BATCHES
from swarmnode.pipeline.head import TOO_MUCH, CannotScore, Head, StepResult
from swarmnode.pipeline.learning import LearnRow
from swarmnode.pipeline.waves import Wave
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.engine.protocol import Generation
from swarmnode.policy.generate import GroupSample, Sampled, Sampling
from swarmnode.policy.logprobs import Row
from swarmnode.policy.micro import MicroBatcher, micro_batches
from swarmnode.policy.text import PolicyText
from swarmnode.rollouts.groups import Outcome
from swarmnode.trainer import state
from swarmnode.trainer.batch import Rows
from swarmnode.trainer.crew.average import StageAveraging
from swarmnode.trainer.crew.copies import WholeCopy
from swarmnode.trainer.crew.model import TOKENS, CrewModel
from swarmnode.trainer.crew.runner import StageRunner
from swarmnode.trainer.engine import EngineStatistics
from swarmnode.trainer.judge import Scored
from swarmnode.trainer.state import Counters, Snapshot
from swarmnode.trainer.update import UpdateStatistics, normalizer, trained
from swarmnode.weights import local

log = structlog.get_logger("swarmnode.crew")

T = TypeVar("T")
WAIT_SECONDS = 1.0
"""Between two looks whether we should stop."""
FIRST_TOKENS = 1024
"""Padded tokens of a new head's first micro-batches. What 16,384 take in a stage that a CPU holds
is many times the head's deadline, and a crew that has never worked is given up after two of
these."""
PIECES = 8
"""Micro-batches for each stage, where there are tokens enough: stages wait less for each other, and
for lines, the finer a step is cut."""
LEAST_TOKENS = 1024
"""A step is not cut finer for that: a device would have little to do at a time."""
SLOW_TOKEN = 0.1
"""Seconds of a token through all stages from which it is said what would be faster: of homes, not
of machines in a room."""
CREWS = 8
"""Crews of which it is remembered what their members can compute at a time, the last ones."""
REFUSALS = 3
"""One step is refused so often before its rows are given up."""


class CrewPolicy:
    """lineage: whose head this node is. stop: ends all waiting. wait_seconds: for the crew to be
    together again. averaging: our own stage's, if it is averaged now. copy: what training samples
    from, where it is new enough."""

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
        self._training = training
        self._batchers: OrderedDict[tuple[str, ...], MicroBatcher] = OrderedDict()
        """How much all stages can compute at a time, and in time, as far as is known: by the
        members, in the order of their stages."""
        self._wait_seconds = wait_seconds
        self._model = model
        self._runner = runner
        self.lineage = lineage
        self._stop = stop
        self._averaging = averaging
        self._copy = copy
        self._advised = False
        self._owner = f"{model.text.fingerprint.hex()}/lora{model.policy.lora.r}/head"

    @property
    def _memory(self) -> MicroBatcher:
        """The present crew's. One with another member begins anew: nobody has seen what that one
        can."""
        members = self._runner.members()
        known = self._batchers.pop(members, None) or MicroBatcher(
            self._training.per_device_train_tokens, first=FIRST_TOKENS
        )
        self._batchers[members] = known
        if len(self._batchers) > CREWS:
            self._batchers.popitem(last=False)
        return known

    @property
    def text(self) -> PolicyText:
        return self._model.text

    def statistics(self) -> EngineStatistics:
        device = self._model.placement.device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        dtype = str(self._model.placement.dtype).removeprefix("torch.")
        retries = sum(memory.statistics().oom_retries for memory in list(self._batchers.values()))
        return EngineStatistics(str(device), dtype, peak, *2 * (self._memory.tokens,), retries)

    def random_generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    # ---- a step ----------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[str], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        """From this node's copy, where it has one that is new enough; else token by token through
        the stages."""
        copy, stage = self._copy, self._runner.stage
        if not prompts or copy is None or stage is None:
            return self._through_stages(prompts, sampling, rng)
        taken = self._participant()
        at = taken.step, taken.hash
        self._runner.thread.call(lambda: copy.follow(stage.layers, at))
        samples = copy.sample(at[0], prompts, sampling, rng)
        return samples if samples is not None else self._through_stages(prompts, sampling, rng)

    def generation(self, sampling: Sampling, rng: torch.Generator) -> Generation:
        return Lockstep(lambda prompts: self.generate(prompts, sampling, rng))

    def _through_stages(
        self, prompts: Sequence[str], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        if not prompts:
            return []
        heads = [self.text.encode_prompt(prompt) for prompt in prompts]
        longest = max(map(len, heads))
        room = self._model.limits().tokens
        room = min(room, self.text.context or room)
        if longest + sampling.max_tokens > room:
            raise DeviceError(
                f"an answer of {sampling.max_tokens} tokens to a question of {longest} tokens, and"
                f" a crew computes {room} at a time: set training.max_completion_length lower, or"
                " leave the question out of the dataset"
            )
        seed = int(torch.randint(2**62, (1,), generator=rng))
        ends, s = self.text.eos_ids, sampling
        began = time.monotonic()
        waves = self._ask(
            lambda head: head.generate(
                heads,
                s.num_generations,
                s.max_tokens,
                s.temperature,
                s.top_p,
                ends,
                random.Random(seed),
            )
        )
        self._say_how_slow(
            (time.monotonic() - began) / max(len(ids) for wave in waves for ids in wave.ids)
        )
        groups: list[GroupSample] = []
        for group in (group for wave in waves for group in self._groups(wave)):
            if groups and len(groups[-1].completions) < s.num_generations:
                groups[-1].completions.extend(group.completions)
            else:
                groups.append(group)
        return groups

    def _say_how_slow(self, seconds: float) -> None:
        """Once, where a copy would help. seconds: of a token."""
        if self._copy is None and seconds > SLOW_TOKEN and not self._advised:
            self._advised = True
            log.warning(
                "answers go through all stages, token by token: a node with room samples from a"
                " whole copy of the policy instead",
                seconds_of_a_token=round(seconds, 2),
                set='stages.keep_policy = "memory"',
            )

    def _groups(self, wave: Wave) -> list[GroupSample]:
        def sampled(i: int) -> Sampled:
            ids = wave.ids[i]
            return Sampled(
                ids,
                wave.logprobs[i],
                self.text.decode(ids),
                "eos" if ids[-1] in wave.ends else "length",
            )

        size = wave.num_generations
        return [
            GroupSample(prompt, [sampled(q * size + k) for k in range(size)])
            for q, prompt in enumerate(wave.prompts)
        ]

    def score(self, rows: Sequence[Row], temperature: float) -> list[Scored]:
        lengths = [len(p) + len(c) for p, c in rows]

        async def work(head: Head) -> list[Scored]:
            memory = self._memory
            tokens = _piece(memory, lengths, head.stages)
            try:
                return await head.score(rows, temperature, tokens)
            except CannotScore as error:
                if error.too_much:
                    memory.ran_out(memory.cut(lengths, tokens=tokens))
                raise
            except PeerTimeout:
                memory.shrink(memory.cut(lengths, tokens=tokens))
                raise

        return self._ask(work) if rows else []

    def update(self, rows: Rows, rate: float | None = None) -> UpdateStatistics:
        """As `Updater.update`; how far own and external gradients agree is not measured, since no
        node has them all."""
        cfg = self._training
        own, external = trained(rows, cfg)
        if not own and not external:
            return UpdateStatistics(stepped=False, skipped="no_signal")
        done = self._learn(rows, own + external, frozenset(), rate)
        if done.stepped or not own or not external:
            # nobody says of whose tokens it is
            return replace(done, effective_own=None) if external else done
        # a peer's rows may be why no step was taken; stages do not say whose
        refused: dict[int, Outcome] = dict.fromkeys(
            (rows.groups[i] for i in external), "no_gradient"
        )
        return replace(self._learn(rows, own, frozenset(refused), rate), refused=refused)

    def _learn(
        self, rows: Rows, indices: list[int], without: frozenset[int], rate: float | None
    ) -> UpdateStatistics:
        """Learn from some rows. without: groups that do not count in the normaliser."""
        cfg = self._training
        learn = [
            LearnRow(
                *rows.rows[i],
                rows.recorded(i),
                advantage,
                weight,
                rows.groups[i],
                sampled=rows.is_sampled(i),
            )
            for i in indices
            for advantage, weight in [(float(rows.advantages[i]), float(rows.weights[i]))]
        ]
        divisor = normalizer(rows, cfg, without)
        return self._one(learn, divisor, cfg.learning_rate if rate is None else rate)

    def _one(self, learn: list[LearnRow], divisor: float, rate: float) -> UpdateStatistics:
        cfg, memory = self._training, self._memory
        lengths, groups = (
            [len(row.prompt_ids) + len(row.completion_ids) for row in learn],
            [row.group for row in learn],
        )
        before, refusals, tokens = self._participant().step, 0, memory.tokens
        pieces = lambda tokens: len(micro_batches(lengths, tokens, groups))

        async def work(head: Head) -> StepResult | None:
            nonlocal memory, tokens
            if head.participant.step > before:
                return None  # it was decided when the crew came apart, and has been taken since
            memory = self._memory
            tokens = _piece(memory, lengths, head.stages)
            while tokens < TOKENS and pieces(tokens) > MICRO_BATCHES:
                tokens *= 2
            memory.tokens = max(memory.tokens, tokens)
            return await head.update(
                learn, cfg.model_copy(update={"per_device_train_tokens": tokens}), divisor, rate
            )

        while refusals < REFUSALS:
            result = self._ask(work)
            if result is None:
                return UpdateStatistics(stepped=True)
            largest = memory.cut(lengths, groups, tokens)
            if result.refused is None:
                memory.passed(largest)
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
            log.warning("no step", reason=result.refused, tokens=largest)
            # a slow stage answers sooner of less
            if result.refused in (TOO_MUCH, "timeout") and result.divisible:
                (memory.ran_out if result.refused == TOO_MUCH else memory.shrink)(largest)
                continue
            refusals += 1
            if result.refused == "not_finite":  # these rows will not become finite
                return UpdateStatistics(stepped=False, skipped="not_finite")
        return UpdateStatistics(stepped=False, skipped="refused")

    # ---- asking ----------------------------------------------------------------------------------

    def _ask(self, work: Callable[[Head], Awaitable[T]]) -> T:
        """What `work` gives, from the first head under which it succeeds. Raises EngineGone;
        PeerError after many failures."""
        before, failed = None, 0
        while True:
            head = self._head()
            before, failed = head, (failed if head is before else 0)
            try:
                return self._runner.thread.call(lambda head=head: work(head))  # type: ignore[misc]
            except PeerError as error:
                # less at a time is another call
                failed += not (isinstance(error, CannotScore) and error.divisible)
                log.warning(
                    "the crew stopped", error=str(error), timeout=isinstance(error, PeerTimeout)
                )
                # whoever spoils them has been left out before, however many take turns; and who is
                # blamed ends the crew: there is another
                if failed >= PATIENCE * head.stages and head.blamed is None:
                    raise
                if self._stop.is_set():
                    raise EngineGone("stopping") from None

    def _participant(self) -> Participant:
        return self._head().participant

    def _head(self) -> Head:
        """Waits for the crew to be together, for as long as there is one: a stage of 7 B takes half
        an hour to come back over a home's line, and the network process says when that is too long.
        Raises EngineGone when we are not its head any more or should stop, PeerTimeout when there
        was none for too long."""
        late = time.monotonic() + self._wait_seconds + 60.0
        while True:
            head = self._runner.wait(self._runner.head, WAIT_SECONDS)
            if self._runner.leads_no_more(self.lineage):
                raise EngineGone("another node is the head now")
            if head is not None:
                return head
            if self._stop.is_set():
                raise EngineGone("stopping")
            if self._runner.leads() == self.lineage:
                late = time.monotonic() + self._wait_seconds + 60.0
            if time.monotonic() > late:
                raise PeerTimeout("the crew is not together, and nobody says why")

    # ---- between steps ---------------------------------------------------------------------------

    def average(self, connected: bool, step_seconds: float, stepped: bool) -> bool:
        """Each stage does so by itself, when it has taken a step."""
        return False

    def remember(self, rewarded: Sequence[Row], own: Sequence[Row]) -> None:
        pass

    def observe(self, reward: float) -> None:
        pass

    def facts(self, fresh: bool) -> local.ReplicaFacts | None:
        averaging = self._averaging()
        return averaging.facts() if averaging is not None else None

    def averaging(self) -> WeightsReport | None:
        averaging = self._averaging()
        return averaging.report() if averaging is not None else None

    def wait_for_state(self, seconds: float, late: float) -> bool:
        return True

    # ---- across restarts -------------------------------------------------------------------------

    def restore(self, directory: Path, rng: torch.Generator) -> Counters:
        """What this node was as a head: all of it for the same crew, else only which group numbers
        are used. The crew says the step."""
        step = self._participant().step

        def use(counters: Counters, tensors: state.Tensors) -> None:
            if counters.crew == self.lineage.hex():
                state.set_generator(rng, tensors[state.RNG])

        counters = state.recover(directory, self._owner, use) or Counters()
        if counters.crew != self.lineage.hex():
            counters = Counters(
                sequence=counters.sequence, peer=counters.peer, swarm=counters.swarm
            )
        counters.crew = self.lineage.hex()
        counters.step, counters.policy_version = (
            max(counters.step, step),
            max(counters.policy_version, step),
        )
        return counters

    def snapshot(self, rng: torch.Generator, counters: Counters) -> Snapshot:
        return state.take_counters(rng, counters, self._owner)


def _piece(memory: MicroBatcher, lengths: Sequence[int], stages: int) -> int:
    """Padded tokens of a micro-batch of rows of these lengths."""
    return min(memory.tokens, max(LEAST_TOKENS, sum(lengths) // (PIECES * stages)))
