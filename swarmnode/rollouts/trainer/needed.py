"""Finds the end of a peer's rewarded answer that its reward does not need.

Many verifiers ignore text behind the answer. A peer can write the same text (a "mark") behind all
of its right answers, and training on them would teach the mark. So this node removes tokens at the
end of each rewarded answer and scores the rest. If the reward stays, the removed tokens are not
trained on.

    1           remove one token; most answers need it
    2, 4, 8, …  where the reward stayed, remove more, until the reward falls

Between the last removal that keeps the reward and the first one that lowers it, the boundary is not
known. The tokens between them are not trained on either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from swarmnode.policy.text import PolicyText
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.rollouts.trainer.batch import TrainingGroup
from swarmnode.rollouts.trainer.rescore import Rescore
from swarmnode.tasks.frames import Scored
from swarmnode.tasks.registry import TASKS
from swarmnode.wire.limits import COMPLETIONS


def needed_only(
    group: ExternalGroup, accepted: TrainingGroup, text: PolicyText, rescore: Rescore
) -> TrainingGroup:
    """Return a group without training on the ends of answers that their rewards do not need.

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
    kept = lambda tries: _kept(group, tries, answers, text, rescore)
    learnt = list(accepted.learnt)
    for i, ending in _needless(answers, kept).items():
        if ending:
            learnt[i] = min(learnt[i], max(1, len(answers[i]) - ending))
    return replace(accepted, learnt=learnt)


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
    answers: dict[int, list[int]], kept: Callable[[list[Try]], set[Try]]
) -> dict[int, int]:
    """Return for each completion the number of tokens at the end that its reward may not need.

    Args:
        kept: Returns those tries that keep the reward.
    """
    found = kept([(i, 1) for i, ids in answers.items() if len(ids) > 1])
    found |= kept([(i, 2**n) for i, _ in found for n in range(1, 17) if 2**n < len(answers[i])])
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
    text: PolicyText,
    rescore: Rescore,
) -> set[Try]:
    """Return the tries that earn as much as the whole answer."""
    kept = set()
    for start in range(0, len(tries), COMPLETIONS):
        some = tries[start : start + COMPLETIONS]
        texts = [text.decode(answers[i][: len(answers[i]) - n]) for i, n in some]
        (scored,) = rescore([(group.group.task, texts)])
        if isinstance(scored, Exception):
            raise scored
        kept |= {
            (i, n)
            for (i, n), reward in zip(some, scored.rewards, strict=True)
            if reward >= group.rewards[i]
        }
    return kept
