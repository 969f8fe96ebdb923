"""What an ablation says about its runs: outcomes, differences, learning rates, tables."""

import math

import numpy as np
import pytest
import scipy.stats

from experiments.ablation.grid import Cell, losses_of
from experiments.ablation.outcome import Arm, BySeed, Outcome, final_bpb, read_outcome
from experiments.ablation.plots import plot_differences
from experiments.ablation.rates import Optimum
from experiments.ablation.report import Finding, columns_of, compare, comparison_section, missing, sweep_section
from experiments.statistics import estimate


def arm_of(norm: str, **factors: str) -> Arm:
    return Arm.of(norm=norm, placement="pre", **factors)


RMSNORM, LAYERNORM, DYT, NONE, BATCHNORM = map(arm_of, ("rmsnorm", "layernorm", "dyt", "none", "batchnorm"))


def outcome(norm: str, seed: int, val_bpb: float | None, lr: float = 0.01, diverged: bool = False) -> Outcome:
    """A run of 20 steps. With `val_bpb` None, its loss was not finite at step 7."""
    if val_bpb is None:
        return Outcome(arm_of(norm), lr, seed, True, 7, None, None, None, None, None, [])
    return Outcome(arm_of(norm), lr, seed, diverged, 20, val_bpb, val_bpb, val_bpb, 1000.0 + seed, 59.0 + seed, [])


def runs_of(**bpb: list[float | None]) -> dict[Cell, Outcome]:
    runs = [outcome(norm, seed, value) for norm, values in bpb.items() for seed, value in enumerate(values)]
    return {Cell(run.arm, run.lr, run.seed): run for run in runs}


def table(blocks: list[str]) -> list[str]:
    """The lines of the first table of a section, without the one below the titles."""
    titles, _, *rows = next(block for block in blocks if block.startswith("|")).splitlines()
    return [titles, *rows]


# --- outcomes --------------------------------------------------------------------------------------------------------

TRAINING = {"step": 10, "train_loss": 5.0, "seconds": 1.0, "tokens_per_second": 300.0}
MIDDLE = {"step": 15, "train_loss": 4.5, "seconds": 2.0, "tokens_per_second": 280.0}
LATER = {"step": 20, "train_loss": 4.0, "seconds": 2.5, "tokens_per_second": 100.0}
EARLY = {"step": 10, "val_loss": 3.5, "val_bpb": 2.2}
LAST = {"step": 20, "val_loss": 4.0, "val_bpb": 2.5}
NOT_FINITE = {"step": 20, "not_finite": True}


@pytest.mark.parametrize(
    "log, expected",
    [
        pytest.param([TRAINING, EARLY, MIDDLE, LATER, LAST], (False, 20, 4.0, 2.5, 3.5, 280.0, 2.5), id="done"),
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
    found = read_outcome(RMSNORM, 0.01, 3, log, steps=20, vocab_size=257)
    assert found.ended == (expected is not None)
    if expected:
        assert found == Outcome(RMSNORM, 0.01, 3, *[*expected, log])


# --- differences -----------------------------------------------------------------------------------------------------


def test_differences_are_paired_by_seed_where_neither_diverged():
    baseline = [outcome("rmsnorm", 0, 1.0), outcome("rmsnorm", 1, None), outcome("rmsnorm", 2, 3.0)]
    arm = [outcome("dyt", 2, 3.5), outcome("dyt", 1, 1.0), outcome("dyt", 0, 9.0, diverged=True)]
    planned = dict.fromkeys((RMSNORM, DYT), range(3))
    (found,) = compare({RMSNORM: final_bpb(baseline), DYT: final_bpb(arm)}, planned)[0].values()
    assert found.values == [0.5] and not found.complete


BPB: dict[Arm, BySeed] = {
    RMSNORM: {0: 2.0, 1: 3.0, 2: 4.0},
    LAYERNORM: {0: 1.5, 1: 2.6, 2: 3.4},
    NONE: {0: 2.5, 1: 2.5},
    DYT: {0: 2.3, 1: 3.1, 2: 4.1},
}
PLANNED = dict.fromkeys(BPB, range(3))
T_TWO = 4.302652729911275  # the 97.5% quantile of Student's t with 2 degrees of freedom, from tables
BELOW, ABOVE = [-0.5, -0.4, -0.6], [0.3, 0.1, 0.1]  # layernorm and dyt minus rmsnorm


def p_of(values: list[float], center: float) -> float:
    return scipy.stats.ttest_1samp(values, center).pvalue


def test_p_values_are_those_of_scipy_beyond_the_regrets_corrected_by_hand():
    """Two of three tests have a p-value: sorted, they are multiplied by 3 and 2. BatchNorm has no seed in common."""
    bpb, planned = BPB | {BATCHNORM: {9: 2.0}}, PLANNED | {BATCHNORM: [9]}
    layernorm, none, dyt, _ = compare(bpb, planned, regrets={RMSNORM: 0.1, LAYERNORM: 0.2})[0].values()
    assert layernorm.estimate and layernorm.estimate.mean == pytest.approx(-0.5) and layernorm.complete
    assert layernorm.estimate.high == pytest.approx(-0.5 + T_TWO * 0.1 / 3**0.5 + 0.3)
    assert layernorm.p == pytest.approx(3 * p_of(BELOW, -0.3))
    assert dyt.p == pytest.approx(2 * p_of(ABOVE, 0.1))
    assert none.estimate and none.estimate.n == 2 and not none.complete
    assert none.p is None
    untuned = compare(BPB, PLANNED, regrets={DYT: None})[0][DYT, RMSNORM]
    assert untuned.estimate and untuned.complete and untuned.p is None


def test_the_whole_table_and_its_plot():
    """By hand: the variance of 2, 3, 4 is 1; of 1.5, 2.6, 3.4 it is 0.91; of -0.5, -0.4, -0.6 it is 0.01.

    The two values of batchnorm differ by 2, and the two differences are equal. The regrets add 0.1 to 4.3027 · 0.1/√3,
    and (7.6489 + 1.0607) · 0.1/√3 is detectable at 0.05/3. t of what is beyond is 4√3, p 0.0202, times three tests.
    """
    runs = runs_of(rmsnorm=[2.0, 3.0, 4.0], layernorm=[1.5, 2.6, 3.4], batchnorm=[1.9, None, 3.9], none=[None] * 3)
    optima = dict.fromkeys((RMSNORM, LAYERNORM, BATCHNORM, NONE), Optimum(0.01, 0.05))
    found = comparison_section(list(runs), runs, optima)
    assert table(found.text) == [
        "| norm | placement | lr | val_bpb (n) | paired difference from rmsnorm pre (n) | detectable | p | diverged | "
        "verdict |",
        "| rmsnorm | pre | 0.01 | 3.0000 ± 2.4841 (3) | – | – | – | 0 of 3 | – |",
        "| layernorm | pre | 0.01 | 2.5000 ± 2.3697 (3) | -0.5000 ± 0.3484 (3) | 0.6028 | 0.061 | 0 of 3 | undecided |",
        "| batchnorm | pre | 0.01 | 2.9000 ± 12.7062 (2 of 3)† | -0.1000 ± 0.1000 (2 of 3)† | – | – | 1 of 3 | "
        "undecided |",
        "| none | pre | 0.01 | – | – | – | – | 3 of 3 | undecided |",
    ]
    (axes,) = plot_differences({arm.name: finding for arm, finding in found.found.items()}, "").axes
    drawn = axes.collections[0].get_paths()[0].vertices
    assert np.asarray(drawn)[:, 0] == pytest.approx([-0.8484, -0.1516], abs=1e-4)


def test_the_conclusion_says_what_is_shown_of_every_arm():
    """Differences of -0.01, 0, 0.01 around their mean have an interval of 4.3027 · 0.01 / √3 = 0.0248."""
    means = {"layernorm": -1.0, "none": 1.0, "dyt": 0.001, "batchnorm": 0.0}
    bpb: dict[str, list[float | None]] = {norm: [1.99 + d, 3 + d, 4.01 + d] for norm, d in means.items()}
    runs = runs_of(rmsnorm=[2.0, 3.0, 4.0], **bpb, derf=[2.0, 3.4, 4.8], crmsnorm=[2.0, None, 3.0])
    optima = {BATCHNORM: Optimum(0.01, 0.0, loss=2.8), arm_of("crmsnorm"): Optimum(0.01, None)}  # its seeds end at 3
    assert comparison_section(list(runs), runs, optima).text[0] == (
        "Compared with rmsnorm pre: layernorm pre is better; none pre is worse; dyt pre and derf pre are undecided; "
        "batchnorm pre is undecided, as the best learning rate was not found, here or in the baseline; crmsnorm pre is "
        "undecided, as runs diverged or have not ended, here or in the baseline. In bits per byte (val_bpb), n = 2 or "
        "3, all at learning rate 0.01."
    )
    few = {cell: run for cell, run in runs.items() if cell.arm in (RMSNORM, LAYERNORM, DYT)}
    text = comparison_section(list(few), few).text[0]
    assert text.startswith(
        "Compared with rmsnorm pre: layernorm pre (-1.0000 ± 0.0248, p = 6.7e-05) is better; dyt pre ("
    )
    for norm in ("none", "norm0", "norm1", "norm2", "norm3"):
        bpb[norm] = [2.0, 3.4, 4.8]
    many = runs_of(rmsnorm=[2.0, 3.0, 4.0], **bpb)
    text = comparison_section(list(many), many).text[0]
    assert text.startswith("Compared with rmsnorm pre: layernorm pre is better; 7 of 8 arms are undecided. In bits")
    printed = [columns_of(Finding(None, 2, p=p))[2] for p in (0.0, 0.012, 0.0499, 0.0501)]
    assert printed == ["< 0.0001", "0.012", "0.0499", "0.05"]


def test_a_run_that_has_not_ended_is_missing_and_leaves_no_p():
    runs = runs_of(rmsnorm=[2.0, 3.0, 4.0], layernorm=[1.5, 2.6, 3.4])
    ended = dict(list(runs.items())[1:])
    assert "| -0.5000 ± 1.2706 (2 of 3)† | – | – |" in table(comparison_section(list(runs), ended).text)[2]
    assert missing(runs, ended) == "**Partial: 5 of 6 runs have ended.**" and missing(runs, runs) == ""


@pytest.mark.parametrize(
    "values, p, verdict",
    [
        pytest.param([0.001, 0.002, 0.003], 0.07, "as good up to 0.01", id="inside"),
        pytest.param([0.0049, 0.005, 0.0051], 0.0001, "as good up to 0.01", id="inside, although above 0"),
        pytest.param([0.001, 0.002, 0.007], 0.07, "undecided", id="partly outside"),  # 0.0033 ± 0.0080
        pytest.param([0.10, 0.11, 0.12], 0.0499, "worse", id="above"),
        pytest.param([-0.10, -0.11, -0.12], 0.0499, "better", id="below"),
        pytest.param([0.10, 0.11, 0.12], 0.05, "undecided", id="not after the correction"),
        pytest.param([0.0201, 0.0221], 0.029, "undecided", id="two seeds"),
        pytest.param([0.0, 0.0], 1.0, "as good up to 0.01", id="two seeds, the same"),
        pytest.param([0.0], None, "undecided", id="a single seed"),
    ],
)
def test_one_rule_for_all_verdicts(values, p, verdict):
    """An interval of three values is ± 4.3027 · s / √3."""
    assert Finding(estimate(values), len(values), p=p).verdict[0] == verdict


def test_two_factors_are_compared_one_at_a_time_too_and_all_count_for_holm():
    """Three arms with the first, and the last with the two that differ from it in one factor: five tests."""
    arms = [
        Arm.of(norm="dyt", placement=place, optimizer=name) for place in ("pre", "post") for name in ("muon", "adamw")
    ]
    losses = ([2.0, 3.0, 4.0], [2.1, 3.0, 4.2], [2.3, 3.4, 4.2], [2.5, 3.3, 4.6])
    runs = {}
    for arm, values in zip(arms, losses, strict=True):
        for seed, bpb in enumerate(values):
            runs[Cell(arm, 0.01, seed)] = Outcome(arm, 0.01, seed, False, 20, bpb, bpb, bpb, None, None, [])
    found = comparison_section(list(runs), runs)
    p_values = {pair: scipy.stats.ttest_rel(*(losses[arms.index(arm)] for arm in pair)).pvalue for pair in found.pairs}
    ranks = sorted(p_values, key=lambda pair: p_values[pair])
    assert len(ranks) == 5 and found.pairs[ranks[0]].p == pytest.approx(5 * p_values[ranks[0]])
    assert [line.split(" | ")[:2] for line in found.text[-1].splitlines()[2:]] == [
        ["| optimizer=adamw − optimizer=muon", "dyt pre"],
        ["| post − pre", "dyt optimizer=muon"],
        ["| post − pre", "dyt optimizer=adamw"],
        ["| optimizer=adamw − optimizer=muon", "dyt post"],
    ]
    assert found.pairs[arms[3], arms[1]].values == pytest.approx([0.4, 0.3, 0.4])


# --- learning rates --------------------------------------------------------------------------------------------------


def sweep(norm: str = "rmsnorm", **by_rate: list[float | None]) -> list[Outcome]:
    """Runs by learning rate: `r3` is 0.003."""
    rates = {int(name[1:]) / 1000: values for name, values in by_rate.items()}
    return [outcome(norm, seed, bpb, lr) for lr in rates for seed, bpb in enumerate(rates[lr])]


def test_a_diverged_run_has_an_infinite_loss_in_the_search():
    runs = sweep("dyt", r3=[2.0, 2.5], r10=[None, 2.0]) + sweep(r10=[1.0])
    assert losses_of(DYT, runs) == {0.003: [2.0, 2.5], 0.01: [math.inf, 2.0]}


def test_the_whole_table_of_learning_rates():
    """The second arm has tried one more, of which a run is missing. For two values t is 12.7062."""
    runs = sweep(r1=[1.0, 1.5], r3=[2.0, 2.5], r10=[None, 1.0])
    runs += sweep("dyt", r1=[3.0, 3.5], r3=[2.0, 2.25], r10=[None, None], r30=[4.0, 4.0])
    found = {Cell(run.arm, run.lr, run.seed): run for run in runs}
    ended = {cell: run for cell, run in found.items() if (cell.lr, cell.seed) != (0.03, 1)}
    optima = {RMSNORM: Optimum(0.00123, 0.00456), DYT: Optimum(0.003, None)}
    rows = [
        "| arm | 0.001 | 0.003 | 0.01 | 0.03 | reported at | regret |",
        "| rmsnorm pre | 1.2500 ± 3.1766 (2) | 2.2500 ± 3.1766 (2) | 1.0000 (1 of 2)† | – | 0.00123 | 0.0046 |",
        "| dyt pre | 3.2500 ± 3.1766 (2) | 2.1250 ± 1.5883 (2) | diverged | 4.0000 (1 of 2)† | 0.003 | "
        "optimum not found |",
    ]
    assert table(sweep_section(list(found), ended, optima)) == rows
    assert table(sweep_section(list(found), ended, {}))[1] == rows[1].replace("0.00123 | 0.0046", "– | –")
