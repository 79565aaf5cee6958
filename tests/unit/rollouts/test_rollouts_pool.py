import copy
import random
from collections import Counter

import msgspec

from swarmnode.rollouts import sampling
from swarmnode.rollouts.network.pool import Pool
from swarmnode.rollouts.sampling import PROBATION_TRUST
from tests.support.groups import external_group


def filled(peers, each, **sizes):
    pool = Pool(64 * 2**20, **sizes)
    for n in range(each):
        for peer in peers:
            assert pool.add(external_group(peer, n), now=float(n), policy_version=0)
    return pool


def draw(pool, count, version=0, now=0.0, seed=0, **kwargs):
    return pool.draw(count, version, now, random.Random(seed), **kwargs)


def test_a_group_is_drawn_at_most_once():
    pool = filled("abcd", 2)
    drawn = [g.content for _ in range(4) for g in draw(pool, 4)]
    assert len(drawn) == len(set(drawn)) == 8
    assert len(pool) == 0


def test_the_same_group_is_not_added_twice():
    pool = filled("a", 1)
    assert not pool.add(external_group("a", 0), now=0.0, policy_version=0)
    assert pool.statistics().refused == 1


def test_distrusted_groups_hardly_count_as_waiting():
    pool = filled("ab", 8)
    assert pool.waiting(lambda peer: 1.0) == len(pool) == 16
    assert pool.waiting(lambda peer: {"a": 1.0, "b": 1 / 16}[peer]) == 8


def test_a_peer_with_its_share_of_groups_loses_its_oldest():
    pool = filled("a", 100, max_groups=80)
    stats = pool.statistics()
    assert stats.groups == 10
    assert stats.evicted_peer_share == 90
    assert {g.group.sequence for _ in range(10) for g in draw(pool, 2)} == set(range(90, 100))


def test_observations_count_in_a_peers_share_of_the_bytes():
    pool = Pool(max_bytes=2**20)
    for n in range(50):
        played = msgspec.structs.replace(
            external_group("a", n), observations=[["x" * 4096] * 4] * 2
        )
        assert pool.add(played, 0.0, 0)
    assert len(pool) == 3  # of 32 KiB each, in an eighth of a mebibyte


def test_a_group_larger_than_a_peers_share_is_refused():
    pool = Pool(2**20)
    assert not pool.add(external_group("a", 0, text="x" * 2**17), now=0.0, policy_version=0)


def test_groups_expire_by_age():
    pool = filled("ab", 2)
    pool.expire(now=3600.5, policy_version=0)
    assert len(pool) == 2
    assert pool.statistics().expired_age == 2


def test_groups_expire_by_own_policy_versions_since_they_arrived():
    pool = filled("a", 1)
    pool.expire(0.0, 8)
    assert len(pool) == 1
    pool.expire(0.0, 9)
    assert pool.statistics().expired_version == 1


def test_stale_groups_are_drawn_only_to_fill():
    pool = Pool(64 * 2**20)
    for n, peer in enumerate("abcd"):
        pool.add(external_group(peer, n), now=0.0, policy_version=0)
    for n, peer in enumerate("ab"):
        pool.add(external_group(peer, 10 + n), now=0.0, policy_version=5)
    chosen = draw(pool, 2, version=5)
    assert {g.group.sequence for g in chosen} == {10, 11}
    assert {g.staleness for g in chosen} == {0}
    assert {g.staleness for g in draw(pool, 2, version=5)} == {5}


def test_staleness_is_never_negative_when_the_trainer_was_restored():
    pool = Pool(64 * 2**20)
    pool.add(external_group("a", 0), now=0.0, policy_version=10)
    assert draw(pool, 2, version=9)[0].staleness == 0


def test_a_peer_without_trust_is_not_drawn():
    pool = filled("ab", 3)
    chosen = draw(pool, 4, trust=lambda peer: 0.0 if peer == "a" else 1.0)
    assert {g.peer for g in chosen} == {"b"}


def test_who_says_more_is_not_drawn_before_others():
    """If groups were drawn uniformly, an author with ten times the groups would fill eleven of
    twelve places until it is known."""
    pool = filled("abcdefgh", 1)
    for number in range(100, 110):
        for peer in "stuvwxyz":
            pool.add(external_group(peer, number), now=0.0, policy_version=0)
    loud = sum(
        g.peer in "stuvwxyz" for seed in range(100) for g in draw(copy.deepcopy(pool), 2, seed=seed)
    )
    assert 75 <= loud <= 125


def taught_by(newcomers, known, draws=200):
    """Share of `known` and of `newcomers` in the drawn groups, six at a time. All publish
    equally."""
    counts = Counter()
    for seed in range(draws):
        pool = filled([*known, *newcomers], 2)
        drawn = draw(
            pool, 6, seed=seed, trust=lambda peer: 1.0 if peer in known else PROBATION_TRUST
        )
        counts.update(group.peer in known for group in drawn)
    return counts[True] / draws, counts[False] / draws


def test_new_identities_gain_nothing_among_known_peers():
    known = [f"known{number}" for number in range(8)]
    for names in (1, 10, 100):
        theirs, others = taught_by([f"new{number}" for number in range(names)], known)
        assert theirs + others == 6
        assert others < 0.6, "all newcomers together are one, and of little weight"


def test_unknown_authors_take_turns_in_a_step():
    pool = filled("abcdef", 3)
    drawn = [group.peer for group in draw(pool, 6, trust=lambda peer: PROBATION_TRUST)]
    assert sorted(drawn) == list("abcdef")


def test_newcomers_fill_what_the_known_leave():
    pool = filled("kabc", 2)
    drawn = Counter(
        group.peer
        for group in draw(
            pool, 6, per_peer=3, trust=lambda peer: 1.0 if peer == "k" else PROBATION_TRUST
        )
    )
    assert drawn["k"] == 2
    assert sum(drawn.values()) == 6


def test_new_author_is_known_after_a_few_used_groups():
    assert [sampling.is_known(sampling.trust(1.0, used)) for used in (0, 3, 4, 16)] == [
        False,
        False,
        True,
        True,
    ]
    assert not sampling.is_known(sampling.trust(0.5, 6)), "nor while its standing is bad"


def test_one_of_two_peers_fills_half_a_step():
    pool = filled("a", 9)
    assert len(draw(pool, 9, per_peer=3)) == 9
    pool = filled("a", 9)
    pool.add(external_group("b", 100), now=0.0, policy_version=0)
    assert len(draw(pool, 9, per_peer=3)) == 4
