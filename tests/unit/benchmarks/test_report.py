"""Tables and accounting of the benchmarks."""

import pytest

from benchmarks.lib.report import (
    count_until,
    mean_until,
    value_at,
)

CURVE = [(0.0, 0.0), (100.0, 0.2), (150.0, 0.4)]


@pytest.mark.parametrize(("budget", "reward"), [(50, 0.1), (100, 0.2), (125, 0.3), (150, 0.4)])
def test_a_value_at_a_budget_is_linear_between_points(budget, reward):
    assert value_at(CURVE, budget) == pytest.approx(reward)


def test_a_budget_that_was_never_reached_has_no_value():
    assert value_at(CURVE, 151) is None
    assert mean_until(CURVE, 151) is None


def test_mean_on_the_way_is_the_area_under_the_curve():
    # 0 to 100: mean 0.1; 100 to 150: mean 0.3
    assert mean_until(CURVE, 150) == pytest.approx((100 * 0.1 + 50 * 0.3) / 150)


def test_counts_stop_within_the_step_that_reaches_the_budget():
    assert count_until([10, 10, 10], 25, [1.0, 2.0, 4.0]) == pytest.approx(5.0)
    assert count_until([10, 0, 10], 100, [1.0, 2.0, 4.0]) == pytest.approx(7.0)
