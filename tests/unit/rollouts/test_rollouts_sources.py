"""No source contributes more than its share, and an author that skips questions has a smaller
one."""

import random
from collections import Counter

from swarmnode.rollouts.network.pool import HISTORY_DRAWS, MOST_GAP, Pool, SourceShares
from tests.support.groups import external_group


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
