"""The plots of an ablation. In all of them an arm has the same color and line."""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.figure import Figure

from experiments.ablation.outcome import Arm, Outcome, grouped
from experiments.ablation.report import Finding

LINES = ["-", "--", ":", "-."]  # colors repeat after ten arms, with the next line
METRICS = {"train_loss": "training loss (nats per token)", "val_bpb": "validation bits per byte"}


def plot_differences(found: Mapping[str, Finding], label: str, title: str = "") -> Figure:
    """A row for each finding, by its name: a dot per seed, and hollow the mean with its 95% interval.

    An arm has no mean if one of its runs, or of the baseline's, diverged or has not ended: that of the remaining seeds
    could be too good. Those of two seeds may be wide: the frame is at most five times as wide as what the dots cover.
    """
    figure = Figure(figsize=(6.8, 2.0 + 0.4 * len(found)), layout="constrained")
    axes = figure.subplots()
    dots = [0.0]
    for height, finding in enumerate(found.values()):
        color = f"C{height + 1}"
        dots += finding.values
        axes.plot(finding.values, [height] * len(finding.values), "o", color=color, alpha=0.5, markersize=4)
        note = f" n = {len(finding.values)}" + ("" if finding.complete else f" of {finding.planned}")
        axes.text(1.01, height, note, transform=axes.get_yaxis_transform(), va="center")
        if finding.complete and (mean := finding.estimate):
            axes.errorbar(mean.mean, height, None, mean.half_width, "o", mfc="none", color=color, ms=9, capsize=4)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(found)), found)
    axes.set_ylim(len(found) - 0.4, -0.6)
    frame = axes.get_xlim()
    if room := 2 * (max(dots) - min(dots)):
        axes.set_xlim(*np.clip(frame, min(dots) - room, max(dots) + room))
    axes.set_xlabel(label + ("\nintervals are cut at the frame" if axes.get_xlim() != frame else ""))
    axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    return figure


def plot_ladder(found: Mapping[Arm, Finding], flops: Mapping[Arm, float], title: str) -> Figure:
    """The effect of each arm over compute, with its 95% interval. Below zero it is better than the first arm."""
    figure = Figure(figsize=(6.8, 4), layout="constrained")
    axes = figure.subplots()
    known = [(arm, each) for arm, each in found.items() if each.complete]
    for number, (plain, rungs) in enumerate(grouped((arm.without_size, (arm, each)) for arm, each in known).items(), 1):
        x = [flops[arm] for arm, _ in rungs]
        y = [each.estimate.mean for _, each in rungs]
        error = [each.estimate.half_width or 0.0 for _, each in rungs]
        axes.errorbar(x, y, error, label=plain.name, color=f"C{number}", linestyle=LINES[number // 10 % 4], capsize=4)
    axes.axhline(0, color="0.3", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs of a run")
    axes.set_ylabel("val_bpb minus that of the first arm\n(lower is better)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    figure.suptitle(title, fontsize="medium")
    return figure


def plot_curves(runs: list[Outcome], title: str, units: Sequence[str] = ("step",)) -> Figure:
    """Each arm's mean training loss and val_bpb over the steps that all its runs logged, or over tokens or seconds.

    A metric that no arm has at two steps is left out. About ten points of a line have markers. The line of an arm with
    a diverged run ends with a cross.
    """
    arms = grouped((run.arm, run) for run in runs)
    metrics = [metric for metric in METRICS if any(len(curve(group, metric, "step")) > 1 for group in arms.values())]
    panels = list(product(units, metrics or METRICS))
    figure = Figure(figsize=(6.8, 1 + 3 * len(panels) + 0.2 * len(arms)), layout="constrained")
    column = figure.subplots(len(panels), 1, sharex=len(units) == 1, squeeze=False)[:, 0]
    for axes, (unit, metric) in zip(column, panels, strict=True):
        for number, (arm, group) in enumerate(arms.items()):
            points = curve(group, metric, unit)
            style = f"oC{number}{LINES[number // 10 % 4]}"
            every = len(points) // 10 + 1
            axes.plot(*np.reshape(points, (-1, 2)).T, style, label=arm.name, ms=4, markevery=every)
            if points and any(run.diverged for run in group):
                axes.plot(*points[-1], f"XC{number}", mec="black", ms=8)
        axes.set(xlabel=unit, ylabel=METRICS[metric])
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    figure.legend(*column[0].get_legend_handles_labels(), loc="outside lower center", fontsize="small")
    return figure


def curve(runs: list[Outcome], metric: str, unit: str) -> list[np.ndarray]:
    """The means of a unit and of a metric at the steps that all `runs` logged."""
    pairs = []
    for run in runs:
        at = {row["step"]: row[unit] for row in run.log if unit in row}  # evaluations have no seconds of their own
        logged = (row for row in run.log if metric in row and row["step"] in at)
        pairs += [(row["step"], (at[row["step"]], row[metric])) for row in logged]
    return [np.mean(points, axis=0) for _, points in sorted(grouped(pairs).items()) if len(points) == len(runs)]
