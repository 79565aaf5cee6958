"""What the benchmarks print, and the accounting of benchmarks.sapo: wrong sums here would be wrong
claims."""

import json

import pytest

from benchmarks.report import middle, spread, table, write_json
from benchmarks.simulator import Point, at, count_until, mean_until


def test_a_table_is_markdown_with_numbers_to_the_right():
    lines = table(["arm", "reward"], [["4/4", "0.5 ± 0.1"], ["adaptive", "–"]]).splitlines()
    assert lines[1] == "|----------|----------:|"
    assert lines[2] == "| 4/4      | 0.5 ± 0.1 |"
    assert len({len(line) for line in lines}) == 1


def test_spread_is_mean_and_sample_deviation():
    assert spread([1.0, 2.0, 3.0], 1) == "2.0 ± 1.0"
    assert spread([2.0], 1) == "2.0"
    assert spread([]) == "–"
    assert middle([5.0, 1.0, 2.0], 1) == "2.0 [1.0–5.0]"


def test_json_names_machine_and_date_and_replaces_the_file_whole(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    document = json.loads(path.read_text())
    assert document["results"] == {"a": 2}
    assert document["machine"]
    assert document["date"]
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


CURVE = [Point(0, 0.0, 0.0, 0.0), Point(5, 100.0, 40.0, 0.2), Point(10, 150.0, 80.0, 0.4)]


@pytest.mark.parametrize(
    ("axis", "budget", "reward"),
    [("tokens", 50, 0.1), ("tokens", 125, 0.3), ("samples", 40, 0.2), ("round", 10, 0.4)],
)
def test_held_out_at_a_budget_is_read_between_evaluations(axis, budget, reward):
    assert at(CURVE, axis, budget) == pytest.approx(reward)


def test_a_budget_that_was_never_reached_has_no_value():
    assert at(CURVE, "tokens", 151) is None
    assert mean_until(CURVE, "tokens", 151) is None


def test_mean_on_the_way_is_the_area_under_the_curve():
    # 0 to 100 tokens: mean 0.1; 100 to 150: mean 0.3
    assert mean_until(CURVE, "tokens", 150) == pytest.approx((100 * 0.1 + 50 * 0.3) / 150)


def test_counts_stop_within_the_step_that_reaches_the_budget():
    assert count_until([10, 10, 10], 25, [1.0, 2.0, 4.0]) == pytest.approx(5.0)
    assert count_until([10, 0, 10], 100, [1.0, 2.0, 4.0]) == pytest.approx(7.0)
