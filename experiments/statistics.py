"""Means, confidence intervals and tests of a few values: what ablation tables rest on.

Values are typically paired differences, one per seed: an arm's loss minus the baseline's. They are assumed to be
independent and roughly normal. A single value has no interval and no p-value: both are None. Values that are all equal
have an interval of width 0; the p-value of "the mean is 0" is then 0, or 1 if all of them are 0.

`slack` is a part of a difference that may be an artefact: what errors in two learning rates may cost. It widens the
interval on both sides, and only what is beyond it counts for the p-value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev

import numpy as np

CONFIDENCE = 0.95  # how often an interval covers the true mean
ALPHA = 0.05  # significance level
POWER = 0.8  # how often an effect of the smallest detectable size is significant
NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% confidence interval, mean ± half_width, by Student's t."""

    mean: float
    half_width: float | None  # None for a single value
    n: int
    p: float | None  # two-sided p-value of "the mean is 0", by the one-sample t test; None for a single value

    def __format__(self, spec: str) -> str:
        """`+0.0123 ± 0.0045`, or `+0.0123` for a single value; `spec` formats both numbers, its sign only the mean."""
        half = "" if self.half_width is None else f" ± {self.half_width:{spec.lstrip('+')}}"
        return f"{self.mean:{spec}}{half}"


def estimate_mean(values: Sequence[float], slack: float = 0.0) -> Estimate:
    """The mean of `values`, which are finite, with its interval and the p-value of "the mean is 0"."""
    middle, n = mean(values), len(values)
    if n == 1:
        return Estimate(middle, None, 1, None)
    error = stdev(values) / math.sqrt(n)
    beyond = max(0.0, abs(middle) - slack)
    t = beyond / error if error else math.inf if beyond else 0.0
    return Estimate(middle, t_quantile(n - 1) * error + slack, n, t_tails(t, n - 1))


def detectable(values: Sequence[float], slack: float, comparisons: int) -> float:
    """About the smallest true mean that four of five experiments detect, on average over samples like `values`.

    Corrected for so many comparisons, by the strictest of Holm's steps. results/reports/simulate.py checks it.
    """
    degrees = len(values) - 1
    t = t_quantile(degrees, 1 - (1 - CONFIDENCE) / comparisons)
    power = t_quantile(degrees, 2 * POWER - 1)
    room = math.hypot(math.asinh(power / math.sqrt(degrees)), math.log1p(power / t))
    return slack + t * math.exp(room) * stdev(values) / math.sqrt(len(values))


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p-value corrected for all comparisons by Holm's step-down method, in the order given.

    Rejecting where the result is at most 0.05 rejects any true hypothesis with probability at most 5%, however the
    tests depend on each other. A test that was not possible counts if its p-value is 1.
    """
    order, n = np.argsort(p_values), len(p_values)
    corrected = np.zeros(n)
    corrected[order] = np.maximum.accumulate(np.minimum(1, np.sort(p_values) * np.arange(n, 0, -1)))
    return corrected.tolist()


def t_tails(t: float, degrees: int) -> float:
    """P(|T| > |t|) for Student's t: with |t| = √degrees / tan(angle), an integral of a power of the sine.

    Gauss–Legendre quadrature of this positive, smooth function keeps the relative precision of small probabilities.
    """

    def area(angle: float) -> float:
        return angle * float(WEIGHTS @ np.sin(angle * (NODES + 1) / 2) ** (degrees - 1))

    return area(math.atan2(math.sqrt(degrees), abs(t))) / area(math.pi / 2)


@cache
def t_quantile(degrees: int, probability: float = CONFIDENCE) -> float:
    """The t with P(|T| < t) = `probability`, by bisection down to neighboring floats."""
    low, high = 0.0, 1e6
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_tails(middle, degrees) > 1 - probability else (low, middle)
    return high
