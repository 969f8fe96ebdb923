"""Figures of docs/python.md about reports, by simulation: `python results/reports/simulate.py`, in about a minute.

1. How often a repetition shows the true difference that a report calls detectable, on average over reports.
2. How often arms that are equal at their best rates give a report that calls one of them better or worse, if all run at
   one rate. Noise, curvatures and best rates are those of results/study/recipes-muon.
3. How often a report calls an arm as good whose true difference is the margin.
"""

import math
import sys
from pathlib import Path

import numpy as np

STUDY = Path(__file__).parents[1] / "study" / "recipes-muon"
sys.path.insert(0, str(STUDY.parents[2]))

from experiments.compare import find_records  # noqa: E402
from experiments.findings import MARGIN, compare  # noqa: E402
from experiments.rates import close_rates, losses_of, points  # noqa: E402
from experiments.records import name_arms  # noqa: E402
from experiments.statistics import ALPHA, detectable, holm, t_quantile, t_tails  # noqa: E402

SEEDS, REPORTS = (3, 5, 8), 2000
draw = np.random.default_rng(0).standard_normal


def error(samples: np.ndarray) -> np.ndarray:
    """The standard error of the mean of each row."""
    return samples.std(-1, ddof=1) / math.sqrt(samples.shape[-1])


for n in SEEDS:
    for tests in (1, 2, 8, 11):
        unit = detectable(np.linspace(-1, 1, n).tolist(), 0, tests) / error(np.linspace(-1, 1, n))
        shown = unit * error(draw((10**6, n)))  # the true difference that a report names
        repetitions = shown[:, None] + draw((10**6, n))
        t = repetitions.mean(-1) / error(repetitions)
        power = np.mean(t > t_quantile(n - 1, 1 - ALPHA / tests))
        print(f"{n} seeds, {tests} tests: {power:.3f} of repetitions show the detectable difference")

found = compare(name_arms(find_records([STUDY]))[0])
losses = [losses_of(runs) for runs in found.search.values()]
curves = [np.polyfit(*points(each, close_rates(each)), 2) for each in losses]
noise = np.median([np.std(each.values, ddof=1) for each in found.pairs.values()]) / math.sqrt(2)  # of one run
print(f"{len(curves)} arms, standard deviation of a difference {noise * math.sqrt(2):.3f}")
for rate in (0.01, 0.0128, 0.015, 0.02):
    worse = np.array([a * (math.log(rate / 0.01) + b / (2 * a)) ** 2 for a, b, _ in curves])  # than at its best
    for n in SEEDS:
        called = 0
        for _ in range(REPORTS):
            runs = worse[:, None] + noise * draw((len(curves), n))
            differences = runs[1:] - runs[0]
            t = abs(differences.mean(-1)) / error(differences)
            called += min(holm([t_tails(each, n - 1) for each in t])) < ALPHA
        print(f"rate {rate}, {n} seeds: {called / REPORTS:.0%} of reports call an arm better or worse at this rate")

for spread in (0.004, 0.008, 0.016):  # of differences, which share the runs of the baseline
    for n in SEEDS:
        runs = spread / math.sqrt(2) * draw((20_000, 12, n))
        differences = MARGIN + runs[:, 1:] - runs[:, :1]
        as_good = abs(differences.mean(-1)) + t_quantile(n - 1) * error(differences) < MARGIN
        print(f"spread {spread}, {n} seeds: {as_good.any(-1).mean():.0%} of reports on 11 arms call one as good")
