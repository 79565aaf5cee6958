import random

import pytest

from swarmnode.p2p import reputation
from swarmnode.p2p.reputation import Reputation, Standing


def greylist(r: Reputation, peer: str, now: float) -> None:
    while r.standing(peer, now) is Standing.GOOD:
        r.rejected(peer, "signature", now)


def ban(r: Reputation, peer: str, now: float) -> None:
    r.rejected(peer, "banned", now, cost=reputation.BEST - reputation.BAN)


def test_rejections_greylist_then_ban():
    r, seen = Reputation(), []
    for _ in range(10):
        seen.append(r.rejected("x", "signature", 0.0))
    assert seen == [Standing.GOOD] * 4 + [Standing.GREYLISTED] * 5 + [Standing.BANNED]
    assert r.statistics(0.0).rejected == {"signature": 10}
    assert r.statistics(0.0).banned == 1


def test_ban_lasts_a_day_then_greylists():
    r = Reputation()
    ban(r, "x", 0.0)
    for _ in range(10_000):
        r.accepted("x", 3600.0)
    assert r.standing("x", reputation.BAN_SECONDS - 1) is Standing.BANNED
    assert r.standing("x", reputation.BAN_SECONDS + 1) is Standing.GREYLISTED
    assert r.standing("x", reputation.BAN_SECONDS + 1 + 2 * reputation.HALF_LIFE) is Standing.GOOD


def test_greylist_has_hysteresis():
    r = Reputation()
    greylist(r, "x", 0.0)
    # above GREYLIST, below FORGIVEN
    assert r.standing("x", 0.5 * reputation.HALF_LIFE) is Standing.GREYLISTED
    assert r.standing("x", 1.1 * reputation.HALF_LIFE) is Standing.GOOD


def test_trust_grows_slowly_and_falls_fast():
    r = Reputation()
    for _ in range(10_000):
        r.accepted("x", 0.0)
    assert r.score("x", 0.0) == reputation.BEST
    for _ in range(7):
        r.rejected("x", "reward", 0.0)
    assert r.standing("x", 0.0) is Standing.GREYLISTED


def test_rare_faults_never_greylist():
    r = Reputation()
    for hour in range(200):
        assert r.rejected("x", "stale", hour * 600.0) is Standing.GOOD


def test_prefix_score_is_capped():
    r = Reputation()
    for index in range(50):
        r.set_prefix(f"x{index}", "9.9.9.0/24", 0.0)
        for _ in range(300):
            r.accepted(f"x{index}", 0.0)
    r.set_prefix("alone", "9.9.8.0/24", 0.0)
    for _ in range(300):
        r.accepted("alone", 0.0)
    assert sum(r.score(f"x{index}", 0.0) for index in range(50)) == pytest.approx(
        reputation.PREFIX_BEST
    )
    assert r.score("alone", 0.0) == reputation.BEST


def test_bans_lower_new_peers_of_the_prefix():
    r = Reputation()
    for index in range(10):
        r.set_prefix(f"x{index}", "9.9.9.0/24", 0.0)
        ban(r, f"x{index}", 0.0)
    r.set_prefix("new", "9.9.9.0/24", 0.0)
    r.set_prefix("other", "9.9.8.0/24", 0.0)
    assert r.score("new", 0.0) == reputation.NEWCOMER_LOWEST
    assert r.standing("new", 0.0) is Standing.GOOD
    assert r.score("other", 0.0) == 0.0


def test_memory_is_bounded_and_keeps_bans():
    r, rng = Reputation(), random.Random(0)
    for index in range(100):
        ban(r, f"bad{index}", 0.0)
    for index in range(3 * reputation.MAX_PEERS):
        r.set_prefix(f"x{index}", f"{rng.randrange(99)}.0.0.0/24", 0.0)
        r.accepted(f"x{index}", 0.0)
    assert r.statistics(0.0).peers <= reputation.MAX_PEERS
    assert r.statistics(0.0).banned == 100


def test_moved_peer_counts_for_its_newest_prefix():
    r = Reputation()
    for index in range(100):
        r.set_prefix("x", f"{index}.0.0.0/24", 0.0)
    assert dict(r._by_prefix) == {"99.0.0.0/24": {"x"}}
    ban(r, "x", 0.0)
    r.set_prefix("former", "98.0.0.0/24", 0.0)
    r.set_prefix("present", "99.0.0.0/24", 0.0)
    assert [r.score(peer, 0.0) for peer in ("former", "present")] == [
        0.0,
        -reputation.NEWCOMER_COST,
    ]
    r.set_prefix("present", "1.0.0.0/24", 0.0)
    r.set_prefix("next", "99.0.0.0/24", 0.0)
    # x is still there
    assert [r.score(peer, 0.0) for peer in ("present", "next")] == [-reputation.NEWCOMER_COST] * 2


def test_returning_peer_is_not_a_newcomer():
    r = Reputation()
    for prefix in ("9.9.9.0/24", "9.9.9.0/24", "9.9.8.0/24", None):
        r.rejected("x", "reward", 0.0)
        r.set_prefix("x", prefix, 0.0)
    assert r.score("x", 0.0) == -4 * reputation.COST
    assert (r.rejections("x"), r.rejections("y")) == (4, 0)
    r.set_prefix("y", None, 0.0)
    assert r.statistics(0.0).peers == 1


def test_restart_keeps_scores_and_bans():
    before = Reputation()
    before.set_prefix("x", "9.9.9.0/24", 0.0)
    before.rejected("x", "reward", 0.0)
    ban(before, "y", 0.0)
    after = Reputation()
    after.restore(before.snapshot(1000.0), away=2000.0, now=50.0)
    assert after.score("x", 50.0) == pytest.approx(before.score("x", 3000.0))
    assert after.standing("y", 50.0) is Standing.BANNED
    left = reputation.BAN_SECONDS - 3000.0
    assert after.standing("y", 50.0 + left - 1) is Standing.BANNED
    assert after.standing("y", 50.0 + left + 1) is not Standing.BANNED
    ban(before, "x", 1000.0)
    after = Reputation()
    after.restore(before.snapshot(1000.0), away=0.0, now=0.0)
    after.set_prefix("new", "9.9.9.0/24", 0.0)
    assert after.score("new", 0.0) == -reputation.NEWCOMER_COST


def test_invalid_snapshot_values_are_ignored():
    r = Reputation()
    bad = [
        reputation.SavedRecord("x", float("nan"), None, 0.0),
        reputation.SavedRecord("y", 1e9, None, float("inf")),
    ]
    r.restore([*bad, reputation.SavedRecord("z", 1e9, None, 1e12)], away=0.0, now=0.0)
    assert r.score("z", 0.0) <= reputation.BEST
    assert r.standing("z", reputation.BAN_SECONDS + 1) is not Standing.BANNED
    assert r.statistics(0.0).peers == 1
