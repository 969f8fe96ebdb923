"""The tables of an ablation: one row per run, means and paired differences with 95% intervals."""

import csv
import io
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from experiments.statistics import estimate

Log = list[dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    A run diverged if its loss or a gradient was not finite at `step`, or if its final loss is above that of a uniform
    prediction. Losses are None if the last step was never evaluated.
    """

    norm: str
    placement: str
    lr: float
    seed: int
    diverged: bool
    step: int
    val_loss: float | None  # nats per token
    val_bpb: float | None  # bits per UTF-8 byte
    tokens_per_second: float | None  # median over the run
    seconds: float | None
    log: Log = field(repr=False)  # the rows of its metrics.jsonl

    @property
    def arm(self) -> str:
        return f"{self.norm} {self.placement}"

    @property
    def row(self) -> dict[str, Any]:
        """Its row in `runs.csv`."""
        return {column.name: getattr(self, column.name) for column in fields(self) if column.name != "log"}

    def __str__(self) -> str:
        result = f"diverged at step {self.step}" if self.diverged else f"val_bpb {self.val_bpb:.4f}"
        return f"{self.arm}, lr {self.lr:g}, seed {self.seed}: {result}"


def read_outcome(
    norm: str, placement: str, lr: float, seed: int, log: Log, steps: int, uniform_loss: float
) -> Outcome | None:
    """The outcome of a run of `steps` steps, or None if its log does not reach the end.

    `uniform_loss` is the loss of a uniform prediction, in nats per token.
    """
    last = log[-1] if log else {}
    finished = last.get("step") == steps and "val_loss" in last
    if not finished and "not_finite" not in last:
        return None
    training = [row for row in log if "train_loss" in row]
    return Outcome(
        norm,
        placement,
        lr,
        seed,
        diverged=not finished or last["val_loss"] > uniform_loss,
        step=last["step"],
        val_loss=last.get("val_loss"),
        val_bpb=last.get("val_bpb"),
        tokens_per_second=median(row["tokens_per_second"] for row in training) if training else None,
        seconds=training[-1]["seconds"] if training else None,
        log=log,
    )


def final_bpb(runs: Iterable[Outcome]) -> dict[int, float]:
    """val_bpb by seed, of the runs that did not diverge."""
    return {run.seed: run.val_bpb for run in runs if not run.diverged and run.val_bpb is not None}


def paired_differences(arm: list[Outcome], baseline: list[Outcome]) -> list[float]:
    """val_bpb of `arm` minus that of `baseline`, for each seed with which neither diverged."""
    arm_bpb, baseline_bpb = final_bpb(arm), final_bpb(baseline)
    return [arm_bpb[seed] - baseline_bpb[seed] for seed in arm_bpb if seed in baseline_bpb]


def best_lr(runs: list[Outcome]) -> float:
    """The learning rate with the fewest diverged `runs` of an arm and, to break ties, the lowest mean val_bpb."""

    def rank(lr: float) -> tuple[float, float, float]:
        at_lr = [run for run in runs if run.lr == lr]
        bpb = final_bpb(at_lr).values()
        return 1 - len(bpb) / len(at_lr), mean(bpb) if bpb else 0.0, lr

    return min({run.lr for run in runs}, key=rank)


def by_arm(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    arms: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        arms.setdefault(outcome.arm, []).append(outcome)
    return arms


# --- tables ----------------------------------------------------------------------------------------------------------


def to_csv(rows: list[dict[str, Any]]) -> str:
    """CSV with a header. All rows have the same keys."""
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def arms_table(outcomes: list[Outcome]) -> str:
    """Markdown, a row per arm. The first arm is the baseline."""
    arms = by_arm(outcomes)
    baseline = next(iter(arms))
    titles = [factor.replace("_", " ") for factor, _ in baseline.factors]
    titles += ["lr", "val_bpb", f"paired difference from {baseline.name}", "diverged", "tokens/s", "seconds"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for arm, runs in arms.items():
        differences = paired_differences(runs, arms[baseline]) if arm != baseline else []
        cells = [value for _, value in arm.factors] + [
            f"{runs[0].lr:g}",
            format_interval(list(final_bpb(runs).values())),
            format_interval(differences, sign="+"),
            f"{sum(run.diverged for run in runs)} of {len(runs)}",
            format_mean([run.tokens_per_second for run in runs]),
            format_mean([run.seconds for run in runs]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def lr_table(outcomes: list[Outcome]) -> str:
    """Markdown, a row per arm and a column per learning rate: mean val_bpb, the best in bold."""
    lrs = sorted({outcome.lr for outcome in outcomes})
    lines = [f"| arm | {' | '.join(f'{lr:g}' for lr in lrs)} |", "|---" * (len(lrs) + 1) + "|"]
    for arm, runs in by_arm(outcomes).items():
        cells = []
        for lr in lrs:
            at_lr = [run for run in runs if run.lr == lr]
            diverged = sum(run.diverged for run in at_lr)
            text = f"{diverged} of {len(at_lr)} diverged" if diverged else f"{mean(final_bpb(at_lr).values()):.4f}"
            cells.append(f"**{text}**" if lr == best_lr(runs) else text)
        lines.append(f"| {arm.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def format_interval(values: list[float], sign: str = "") -> str:
    """`1.7642 ± 0.0031`; without the interval for one value, or a dash if empty."""
    if not values:
        return "–"
    return f"{estimate(values):{sign}.4f}"


def format_mean(values: list[float | None]) -> str:
    """The mean of the values that are not None, without decimals, or a dash if empty."""
    present = [value for value in values if value is not None]
    return f"{mean(present):,.0f}" if present else "–"


# --- plots -----------------------------------------------------------------------------------------------------------


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
            (line,) = panel.plot(list(points), middle, ".-" if name == "val_bpb" else "-", label=arm)
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
    axes.set_yticks(range(len(others)), others)
    axes.set_ylim(len(others), -1)
    axes.set_xlabel(f"val_bpb minus that of {baseline}, paired by seed (left is better)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
