"""Means, confidence intervals and tests of a few values: what ablation tables and the verdicts on claims rest on.

Values are typically paired differences, one per seed: an arm's loss minus the baseline's. They are assumed to be
independent and roughly normal. A single value has no interval and no p-value: both are None.

Values that are all equal have an interval of width 0 and a t statistic of ±inf, or of 0 if they equal the hypothesis
exactly. So the p-value of "the mean is 0" is then 0, or 1 if all of them are 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import linear_regression, mean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval, mean ± half_width, by Student's t."""

    mean: float
    half_width: float | None  # None for a single value
    n: int
    p: float | None  # two-sided, of "the mean is 0", by the one-sample t test; None for a single value

    @property
    def low(self) -> float:
        return -math.inf if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float:
        return math.inf if self.half_width is None else self.mean + self.half_width

    def __format__(self, spec: str) -> str:
        """`+0.0123 ± 0.0045`, or `+0.0123` for a single value; `spec` formats both numbers, its sign only the mean."""
        spec = spec or "+.4f"
        half = "" if self.half_width is None else f" ± {self.half_width:{spec.lstrip('+')}}"
        return f"{self.mean:{spec}}{half}"

    def __str__(self) -> str:
        return format(self)


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The mean of `values` with its interval and the p-value of "the mean is 0"."""
    middle, error = _mean_and_error(values)
    if error is None:
        return Estimate(middle, None, 1, None)
    degrees = len(values) - 1
    half_width = t_quantile(degrees, confidence) * error
    return Estimate(middle, half_width, len(values), t_tails(_ratio(middle, error), degrees))


def noninferiority_p(values: Sequence[float], margin: float) -> float | None:
    """One-sided p-value of "the mean is at least `margin`". A small one says: worse by less than `margin`.

    Values are differences of which lower is better. None for a single value.
    """
    middle, error = _mean_and_error(values)
    if error is None:
        return None
    t = _ratio(middle - margin, error)
    tail = t_tails(t, len(values) - 1) / 2
    return tail if t < 0 else 1 - tail


def equivalence_p(values: Sequence[float], margin: float) -> float | None:
    """P-value of "the mean is at least `margin` away from 0", by two one-sided tests (TOST; Schuirmann 1987).

    A small one says: as good as the other, up to `margin`. None for a single value.
    """
    above, below = noninferiority_p(values, margin), noninferiority_p([-value for value in values], margin)
    return None if above is None or below is None else max(above, below)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Each p-value corrected for all comparisons by Holm's step-down method, in the order given.

    Rejecting where the result is at most 0.05 rejects any true hypothesis with probability at most 5%, however the
    tests depend on each other. None, a test that was not possible, stays None and does not count as a comparison.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[index] = largest
    return corrected


def differences_of_differences(
    a1: Mapping[int, float], a0: Mapping[int, float], b1: Mapping[int, float], b0: Mapping[int, float]
) -> list[float]:
    """The interaction of two factors, (a1 - a0) - (b1 - b0), for each seed that all four have, in order of seeds."""
    seeds = sorted(a1.keys() & a0.keys() & b1.keys() & b0.keys())
    return [(a1[seed] - a0[seed]) - (b1[seed] - b0[seed]) for seed in seeds]


def fisher_p(k1: int, n1: int, k2: int, n2: int) -> float:
    """Two-sided p-value of "k1 of n1 and k2 of n2 have the same probability", by Fisher's exact test.

    The probability, given k1 + k2, of a table that is no more likely than the observed one.
    """
    assert 0 <= k1 <= n1 and 0 <= k2 <= n2
    k = k1 + k2
    ways = [math.comb(n1, i) * math.comb(n2, k - i) for i in range(k + 1)]
    return sum(way for way in ways if way <= ways[k1]) / sum(ways)


def sign_flip_p(values: Sequence[float]) -> float:
    """Two-sided p-value of "the values are symmetric around 0", by the exact sign-flip (permutation) test.

    The share of the 2ⁿ assignments of signs whose sum is as far from 0 as the observed one. It needs no normal
    distribution, so it suits values on a coarse grid; below 6 values it is never less than 0.05.
    """
    sums = [0.0]
    for value in values:
        sums = [total + change for total in sums for change in (value, -value)]
    observed = abs(sums[0])
    return sum(abs(total) >= observed - 1e-9 * observed for total in sums) / len(sums)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Slope of the least-squares line through the points."""
    return linear_regression(xs, ys).slope


# --- distributions ---------------------------------------------------------------------------------------------------


def t_tails(t: float, degrees: int) -> float:
    """P(|T| > |t|) for Student's t with `degrees` degrees of freedom (Abramowitz and Stegun 26.7.1)."""
    return beta_cdf(degrees / (degrees + t * t), degrees / 2, 0.5)


@cache
def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| < t) = `confidence`."""
    x = beta_quantile(1 - confidence, degrees / 2, 0.5)
    return math.sqrt(degrees * (1 - x) / x)


def beta_cdf(x: float, a: float, b: float) -> float:
    """P(X < x) for the beta distribution: the regularized incomplete beta function I_x(a, b).

    Small probabilities keep their relative precision: those at or below the center are a sum of positive terms.
    """
    if x <= (a + 1) / (a + b + 2):
        return _beta_series(x, a, b)
    return 1 - _beta_series(1 - x, b, a)


def beta_quantile(p: float, a: float, b: float) -> float:
    """The x with P(X < x) = `p` for the beta distribution, by bisection down to neighboring floats."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if beta_cdf(middle, a, b) < p else (low, middle)
    return high


def _beta_series(x: float, a: float, b: float) -> float:
    """I_x(a, b) as a power series (Abramowitz and Stegun 26.5.4). Converges fast for x up to about a / (a + b)."""
    if x == 0:
        return 0.0
    term = total = 1.0
    n = 0
    while term > 1e-17 * total:
        term *= (a + b + n) / (a + 1 + n) * x
        total += term
        n += 1
    log_scale = math.lgamma(a + b) - math.lgamma(a + 1) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_scale) * total


def _mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; None for a single value."""
    if not all(map(math.isfinite, values)):
        raise ValueError(f"statistics need finite values, not {list(values)}")
    return float(mean(values)), float(stdev(values)) / math.sqrt(len(values)) if len(values) > 1 else None


def _ratio(difference: float, error: float) -> float:
    """The t statistic: a difference in standard errors."""
    if error:
        return difference / error
    return math.copysign(math.inf, difference) if difference else 0.0
