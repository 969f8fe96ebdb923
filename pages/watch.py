"""The rows of a `watch.jsonl` as heat maps over steps and depth."""

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from runtime.run_dir import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {  # columns, up to a dot: what a heat map shows of them, and the scale of its colors
    "stream_after": ("stream, RMS", "log"),
    "input_rms": ("norm's input, RMS", "log"),
    "gain_mean": ("mean gain", "linear"),
    "max_logit": ("largest logit", "linear"),
    "grad_rms": ("gradient, RMS", "log"),
    "update": ("‖update‖ / ‖weight‖", "log"),
}


def plot_watch(arms: Mapping[str, list[Row]]) -> "Figure":
    """Heat maps over steps and depth, from the bottom up: a column for each arm, with the same colors in a row."""
    from matplotlib.figure import Figure

    maps = {column: [tabulate(rows, column) for rows in arms.values()] for column in PANELS}
    maps = {column: each for column, each in maps.items() if any(labels for labels, _, _ in each)}
    heights = [1.2 + 0.1 * max(len(labels) for labels, _, _ in each) for each in maps.values()]
    plot = Figure(figsize=(3 + 3.2 * len(arms), 1 + sum(heights)), layout="constrained")
    panels = plot.subplots(len(maps), len(arms), squeeze=False, height_ratios=heights)
    for (column, each), row in zip(maps.items(), panels, strict=True):
        title, scale = PANELS[column]
        found = np.concatenate([values.ravel() for _, _, values in each])
        shown = found[found > 0] if scale == "log" else found[np.isfinite(found)]
        colors = {"norm": scale, "vmin": min(shown, default=1), "vmax": max(shown, default=1)}
        for arm, axes, (labels, steps, values) in zip(arms, row, each, strict=True):
            axes.set_title(arm, fontsize="medium")
            if labels:
                image = axes.imshow(values, aspect="auto", origin="lower", interpolation="nearest", **colors)
                axes.set_xticks(range(len(steps)), steps)
                axes.set_yticks(range(len(labels)), labels)
                axes.locator_params("x", nbins=3)
                axes.locator_params("y", nbins=9)
                axes.set_xlabel("step")
            else:
                axes.set_axis_off()
        plot.colorbar(image, ax=list(row), label=title)
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
