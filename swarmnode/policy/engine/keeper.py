"""Chooses the engine that samples, by measurement if nothing else decides, and rebuilds it when it
has stopped or failed.

The measurement is free, since both engines sample the first steps' questions in turn. After each
update the engine's log-probabilities of a fixed text, the canary, are compared with the trainer's.
An engine with stale weights would sample from another policy than the trained one, and only worse
learning would show it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import structlog
import torch

from swarmnode.errors import DeviceError, SwarmNodeError
from swarmnode.policy.engine.continuous import Continuous
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.engine.protocol import (
    FinishedRequest,
    Generation,
    GenerationStatistics,
    Request,
)
from swarmnode.policy.generate import GroupSample, Sampling
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import score
from swarmnode.policy.micro import MicroBatcher, is_oom
from swarmnode.policy.slots import unsuited
from swarmnode.policy.ways import Row, reason

log = structlog.get_logger("swarmnode.trainer")

Kind = Literal["lockstep", "continuous"]
SHORT = 32
"""Largest number of tokens in an answer for which lockstep is chosen without a measurement, because
completions end at about the same time."""
TRIALS = 2
"""Number of steps that each engine samples before one is chosen. The faster step counts, since the
first one includes the warm-up."""
DEADLINE = 20.0
"""Seconds without a decoding step after which an engine counts as stopped. It is shorter than the
silence after which the supervisor restarts the trainer."""
POLL = 0.01
"""Interval between polls of an engine that makes no progress, in seconds."""
FAILURES = 3
"""Number of consecutive rebuilds without a finished request after which the trainer is
restarted."""
CANARY = "What is 3 + 4?", "7, because 3 + 4 = 7."
CANARY_TOKENS = 4
CANARY_BOUND = {torch.float32: 0.01}
"""Largest difference of the canary's log-probabilities, nats. Rounding is a hundredth of that
(tests/unit/policy/test_engine.py)."""
CANARY_BOUND_ELSEWHERE = 0.5
"""The same bound in 16 bits, where rounding alone changes single tokens by as much."""


@dataclass
class EngineChoice:
    """The engine in use, and the measurements that choose it."""

    kind: Kind
    """Engine in use."""
    reason: str = ""
    """Reason for the choice."""
    trials: list[Kind] = field(default_factory=list)
    """Engines that are still to be measured; empty after the choice."""
    seconds_per_token: dict[Kind, float] = field(default_factory=dict)
    """Fastest measurement of each engine."""

    @classmethod
    def of(
        cls, options: Collection[str], longest: int, obstacle: str, episodes: bool = False
    ) -> EngineChoice:
        """Choose an engine.

        Args:
            options: The values of `training.options`.
            longest: Maximum number of tokens of a completion.
            obstacle: Reason why `continuous` is impossible; empty if it is possible.
            episodes: True if requests may follow completions, as in episodes.
        """
        if "lockstep" in options:
            return cls("lockstep", "as configured")
        if obstacle:
            return cls("lockstep", obstacle)
        if "continuous" in options:
            return cls("continuous", "as configured")
        if episodes:
            return cls("continuous", "it keeps the rows of episodes between turns")
        if longest <= SHORT:
            return cls("lockstep", f"answers of at most {longest} tokens")
        return cls("lockstep", "", ["lockstep", "continuous"] * TRIALS)

    def measured(self, tokens: int, seconds: float) -> None:
        """Record a measurement of the engine in use, and choose one after the last trial.

        Args:
            tokens: Number of sampled tokens.
            seconds: Time for sampling.
        """
        if tokens and self.trials:
            self.seconds_per_token[self.kind] = min(
                seconds / tokens, self.seconds_per_token.get(self.kind, float("inf"))
            )
            self.trials.pop(0)
            if self.trials:
                self.kind = self.trials[0]
            else:
                self.kind = min(
                    self.seconds_per_token, key=lambda kind: self.seconds_per_token[kind]
                )
                self.reason = ", ".join(
                    f"{kind} {1 / each:.0f} tokens/s"
                    for kind, each in sorted(self.seconds_per_token.items())
                )


@dataclass(frozen=True)
class Canary:
    """A fixed text whose log-probabilities are compared with the trainer's."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    reference: Callable[[Sequence[int], Sequence[int]], list[float]]
    """Returns the trainer's log-probabilities of `ids` after `prompt_ids`."""
    bound: float
    """Largest difference, nats per token."""

    @classmethod
    def of(cls, policy: Policy) -> Canary:
        prompt, answer = (policy.encode_prompt(text) for text in CANARY)
        reference: Callable[[Sequence[int], Sequence[int]], list[float]] = lambda p, c: score(
            policy, [Row(list(p), list(c))], 1.0
        )[0]
        return cls(
            prompt,
            answer[:CANARY_TOKENS],
            reference,
            CANARY_BOUND.get(policy.dtype, CANARY_BOUND_ELSEWHERE),
        )

    def __call__(self, engine: Generation) -> float:
        """Return the largest difference in nats; 0 for an engine that has no state, infinite if
        scoring fails."""
        try:
            found = engine.score(self.prompt_ids, self.ids)
        except Exception as error:  # a model's code may raise anything  # noqa: BLE001
            if is_oom(error):
                return 0.0  # a shortage of memory does not show a stale engine
            return math.inf
        if found is None:
            return 0.0
        gaps = [
            abs(a - b)
            for a, b in zip(found, self.reference(self.prompt_ids, self.ids), strict=True)
        ]
        return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


class Keeper:
    """An engine that rebuilds its inner engine when it fails, stops or is stale.

    Args:
        build: Builds an engine of a kind.
        canary: Detects stale weights.
    """

    def __init__(
        self,
        choice: EngineChoice,
        build: Callable[[Kind], Generation],
        canary: Canary,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.choice = choice
        self.rebuilds = 0
        self._build = build
        self._canary = canary
        self._clock = clock
        self._wait = wait
        self._requests: dict[int, Request] = {}
        """Unfinished requests by number."""
        self._engine = build(choice.kind)
        self._failures = 0
        self._heard = clock()
        """Time of the engine's last step."""
        self._spent = 0.0
        """Seconds of sampling since the engine was built."""
        if not choice.trials:
            log.info("engine", engine=choice.kind, reason=choice.reason)

    def submit(self, request: Request) -> None:
        if not self._requests:
            self._heard = self._clock()
        self._engine.submit(request)
        self._requests[request.number] = request

    def cancel(self, number: int) -> None:
        self._requests.pop(number, None)
        self._engine.cancel(number)

    def finished(self, version: int) -> list[FinishedRequest]:
        """Return finished requests, see `Generation.finished`.

        Raises:
            DeviceError: The engine has failed more than FAILURES times in a row.
        """
        started, before = self._clock(), self._engine.statistics().steps
        try:
            done = self._engine.finished(version)
        except SwarmNodeError:
            raise
        except Exception as error:  # a model's code may raise anything
            if is_oom(error):
                raise
            self._rebuild("failed", reason(error))
            return []
        now = self._clock()
        self._spent += now - started
        if done or self._engine.statistics().steps > before:
            self._heard = now
        elif self._requests and now - self._heard > DEADLINE:
            self._rebuild("silent", f"no decoding step in {DEADLINE:.0f} seconds")
        elif self._requests:
            self._wait(POLL)
        for one in done:
            self._failures = 0
            self._requests.pop(one.number, None)
        if done and not self._requests and self.choice.trials:
            self._next_trial()
        return done

    @contextmanager
    def pause(self) -> Iterator[None]:
        with self._engine.pause():
            yield
        if (gap := self._canary(self._engine)) <= self._canary.bound:
            return
        self._rebuild("canary", f"log-probabilities differ from the trainer's by {gap:.2g}")
        if (gap := self._canary(self._engine)) > self._canary.bound:
            self.choice = EngineChoice(
                "lockstep", "the other engine's log-probabilities differ from the trainer's"
            )
            self._rebuild("canary", f"those of a new engine differ by {gap:.2g}: using lockstep")

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float] | None:
        return self._engine.score(prompt_ids, ids)

    def ahead(self, count: int) -> int:
        return 0 if self.choice.trials else self._engine.ahead(count)

    def statistics(self) -> GenerationStatistics:
        return self._engine.statistics()

    def _next_trial(self) -> None:
        self.choice.measured(self._engine.statistics().tokens, self._spent)
        self._engine, self._spent = self._build(self.choice.kind), 0.0
        if not self.choice.trials:
            log.info("engine", engine=self.choice.kind, reason=self.choice.reason)

    def _rebuild(self, reason: str, detail: str) -> None:
        """Replace the engine by a new one, and submit all unfinished requests again."""
        self.rebuilds += 1
        self._failures += 1
        if self._failures > FAILURES:
            raise DeviceError(
                f'sampling failed repeatedly: {detail}; set training.options = ["lockstep"]'
            )
        log.warning(
            "engine rebuilt",
            reason=reason,
            detail=detail,
            engine=self.choice.kind,
            resubmitted=len(self._requests),
        )
        for number in self._requests:
            with contextlib.suppress(Exception):
                self._engine.cancel(number)
        self._engine, self._spent = self._build(self.choice.kind), 0.0
        self._heard = self._clock()
        for request in self._requests.values():
            self._engine.submit(request)


def keeper(
    policy: Policy,
    batcher: MicroBatcher,
    options: Collection[str],
    sampling: Sampling,
    rng: torch.Generator,
) -> Keeper:
    """Return a `Keeper` that samples `policy` with the engine that `options` names, or with the
    faster one."""

    def build(kind: Kind) -> Generation:
        if kind == "continuous":
            return Continuous(policy, batcher, sampling, rng)
        return Lockstep(
            lambda prompts, count: batcher.generate(
                policy, prompts, sampling.with_generations(count), rng
            ),
            lambda prompt: policy.room(policy.prompt_ids(prompt), 1),
        )

    return Keeper(
        EngineChoice.of(options, sampling.max_tokens, unsuited(policy), sampling.episodes),
        build,
        Canary.of(policy),
    )


def answered(engine: Generation, prompts: Sequence[str | Sequence[int]]) -> list[GroupSample]:
    """Return a group of completions for each prompt, in order, from an idle engine."""
    for number, prompt in enumerate(prompts):
        engine.submit(Request(number, prompt))
    found: dict[int, GroupSample] = {}
    while len(found) < len(prompts):
        found |= {one.number: one.sample for one in engine.finished(0)}
    return [found[number] for number in range(len(prompts))]
