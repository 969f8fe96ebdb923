"""The plots of a report. In all of them an arm has the same style."""

from collections.abc import Collection, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.findings import Finding
from experiments.records import SIZE, Arm, Record, grouped
from pages.html import WIDTH, Style
from pages.watch import plot_streams
from runtime.run_dir import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "os^DvP<p>hd"  # filled; hollow for the arms that take a marker or a line style a second time
LINES: list[Any] = ["-", "--", ":", "-.", (0, (8, 2)), (0, (1, 4))]
LINE_LENGTH = 60  # characters that fill a figure
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
    of the baseline's, diverged or has not ended: that of the remaining seeds could be too good.
    """
    from matplotlib.figure import Figure  # here and below because it takes half a second

    names = [fill(arm.name, LINE_LENGTH // 2) for arm in found]
    lines = max((name.count("\n") + 1 for name in names), default=1)
    figure = Figure(figsize=(WIDTH, 1.6 + max(0.4, 0.2 * lines) * len(found)), layout="constrained")
    axes = figure.subplots()
    for height, (arm, finding) in enumerate(found.items()):
        style = styles[arm.name] | {"linestyle": "", "fillstyle": "full"}
        axes.plot(finding.values, [height] * len(finding.values), alpha=0.5, markersize=4, **style)
        note = f" n = {len(finding.values)}" + ("" if finding.complete else f" of {finding.planned}")
        axes.text(1.01, height, note, transform=axes.get_yaxis_transform(), va="center")
        if finding.complete and (mean := finding.estimate):
            look = {**style, "markerfacecolor": style["color"] if finding.shown else "none"}
            axes.errorbar(mean.mean, height, None, mean.half_width, ms=9, capsize=4, **look)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(found)), names, size="small" if lines > 1 else "medium")
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.locator_params("x", nbins=5)
    axes.set_xlabel("val_bpb, paired by seed\n← better                    worse →\nfilled: a difference is shown")
    axes.grid(alpha=0.3)
    figure.suptitle(fill(title, LINE_LENGTH), fontsize="medium")
    return figure


def plot_curves(runs: Sequence[Record], styles: Mapping[str, Style], title: str) -> "Figure | None":
    """Each arm's mean training loss and val_bpb over the steps that all its runs logged.

    A metric that no arm has at two steps is left out; there may be none. About ten points of a line have markers. The
    line of an arm with a diverged run ends with a cross.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    arms = grouped((run.arm, run) for run in runs)
    metrics = [metric for metric in METRICS if any(len(curve(group, metric)) > 1 for group in arms.values())]
    if not metrics:
        return None
    figure = Figure(figsize=(WIDTH, 0.4 + 2.5 * len(metrics)), layout="constrained")
    column = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(column, metrics, strict=True):
        for arm, group in arms.items():
            points, style = curve(group, metric), styles[arm.name]
            diverged = any(run.diverged for run in group)
            name = arm.name + (" (diverged)" if diverged else "")
            axes.plot(*points.T, label=name, markersize=4, markevery=len(points) // 10 + 1, **style)
            if len(points) and diverged:
                axes.plot(*points[-1], "X", color=style["color"], markeredgecolor="black", markersize=8)
        axes.set(ylabel=METRICS[metric])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
    column[-1].set_xlabel("step")
    figure.suptitle(fill(title, LINE_LENGTH), fontsize="medium")
    add_legend(figure, column[0])
    return figure


def curve(runs: Sequence[Record], metric: str) -> np.ndarray:
    """The steps that all `runs` logged and the means of a metric there, n 2."""
    logged = grouped((row["step"], row[metric]) for run in runs for row in run.log if metric in row)
    means = [(step, np.mean(values)) for step, values in sorted(logged.items()) if len(values) == len(runs)]
    return np.reshape(means, (-1, 2))


def plot_watched(arms: Mapping[str, list[Row]], styles: Mapping[str, Style]) -> "Figure":
    """The residual stream of several arms."""
    figure = plot_streams(arms, styles)
    add_legend(figure, figure.axes[0])
    return figure


def add_legend(plot: "Figure", axes: "Axes") -> None:
    """The names of the lines, below all panels. The figure grows by as much."""
    lines, names = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, names), default=0) < LINE_LENGTH / 2 else 1
    look: Style = {"ncols": columns, "fontsize": "small", "handlelength": 4}
    legend = plot.legend(lines, [fill(name, LINE_LENGTH) for name in names], loc="outside lower center", **look)
    plot.set_figheight(plot.get_figheight() + legend.get_window_extent().height / plot.dpi)
