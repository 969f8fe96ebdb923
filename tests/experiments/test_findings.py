"""Verdicts, trends and the rules around them. `test_report` compares differences and p-values with scipy."""

import math
from dataclasses import replace

import numpy as np
import pytest

from experiments.findings import AS_GOOD, Finding, Group, Trend, compare_groups, find
from experiments.rates import Optimum
from experiments.records import Arm, Record, grouped
from experiments.statistics import estimate
from tests.experiments.made import record, records

PLAIN = [Arm.of(norm="rmsnorm"), Arm.of(norm="dyt")]
SIZES = ("dim=32,heads=2,steps=10", "dim=64,heads=4,steps=40", "dim=96,heads=6,steps=90")
FLOPS = dict(zip(SIZES, (1e9, 8e9, 1e11), strict=True))
ARMS = [Arm((("size", size), *arm.factors)) for size in SIZES for arm in PLAIN]
LOSSES = np.random.default_rng(0).normal(0, 0.01, (6, 4))  # six arms, four seeds


def groups_of(runs: list[Record], regret: float | None = None, searched: tuple[Arm, ...] = ()) -> dict[Arm, Group]:
    """The arms `searched` for their learning rate have this regret."""
    arms = grouped((run.arm, run) for run in runs)
    groups = {arm: Group(each, each if arm in searched else []) for arm, each in arms.items()}
    for arm in searched:
        groups[arm].regret = regret
    return groups


def ladder(losses: np.ndarray, effects: tuple[float, ...] = (0.0, 0.0, 0.0)) -> list[Record]:
    """With these effects at the three sizes."""
    losses = losses.copy()
    losses[1::2] += np.reshape(effects, (3, 1))
    runs = records({arm: [2 + loss for loss in map(float, row)] for arm, row in zip(ARMS, losses, strict=True)})
    return [replace(run, flops=FLOPS[run.arm.size]) for run in runs]


def test_differences_are_paired_by_seed_where_neither_diverged():
    """Without all seeds, or if one of the best rates was not found or not searched for, there is no p-value."""
    runs = records({"rmsnorm": [1.0, None, 3.0], "dyt": [None, 1.0, 3.5]})
    (found,) = compare_groups(groups_of(runs), {}).pairs.values()
    assert found.values == [0.5] and not found.complete and found.p is None
    others = [record(PLAIN[1], 9, 2.0), *records({"rmsnorm": [1.0]})]
    (found,) = compare_groups(groups_of(others), {}).pairs.values()
    assert found.verdict[1] == "no seed is in common"
    runs = records({"rmsnorm": [1.0, 2.0, 3.0], "dyt": [1.1, 2.2, 3.2]})
    for regret, searched in ((None, PLAIN), (0.0, PLAIN[1:])):
        (found,) = compare_groups(groups_of(runs, regret, tuple(searched)), {}).pairs.values()
        assert (found.p, found.verdict[1][:30]) == (None, "the best learning rate was not")
    assert find([], 3).row == {"p": None, "detectable": None, "verdict": "undecided", "reason": find([], 3).verdict[1]}


@pytest.mark.parametrize(
    "values, p, verdict",
    [
        pytest.param([0.001, 0.002, 0.003], 0.07, AS_GOOD, id="inside"),
        pytest.param([0.0049, 0.005, 0.0051], 0.0001, AS_GOOD, id="inside, although above 0"),
        pytest.param([0.001, 0.002, 0.007], 0.07, "undecided", id="partly outside"),  # 0.0033 ± 0.0080
        pytest.param([0.10, 0.11, 0.12], 0.0499, "worse", id="above"),
        pytest.param([-0.10, -0.11, -0.12], 0.0499, "better", id="below"),
        pytest.param([0.10, 0.11, 0.12], 0.05, "undecided", id="not after the correction"),
        pytest.param([0.0201, 0.0221], 0.029, "undecided", id="two seeds"),
        pytest.param([0.0, 0.0], 1.0, AS_GOOD, id="two seeds, the same"),
        pytest.param([0.0], None, "no verdict", id="a single seed"),
    ],
)
def test_one_rule_for_all_verdicts(values, p, verdict):
    """An interval of three values is ± 4.3027 · s / √3. Without a search, a verdict holds at the rate that was used."""
    for tuned, words in ((True, ""), (None, " at this rate")):
        found = Finding(estimate(values), len(values), tuned, p=p)
        assert found.verdict[0] == verdict and found.shown == (verdict in ("better", "worse"))
        assert found.words == verdict + words * (verdict not in ("undecided", "no verdict"))


def test_a_regret_is_of_the_rate_that_was_used_and_of_runs_near_the_parabola():
    """0.144 bits per byte are 0.1 nats."""
    found = Optimum(0.01, 0.02, loss=2.0)
    assert found.regret_at(0.01, [1.9, 2.3]) == 0.02 and found.regret_at(0.01, []) == 0.02
    assert found.regret_at(0.01, [2.1, 2.2]) is None and found.regret_at(0.02, [2.0]) is None


def test_a_size_that_is_imprecise_by_more_than_chance_does_not_count():
    """Differences at three sizes have standard deviations of 1, 1 and `times`, of four seeds, around 0.

    The F test at 5% with 3 and 3 degrees of freedom has its limit at √15.4 = 3.9, so three times is not enough.
    """
    losses = np.zeros((6, 4))
    for times, left_out in ((3.5, []), (3.92, []), (3.94, [SIZES[2]])):
        losses[1::2] = 0.01 * np.outer([1, 1, times], [-1.0, -0.5, 0.5, 1.0])
        (slope,) = compare_groups(groups_of(ladder(losses)), {}).trends.values()
        assert slope.left_out == left_out and slope.doublings == pytest.approx(3 if left_out else math.log2(100))
    losses[1] = losses[0]  # equal runs are infinitely more precise
    (slope,) = compare_groups(groups_of(ladder(losses)), {}).trends.values()
    assert slope.left_out == [*SIZES[1:]] and slope.verdict == ("no trend shown", "fewer than two sizes are precise")


@pytest.mark.parametrize(
    "effects, shown",
    [
        ((0.3, 0.2, 0.1), "the gap closes"),
        ((-0.1, -0.2, -0.3), "the gap grows"),
        ((0.2, 0.2, 0.2), "no trend shown"),
        ((0.3, 0.1, -0.2), "worse turns into better"),
        ((-0.2, 0.1, 0.3), "better turns into worse"),
        ((0.0, -0.02, -0.3), "the difference falls"),  # nothing is shown at the smallest size
    ],
)
def test_a_trend_is_the_slope_of_each_seed_over_the_logarithm_of_flops(effects, shown):
    """Against numpy's line through the effects of each seed. A size without runs leaves none."""
    (slope,) = compare_groups(groups_of(ladder(LOSSES, effects)), {}).trends.values()
    lines = np.polyfit(np.log2([*FLOPS.values()]), LOSSES[1::2] + np.reshape(effects, (3, 1)) - LOSSES[::2], 1)
    assert slope.values == pytest.approx(lines[0])
    assert slope.ends == pytest.approx(np.polyval(lines.mean(1), np.log2([1e9, 1e11])))
    assert slope.verdict == (shown, "") and slope.words == shown + " at this rate" * (shown != "no trend shown")
    (tuned,) = compare_groups(groups_of(ladder(LOSSES, effects), 0.001, tuple(ARMS)), {}).trends.values()
    x = np.log2([*FLOPS.values()]) - np.log2([*FLOPS.values()]).mean()
    assert tuned.words == shown and tuned.slack == pytest.approx(0.002 * (abs(x) / (x @ x)).sum())
    (alone,) = compare_groups(groups_of(ladder(LOSSES[:, :1], effects)), {}).trends.values()
    assert alone.verdict == ("no trend shown", "a single seed")
    missing = compare_groups(groups_of([run for run in ladder(LOSSES, effects) if run.arm != ARMS[3]]), {}).trends
    assert [each.p for each in missing.values()] == [None] and Trend(None, 0).verdict[0] == "no trend shown"


def test_equal_arms_show_a_trend_in_at_most_six_of_a_hundred_ladders():
    generator, shown, groups = np.random.default_rng(1), 0, groups_of(ladder(np.zeros((6, 5))))
    for _ in range(2000):
        for group, losses in zip(groups.values(), generator.normal(0, 0.01, (6, 5)), strict=True):
            group.bpb = dict(enumerate(losses.tolist()))
        (slope,) = compare_groups(groups, {}).trends.values()
        shown += slope.p is not None and slope.p < 0.05
    assert shown <= 0.06 * 2000
