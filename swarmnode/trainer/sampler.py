"""Samples a node's own groups: questions, completions, rewards, and the messages that publish
them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import torch

from swarmnode.config import TrainingConfig
from swarmnode.drops import TrainerDrops
from swarmnode.errors import Unavailable
from swarmnode.policy.engine.protocol import FinishedRequest, Request
from swarmnode.policy.generate import GroupSample, SampledCompletion, Sampling
from swarmnode.policy.text import PromptTooLong
from swarmnode.rollouts.groups import OwnGroup, has_unwanted_characters, is_useful, join_turns
from swarmnode.rollouts.trainer.batch import TrainingGroup, own_group
from swarmnode.tasks.client import Scored, Scorer
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import choose_task, task_seed
from swarmnode.trainer.engine import Engine
from swarmnode.trainer.episodes import (
    Episodes,
    EpisodeTotals,
    PlayedEpisode,
    judged_text,
    sampled_tokens,
)
from swarmnode.trainer.state import Counters
from swarmnode.wire.limits import COMPLETIONS, TEXT_BYTES, TOKENS
from swarmnode.wire.messages import Completion, SamplingParams, TaskRef
from swarmnode.wire.tensors import pack_ids, pack_logprobs

DYNAMIC_FACTOR = 4
"""Largest number of groups that dynamic sampling draws per requested group. If fewer than one in
four is useful, a step with fewer groups costs less than more sampling, and peers' groups are the
better source."""


MAX_LAG = 4
"""Largest number of updates between a group's first token and the step that trains on it. A step
waits for groups that would become older. It discards none, since these would be the long answers.
The bias at that lag is 0.10 with `OWN_CORRECTION` (benchmarks/RESULTS.md)."""


UNSHARED = {
    "charset": "the text contains control characters: its reward is 0",
    "special_ids": (
        "the answer contains a token without text (begin, padding, unknown), which peers refuse"
    ),
    "context_full": (
        "the episode filled the model's context before it ended: peers cannot verify that"
    ),
    "too_long": "the actions of the episode do not fit into a message",
}
"""Explanation for the operator of each reason why a completion is not published."""


@dataclass(frozen=True)
class PendingQuestion:
    """A question whose completions are being sampled."""

    sequence: int
    ref: TaskRef
    prompt: str


def next_question(tasks: Sequence[str], counters: Counters) -> tuple[int, TaskRef]:
    """Return the next number of this node's series of questions, and the question that has it."""
    sequence = counters.sequence
    counters.sequence += 1
    swarm = bytes.fromhex(counters.swarm)
    name = choose_task(tasks, swarm, counters.peer, sequence)
    seed, index = task_seed(swarm, counters.peer, sequence, name)
    return sequence, TaskRef(name, task_version(name), seed, index)


def first_version(sample: GroupSample, now: int) -> int:
    """Return the policy version of the group's first token.

    Args:
        now: Present policy version, which applies to completions without versions.
    """
    return min(
        (completion.versions[0] for completion in sample.completions if completion.versions),
        default=now,
    )


@dataclass
class Experience:
    """Groups that a step has sampled."""

    groups: list[TrainingGroup] = field(default_factory=list)
    """All sampled groups."""
    lags: list[int] = field(default_factory=list)
    """Policy versions between each group's first token and now."""
    tokens: int = 0
    """Number of sampled tokens."""
    messages: list[OwnGroup] = field(default_factory=list)
    """The groups that may be published, for the network process, which selects those that are
    sent."""
    prompts: list[str] = field(default_factory=list)
    """Question of each of `messages`."""
    observations: list[list[list[str]]] = field(default_factory=list)
    """The environment's texts for each episode of each of `messages`; empty for a group of
    answers."""
    trained: list[TrainingGroup] = field(default_factory=list)
    """Groups that the step trains on: all groups, or the useful ones with dynamic sampling."""
    played: EpisodeTotals = field(default_factory=EpisodeTotals)
    """Totals of the episodes of this sampling."""


class Sampler:
    """Samples groups. The random generator and the counters are part of the saved state.

    A continuous engine always has more requests than a step needs. The unfinished ones continue
    under the next policy version.
    """

    def __init__(
        self,
        cfg: TrainingConfig,
        tasks: Sequence[str],
        engine: Engine,
        scorer: Scorer,
        rng: torch.Generator,
        counters: Counters,
        drops: TrainerDrops | None = None,
    ) -> None:
        self._cfg = cfg
        self._drops = drops or TrainerDrops()
        self._tasks = tasks
        self._engine = engine
        self._scorer = scorer
        self._counters = counters
        size = min(cfg.num_generations, COMPLETIONS)
        self._generation = engine.generation(
            Sampling(
                size,
                cfg.max_completion_length,
                cfg.temperature,
                cfg.top_p,
                any(TASKS[name].turns > 1 for name in tasks if name in TASKS),
            ),
            rng,
        )
        self._episodes = Episodes(self._generation, engine.text, scorer)
        self._asked: dict[int, PendingQuestion] = {}
        self._ready: list[FinishedRequest] = []
        self._too_long: list[str] = []
        """Error messages of questions that are too long for the model."""

    def __call__(self, count: int) -> Experience:
        """Sample `count` groups with the present policy.

        Dynamic sampling continues until `count` groups are useful, or until DYNAMIC_FACTOR ·
        `count` groups are sampled (DAPO, arXiv 2503.14476 §3.2, with a cap). Groups that cannot be
        scored are excluded.

        Raises:
            Unavailable: All questions are too long for the model.
        """
        played = replace(self._episodes.totals)
        made = Experience()
        self._sample(count, made)
        made.trained = made.groups
        if "dynamic_sampling" in self._cfg.options:
            sampled = count
            while True:
                made.trained = [group for group in made.groups if is_useful(group.rewards)]
                more = min(count - len(made.trained), count * DYNAMIC_FACTOR - sampled)
                if more <= 0:
                    break
                sampled += more
                self._sample(more, made)
        made.played = self._episodes.totals - played
        return made

    def _sample(self, count: int, made: Experience) -> None:
        """Sample and score `count` groups, and add them to `made`."""
        finished = self._gather(count)
        questions = [self._asked.pop(one.number) for one in finished]
        scored = self._scorer.score_many(
            [
                (question.ref, [judged_text(c) for c in one.sample.completions])
                for question, one in zip(questions, finished, strict=True)
            ]
        )
        for question, one, result in zip(questions, finished, scored, strict=True):
            made.tokens += sum(sampled_tokens(c) for c in one.sample.completions)
            if isinstance(result, Scored):
                self._add(question, one.sample, result, made)
            else:
                self._drops.group.drop("not_scored", task=question.ref.id, error=str(result))

    def _add(
        self, question: PendingQuestion, sample: GroupSample, result: Scored, made: Experience
    ) -> None:
        """Add a scored group. Completions that peers could not read are not published."""
        task, version = question.ref.id, self._counters.policy_version
        faults = [self._fault(completion) for completion in sample.completions]
        fine = [fault != "charset" for fault in faults]
        rewards = [r if good else 0.0 for r, good in zip(result.rewards, fine, strict=True)]
        # Empty if rewards are single numbers.
        components = [
            parts if good else {} for parts, good in zip(result.components, fine, strict=False)
        ]
        made.groups.append(own_group(sample, rewards))
        first = first_version(sample, version)
        made.lags.append(version - first)
        for fault in filter(None, faults):
            self._drops.completion.drop(fault, task=task, detail=UNSHARED[fault])
        shared = [not fault for fault in faults]
        if any(faults) and sum(shared) < 2:
            ((most, _),) = Counter(filter(None, faults)).most_common(1)
            self._drops.group.drop(most, task=task)
            return
        self._drops.group.keep()
        published = list(compress(sample.completions, shared))
        cfg = self._cfg
        made.messages.append(
            OwnGroup(
                question.ref,
                first,  # so that the group does not seem newer to receivers
                question.sequence,
                SamplingParams(cfg.temperature, cfg.top_p, cfg.max_completion_length),
                [_published(completion) for completion in published],
                list(compress(rewards, shared)),
                list(compress(components, shared)),
            )
        )
        made.prompts.append(question.prompt)
        made.observations.append(
            [c.observations for c in published if isinstance(c, PlayedEpisode)]
        )

    def _fault(self, completion: SampledCompletion) -> str:
        """Return the reason of UNSHARED why a completion is not published; empty if it is."""
        if has_unwanted_characters(completion.text):
            return "charset"
        turns = completion.turns if isinstance(completion, PlayedEpisode) else [completion]
        if any(self._engine.text.hides(turn.ids) for turn in turns):
            return "special_ids"
        if isinstance(completion, PlayedEpisode):
            if completion.context_full:
                return "context_full"
            if (
                sampled_tokens(completion) > TOKENS
                or len(completion.text.encode(errors="replace")) > TEXT_BYTES
            ):
                return "too_long"
        return ""

    def _gather(self, count: int) -> list[FinishedRequest]:
        """Return the `count` oldest finished groups; fewer if questions could not be generated.

        Raises:
            Unavailable: All questions are too long for the model.
        """
        version, asked = self._counters.policy_version, 0
        self._too_long.clear()
        while len(self._ready) < count or self._too_old(version):
            missing = count + self._generation.ahead(count) - len(self._asked)
            if missing > 0 and asked < DYNAMIC_FACTOR * count:
                asked += missing
                self._ask(missing)
            if not self._generation.statistics().unfinished:
                if missing > 0 and asked < DYNAMIC_FACTOR * count:
                    continue
                break
            done, failed = self._episodes.play(self._generation.finished(version), version)
            for number, error in failed:
                task = self._asked.pop(number).ref.id
                self._drops.group.drop("not_scored", task=task, error=str(error))
            self._ready += done
            self._ready.sort(key=lambda one: first_version(one.sample, version))
        taken, self._ready = self._ready[:count], self._ready[count:]
        if self._too_long and not taken:
            raise Unavailable(f"all questions are too long: {self._too_long[0]}")
        return taken

    def _too_old(self, version: int) -> bool:
        """Return True if an unfinished group would exceed MAX_LAG in the next step."""
        versions = self._generation.statistics().oldest, self._episodes.oldest
        return any(oldest is not None and version - oldest >= MAX_LAG for oldest in versions)

    def _ask(self, count: int) -> None:
        numbered = [next_question(self._tasks, self._counters) for _ in range(count)]
        questions = self._scorer.score_many([(ref, []) for _, ref in numbered])
        for (sequence, ref), question in zip(numbered, questions, strict=True):
            if not isinstance(question, Scored):
                self._drops.question.drop("no_question", task=ref.id, error=str(question))
                continue
            try:
                if TASKS[ref.id].turns > 1:
                    self._episodes.begin(sequence, ref, question.prompt)
                else:
                    self._generation.submit(Request(sequence, question.prompt))
            except PromptTooLong as error:
                self._too_long.append(str(error))
                self._drops.question.drop("too_long", task=ref.id, error=str(error))
                continue
            self._drops.question.keep()
            self._asked[sequence] = PendingQuestion(sequence, ref, question.prompt)


def _published(completion: SampledCompletion) -> Completion:
    """Return the completion that peers receive; for an episode, the actions concatenated."""
    played = completion.turns if isinstance(completion, PlayedEpisode) else []
    turns = played or [completion]
    ids = [i for turn in turns for i in turn.ids]
    logprobs = [x for turn in turns for x in turn.logprobs]
    text, lengths = join_turns([turn.text for turn in turns], [len(turn.ids) for turn in turns])
    return Completion(
        text,
        len(ids),
        min(0.0, math.fsum(logprobs)),
        completion.finish,
        pack_ids(ids),
        pack_logprobs(logprobs),
        lengths if played else [],
    )
