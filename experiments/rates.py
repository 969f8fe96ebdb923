"""The learning rate of each arm: the vertex of a parabola through its losses, from runs that are not reported.

The best rate of a coarse grid favors the arm whose optimum the grid happens to hit. The loss over ln(rate) is
close to a parabola near its minimum, so a few runs there find the minimum to within a fraction of the grid's
spacing, and say what the error of the rate may cost. The arms are then compared with other seeds.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import numpy as np

from experiments.records import Record, grouped
from experiments.statistics import t_quantile

WINDOW = 0.1 / math.log(2)  # bits per byte: the parabola is fitted to losses this close to the lowest
POINTS = 5  # the least number of rates for a parabola
SPACING = 1.6  # ratio of an added rate to its neighbor
UNIT = 0.01  # of rates in a fit, which keeps its equations well conditioned

Losses = Mapping[float, Sequence[float]]  # val_bpb of each seed, by rate; infinite if the run diverged


@dataclass(frozen=True)
class Optimum:
    """The rate at which an arm is reported."""

    lr: float
    regret: float | None  # val_bpb that the error of `lr` is expected to cost; None if no optimum was found
    loss: float = math.nan  # the parabola's value at `lr`
    noise: float = math.nan  # standard deviation of a run from the parabola, in val_bpb
    unsure: Sequence[float] = ()  # rates where the minimum seems to be, if two parabolas disagree

    def regret_at(self, lr: float, losses: Collection[float]) -> float | None:
        """The regret of runs at `lr`. None if it is another rate, or if their losses are far from the parabola.

        Then training is a matter of luck.
        """
        far = losses and abs(fmean(losses) - self.loss) > WINDOW
        return self.regret if lr == self.lr and not far else None


def find_optimum(losses: Losses) -> Optimum:
    """The vertex, if it lies among at least `POINTS` rates close to the lowest loss; else the best rate.

    A parabola over many rates may miss a minimum that is not symmetric. So there is no optimum if the `POINTS` rates
    nearest to the vertex have theirs more than half of `SPACING` away, and the regret is at least what the lowest point
    of a cubic would save.
    """
    close = close_rates(losses)
    best = Optimum(min(sorted(losses), key=lambda lr: fmean(losses[lr])), None)
    if len(close) < POINTS or not math.isfinite(fmean(losses[best.lr])):
        return best
    x, y = points(losses, close)
    (a, b, c), covariance = np.polyfit(x, y, 2, cov=True)
    vertex = -b / (2 * a)
    if a <= 0 or not x.min() < vertex < x.max():
        return best
    nearest = sorted(sorted(close, key=lambda lr: abs(math.log(lr / UNIT) - vertex))[:POINTS])
    near_a, near_b, _ = np.polyfit(*points(losses, nearest), 2)
    if near_a <= 0 or abs(-near_b / (2 * near_a) - vertex) > math.log(SPACING) / 2:
        return replace(best, unsure=nearest)
    gradient = np.array([b / (2 * a * a), -1 / (2 * a), 0])  # ∂vertex/∂(a, b, c)
    cubic = np.poly1d(np.polyfit(x, y, 3))
    saved = cubic(vertex) - cubic(np.linspace(x.min(), x.max(), 1000)).min()
    return Optimum(
        lr=float(f"{UNIT * math.exp(vertex):.3g}"),
        regret=float(max(a * (gradient @ covariance @ gradient), saved)),
        loss=float(c - b * b / (4 * a)),
        noise=float(np.std(y - np.polyval((a, b, c), x), ddof=3)),
    )


def points(losses: Losses, rates: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """ln(rate / UNIT) and loss of each run."""
    x, y = np.array([(math.log(lr / UNIT), loss) for lr in rates for loss in losses[lr]]).T
    return x, y


def losses_of(records: Iterable[Record]) -> Losses:
    """val_bpb of the runs of an arm, by learning rate. It is infinite if a run diverged."""
    return grouped((run.lr, math.inf if run.diverged else run.val_bpb) for run in records if run.ended)


def close_rates(losses: Losses) -> list[float]:
    """The rates whose mean loss is within `WINDOW` of the lowest, in order."""
    lowest = min(map(fmean, losses.values()))
    return [lr for lr in sorted(losses) if fmean(losses[lr]) <= lowest + WINDOW]


def next_runs(losses: Losses, reported: int) -> tuple[list[float], int] | None:
    """The rates and the number of seeds with which the search goes on, or None if it has ended.

    It ends when the rate's error costs less than a quarter of the interval of a difference over `reported` seeds.
    """
    rates = sorted(losses)
    close = close_rates(losses)
    found = find_optimum(losses)
    seeds = max(map(len, losses.values()))
    if found.regret is not None:
        n = max(reported, 2)
        half_width = t_quantile(n - 1) * found.noise * math.sqrt(2 / n)
        return (close, seeds + 1) if found.regret > half_width / 4 else None
    if found.unsure:
        low, high = max(pairwise(found.unsure), key=lambda pair: pair[1] / pair[0])
        between = [float(f"{math.sqrt(low * high):.3g}")] if high > 1.1 * SPACING * low else []
        return sorted([*found.unsure, *between]), seeds + (not between)
    few, at = len(close) < POINTS, rates.index(found.lr)
    if at == 0 or (few and close[0] == rates[0]):
        added = rates[0] / SPACING
    elif at == len(rates) - 1 or (few and close[-1] == rates[-1]):
        added = rates[-1] * SPACING
    elif few:  # the minimum is narrow: halve the widest gap around it
        near = rates[max(at - 2, 0) : at + 3]
        low, high = max(pairwise(near), key=lambda pair: pair[1] / pair[0])
        added = math.sqrt(low * high)
    else:
        return close, seeds + 1
    return sorted([*rates, float(f"{added:.3g}")]), seeds
