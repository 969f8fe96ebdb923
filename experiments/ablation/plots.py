"""The plots of an ablation. In all of them an arm has the same color and line.

Each function gets the runs that have ended, those of the first arm first: it is the baseline.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.ablation.comparison import contrast
from experiments.ablation.outcome import Arm, Outcome, final_bpb, grouped
from experiments.ablation.rates import Optimum
from experiments.statistics import estimate

LINES = ["-", "--", ":", "-."]  # beyond ten arms, whose colors repeat
METRICS = {"train_loss": "training loss (nats per token)", "val_bpb": "validation bits per byte"}


def plot_differences(runs: list[Outcome], optima: Mapping[Arm, Optimum] = {}) -> Figure:
    """Final val_bpb minus the baseline's: a dot per seed, and hollow the mean with its 95% interval.

    An arm with a diverged run says so below its name. It has no mean, nor has any arm if a run of the baseline
    diverged: that of the remaining seeds could be too good. The regrets of `optima` widen the intervals.
    """
    arms = grouped((run.arm, run) for run in runs)
    baseline, *others = arms
    figure = Figure(figsize=(6.8, 2.0 + 0.4 * len(others)), layout="constrained")
    axes = figure.subplots()
    labels = []
    for height, arm in enumerate(others):
        group, color = arms[arm], f"C{height + 1}"
        differences = list(contrast([final_bpb(group), final_bpb(arms[baseline])]).values())
        axes.plot(differences, [height] * len(differences), "o", color=color, alpha=0.5, markersize=4)
        label = f"{arm.name}\nn = {len(differences)}"
        if diverged := sum(run.diverged for run in group):
            label += f", {diverged} of {len(group)} diverged"
        labels.append(label)
        if len(differences) == len(group):
            slack = sum(optima[each].regret or 0.0 for each in (arm, baseline) if each in optima)
            found = estimate(differences, slack)
            axes.errorbar(found.mean, height, None, found.half_width, "o", mfc="none", color=color, ms=9, capsize=4)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(others)), labels)
    axes.set_ylim(len(others) - 0.4, -0.6)
    axes.set_xlabel(f"val_bpb minus that of {baseline.name}, paired by seed (left is better)")
    axes.grid(alpha=0.3)
    return figure


def plot_curves(runs: list[Outcome], unit: str = "step") -> Figure:
    """Each arm's mean training loss and val_bpb at the steps that all its runs logged, over steps or tokens.

    A metric that no arm has at two steps is left out. The line of an arm with a diverged run ends with a cross.
    """
    arms = grouped((run.arm, run) for run in runs)
    metrics = [metric for metric in METRICS if any(len(curve(group, metric, unit)) > 1 for group in arms.values())]
    metrics = metrics or list(METRICS)
    figure = Figure(figsize=(6.8, 1 + 3 * len(metrics) + 0.2 * len(arms)), layout="constrained")
    panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(panels, metrics, strict=True):
        for number, (arm, group) in enumerate(arms.items()):
            points = curve(group, metric, unit)
            every = len(points) // 10 + 1
            style = f"oC{number}{LINES[number // 10 % 4]}"
            axes.plot(*np.reshape(points, (-1, 2)).T, style, label=arm.name, ms=4, markevery=every)
            if points and any(run.diverged for run in group):
                axes.plot(*points[-1], f"XC{number}", mec="black", ms=8)
        axes.set(xlabel=unit, ylabel=METRICS[metric])
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize="small")
    return figure


def curve(runs: list[Outcome], metric: str, unit: str) -> list[np.ndarray]:
    """The means of a unit and of a metric at the steps that all `runs` logged."""
    steps = defaultdict(list)
    for run in runs:
        seen: dict[str, Any] = {}  # an evaluation comes after the training row of its step, which has the tokens
        for row in run.log:
            seen |= row
            if metric in row:
                steps[row["step"]].append((seen[unit], row[metric]))
    return [np.mean(points, axis=0) for _, points in sorted(steps.items()) if len(points) == len(runs)]
