"""A node's own experience: its next questions, its policy's answers, their rewards, and the messages that publish it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import structlog
import torch

from swarmnode.config import TrainingConfig
from swarmnode.policy.generate import GroupSample, Sampling
from swarmnode.rollouts.groups import OwnGroup, has_unwanted_characters, is_useful
from swarmnode.tasks.client import Scored, Scorer
from swarmnode.tasks.registry import task_version, task_weights
from swarmnode.tasks.seeds import choose_task, task_seed
from swarmnode.trainer.batch import TrainingGroup, own_group, parts_of
from swarmnode.trainer.engine import Engine
from swarmnode.trainer.state import Counters
from swarmnode.wire.limits import COMPLETIONS
from swarmnode.wire.messages import Completion, SamplingParams, TaskRef
from swarmnode.wire.tensors import pack_ids, pack_logprobs

log = structlog.get_logger("swarmnode.trainer")


DYNAMIC_FACTOR = 4
"""With dynamic sampling, groups sampled for one that carries a signal, at most. Where not even one in four does, a step on what there is
costs less than the search, and peers' groups are the better source."""


@dataclass(frozen=True)
class Experience:
    groups: list[TrainingGroup]
    """All that were sampled."""
    messages: list[OwnGroup]
    """The same groups for the network process, which decides which of them are worth sending."""
    prompts: list[str]
    """What was asked in each of `messages`."""
    tokens: int
    trained: list[TrainingGroup]
    """Those that the step learns from: all of them, or with dynamic sampling those that carry a signal."""


class Sampler:
    """Draws groups. The random generator and the counters belong to the trainer's saved state."""

    def __init__(
        self, cfg: TrainingConfig, tasks: Sequence[str], engine: Engine, scorer: Scorer, rng: torch.Generator, counters: Counters
    ) -> None:
        self._cfg = cfg
        self._tasks = tasks
        self._engine = engine
        self._scorer = scorer
        self._rng = rng
        self._counters = counters

    def __call__(self, count: int) -> Experience:
        """Sample `count` groups at the present policy version; with dynamic sampling on until as many carry a signal, or the cap is met.

        Source: DAPO (arXiv 2503.14476) §3.2, with a cap. A group that cannot be scored is left out.
        """
        if "dynamic_sampling" not in self._cfg.options:
            return self._sample(count)
        parts, asked, useful = [], 0, list[TrainingGroup]()
        while len(useful) < count and asked < count * DYNAMIC_FACTOR:
            more = min(count - len(useful), count * DYNAMIC_FACTOR - asked)
            asked += more
            parts.append(self._sample(more))
            useful += [group for group in parts[-1].groups if is_useful(group.rewards)]
        return Experience(
            [g for part in parts for g in part.groups], [m for part in parts for m in part.messages],
            [prompt for part in parts for prompt in part.prompts], sum(p.tokens for p in parts), useful,
        )  # fmt: skip

    def _sample(self, count: int) -> Experience:
        numbered = [self._next_question() for _ in range(count)]
        questions = self._scorer.score_many([(ref, []) for _, ref in numbered])
        asked = [(n, ref, q.prompt) for (n, ref), q in zip(numbered, questions, strict=True) if isinstance(q, Scored)]
        samples = self._generate([prompt for _, _, prompt in asked])
        scored = self._scorer.score_many(
            [(ref, [c.text for c in sample.completions]) for (_, ref, _), sample in zip(asked, samples, strict=True)]
        )
        groups, messages, prompts, unclean = [], [], [], 0
        for (sequence, ref, prompt), sample, result in zip(asked, samples, scored, strict=True):
            if not isinstance(result, Scored):
                log.warning("group not scored", task=ref.id, error=str(result))
                continue
            clean = [not has_unwanted_characters(c.text) for c in sample.completions]
            unclean += clean.count(False)
            rewards = [reward if fine else 0.0 for reward, fine in zip(result.rewards, clean, strict=True)]
            made_of = [each if fine else {} for each, fine in zip(result.components, clean, strict=True)] if result.components else []
            groups.append(own_group(sample, rewards, parts_of(made_of, task_weights(ref.id))))
            if any(self._engine.text.hides(c.ids) for c in sample.completions):  # text that says less than its ids: nobody takes it
                continue
            if all(clean):
                messages.append(self._message(sequence, ref, sample, rewards, made_of))
                prompts.append(prompt)
            elif sum(clean) > 1:
                shared = replace(sample, completions=list(compress(sample.completions, clean)))
                messages.append(self._message(sequence, ref, shared, list(compress(rewards, clean)), list(compress(made_of, clean))))
                prompts.append(prompt)
        if unclean:
            log.warning("completions with control characters: each earns 0 and is left out of what is shared", completions=unclean)
        return Experience(groups, messages, prompts, sum(len(c.ids) for sample in samples for c in sample.completions), groups)

    def _next_question(self) -> tuple[int, TaskRef]:
        c = self._counters
        sequence = c.sequence
        c.sequence += 1
        seed, index = task_seed(bytes.fromhex(c.swarm), c.peer, sequence)
        name = choose_task(self._tasks, seed, index)
        return sequence, TaskRef(name, task_version(name), seed, index)

    def _generate(self, prompts: list[str]) -> list[GroupSample]:
        cfg = self._cfg
        pivot = cfg.advantage == "mc_grpo"  # sampled and not trained on; a group of 64 is all that peers and scorers take
        size = min(cfg.num_generations + pivot, COMPLETIONS)
        return self._engine.generate(prompts, Sampling(size, cfg.max_completion_length, cfg.temperature, cfg.top_p), self._rng)

    def _message(
        self, sequence: int, ref: TaskRef, sample: GroupSample, rewards: list[float], made_of: list[dict[str, float]]
    ) -> OwnGroup:
        cfg = self._cfg
        completions = [
            Completion(c.text, len(c.ids), min(0.0, math.fsum(c.logprobs)), c.finish, pack_ids(c.ids), pack_logprobs(c.logprobs))
            for c in sample.completions
        ]
        sampling = SamplingParams(cfg.temperature, cfg.top_p, cfg.max_completion_length)
        return OwnGroup(ref, self._counters.policy_version, sequence, sampling, completions, rewards, made_of)
