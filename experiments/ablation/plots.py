"""The plots of an ablation. In all of them an arm has the same style."""

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.ablation.outcome import SIZE, Arm, Outcome, grouped
from experiments.ablation.report import Finding
from pages.html import WIDTH, Style
from pages.watch import LONG, add_legend

MARKERS = "os^DvP<p>hd"  # filled; hollow for the arms that take a marker or a line style a second time
LINES: list[Any] = ["-", "--", ":", "-.", (0, (8, 2)), (0, (1, 4))]
SIDES = "← better                    worse →"
METRICS = {"train_loss": "training loss (nats per token)", "val_bpb": "validation bits per byte"}


def arm_styles(arms: Collection[Arm]) -> dict[str, Style]:
    """Each arm's style, by its name: color and marker say the first factor that varies, the line says the others.

    Its size in a ladder is one of the others.
    """
    factors = {arm.name: (*arm.without_size.factors, (SIZE, arm.size)) for arm in arms}
    shared = set.intersection(*map(set, factors.values()))
    colors: dict[Any, int] = {}
    lines: dict[Any, int] = {}
    styles = {}
    for name, given in factors.items():
        levels = tuple(level for level in given if level not in shared)
        color = colors.setdefault(levels[:1], len(colors))
        line = lines.setdefault(levels[1:], len(lines))
        styles[name] = {
            "color": f"C{color}",
            "marker": MARKERS[color % len(MARKERS)],
            "linestyle": LINES[line % len(LINES)],
            "fillstyle": "none" if color >= len(MARKERS) or line >= len(LINES) else "full",
        }
    return styles


def plot_differences(
    found: Mapping[str, Finding], label: str, title: str = "", styles: Mapping[str, Style] = {}
) -> Figure:
    """A row for each finding, by its name: a dot per seed, and hollow the mean with its 95% interval.

    An arm has no mean if one of its runs, or of the baseline's, diverged or has not ended: that of the remaining seeds
    could be too good. Those of two seeds may be wide: the frame is at most five times as wide as what the dots cover.
    """
    names = [fill(name, LONG // 2) for name in found]
    lines = max((name.count("\n") + 1 for name in names), default=1)
    figure = Figure(figsize=(WIDTH, 1.4 + max(0.4, 0.2 * lines) * len(found)), layout="constrained")
    axes = figure.subplots()
    dots = [0.0]
    for height, (name, finding) in enumerate(found.items()):
        style = styles.get(name, {"color": f"C{height + 1}", "marker": "o"}) | {"linestyle": ""}
        dots += finding.values
        axes.plot(finding.values, [height] * len(finding.values), alpha=0.5, markersize=4, **style)
        note = f" n = {len(finding.values)}" + ("" if finding.complete else f" of {finding.planned}")
        axes.text(1.01, height, note, transform=axes.get_yaxis_transform(), va="center")
        if finding.complete and (mean := finding.estimate):
            axes.errorbar(mean.mean, height, None, mean.half_width, mfc="none", ms=9, capsize=4, **style)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(found)), names, size="small" if lines > 1 else "medium")
    axes.set_ylim(len(found) - 0.4, -0.6)
    frame = axes.get_xlim()
    if room := 2 * (max(dots) - min(dots)):
        axes.set_xlim(*np.clip(frame, min(dots) - room, max(dots) + room))
    axes.locator_params("x", nbins=5)
    axes.set_xlabel(label + ("\nintervals are cut at the frame" if axes.get_xlim() != frame else ""))
    axes.grid(alpha=0.3)
    figure.suptitle(fill(title, LONG), fontsize="medium")
    return figure


def plot_ladder(found: Mapping[Arm, Finding], flops: Mapping[Arm, float], title: str) -> Figure:
    """The effect of each arm over compute, with its 95% interval. Below zero it is better than the first arm.

    Each arm is a little further to the right, so that no interval hides another.
    """
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    styles = arm_styles(list(dict.fromkeys(arm.without_size for arm in flops)))
    known = [(arm, each.estimate) for arm, each in found.items() if each.estimate and each.complete]
    groups = grouped((arm.without_size.name, (flops[arm], mean)) for arm, mean in known)
    for number, (name, rungs) in enumerate(groups.items()):
        x = [compute * 1.2 ** (number / len(groups)) for compute, _ in rungs]
        y = [mean.mean for _, mean in rungs]
        error = np.array([mean.half_width for _, mean in rungs], float)  # None, of a single seed, becomes NaN
        axes.errorbar(x, y, error, label=name, capsize=4, **styles[name])
    axes.axhline(0, color="0.3", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs of a run; arms of a size are side by side")
    axes.set_ylabel(f"difference in val_bpb\n{SIDES}")
    axes.grid(alpha=0.3)
    left_out = dict.fromkeys(arm.without_size.name for arm, each in found.items() if not each.complete)
    title += f". Incomplete, as runs diverged or have not ended: {', '.join(left_out)}" if left_out else ""
    figure.suptitle(fill(title, LONG), fontsize="medium")
    add_legend(figure, axes)
    return figure


def plot_curves(runs: list[Outcome], styles: Mapping[str, Style], title: str, units: Sequence[str]) -> Figure:
    """Each arm's mean training loss and val_bpb over the steps that all its runs logged, or over tokens or seconds.

    A metric that no arm has at two steps is left out. About ten points of a line have markers. The line of an arm with
    a diverged run ends with a cross.
    """
    arms = grouped((run.arm, run) for run in runs)
    metrics = [metric for metric in METRICS if any(len(curve(group, metric, "step")) > 1 for group in arms.values())]
    panels = list(product(units, metrics or METRICS))
    figure = Figure(figsize=(WIDTH, 0.4 + 2.5 * len(panels)), layout="constrained")
    column = figure.subplots(len(panels), 1, sharex=len(units) == 1, squeeze=False)[:, 0]
    for axes, (unit, metric) in zip(column, panels, strict=True):
        for arm, group in arms.items():
            points, style = curve(group, metric, unit), styles[arm.name]
            diverged = any(run.diverged for run in group)
            name = arm.name + (" (diverged)" if diverged else "")
            axes.plot(*points.T, label=name, markersize=4, markevery=len(points) // 10 + 1, **style)
            if len(points) and diverged:
                axes.plot(*points[-1], "X", color=style["color"], markeredgecolor="black", markersize=8)
        axes.set(xlabel=unit, ylabel=METRICS[metric])
        axes.grid(alpha=0.3)
    figure.suptitle(fill(title, LONG), fontsize="medium")
    add_legend(figure, column[0])
    return figure


def curve(runs: list[Outcome], metric: str, unit: str) -> np.ndarray:
    """The means, n 2, of a unit and of a metric at the steps that all `runs` logged."""
    pairs = []
    for run in runs:
        at = {row["step"]: row[unit] for row in run.log if unit in row}  # evaluations have no seconds of their own
        logged = (row for row in run.log if metric in row and row["step"] in at)
        pairs += [(row["step"], (at[row["step"]], row[metric])) for row in logged]
    means = [np.mean(points, axis=0) for _, points in sorted(grouped(pairs).items()) if len(points) == len(runs)]
    return np.reshape(means, (-1, 2))
