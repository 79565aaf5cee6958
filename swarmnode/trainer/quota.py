"""Bound on how often strangers' answers may teach a token: in proportion to own rewarded answers.

A verifier pays for an answer and ignores a mark beside it. On-policy learning is then neutral to
the mark, and strangers that write it in all their answers are not. So own rewarded answers are the
measure: of a task in which this node earns rewards itself, a token of strangers' rewarded answers
is learnt about as often as this node writes it in its own, and the first one beyond that ends what
is learnt of the completion. What rewards need, own rewarded answers have.

    own     ─▶ occurrences of each token per own rewarded answer of a task
    learnt  ─▶ tokens of a stranger's rewarded answer that are learnt
    drift   ─▶ the token that strangers' answers have most in excess of own ones
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

EXCESS = 1.25
"""Occurrences that are learnt, in units of those in own rewarded answers."""
SLACK = 4.0
"""Occurrences beyond that: of a rare token, chance decides."""
UNSEEN = 1.0
"""Occurrences that are added to own ones: what this node has not written yet may be right."""
ENOUGH_ANSWERS = 32
"""Own rewarded answers of a task below which nothing is bounded: where rewards are rare, strangers'
answers are worth most, and own ones prove little."""
MEMORY_ANSWERS = 256
"""Answers that are remembered: at twice as many, all counts are halved."""
MOST_TASKS = 256
MOST_TOKENS = 8192
"""Different tokens of a task that are counted; the rarest are forgotten at twice as many."""


@dataclass
class TokenCounts:
    """Occurrences of tokens in rewarded answers of one task."""

    answers: float = 0.0
    tokens: Counter[int] = field(default_factory=Counter)

    def add(self, ids: Sequence[int]) -> None:
        """Count the tokens of one answer."""
        self.answers += 1
        self.tokens.update(ids)
        if self.answers > 2 * MEMORY_ANSWERS:
            self.answers /= 2
            for token in self.tokens:
                self.tokens[token] /= 2  # type: ignore[assignment]  # weights, not counts
        if len(self.tokens) > 2 * MOST_TOKENS:
            self.tokens = Counter(dict(self.tokens.most_common(MOST_TOKENS)))


@dataclass(frozen=True)
class Drift:
    """A token that strangers' rewarded answers have more often than own ones."""

    task: str
    token: int
    own: float
    """Occurrences per own rewarded answer."""
    theirs: float
    """Occurrences per rewarded answer of strangers."""

    @property
    def excess(self) -> float:
        """Occurrences per answer that strangers have more."""
        return self.theirs - self.own


@dataclass
class _Task:
    own: TokenCounts = field(default_factory=TokenCounts)
    theirs: TokenCounts = field(default_factory=TokenCounts)
    learnt: Counter[int] = field(default_factory=Counter)
    """Occurrences that were learnt, of those in `theirs`."""


class TokenQuota:
    """Counts by task. Not saved: after a restart the first own answers restore it."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, _Task] = OrderedDict()

    def own(self, task: str, ids: Sequence[int]) -> None:
        """Record an own answer that earned more than the mean of its group."""
        self._of(task).own.add(ids)

    def learnt(self, task: str, ids: Sequence[int]) -> int:
        """Return how many first tokens of a stranger's rewarded answer are learnt, and record
        them."""
        known = self._of(task)
        before = known.theirs.answers
        known.theirs.add(ids)
        if known.theirs.answers < before:
            known.learnt = Counter({token: n / 2 for token, n in known.learnt.items()})  # type: ignore[misc]
        if len(known.learnt) > 2 * MOST_TOKENS:
            known.learnt = Counter(dict(known.learnt.most_common(MOST_TOKENS)))
        for position, token in enumerate(ids):
            if known.learnt[token] + 1 > self._most(known, token):
                return position
            known.learnt[token] += 1
        return len(ids)

    def drift(self) -> Drift | None:
        """Return the token that strangers' answers have most in excess; None without evidence."""
        found = [
            Drift(
                task, token, known.own.tokens[token] / known.own.answers, n / known.theirs.answers
            )
            for task, known in self._tasks.items()
            if min(known.own.answers, known.theirs.answers) >= ENOUGH_ANSWERS
            for token, n in known.theirs.tokens.items()
        ]
        return max(found, key=lambda each: each.excess, default=None)

    def _most(self, known: _Task, token: int) -> float:
        """Return how many occurrences of a token are learnt, of those in `theirs`."""
        if known.own.answers < ENOUGH_ANSWERS:
            return float("inf")
        rate = (known.own.tokens[token] + UNSEEN) / (known.own.answers + UNSEEN)
        return EXCESS * rate * known.theirs.answers + SLACK

    def _of(self, task: str) -> _Task:
        known = self._tasks.pop(task, None) or _Task()
        self._tasks[task] = known
        if len(self._tasks) > MOST_TASKS:
            self._tasks.popitem(last=False)
        return known
