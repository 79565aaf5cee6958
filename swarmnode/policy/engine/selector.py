"""Chooses the engine that samples: continuous where it works, unless all answers are short.

The choice depends on settings and model only, so that two runs with one seed are equal. If the
continuous engine raises an error, lockstep takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import structlog
import torch

from swarmnode.errors import SwarmNodeError
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
from swarmnode.policy.micro import MicroBatcher, is_oom
from swarmnode.policy.slots import unsuited
from swarmnode.policy.ways import reason

log = structlog.get_logger("swarmnode.trainer")

Kind = Literal["lockstep", "continuous"]
SHORT = 32
"""Largest number of tokens in an answer for which lockstep is chosen, because completions end at
about the same time."""


@dataclass(frozen=True)
class EngineChoice:
    """The engine in use, with the reason for the choice."""

    kind: Kind
    reason: str

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
        return cls("continuous", f"answers of more than {SHORT} tokens")


class EngineSelector:
    """Samples with the chosen engine.

    Args:
        build: Builds an engine of a kind.
    """

    def __init__(self, choice: EngineChoice, build: Callable[[Kind], Generation]) -> None:
        self.choice = choice
        self.failures = 0
        """Number of times that the continuous engine failed and lockstep took over: 0 or 1."""
        self._build = build
        self._requests: dict[int, Request] = {}
        """Unfinished requests by number."""
        self._engine = build(choice.kind)
        log.info("engine", engine=choice.kind, reason=choice.reason)

    def submit(self, request: Request) -> None:
        self._engine.submit(request)
        self._requests[request.number] = request

    def cancel(self, number: int) -> None:
        self._requests.pop(number, None)
        self._engine.cancel(number)

    def finished(self, version: int) -> list[FinishedRequest]:
        """Return finished requests, see `Generation.finished`. An error of the continuous engine is
        logged, and lockstep answers its requests."""
        try:
            done = self._engine.finished(version)
        except SwarmNodeError:
            raise
        except Exception as error:  # a model's code may raise anything
            if is_oom(error) or self.choice.kind == "lockstep":
                raise
            self._use_lockstep(reason(error))
            return []
        for one in done:
            self._requests.pop(one.number, None)
        return done

    @contextmanager
    def pause(self) -> Iterator[None]:
        with self._engine.pause():
            yield

    def ahead(self, count: int) -> int:
        return self._engine.ahead(count)

    def statistics(self) -> GenerationStatistics:
        return self._engine.statistics()

    def _use_lockstep(self, why: str) -> None:
        """Replace the engine by lockstep, and submit all unfinished requests again."""
        self.failures += 1
        log.warning("engine failed, using lockstep", detail=why, resubmitted=len(self._requests))
        self.choice = EngineChoice("lockstep", "the continuous engine failed")
        self._engine = self._build("lockstep")
        for request in self._requests.values():
            self._engine.submit(request)


def select_engine(
    policy: Policy,
    batcher: MicroBatcher,
    options: Collection[str],
    sampling: Sampling,
    rng: torch.Generator,
) -> EngineSelector:
    """Return a selector that samples `policy` with the engine that `options` names, or with
    the one that suits the policy and its answers."""

    def build(kind: Kind) -> Generation:
        if kind == "continuous":
            return Continuous(policy, batcher, sampling, rng)
        return Lockstep(
            lambda prompts, count: batcher.generate(
                policy, prompts, sampling.with_generations(count), rng
            ),
            lambda prompt: policy.room(policy.prompt_ids(prompt), 1),
        )

    return EngineSelector(
        EngineChoice.of(options, sampling.max_tokens, unsuited(policy), sampling.episodes), build
    )


def answered(engine: Generation, prompts: Sequence[str | Sequence[int]]) -> list[GroupSample]:
    """Return a group of completions for each prompt, in order, from an idle engine."""
    for number, prompt in enumerate(prompts):
        engine.submit(Request(number, prompt))
    found: dict[int, GroupSample] = {}
    while len(found) < len(prompts):
        found |= {one.number: one.sample for one in engine.finished(0)}
    return [found[number] for number in range(len(prompts))]
