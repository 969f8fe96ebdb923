"""Every function against scipy or by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.statistics import Estimate, equivalence_p, estimate, fisher_p, holm, t_quantile, t_tails


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("degrees", [1, 2, 5, 999])
def test_tails_and_quantiles_match_scipy(degrees):
    """From p = 1 down to 1e-14, by relative error."""
    ts = stats.t.isf(np.geomspace(1e-14, 0.999, 50) / 2, degrees)
    assert [t_tails(t, degrees) for t in ts] == pytest.approx(2 * stats.t.sf(ts, degrees), rel=1e-10, abs=0)
    assert t_tails(-ts[0], degrees) == t_tails(ts[0], degrees)
    assert (t_tails(0.0, degrees), t_tails(math.inf, degrees)) == (1, 0)
    assert t_quantile(degrees) == pytest.approx(stats.t.isf(0.025, degrees), rel=1e-9)


def test_an_interval_by_hand():
    """For 1, 2, 6 the mean is 3, the variance (4 + 1 + 9) / 2 = 7, the quantile for two degrees of freedom 4.3027."""
    found = estimate([1.0, 2.0, 6.0])
    half = 4.30265 * math.sqrt(7 / 3)
    assert (found.mean, found.n) == (3, 3)
    assert (found.half_width, found.low, found.high) == pytest.approx((half, 3 - half, 3 + half), rel=1e-5)


@pytest.mark.parametrize("size", [2, 3, 30])
@pytest.mark.parametrize("center", [0.0, 0.5, -0.9, 20.0])
def test_estimates_and_equivalence_match_scipy(size, center):
    values, margin = center + normal(size), 1.0
    test, found = stats.ttest_1samp(values, 0), estimate(values.tolist())
    interval = test.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert (found.mean, found.p, found.n) == pytest.approx((values.mean(), test.pvalue, size), rel=1e-9, abs=1e-300)
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    assert equivalence_p(values.tolist(), margin) == pytest.approx(max(below, above), rel=1e-9, abs=1e-300)


def test_a_single_value_has_no_interval_and_equal_values_leave_no_doubt():
    found = estimate([1.5])
    assert found == Estimate(1.5, None, 1, None)
    assert (found.low, found.high) == (-math.inf, math.inf) and equivalence_p([1.5], 2.0) is None
    assert estimate([0.1, 0.1, 0.1]) == Estimate(0.1, 0, 3, 0) and estimate([0.0, 0.0]) == Estimate(0, 0, 2, 1)
    assert [equivalence_p([-0.1] * 3, margin) for margin in (0.05, 0.1, 0.2)] == [1, 0.5, 0]


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf, 1.0], [-math.inf]])
def test_values_that_are_not_finite_have_no_estimate(values):
    for function in (estimate, lambda values: equivalence_p(values, 1)):
        with pytest.raises(ValueError):
            function(values)


def test_holm_by_hand():
    """Sorted, 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 are 0.02, 0.03, 0.06, 0.04; the last is raised to 0.06."""
    assert holm([0.01, None, 0.04, 0.03, None, 0.005]) == pytest.approx([0.03, None, 0.06, 0.06, None, 0.02])
    assert holm([0.4, 0.9, 0.6]) == [1, 1, 1] and holm([0.02, 0.02]) == [0.04, 0.04]
    assert (holm([0.03]), holm([None]), holm([])) == ([0.03], [None], [])


@pytest.mark.parametrize("n1, n2", [(5, 5), (3, 8), (0, 4)])
def test_fisher_matches_scipy(n1, n2):
    """Equal sizes have ties, tables exactly as likely as the observed one, which count."""
    for k1 in range(n1 + 1):
        for k2 in range(n2 + 1):
            expected = stats.fisher_exact([[k1, n1 - k1], [k2, n2 - k2]]).pvalue
            assert fisher_p(k1, n1, k2, n2) == pytest.approx(expected, rel=1e-9)
