"""Estimators against the exact gradient: exact without a lag, and by an uncut sequence ratio."""

import pytest

from tests.support.exact_gradient import estimators, run


@pytest.fixture(scope="module")
def results():
    return {(row["lag"], row["estimator"]): row for row in run(seed=1, lags=(0, 1, 32))}


def test_every_estimate_is_exact_without_a_lag(results):
    for name in estimators():
        row = results[0, name]
        assert row["bias"] < 1e-5
        assert row["effective"] == pytest.approx(1.0)


def test_only_an_uncut_sequence_ratio_is_exact_at_a_lag(results):
    assert results[1, "uncorrected"]["divergence"] > 1e-5
    for kind in ("tis", "mis", "icepop"):
        assert results[1, f"{kind}, sequence"]["bias"] < 1e-5 < results[1, f"{kind}, token"]["bias"]
    assert results[1, "tis, token"]["bias"] < results[1, "uncorrected"]["bias"]


def test_more_masking_leaves_a_smaller_effective_sample(results):
    shares = [
        results[32, f"at most 1, masked below {floor:g}"]["effective"] for floor in (0.1, 0.5, 0.8)
    ]
    assert shares == sorted(shares, reverse=True)
