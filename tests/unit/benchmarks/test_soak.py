"""The soak test's detection of growth."""

import random

from benchmarks import soak


def series(of):
    return [(10.0 * i, of(i)) for i in range(60)]


def test_leak_is_detected_in_noise_without_false_alarms():
    rng = random.Random(1)
    leak = series(lambda i: 100 + 0.2 * i + rng.gauss(0, 2))
    assert soak.grows(leak)
    assert 40 < soak.slope(leak) < 110, "0.2 in ten seconds are 72 an hour"
    assert not any(soak.grows(series(lambda i: 100 + rng.gauss(0, 2))) for _ in range(50))


def test_constant_falling_or_slowly_rising_use_is_no_leak():
    assert soak.surety(series(lambda i: 7)) == 0
    assert not soak.grows(series(lambda i: 7))
    assert not soak.grows(series(lambda i: 100 - i))
    assert not soak.grows(series(lambda i: 100 + 0.001 * i)), "0.4 % an hour"
