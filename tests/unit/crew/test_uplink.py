"""What a line takes is known from sends that had to wait for it, and from nothing else."""

import math

import pytest

from swarmnode.stages.service import MAX_WINDOWS, MIN_BYTES_PER_SECOND, Uplink

CHUNK = 256 * 1024


def send(line, rate, seconds, *, now=0.0, busy=1.0):
    """For `seconds`, at `rate` bytes per second of the time that is spent sending, which is this
    share of all."""
    while seconds > 0:
        took = CHUNK / rate
        now += took / busy
        line.sent(CHUNK, took, now)
        seconds -= took / busy
    return now


def test_nothing_is_known_of_a_line_that_was_never_full():
    line = Uplink()
    assert line.bytes_per_second == math.inf
    send(line, 1e9, 10.0, busy=0.2)
    assert line.bytes_per_second == math.inf


def test_a_full_line_is_as_fast_as_it_takes_what_is_sent():
    line = Uplink()
    line.sent(4 * 2**20, 0.0, 0.0)  # a buffer swallows this
    send(line, 6.25e6, 20.0)
    assert line.bytes_per_second == pytest.approx(6.25e6, rel=0.1)


def test_slow_reader_does_not_lower_the_uplink_estimate():
    line = Uplink()
    now = send(line, 6.25e6, 30.0)
    for _ in range(MAX_WINDOWS // 2):
        now += 2.0
        line.sent(100, 2.0, now)
    assert line.bytes_per_second == pytest.approx(6.25e6, rel=0.1)
    for _ in range(MAX_WINDOWS):
        now += 2.0
        line.sent(100, 2.0, now)
    assert line.bytes_per_second == MIN_BYTES_PER_SECOND
