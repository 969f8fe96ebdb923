"""The plots of an ablation. In all of them an arm has the same color and line.

Each function gets the runs that have ended, those of the first arm first: it is the baseline.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.ablation.outcome import Arm, BySeed, Outcome, by_arm, final_bpb, paired
from experiments.statistics import estimate

LINES = ["-", "--", ":", "-."]
CROSS: dict[str, Any] = {"marker": "X", "markeredgecolor": "black", "linestyle": "none", "markersize": 8}
FEW = 10  # points up to which each of a curve has a marker and an error bar
METRICS = {"train_loss": "training loss (nats per token)", "val_bpb": "validation bits per byte"}

Look = dict[str, Any]  # arguments of `Axes.plot`


def looks(arms: Iterable[Arm]) -> dict[Arm, Look]:
    """Colors and, beyond ten arms, lines."""
    return {arm: {"color": f"C{i % 10}", "linestyle": LINES[i // 10 % len(LINES)]} for i, arm in enumerate(arms)}


def plot_differences(runs: list[Outcome], title: str) -> Figure:
    """Final val_bpb minus the baseline's: a dot per seed, and hollow the mean with its 95% interval.

    An arm with a diverged run is marked with a cross. It has no mean, nor has any arm if a run of the baseline
    diverged: that of the remaining seeds could be too good.
    """
    arms = by_arm(runs)
    baseline, *others = arms
    figure = Figure(figsize=(9, 2.0 + 0.32 * len(others)), layout="constrained")
    axes = figure.subplots()
    for height, arm in enumerate(others):
        color, diverged = looks(arms)[arm]["color"], sum(run.diverged for run in arms[arm])
        differences = list(paired(final_bpb(arms[arm]), final_bpb(arms[baseline])).values())
        axes.plot(differences, [height] * len(differences), "o", color=color, alpha=0.5, markersize=4)
        note = f" n = {len(differences)}" + (f", {diverged} of {len(arms[arm])} diverged" if diverged else "")
        axes.text(1.01, height, note, transform=axes.get_yaxis_transform(), va="center")
        if diverged:
            axes.plot(1, height, transform=axes.get_yaxis_transform(), clip_on=False, color=color, **CROSS)
        if len(differences) == len(arms[arm]):
            found = estimate(differences)
            axes.errorbar(found.mean, height, None, found.half_width, "o", mfc="none", color=color, ms=9, capsize=4)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(others)), [arm.name for arm in others])
    axes.set_ylim(len(others) - 0.4, -0.6)
    axes.set_xlabel(f"val_bpb minus that of {baseline.name}, paired by seed (left is better)")
    _finish(figure, title)
    return figure


def plot_curves(runs: list[Outcome], title: str) -> Figure:
    """Each arm's mean training loss and val_bpb over the steps that all its runs logged.

    Below, minus the baseline with the same seed, with 95% intervals: runs of one seed share their batches, so this
    varies less than the losses do. The first quarter is left out, where differences are large. The line of an arm with
    a diverged run ends with a cross.
    """
    arms = by_arm(runs)
    rows = 1 if len(arms) == 1 else 2
    figure = Figure(figsize=(12, 4 * rows), layout="constrained")
    grid = figure.subplots(rows, 2, sharex=True, squeeze=False)
    for column, (metric, label) in zip(grid.T, METRICS.items(), strict=True):
        values = {arm: by_step(arms[arm], metric) for arm in arms}
        last = max((step for steps in values.values() for step in steps), default=0)
        baseline = next(iter(values.values()))
        for number, (arm, look) in enumerate(looks(arms).items()):
            curves = [values[arm]]
            if number:
                later = [step for step in values[arm] if step in baseline and step >= last / 4]
                curves.append({step: paired(values[arm][step], baseline[step]) for step in later})
            for axes, curve, below in zip(column, curves, (False, True), strict=False):
                aside = 0.01 * last * (number - len(arms) / 2) if below and len(curve) == 1 else 0.0
                _draw_curve(axes, curve, below, aside, look | {"label": arm.name})
                if curve and any(run.diverged for run in arms[arm]):
                    x, y = axes.lines[-1].get_xydata()[-1]
                    axes.plot(x, y, color=look["color"], **CROSS)
        column[0].set_ylabel(label)
        column[-1].set_xlabel("step")
        if rows == 2:
            column[1].axhline(0, color="0.3", linewidth=1)
            column[1].set_ylabel(f"minus {next(iter(arms)).name}, paired by seed")
    _finish(figure, title, grid[0][0])
    return figure


def by_step(runs: list[Outcome], metric: str) -> dict[int, BySeed]:
    """By step and seed, the values of a metric at the steps that all `runs` logged."""
    steps: dict[int, dict[int, float]] = {}
    for run in runs:
        for row in run.log:
            if metric in row:
                steps.setdefault(row["step"], {})[run.seed] = row[metric]
    return {step: values for step, values in sorted(steps.items()) if len(values) == len(runs)}


def _draw_curve(axes: Axes, curve: Mapping[int, BySeed], intervals: bool, aside: float, look: Look) -> None:
    """Draw the means of a curve. The points of a short one have markers and error bars, a long one has a band."""
    found = {step + aside: estimate(list(by_seed.values())) for step, by_seed in curve.items() if by_seed}
    means = [each.mean for each in found.values()]
    half_widths = [each.half_width or 0.0 for each in found.values()] if intervals else [0.0] * len(found)
    if len(found) > FEW:
        low, high = ([m + sign * half for m, half in zip(means, half_widths, strict=True)] for sign in (-1, 1))
        axes.fill_between(list(found), low, high, color=look["color"], alpha=0.2, linewidth=0)
    elif found and intervals:
        axes.errorbar(list(found), means, half_widths, color=look["color"], linestyle="none", capsize=4)
    axes.plot(list(found), means, marker="o" if len(found) <= FEW else "", markersize=5, **look)


def _finish(figure: Figure, title: str, legend: Axes | None = None) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    if legend:
        figure.legend(*legend.get_legend_handles_labels(), loc="outside right center", fontsize="small")
