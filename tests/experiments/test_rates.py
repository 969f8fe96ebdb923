"""The optimum of an arm's learning rate: of parabolas, against scipy, in published and in simulated searches."""

import math
from collections.abc import Iterable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats

from experiments.compare import find_records
from experiments.findings import BETTER, WORSE, Finding, compare
from experiments.grid import Cell, Grid
from experiments.rates import SPACING, Losses, Optimum, find_optimum, losses_of, next_runs
from experiments.records import Arm, Record, name_arms
from files import ROOT
from tests.experiments.made import record

RATES = LOW, _, MIDDLE, NEXT, HIGH = [0.01 * 1.5**i for i in range(-2, 3)]
STEEP, FLAT = 3.0, 0.1  # curvatures: few of these rates are close to the lowest loss, or all


def parabola(vertex: float, curvature: float = FLAT, noise: float = 0.0, rates: list[float] = RATES) -> dict:
    """Losses of three seeds at each rate, with the lowest at 2."""
    draw = np.random.default_rng(0).standard_normal
    return {lr: (2 + curvature * math.log(lr / vertex) ** 2 + noise * draw(3)).tolist() for lr in rates}


def test_the_optimum_is_the_vertex_and_its_regret_what_its_error_costs():
    """For a noisy parabola, scipy fits the vertex itself: its variance times the curvature is the expected cost."""
    found = find_optimum(parabola(0.0123))
    assert found.lr == 0.0123
    assert (found.loss, found.regret, found.noise) == pytest.approx((2, 0, 0), abs=1e-7)
    # It is at least what the lowest point of a cubic would have saved, which is more if the losses are skewed.
    for skew in (0.0, 0.02):
        losses = parabola(0.008, noise=0.01)
        losses = {lr: [loss + skew * math.log(lr / 0.008) ** 3 for loss in losses[lr]] for lr in losses}
        x, y = np.array([(math.log(lr), loss) for lr, values in losses.items() for loss in values]).T
        fit, covariance = optimize.curve_fit(lambda x, v, low, a: low + a * (x - v) ** 2, x, y, [math.log(0.01), 2, 1])
        noise = math.sqrt(np.polyfit(x, y, 2, full=True)[1][0] / (15 - 3))
        curve = np.poly1d(np.polyfit(x, y, 3))
        least = optimize.minimize_scalar(curve, bounds=(x.min(), x.max()), method="bounded").fun
        costs = fit[2] * covariance[0, 0], curve(fit[0]) - least
        assert (costs[1] > costs[0]) == bool(skew)
        found = find_optimum(losses)
        assert found.lr == pytest.approx(math.exp(fit[0]), rel=0.005)  # three digits are kept
        assert (found.loss, found.regret, found.noise) == pytest.approx((fit[1], max(costs), noise), rel=1e-3)


@pytest.mark.parametrize(
    "losses, best, added",
    [
        (parabola(0.003, 0.02), LOW, LOW / SPACING),
        (parabola(0.0175, STEEP), NEXT, HIGH * SPACING),
        (parabola(0.01, STEEP, rates=[1e-4, 2e-3, 8e-3, 0.01, 0.012, 0.02, 0.2]), 0.01, 0.004),  # in the widest gap
        (parabola(0.01, STEEP, rates=[1e-4, 5e-3, 8e-3, 0.01, 0.012, 0.05, 0.9]), 0.01, 0.0245),  # two rates away
        ({lr: [2, 2, math.inf] for lr in RATES}, LOW, LOW / SPACING),
    ],
)
def test_without_an_optimum_the_best_rate_is_known_and_the_search_goes_on(losses, best, added):
    assert (find_optimum(losses).lr, find_optimum(losses).regret) == (best, None)
    assert next_runs(losses, 5) == (pytest.approx(sorted([*losses, added]), rel=0.01), 3)


def test_seeds_are_added_until_the_regret_is_a_quarter_of_an_interval_or_if_the_losses_bend_down():
    ended = []
    for noise, (reported, n) in product((0.01, 0.03), ((1, 2), (500, 500), (600, 600))):  # one counts as two
        found = find_optimum(losses := parabola(0.01, noise=noise))
        half_width = stats.t.isf(0.025, n - 1) * found.noise * math.sqrt(2 / n)
        ended.append(found.regret is not None and found.regret <= half_width / 4)
        assert next_runs(losses, reported) == (None if ended[-1] else (RATES, 4))
    assert True in ended and False in ended
    bent = dict(zip(RATES, ([2.0], [2.05], [1.99], [2.05], [2.0]), strict=True))
    assert find_optimum(bent).regret is None and next_runs(bent, 5) == (RATES, 2)


def test_in_the_published_searches_only_gemma3_and_gemma4_with_adamw_are_unsure():
    """A parabola over rates that are 42 times apart said 0.0731 for gemma4, and five seeds near it say 0.04."""
    searches: dict[tuple[str, str], Losses] = {}
    for file in sorted((ROOT / "results/study").glob("*/runs.csv")):
        arms = compare(name_arms(find_records([file.parent]))[0]).search
        searches |= {(file.parent.name, arm.name): losses_of(runs) for arm, runs in arms.items()}
    unsure = {arm: losses for arm, losses in searches.items() if find_optimum(losses).unsure}
    assert [*unsure] == [("recipes-adamw", "gemma3"), ("recipes-adamw", "gemma4")] and len(searches) == 76
    losses = unsure["recipes-adamw", "gemma4"]  # it goes on with more seeds, or with the rate in the widest gap
    found = find_optimum(losses)
    assert found == Optimum(0.0525, None, unsure=[0.0128, 0.0205, 0.0328, 0.0525, 0.084])
    assert next_runs(losses, 6) == (found.unsure, 6)
    fewer = {lr: each for lr, each in losses.items() if lr != 0.0328}
    assert find_optimum(fewer).unsure and next_runs(fewer, 6) == ([0.008, 0.0128, 0.0205, 0.0328, 0.0525, 0.084], 5)


def simulate(curves: Iterable, noise: float, rng: np.random.Generator, min_lr: float = 0.0) -> list[Finding]:
    """On arms with these curvatures and cubic terms. At their optima, which differ, they are equally good."""
    arms = {Arm.of(norm=str(index)): (*curve, rng.uniform(-1.2, 1.2)) for index, curve in enumerate(curves)}
    made: dict[Cell, Record] = {}

    def run(cells: list[Cell]) -> dict[Cell, Record]:
        for cell in (cell for cell in cells if cell not in made):
            assert cell.lr >= min_lr, "train.py would refuse it"
            curvature, cubic, optimum = arms[cell.arm]
            x = max(-3, min(math.log(cell.lr) - optimum, 3))
            loss = 2 + curvature * (x * x + cubic * x**3) + noise * rng.standard_normal()
            made[cell] = record(cell.arm, cell.seed, loss, lr=cell.lr, search=cell.seed >= 1000)
        return {cell: made[cell] for cell in cells}

    configs = dict.fromkeys(arms, (None, SimpleNamespace(min_lr=min_lr)))
    rates = [SPACING**i for i in range(-2, 3)]
    grid: Any = SimpleNamespace(run=run, seeds=range(5), configs=configs, lrs=dict.fromkeys(arms, rates))
    optima = Grid.tune(grid)
    run([Cell(arm, optima[arm].lr, seed) for seed in range(5) for arm in arms])
    return list(compare([*made.values()]).found.values())


def test_no_search_tries_a_rate_below_min_lr():
    """With the curvature and the noise of results/study/recipes-muon."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        simulate([(0.07, 0.25)], 0.0135, rng, min_lr=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("nats", [0.01, 0.03])
def test_arms_that_are_equally_good_at_their_optima_are_seldom_told_apart(nats):
    """Noise is that of one run. Intervals cover 0, and few reports on nine arms show a difference."""
    rng, noise = np.random.default_rng(0), nats / math.log(2)
    pairs = [simulate([(0.1, 0.0), (0.1, 0.25)], noise, rng)[0] for _ in range(2000)]
    tuned = [found.estimate for found in pairs if found.tuned and found.estimate]
    assert np.mean([abs(found.mean) <= (found.half_width or 0) for found in tuned]) >= 0.93 and len(tuned) > 1900
    nine = rng.choice(list(product((0.03, 0.1, 0.3), (-0.25, 0.0, 0.25))), size=(1000, 9))
    shown = [any(found.verdict[0] in (BETTER, WORSE) for found in simulate(curves, noise, rng)) for curves in nine]
    assert np.mean(shown) <= 0.06
