"""Of whom is drawn what a node trains on? `python -m benchmarks.draws [--seeds N]`

The product's pool and trust, and nothing else: in every step groups of others arrive, some are
drawn, and what is drawn of an honest peer is used. Of text that somebody made up, one group in ten
is not found, as in the simulated swarm. In a swarm of

    40 % hostile     200 honest nodes with a group a minute and 76 that make text up, each with
    FACTOR times as many
    unlike speeds    276 honest nodes, of which 76 are FACTOR times as fast as the others

a node draws four groups in a step of 80 s. Shares are of the groups that were used after so many
steps.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

from benchmarks.report import heading, spread, table
from swarmnode.rollouts.pool import Pool
from swarmnode.rollouts.trust import PeerTrust
from tests.support.groups import external_group
from tests.support.sim.learner import FOUND

SLOW, FAST = 200, 76
GROUPS, STEP_SECONDS, PERIOD = 4, 80.0, 60.0
"""Groups drawn a step; seconds of a step; seconds between two groups of a slow peer."""
FACTORS = (1.0, 4.0, 13.0)
AFTER = (5, 20, 60)
"""Steps."""


def used(seed: int, factor: float, hostile: bool) -> list[Counter[bool]]:
    """How many groups of slow peers (False) and of fast ones (True) were used after each of AFTER
    steps."""
    rng, pool, trust = random.Random(seed), Pool(), PeerTrust()
    tally, found, number = Counter[bool](), list[Counter[bool]](), 0
    for step in range(max(AFTER)):
        now = step * STEP_SECONDS
        for peer in range(SLOW + FAST):
            due = STEP_SECONDS / PERIOD * (factor if peer >= SLOW else 1.0)
            for _ in range(int(due) + (rng.random() < due % 1)):
                pool.add(external_group(str(peer), number := number + 1), now, step)
        for group in pool.draw(
            GROUPS, step, now, rng, lambda peer: trust.of(peer, 1.0), trust.belief
        ):
            fast = int(group.peer) >= SLOW
            good = not (fast and hostile) or rng.random() > FOUND
            trust.judged(group.peer, "used" if good else "surprise")
            tally[fast] += good
        if step + 1 in AFTER:
            found.append(Counter(tally))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    print(heading("draws: of whom is drawn what a node trains on?"), flush=True)
    rows = []
    for swarm, hostile in (("40 % hostile", True), ("unlike speeds", False)):
        for factor in FACTORS:
            runs = [used(seed, factor, hostile) for seed in range(1, options.seeds + 1)]
            for at, steps in enumerate(AFTER):
                total = [run[at].total() for run in runs]
                share = [100 * run[at][True] / run[at].total() for run in runs]
                rows.append(
                    [
                        swarm,
                        f"{factor:g}",
                        steps,
                        spread([float(each) for each in total], 1),
                        f"{spread(share, 1)} %",
                    ]
                )
    print(
        table(
            ["swarm", "factor", "steps", "groups used", "of these, of the hostile or fast"], rows
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
