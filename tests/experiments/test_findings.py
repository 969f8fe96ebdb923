"""Differences, their tests and trends: by hand, against scipy, and in simulated ladders."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import scipy.stats

from experiments.findings import AS_GOOD, Finding, Group, Trend, compare, find
from experiments.rates import Optimum
from experiments.records import Arm, Record, grouped
from experiments.statistics import estimate
from tests.experiments.made import record, records

RMSNORM, LAYERNORM, NONE, DYT, BATCHNORM = (
    Arm.of(norm=norm) for norm in ("rmsnorm", "layernorm", "none", "dyt", "batchnorm")
)
T_TWO = 4.302652729911275  # the 97.5% quantile of Student's t with 2 degrees of freedom, from tables
BELOW, ABOVE = [-0.5, -0.4, -0.6], [0.3, 0.1, 0.1]  # layernorm and dyt minus rmsnorm


def groups_of(runs: list[Record], regrets: Mapping[Arm, float | None] = MappingProxyType({})) -> dict[Arm, Group]:
    """`regrets` are those of arms that were searched for a learning rate."""
    arms = grouped((run.arm, run) for run in runs)
    groups = {arm: Group(each, each if arm in regrets else []) for arm, each in arms.items()}
    for arm, regret in regrets.items():
        groups[arm].regret = regret
    return groups


def p_of(values: list[float], center: float) -> float:
    return scipy.stats.ttest_1samp(values, center).pvalue


def test_differences_are_paired_by_seed_where_neither_diverged():
    runs = records({"rmsnorm": [1.0, None, 3.0], "dyt": [None, 1.0, 3.5]})
    (found,) = compare(groups_of(runs))[0].values()
    assert found.values == [0.5] and not found.complete and found.p is None
    others = [record(DYT, 9, 2.0), *records({"rmsnorm": [1.0]})]
    assert [each.verdict[1] for each in compare(groups_of(others))[0].values()] == ["no seed is in common"]


def test_p_values_are_those_of_scipy_beyond_the_regrets_corrected_by_hand():
    """Two of three tests have a p-value: sorted, they are multiplied by 3 and 2. BatchNorm has no seed in common."""
    bpb: dict[str, list[float | None]] = {
        "rmsnorm": [2.0, 3.0, 4.0],
        "layernorm": [1.5, 2.6, 3.4],
        "none": [2.5, 2.5, None],
        "dyt": [2.3, 3.1, 4.1],
    }
    runs = [*records(bpb), record(BATCHNORM, 9, 2.0)]
    regrets: dict[Arm, Any] = {arm: 0.0 for arm in groups_of(runs)} | {RMSNORM: 0.1, LAYERNORM: 0.2}
    layernorm, none, dyt, _ = compare(groups_of(runs, regrets))[0].values()
    assert layernorm.estimate and layernorm.estimate.mean == pytest.approx(-0.5) and layernorm.complete
    assert layernorm.estimate.high == pytest.approx(-0.5 + T_TWO * 0.1 / 3**0.5 + 0.3)
    assert layernorm.p == pytest.approx(3 * p_of(BELOW, -0.3)) == 3 * layernorm.row["raw_p"]
    assert dyt.p == pytest.approx(2 * p_of(ABOVE, 0.1))
    assert none.estimate and none.estimate.n == 2 and not none.complete and none.p is None
    untuned = compare(groups_of(runs, regrets | {DYT: None}))[0][DYT, RMSNORM]
    assert untuned.complete and untuned.p is None and untuned.verdict[1].startswith("the best learning rate was not f")
    assert compare(groups_of(runs, {DYT: 0.0}))[0][DYT, RMSNORM].tuned is False  # the other was not searched for one


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


def test_two_factors_are_compared_one_at_a_time_too_and_all_count_for_holm():
    """Three arms with the first, and the last with the two that differ from it in one factor: five tests."""
    arms = [Arm.of(placement=place, optimizer=name) for place in ("pre", "post") for name in ("muon", "adamw")]
    losses = [[2.0, 3.0, 4.0], [2.1, 3.0, 4.2], [2.3, 3.4, 4.2], [2.5, 3.3, 4.6]]
    found, _ = compare(groups_of(records(dict(zip(arms, losses, strict=True)))))
    assert [tuple(map(arms.index, pair)) for pair in found] == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)]
    p_values = {pair: scipy.stats.ttest_rel(*(losses[arms.index(arm)] for arm in pair)).pvalue for pair in found}
    first = min(p_values, key=lambda pair: p_values[pair])
    assert found[first].p == pytest.approx(5 * p_values[first])
    assert found[arms[3], arms[1]].values == pytest.approx([0.4, 0.3, 0.4])


def test_a_regret_is_of_the_rate_that_was_used_and_of_runs_near_the_parabola():
    """0.144 bits per byte are 0.1 nats."""
    found = Optimum(0.01, 0.02, loss=2.0)
    assert found.regret_at(0.01, [1.9, 2.3]) == 0.02 and found.regret_at(0.01, []) == 0.02
    assert found.regret_at(0.01, [2.1, 2.2]) is None and found.regret_at(0.02, [2.0]) is None


# --- ladders ---------------------------------------------------------------------------------------------------------

PLAIN = [RMSNORM, Arm.of(norm="dyt:alpha=1")]
SIZES = ("dim=32,heads=2,steps=10", "dim=64,heads=4,steps=40", "dim=96,heads=6,steps=90")
FLOPS = dict(zip(SIZES, (1e9, 8e9, 1e11), strict=True))
ARMS = [Arm((("size", size), *arm.factors)) for size in SIZES for arm in PLAIN]
LOSSES = np.random.default_rng(0).normal(0, 0.01, (6, 4))  # six arms, four seeds
EFFECTS = [0.02, 0.04, 0.08]


def ladder(losses: np.ndarray, effects: list[float] | tuple[float, ...] = ()) -> list[Record]:
    """With these effects at the three sizes."""
    losses = losses.copy()
    losses[1::2] += np.reshape(effects or [0.0] * 3, (3, 1))
    runs = records({arm: [2 + loss for loss in map(float, row)] for arm, row in zip(ARMS, losses, strict=True)})
    return [replace(run, flops=FLOPS[run.arm.size]) for run in runs]


def test_a_slope_is_that_of_each_seed_and_p_counts_all_comparisons():
    """Against numpy's line through the effects of each seed, scipy's test, and Holm's steps by hand."""
    regrets: dict[Arm, Any] = dict.fromkeys(ARMS, 0.0) | {ARMS[1]: 0.003, ARMS[5]: 0.001}
    pairs, trends = compare(groups_of(ladder(LOSSES, EFFECTS), regrets))
    assert [*pairs] == [(ARMS[1], ARMS[0]), (ARMS[3], ARMS[2]), (ARMS[5], ARMS[4])]
    x = np.log2([*FLOPS.values()])
    differences = LOSSES[1::2] + np.reshape(EFFECTS, (3, 1)) - LOSSES[::2]
    slopes = np.polyfit(x, differences, 1)[0]
    (slope,) = trends.values()
    assert slope.values == pytest.approx(slopes) and [*trends] == [PLAIN[1]] and slope.estimate
    assert slope.ends == pytest.approx(np.polyval(np.polyfit(x, differences.mean(1), 1), x[[0, 2]]))
    assert slope.doublings == pytest.approx(math.log2(100)) and slope.tuned
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    cost = abs(weights[0]) * 0.003 + abs(weights[2]) * 0.001
    assert slope.estimate.high == pytest.approx(slopes.mean() + 3.18245 * scipy.stats.sem(slopes) + cost, rel=1e-5)
    beyond = [*zip([*differences, slopes], (0.003, 0.0, 0.001, cost), strict=True)]
    p = [scipy.stats.t.sf(max(0, abs(v.mean()) - slack) / scipy.stats.sem(v), 3) * 2 for v, slack in beyond]
    ordered = np.maximum.accumulate([min(1.0, value * (4 - rank)) for rank, value in enumerate(sorted(p))])
    corrected = [ordered[sorted(p).index(value)] for value in p]
    assert max(corrected) < 1
    assert [each.p for each in (*pairs.values(), slope)] == pytest.approx(corrected)
    strictest = scipy.stats.t.isf([0.025 / 4, 0.2], 3).sum()
    detectable = [slack + strictest * scipy.stats.sem(v) for v, slack in beyond]
    assert [each.row["detectable"] for each in (*pairs.values(), slope)] == pytest.approx(detectable, rel=1e-5)


def test_a_size_that_is_imprecise_by_more_than_chance_does_not_count():
    """Differences at three sizes have standard deviations of 1, 1 and `times`, of four seeds, around 0.

    The F test at 5% with 3 and 3 degrees of freedom has its limit at √15.4 = 3.9, so three times is not enough.
    """
    assert scipy.stats.f.isf(0.025, 3, 3) ** 0.5 == pytest.approx(3.929, abs=1e-3)
    pattern = np.array([-1.0, -0.5, 0.5, 1.0])
    for times, left_out in ((3.5, []), (3.92, []), (3.94, [SIZES[2]])):
        losses = np.zeros((6, 4))
        losses[1::2] = 0.01 * np.outer([1, 1, times], pattern)
        (slope,) = compare(groups_of(ladder(losses)))[1].values()
        assert slope.left_out == left_out
        assert slope.doublings == pytest.approx(3 if left_out else math.log2(100))
    losses[1] = losses[0]  # equal runs are infinitely more precise
    (slope,) = compare(groups_of(ladder(losses)))[1].values()
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
def test_a_trend_has_a_name(effects, shown):
    (slope,) = compare(groups_of(ladder(LOSSES, effects)))[1].values()
    assert slope.verdict == (shown, "") and slope.words == shown + " at this rate" * (shown != "no trend shown")
    (tuned,) = compare(groups_of(ladder(LOSSES, effects), dict.fromkeys(ARMS, 0.0)))[1].values()
    assert tuned.words == shown
    (alone,) = compare(groups_of(ladder(LOSSES[:, :1], effects)))[1].values()
    assert alone.verdict == ("no trend shown", "a single seed")
    missing = compare(groups_of([run for run in ladder(LOSSES, effects) if run.arm != ARMS[3]]))[1]
    assert [slope.p for slope in missing.values()] == [None]


def test_equal_arms_show_a_trend_in_at_most_six_of_a_hundred_ladders():
    generator, shown, runs = np.random.default_rng(1), 0, ladder(np.zeros((6, 5)))
    groups = groups_of(runs)
    for _ in range(2000):
        for group, losses in zip(groups.values(), generator.normal(0, 0.01, (6, 5)), strict=True):
            group.bpb = dict(enumerate(losses.tolist()))
        (slope,) = compare(groups)[1].values()
        shown += slope.p is not None and slope.p < 0.05
    assert shown <= 0.06 * 2000


def test_what_is_not_known_has_no_number():
    assert find([], 3).row == {"p": None, "detectable": None, "verdict": "undecided", "reason": find([], 3).verdict[1]}
    assert Trend(None, 0).verdict[0] == "no trend shown"
