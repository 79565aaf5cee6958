"""What a member with a whole copy of the policy does beside its stage while another leads: it
samples too, and publishes as any node.

After each step of the crew it asks and answers its share of a step's questions, while the head
does. What it samples reaches the head as every peer's groups do: scored by the crew as it is,
believed as far as that goes, and corrected for. So a member can say nothing that another peer could
not, and the head samples less itself where members' groups are of use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from swarmnode.config import TrainingConfig
from swarmnode.errors import EngineGone
from swarmnode.link.client import Link
from swarmnode.pipeline.commit import Participant
from swarmnode.policy.generate import GroupSample, Sampling
from swarmnode.tasks.client import Scorer
from swarmnode.trainer import state
from swarmnode.trainer.crew.policy import CrewPolicy
from swarmnode.trainer.crew.stage import Stage
from swarmnode.trainer.loop import HEAD, Identity, skip_used_numbers
from swarmnode.trainer.questions import Questions
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import Counters


class MemberPolicy(CrewPolicy):
    """The policy of a crew that another leads: it is sampled from this node's copy, or not at
    all."""

    def _participant(self) -> Participant:
        stage = self._runner.stage
        if stage is None or not self._runner.averages:
            raise EngineGone("no crew works here")
        return stage.worker.participant

    def _through_stages(
        self, prompts: Sequence[str], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        raise EngineGone("no copy that is new enough")


class MemberSampler:
    """lineage: the engine's. questions: with these counters, which go on where this node's last
    ones ended, as a head's or here.

    Raises StateError where these are another model's.
    """

    def __init__(
        self,
        lineage: bytes,
        engine: MemberPolicy,
        training: TrainingConfig,
        questions: Callable[[Counters], Questions],
        identity: Callable[[Counters], Identity],
        link: Link,
        scorer: Scorer,
        trainer: Path,
    ) -> None:
        self.lineage = lineage
        self._engine = engine
        self._rng = engine.random_generator(training.seed)
        self._directory = trainer / HEAD
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._counters = engine.restore(self._directory, self._rng)
        skip_used_numbers(self._counters, trainer)
        self._identity = identity(self._counters)
        self._sampler = Sampler(
            training, questions(self._counters), engine, scorer, self._rng, self._counters
        )
        self._link = link
        self._groups = training.groups_per_step
        self._done = -1
        """The step at which it sampled last."""

    def sample(self, stage: Stage) -> None:
        """A share of a step's groups, unless that is done for this step. Raises EngineGone,
        DeviceError; OSError: a full disk."""
        counters, step = self._counters, stage.step
        if step == self._done or not (self._identity.adopt() or counters.peer):
            return
        self._done, counters.policy_version = step, max(counters.policy_version, step)
        experience = self._sampler(math.ceil(self._groups / len(stage.layers)))
        # no number is said before it is known to be used
        state.write(self._directory, self._engine.snapshot(self._rng, counters))
        for message in experience.messages:
            self._link.send(message)
