"""The report of an ablation: means, differences, interactions, costs, tables."""

import csv
import io
import math
from dataclasses import replace

import pytest
import scipy.stats

from config import ModelConfig, TrainConfig
from experiments.ablation.comparison import compare, interactions
from experiments.ablation.costs import at_equal, costs
from experiments.ablation.formats import Table, to_csv, to_latex, to_markdown
from experiments.ablation.grid import Cell, Settings
from experiments.ablation.outcome import Arm, Outcome, best_lr, paired_differences, read_outcome
from experiments.ablation.tables import (
    aggregates,
    arms_table,
    at_edge,
    costs_table,
    interactions_table,
    lr_table,
    missing,
)

RMSNORM = Arm.of(norm="rmsnorm", placement="pre")


def outcome(
    norm: str = "rmsnorm", seed: int = 0, val_bpb: float | None = 2.0, *, lr: float = 0.01, diverged: bool = False
) -> Outcome:
    """A run of 20 steps. With `val_bpb` None, its loss was not finite at step 7."""
    arm = Arm.of(norm=norm, placement="pre")
    if val_bpb is None:
        return Outcome(arm, lr, seed, True, 7, None, None, None, None, None, [{"step": 7, "not_finite": True}])
    log = [
        {"step": 10, "train_loss": 3.0 + seed, "seconds": 1.5, "tokens_per_second": 1000.0},
        {"step": 20, "val_loss": val_bpb, "val_bpb": val_bpb},
    ]
    return Outcome(arm, lr, seed, diverged, 20, val_bpb, val_bpb, val_bpb, 1000.0 + seed, 1.5, log)


# --- outcomes --------------------------------------------------------------------------------------------------------

TRAINING = {"step": 10, "train_loss": 5.0, "seconds": 1.0, "tokens_per_second": 300.0}
LATER = {"step": 20, "train_loss": 4.0, "seconds": 2.5, "tokens_per_second": 100.0}
EARLY_EVALUATION = {"step": 10, "val_loss": 3.5, "val_bpb": 2.2}
EVALUATION = {"step": 20, "val_loss": 4.0, "val_bpb": 2.5}
NOT_FINITE = {"step": 20, "not_finite": True}


@pytest.mark.parametrize(
    "log, expected",
    [
        pytest.param(
            [TRAINING, EARLY_EVALUATION, LATER, EVALUATION], (False, 20, 4.0, 2.5, 3.5, 200.0, 2.5), id="done"
        ),
        pytest.param(
            [TRAINING, EARLY_EVALUATION, LATER, EVALUATION | {"val_loss": 5.6}],
            (True, 20, 5.6, 2.5, 3.5, 200.0, 2.5),
            id="above",
        ),
        pytest.param([TRAINING, NOT_FINITE], (True, 20, None, None, None, 300.0, 1.0), id="not finite"),
        pytest.param([NOT_FINITE | {"step": 3}], (True, 3, None, None, None, None, None), id="at once"),
        pytest.param([TRAINING, LATER, EVALUATION, NOT_FINITE], (True, 20, None, None, 4.0, 200.0, 2.5), id="unsaved"),
    ],
)
def test_a_complete_log_is_an_outcome(log, expected):
    found = read_outcome(RMSNORM, 0.01, 3, log, steps=20, uniform_loss=math.log(257))
    assert found == Outcome(RMSNORM, 0.01, 3, *[*expected, log])


@pytest.mark.parametrize("log", [[], [TRAINING], [TRAINING, LATER], [TRAINING, EVALUATION | {"step": 10}]])
def test_an_incomplete_log_is_none(log):
    assert read_outcome(RMSNORM, 0.01, 3, log, steps=20, uniform_loss=math.log(257)) is None


# --- paired differences ----------------------------------------------------------------------------------------------


def test_differences_are_paired_by_seed_where_neither_diverged():
    baseline = [outcome(seed=0, val_bpb=1.0), outcome(seed=1, val_bpb=None), outcome(seed=2, val_bpb=3.0)]
    arm = [outcome(seed=2, val_bpb=3.5), outcome(seed=1, val_bpb=1.0), outcome(seed=0, val_bpb=9.0, diverged=True)]
    assert paired_differences(arm, baseline) == [0.5]


# --- means and differences -------------------------------------------------------------------------------------------

RUNS = [
    *(outcome("rmsnorm", seed, bpb) for seed, bpb in enumerate((2.0, 3.0, 4.0))),
    *(outcome("layernorm", seed, bpb) for seed, bpb in enumerate((1.5, 2.6, 3.4))),
    *(outcome("batchnorm", seed, bpb) for seed, bpb in enumerate((1.9, None, 3.9))),
    *(outcome("none", seed, None) for seed in range(3)),
]


def by_cell(runs: list[Outcome]) -> dict[Cell, Outcome]:
    return {Cell(run.arm, run.lr, run.seed): run for run in runs}


def test_p_values_are_those_of_scipy_corrected_by_hand():
    """Two of three comparisons have a p-value. The smallest is multiplied by 3, and the other by 2."""
    runs = [run for run in RUNS if run.arm["norm"] != "batchnorm"]
    runs += [outcome("dyt", seed, bpb) for seed, bpb in enumerate((2.3, 3.1, 4.1))]
    _, layernorm, none, dyt = (result.difference for result in compare(by_cell(runs), by_cell(runs), margin=0.9))
    assert layernorm and none and dyt
    one, other = ([-0.5, -0.4, -0.6], [0.3, 0.1, 0.1])
    assert layernorm.p == pytest.approx(3 * scipy.stats.ttest_1samp(one, 0).pvalue)
    assert dyt.p == pytest.approx(2 * scipy.stats.ttest_1samp(other, 0).pvalue)
    assert none.p is None and none.n == 0
    one_sided = [
        max(
            scipy.stats.ttest_1samp(values, 0.9, alternative="less").pvalue,
            scipy.stats.ttest_1samp(values, -0.9, alternative="greater").pvalue,
        )
        for values in (one, other)
    ]
    assert one_sided[1] < one_sided[0]
    assert dyt.equivalence_p == pytest.approx(3 * one_sided[1])
    assert layernorm.equivalence_p == pytest.approx(2 * one_sided[0])


@pytest.mark.parametrize("diverged", ["rmsnorm", "layernorm"])
def test_a_difference_without_all_seeds_has_no_p_value(diverged):
    """Whichever of the two arms diverged."""
    cells = by_cell(RUNS[:6])
    outcomes = {
        cell: outcome(diverged, 1, None) if (cell.arm["norm"], cell.seed) == (diverged, 1) else run
        for cell, run in cells.items()
    }
    baseline, arm = compare(cells, outcomes, margin=1.0)
    assert [(result.ended, result.diverged) for result in (baseline, arm)] == [
        (3, int(diverged == "rmsnorm")),
        (3, int(diverged == "layernorm")),
    ]
    assert arm.difference and arm.difference.estimate
    assert arm.difference.estimate.mean == pytest.approx(-0.55) and (arm.difference.n, arm.difference.planned) == (2, 3)
    assert arm.difference.p is None and arm.difference.equivalence_p is None


def test_a_run_that_has_not_ended_is_missing_too():
    cells = by_cell(RUNS[:6])
    outcomes = dict(list(cells.items())[1:])
    baseline, arm = compare(cells, outcomes)
    assert (baseline.bpb.n, baseline.bpb.planned, baseline.ended, baseline.diverged) == (2, 3, 2, 0)
    assert arm.difference and (arm.difference.n, arm.difference.p) == (2, None)


def test_the_whole_table():
    """By hand: the variance of 2, 3, 4 is 1; of 1.5, 2.6, 3.4 it is 0.91; of -0.5, -0.4, -0.6 it is 0.01.

    The two values of batchnorm differ by 2, and the two differences are equal. t of the three differences is 5√3, which
    with two degrees of freedom has p = 0.0131, and three times that is 0.0392.
    """
    table = arms_table("", compare(by_cell(RUNS), by_cell(RUNS), margin=0.1), {RMSNORM}, margin=0.1)
    assert to_markdown(table).splitlines() == [
        "| norm | placement | lr | val_bpb (n) | paired difference from rmsnorm pre (n) | p | p of ±0.1 | diverged |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| rmsnorm | pre | 0.01 (edge) | 3.0000 ± 2.4841 (3) | – | – | – | 0 of 3 |",
        "| layernorm | pre | 0.01 | 2.5000 ± 2.3697 (3) | -0.5000 ± 0.2484 (3) | 0.0392 | 1.0000 | 0 of 3 |",
        "| batchnorm | pre | 0.01 | 2.9000 ± 12.7062 (2 of 3)† | -0.1000 ± 0.0000 (2 of 3)† | – | – | 1 of 3 |",
        "| none | pre | 0.01 | – | – | – | – | 3 of 3 |",
    ]


def test_nothing_is_compared_with_a_baseline_that_diverged():
    runs = by_cell([outcome("none", 0, None), outcome("rmsnorm", 0, 2.0)])
    assert to_markdown(arms_table("", compare(runs, runs))).splitlines()[2:] == [
        "| none | pre | 0.01 | – | – | – | 1 of 1 |",
        "| rmsnorm | pre | 0.01 | 2.0000 (1) | – | – | 0 of 1 |",
    ]


def test_the_csv_has_all_digits_and_the_same_numbers():
    cells = by_cell(RUNS)
    rows = aggregates("shared", compare(cells, cells), costs(cells, cells, settings(*NORMS)), None, {RMSNORM})
    layernorm = list(csv.DictReader(io.StringIO(to_csv(rows))))[1]
    assert (layernorm["norm"], layernorm["lr_at_edge"], layernorm["difference_n"]) == ("layernorm", "False", "3")
    test = scipy.stats.ttest_1samp([-0.5, -0.4, -0.6], 0)
    interval = test.confidence_interval(0.95)
    assert float(layernorm["difference"]) == pytest.approx(-0.5)
    assert float(layernorm["difference_half_width"]) == pytest.approx((interval.high - interval.low) / 2)
    assert float(layernorm["p"]) == pytest.approx(3 * test.pvalue)


def test_the_csv_counts_runs_and_has_quality_at_equal_cost():
    ended = dict(list(TIMED.items())[:-1])
    found = costs(TIMED, ended, settings("rmsnorm", "layernorm", "batchnorm"))
    rows = aggregates("shared", compare(TIMED, ended), found, at_equal("seconds", TIMED, ended), {RMSNORM})
    columns = ("seeds", "ended", "diverged", "lr_at_edge", "val_bpb_at_equal_seconds", "seconds", "tokens")
    assert [[row[name] for name in columns] for row in rows] == [
        [2, 2, 0, True, 3.25, 3.0, 2000],
        [2, 2, 0, False, pytest.approx(2.875), 4.0, 2000],
        [2, 1, 0, False, None, 19.0, 2000],
    ]


# --- interactions ----------------------------------------------------------------------------------------------------


def grid_of(values: dict[tuple[str, str, str], list[float | None]]) -> dict[Cell, Outcome]:
    """Runs by norm, placement and optimizer."""
    runs = []
    for (norm, placement, optimizer), by_seed in values.items():
        arm = Arm.of(norm=norm, placement=placement, optimizer=optimizer)
        runs += [replace(outcome(seed=seed, val_bpb=bpb), arm=arm) for seed, bpb in enumerate(by_seed)]
    return by_cell(runs)


def test_interactions_are_differences_of_differences_with_corrected_p_values():
    """By hand: (2.5 - 2.1) - (2.2 - 2.0) = 0.2 for the first seed of the first pair, and so on."""
    runs = grid_of(
        {
            ("rmsnorm", "pre", "muon"): [2.0, 2.1, 2.2],
            ("rmsnorm", "pre", "adamw"): [2.1, 2.2, 2.3],
            ("rmsnorm", "post", "muon"): [2.2, 2.3, 2.5],
            ("rmsnorm", "post", "adamw"): [2.5, 2.5, 2.8],
            ("dyt", "pre", "muon"): [2.3, 2.3, 2.3],
            ("dyt", "pre", "adamw"): [2.3, 2.4, 2.5],
            ("dyt", "post", "muon"): [2.5, 2.5, None],
        }
    )
    found = {item.changes: item.difference for item in interactions(runs, runs)}
    assert list(found) == [("dyt", "post"), ("dyt", "optimizer=adamw"), ("post", "optimizer=adamw")]
    expected = [0.2, 0.1, 0.2], [-0.1, 0.0, 0.1]
    for name, values, factor in (
        (("post", "optimizer=adamw"), expected[0], 3),
        (("dyt", "optimizer=adamw"), expected[1], 2),
    ):
        finding, test = found[name], scipy.stats.ttest_1samp(values, 0)
        assert finding.estimate and finding.estimate.mean == pytest.approx(sum(values) / 3)
        assert finding.estimate.high == pytest.approx(test.confidence_interval(0.95).high)
        assert finding.p == pytest.approx(min(1, factor * test.pvalue))
    incomplete = found["dyt", "post"]
    assert incomplete.estimate and incomplete.estimate.mean == pytest.approx(0.0) and incomplete.p is None
    assert to_markdown(interactions_table("", interactions(runs, runs))).splitlines()[2:] == [
        "| dyt × post | +0.0000 ± 0.0000 (2 of 3)† | – |",
        "| dyt × optimizer=adamw | +0.0000 ± 0.2484 (3) | 1.0000 |",
        "| post × optimizer=adamw | +0.1667 ± 0.1434 (3) | 0.1132 |",
    ]


def test_there_are_no_interactions_within_a_factor():
    assert interactions(by_cell(RUNS), by_cell(RUNS)) == []


# --- costs -----------------------------------------------------------------------------------------------------------

NORMS = ("rmsnorm", "layernorm", "batchnorm", "none")


def settings(*norms: str) -> Settings:
    sizes = ModelConfig(dim=16, layers=2, heads=2, context=16, vocab_size=257, hidden_dim=32)
    return {Arm.of(norm=norm, placement="pre"): (replace(sizes, norm=norm), TrainConfig()) for norm in norms}


def timed(norm: str, seed: int, seconds: list[float], bpb: list[float]) -> Outcome:
    """A run with an evaluation every 10 steps, which are 100 tokens each."""
    log = []
    for number, (taken, value) in enumerate(zip(seconds, bpb, strict=True), 1):
        log.append({"step": 10 * number, "train_loss": 3.0, "tokens": 1000 * number, "seconds": taken})
        log.append({"step": 10 * number, "val_loss": value, "val_bpb": value})
    return replace(outcome(norm, seed, bpb[-1]), log=log, seconds=seconds[-1], tokens_per_second=50.0)


TIMED = by_cell(
    [
        timed("rmsnorm", 0, [1.0, 2.0], [4.0, 3.0]),
        timed("rmsnorm", 1, [3.0, 4.0], [5.0, 3.5]),
        timed("layernorm", 0, [2.0, 4.0], [4.0, 2.0]),
        timed("layernorm", 1, [2.0, 4.0], [3.0, 2.5]),
        timed("batchnorm", 0, [9.0, 19.0], [3.0, 1.0]),
        outcome("batchnorm", 1, None),
    ]
)


def test_costs_count_the_model_and_average_the_runs():
    """By hand: embedding 257·16, per block 4·16² in attention and 3·16·32 in the MLP, and five norms."""
    matrices = 257 * 16 + 2 * (4 * 16**2 + 3 * 16 * 32)
    rmsnorm, layernorm, batchnorm = costs(TIMED, TIMED, settings("rmsnorm", "layernorm", "batchnorm"))
    assert (rmsnorm.parameters, layernorm.parameters) == (matrices + 5 * 16, matrices + 10 * 16)
    assert rmsnorm.flops_per_token == 6 * matrices + 6 * 2 * 16 * 16
    assert (rmsnorm.tokens, rmsnorm.seconds, rmsnorm.tokens_per_second) == (2000, 3.0, 50.0)
    assert (batchnorm.seconds, batchnorm.tokens) == (19.0, 2000)  # of the run that did not diverge


def test_quality_at_equal_seconds():
    """RMSNorm takes 3 s. LayerNorm is then halfway between its evaluations, and BatchNorm before its first."""
    equal = at_equal("seconds", TIMED, TIMED)
    assert equal and equal.budget == 3.0
    means = {arm["norm"]: (finding.estimate.mean, finding.n) for arm, finding in equal.bpb.items() if finding.estimate}
    assert means == {"rmsnorm": (3.25, 2), "layernorm": (pytest.approx((3.0 + 2.75) / 2), 2)}
    tokens = at_equal("tokens", TIMED, TIMED)
    assert tokens and tokens.budget == 2000 and len(tokens.bpb) == 3
    found = costs(TIMED, TIMED, settings("rmsnorm", "layernorm", "batchnorm"))
    assert to_markdown(costs_table("", found, tokens, equal)).splitlines() == [
        "| arm | parameters | FLOPs/token | tokens | tokens/s | seconds | val_bpb at 3 seconds (n) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| rmsnorm pre | 9,312 | 5.85e+04 | 2,000 | 50 | 3 | 3.2500 ± 3.1766 (2) |",
        "| layernorm pre | 9,392 | 5.85e+04 | 2,000 | 50 | 4 | 2.8750 ± 1.5883 (2) |",
        "| batchnorm pre | 9,392 | 5.85e+04 | 2,000 | 50 | 19 | – |",
    ]


def test_quality_at_equal_tokens_where_they_differ():
    longer = timed("layernorm", 0, [1.0, 2.0, 3.0], [4.0, 3.0, 2.0])
    runs = by_cell([timed("rmsnorm", 0, [1.0, 2.0], [4.0, 3.5]), longer])
    tokens = at_equal("tokens", runs, runs)
    table = costs_table("", costs(runs, runs, settings("rmsnorm", "layernorm")), tokens, None)
    assert table.titles[-1] == "val_bpb at 2,000 tokens (n)"
    assert [row[-1] for row in table.rows] == ["3.5000 (1)", "3.0000 (1)"]


def test_nothing_costs_anything_before_a_run_has_ended():
    assert at_equal("seconds", TIMED, {}) is None
    assert [cost.seconds for cost in costs(TIMED, {}, settings("rmsnorm", "layernorm", "batchnorm"))] == [None] * 3


# --- text ------------------------------------------------------------------------------------------------------------


def test_latex_escapes_what_it_must():
    table = Table("50% & more", ["a_b", "p"], [["x: {eps=1e-5}", "-0.5 ± 0.1 (3)"], ["**2.0**", "< 0.0001"]])
    assert to_latex(table).splitlines() == [
        r"\begin{table}",
        r"\caption{50\% \& more}",
        r"\begin{tabular}{ll}",
        r"\toprule",
        r"a\_b & p \\",
        r"\midrule",
        r"x: \{eps=1e-5\} & $-$0.5 $\pm$ 0.1 (3) \\",
        r"\textbf{2.0} & $<$ 0.0001 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


def test_what_is_missing_is_named():
    cells = by_cell(RUNS[:6])
    partial = "**Partial: {} of 6 runs have ended.** Missing: {}."
    ended = {cell: run for cell, run in cells.items() if cell.seed == 0}
    assert missing(list(cells), ended) == partial.format(2, "seeds 1, 2 of all arms")
    ended |= {cell: run for cell, run in cells.items() if cell.seed == 1 and cell.arm == RMSNORM}
    assert missing(list(cells), ended) == partial.format(3, "seed 2 of rmsnorm pre; seeds 1, 2 of layernorm pre")
    assert missing(list(cells), cells) == ""


def test_one_row_of_csv_per_run():
    runs = [outcome("layernorm:bias=false,eps=1e-5", 0, 2.0), outcome("none", 1, None)]
    rows = list(csv.DictReader(io.StringIO(to_csv([run.row for run in runs]))))
    assert rows == [{name: "" if value is None else str(value) for name, value in run.row.items()} for run in runs]
    assert "log" not in rows[0]


# --- learning rates --------------------------------------------------------------------------------------------------


def sweep(**by_rate: list[float | None]) -> list[Outcome]:
    """Runs by learning rate: `r3` is 0.003."""
    rates = {int(name[1:]) / 1000: values for name, values in by_rate.items()}
    return [outcome(seed=seed, val_bpb=bpb, lr=lr) for lr in rates for seed, bpb in enumerate(rates[lr])]


@pytest.mark.parametrize(
    "runs, best",
    [
        pytest.param(sweep(r1=[3.0, 3.0], r3=[2.0, 2.2], r10=[1.9, 2.4]), 0.003, id="lowest mean"),
        pytest.param(sweep(r1=[3.0, 3.0], r3=[2.0, None], r10=[None, None]), 0.001, id="fewest diverged first"),
        pytest.param(sweep(r3=[None, None], r1=[None, None]), 0.001, id="all diverged"),
        pytest.param(sweep(r3=[2.0], r1=[2.0]), 0.001, id="a tie"),
    ],
)
def test_the_best_learning_rate(runs, best):
    assert best_lr(runs) == best


def test_the_whole_table_of_learning_rates():
    """The best of the first arm ends its sweep. The second arm has tried one more."""
    runs = by_cell(sweep(r10=[None, 1.0], r1=[1.0, 1.5], r3=[2.0, 2.5]))
    other = Arm.of(norm="dyt", placement="pre")
    values: dict[float, list[float | None]] = {
        0.001: [3.0, 3.5],
        0.003: [2.0, 2.25],
        0.01: [None, None],
        0.03: [4.0, 4.0],
    }
    runs |= by_cell([outcome("dyt", seed, bpb, lr=lr) for lr in values for seed, bpb in enumerate(values[lr])])
    best = {arm: best_lr([run for cell, run in runs.items() if cell.arm == arm]) for arm in (RMSNORM, other)}
    ended = {cell: run for cell, run in runs.items() if (cell.lr, cell.seed) != (0.03, 1)}
    assert to_markdown(lr_table("", runs, ended, best)).splitlines() == [
        "| arm | 0.001 | 0.003 | 0.01 | 0.03 |",
        "| --- | --- | --- | --- | --- |",
        "| rmsnorm pre | **1.2500 (2)** (edge) | 2.2500 (2) | 1 of 2 diverged | – |",
        "| dyt pre | 3.2500 (2) | **2.1250 (2)** | 2 of 2 diverged | 1 of 2 ended |",
    ]
    assert at_edge(runs, best) == {RMSNORM}
    assert at_edge(runs, {RMSNORM: 0.01, other: 0.03}) == {RMSNORM, other}  # the highest that each has tried
