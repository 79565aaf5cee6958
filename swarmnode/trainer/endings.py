"""Finds the end of a peer's rewarded answer that its reward does not need.

Many verifiers ignore text after the answer. A peer can write the same text (a "mark") behind all
of its right answers, and training on them would teach the mark. So this node removes the last
tokens of each rewarded answer and scores the rest. If the reward stays, the removed tokens are not
trained on.

    1           remove the last token before the end token; most short answers need it
    2, 4, 8, …  where the reward stayed, remove more, until the reward falls

Between the last removal that keeps the reward and the first one that lowers it, the boundary is not
known. The tokens between them are not trained on either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from swarmnode.policy.text import PolicyText
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.tasks.frames import Scored, ScoreError
from swarmnode.tasks.registry import TASKS
from swarmnode.tasks.verifiers import MAJORITY
from swarmnode.trainer.batch import TrainingGroup
from swarmnode.wire.limits import COMPLETIONS
from swarmnode.wire.messages import TaskRef

Rescore = Callable[[Sequence[tuple[TaskRef, Sequence[str]]]], list[Scored | ScoreError]]
"""`tasks.client.Scorer.score_many`."""


def without_endings(
    group: ExternalGroup, accepted: TrainingGroup, text: PolicyText, rescore: Rescore
) -> TrainingGroup:
    """Return a group without training on endings that its rewards do not need.

    Votes, episodes and answers to an environment are returned as they are. A vote needs the whole
    group, and an environment may take seconds for each answer.

    Raises:
        ScoreError: The scorer failed for an answer that it had scored before.
    """
    if not accepted.learnt or not _has_endings(group):
        return accepted
    mean = fmean(group.rewards)
    answers = {  # completion -> its tokens before the end token
        i: [each for each in row.completion if each not in text.eos_ids]
        for i, row in enumerate(accepted.rows)
        if group.rewards[i] > mean and accepted.learnt[i]
    }
    needless = {i for i, _ in _kept(group, {i: [1] for i in answers}, answers, text, rescore)}
    powers = {i: [2**n for n in range(1, len(answers[i]).bit_length())] for i in needless}
    kept = _kept(group, powers, answers, text, rescore)
    learnt = list(accepted.learnt)
    for i in needless:
        removed = 1
        while (i, 2 * removed) in kept:
            removed *= 2
        # of `removed` to `2 * removed - 1` last tokens, the reward may need none
        learnt[i] = min(learnt[i], max(1, len(answers[i]) + 1 - 2 * removed))
    return replace(accepted, learnt=learnt)


def _has_endings(group: ExternalGroup) -> bool:
    """Return True if shortened answers of this group can be scored at little cost."""
    spec = TASKS.get(group.group.task.id)
    if spec is None or spec.generator == MAJORITY or spec.environment is not None:
        return False
    return not any(completion.turns for completion in group.group.completions)


def _kept(
    group: ExternalGroup,
    removals: dict[int, list[int]],
    answers: dict[int, list[int]],
    text: PolicyText,
    rescore: Rescore,
) -> set[tuple[int, int]]:
    """Return the (completion, number of removed tokens) that earn as much as the whole answer.

    Args:
        removals: For each completion, the numbers of last tokens to remove.
    """
    tries = [(i, n) for i, numbers in removals.items() for n in numbers if n < len(answers[i])]
    kept = set()
    for start in range(0, len(tries), COMPLETIONS):
        some = tries[start : start + COMPLETIONS]
        texts = [text.decode(answers[i][:-n]) for i, n in some]
        (scored,) = rescore([(group.group.task, texts)])
        if isinstance(scored, Exception):
            raise scored
        kept |= {
            (i, n)
            for (i, n), reward in zip(some, scored.rewards, strict=True)
            if reward >= group.rewards[i]
        }
    return kept
