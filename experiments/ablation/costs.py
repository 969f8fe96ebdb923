"""What the arms of an ablation cost, and how good they are at equal cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
import torch

from config import ModelConfig
from experiments.ablation.comparison import Finding, Outcomes, cells_by_arm, ended
from experiments.ablation.grid import Cell, Settings
from experiments.ablation.outcome import Arm, Outcome
from experiments.statistics import estimate
from model import Llama
from train import flops_per_token


@dataclass(frozen=True)
class Cost:
    """Of one run of an arm: means over the runs that have ended and did not diverge, None if there are none."""

    arm: Arm
    parameters: int
    flops_per_token: float  # forward and backward
    tokens: float | None
    tokens_per_second: float | None  # training alone
    seconds: float | None  # with evaluations


@dataclass(frozen=True)
class EqualCost:
    """val_bpb of each arm when it had cost as much as the whole run of the cheapest arm."""

    budget: float
    bpb: dict[Arm, Finding]  # without the arms whose first evaluation came later


def costs(cells: Iterable[Cell], outcomes: Outcomes, settings: Settings) -> list[Cost]:
    """The cost of each arm of the planned `cells`."""
    found = []
    for arm, arm_cells in cells_by_arm(cells).items():
        runs = survivors(arm_cells, outcomes)
        totals = [spent(runs, axis) for axis in ("tokens", "seconds")]
        tokens, seconds = (total[max(total)] if total else None for total in totals)
        speeds = [run.tokens_per_second for run in runs if run.tokens_per_second is not None]
        found.append(Cost(arm, *model_size(settings[arm][0]), tokens, mean(speeds) if speeds else None, seconds))
    return found


def model_size(config: ModelConfig) -> tuple[int, float]:
    """Parameters and FLOPs per token of a model, without allocating it."""
    with torch.device("meta"):
        model = Llama(config)
    return sum(weight.numel() for weight in model.parameters()), flops_per_token(model)


def at_equal(axis: str, cells: Iterable[Cell], outcomes: Outcomes) -> EqualCost | None:
    """val_bpb at an equal number of "tokens" or "seconds", linear between evaluations.

    An arm's cost at a step is the mean over its runs, so that all of them are compared at the same step. None if no run
    has ended without diverging.
    """
    planned = cells_by_arm(cells)
    runs = {arm: survivors(planned[arm], outcomes) for arm in planned}
    totals = {arm: total for arm in planned if (total := spent(runs[arm], axis))}
    if not totals:
        return None
    budget = min(total[max(total)] for total in totals.values())
    bpb = {
        arm: Finding(estimate([interpolate(run, total, budget) for run in runs[arm]]), len(planned[arm]))
        for arm, total in totals.items()
        if total[min(total)] <= budget
    }
    return EqualCost(budget, bpb)


def interpolate(run: Outcome, total: dict[int, float], budget: float) -> float:
    """val_bpb of a run where `total`, the cost at each step with an evaluation, is `budget`."""
    bpb = {row["step"]: row["val_bpb"] for row in run.log if "val_bpb" in row}
    return float(np.interp(budget, list(total.values()), [bpb[step] for step in total]))


def spent(runs: Sequence[Outcome], axis: str) -> dict[int, float]:
    """The mean "tokens" or "seconds" of `runs` at each step with an evaluation. Training is logged before it."""
    by_run = []
    for run in runs:
        evaluated = {row["step"] for row in run.log if "val_bpb" in row}
        by_run.append({row["step"]: row[axis] for row in run.log if axis in row and row["step"] in evaluated})
    return {step: mean(spent[step] for spent in by_run) for step in by_run[0]} if by_run else {}


def survivors(cells: Iterable[Cell], outcomes: Outcomes) -> list[Outcome]:
    """The runs that have ended and did not diverge."""
    return [run for run in ended(cells, outcomes) if not run.diverged]
