"""Means and confidence intervals of a few values."""

import math
from statistics import mean, stdev

CONFIDENCE = 0.95

Interval = tuple[float, float | None]  # a mean and the half-width of its interval; None for a single value


def mean_interval(values: list[float]) -> Interval:
    """Mean and half-width of its 95% confidence interval by Student's t."""
    if len(values) < 2:
        return mean(values), None
    return mean(values), t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def t_quantile(degrees: int) -> float:
    """The two-sided 95% quantile of Student's t with `degrees` degrees of freedom, by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(middle, degrees) < CONFIDENCE else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _t_probability(theta: float, degrees: int) -> float:
    """P(|T| < √degrees · tan θ), a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    odd = degrees % 2
    term = math.cos(theta) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= (k - 1) / k * math.cos(theta) ** 2
        total += term
    return (theta + math.sin(theta) * total) * 2 / math.pi if odd else math.sin(theta) * total
