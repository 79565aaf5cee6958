"""Swarms of 10,000 and 100,000 nodes for benchmarks.scale, in numpy: steps in lockstep, and the
rules of `rollouts.offers` simplified.

In a step every node asks one of its sixteen neighbours for a listing, in turn; it draws from what
this one and two of those before have listed, by spread × freshness, up to half from one of them. No
trust, no liars, no failures: benchmarks.scale_events has those. What a node asks for does not
depend on the number of nodes here, by construction; what comes of it may.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale_events import (
    DEGREE,
    LEARNT,
    LIFE_SECONDS,
    MADE,
    ROOM,
    STEP_SECONDS,
    TURNOVER_SECONDS,
)
from swarmnode.rollouts.offers import HALF_LIFE_SECONDS, MOST_OFFERED
from swarmnode.wire.limits import LISTED

CHUNK = 10_000
HOLDERS_AT_ONCE = 3
AT_ONCE = 1
"""Listings in a step: there is plenty on offer."""
SHELF = 64
TAKEN = 24
"""Groups that a node remembers to have taken."""
NOBODY = -1


@dataclass(frozen=True)
class Outcome:
    """After warming up, per node and step where nothing else is said."""

    nodes: int
    seed: int
    entries: float
    """Listed entries received."""
    listings: float
    pulls: float
    pulled: float
    full: float
    """Steps in which ROOM groups came."""
    used_share: float
    age_seconds: float
    authors: float
    """Distinct ones of a node in all counted steps."""
    spread_steps: int | None


class Model:
    """Group ids are (step · nodes + author) · MADE + number."""

    def __init__(self, nodes: int, seed: int) -> None:
        self.nodes = nodes
        self.rng = np.random.default_rng([seed, nodes])
        self.degree = min(DEGREE, nodes - 1)
        self.step = 0
        self.shelves: NDArray[np.int64] = np.full((nodes, SHELF), NOBODY, np.int64)
        self.kept = np.zeros(nodes, np.int64)
        """Groups that each node ever put on its shelf."""
        self.cursors = np.zeros((nodes, self.degree), np.int64)
        self.linked = np.stack([self._others(np.arange(nodes)) for _ in range(self.degree)], axis=1)
        self.taken: NDArray[np.int64] = np.full((nodes, TAKEN), NOBODY, np.int64)
        self.knows = np.zeros(nodes, bool)
        self.met_shown = np.zeros(nodes, np.int64)
        self.spreads: list[NDArray[np.float32]] = []
        self.shown: list[NDArray[np.bool_]] = []

    def _others(self, of: NDArray[np.int64]) -> NDArray[np.int64]:
        """A random other node for each of `of`."""
        return (of + self.rng.integers(1, self.nodes, len(of))) % self.nodes

    def advance(self) -> tuple[NDArray[np.int64], int, int]:
        """One step. Returns what each node took, (N, ROOM) with NOBODY where nothing came; entries
        listed; requests for groups."""
        nodes, everybody = self.nodes, np.arange(self.nodes)
        for peer in self.rng.choice(
            nodes, self.rng.binomial(nodes, STEP_SECONDS / LIFE_SECONDS), replace=False
        ):
            self.shelves[peer] = self.taken[peer] = NOBODY
            self.kept[peer] = self.cursors[peer] = self.met_shown[peer] = 0
            self.knows[peer] = False
        swapped = self.rng.random(nodes) < STEP_SECONDS / TURNOVER_SECONDS
        which = self.rng.integers(0, self.degree, nodes)
        self.linked[swapped, which[swapped]] = self._others(everybody[swapped])
        self.cursors[swapped, which[swapped]] = 0
        self.spreads.append(self.rng.uniform(0.1, 0.5, nodes * MADE).astype(np.float32))
        self.shown.append(np.repeat(self.knows, MADE))
        own = (self.step * nodes + everybody)[:, None] * MADE + np.arange(MADE)
        self._put(own)
        turn = [(self.step * AT_ONCE + n) % self.degree for n in range(min(AT_ONCE, self.degree))]
        entries = 0
        for place in turn:
            holders = self.linked[:, place]
            entries += int(
                np.minimum(np.maximum(0, self.kept[holders] - self.cursors[:, place]), LISTED).sum()
            )
            self.cursors[:, place] = self.kept[holders]
        places = (
            turn + [(self.step * AT_ONCE - 1 - n) % self.degree for n in range(HOLDERS_AT_ONCE)]
        )[:HOLDERS_AT_ONCE]
        took, pulls = np.full((nodes, ROOM), NOBODY, np.int64), 0
        for start in range(0, nodes, CHUNK):
            part = slice(start, min(start + CHUNK, nodes))
            took[part], some = self._choose(everybody[part], sorted(set(places)))
            pulls += some
        here = took != NOBODY
        self.taken = np.concatenate([self.taken[:, ROOM:], took], axis=1)
        self._put(took)
        self.met_shown += (here & self._of(self.shown, took, False)).sum(axis=1)
        self.knows |= self.met_shown >= LEARNT
        self.step += 1
        return took, entries, pulls

    def _choose(self, who: NDArray[np.int64], places: list[int]) -> tuple[NDArray[np.int64], int]:
        offered = np.concatenate(
            [self.shelves[self.linked[who, place]][:, -MOST_OFFERED:] for place in places], axis=1
        )
        holder = np.repeat(np.arange(len(places)), MOST_OFFERED)
        author, made = offered // MADE % self.nodes, offered // (MADE * self.nodes)
        weights = self._of(self.spreads, offered, 0.0) * 0.5 ** (
            (self.step - made) * STEP_SECONDS / HALF_LIFE_SECONDS
        )
        known = (offered[:, :, None] == self.taken[who][:, None, :]).any(axis=2)
        weights = np.where((offered == NOBODY) | (author == who[:, None]) | known, 0.0, weights)
        with np.errstate(divide="ignore"):
            keys = np.log(self.rng.random(offered.shape)) / weights
        keys = np.where(weights > 0, keys, -np.inf)
        order = np.argsort(-keys, axis=1)[:, : 3 * ROOM]
        took = np.full((len(who), ROOM), NOBODY, np.int64)
        count, from_holder = (
            np.zeros(len(who), np.int64),
            np.zeros((len(who), len(places)), np.int64),
        )
        rows = np.arange(len(who))
        for rank in range(order.shape[1]):
            at = order[:, rank]
            content, of = offered[rows, at], holder[at]
            good = (
                (keys[rows, at] > -np.inf)
                & (count < ROOM)
                & ~(took == content[:, None]).any(axis=1)
            )
            good &= from_holder[rows, of] < -(-ROOM // min(2, len(places)))
            took[rows[good], count[good]] = content[good]
            from_holder[rows[good], of[good]] += 1
            count += good
        return took, int((from_holder > 0).sum())

    def _put(self, groups: NDArray[np.int64]) -> None:
        """Put (N, n) groups on the shelves, the newest last; NOBODY puts none, its place is
        lost."""
        self.shelves = np.concatenate([self.shelves[:, groups.shape[1] :], groups], axis=1)
        self.kept += (groups != NOBODY).sum(axis=1)

    def _of(self, by_step: list[NDArray], ids: NDArray[np.int64], missing: float) -> NDArray:
        """What `by_step`, an array for each step, has for every group of `ids`."""
        found = np.full(ids.shape, missing, by_step[0].dtype)
        made, within = ids // (MADE * self.nodes), ids % (MADE * self.nodes)
        for step in np.unique(made[ids != NOBODY]):
            here = (made == step) & (ids != NOBODY)
            found[here] = by_step[step][within[here]]
        return found


def run(nodes: int, seed: int, steps: int, warm: int) -> Outcome:
    """`steps` in all, of which the first `warm` count for nothing."""
    model = Model(nodes, seed)
    entries = pulls = pulled = full = 0
    ages: list[float] = []
    used: set[int] = set()
    authors: list[set[int]] = [set() for _ in range(min(nodes, 200))]
    spread_steps: int | None = None
    for step in range(steps):
        if step == warm:
            model.knows[0] = True
        took, listed, requests = model.advance()
        if step < warm:
            continue
        here = took[took != NOBODY]
        entries, pulls, pulled = entries + listed, pulls + requests, pulled + len(here)
        full += int((took != NOBODY).all(axis=1).sum())
        ages.append(float((step - here // (MADE * nodes)).mean()) * STEP_SECONDS)
        used.update(here[here % 97 == 0].tolist())  # a sample is enough
        for node, met in enumerate(authors):
            met.update((took[node][took[node] != NOBODY] // MADE % nodes).tolist())
        if spread_steps is None and model.knows.mean() >= 0.9:
            spread_steps = step - warm + 1
    counted = steps - warm
    per = counted * nodes
    made = sum(1 for group in range(-(-warm * nodes * MADE // 97) * 97, steps * nodes * MADE, 97))
    return Outcome(
        nodes,
        seed,
        entries / per,
        float(min(AT_ONCE, nodes - 1)),
        pulls / per,
        pulled / per,
        full / per,
        len(used) / made,
        float(np.mean(ages)),
        float(np.mean([len(met) for met in authors])),
        spread_steps,
    )
