"""Figures that several claims share. All take a claim's measurements and draw losses in nats per token."""

from collections.abc import Sequence
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.claims.claim import Measured
from experiments.claims.runs import Runs, paired
from experiments.statistics import estimate

ArmFactors = dict[str, str]
UNSAID = ("eval_every", "save_every")  # factors that only follow from others


def arms_of(measured: Measured) -> list[ArmFactors]:
    """The arms with reported runs, the baseline first."""
    arms: list[ArmFactors] = []
    for row in measured["runs"]:
        if row["arm"] not in arms:
            arms.append(row["arm"])
    return arms


def labels(arms: Sequence[ArmFactors]) -> list[str]:
    """What distinguishes each arm from the others: `post, warmup 0`."""
    names = [name for name in dict.fromkeys(name for arm in arms for name in arm) if name not in UNSAID]
    varying = [name for name in names if len({arm.get(name) for arm in arms}) > 1]
    return [
        ", ".join(
            arm[name] if name in ("norm", "placement") else f"{name.replace('_', ' ')} {arm[name]}"
            for name in varying or names
            if name in arm
        )
        for arm in arms
    ]


def plot_differences(measured: Measured, pairs: Sequence[tuple[ArmFactors, ArmFactors]] = ()) -> Figure:
    """Loss against learning rate; and the final loss of the first minus the second arm of `pairs`, paired by seed.

    By default, every arm is paired with the first.
    """
    arms = arms_of(measured)
    names = labels(arms)
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    sweep, differences = figure.subplots(1, 2)
    draw_sweep(sweep, measured)
    draw_differences(differences, measured, pairs or [(arm, arms[0]) for arm in arms[1:]])
    columns = 4 if max(map(len, names)) < 20 else 3
    figure.legend(*sweep.get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    return figure


def draw_sweep(axes: Axes, measured: Measured) -> None:
    """Mean loss on the selection seeds against the learning rate. A cross at the top: a run diverged."""
    runs, arms = Runs(measured["selection"]), arms_of(measured)
    for number, (arm, name) in enumerate(zip(arms, labels(arms), strict=True)):
        mine = runs.of(arm)
        lrs = sorted({row["lr"] for row in mine.rows})
        complete = [lr for lr in lrs if not mine.where(lr=lr).diverged]
        losses = [mean(mine.where(lr=lr).losses().values()) for lr in complete]
        axes.plot(complete, losses, "o-", color=f"C{number}", label=name)
        failed = [lr for lr in lrs if lr not in complete]
        axes.plot(failed, [0.97] * len(failed), "x", color=f"C{number}", transform=axes.get_xaxis_transform())
    axes.set(xscale="log", xlabel="learning rate", ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.3)


def draw_differences(axes: Axes, measured: Measured, pairs: Sequence[tuple[ArmFactors, ArmFactors]]) -> None:
    """A dot per seed, and the mean with its interval, in the color of the first arm of each pair."""
    runs, arms = Runs(measured["runs"]), arms_of(measured)
    names = dict(zip(map(str, arms), labels(arms), strict=True))
    for height, (arm, baseline) in enumerate(pairs):
        color = f"C{arms.index(arm)}"
        values = paired(runs.of(arm), runs.of(baseline))
        if len(values) > 1:
            found = estimate(values)
            axes.plot(values, [height] * len(values), "o", color=color, alpha=0.4, markersize=4)
            axes.errorbar(found.mean, height, xerr=found.half_width, fmt="o", mfc="white", color=color, capsize=4)
        if failed := runs.of(arm).diverged:
            axes.text(0.99, height, f"{failed} diverged", ha="right", transform=axes.get_yaxis_transform())
    axes.axvline(0, color="0.3", linewidth=1)
    shared = len({str(baseline) for _, baseline in pairs}) == 1
    titles = [names[str(arm)] if shared else f"{names[str(arm)]}\n− {names[str(base)]}" for arm, base in pairs]
    axes.set_yticks(range(len(pairs)), titles, fontsize="small")
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.set_xlabel(f"loss minus that of {names[str(pairs[0][1])]} (nats)" if shared else "difference of losses (nats)")
    axes.grid(axis="x", alpha=0.3)
