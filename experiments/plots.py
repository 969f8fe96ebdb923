"""The plots of a report. In all of them an arm has the same style."""

from collections.abc import Iterable
from textwrap import fill

import numpy as np

from experiments.findings import BETTER, WORSE, Comparison, Finding
from experiments.records import Arm, Record, grouped
from pages.html import Plot, Style, new_plot
from pages.run import plot_streams
from runtime.run_dir import read_rows

# Those of Matplotlib, darker where a color has no contrast of 3 : 1 on white or, inverted, in dark mode.
COLORS = ["C0", "#d86600", "C2", "C3", "C4", "C5", "#c0509a", "C7", "#808000", "#008ca0"]
MARKERS = "os^DvP<p>hd"
LINES = ["-", "--", ":", "-."]
LINE_LENGTH = 60  # characters that fill a figure
METRICS = {"train_loss": "training loss (nats per token)", "val_bpb": "validation bits per byte"}


def arm_styles(arms: Iterable[Arm]) -> dict[str, Style]:
    """Each arm's style, by its name. Color, marker and line go round at their own pace, so no two are soon the same."""
    tables = {"color": COLORS, "marker": MARKERS, "linestyle": LINES}
    return {
        arm.name: {key: table[number % len(table)] for key, table in tables.items()} for number, arm in enumerate(arms)
    }


def wrapped(text: str, length: int = LINE_LENGTH) -> str:
    return fill(text.replace("$", r"\$"), length)  # which is no formula


def plot_differences(found: dict[Arm, Finding], title: str, styles: dict[str, Style]) -> Plot:
    """A row for each arm: a small dot per seed, and the mean difference with its 95% interval.

    An arm has no mean if one of its runs, or of the baseline's, diverged or has not ended: that of the remaining seeds
    could be too good.
    """
    names = [wrapped(arm.name, LINE_LENGTH // 2) for arm in found]
    breaks = max(name.count("\n") for name in names)
    figure = new_plot(1.6 + 0.2 * (2 + breaks) * len(found))
    axes = figure.subplots()
    for height, (arm, finding) in enumerate(found.items()):
        style = styles[arm.name] | {"linestyle": ""}
        axes.plot(finding.values, [height] * len(finding.values), alpha=0.5, markersize=4, **style)
        if finding.verdict[0] not in (BETTER, WORSE):
            style["markerfacecolor"] = "none"
        if finding.complete and (mean := finding.estimate):
            axes.errorbar(mean.mean, height, None, mean.half_width, markersize=9, capsize=4, **style)
    axes.axvline(0, color="0.3")
    axes.set_yticks(range(len(found)), names, size="small")
    axes.set_ylim(len(found) - 0.5, -0.5)  # the first at the top
    axes.locator_params("x", nbins=5)
    axes.set_xlabel("val_bpb, paired by seed\n← better                    worse →\nfilled: a difference is shown")
    axes.grid(alpha=0.3)
    figure.suptitle(wrapped(title), fontsize="medium")
    return figure


def plot_curves(runs: list[Record], styles: dict[str, Style], title: str) -> Plot:
    """Each arm's mean training loss and val_bpb over the steps that all its runs logged."""
    from matplotlib.ticker import MaxNLocator

    arms = grouped((run.arm, run) for run in runs)
    figure = new_plot(5.4)
    column = figure.subplots(len(METRICS), 1, sharex=True)
    for axes, metric in zip(column, METRICS, strict=True):
        for arm, group in arms.items():
            name = f"{arm.name} (diverged)" if any(run.diverged for run in group) else arm.name
            logged = grouped((row["step"], row[metric]) for run in group for row in run.log if metric in row)
            means = [(step, np.mean(each)) for step, each in sorted(logged.items()) if len(each) == len(group)]
            axes.plot(*np.reshape(means, (-1, 2)).T, label=name, markersize=4, markevery=0.1, **styles[arm.name])
        axes.set(ylabel=METRICS[metric])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
    column[-1].set_xlabel("step")
    figure.suptitle(wrapped(title), fontsize="medium")
    add_legend(figure)
    return figure


def add_legend(plot: Plot) -> None:
    """The names of the lines, below all panels. The figure grows by as much."""
    lines, names = plot.axes[0].get_legend_handles_labels()
    legend = plot.legend(lines, [*map(wrapped, names)], loc="outside lower center", fontsize="small", handlelength=4)
    plot.set_figheight(plot.get_figheight() + legend.get_window_extent().height / plot.dpi)


def figures_of(found: Comparison) -> dict[str, Plot]:
    """The plots of a report, by the names of their files."""
    figures = {}
    styles = arm_styles(found.arms)
    if found.found:
        title = f"Difference from {found.against}, {found.seeds}"
        figures["differences"] = plot_differences(found.found, title, styles)
    ended = [run for arm in found.ordered for run in found.arms[arm].runs if run.ended and run.log]
    if ended:
        figures["curves"] = plot_curves(ended, styles, f"Means of {found.seeds}")
    # Of each arm's last seed.
    watched = {run.arm.name: log for run in ended if (log := read_rows(run.path / "watch.jsonl"))}
    if watched:
        figures["watch"] = plot_streams(watched, styles)
        add_legend(figures["watch"])
    return figures
