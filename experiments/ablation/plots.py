"""The plots of an ablation. In all of them an arm has the same color, line and marker.

Each function gets the outcomes, of which the first arm is the baseline, and a title that says what was run. It returns
a Figure, to be saved or put on a page.
"""

import math
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.ablation.outcome import Arm, Outcome, best_lr, by_arm, final_bpb, paired_differences
from experiments.ablation.styles import DIVERGED, Style, Styles
from experiments.probe import BlockStatistics
from experiments.statistics import estimate

COLUMNS = 3  # of panels


def plot_differences(outcomes: list[Outcome], title: str) -> Figure:
    """Final val_bpb minus the baseline's: a dot per seed, and hollow the mean with its 95% interval.

    An arm of which a run diverged gets a cross. It has no mean, as if one of the baseline did: that of the remaining
    seeds could be too good.
    """
    arms = by_arm(outcomes)
    styles = Styles(arms)
    baseline, *others = arms
    figure = Figure(figsize=(9, 2.0 + 0.32 * len(others)), layout="constrained")
    axes = figure.subplots()
    for height, arm in enumerate(others):
        differences, style = paired_differences(arms[arm], arms[baseline]), styles[arm]
        diverged = sum(run.diverged for run in arms[arm])
        axes.plot(differences, _jittered(height, len(differences)), "o", color=style.color, alpha=0.6, markersize=4)
        note = f" n = {len(differences)}"
        if diverged:
            axes.plot(1, height, transform=axes.get_yaxis_transform(), color=style.color, **DIVERGED)
            note += f", {diverged} of {len(arms[arm])} diverged"
        if len(differences) == len(arms[arm]):
            found = estimate(differences)
            look = {"color": style.color, "marker": style.marker, "mfc": "none", "markersize": 9, "capsize": 4}
            for bar in axes.errorbar(found.mean, height, xerr=found.half_width, **look)[2]:
                bar.set_linestyle(style.line)
        axes.text(1.01, height, note, transform=axes.get_yaxis_transform(), va="center")
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(others)), [arm.name for arm in others])
    axes.set_ylim(len(others) - 0.4, -0.6)
    lost = sum(run.diverged for run in arms[baseline])
    axes.set_xlabel(
        f"val_bpb minus that of {baseline.name}, paired by seed (left is better)"
        + (f"\n{lost} of {len(arms[baseline])} runs of {baseline.name} diverged" if lost else "")
    )
    axes.set_title(title, fontsize="medium")
    axes.grid(axis="x", alpha=0.3)
    return figure


def _jittered(height: float, count: int) -> list[float]:
    """Heights evenly spread around `height`, so that equal values stay visible."""
    return [height + 0.3 * ((i + 0.5) / count - 0.5) for i in range(count)]


METRICS = {"train_loss": "training loss (nats per token)", "val_bpb": "validation bits per byte"}


def plot_curves(outcomes: list[Outcome], title: str) -> Figure:
    """Each arm's mean training loss and val_bpb over the steps that all its runs logged.

    A line ends with a cross if one of its runs diverged.
    """
    arms = by_arm(outcomes)
    styles = Styles(arms)
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    for axes, (metric, label) in zip(figure.subplots(1, 2), METRICS.items(), strict=True):
        for arm, runs in arms.items():
            means = {step: mean(values.values()) for step, values in _complete(runs, metric).items()}
            _draw_line(axes, means, styles[arm], any(run.diverged for run in runs), linewidth=1)
        axes.set(xlabel="step", ylabel=label)
    _finish(figure, title, styles)
    return figure


def plot_paired_curves(outcomes: list[Outcome], title: str) -> Figure:
    """As `plot_curves`, minus the baseline with the same seed, with 95% intervals. Many arms get several panels.

    Runs of one seed share their batches, so these differences vary less than the losses do.
    """
    arms = by_arm(outcomes)
    styles = Styles(arms)
    baseline, *others = arms
    groups = styles.groups(others)
    figure, blocks = _panels(len(groups), blocks=2)
    for panels, (metric, label) in zip(blocks, METRICS.items(), strict=True):
        bands: list[tuple[int, float, float]] = []
        for axes, group in zip(panels, groups, strict=True):
            for arm in group:
                points = {step: estimate(found) for step, found in _paired(arms[arm], arms[baseline], metric).items()}
                low = [found.mean - (found.half_width or 0.0) for found in points.values()]
                high = [found.mean + (found.half_width or 0.0) for found in points.values()]
                axes.fill_between(list(points), low, high, color=styles[arm].color, alpha=0.2, linewidth=0)
                middle = {step: found.mean for step, found in points.items()}
                _draw_line(axes, middle, styles[arm], any(run.diverged for run in arms[arm]))
                bands += zip(points, low, high, strict=True)
            axes.axhline(0, color="0.3", linewidth=1)
            axes.set_xlabel("step")
        panels[0].set_ylabel(f"Δ {label}")
        panels[0].set_ylim(_limits_of_later_steps(bands))
    _finish(figure, f"{title}\nΔ: minus {baseline.name} with the same seed, mean and 95% interval", styles)
    return figure


def _complete(runs: list[Outcome], name: str) -> dict[int, dict[int, float]]:
    """By step and seed, the values of a metric at the steps that all runs logged."""
    steps: dict[int, dict[int, float]] = {}
    for run in runs:
        for row in run.log:
            if name in row:
                steps.setdefault(row["step"], {})[run.seed] = row[name]
    return {step: values for step, values in sorted(steps.items()) if len(values) == len(runs)}


def _paired(arm: list[Outcome], baseline: list[Outcome], name: str) -> dict[int, list[float]]:
    """By step, a metric of `arm` minus that of `baseline` with the same seed, over the seeds that both have."""
    seeds = {run.seed for run in arm} & {run.seed for run in baseline}
    ours, theirs = (_complete([run for run in runs if run.seed in seeds], name) for runs in (arm, baseline))
    return {step: [ours[step][seed] - theirs[step][seed] for seed in seeds] for step in ours if step in theirs}


def _panels(count: int, blocks: int = 1) -> tuple[Figure, list[list[Axes]]]:
    """A figure with blocks of panels, one below the other. The panels of a block share their axes."""
    columns, rows = min(count, COLUMNS), math.ceil(count / COLUMNS)
    figure = Figure(figsize=(max(8.0, 1.5 + 3.2 * columns), blocks * rows * (4.5 if blocks == rows == 1 else 3.2)))
    figure.set_layout_engine("constrained")
    grid = figure.subplots(blocks * rows, columns, squeeze=False)
    found = [list(grid[block * rows : (block + 1) * rows].flat) for block in range(blocks)]
    for panels in found:
        for axes in panels[count:]:
            axes.remove()
        for axes in panels[1:count]:
            axes.sharex(panels[0])
            axes.sharey(panels[0])
    return figure, [panels[:count] for panels in found]


def _draw_line(axes: Axes, points: dict[int, float], style: Style, diverged: bool, linewidth: float = 1.5) -> None:
    axes.plot(
        list(points), list(points.values()), color=style.color, linestyle=style.line, linewidth=linewidth,
        marker=style.line_marker, markevery=0.1,
    )  # fmt: skip
    if points and diverged:
        axes.plot(*list(points.items())[-1], color=style.color, **DIVERGED)


def _limits_of_later_steps(bands: list[tuple[int, float, float]]) -> tuple[float, float]:
    """Limits that show 0 and all intervals (step, low, high) but those of the first quarter, which are large."""
    last = max((step for step, _, _ in bands), default=0)
    later = [(low, high) for step, low, high in bands if step >= last / 4]
    low, high = min([0.0, *(low for low, _ in later)]), max([0.0, *(high for _, high in later)])
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def _finish(figure: Figure, title: str, styles: Styles) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    figure.legend(handles=styles.handles(), loc="outside right center")


def plot_sweep(outcomes: list[Outcome], title: str) -> Figure:
    """Final val_bpb against the learning rate: a dot per run, and a line per arm through the means.

    A ring marks each arm's best learning rate. A rate at which a run diverged has no mean; it has a cross at the top
    edge, and the line leads to the first such rate. Many arms get several panels, with the other arms in gray.
    """
    arms = by_arm(outcomes)
    styles = Styles(arms)
    groups = styles.groups(list(arms))
    figure, [panels] = _panels(len(groups))
    found = [bpb for _, bpb in _finite(outcomes)] or [0.0, 1.0]
    margin = 0.08 * (max(found) - min(found) or 1.0)
    top = max(found) + margin
    lrs = sorted({run.lr for run in outcomes})
    aside = (lrs[-1] / lrs[0]) ** (0.17 / max(len(lrs) - 1, 1))  # between the crosses of arms that share a rate
    for axes, group in zip(panels, groups, strict=True):
        for arm, runs in arms.items():
            if arm in group:
                shift = aside ** (group.index(arm) - (len(group) - 1) / 2)
                _draw_sweep(axes, runs, styles[arm], top, shift)
            else:
                means = _means_by_lr(runs)
                axes.plot(list(means), list(means.values()), color="0.85", linewidth=1, zorder=0)
        axes.set(xscale="log", xlabel="learning rate", ylim=(min(found) - margin, top))
    panels[0].set_ylabel("val_bpb")
    _finish(figure, title, styles)
    return figure


def _draw_sweep(axes: Axes, runs: list[Outcome], style: Style, top: float, shift: float) -> None:
    """One arm of a sweep. Its crosses are at `top`, and at its learning rates times `shift`."""
    means, best = _means_by_lr(runs), best_lr(runs)
    axes.plot(list(means), list(means.values()), color=style.color, linestyle=style.line)
    finite = _finite(runs)
    axes.plot(
        [lr for lr, _ in finite], [bpb for _, bpb in finite], style.marker, color=style.color, alpha=0.5, markersize=4
    )
    if best in means:
        axes.plot(best, means[best], "o", mfc="none", color=style.color, markersize=11, markeredgewidth=2)
    failed = sorted({run.lr for run in runs if run.diverged})
    if failed:
        axes.plot([lr * shift for lr in failed], [top] * len(failed), color=style.color, **DIVERGED)
    beyond = [lr for lr in failed if means and lr > max(means)]
    if beyond:
        last, first = max(means), beyond[0] * shift
        axes.plot([last, first], [means[last], top], color=style.color, linestyle=style.line, alpha=0.4)


def _finite(runs: list[Outcome]) -> list[tuple[float, float]]:
    """Learning rate and val_bpb of the runs that did not diverge."""
    return [(run.lr, run.val_bpb) for run in runs if not run.diverged and run.val_bpb is not None]


def _means_by_lr(runs: list[Outcome]) -> dict[float, float]:
    """Mean val_bpb at the learning rates at which no run diverged."""
    failed = {run.lr for run in runs if run.diverged}
    rates = sorted({run.lr for run in runs} - failed)
    return {lr: mean(final_bpb(run for run in runs if run.lr == lr).values()) for lr in rates}


DEPTH = {"residual_rms": "RMS of the residual stream", "grad_norm": "gradient norm", "gain_mean": "mean gain"}


def plot_depth(blocks: list[tuple[Arm, str, BlockStatistics]], title: str) -> Figure:
    """Each arm's means over depth, at the "start" (upper row) and at the "end" of training, as the probe found them."""
    arms = list(dict.fromkeys(arm for arm, _, _ in blocks))
    styles = Styles(arms)
    figure = Figure(figsize=(12, 7), layout="constrained")
    rows = figure.subplots(2, len(DEPTH), sharex=True, sharey="col")
    for row, when in zip(rows, ("start", "end"), strict=True):
        for axes, (name, label) in zip(row, DEPTH.items(), strict=True):
            for arm in arms:
                values: dict[int, list[float]] = {}
                for found in (block for its_arm, at, block in blocks if (its_arm, at) == (arm, when)):
                    if getattr(found, name) is not None:
                        values.setdefault(found.block, []).append(getattr(found, name))
                _draw_line(axes, {block: mean(seeds) for block, seeds in values.items()}, styles[arm], diverged=False)
            axes.set(title=f"{label}, {when} of training", yscale="linear" if name == "gain_mean" else "log")
            axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in rows[-1]:
        axes.set_xlabel("block (0 is the embedding)")
    _finish(figure, title, styles)
    return figure
