"""The schedule of outer steps: which fragment is due after which training step, and which of its
tensors. Pure; no torch.

    due ─▶ the partner holds all of the fragment ──▶ done
      └──▶ it holds a part: the other tensors remain ──▶ midway to the next fragment, a partner that
           holds them is asked ──▶ averaged, or stepped alone

Each outer step thus causes at most one further swap, half a gap later, and the remaining tensors do
not delay other fragments. If they are still remaining when their fragment is due again, they join
that outer step, which then covers all of the fragment. So no tensor is skipped twice, whatever
partners hold or claim.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from swarmnode.weights import fragments

EARLY: Final = 0.5
"""An outer step taken within this share of the interval counts as the one that is due now."""
LEAST_GAP: Final = 4
"""Least gap between outer steps, in training steps, at which tensors may remain for a later swap. A
shorter gap has no time for one."""


class OuterSchedule:
    """Schedule of a policy's fragments. The trainer's thread changes it; any thread may read it.

    Args:
        every: Training steps between two outer steps of one fragment.
        count: Number of fragments.
    """

    def __init__(self, every: int, count: int) -> None:
        self._every = max(every, count)
        self._stepped_at = [-self._every] * count
        self._tried: int | None = None
        """The fragment that was due last, until its outer step is taken."""
        self._left: dict[int, frozenset[str]] = {}
        """Fragment → names of the tensors that its last outer step skipped; the oldest first."""
        self._whole: set[int] = set()
        """Fragments with remaining tensors that are due again as a whole."""

    @property
    def _gap(self) -> int:
        return self._every // len(self._stepped_at)

    def due(self, step: int) -> int | None:
        """Return the fragment that needs a partner after training step `step`, or None. A swap that
        a partner proposed recently counts as the outer step."""
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
        """Return the names of the fragment's tensors that remain from its last outer step; empty if
        the whole fragment is due or nothing remains."""
        return self._left.get(fragment, frozenset()) if fragment not in self._whole else frozenset()

    def takes(self, fragment: int, names: Iterable[str]) -> list[str]:
        """Return the subset of `names` that an outer step takes now: the remaining tensors among
        them, or all of them if none remains."""
        there, left = list(names), self.left(fragment)
        return [name for name in there if name in left] or there

    def is_rest(self, fragment: int, names: Collection[str]) -> bool:
        """Return True if all tensors `names` remain from the last outer step."""
        return bool(names) and self.left(fragment).issuperset(names)

    def leaves(self, fragment: int, names: Collection[str]) -> bool:
        """Return True if an outer step of the tensors `names`, which a partner holds, may leave the
        other tensors for another partner. Otherwise they take a solo step at the same time."""
        if self._gap < LEAST_GAP or len(self._stepped_at) == 1:
            return False
        return fragment not in self._left or self.is_rest(fragment, names)

    def stepped(
        self, fragment: int, names: Collection[str], held: Iterable[str], step: int
    ) -> None:
        """Record an outer step of the tensors `names`, of all tensors `held` of the fragment."""
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
        """Return a fragment with remaining tensors if `step` is midway between two outer steps and
        the first of these is taken, else None."""
        midway = step - (self._gap + 1) // 2
        last = self._regular(midway) if midway > 0 and self._tried is None else None
        if last is None:
            return None
        # the following fragment is due as a whole before a search for a part of it could end
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
