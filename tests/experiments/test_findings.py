"""Verdicts, trends and the rules around them. `test_report` compares differences and p-values with scipy."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from experiments.findings import AS_GOOD, Finding, Group, compare
from experiments.rates import Optimum
from experiments.records import Arm, Record
from tests.experiments.made import KNOWN, record, records

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


@pytest.mark.parametrize(
    "values, p, verdict",
    [
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
    """Against numpy's line through the effects of each seed that all sizes have. What is not tested has a reason."""
    (slope,) = compare(runs := ladder(LOSSES, effects)).trends.values()
    x = np.log2([*FLOPS.values()])
    lines = np.polyfit(x, LOSSES[1::2] + np.reshape(effects, (3, 1)) - LOSSES[::2], 1)
    assert slope.values == pytest.approx(lines[0]) and slope.doublings == pytest.approx(np.log2(100))
    assert slope.verdict == (shown, "") and slope.words == shown + " at this rate" * (shown != "no trend shown")
    few = {1: ("not tested", "there is a single seed"), 2: ("no trend shown", "two seeds are too few to tell")}
    for seeds, verdict in few.items():
        assert compare(ladder(LOSSES[:, :seeds], effects)).trends[PLAIN[1]].verdict == verdict
    found = compare([run for run in runs if run.arm != ARMS[2] or run.seed != 0])
    assert found.trends[PLAIN[1]].values == pytest.approx(lines[0][1:]) and found.baselines[ARMS[3]] == ARMS[2]
    assert not compare([replace(run, flops=1e9) for run in runs]).trends
    none, text = {"val_loss": None, "val_bpb": None}, "{} of dim={}'s 4 runs {}"
    for chosen, values, tests, reason in (  # what was planned counts for Holm's method
        (runs[2::6], {}, 2, "dim=64 has no run of rmsnorm"),
        (runs[3::6], {}, 2, "dim=64 has no run of dyt"),
        (runs[5::6], {"seed": 9}, 2, "no seed is in common"),
        (runs[5::6], {"settings": KNOWN | {"data": "text@ff"}}, 2, "sizes have other texts or batches"),
        (runs[3:4], none | {"diverged": True}, 4, text.format(1, "64 dyt", "diverged")),
        (runs[4::12], none, 4, text.format(2, "96 rmsnorm", "did not end")),
    ):
        made = [replace(run, **values) if run in chosen else run for run in runs if values or run not in chosen]
        (slope,) = (found := compare(made)).trends.values()
        assert (slope.verdict, slope.p, found.tests) == (("not tested", reason), None, tests)
    assert compare([*runs, *records({"rmsnorm": [1.0]})]).trends[PLAIN[1]].values == pytest.approx(lines[0])
    (tuned,) = compare(regrets(runs, 0.001)).trends.values()
    x -= x.mean()
    assert tuned.words == shown and tuned.slack == pytest.approx(0.002 * (abs(x) / (x @ x)).sum())
