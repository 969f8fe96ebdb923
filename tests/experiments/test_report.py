"""The report of an ablation: outcomes, paired differences, tables."""

import csv
import io
import math

import pytest

from experiments.outcome import Arm, Outcome, best_lr, paired_differences, read_outcome
from experiments.report import arms_table, lr_table, to_csv

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


# --- tables ----------------------------------------------------------------------------------------------------------

RUNS = [
    *(outcome("rmsnorm", seed, bpb) for seed, bpb in enumerate((2.0, 3.0, 4.0))),
    *(outcome("layernorm", seed, bpb) for seed, bpb in enumerate((1.5, 2.6, 3.4))),
    *(outcome("batchnorm", seed, bpb) for seed, bpb in enumerate((None, 2.5, None))),
    *(outcome("none", seed, None) for seed in range(3)),
]


def test_the_whole_table():
    """By hand: the variance of 2, 3, 4 is 1; of 1.5, 2.6, 3.4 it is 0.91; of -0.5, -0.4, -0.6 it is 0.01."""
    assert arms_table(RUNS) == (
        "| norm | placement | lr | val_bpb | paired difference from rmsnorm pre | diverged | tokens/s | seconds |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| rmsnorm | pre | 0.01 | 3.0000 ± 2.4841 | – | 0 of 3 | 1,001 | 2 |\n"
        "| layernorm | pre | 0.01 | 2.5000 ± 2.3697 | -0.5000 ± 0.2484 | 0 of 3 | 1,001 | 2 |\n"
        "| batchnorm | pre | 0.01 | 2.5000 | -0.5000 | 2 of 3 | 1,001 | 2 |\n"
        "| none | pre | 0.01 | – | – | 3 of 3 | – | – |\n"
    )


def test_nothing_is_compared_with_a_baseline_that_diverged():
    lines = arms_table([outcome("none", 0, None), outcome("rmsnorm", 0, 2.0)]).splitlines()
    assert lines[2:] == [
        "| none | pre | 0.01 | – | – | 1 of 1 | – | – |",
        "| rmsnorm | pre | 0.01 | 2.0000 | – | 0 of 1 | 1,000 | 2 |",
    ]


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
    assert lr_table(sweep(r10=[None, 1.0], r1=[3.0, 3.5], r3=[2.0, 2.5])) == (
        "| arm | 0.001 | 0.003 | 0.01 |\n|---|---|---|---|\n| rmsnorm pre | 3.2500 | **2.2500** | 1 of 2 diverged |\n"
    )
