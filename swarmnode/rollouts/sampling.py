"""Which of the pool's groups a step trains on: pure functions of weights and a random.Random.

`weighted` (the default) prefers groups that teach more, are fresher and come from peers that proved
themselves, and spreads a step over peers. `uniform` is the paper's (SAPO, arXiv 2509.08721, section
4: drop zero-advantage groups, then sample uniformly). Weights never look at the reward's level:
ranking by reward selects easy questions, and whoever makes up easy questions.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

PROBATION_GROUPS = 16
"""Groups of a peer that were trained on before it is trusted in full."""
PROBATION_TRUST = 0.25
"""Trust of a peer that was never trained on. An identity costs nothing, so a new one counts for a
quarter."""
KNOWN_GROUPS = 3
"""A peer of which more were trained on has a name of its own when places in a step are given out;
all others share one."""
SPREAD_FLOOR = 0.05
"""Least spread a weight is made from: without the zero-advantage filter a flat group may be drawn,
rarely."""

Item = TypeVar("Item")


def spread(rewards: Sequence[float]) -> float:
    """Standard deviation of a group's rewards, (G,) in [0, 1]; at most 0.5. The size of the
    advantages before they are normalised."""
    mean = sum(rewards) / len(rewards)
    return math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))


def freshness(staleness: int, half_life: float) -> float:
    """1 for a group that just arrived, half of it every `half_life` own policy versions."""
    return float(0.5 ** (max(staleness, 0) / half_life))


def trust(reputation: float, groups_used: int) -> float:
    """`reputation` in [0, 1] × a probation factor that rises from 0.25 to 1 over the first 16
    groups trained on."""
    served = min(1.0, groups_used / PROBATION_GROUPS)
    return min(1.0, max(0.0, reputation)) * (PROBATION_TRUST + (1 - PROBATION_TRUST) * served)


def is_known(trusted: float) -> bool:
    """Whether a peer of this trust has a name of its own: names cost nothing, groups that were
    trained on do."""
    return trusted > trust(1.0, KNOWN_GROUPS)


def weight(rewards: Sequence[float], staleness: int, half_life: float, trusted: float) -> float:
    """Sampling weight: advantage spread × freshness × trust, >= 0. Zero (a peer without reputation)
    is never drawn."""
    return max(spread(rewards), SPREAD_FLOOR) * freshness(staleness, half_life) * trusted


def shuffle_weighted(
    items: Sequence[Item], weights: Sequence[float], rng: random.Random
) -> list[Item]:
    """A random order in which each next item is drawn in proportion to its weight; items of weight
    0 are left out.

    Sorting by log(u) / w is sampling without replacement (Efraimidis and Spirakis, 2006).
    """
    keyed = [(math.log(1.0 - rng.random()) / w, i) for i, w in enumerate(weights) if w > 0]
    return [items[i] for _, i in sorted(keyed, reverse=True)]


def most_per_peer(room: int) -> int:
    """Return how many of `room` groups one of several peers may fill: half, rounded up."""
    return -(-room // 2)


def spread_over_peers(
    ordered: Sequence[Item],
    count: int,
    peer_of: Callable[[Item], Hashable],
    per_peer: int,
    already: Sequence[Item] = (),
) -> list[Item]:
    """`already`, then the first of `ordered` up to `count`: each peer once before any twice, and
    none above `per_peer`."""
    rounds: list[list[Item]] = [[] for _ in range(per_peer)]
    taken = Counter(peer_of(item) for item in already)
    for item in ordered:
        nth = taken[peer_of(item)]
        if nth < per_peer:
            rounds[nth].append(item)
            taken[peer_of(item)] += 1
    return [*already, *(item for one in rounds for item in one)][:count]
