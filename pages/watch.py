"""The rows of a `watch.jsonl`: the residual stream over depth."""

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from pages.html import WIDTH, Style
from runtime.run_dir import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_streams(arms: Mapping[str, list[Row]], styles: Mapping[str, Style] = {}) -> "Figure":
    """RMS of the residual stream after each sublayer, at the first step and at the last: a line for each arm."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    plot = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    first, last = plot.subplots(1, 2, sharey=True)
    for arm, rows in arms.items():
        streams = defaultdict(list)  # by step
        for row in rows:
            if "stream_after" in row:
                streams[row["step"]].append(row["stream_after"])
        for axes, step in ((first, min(streams)), (last, max(streams))):
            values = np.array(streams[step], float)  # None becomes NaN
            style = {"markersize": 4, "markevery": len(values) // 10 + 1} | styles.get(arm, {})
            axes.plot(np.arange(1, len(values) + 1) / 2, values, label=arm, **style)  # a block has two sublayers
    for axes, name in ((first, "first step"), (last, "last step")):
        axes.set_title(name, fontsize="medium")
        axes.set(xlabel="block", yscale="log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
    first.set_ylabel("residual stream, RMS")
    return plot
