"""Finds the tokens of a peer's rewarded answer that its reward does not need.

Many verifiers ignore text beside the answer. A peer can write the same text (a "mark") before or
behind all of its right answers, and training on them would teach the mark. So this node removes
tokens at either end of each rewarded answer and scores the rest. If the reward stays, the removed
tokens are not trained on.

    1           remove one token; most short answers need it
    2, 4, 8, …  where the reward stayed, remove more, until the reward falls

Between the last removal that keeps the reward and the first one that lowers it, the boundary is not
known. The tokens between them are not trained on either.

At the end, any number of tokens is removed: text behind an answer is never needed. At the
beginning, at most MOST_BEGINNING tokens are: a verifier that reads only the last number needs no
token of the reasoning before it, and reasoning has to be trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from swarmnode.policy.text import PolicyText
from swarmnode.policy.ways import Row
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.tasks.frames import Scored, ScoreError
from swarmnode.tasks.registry import TASKS
from swarmnode.tasks.verifiers import MAJORITY
from swarmnode.trainer.batch import TrainingGroup
from swarmnode.wire.limits import COMPLETIONS
from swarmnode.wire.messages import TaskRef

MOST_BEGINNING = 3
"""Maximum number of tokens removed at the beginning of an answer. A longer beginning that the
reward does not need is taken for reasoning."""

Rescore = Callable[[Sequence[tuple[TaskRef, Sequence[str]]]], list[Scored | ScoreError]]
"""`tasks.client.Scorer.score_many`."""


def needed_only(
    group: ExternalGroup, accepted: TrainingGroup, text: PolicyText, rescore: Rescore
) -> TrainingGroup:
    """Return a group without training on tokens that its rewards do not need.

    An ending is cut off. A beginning is moved to the prompt, so that the rest is scored as before.
    Votes, episodes and answers to an environment are returned as they are. A vote needs the whole
    group, and an environment may take seconds for each answer.

    Raises:
        ScoreError: The scorer failed for an answer that it had scored before.
    """
    if not accepted.learnt or not _can_be_shortened(group):
        return accepted
    mean = fmean(group.rewards)
    answers = {  # completion -> its tokens before the end token
        i: [each for each in row.completion if each not in text.eos_ids]
        for i, row in enumerate(accepted.rows)
        if group.rewards[i] > mean and accepted.learnt[i]
    }
    kept = lambda tries, cut: _kept(group, tries, answers, cut, text, rescore)
    endings = _needless(answers, lambda tries: kept(tries, lambda ids, n: ids[: len(ids) - n]))
    beginnings = _needless(
        answers, lambda tries: kept(tries, lambda ids, n: ids[n:]), most=MOST_BEGINNING + 1
    )
    rows, learnt = list(accepted.rows), list(accepted.learnt)
    old = list(accepted.old_logprobs)
    for i, ids in answers.items():
        if ending := endings[i]:
            learnt[i] = min(learnt[i], max(1, len(ids) - ending))
        beginning = beginnings[i]
        if 0 < beginning <= MOST_BEGINNING and beginning < len(ids):
            row = rows[i]
            rows[i] = Row(row.prompt + row.completion[:beginning], row.completion[beginning:])
            old[i], learnt[i] = old[i][beginning:], max(0, learnt[i] - beginning)
    return replace(accepted, rows=rows, learnt=learnt, old_logprobs=old, sampler_logprobs=old)


def _can_be_shortened(group: ExternalGroup) -> bool:
    """Return True if shortened answers of this group can be scored at little cost."""
    spec = TASKS.get(group.group.task.id)
    if spec is None or spec.generator == MAJORITY or spec.environment is not None:
        return False
    return not any(completion.turns for completion in group.group.completions)


Try = tuple[int, int]
"""Completion, number of removed tokens."""


def _needless(
    answers: dict[int, list[int]], kept: Callable[[list[Try]], set[Try]], most: int = 2**16
) -> dict[int, int]:
    """Return for each completion the number of tokens at one end that its reward may not need.

    Args:
        kept: Returns those tries that keep the reward.
        most: Largest number of tokens to remove.
    """
    found = kept([(i, 1) for i, ids in answers.items() if len(ids) > 1])
    found |= kept(
        [(i, 2**n) for i, _ in found for n in range(1, 17) if 2**n < min(len(answers[i]), most + 1)]
    )
    needless = {}
    for i, ids in answers.items():
        removed = 1
        while (i, removed) in found:
            removed *= 2
        needless[i] = min(removed, len(ids)) - 1
    return needless


def _kept(
    group: ExternalGroup,
    tries: list[Try],
    answers: dict[int, list[int]],
    cut: Callable[[list[int], int], list[int]],
    text: PolicyText,
    rescore: Rescore,
) -> set[Try]:
    """Return the tries that earn as much as the whole answer.

    Args:
        cut: Returns the tokens without a number of them at one end.
    """
    kept = set()
    for start in range(0, len(tries), COMPLETIONS):
        some = tries[start : start + COMPLETIONS]
        texts = [text.decode(cut(answers[i], n)) for i, n in some]
        (scored,) = rescore([(group.group.task, texts)])
        if isinstance(scored, Exception):
            raise scored
        kept |= {
            (i, n)
            for (i, n), reward in zip(some, scored.rewards, strict=True)
            if reward >= group.rewards[i]
        }
    return kept
