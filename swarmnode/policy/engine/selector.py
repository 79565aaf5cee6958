"""Chooses the engine that samples: continuous where it works, unless all answers are short.

The choice depends on settings and model only, so that two runs with one seed are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
import torch

from swarmnode.errors import EngineGone, LocalError, SwarmNodeError
from swarmnode.policy.engine.continuous import Continuous
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.engine.protocol import FinishedRequest, Generation, Request
from swarmnode.policy.generate import GroupSample, Sampling
from swarmnode.policy.load import Policy
from swarmnode.policy.micro import MicroBatcher
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


class TrainingContinuous(Continuous):
    """The continuous engine, with the remedy in the error if it fails during training."""

    def finished(self, version: int) -> list[FinishedRequest]:
        try:
            return super().finished(version)
        except (SwarmNodeError, EngineGone):
            raise
        except Exception as error:  # a model's code may raise anything
            log.error("engine failed", engine=self.kind, exc_info=True)
            raise LocalError(
                f"the engine `continuous` failed: {reason(error)}; if this repeats, set"
                ' training.options = ["lockstep"]'
            ) from error


OwnEngine = Continuous | Lockstep
"""An engine of this process; its attribute `kind` names it."""


def select_engine(
    policy: Policy,
    batcher: MicroBatcher,
    options: Collection[str],
    sampling: Sampling,
    rng: torch.Generator,
) -> OwnEngine:
    """Return the engine that `options` names, or the one that suits the policy and its answers."""
    choice = EngineChoice.of(options, sampling.max_tokens, unsuited(policy), sampling.episodes)
    log.info("engine", engine=choice.kind, reason=choice.reason)
    if choice.kind == "continuous":
        return TrainingContinuous(policy, batcher, sampling, rng)
    return Lockstep(
        lambda prompts, count: batcher.generate(
            policy, prompts, sampling.with_generations(count), rng
        ),
        lambda prompt: policy.room(policy.prompt_ids(prompt), 1),
    )


def answered(engine: Generation, prompts: Sequence[str | Sequence[int]]) -> list[GroupSample]:
    """Return a group of completions for each prompt, in order, from an idle engine."""
    for number, prompt in enumerate(prompts):
        engine.submit(Request(number, prompt))
    found: dict[int, GroupSample] = {}
    while len(found) < len(prompts):
        found |= {one.number: one.sample for one in engine.finished(0)}
    return [found[number] for number in range(len(prompts))]
