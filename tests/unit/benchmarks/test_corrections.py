"""What must be so whatever the numbers are: estimates are exact without lag, and so is a sequence's
whole ratio where it is not cut."""

import pytest

from benchmarks.corrections import estimators, run


@pytest.fixture(scope="module")
def results():
    return {(row["lag"], row["estimator"]): row for row in run(seed=1, lags=(0, 1, 32))}


def test_without_lag_every_estimate_is_the_exact_gradient(results):
    for name in estimators():
        row = results[0, name]
        assert row["bias"] < 1e-5
        assert row["effective"] == pytest.approx(1.0)


def test_a_sequences_ratio_is_exact_at_a_lag_where_nothing_is_cut_and_no_other_is(results):
    assert results[1, "uncorrected"]["divergence"] > 1e-5
    for kind in ("tis", "mis", "icepop"):
        assert results[1, f"{kind}, sequence"]["bias"] < 1e-5 < results[1, f"{kind}, token"]["bias"]
    assert results[1, "tis, token"]["bias"] < results[1, "uncorrected"]["bias"]


def test_what_masks_more_has_a_smaller_effective_sample(results):
    shares = [
        results[32, f"at most 1, masked below {floor:g}"]["effective"] for floor in (0.1, 0.5, 0.8)
    ]
    assert shares == sorted(shares, reverse=True)
