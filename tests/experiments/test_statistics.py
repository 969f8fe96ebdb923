"""Every function against scipy or by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.statistics import Estimate, detectable, estimate_mean, holm, t_quantile, t_tails


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("degrees", [1, 2, 5, 999])
def test_tails_and_quantiles_match_scipy(degrees):
    """From p = 1 down to 1e-14, by relative error."""
    ts = stats.t.isf(np.geomspace(1e-14, 0.999, 50) / 2, degrees)
    assert [t_tails(t, degrees) for t in ts] == pytest.approx(2 * stats.t.sf(ts, degrees), rel=1e-10, abs=0)
    assert (t_tails(0.0, degrees), t_tails(math.inf, degrees)) == (1, 0)
    assert t_quantile(degrees) == pytest.approx(stats.t.isf(0.025, degrees), rel=1e-9)
    for probability in (0.6, 1 - 0.05 / 30):
        assert t_quantile(degrees, probability) == pytest.approx(stats.t.ppf((1 + probability) / 2, degrees), rel=1e-9)


@pytest.mark.parametrize("size", [2, 3, 30])
@pytest.mark.parametrize("center", [0.0, 0.5, -0.9, 20.0])
def test_estimates_match_scipy(size, center):
    values = center + normal(size)
    test, found = stats.ttest_1samp(values, 0), estimate_mean(values.tolist())
    interval = test.confidence_interval(0.95)
    assert found.half_width == pytest.approx((interval.high - interval.low) / 2, rel=1e-9)
    assert (found.mean, found.p, found.n) == pytest.approx((values.mean(), test.pvalue, size), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("n, center", [(3, 2.0), (5, 2.0), (20, -2.0)])
def test_slack_widens_the_interval_and_a_detectable_effect_is_shown_four_times_in_five(n, center):
    """On average over samples. The power of a t test is a tail of the noncentral t distribution."""
    values = center + normal(n)
    found = estimate_mean(values.tolist(), slack=1.0)
    assert found.half_width == pytest.approx(1 + stats.t.isf(0.025, n - 1) * stats.sem(values))
    assert found.p == pytest.approx(stats.ttest_1samp(values, math.copysign(1, center)).pvalue, rel=1e-9)
    assert estimate_mean(values.tolist(), slack=3.0).p == 1
    noise = np.sqrt(stats.chi2.ppf((np.arange(2000) + 0.5) / 2000, n - 1) / (n - 1))  # of samples
    shifts = noise * (detectable(values.tolist(), 1.0, 11) - 1) / stats.sem(values)
    power = stats.nct.sf(stats.t.isf(0.025 / 11, n - 1), n - 1, shifts)
    assert np.mean(power) == pytest.approx(0.803, abs=0.004)


def test_a_single_value_has_no_interval_and_equal_values_leave_no_doubt():
    assert estimate_mean([1.5]) == Estimate(1.5, None, 1, None) and estimate_mean([0.0] * 2) == Estimate(0, 0, 2, 1)
    assert estimate_mean([0.1] * 3, 0.1) == Estimate(0.1, 0.1, 3, 1) and estimate_mean([0.1] * 3).p == 0


def test_holm_by_hand():
    """Sorted, 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 are 0.02, 0.03, 0.06, 0.04; the last is raised to 0.06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4, 0.9, 0.6]) == [1, 1, 1] and holm([0.02, 0.02]) == [0.04, 0.04] and holm([]) == []
