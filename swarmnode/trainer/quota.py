"""Bound on how often strangers' answers may teach a token: in proportion to own rewarded answers.

A verifier pays for an answer and ignores a mark beside it. On-policy learning is then neutral to
the mark, and strangers that write it in all their answers are not. So own rewarded answers are the
measure: of a task in which this node earns rewards itself, the part of strangers' answers that have
a token is at most about the part of own rewarded answers that have it. An answer beyond that
teaches nothing. What rewards need, own rewarded answers have.

    own     ─▶ how many own rewarded answers of a task have each token
    takes   ─▶ whether a stranger's rewarded answer may be learnt
    drift   ─▶ the token that strangers' answers have most in excess of own ones

An answer is learnt or not as a whole: were its part before the token learnt, a second mark there
would not be counted. Tokens are counted once in an answer, so that a name that a question is about
counts once. The token that an answer begins with, and the one before its end, are counted for their
place as well: a zero before a number is a mark, within a number it is none.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

FIRST, LAST = 2**40, 2**41
"""Added to a token's id where its place is counted: at the beginning, before the end."""
UNSEEN = 0.5
"""Answers that are added to own ones: what this node has not written yet may be right."""
CHANCE = 1.0
"""An honest answer is refused by chance with a probability of about e^-CHANCE at most, whatever its
length: the bound is Bernstein's for a Poisson count, at e^-CHANCE ÷ the answer's tokens for each of
them."""
ENOUGH_ANSWERS = 32
"""Own rewarded answers of a task below which nothing is bounded: where rewards are rare, strangers'
answers are worth most, and own ones prove little."""
MEMORY_ANSWERS = 256
"""Answers that are remembered: at twice as many, all counts are halved."""
MOST_COMPARED = 512
"""Tokens of a task that are looked at for drift: those that strangers' answers have most."""
MOST_TASKS = 256
MOST_TOKENS = 8192
"""Different tokens of a task that are counted; the rarest are forgotten at twice as many."""


@dataclass
class TokenCounts:
    """Rewarded answers of one task, and how many of them have each token."""

    answers: float = 0.0
    tokens: Counter[int] = field(default_factory=Counter)

    def add(self, tokens: set[int]) -> None:
        """Count one answer with these tokens."""
        self.answers += 1
        self.tokens.update(tokens)
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
    """Part of own rewarded answers that have it."""
    theirs: float
    """Part of strangers' rewarded answers that have it."""

    @property
    def excess(self) -> float:
        """Part of answers that strangers have more, −1 to 1."""
        return self.theirs - self.own

    def words(self, decode: Callable[[list[int]], str]) -> str:
        """Return a line for people; decode: token ids → text."""
        token = decode([self.token % FIRST]) or f"token {self.token % FIRST}"
        places = {0: "", FIRST: " first", LAST: " last"}
        place = places[self.token - self.token % FIRST]
        theirs, own = 100 * self.theirs, 100 * self.own
        return (
            f"peers write {token!r}{place} in {theirs:.0f} % of their rewarded answers to"
            f" {self.task}, this node in {own:.0f} %"
        )


@dataclass
class _Task:
    own: TokenCounts = field(default_factory=TokenCounts)
    theirs: TokenCounts = field(default_factory=TokenCounts)
    learnt: TokenCounts = field(default_factory=TokenCounts)
    """Those of `theirs` that were taken."""


class TokenQuota:
    """Counts by task. Not saved: after a restart the first own answers restore it."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, _Task] = OrderedDict()

    def own(self, task: str, ids: Sequence[int]) -> None:
        """Record an own answer that earned more than the mean of its group."""
        self._of(task).own.add(counted(ids))

    def takes(self, task: str, ids: Sequence[int], count: int | None = None) -> bool:
        """Return True if a stranger's rewarded answer may be learnt, and record it.

        Args:
            count: First tokens that would be learnt; None: all.
        """
        known = self._of(task)
        known.theirs.add(counted(ids))
        different = counted(ids, count)
        taken = known.own.answers < ENOUGH_ANSWERS or all(
            known.learnt.tokens[token] + 1 <= self._most(known, token, len(different))
            for token in different
        )
        if taken:
            known.learnt.add(different)
        return taken

    def drift(self) -> Drift | None:
        """Return the token that strangers' answers have most in excess; None without evidence."""
        found = [
            Drift(
                task, token, known.own.tokens[token] / known.own.answers, n / known.theirs.answers
            )
            for task, known in self._tasks.items()
            if min(known.own.answers, known.theirs.answers) >= ENOUGH_ANSWERS
            for token, n in known.theirs.tokens.most_common(MOST_COMPARED)
        ]
        return max(found, key=lambda each: each.excess, default=None)

    def _most(self, known: _Task, token: int, different: int) -> float:
        """Return how many answers with a token may be learnt, those that own answers lead to expect
        and what chance may add.

        Args:
            different: Tokens that are tested in the same answer.
        """
        rate = (known.own.tokens[token] + UNSEEN) / (known.own.answers + UNSEEN)
        expected = rate * (known.learnt.answers + 1)
        surprise = CHANCE + math.log(different)
        return expected + surprise + math.sqrt(2 * surprise * expected)

    def _of(self, task: str) -> _Task:
        known = self._tasks.pop(task, None) or _Task()
        self._tasks[task] = known
        if len(self._tasks) > MOST_TASKS:
            self._tasks.popitem(last=False)
        return known


def counted(ids: Sequence[int], count: int | None = None) -> set[int]:
    """Return what is counted of an answer: its first `count` tokens (None: all), the one that it
    begins with, and of a whole answer the one before its end."""
    some = ids[:count]
    found = {*some, *(FIRST + token for token in some[:1])}
    return found | {LAST + token for token in ids[-2:-1]} if len(some) == len(ids) else found
