"""Figures that several claims share. All take a claim's measurements and draw losses in nats per token."""

from statistics import mean

from matplotlib.figure import Figure

from experiments.claims.claim import Measured
from experiments.claims.runs import Runs, paired
from experiments.outcome import Arm
from experiments.statistics import estimate


def arms_of(measured: Measured) -> list[dict[str, str]]:
    """The arms with reported runs, the baseline first."""
    arms: list[dict[str, str]] = []
    for row in measured["runs"]:
        if row["arm"] not in arms:
            arms.append(row["arm"])
    return arms


def label(arm: dict[str, str]) -> str:
    return Arm.of(**arm).name


def plot_differences(measured: Measured) -> Figure:
    """Loss against learning rate, and the final loss minus the first arm's, paired by seed, with a 95% interval."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    sweep, differences = figure.subplots(1, 2)
    draw_sweep(sweep, measured)
    draw_differences(differences, measured)
    return figure


def draw_sweep(axes, measured: Measured) -> None:
    """Mean loss on the selection seeds against the learning rate. A cross at the top: a run diverged."""
    runs = Runs(measured["selection"])
    for number, arm in enumerate(arms_of(measured)):
        mine = runs.of(arm)
        lrs = sorted({row["lr"] for row in mine.rows})
        complete = [lr for lr in lrs if not mine.where(lr=lr).diverged]
        axes.plot(
            complete,
            [mean(mine.where(lr=lr).losses().values()) for lr in complete],
            "o-",
            color=f"C{number}",
            label=label(arm),
        )
        failed = [lr for lr in lrs if lr not in complete]
        axes.plot(failed, [0.97] * len(failed), "x", color=f"C{number}", transform=axes.get_xaxis_transform())
    axes.set(xscale="log", xlabel="learning rate", ylabel="validation loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)


def draw_differences(axes, measured: Measured) -> None:
    """A dot per seed, and the mean with its interval, for every arm but the first."""
    runs = Runs(measured["runs"])
    baseline, *others = arms_of(measured)
    for height, arm in enumerate(others):
        values = paired(runs.of(arm), runs.of(baseline))
        failed = runs.of(arm).diverged
        if values:
            found = estimate(values)
            axes.plot(values, [height] * len(values), "o", color="0.6", markersize=4)
            axes.errorbar(found.mean, height, xerr=found.half_width, fmt="o", mfc="white", color="C0", capsize=4)
        if failed:
            axes.text(0.99, height, f"{failed} diverged", ha="right", transform=axes.get_yaxis_transform())
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(others)), [label(arm) for arm in others])
    axes.set_ylim(len(others) - 0.5, -0.5)
    axes.set_xlabel(f"loss minus that of {label(baseline)} (nats)")
    axes.grid(axis="x", alpha=0.3)
