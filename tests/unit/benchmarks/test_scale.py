"""benchmarks.scale: a seed determines the run, costs are sums, and liars receive fewer requests."""

import random
from dataclasses import replace

import pytest

from benchmarks import scale
from benchmarks.lib import scale_events
from benchmarks.lib.scale_events import Counts, Setup, rings, simulate
from benchmarks.lib.scale_hosts import Constants, Cost


def test_a_simulated_swarm_fills_its_batches_and_repeats_itself():
    setup = Setup(8, steps=10, warm=4)
    one, other = simulate(setup), simulate(setup)
    assert one.counts.node_steps > 8 * 4
    assert one.counts.full > 0.9 * one.counts.node_steps
    counts = lambda result: replace(result.counts, seconds=0.0)
    assert counts(one) == counts(other)


def test_detects_leaving_nodes_and_avoids_liars():
    left = simulate(Setup(10, steps=8, warm=4, leave=0.3))
    assert left.counts.failed > 0
    lied = simulate(Setup(14, steps=12, warm=6, hostile=0.5))
    assert 0 < lied.counts.hostile_pulled < 0.5 * lied.counts.pulled


def test_recovery_time_is_after_the_last_dip():
    full = [(float(at), 1.0) for at in range(0, 300, 10)]
    assert scale_events.absorbed(full, 150.0) == (0.0, 1.0)
    dip = [(at, 0.5 if 150 <= at < 200 else fill) for at, fill in full]
    seconds, least = scale_events.absorbed(dip, 150.0)
    assert (seconds, least) == (60.0, 0.5)
    assert scale_events.absorbed(
        [(at, 0.5 if at >= 150 else fill) for at, fill in full], 150.0
    ) == (None, 0.5)


def test_connected_graph_has_about_the_requested_degree():
    linked = rings(40, 4, random.Random(1))
    assert 3 < sum(map(len, linked)) / 40 <= 4
    reached, news = {0}, [0]
    while news:
        fresh = linked[news.pop()] - reached
        reached |= fresh
        news += fresh
    assert reached == set(range(40))


def test_a_cost_is_the_sum_of_what_is_done():
    constants = Constants(
        Cost(4.0, 7000.0),
        Cost(4.0, 500.0),
        Cost(6.0, 1500.0),
        Cost(1.0, 1000.0),
        1000.0,
        Cost(0.1, 10.0),
    )
    counts = Counts(
        node_steps=2, listings=4, listing_bytes=4000, pulls=6, pulled=12, trained=12, seconds=0.002
    )
    cost = scale.cost(counts, constants, nodes=100)
    assert cost.cpu_ms == pytest.approx((2 * 4 + 3 * 5 + 6 * 1 + 1) / 6)
    assert cost.bytes == pytest.approx((2000 + 2 * 500 + 3 * 500 + 6 * 1000) / 6000)
    assert cost.connections_ms == pytest.approx(1.6)
    assert cost.kbit == pytest.approx(8 * (10_500 / 30 + 160) / 1000)
    assert cost.cores == pytest.approx((30 / 30 + 1.6) / 1000)
