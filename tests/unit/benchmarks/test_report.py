"""Tables and accounting of the benchmarks."""

import json

import pytest

from benchmarks.lib.report import (
    columns,
    count_until,
    mean_until,
    median_range,
    spread,
    table,
    value_at,
    write_json,
)


def test_a_table_is_markdown_with_numbers_to_the_right():
    lines = table(["arm", "reward"], [["4/4", "0.5 ± 0.1"], ["adaptive", "–"]]).splitlines()
    assert lines[1] == "|----------|----------:|"
    assert lines[2] == "| 4/4      | 0.5 ± 0.1 |"
    assert len({len(line) for line in lines}) == 1


def test_spread_is_mean_and_sample_deviation():
    assert spread([1.0, 2.0, 3.0], 1) == "2.0 ± 1.0"
    assert spread([2.0], 1) == "2.0"
    assert spread([]) == "–"
    assert median_range([5.0, 1.0, 2.0], 1) == "2.0 [1.0–5.0]"


def test_json_names_machine_and_date_and_replaces_the_file_whole(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    document = json.loads(path.read_text())
    assert document["results"] == {"a": 2}
    assert document["machine"]
    assert document["date"]
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


CURVE = [(0.0, 0.0), (100.0, 0.2), (150.0, 0.4)]


def test_a_table_of_columns_has_a_row_for_each_item():
    shown = columns([1, 2], {"number": str, "square": lambda n: n * n})
    assert shown == table(["number", "square"], [["1", 1], ["2", 4]])


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
