"""Every function against scipy or by hand, and simulations of the error rates that are promised."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.statistics import (
    Estimate,
    differences_of_differences,
    equivalence_p,
    estimate,
    fisher_p,
    holm,
    noninferiority_p,
    sign_flip_p,
    slope,
    t_quantile,
    t_tails,
)

SIZES = [2, 3, 4, 5, 10, 30, 101, 1000]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def rejects(p: float | None, level: float = 0.05) -> bool:
    return p is not None and p <= level


# --- Student's t -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "degrees, quantile",  # printed tables of the t distribution, two-sided 5%
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (29, 2.0452), (60, 2.0003)],
)
def test_quantiles_match_printed_tables(degrees, quantile):
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-5)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 9, 29, 100, 999, 3000])
def test_tails_and_quantiles_match_scipy(degrees):
    """From p = 1 down to 1e-14, by relative error."""
    ts = stats.t.isf(np.geomspace(1e-14, 0.999, 50) / 2, degrees)
    assert [t_tails(t, degrees) for t in ts] == pytest.approx(2 * stats.t.sf(ts, degrees), rel=1e-10, abs=0)
    assert t_tails(-ts[0], degrees) == t_tails(ts[0], degrees)
    assert (t_tails(0.0, degrees), t_tails(math.inf, degrees)) == (1, 0)
    for confidence in (0.5, 0.95, 1 - 0.05 / 21, 1 - 1e-6):
        expected = stats.t.isf((1 - confidence) / 2, degrees)
        assert t_quantile(degrees, confidence) == pytest.approx(expected, rel=1e-9)


# --- estimates -------------------------------------------------------------------------------------------------------


def test_an_interval_by_hand():
    """For 1, 2, 6 the mean is 3, the variance (4 + 1 + 9) / 2 = 7, the quantile for two degrees of freedom 4.3027."""
    found = estimate([1.0, 2.0, 6.0])
    half = 4.30265 * math.sqrt(7 / 3)
    assert (found.mean, found.n) == (3, 3)
    assert (found.half_width, found.low, found.high) == pytest.approx((half, 3 - half, 3 + half), rel=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("center", [0.0, -0.7, 20.0])
def test_estimates_match_scipy(size, center):
    values = center + normal(size)
    test = stats.ttest_1samp(values, 0)
    for confidence in (0.9, 0.95, 0.999):
        interval = test.confidence_interval(confidence)
        found = estimate(values.tolist(), confidence)
        assert found.n == size
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
        assert (found.mean, found.p) == pytest.approx((values.mean(), test.pvalue), rel=1e-9, abs=1e-300)


def test_a_single_value_has_no_interval():
    found = estimate([1.5])
    assert found == Estimate(1.5, None, 1, None)
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert noninferiority_p([1.5], 2.0) is equivalence_p([1.5], 2.0) is None


def test_equal_values_leave_no_doubt():
    assert estimate([0.1, 0.1, 0.1]) == Estimate(0.1, 0, 3, 0)
    assert estimate([0.0, 0.0]) == Estimate(0, 0, 2, 1)
    assert [noninferiority_p([0.1] * 3, margin) for margin in (0.05, 0.1, 0.2)] == [1, 0.5, 0]
    assert [equivalence_p([-0.1] * 3, margin) for margin in (0.05, 0.1, 0.2)] == [1, 0.5, 0]


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf, 1.0], [-math.inf]])
def test_what_is_not_finite_has_no_estimate(values):
    for function in (estimate, lambda values: noninferiority_p(values, 1), lambda values: equivalence_p(values, 1)):
        with pytest.raises(ValueError):
            function(values)


def test_formats():
    found = Estimate(0.01234, 0.00452, 5, 0.01)
    assert (str(found), f"{found}", f"{found:.3f}", f"{found:+.1e}") == (
        *["+0.0123 ± 0.0045"] * 2,
        "0.012 ± 0.005",
        "+1.2e-02 ± 4.5e-03",
    )
    assert str(Estimate(-0.01234, None, 1, None)) == "-0.0123"


# --- one-sided tests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("center", [0.0, 0.5, -0.9, 3.0])
def test_noninferiority_and_equivalence_match_scipy(size, center):
    values, margin = center + normal(size), 1.0
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    assert noninferiority_p(values.tolist(), margin) == pytest.approx(below, rel=1e-9, abs=1e-300)
    assert equivalence_p(values.tolist(), margin) == pytest.approx(max(below, above), rel=1e-9, abs=1e-300)


# --- Holm ------------------------------------------------------------------------------------------------------------


def test_holm_by_hand():
    """Sorted, 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 are 0.02, 0.03, 0.06, 0.04; the last is raised to 0.06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, None, 0.04, 0.03, None, 0.005]) == pytest.approx([0.03, None, 0.06, 0.06, None, 0.02])
    assert holm([0.4, 0.9, 0.6]) == [1, 1, 1]
    assert holm([0.02, 0.02]) == [0.04, 0.04]
    assert (holm([0.03]), holm([None]), holm([])) == ([0.03], [None], [])


def test_holm_is_the_step_down_procedure():
    """The definition: reject in order of p, as long as p ≤ level / (hypotheses not yet rejected)."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        p_values = rng.uniform(0, 0.2, size=rng.integers(1, 12)).tolist()
        corrected = holm(p_values)
        assert all(p is not None and raw <= p <= 1 for raw, p in zip(p_values, corrected, strict=True))
        for level in (0.01, 0.05, 0.2):
            rejected: set[int] = set()
            for index in sorted(range(len(p_values)), key=p_values.__getitem__):
                if p_values[index] > level / (len(p_values) - len(rejected)):
                    break
                rejected.add(index)
            assert rejected == {index for index, p in enumerate(corrected) if rejects(p, level)}


# --- the rest --------------------------------------------------------------------------------------------------------


def test_differences_of_differences_over_the_seeds_that_all_have():
    a1, a0 = {9: 10.0, 2: 0.5, 0: 5.0, 1: 1.0}, {0: 1.0, 1: 1.0, 2: 0.25, 9: 4.0, 3: 1.0}
    b1, b0 = {0: 3.0, 2: 1.0, 9: 2.0}, {0: 1.5, 1: 9.0, 2: 8.0, 9: 4.0}
    assert differences_of_differences(a1, a0, b1, b0) == [4 - 1.5, 0.25 + 7, 6 + 2]


@pytest.mark.parametrize("n1, n2", [(5, 5), (3, 8), (10, 7), (0, 4)])
def test_fisher_matches_scipy(n1, n2):
    """Equal sizes have ties, tables exactly as likely as the observed one, which count."""
    for k1 in range(n1 + 1):
        for k2 in range(n2 + 1):
            expected = stats.fisher_exact([[k1, n1 - k1], [k2, n2 - k2]]).pvalue
            assert fisher_p(k1, n1, k2, n2) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("values", [[1.0, 2.0, -0.5, 3.0, 0.25], [0.0, 0.0, 1.1, 1.1, -1.1, 1.1], [0.7] * 8])
def test_sign_flips_match_scipy(values):
    """The last two lie on a coarse grid, as largest stable learning rates do: many sums are equal."""
    expected = stats.permutation_test(
        (values,), lambda x: abs(np.sum(x)), permutation_type="samples", alternative="greater", n_resamples=np.inf
    )
    assert sign_flip_p(values) == pytest.approx(expected.pvalue, rel=1e-12)


def test_sign_flips_by_hand():
    assert sign_flip_p([1.0] * 8) == 2 / 2**8  # all signs the same, one way or the other
    assert sign_flip_p([0.0] * 8) == 1
    assert sign_flip_p([3.0, -1.0]) == 1  # |3 - 1| is the smallest of 2 and 4
    assert sign_flip_p([1.0] * 5) > 0.05 > sign_flip_p([1.0] * 6)


def test_sign_flips_count_ties_on_a_coarse_grid():
    """Sums of tenths that are equal on paper differ in their last bit."""
    for values in np.random.default_rng(0).integers(-6, 7, (50, 6)).tolist():
        if sum(values):
            assert sign_flip_p([value / 10 for value in values]) == sign_flip_p(values), values


def test_sign_flips_reject_a_true_hypothesis_in_at_most_5_percent():
    """Normal values, and values on a grid of three, where the test is conservative."""
    rows = normal(4000, 8)
    on_grid = np.sign(rows) * (abs(rows) > 0.7)
    rates = [np.mean([rejects(sign_flip_p(list(row))) for row in table]) for table in (rows, on_grid)]
    assert 0.035 < rates[0] < 0.06 and 0 < rates[1] < 0.06


def test_fisher_by_hand():
    """3 of 3 against 0 of 3: each of the two extreme tables has probability 1 / 20."""
    assert fisher_p(3, 3, 0, 3) == pytest.approx(0.1)


def test_slope_matches_scipy():
    xs, noise = normal(2, 20)
    ys = 3 * xs + noise
    assert slope(xs.tolist(), ys.tolist()) == pytest.approx(stats.linregress(xs, ys).slope)
    assert slope([1, 2, 4], [5, 3, -1]) == pytest.approx(-2)


# --- error rates, simulated ------------------------------------------------------------------------------------------


def standard_errors(samples: np.ndarray) -> np.ndarray:
    return samples.std(-1, ddof=1) / math.sqrt(samples.shape[-1])


@pytest.mark.parametrize("size", [2, 3, 5, 10])
def test_intervals_miss_one_time_in_twenty(size):
    """100,000 samples at once, and 300 of them one by one. The standard error of the rate is 0.07%."""
    samples = 0.3 + normal(100_000, size, seed=size)
    half_widths = t_quantile(size - 1) * standard_errors(samples)
    misses = np.abs(samples.mean(-1) - 0.3) > half_widths
    for values, half_width, miss in zip(samples[:300].tolist(), half_widths, misses, strict=False):
        found = estimate(values)
        assert found.half_width == pytest.approx(half_width)
        assert miss == (not found.low <= 0.3 <= found.high)
    print(f"\nn = {size}: {misses.mean():.2%} of 95% intervals miss the mean")
    assert misses.mean() == pytest.approx(0.05, abs=0.003)


def null_tables(arms: int, seeds: int = 3, tables: int = 10_000) -> np.ndarray:
    """Paired differences, (tables, arms, seeds), of arms that do not differ from the baseline they share.

    A seed shifts all arms of a table alike; the rest of the noise is an arm's own, the baseline's included.
    """
    shift = 3 * normal(tables, 1, seeds, seed=arms)
    losses = shift + normal(tables, arms + 1, seeds, seed=arms + 100)
    return losses[:, 1:] - losses[:, :1]


@pytest.mark.parametrize("arms, uncorrected", [(3, 0.14), (9, 0.33), (21, 0.56)])
def test_family_wise_error_after_holm(arms, uncorrected):
    """At most 5% of 10,000 tables show a difference, plus three standard errors, 0.65%. p-values are scipy's."""
    tables = null_tables(arms)
    p_values = stats.ttest_1samp(tables, 0, axis=-1).pvalue
    for table, expected in zip(tables[:100].tolist(), p_values, strict=False):
        assert [estimate(values).p for values in table] == pytest.approx(expected, rel=1e-8)
    raw = np.mean(p_values.min(-1) <= 0.05)
    corrected = np.mean([any(map(rejects, holm(row))) for row in p_values.tolist()])
    print(f"\n{arms} arms: {raw:.1%} of tables have a false difference without correction, {corrected:.1%} with Holm's")
    assert raw == pytest.approx(uncorrected, abs=0.02)
    assert 0.02 < corrected <= 0.0565


@pytest.mark.slow
@pytest.mark.parametrize("arms", [3, 9, 21])
def test_family_wise_error_by_the_functions_alone(arms):
    tables = null_tables(arms).tolist()
    false = sum(any(map(rejects, holm([estimate(values).p for values in table]))) for table in tables)
    print(f"\n{arms} arms: {false / len(tables):.2%} of tables have a false difference with Holm's correction")
    assert 0.02 < false / len(tables) <= 0.0565


@pytest.mark.parametrize("size, noise", [(3, 0.3), (5, 0.5), (10, 0.8)])
def test_equivalence_errs_one_time_in_twenty_and_has_its_power(size, noise):
    """100,000 samples at once, where a 90% interval lies within the margin of 1; 200 of them one by one.

    The power at mean 0 is an integral over the variance, of which the mean is independent.
    """
    deviations = noise * normal(100_000, size, seed=size)
    quantile = stats.t.isf(0.05, size - 1)

    def rate(center: float) -> float:
        samples = center + deviations
        equivalent = np.abs(samples.mean(-1)) + quantile * standard_errors(samples) <= 1
        assert [rejects(equivalence_p(values, 1)) for values in samples[:200].tolist()] == equivalent[:200].tolist()
        return equivalent.mean()

    def power_given(chi2: float) -> float:
        error = math.sqrt(chi2 / (size - 1)) * noise / math.sqrt(size)
        return max(0.0, 1 - 2 * stats.norm.sf((1 - quantile * error) * math.sqrt(size) / noise))

    at_margin, beyond, power = rate(1.0), rate(-1.2), rate(0.0)
    print(f"\nn = {size}: TOST errs in {at_margin:.2%} at the margin, in {beyond:.2%} beyond; its power is {power:.1%}")
    assert at_margin == pytest.approx(0.05, abs=0.003)
    assert beyond < 0.03
    assert power == pytest.approx(stats.chi2(size - 1).expect(power_given), abs=0.006)
