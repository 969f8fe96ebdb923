"""Quantiles against printed tables, and an interval computed by hand."""

import math

import pytest

from experiments.intervals import mean_interval, t_quantile


@pytest.mark.parametrize(
    "degrees, quantile",  # printed tables of the t distribution, two-sided 5%
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (29, 2.0452), (60, 2.0003)],
)
def test_quantiles_match_printed_tables(degrees, quantile):
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-5)


def test_an_interval_by_hand():
    """For 1, 2, 6 the mean is 3, the variance (4 + 1 + 9) / 2 = 7, the quantile for two degrees of freedom 4.3027."""
    middle, half = mean_interval([1.0, 2.0, 6.0])
    assert middle == pytest.approx(3)
    assert half == pytest.approx(4.30265 * math.sqrt(7 / 3), rel=1e-5)
    assert mean_interval([1.5]) == (1.5, None)
