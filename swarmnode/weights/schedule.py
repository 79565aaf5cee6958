"""When an outer step of which fragment is due, and what of it. Pure, no torch; `step` counts
training steps.

    due ─▶ the partner has all of it ───▶ done
      └──▶ it has some: the rest is left ─▶ midway to the next fragment, one who has that is asked
      ─▶ averaged, or stepped alone

So for each outer step there is at most one exchange more, half a way later, and what is left delays
no other fragment. A rest that nothing came of until its fragment is due again is part of that. A
tensor is left once: where something was, the fragment's next outer step is one of all of it, so
that whatever partners have, claim or hold up, no tensor is passed over twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from swarmnode.weights import fragments

EARLY: Final = 0.5
"""Share of the time between two outer steps of a fragment: one taken so short a time ago counts for
the one that is due now."""
LEAST_GAP: Final = 4
"""Training steps between outer steps below which nothing is left for later: there would be no time
for an exchange in between."""


class OuterSchedule:
    """The fragments of a policy, `count` of them, each due every `every` steps; tensors go by their
    names.

    The trainer's thread changes it; any thread may ask what is left.
    """

    def __init__(self, every: int, count: int) -> None:
        self._every = max(every, count)
        self._stepped_at = [-self._every] * count
        self._tried: int | None = None
        """The fragment that was due last, until its outer step is taken."""
        self._left: dict[int, frozenset[str]] = {}
        """What of a fragment its last outer step was not of, longest ago first."""
        self._whole: set[int] = set()
        """Fragments that something is left of and that are due again, all of them."""

    @property
    def _gap(self) -> int:
        return self._every // len(self._stepped_at)

    def due(self, step: int) -> int | None:
        """The fragment to find a partner for after `step`; None where none is, or where a partner
        that proposed has had us step lately."""
        fragment = self._regular(step)
        if fragment is None:
            return self._rest_due(step)
        if step - self._stepped_at[fragment] < self._every * EARLY:
            return None
        if fragment in self._left:
            self._whole.add(fragment)
        self._tried = fragment
        return fragment

    def left(self, fragment: int) -> frozenset[str]:
        """What its last outer step was not of and is still due by itself; empty for all or
        nothing."""
        return self._left.get(fragment, frozenset()) if fragment not in self._whole else frozenset()

    def takes(self, fragment: int, names: Iterable[str]) -> list[str]:
        """Those of `names` that an outer step now is of: what is left, if any of it is there, else
        all."""
        there, left = list(names), self.left(fragment)
        return [name for name in there if name in left] or there

    def is_rest(self, fragment: int, names: Collection[str]) -> bool:
        """Whether an outer step of the tensors `names` would be what is left of the last one, or
        some of it."""
        return bool(names) and self.left(fragment).issuperset(names)

    def leaves(self, fragment: int, names: Collection[str]) -> bool:
        """Whether an outer step of the tensors `names`, which a partner has, may leave the others
        for another partner. Otherwise these take theirs in the same moment, as if alone."""
        if self._gap < LEAST_GAP or len(self._stepped_at) == 1:
            return False
        return fragment not in self._left or self.is_rest(fragment, names)

    def stepped(
        self, fragment: int, names: Collection[str], held: Iterable[str], step: int
    ) -> None:
        """An outer step of the tensors `names` was taken, of all of the fragment that are
        `held`."""
        if self.is_rest(fragment, names):
            left = self._left.pop(fragment).difference(names)
        else:
            left = frozenset(held).difference(names)
            self._left.pop(fragment, None)
            self._whole.discard(fragment)
            self._stepped_at[fragment] = step
            self._tried = None if self._tried == fragment else self._tried
        if left:
            self._left[fragment] = left

    def _rest_due(self, step: int) -> int | None:
        """The fragment to find a partner for what is left of, where `step` is midway and the one
        that was due has taken its outer step."""
        midway = step - (self._gap + 1) // 2
        last = self._regular(midway) if midway > 0 and self._tried is None else None
        if last is None:
            return None
        # it is due, all of it, before a search for some of it would have to end
        following = (last + 1) % len(self._stepped_at)
        return next(
            (
                fragment
                for fragment in self._left
                if fragment != following and fragment not in self._whole
            ),
            None,
        )

    def _regular(self, step: int) -> int | None:
        return fragments.due(step, self._every, len(self._stepped_at))
