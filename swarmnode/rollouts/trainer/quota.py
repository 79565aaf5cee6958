"""Bound on how often peers' answers may teach a token, relative to own rewarded answers.

A verifier rewards a correct answer and ignores an irrelevant token in it (a "mark"). On-policy
training is neutral to such a token, but peers that write it in all of their answers would teach it.
So own rewarded answers set the scale: the share of trained peer answers that contain a token is at
most about the share of own rewarded answers of the task that contain it. An answer above this bound
is not trained on. A token that rewards require appears in own rewarded answers. While there are few
of them, all own answers set the scale.

Tokens of the question and of its right answer are not counted. All answers of a group have them,
and another question has others, so that an honest peer's groups would exceed the bound. A mark that
consists of such tokens is therefore not bounded.

    own     ─▶ counts, per task, how many own answers contain each token
    takes   ─▶ decides whether a peer's rewarded answer may be trained on

An answer is accepted or refused as a whole. If its part before the token were trained on, a second
mark in that part would not be counted. Each token counts once per answer, so that a name from the
question counts once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from swarmnode.latest import Latest

UNSEEN = 0.5
"""Answers added to the own count of every token, since a token may be right even if this node has
not written it yet."""
CHANCE = 1.0
"""Maximum probability of refusing an honest answer by chance, as an exponent: about e^-CHANCE for
an answer of any length. The bound is Bernstein's inequality for a Poisson count, at probability
e^-CHANCE ÷ (number of the answer's tokens) per token."""
ENOUGH_ANSWERS = 8
"""Number of own rewarded answers of a task below which all own answers are compared. The bound
starts at this number of own answers of any kind. With 32 a real model wrote a mark in its own
answers before the bound began; without a bound where rewards are rare, it wrote one in 91 % of its
answers."""
MEMORY_ANSWERS = 256
"""Number of remembered answers: at twice as many, all counts are halved."""
MOST_TASKS = 256
MOST_TOKENS = 8192
"""Number of distinct tokens counted per task: at twice as many, the rarest are dropped."""


@dataclass
class TokenCounts:
    """Number of answers to one task, and of those that contain each token."""

    answers: float = 0.0
    tokens: Counter[int] = field(default_factory=Counter)

    def add(self, tokens: set[int]) -> None:
        """Count one answer that contains these tokens."""
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
    """A token that is more frequent in peers' rewarded answers than in own ones."""

    task: str
    token: int
    own: float
    """Share of own answers that contain it: of rewarded ones, or of all while few earn."""
    theirs: float
    """Share of peers' rewarded answers that contain it."""

    def words(self, name_of: Callable[[int], str]) -> str:
        """Return a description for the operator; `name_of` converts a token id to text."""
        theirs, own = 100 * self.theirs, 100 * self.own
        return (
            f"peers write {name_of(self.token)!r} in {theirs:.0f} % of their rewarded answers to"
            f" {self.task}, this node in {own:.0f} %"
        )


@dataclass
class _Task:
    tried: TokenCounts = field(default_factory=TokenCounts)
    """Counts of all own answers."""
    rewarded: TokenCounts = field(default_factory=TokenCounts)
    """Counts of own rewarded answers."""
    theirs: TokenCounts = field(default_factory=TokenCounts)
    learnt: TokenCounts = field(default_factory=TokenCounts)
    """Counts of the peers' answers that were accepted."""

    @property
    def own(self) -> TokenCounts:
        """The own answers that peers' answers are compared with."""
        return self.rewarded if self.rewarded.answers >= ENOUGH_ANSWERS else self.tried


class TokenQuota:
    """Token counts by task. They are not saved; own answers rebuild them after a restart."""

    def __init__(self) -> None:
        self._tasks = Latest[str, _Task](MOST_TASKS)
        self.refused: Drift | None = None
        """The token for which `takes` last refused an answer: the one that is furthest beyond its
        bound."""

    def own(self, task: str, ids: Sequence[int], rewarded: bool = True) -> None:
        """Record an own answer.

        Args:
            rewarded: True if it earned more than the mean of its group.
        """
        known = self._of(task)
        known.tried.add(set(ids))
        if rewarded:
            known.rewarded.add(set(ids))

    def takes(
        self,
        task: str,
        ids: Sequence[int],
        count: int | None = None,
        asked: Collection[int] = (),
    ) -> bool:
        """Record a peer's rewarded answer, and return True if it may be trained on.

        Args:
            count: Number of leading tokens that would be trained on; None for all.
            asked: Tokens of the question and of its right answer.
        """
        known = self._of(task)
        known.theirs.add(set(ids).difference(asked))
        different = set(ids[:count]).difference(asked)
        over = {
            known.learnt.tokens[token] + 1 - self._most(known, token, len(different)): token
            for token in different
        }
        taken = known.own.answers < ENOUGH_ANSWERS or max(over, default=0.0) <= 0
        if taken:
            known.learnt.add(different)
        else:
            self.refused = self._drift(task, known, over[max(over)])
        return taken

    def _drift(self, task: str, known: _Task, token: int) -> Drift:
        share = lambda counts: counts.tokens[token] / counts.answers
        return Drift(task, token, share(known.own), share(known.theirs))

    def _most(self, known: _Task, token: int, different: int) -> float:
        """Return the maximum number of peers' answers with a token that may be trained on.

        It is the number expected from own answers, plus a margin for chance.

        Args:
            different: Number of distinct tokens that are tested in the same answer.
        """
        rate = (known.own.tokens[token] + UNSEEN) / (known.own.answers + UNSEEN)
        expected = rate * (known.learnt.answers + 1)
        surprise = CHANCE + math.log(different)
        return expected + surprise + math.sqrt(2 * surprise * expected)

    def _of(self, task: str) -> _Task:
        known = self._tasks[task] = self._tasks.get(task) or _Task()
        return known
