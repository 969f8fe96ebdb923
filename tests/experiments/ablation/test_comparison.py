"""What an ablation says about its runs: outcomes, differences, interactions, learning rates, tables."""

import math

import pytest
import scipy.stats

from experiments.ablation.comparison import compare, interactions
from experiments.ablation.grid import Cell
from experiments.ablation.outcome import Arm, BySeed, Outcome, best_lr, final_bpb, paired, read_outcome
from experiments.ablation.report import comparison_section, missing, sweep_section

RMSNORM = Arm.of(norm="rmsnorm", placement="pre")


def arm_of(norm: str, **factors: str) -> Arm:
    return Arm.of(norm=norm, placement="pre", **factors)


def outcome(norm: str, seed: int, val_bpb: float | None, lr: float = 0.01, diverged: bool = False) -> Outcome:
    """A run of 20 steps. With `val_bpb` None, its loss was not finite at step 7."""
    if val_bpb is None:
        return Outcome(arm_of(norm), lr, seed, True, 7, None, None, None, None, None, [])
    return Outcome(arm_of(norm), lr, seed, diverged, 20, val_bpb, val_bpb, val_bpb, 1000.0 + seed, 1.5, [])


def runs_of(**bpb: list[float | None]) -> dict[Cell, Outcome]:
    runs = [outcome(norm, seed, value) for norm, values in bpb.items() for seed, value in enumerate(values)]
    return {Cell(run.arm, run.lr, run.seed): run for run in runs}


def table(blocks: list[str]) -> list[str]:
    """The lines of the first table of a section, without the one below the titles."""
    titles, _, *rows = next(block for block in blocks if block.startswith("|")).splitlines()
    return [titles, *rows]


# --- outcomes --------------------------------------------------------------------------------------------------------

TRAINING = {"step": 10, "train_loss": 5.0, "seconds": 1.0, "tokens_per_second": 300.0}
LATER = {"step": 20, "train_loss": 4.0, "seconds": 2.5, "tokens_per_second": 100.0}
EARLY = {"step": 10, "val_loss": 3.5, "val_bpb": 2.2}
LAST = {"step": 20, "val_loss": 4.0, "val_bpb": 2.5}
NOT_FINITE = {"step": 20, "not_finite": True}


@pytest.mark.parametrize(
    "log, expected",
    [
        pytest.param([TRAINING, EARLY, LATER, LAST], (False, 20, 4.0, 2.5, 3.5, 200.0, 2.5), id="done"),
        pytest.param([LATER, LAST | {"val_loss": 5.54}], (False, 20, 5.54, 2.5, 5.54, 100.0, 2.5), id="uniform"),
        pytest.param([LATER, LAST | {"val_loss": 5.56}], (True, 20, 5.56, 2.5, 5.56, 100.0, 2.5), id="above"),
        pytest.param([TRAINING, NOT_FINITE], (True, 20, None, None, None, 300.0, 1.0), id="not finite"),
        pytest.param([NOT_FINITE | {"step": 3}], (True, 3, None, None, None, None, None), id="at once"),
        pytest.param([TRAINING, LATER, LAST, NOT_FINITE], (True, 20, None, None, 4.0, 200.0, 2.5), id="unsaved"),
        pytest.param([TRAINING, LATER], None, id="not evaluated"),
        pytest.param([TRAINING, LAST | {"step": 10}], None, id="not at the end"),
        pytest.param([], None, id="empty"),
    ],
)
def test_a_complete_log_is_an_outcome(log, expected):
    """A run diverged if it ends above a uniform prediction, ln 257 = 5.549 nats."""
    found = read_outcome(RMSNORM, 0.01, 3, log, steps=20, uniform_loss=math.log(257))
    assert found == (expected and Outcome(RMSNORM, 0.01, 3, *[*expected, log]))


# --- differences -----------------------------------------------------------------------------------------------------


def test_differences_are_paired_by_seed_where_neither_diverged():
    baseline = [outcome("rmsnorm", 0, 1.0), outcome("rmsnorm", 1, None), outcome("rmsnorm", 2, 3.0)]
    arm = [outcome("dyt", 2, 3.5), outcome("dyt", 1, 1.0), outcome("dyt", 0, 9.0, diverged=True)]
    assert paired(final_bpb(arm), final_bpb(baseline)) == {2: 0.5}


def test_p_values_are_those_of_scipy_corrected_by_hand():
    """Two of three comparisons have a p-value. The smallest is multiplied by 3, and the other by 2."""
    bpb: dict[Arm, BySeed] = {
        RMSNORM: {0: 2.0, 1: 3.0, 2: 4.0},
        arm_of("layernorm"): {0: 1.5, 1: 2.6, 2: 3.4},
        arm_of("none"): {0: 2.5, 1: 2.5},
        arm_of("dyt"): {0: 2.3, 1: 3.1, 2: 4.1},
    }
    layernorm, none, dyt = compare(bpb, seeds=3, margin=0.9).values()
    one, other = ([-0.5, -0.4, -0.6], [0.3, 0.1, 0.1])
    assert layernorm.estimate and layernorm.estimate.mean == pytest.approx(-0.5) and layernorm.complete
    assert layernorm.p == pytest.approx(3 * scipy.stats.ttest_1samp(one, 0).pvalue)
    assert dyt.p == pytest.approx(2 * scipy.stats.ttest_1samp(other, 0).pvalue)
    assert none.estimate and none.estimate.n == 2 and not none.complete
    assert none.p is None and none.equivalence_p is None
    tails = [scipy.stats.ttest_1samp(one, -0.9, alternative="greater").pvalue]
    tails.append(scipy.stats.ttest_1samp(other, 0.9, alternative="less").pvalue)
    assert dyt.equivalence_p == pytest.approx(3 * tails[1]) and layernorm.equivalence_p == pytest.approx(2 * tails[0])


def test_the_whole_table():
    """By hand: the variance of 2, 3, 4 is 1; of 1.5, 2.6, 3.4 it is 0.91; of -0.5, -0.4, -0.6 it is 0.01.

    The two values of batchnorm differ by 2, and the two differences are equal. t of the three differences is 5√3, which
    with two degrees of freedom has p = 0.0131, and three times that is 0.0392.
    """
    runs = runs_of(rmsnorm=[2.0, 3.0, 4.0], layernorm=[1.5, 2.6, 3.4], batchnorm=[1.9, None, 3.9], none=[None] * 3)
    assert table(comparison_section(list(runs), runs, margin=0.1)) == [
        "| norm | placement | lr | val_bpb (n) | paired difference from rmsnorm pre (n) | p | p of ±0.1 | diverged | "
        "tokens/s |",
        "| rmsnorm | pre | 0.01 | 3.0000 ± 2.4841 (3) | – | – | – | 0 of 3 | 1,001 |",
        "| layernorm | pre | 0.01 | 2.5000 ± 2.3697 (3) | -0.5000 ± 0.2484 (3) | 0.0392 | 1.0000 | 0 of 3 | 1,001 |",
        "| batchnorm | pre | 0.01 | 2.9000 ± 12.7062 (2 of 3)† | -0.1000 ± 0.0000 (2 of 3)† | – | – | 1 of 3 | 1,001 |",
        "| none | pre | 0.01 | – | – | – | – | 3 of 3 | – |",
    ]


def test_a_run_that_has_not_ended_is_missing_and_leaves_no_p():
    runs = runs_of(rmsnorm=[2.0, 3.0, 4.0], layernorm=[1.5, 2.6, 3.4])
    ended = dict(list(runs.items())[1:])
    section = comparison_section(list(runs), ended, None)
    assert "**Partial: 5 of 6 runs have ended.** Missing: rmsnorm-pre-lr0.01-seed0." in section
    assert "| -0.5000 ± 1.2706 (2 of 3)† | – |" in table(section)[2]
    assert missing(list(runs), runs) == ""


# --- interactions ----------------------------------------------------------------------------------------------------


def test_interactions_are_differences_of_differences_with_corrected_p_values():
    """By hand: (2.5 - 2.1) - (2.2 - 2.0) = 0.2 for the first seed of the first pair, and so on."""
    values = {
        ("rmsnorm", "pre", "muon"): [2.0, 2.1, 2.2],
        ("rmsnorm", "pre", "adamw"): [2.1, 2.2, 2.3],
        ("rmsnorm", "post", "muon"): [2.2, 2.3, 2.5],
        ("rmsnorm", "post", "adamw"): [2.5, 2.5, 2.8],
        ("dyt", "pre", "muon"): [2.3, 2.3, 2.3],
        ("dyt", "pre", "adamw"): [2.3, 2.4, 2.5],
        ("dyt", "post", "muon"): [2.5, 2.5],
    }
    names = ("norm", "placement", "optimizer")
    bpb = {Arm(tuple(zip(names, key, strict=True))): dict(enumerate(found)) for key, found in values.items()}
    found = interactions(bpb, seeds=3)  # none within a factor
    assert list(found) == ["post × optimizer=adamw", "dyt × optimizer=adamw", "dyt × post"]
    for (name, finding), expected, factor in zip(
        found.items(), ([0.2, 0.1, 0.2], [-0.1, 0, 0.1]), (3, 2), strict=False
    ):
        test = scipy.stats.ttest_1samp(expected, 0)
        assert finding.estimate and finding.estimate.mean == pytest.approx(sum(expected) / 3), name
        assert finding.estimate.high == pytest.approx(test.confidence_interval(0.95).high)
        assert finding.p == pytest.approx(min(1, factor * test.pvalue))
    incomplete = found["dyt × post"]
    assert incomplete.estimate and incomplete.estimate.mean == pytest.approx(0.0) and incomplete.p is None


# --- learning rates --------------------------------------------------------------------------------------------------


def sweep(norm: str = "rmsnorm", **by_rate: list[float | None]) -> list[Outcome]:
    """Runs by learning rate: `r3` is 0.003."""
    rates = {int(name[1:]) / 1000: values for name, values in by_rate.items()}
    return [outcome(norm, seed, bpb, lr) for lr in rates for seed, bpb in enumerate(rates[lr])]


@pytest.mark.parametrize(
    "runs, best",
    [
        pytest.param(sweep(r1=[3.0, 3.0], r3=[2.0, 2.2], r10=[1.9, 2.4]), 0.003, id="lowest mean"),
        pytest.param(sweep(r1=[3.0, 3.0], r3=[2.0, None], r10=[None, None]), 0.001, id="fewest diverged first"),
        pytest.param(sweep(r3=[None, None], r1=[None, None]), 0.001, id="all diverged"),
    ],
)
def test_the_best_learning_rate(runs, best):
    assert best_lr(runs) == best


def test_the_whole_table_of_learning_rates():
    """The second arm has tried one more, of which a run is missing. For two values t is 12.7062."""
    runs = sweep(r1=[1.0, 1.5], r3=[2.0, 2.5], r10=[None, 1.0])
    runs += sweep("dyt", r1=[3.0, 3.5], r3=[2.0, 2.25], r10=[None, None], r30=[4.0, 4.0])
    found = {Cell(run.arm, run.lr, run.seed): run for run in runs}
    ended = {cell: run for cell, run in found.items() if (cell.lr, cell.seed) != (0.03, 1)}
    assert table(sweep_section(list(found), ended, {RMSNORM: 0.001, arm_of("dyt"): 0.003})) == [
        "| arm | 0.001 | 0.003 | 0.01 | 0.03 |",
        "| rmsnorm pre | **1.2500 ± 3.1766 (2)** | 2.2500 ± 3.1766 (2) | 1.0000 (1 of 2)† | – |",
        "| dyt pre | 3.2500 ± 3.1766 (2) | **2.1250 ± 1.5883 (2)** | – | 4.0000 (1 of 2)† |",
    ]
