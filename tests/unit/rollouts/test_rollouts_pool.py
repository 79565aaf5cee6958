import copy
import random
from collections import Counter

import msgspec
import pytest

from swarmnode.rollouts import sampling
from swarmnode.rollouts.network.authors import DISTRUSTED, MAX_PEERS, REFUSED_AT_MOST, AuthorTrust
from swarmnode.rollouts.network.pool import HISTORY_DRAWS, MOST_GAP, Pool, SourceShares
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


def test_trusted_peers_are_drawn_more_often():
    wins = 0
    for seed in range(400):
        trust = lambda peer: 1.0 if peer == "a" else 0.25
        wins += draw(filled("ab", 1), 1, seed=seed, trust=trust)[0].peer == "a"
    assert wins / 400 == pytest.approx(0.8, abs=0.08)


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


def test_new_peer_is_on_probation():
    assert sampling.trust(1.0, 0) == 0.25
    assert sampling.trust(1.0, 8) == pytest.approx(0.625)
    assert sampling.trust(1.0, 16) == sampling.trust(1.0, 10_000) == 1


def test_weight_ignores_the_level_of_the_reward():
    assert sampling.weight([0, 1], 8, 4, 0.5) == pytest.approx(0.5 * 0.25 * 0.5)
    assert sampling.weight([0, 0, 0, 1], 0, 4, 1) == pytest.approx(
        sampling.weight([1, 1, 1, 0], 0, 4, 1)
    )


def test_items_come_first_in_proportion_to_their_weight():
    rng = random.Random(0)
    first = Counter(sampling.shuffle_weighted("abc", [1, 2, 5], rng)[0] for _ in range(8000))
    assert first["a"] / 8000 == pytest.approx(1 / 8, abs=0.02)
    assert first["c"] / 8000 == pytest.approx(5 / 8, abs=0.02)


def test_what_is_already_chosen_counts_towards_a_peers_half():
    assert sampling.spread_over_peers(["a3", "b1"], 4, lambda x: x[0], 2, already=["a1", "a2"]) == [
        "a1",
        "a2",
        "b1",
    ]


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


def swarm(steps, supplies, room=6, seed=0):
    """Groups drawn of each source. supplies: source → (groups a step, numbers between them, keys
    they are signed with)."""
    pool, rng, drawn = Pool(), random.Random(seed), Counter()
    numbers = Counter()
    turn = Counter()
    for step in range(steps):
        for source, (each, gap, keys) in supplies.items():
            for _ in range(each):
                key = f"{source}/{turn[source] % keys}"
                turn[source] += 1
                numbers[key] += gap
                pool.add(external_group(key, numbers[key]), float(step), step, source)
        for group in pool.draw(room, step, float(step), rng):
            drawn[group.peer.partition("/")[0]] += 1
    return drawn


def test_largest_source_has_only_its_share():
    supplies = {f"honest{n}": (1, 2, 1) for n in range(4)} | {"loud": (20, 2, 10)}
    drawn = swarm(60, supplies)
    assert drawn["loud"] / drawn.total() < 0.35
    assert all(drawn[f"honest{n}"] > 30 for n in range(4))


def test_a_source_that_skips_questions_has_less():
    even = swarm(80, {"a": (6, 2, 1), "b": (6, 2, 1)})
    skips = swarm(80, {"a": (6, 2, 1), "b": (6, 16, 1)})
    assert 0.4 < even["b"] / even.total() < 0.6
    assert skips["b"] / skips.total() < 0.25


def test_new_keys_do_not_evade_the_share():
    drawn = swarm(80, {"a": (6, 2, 1), "b": (6, 1, 10**6)})
    assert drawn["b"] / drawn.total() < 0.25


def test_a_lone_source_has_all_the_room():
    assert swarm(20, {"only": (6, 2, 2)})["only"] == 120


def test_a_source_that_falls_silent_blocks_nobody():
    shares = SourceShares()
    for number in range(200):
        shares.arrived("a", "a", number)
        shares.arrived("b", "b", number)
    for _ in range(HISTORY_DRAWS):
        shares.drew(["a"] * 3 + ["b"] * 3)
    taken = []
    for _ in range(3 * HISTORY_DRAWS):
        room = min(6, shares.room(["a"], 6)["a"])
        shares.drew(["a"] * room)
        taken.append(room)
    assert min(taken) >= 3
    assert taken[-1] == 6


def test_a_restart_costs_one_bounded_gap():
    shares = SourceShares()
    for number in range(100):
        shares.arrived("a", "a", 2 * number)
        shares.arrived("b", "b", 2 * number)
    shares.arrived("a", "a", 10**6)
    shares.arrived("a", "a", 10**6 + 2)
    assert MOST_GAP <= 64
    room = shares.room(["a", "b"], 100)
    assert room["a"] > 0.7 * room["b"]


def test_own_groups_precede_relayed_groups():
    pool = Pool()
    pool.add(external_group("holder", 1), 0.0, 0, "net")
    for number in range(8):
        pool.add(external_group(f"key{number}", 2), 0.0, 0, "net", is_direct=False)
    for number in range(4):
        pool.add(external_group(f"other{number}", 3), 0.0, 0, f"net{number}")
    # one of each source
    drawn = {group.peer for group in pool.draw(4, 0, 0.0, random.Random(0))}
    assert not any(peer.startswith("key") for peer in drawn) or "holder" in drawn
