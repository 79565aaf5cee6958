"""Choice of the pool's groups for a step: pure functions of weights and a random.Random.

Groups with a larger spread of rewards, fresher groups, and groups of peers that earned trust are
preferred, and a step is distributed over peers. SAPO (arXiv 2509.08721, section 4) drops groups
without an advantage and then samples uniformly. Weights do not depend on the level of the reward:
that would prefer easy questions, and peers that invent them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

PROBATION_GROUPS = 16
"""Number of a peer's groups trained on after which its probation ends."""
PROBATION_TRUST = 0.25
"""Trust factor of a peer without groups trained on. It is small because identities are free."""
KNOWN_GROUPS = 3
"""A peer is known if more than this many of its groups were trained on. In a
draw, all peers that are not known count as one source together."""
SPREAD_FLOOR = 0.05
"""Lower bound of the spread in a weight, so that a group with equal rewards is drawn rarely but not
never."""

Item = TypeVar("Item")


def spread(rewards: Sequence[float]) -> float:
    """Return the standard deviation of a group's rewards (G,) in [0, 1]; at most 0.5."""
    mean = sum(rewards) / len(rewards)
    return math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))


def freshness(staleness: int, half_life: float) -> float:
    """Return ½ ** (staleness / half_life), both in own policy versions."""
    return float(0.5 ** (max(staleness, 0) / half_life))


def trust(reputation: float, groups_used: int) -> float:
    """Return `reputation` in [0, 1] times a factor that rises from PROBATION_TRUST to 1 over the
    first PROBATION_GROUPS groups trained on."""
    served = min(1.0, groups_used / PROBATION_GROUPS)
    return min(1.0, max(0.0, reputation)) * (PROBATION_TRUST + (1 - PROBATION_TRUST) * served)


def is_known(trusted: float) -> bool:
    """Return True if a peer of this trust is known, see KNOWN_GROUPS."""
    return trusted > trust(1.0, KNOWN_GROUPS)


def weight(rewards: Sequence[float], staleness: int, half_life: float, trusted: float) -> float:
    """Return the sampling weight: spread × freshness × trust. A group of weight 0 is never
    drawn."""
    return max(spread(rewards), SPREAD_FLOOR) * freshness(staleness, half_life) * trusted


def shuffle_weighted(
    items: Sequence[Item], weights: Sequence[float], rng: random.Random
) -> list[Item]:
    """Return the items in the order of weighted sampling without replacement, without those of
    weight 0.

    Sorts by log(u) / w (Efraimidis and Spirakis, 2006).
    """
    keyed = [(math.log(1.0 - rng.random()) / w, i) for i, w in enumerate(weights) if w > 0]
    return [items[i] for _, i in sorted(keyed, reverse=True)]


def most_per_peer(room: int) -> int:
    """Return the most of `room` groups that one of several peers may fill: half, rounded up."""
    return -(-room // 2)


def spread_over_peers(
    ordered: Sequence[Item],
    count: int,
    peer_of: Callable[[Item], Hashable],
    per_peer: int,
    already: Sequence[Item] = (),
) -> list[Item]:
    """Return `already` and the first items of `ordered`, `count` in total. Each peer gets one place
    before any gets a second one, and at most `per_peer`."""
    rounds: list[list[Item]] = [[] for _ in range(per_peer)]
    taken = Counter(peer_of(item) for item in already)
    for item in ordered:
        nth = taken[peer_of(item)]
        if nth < per_peer:
            rounds[nth].append(item)
            taken[peer_of(item)] += 1
    return [*already, *(item for one in rounds for item in one)][:count]
