"""The optimum of an arm's learning rate: of parabolas, against scipy, and in simulated reports."""

import math
from collections.abc import Iterable
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats

from experiments.ablation.grid import Cell, Grid
from experiments.ablation.outcome import Arm, Outcome
from experiments.ablation.rates import SPACING, find_optimum, most_runs, next_runs
from experiments.ablation.report import Finding, compare

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
    losses = parabola(0.008, noise=0.01)
    x, y = np.array([(math.log(lr), loss) for lr, values in losses.items() for loss in values]).T
    fit, covariance = optimize.curve_fit(lambda x, v, low, a: low + a * (x - v) ** 2, x, y, [math.log(0.01), 2, 1])
    noise = math.sqrt(np.polyfit(x, y, 2, full=True)[1][0] / (15 - 3))
    found = find_optimum(losses)
    expected = math.exp(fit[0]), fit[1], fit[2] * covariance[0, 0], noise
    assert found.lr == pytest.approx(expected[0], rel=0.005)  # three digits are kept
    assert (found.loss, found.regret, found.noise) == pytest.approx(expected[1:], rel=1e-4)


@pytest.mark.parametrize(
    "losses, best, added",
    [
        pytest.param(parabola(0.003, 0.02), LOW, LOW / SPACING, id="vertex below"),
        pytest.param(parabola(0.03, 0.02), HIGH, HIGH * SPACING, id="vertex above"),
        pytest.param(parabola(0.0095, rates=RATES[:4]), MIDDLE, LOW / SPACING, id="four rates"),
        pytest.param(parabola(0.0175, STEEP), NEXT, HIGH * SPACING, id="close at the high end"),
        pytest.param(parabola(0.01, STEEP, rates=[1e-4, 4e-3, 5e-3, 0.01, 0.04]), 0.01, 0.02, id="widest gap nearby"),
        pytest.param(parabola(0.01) | {HIGH: [2, 2, math.inf]}, MIDDLE, LOW / SPACING, id="a run diverged"),
        pytest.param({lr: [2, 2, math.inf] for lr in RATES}, LOW, LOW / SPACING, id="at every rate"),
    ],
)
def test_without_an_optimum_the_best_rate_is_known_and_the_search_goes_on(losses, best, added):
    assert (find_optimum(losses).lr, find_optimum(losses).regret) == (best, None)
    assert next_runs(losses, 5) == (pytest.approx(sorted([*losses, added]), rel=0.01), 3)


def test_seeds_are_added_until_the_regret_is_a_quarter_of_an_interval_or_if_the_losses_bend_down():
    ended = []
    for noise, reported in product((0.01, 0.03), (2, 500, 600)):
        found = find_optimum(losses := parabola(0.01, noise=noise))
        half_width = stats.t.isf(0.025, reported - 1) * found.noise * math.sqrt(2 / reported)
        ended.append(found.regret is not None and found.regret <= half_width / 4)
        assert next_runs(losses, reported) == (None if ended[-1] else (RATES, 4))
    assert ended == [True, True, True, True, True, False]
    bent = dict(zip(RATES, ([2.0], [2.05], [1.99], [2.05], [2.0]), strict=True))
    assert find_optimum(bent).regret is None and next_runs(bent, 5) == (RATES, 2)


def report(curves: Iterable, noise: float, rng: np.random.Generator, min_lr: float = 0.0) -> list[Finding]:
    """On arms with these curvatures and cubic terms. At their optima, which differ, they are equally good."""
    arms = {Arm.of(norm=str(index)): (*curve, rng.uniform(-1.2, 1.2)) for index, curve in enumerate(curves)}

    @cache
    def outcome(cell: Cell) -> Outcome:
        curvature, cubic, optimum = arms[cell.arm]
        x = max(-3, min(math.log(cell.lr) - optimum, 3))
        loss = curvature * (x * x + cubic * x**3) + noise * rng.standard_normal()
        return Outcome(cell.arm, cell.lr, cell.seed, False, 1, loss, loss, loss, None, None, [])

    rates = [SPACING**i for i in range(-2, 3)]
    made: list[tuple[int, int]] = []  # how many runs there are after a round, and how many later ones it announced

    def run(cells: list[Cell], later: int) -> dict[Cell, Outcome]:
        assert min([cell.lr for cell in cells], default=1.0) >= min_lr, "train.py would refuse it"
        found = {cell: outcome(cell) for cell in cells}
        made.append((outcome.cache_info().currsize, later))
        return found

    settings = dict.fromkeys(arms, (None, SimpleNamespace(min_lr=min_lr)))
    grid: Any = SimpleNamespace(run=run, seeds=range(5), settings=settings)
    optima, _ = Grid.tune(grid, dict.fromkeys(arms, rates), widen=14)
    bpb = {arm: {seed: outcome(Cell(arm, optima[arm].lr, seed)).val_bpb or 0.0 for seed in range(5)} for arm in arms}
    assert all(made[-1][0] + 5 * len(arms) <= so_far + later for so_far, later in made), "the search was announced"
    found, _ = compare(bpb, dict.fromkeys(bpb, range(5)), regrets={arm: each.regret for arm, each in optima.items()})
    return list(found.values())


def test_a_search_says_how_many_runs_it_takes_at_most():
    """Five rates and one of two seeds have ended. In two rounds, 5 · 4, 6 · 3 or 7 · 2 runs are reached at most."""
    assert most_runs({}, RATES, 2, 0) == 10 and most_runs({lr: [2.0] for lr in RATES}, RATES, 2, 2) == 20 - 5
    for seed, min_lr in product(range(20), (0.0, 0.3)):
        report([(0.03, 0.25), (0.3, 0.0)], 0.04, np.random.default_rng(seed), min_lr)


@pytest.mark.slow
@pytest.mark.parametrize("nats", [0.01, 0.03])
def test_arms_that_are_equally_good_at_their_optima_are_seldom_told_apart(nats):
    """Noise is that of one run. Intervals cover 0, and few reports on nine arms show a difference."""
    rng, noise = np.random.default_rng(0), nats / math.log(2)
    pairs = [report([(0.1, 0.0), (0.1, 0.25)], noise, rng)[0] for _ in range(5000)]
    tuned = [found.estimate for found in pairs if found.tuned and found.estimate]
    assert np.mean([found.low <= 0 <= found.high for found in tuned]) >= 0.93 and len(tuned) > 4900
    nine = rng.choice(list(product((0.03, 0.1, 0.3), (-0.25, 0.0, 0.25))), size=(5000, 9))
    shown = [any(found.p is not None and found.p <= 0.05 for found in report(curves, noise, rng)) for curves in nine]
    assert np.mean(shown) <= 0.06
