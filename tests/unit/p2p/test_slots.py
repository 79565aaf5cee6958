"""Limits by peer: rates, and peers that read slowly."""

from swarmnode.p2p.slots import (
    MAX_RATE_KEYS,
    MAX_SLOW_PEERS,
    MAX_SLOW_SECONDS,
    SLOW_SECONDS,
    RateLimiter,
    SlowPeers,
)


def test_burst_then_one_use_per_interval():
    limiter = RateLimiter(8, 4.0)
    assert [limiter.allow("a", 0.0) for _ in range(9)] == [True] * 8 + [False]
    assert limiter.allow("b", 0.0)
    assert not limiter.allow("a", 3.9)
    assert limiter.allow("a", 4.0)
    assert not limiter.allow("a", 4.0)
    assert [limiter.allow("a", 1000.0) for _ in range(9)] == [True] * 8 + [False]


def test_rate_limiter_is_bounded():
    limiter = RateLimiter(1, 20.0)
    assert limiter.allow("first", 0.0)
    for number in range(MAX_RATE_KEYS):
        assert limiter.allow(str(number), 0.0)
    assert limiter.allow("first", 0.0)
    assert not limiter.allow(str(MAX_RATE_KEYS - 1), 0.0)


def test_repeated_slowness_lasts_longer():
    slow, now = SlowPeers(), 0.0
    assert not slow.has("peer", now)
    seconds = SLOW_SECONDS
    while seconds < MAX_SLOW_SECONDS:
        slow.add("peer", now)
        assert slow.has("peer", now + 0.99 * seconds)
        now += seconds
        assert not slow.has("peer", now)
        seconds *= 2
    for _ in range(3):
        slow.add("peer", now)
    assert slow.has("peer", now + 0.99 * MAX_SLOW_SECONDS)
    now += 2 * MAX_SLOW_SECONDS
    slow.add("peer", now)
    assert not slow.has("peer", now + SLOW_SECONDS)
    for number in range(MAX_SLOW_PEERS):
        slow.add(str(number), now)
    assert not slow.has("peer", now)
    assert slow.has(str(MAX_SLOW_PEERS - 1), now)
