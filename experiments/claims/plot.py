"""The figure of a claim: the trend of its effect, and the loss of every arm over the learning rate."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.ablation.rates import Optimum
from experiments.claims.claim import Row
from experiments.claims.results import Entry
from experiments.statistics import Estimate


def plot(entry: Entry) -> Figure:
    """The upper panel has the primary effect at every scale, or the effects that have a place of their own."""
    claim, swept = entry.claim, {scale: rows_by_rate(entry, scale) for scale in entry.content}
    figure = Figure(figsize=(7, 7 if any(swept.values()) else 3.5), layout="constrained")
    panels = figure.subplots(2 if any(swept.values()) else 1, squeeze=False)[:, 0]
    shown = [each for each in claim.effects if each.x is not None] or [claim.effects[0]]
    if not shown[0].ratio:
        panels[0].axhline(0, color="0.4", linewidth=1)
    if claim.dashed is not None:
        panels[0].axhline(claim.dashed, color="C1", linestyle="--", label="published")
        panels[0].legend()
    for scale, judgment in entry.judgments.items():
        for effect, found in ((each, judgment.found.get(each.name)) for each in shown):
            if not isinstance(found, Estimate):
                continue
            low, middle, high = (math.exp(y) if effect.ratio else y for y in (found.low, found.mean, found.high))
            x = scale if effect.x is None else effect.x
            panels[0].errorbar([x], middle, [[middle - low], [high - middle]], fmt="oC0", capsize=4)
    name = shown[0].name if len(shown) == 1 else claim.across
    panels[0].set(yscale="log" if shown[0].ratio else "linear", ylabel=name)
    if shown[0].x is not None:
        panels[0].set(xscale="log", xlabel=claim.over)
    for scale, arms in ((scale, arms) for scale, arms in swept.items() if arms):
        plot_rates(panels[1], scale, arms, entry.content[scale]["measured"].get("optima", {}))
    return figure


def rows_by_rate(entry: Entry, scale: str) -> dict[str, list[Row]]:
    """Runs that ended, of the arms with several rates."""
    measured, found = entry.content[scale]["measured"], dict[str, list[Row]]()
    for row in measured["runs"] + measured.get("search", []):
        if "lr" in row and row["value"] is not None:
            found.setdefault(row["arm"], []).append(row)
    return {arm: rows for arm, rows in found.items() if len({row["lr"] for row in rows}) > 1}


def plot_rates(axes: Axes, scale: str, arms: dict[str, list[Row]], optima: dict) -> None:
    """A dot for each run, and the parabola."""
    for arm, rows in arms.items():
        lrs = sorted({row["lr"] for row in rows})
        label = f"{arm}, {scale}"
        (dots,) = axes.plot([row["lr"] for row in rows], [row["value"] for row in rows], "o", ms=3, label=label)
        if arm in optima and optima[arm]["regret"] is not None:
            best = Optimum(**optima[arm])
            axes.plot(lrs, [best.loss_at(lr) for lr in lrs], color=dots.get_color(), linewidth=1)
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss (nats per token)")
    axes.legend(fontsize="x-small")
