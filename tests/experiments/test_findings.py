"""Verdicts, trends and the rules around them. `test_report` compares differences and p-values with scipy."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from experiments.findings import AS_GOOD, Finding, Group, compare
from experiments.rates import Optimum
from experiments.records import Arm, Record
from tests.experiments.made import record, records

PLAIN = [Arm.of(norm="rmsnorm"), Arm.of(norm="dyt")]
FLOPS = {"dim=32,heads=2,steps=10": 1e9, "dim=64,heads=4,steps=40": 8e9, "dim=96,heads=6,steps=90": 1e11}
ARMS = [Arm((("size", size), *arm.factors)) for size in FLOPS for arm in PLAIN]
LOSSES = np.random.default_rng(0).normal(0, 0.01, (6, 4))  # six arms, four seeds


@pytest.fixture
def regrets(monkeypatch) -> Callable:
    """`regrets(runs, 0.001)`: the runs and, of each arm, a search with this regret."""

    def add(runs: list[Record], regret: float) -> list[Record]:
        monkeypatch.setattr(Group, "regret", regret)
        return [*runs, *(record(arm, 1000, 2.0, search=True) for arm in {run.arm for run in runs})]

    return add


def ladder(losses: np.ndarray, effects: tuple[float, ...] = (0.0, 0.0, 0.0)) -> list[Record]:
    """With these effects at the three sizes."""
    losses = losses.copy()
    losses[1::2] += np.reshape(effects, (3, 1))
    runs = records({arm: [2 + loss for loss in map(float, row)] for arm, row in zip(ARMS, losses, strict=True)})
    return [replace(run, flops=FLOPS[run.arm.size]) for run in runs]


def test_differences_are_paired_by_seed_where_neither_diverged():
    """Without all seeds, there is no p-value."""
    (found,) = compare(records({"rmsnorm": [1.0, None, 3.0], "dyt": [None, 1.0, 3.5]})).pairs.values()
    assert found.values == [0.5] and not found.complete and found.p is None
    (found,) = compare([*records({"rmsnorm": [1.0]}), record(PLAIN[1], 9, 2.0)]).pairs.values()
    assert found.verdict[1] == "no seed is in common"


@pytest.mark.parametrize(
    "values, p, verdict",
    [
        ([0.001, 0.002, 0.003], 0.07, AS_GOOD),
        ([0.0049, 0.005, 0.0051], 0.0001, AS_GOOD),  # although above 0
        ([0.001, 0.002, 0.007], 0.07, "undecided"),  # 0.0033 ± 0.0080 is partly outside
        ([0.10, 0.11, 0.12], 0.0499, "worse"),
        ([-0.10, -0.11, -0.12], 0.0499, "better"),
        ([0.10, 0.11, 0.12], 0.05, "undecided"),  # after the correction
        ([0.0], None, "no verdict"),
    ],
)
def test_one_rule_for_all_verdicts(values, p, verdict):
    """An interval of three values is ± 4.3027 · s / √3. Without a search, a verdict holds at the rate that was used."""
    for tuned, words in ((True, ""), (None, " at this rate")):
        found = Finding(values, len(values), tuned=tuned, p=p)
        assert found.verdict[0] == verdict
        assert found.words == verdict + words * (verdict not in ("undecided", "no verdict"))


def test_a_regret_is_of_the_rate_that_was_used_and_of_runs_near_the_parabola():
    """0.144 bits per byte are 0.1 nats."""
    found = Optimum(0.01, 0.02, loss=2.0)
    assert found.regret_at(0.01, [1.9, 2.3]) == 0.02 and found.regret_at(0.01, []) == 0.02
    assert found.regret_at(0.01, [2.1, 2.2]) is None and found.regret_at(0.02, [2.0]) is None


@pytest.mark.parametrize(
    "effects, shown",
    [
        ((0.3, 0.2, 0.1), "the difference falls"),
        ((-0.3, 0.0, 0.3), "the difference rises"),
        ((0.2, 0.2, 0.2), "no trend shown"),
    ],
)
def test_a_trend_is_the_slope_of_each_seed_over_the_logarithm_of_flops(effects, shown, regrets):
    """Against numpy's line through the effects of each seed. There is none if a size lacks runs or has fewer seeds."""
    (slope,) = compare(runs := ladder(LOSSES, effects)).trends.values()
    x = np.log2([*FLOPS.values()])
    lines = np.polyfit(x, LOSSES[1::2] + np.reshape(effects, (3, 1)) - LOSSES[::2], 1)
    assert slope.values == pytest.approx(lines[0]) and slope.doublings == pytest.approx(np.log2(100))
    assert slope.verdict == (shown, "") and slope.words == shown + " at this rate" * (shown != "no trend shown")
    (alone,) = compare(ladder(LOSSES[:, :1], effects)).trends.values()
    assert alone.verdict == ("no trend shown", "a single seed")
    for seeds in ((), (1, 2, 3)):
        (slope,) = compare([run for run in runs if run.arm != ARMS[3] or run.seed in seeds]).trends.values()
        assert slope.p is None and slope.verdict[0] == "no trend shown"
    others = [replace(run, arm=Arm((run.arm.factors[0], ("norm", "derf")))) for run in runs if run.arm in ARMS[1::2]]
    moved = [run for run in [*runs, *others] if run.arm != ARMS[2]]  # one size has another baseline
    assert {each.p for each in compare(moved).trends.values()} == {None}
    assert compare([*runs, *records({"rmsnorm": [1.0]})]).trends[PLAIN[1]].values == pytest.approx(lines[0])
    (tuned,) = compare(regrets(runs, 0.001)).trends.values()
    x -= x.mean()
    assert tuned.words == shown and tuned.slack == pytest.approx(0.002 * (abs(x) / (x @ x)).sum())
