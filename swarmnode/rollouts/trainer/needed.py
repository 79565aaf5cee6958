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
token of the reasoning before it, and reasoning has to be trained on. The beginning is searched
because `quota.py` does not count tokens of the question, such as JSON in "JSON {…}".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Protocol

from swarmnode.latest import Latest
from swarmnode.policy.text import PolicyText
from swarmnode.policy.ways import Row
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.rollouts.trainer.batch import TrainingGroup
from swarmnode.tasks.frames import Scored, ScoreError, ScorerFailed
from swarmnode.tasks.registry import TASKS
from swarmnode.wire.limits import COMPLETIONS
from swarmnode.wire.messages import TaskRef

MOST_BEGINNING = 3
"""Maximum number of tokens removed at the beginning of an answer. A longer beginning that the
reward does not need is taken for reasoning."""
SCORING_SECONDS, SCORING_SHARE = 5.0, 0.05
"""Seconds of scoring shortened answers of a peer after which its next group is refused, and share
of the passing time by which the count falls."""
MOST_PEERS = 256
"""Number of peers whose scoring time is remembered."""


class Rescore(Protocol):
    """`tasks.client.Scorer.score_many`."""

    def __call__(
        self, items: Sequence[tuple[TaskRef, Sequence[str]]], *, reveal: bool = False
    ) -> list[Scored | ScoreError]: ...


class ScoringBudget:
    """Limits the time of scoring shortened answers per peer: a slow verifier of the operator could
    take 30 s for a group."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent = Latest[str, tuple[float, float]](MOST_PEERS)
        """Peer → seconds spent and not yet refilled, and the time of that count."""

    def of(self, peer: str, rescore: Rescore) -> Rescore:
        """Return `rescore` for one group of a peer, which counts its time.

        Raises:
            ScorerFailed: The peer's earlier groups took too long.
        """
        now = self._clock()
        spent, counted = self._spent.get(peer, (0.0, now))
        spent = max(0.0, spent - SCORING_SHARE * (now - counted))
        self._spent[peer] = spent, now
        if spent >= SCORING_SECONDS:
            raise ScorerFailed(
                f"scoring shortened answers of this peer took {spent:.0f} seconds: use a faster"
                " verifier"
            )

        def scored(
            items: Sequence[tuple[TaskRef, Sequence[str]]], *, reveal: bool = False
        ) -> list[Scored | ScoreError]:
            started = self._clock()
            try:
                return rescore(items, reveal=reveal)
            finally:
                before, counted = self._spent.get(peer, (0.0, started))
                self._spent[peer] = before + self._clock() - started, counted

        return scored


def needed_only(
    group: ExternalGroup, accepted: TrainingGroup, text: PolicyText, rescore: Rescore
) -> TrainingGroup:
    """Return a group without training on tokens that its rewards do not need.

    An ending is cut off. A beginning is moved to the prompt, so that the rest is scored as before.
    Episodes and answers to an environment are returned as they are, because an environment may
    take seconds for each answer.

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
    sampler = list(accepted.sampler_logprobs)
    for i, ids in answers.items():
        if ending := endings[i]:
            learnt[i] = min(learnt[i], max(1, len(ids) - ending))
        beginning = beginnings[i]
        if 0 < beginning <= MOST_BEGINNING and beginning < len(ids):
            row = rows[i]
            rows[i] = Row(row.prompt + row.completion[:beginning], row.completion[beginning:])
            sampler[i], learnt[i] = sampler[i][beginning:], max(0, learnt[i] - beginning)
    return replace(accepted, rows=rows, learnt=learnt, sampler_logprobs=sampler)


def asked_tokens(group: ExternalGroup, text: PolicyText, rescore: Rescore | None) -> set[int]:
    """Return the tokens of a group's question and, if its task has one, of its right answer."""
    words = [group.prompt]
    if rescore is not None and _is_local(group):
        (scored,) = rescore([(group.group.task, [])], reveal=True)
        words += [scored.answer] if isinstance(scored, Scored) else []
    return text.word_ids(" ".join(words))


def _is_local(group: ExternalGroup) -> bool:
    """Return True if the group's question does not belong to an environment by URL."""
    spec = TASKS.get(group.group.task.id)
    return spec is not None and spec.environment is None


def _can_be_shortened(group: ExternalGroup) -> bool:
    """Return True if shortened answers of this group can be scored at little cost."""
    return _is_local(group) and not any(each.turns for each in group.group.completions)


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
