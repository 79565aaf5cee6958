"""Token buckets, monthly totals and quiet hours with a fake clock."""

import time

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.config import NetworkConfig
from swarmnode.p2p.budget import (
    BUDGET_FILE,
    CHOICES,
    DEBT_SECONDS,
    Budget,
    Meter,
    Month,
    TokenBucket,
    TrafficStatistics,
    load_month,
)
from swarmnode.pauses import is_quiet
from tests.support.waiting import until

NOON = 1_790_000_000.0 // 86400 * 86400 + 12 * 3600  # 21 September 2026, 12:00 UTC
HOUR = 3600.0


def budget(now=NOON, quiet="", month=None, **caps):
    return Budget(NetworkConfig(**caps), quiet, now, month=month, local=time.gmtime)


def paused(b, now):
    return [reason for reason, holds in b.statistics(now).paused.items() if holds]


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50_000)), max_size=60))
def test_bucket_is_bounded_by_its_rate(steps):
    """A sender that stops at level 0 exceeds rate × time + capacity by at most its last message."""
    rate, now, sent, largest = 10_000.0, 0.0, 0, 0
    bucket = TokenBucket(rate, now)
    for pause, size in steps:
        now += pause
        if bucket.level(now) > 0:
            bucket.charge(size, now)
            sent, largest = sent + size, max(largest, size)
        assert sent <= rate * now + bucket.capacity + largest


def test_clock_changes_never_overfill_the_bucket():
    bucket = TokenBucket(1000.0, 100.0)
    bucket.charge(int(bucket.capacity), 100.0)
    assert bucket.level(0.0) == 0
    assert bucket.level(1.0) == 1000
    assert bucket.level(1e9) == bucket.capacity


def test_debt_is_bounded():
    bucket = TokenBucket(1000.0, 0.0)
    bucket.charge(10**9, 0.0)
    assert bucket.level(0.0) == -DEBT_SECONDS * 1000


def test_without_caps_everything_is_allowed():
    b = budget()
    b.observe(10**12, 10**12, NOON)
    assert all(b.allows(choice, NOON) for choice in CHOICES)


def test_upload_debt_stops_only_uploads():
    b = budget(upload_bytes_per_second=100_000)
    b.observe(2_000_000, 0, NOON)
    assert [c for c in CHOICES if b.allows(c, NOON)] == ["fetch"]
    assert paused(b, NOON) == []
    assert b.statistics(NOON).refused == {"publish": 1, "serve": 1, "relay": 1, "fetch": 0}
    assert b.allows("publish", NOON + 11)


def test_download_debt_stops_only_fetching():
    b = budget(download_bytes_per_second=100_000)
    b.observe(0, 1_000_001, NOON)  # the bucket holds ten seconds: 1,000,000
    assert [c for c in CHOICES if not b.allows(c, NOON)] == ["fetch"]
    assert paused(b, NOON) == ["download"]
    assert b.allows("fetch", NOON + 1)
    assert paused(b, NOON + 1) == []


def test_paused_node_serves_weights_and_relays_only():
    b = Budget(NetworkConfig(), "", NOON, local=time.gmtime, is_paused=lambda: True)
    assert [c for c in CHOICES if b.allows(c, NOON)] == ["serve", "relay"]
    assert paused(b, NOON) == ["owner"]


def test_month_limit_pauses_until_next_month():
    b = budget(monthly_bytes=1000)
    b.observe(400, 599, NOON)
    assert b.has_room("fetch", NOON)
    b.observe(401, 599, NOON)
    assert not b.has_room("fetch", NOON)
    assert not any(b.allows(choice, NOON) for choice in CHOICES)
    assert paused(b, NOON) == ["month"]
    october = NOON + 11 * 24 * HOUR
    assert b.has_room("fetch", october)
    b.observe(411, 599, october)
    assert b.month == Month("2026-10", 10, 0)


def test_total_of_another_month_is_ignored():
    assert budget(month=Month("2026-08", 5000, 0), monthly_bytes=1000).has_room("fetch", NOON)


def test_quiet_hours_pause_everything():
    b = budget(quiet="22:00-07:00")
    quiet = [hour for hour in range(24) if not b.has_room("fetch", NOON - 12 * HOUR + hour * HOUR)]
    assert quiet == [0, 1, 2, 3, 4, 5, 6, 22, 23]
    assert paused(b, NOON + 11 * HOUR) == ["quiet_hours"]


@pytest.mark.parametrize(
    ("hours", "quiet", "loud"),
    [
        ("", [], [0, 720]),
        ("09:30-17:00", [570, 1019], [569, 1020]),
        ("22:00-07:00", [1320, 0, 419], [420, 1319]),
        ("00:00-00:00", [0, 720, 1439], []),
    ],
)
def test_quiet_hours_include_start_exclude_end(hours, quiet, loud):
    assert all(is_quiet(hours, minute) for minute in quiet)
    assert not any(is_quiet(hours, minute) for minute in loud)


@pytest.mark.parametrize("text", ["22-07", "24:00-07:00", "22:00", "22:60-07:00", "10 pm"])
def test_invalid_quiet_hours_are_a_configuration_error(text):
    from swarmnode import settings
    from swarmnode.errors import ConfigError

    with pytest.raises(ConfigError, match="quiet_hours"):
        settings.load(None, {}, [f'node.quiet_hours="{text}"'])


def test_waiting_transfer_is_not_counted_as_refused():
    b = budget(upload_bytes_per_second=1000)
    assert b.has_room("serve", NOON)
    b.observe(10**7, 0, NOON)
    assert not b.has_room("serve", NOON)
    assert b.has_room("fetch", NOON)
    assert sum(b.statistics(NOON).refused.values()) == 0
    assert not b.allows("serve", NOON)
    assert b.statistics(NOON).refused["serve"] == 1
    assert not budget(quiet="11:00-13:00").has_room("fetch", NOON)


class Traffic:
    sent = received = 0

    def __call__(self):
        return TrafficStatistics(received={"/a": self.received, "/b": 0}, sent={"/a": self.sent})


def meter(tmp_path, traffic, **caps):
    return Meter(NetworkConfig(**caps), "", tmp_path, traffic)


async def test_month_total_survives_a_restart(tmp_path, autojump_clock):
    traffic = Traffic()
    first = meter(tmp_path, traffic)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.run)
        await trio.testing.wait_all_tasks_blocked()
        traffic.sent, traffic.received = 70, 30
        nursery.cancel_scope.cancel()
    assert load_month(tmp_path / BUDGET_FILE) == Month(time.strftime("%Y-%m"), 70, 30)
    second = meter(tmp_path, Traffic(), monthly_bytes=100)
    assert not second.has_room("fetch")
    assert not second.allows("publish")


async def test_the_total_is_saved_while_it_runs(tmp_path, autojump_clock):
    traffic = Traffic()
    traffic.sent = 5
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meter(tmp_path, traffic).run)
        await trio.sleep(61)
        await until((tmp_path / BUDGET_FILE).exists)
        assert load_month(tmp_path / BUDGET_FILE).sent == 5
        nursery.cancel_scope.cancel()


def test_damaged_total_starts_at_zero(tmp_path):
    (tmp_path / BUDGET_FILE).write_bytes(b'{"month": 7')
    assert meter(tmp_path, Traffic(), monthly_bytes=100).has_room("fetch")
