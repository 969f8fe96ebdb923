"""The rows of a `watch.jsonl`: the residual stream over depth, and heat maps over steps and depth."""

from collections import defaultdict
from collections.abc import Mapping
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from pages.html import WIDTH, Style
from runtime.run_dir import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONG = 60  # characters of a name that fill a figure
PANELS = {  # columns, up to a dot: what a heat map shows of them, and the scale of its colors
    "stream_after": ("stream, RMS", "log"),
    "second_stream_after": ("second stream, RMS", "log"),
    "input_rms": ("norm's input, RMS", "log"),
    "gain_mean": ("mean gain", "linear"),
    "max_logit": ("largest logit", "linear"),
    "grad_rms": ("gradient, RMS", "log"),
    "update": ("‖update‖ / ‖weight‖", "log"),
}


def plot_streams(arms: Mapping[str, list[Row]], styles: Mapping[str, Style] = {}) -> "Figure":
    """RMS of the residual stream after each sublayer, at the first step and at the last: a line for each arm."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator

    plot = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    first, last = plot.subplots(1, 2, sharey=True)
    for arm, rows in arms.items():
        labels, _, values = tabulate(rows, "stream_after")
        depth = np.arange(1, len(labels) + 1) / 2  # a block has two sublayers
        style = {"markersize": 4, "markevery": len(labels) // 10 + 1} | styles.get(arm, {})
        first.plot(depth, values[:, 0], label=arm, **style)
        last.plot(depth, values[:, -1], **style)
    for axes, name in ((first, "first step"), (last, "last step")):
        axes.set_title(name, fontsize="medium")
        axes.set(xlabel="block", yscale="log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
    first.set_ylabel("residual stream, RMS")
    first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    first.yaxis.set_major_formatter("{x:g}")
    first.yaxis.set_minor_formatter("")
    if len(arms) > 1:
        add_legend(plot, first)
    return plot


def add_legend(plot: "Figure", axes: "Axes") -> None:
    """The names of the lines, below all panels. The figure grows by as much."""
    lines, names = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, names), default=0) < LONG / 2 else 1
    look: Style = {"ncols": columns, "fontsize": "small", "handlelength": 4}
    legend = plot.legend(lines, [fill(name, LONG) for name in names], loc="outside lower center", **look)
    plot.set_figheight(plot.get_figheight() + legend.get_window_extent().height / plot.dpi)


def plot_maps(rows: list[Row]) -> "Figure":
    """Heat maps of one run over steps and, from the bottom up, over depth."""
    from matplotlib.figure import Figure

    tables = {column: tabulate(rows, column) for column in PANELS}
    tables = {column: table for column, table in tables.items() if table[0]}
    heights = [1 + min(3, 0.1 * len(labels)) for labels, _, _ in tables.values()]
    plot = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    panels = plot.subplots(len(tables), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (column, (labels, steps, values)) in zip(panels, tables.items(), strict=True):
        title, scale = PANELS[column]
        shown = values[values > 0] if scale == "log" else values[np.isfinite(values)]
        image = axes.imshow(values, aspect="auto", origin="lower", interpolation="nearest", norm=scale)
        image.set_clim(min(shown, default=1), max(shown, default=1))
        axes.set_xticks(range(len(steps)), steps)
        axes.set_yticks(range(len(labels)), labels)
        axes.locator_params(nbins=9)
        axes.set_xlabel("step")
        plot.colorbar(image, ax=axes, label=title)
    return plot


def tabulate(rows: list[Row], column: str) -> tuple[list[str], list[int], np.ndarray]:
    """Labels, steps, and for each label the values over the steps, NaN where there is none."""
    found: dict[str, dict[int, float | None]] = defaultdict(dict)
    for row in rows:
        for key, value in row.items():
            start, _, name = key.partition(".")
            if start == column:
                label = f"{row['block']} {row['site']} {name}".strip()
                found[label][row["step"]] = value
    steps = sorted({row["step"] for row in rows})
    values = [[line.get(step) for step in steps] for line in found.values()]
    return list(found), steps, np.array(values, float)  # None becomes NaN
