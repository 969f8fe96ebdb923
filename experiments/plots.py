"""The plots of an ablation."""

from pathlib import Path

from matplotlib.figure import Figure

from experiments.outcome import Outcome, by_arm, paired_differences
from experiments.statistics import estimate


def plot_curves(outcomes: list[Outcome], path: Path) -> None:
    """Training loss and val_bpb over the steps that all runs of an arm took: mean and 95% interval."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    arms = by_arm(outcomes)
    for panel, name, label in zip(
        panels, ("train_loss", "val_bpb"), ("training loss (nats per token)", "validation bits per byte"), strict=True
    ):
        for arm, runs in arms.items():
            values: dict[int, list[float]] = {}
            for run in runs:
                for row in run.log:
                    if name in row:
                        values.setdefault(row["step"], []).append(row[name])
            points = {step: estimate(found) for step, found in values.items() if len(found) == len(runs)}
            middle = [point.mean for point in points.values()]
            half = [point.half_width or 0.0 for point in points.values()]
            (line,) = panel.plot(list(points), middle, ".-" if name == "val_bpb" else "-", label=arm.name)
            low, high = ([m + sign * h for m, h in zip(middle, half, strict=True)] for sign in (-1, 1))
            panel.fill_between(list(points), low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        panel.set(xlabel="step", ylabel=label)
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path, dpi=120)


def plot_differences(outcomes: list[Outcome], path: Path) -> None:
    """Final val_bpb minus the baseline's: a dot per seed, and a bar for the mean and its 95% interval."""
    arms = by_arm(outcomes)
    baseline, *others = arms
    figure = Figure(figsize=(8, 1.6 + 0.4 * len(others)), layout="constrained")
    axes = figure.subplots()
    for height, arm in enumerate(others):
        differences = paired_differences(arms[arm], arms[baseline])
        if not differences:
            axes.text(0, height, " diverged", va="center")
            continue
        found = estimate(differences)
        axes.plot(differences, [height] * len(differences), "o", color="0.6", markersize=4)
        axes.errorbar(found.mean, height, xerr=found.half_width, fmt="s", color="C0", capsize=4)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(others)), [arm.name for arm in others])
    axes.set_ylim(len(others), -1)
    axes.set_xlabel(f"val_bpb minus that of {baseline.name}, paired by seed (left is better)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
