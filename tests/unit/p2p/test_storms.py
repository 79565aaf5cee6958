"""Who publishes far more than anybody may is found, and nobody who keeps to the rate."""

import pytest

from swarmnode.p2p import storms
from swarmnode.p2p.liveness import SILENT_SECONDS
from swarmnode.p2p.storms import Storms
from swarmnode.rollouts.signers import Signer

RATE = 16.0
PING_SECONDS = 30.0
"""Between two pings, and a pause is noticed SILENT_SECONDS after the next one."""


def watching(rate=RATE) -> Storms:
    one = Storms()
    one.allow(rate)
    return one


def published(until: float, restarts=(), rate=RATE) -> list[float]:
    """When an author publishes that says whatever it may, each of its lives with the product's own
    pace."""
    times, pace = [], Signer("author", rate, 0.0)
    for tick in range(int(until * 100)):
        now = tick / 100
        if now in restarts:
            pace = Signer("author", rate, now)
        while pace.has_token(rate, now):
            pace.take_token()
            times.append(now)
    return times


def held_up(times: list[float], begins: float, ends: float) -> list[float]:
    """The same, as they come where nothing passes for a while."""
    return [ends if begins <= at < ends else at for at in times]


def found(one: Storms, times: list[float], peer="peer") -> list[float]:
    return [at for at in times if one.found(peer, at)]


@pytest.mark.parametrize("rate", [0.1, 1.0, RATE, 200.0])
def test_an_author_that_keeps_to_the_rate_is_none_whatever_happens_to_it_and_to_the_line(rate):
    longest = PING_SECONDS + SILENT_SECONDS + 10
    times = published(900, restarts=[200.0, 230.0, 260.0], rate=rate)
    for begins in (0.0, 190.0, 400.0, 500.0):
        times = held_up(times, begins, begins + longest)
    assert len(times) >= 900 * rate
    assert found(watching(max(rate, 1.0)), times) == []


def test_each_message_twice_is_none():
    """Who joins, or has missed one, is sent messages again."""
    assert found(watching(), sorted(2 * published(900))) == []


@pytest.mark.parametrize("times_the_rate", [3, 12])
def test_one_that_goes_on_with_more_is_found_again_and_again(times_the_rate):
    rate = times_the_rate * RATE
    at = found(watching(), [number / rate for number in range(int(600 * rate))])
    takes = storms.TIMES * storms.SECONDS / (times_the_rate - storms.TIMES)
    assert len(at) == pytest.approx(600 / takes, abs=1)
    assert at[0] == pytest.approx(takes, rel=0.05)


def test_a_pause_is_no_licence_and_neighbours_are_told_apart():
    one, burst = watching(), int(storms.TIMES * storms.SECONDS * RATE)
    for number in range(3 * burst):
        assert not one.found(f"peer {number % 3}", 3600.0)
    assert one.found("peer 0", 3600.0)
    assert not one.found("peer 0", 3600.0), "it begins anew"
    assert one.found("peer 1", 3600.0)
    assert found(one, [3600.0 + storms.SECONDS] * (burst + 1), "peer 2") == [
        3600.0 + storms.SECONDS
    ]


def test_nothing_is_found_before_there_is_a_rate_and_rates_of_topics_add_up():
    assert found(Storms(), [0.0] * 10_000) == []
    one = watching(1.0)
    one.allow(2.0)
    assert len(found(one, [0.0] * int(3 * storms.TIMES * storms.SECONDS))) == 0
    assert one.found("peer", 0.0)


def test_ever_new_neighbours_cost_no_memory_and_a_clock_that_steps_back_nothing():
    one = watching(1.0)
    for number in range(3 * storms.MOST_PEERS):
        one.found(f"peer {number}", 100.0)
    assert len(one) == storms.MOST_PEERS
    assert not one.found("peer 0", 0.0)
