"""An author of refused groups takes part in fewer draws, and recovers when its groups are trained
on."""

import random
from collections import Counter

from swarmnode.rollouts.network.authors import DISTRUSTED, MAX_PEERS, REFUSED_AT_MOST, AuthorTrust
from swarmnode.rollouts.network.pool import Pool
from tests.support.groups import external_group


def test_belief_falls_to_a_floor_and_recovers():
    trust = AuthorTrust()
    seen = []
    for _ in range(REFUSED_AT_MOST + 3):
        seen.append(trust.participation("p"))
        trust.judged("p", "surprise")
    assert seen == [1.0, 0.25, 0.0625, 0.0625, 0.0625, 0.0625, 0.0625]
    for _ in range(REFUSED_AT_MOST):
        trust.judged("p", "used")
    assert trust.participation("p") == 1.0
    trust.judged("p", "surprise")
    assert trust.participation("p") == 0.5, "one that was trained on before"


def test_what_honest_authors_cause_costs_nothing():
    trust = AuthorTrust()
    for outcome in ("untokenizable", "too_large", "improbable"):
        assert outcome not in DISTRUSTED
        trust.judged("p", outcome)
    assert trust.participation("p") == 1.0


def test_alternating_lies_do_not_pay():
    trust = AuthorTrust()
    for _ in range(20):
        trust.judged("p", "used")
        trust.judged("p", "surprise")
    assert trust.participation("p") <= 0.5
    assert trust.of("p", 1.0) == 0.25, "always on probation"


def test_memory_of_peers_and_swaps_is_bounded():
    trust = AuthorTrust()
    for number in range(2 * MAX_PEERS):
        trust.judged(f"good{number}", "used")
        trust.judged(f"bad{number}", "surprise")
    assert len(trust) == MAX_PEERS // 2, "every second one is good"
    assert trust.participation("bad0") == 1.0
    assert trust.participation(f"bad{2 * MAX_PEERS - 1}") == 0.25


def test_distrusted_peer_takes_no_place_from_others():
    """Every peer has one group in a step before any has two; that must not be a liar's seat for
    ever."""
    trust, rng = AuthorTrust(), random.Random(1)
    for _ in range(REFUSED_AT_MOST):
        trust.judged("liar", "surprise")
    drawn = Counter()
    for step in range(400):
        pool = Pool(2**26)
        for number, peer in enumerate(["honest", "honest", "liar", "liar"]):
            pool.add(external_group(peer, step * 10 + number), 0.0, 0)
        drawn.update(
            group.peer
            for group in pool.draw(
                2, 0, 0.0, rng, lambda peer: trust.of(peer, 1.0), trust.participation
            )
        )
    assert 5 < drawn["liar"] < 60
    assert drawn["honest"] >= 400
