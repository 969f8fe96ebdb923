"""The plots of a report. In all of them an arm has the same style."""

from collections.abc import Collection, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.findings import Finding
from experiments.records import SIZE, Arm, Record, grouped
from pages.html import WIDTH, Style
from pages.watch import LONG, add_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "os^DvP<p>hd"  # filled; hollow for the arms that take a marker or a line style a second time
LINES: list[Any] = ["-", "--", ":", "-.", (0, (8, 2)), (0, (1, 4))]
SIDES = "← better                    worse →"
FILLED = "filled: a difference is shown"
METRICS = {"train_loss": "training loss (nats per token)", "val_bpb": "validation bits per byte"}


def arm_styles(arms: Collection[Arm]) -> dict[str, Style]:
    """Each arm's style, by its name: color and marker say the first factor that varies, the line says the others.

    Its size in a ladder is one of the others.
    """
    factors = {arm.name: (*arm.without_size.factors, (SIZE, arm.size)) for arm in arms}
    shared = set.intersection(*map(set, factors.values())) if factors else set()
    colors: dict[Any, int] = {}
    lines: dict[Any, int] = {}
    styles = {}
    for name, given in factors.items():
        levels = tuple(level for level in given if level not in shared)
        color = colors.setdefault(levels[:1], len(colors))
        line = lines.setdefault(levels[1:], len(lines))
        styles[name] = {
            "color": COLORS[color % len(COLORS)],
            "marker": MARKERS[color % len(MARKERS)],
            "linestyle": LINES[line % len(LINES)],
            "fillstyle": "none" if color >= len(MARKERS) or line >= len(LINES) else "full",
        }
    return styles


# Those of Matplotlib, darker where a color has no contrast of 3 : 1 on white or, inverted, in dark mode.
COLORS = ["C0", "#d86600", "C2", "C3", "C4", "C5", "#c0509a", "C7", "#808000", "#008ca0"]


def plot_differences(found: Mapping[Arm, Finding], title: str, styles: Mapping[str, Style]) -> "Figure":
    """A row for each arm: a small dot per seed, and the mean difference with its 95% interval.

    The mean is filled where the corrected test shows a difference, else hollow. An arm has none if one of its runs, or
    of the baseline's, diverged or has not ended: that of the remaining seeds could be too good. Intervals of two seeds
    may be wide: the frame is at most five times as wide as what the dots cover.
    """
    from matplotlib.figure import Figure  # here and below because it takes half a second

    names = [fill(arm.name, LONG // 2) for arm in found]
    lines = max((name.count("\n") + 1 for name in names), default=1)
    figure = Figure(figsize=(WIDTH, 1.6 + max(0.4, 0.2 * lines) * len(found)), layout="constrained")
    axes = figure.subplots()
    dots = [0.0]
    for height, (arm, finding) in enumerate(found.items()):
        style = styles[arm.name] | {"linestyle": "", "fillstyle": "full"}
        dots += finding.values
        axes.plot(finding.values, [height] * len(finding.values), alpha=0.5, markersize=4, **style)
        note = f" n = {len(finding.values)}" + ("" if finding.complete else f" of {finding.planned}")
        axes.text(1.01, height, note, transform=axes.get_yaxis_transform(), va="center")
        if finding.complete and (mean := finding.estimate):
            look = {**style, "markerfacecolor": style["color"] if finding.shown else "none"}
            axes.errorbar(mean.mean, height, None, mean.half_width, ms=9, capsize=4, **look)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(found)), names, size="small" if lines > 1 else "medium")
    axes.set_ylim(len(found) - 0.4, -0.6)
    frame = axes.get_xlim()
    if room := 2 * (max(dots) - min(dots)):
        axes.set_xlim(*np.clip(frame, min(dots) - room, max(dots) + room))
    axes.locator_params("x", nbins=5)
    cut = "\nintervals are cut at the frame" if axes.get_xlim() != frame else ""
    axes.set_xlabel(f"val_bpb, paired by seed\n{SIDES}\n{FILLED}{cut}")
    axes.grid(alpha=0.3)
    figure.suptitle(fill(title, LONG), fontsize="medium")
    return figure


def plot_ladder(
    found: Mapping[Arm, Finding], flops: Mapping[str, float], title: str, styles: Mapping[str, Style]
) -> "Figure":
    """The effect of each arm over the FLOPs of each size, with its 95% interval. It is filled where it is shown.

    Below zero an arm is better than the first one. Each is a little further to the right, so that no interval hides
    another. `styles` are those of arms without their size.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    groups = grouped((arm.without_size, (flops[arm.size], each)) for arm, each in found.items() if each.complete)
    for number, (arm, rungs) in enumerate(groups.items()):
        style = styles[arm.name] | {"fillstyle": "full"}
        x = [compute * 1.2 ** (number / len(groups)) for compute, _ in rungs]
        y = [each.estimate.mean for _, each in rungs]
        error = np.array([each.estimate.half_width for _, each in rungs], float)  # None, of a single seed, becomes NaN
        axes.errorbar(x, y, error, label=arm.name, capsize=4, **(style | {"markerfacecolor": "none"}))
        shown = [(a, b) for a, b, (_, each) in zip(x, y, rungs, strict=True) if each.shown]
        axes.plot(*np.reshape(shown, (-1, 2)).T, **(style | {"linestyle": ""}))
    axes.axhline(0, color="0.3", linewidth=1)
    axes.set_xscale("log")
    sizes = {arm.width: flops[arm.size] for arm in found}
    axes.set_xticks([*sizes.values()], [f"{width}\n{compute:.2g}" for width, compute in sizes.items()])
    axes.minorticks_off()
    axes.set_xlabel(f"FLOPs of a run; arms of a size are side by side\n{FILLED}")
    axes.set_ylabel(f"difference in val_bpb\n{SIDES}")
    axes.grid(alpha=0.3)
    left_out = dict.fromkeys(arm.without_size.name for arm, each in found.items() if not each.complete)
    title += f". Incomplete, as runs diverged or have not ended: {', '.join(left_out)}" if left_out else ""
    figure.suptitle(fill(title, LONG), fontsize="medium")
    add_legend(figure, axes)
    return figure


def plot_curves(runs: Sequence[Record], styles: Mapping[str, Style], title: str) -> "Figure | None":
    """Each arm's mean training loss and val_bpb over the steps that all its runs logged, or over tokens.

    Tokens are the unit if arms differ in those of a step. A metric that no arm has at two steps is left out; there may
    be none. About ten points of a line have markers. The line of an arm with a diverged run ends with a cross.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    arms = grouped((run.arm, run) for run in runs)
    batches = {row["tokens"] / row["step"] for run in runs for row in run.log if "tokens" in row}
    unit = "step" if len(batches) <= 1 else "tokens"
    metrics = [metric for metric in METRICS if any(len(curve(group, metric, unit)) > 1 for group in arms.values())]
    if not metrics:
        return None
    figure = Figure(figsize=(WIDTH, 0.4 + 2.5 * len(metrics)), layout="constrained")
    column = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(column, metrics, strict=True):
        for arm, group in arms.items():
            points, style = curve(group, metric, unit), styles[arm.name]
            diverged = any(run.diverged for run in group)
            name = arm.name + (" (diverged)" if diverged else "")
            axes.plot(*points.T, label=name, markersize=4, markevery=len(points) // 10 + 1, **style)
            if len(points) and diverged:
                axes.plot(*points[-1], "X", color=style["color"], markeredgecolor="black", markersize=8)
        axes.set(ylabel=METRICS[metric])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
    column[-1].set_xlabel(unit)
    figure.suptitle(fill(title, LONG), fontsize="medium")
    add_legend(figure, column[0])
    return figure


def curve(runs: Sequence[Record], metric: str, unit: str) -> np.ndarray:
    """The means, n 2, of a unit and of a metric at the steps that all `runs` logged."""
    pairs = []
    for run in runs:
        at = {row["step"]: row[unit] for row in run.log if unit in row}  # evaluations have no tokens of their own
        logged = (row for row in run.log if metric in row and row["step"] in at)
        pairs += [(row["step"], (at[row["step"]], row[metric])) for row in logged]
    means = [np.mean(points, axis=0) for _, points in sorted(grouped(pairs).items()) if len(points) == len(runs)]
    return np.reshape(means, (-1, 2))
