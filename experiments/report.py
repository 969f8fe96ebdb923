"""What an ablation found: one row per run, means and paired differences with 95 % intervals, two plots."""

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from matplotlib.figure import Figure

Log = list[dict[str, Any]]
Interval = tuple[float, float | None]  # a mean, and half the width of its interval where there is more than one value


@dataclass(frozen=True)
class Outcome:
    """How one run ended.

    A run has diverged if its loss or a gradient was no longer finite at `step`, or if it ended above the loss of
    guessing blindly. Losses are None where the last step was never evaluated.
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
    log: Log = field(repr=False)  # its metrics.jsonl

    @property
    def arm(self) -> str:
        return f"{self.norm} {self.placement}"

    @property
    def row(self) -> dict[str, Any]:
        """What `runs.csv` says of it."""
        return {knob.name: getattr(self, knob.name) for knob in fields(self) if knob.name != "log"}

    def __str__(self) -> str:
        ending = f"diverged at step {self.step}" if self.diverged else f"val_bpb {self.val_bpb:.4f}"
        return f"{self.arm}, rate {self.lr:g}, seed {self.seed}: {ending}"


def read_outcome(
    norm: str, placement: str, lr: float, seed: int, log: Log, steps: int, guessing: float
) -> Outcome | None:
    """The outcome of a run of `steps` steps, or None if its log has no end. `guessing` costs so many nats a token."""
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
        diverged=not finished or last["val_loss"] > guessing,
        step=last["step"],
        val_loss=last.get("val_loss"),
        val_bpb=last.get("val_bpb"),
        tokens_per_second=median(row["tokens_per_second"] for row in training) if training else None,
        seconds=training[-1]["seconds"] if training else None,
        log=log,
    )


# --- figures ---------------------------------------------------------------------------------------------------------


def mean_interval(values: list[float]) -> Interval:
    """Mean and half-width of its 95 % interval by Student's t."""
    if len(values) < 2:
        return mean(values), None
    return mean(values), t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def t_quantile(freedom: int) -> float:
    """What |T| stays below with probability 0.95, by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(middle, freedom) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _t_probability(theta: float, freedom: int) -> float:
    """P(|T| < √freedom · tan θ), a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    odd = freedom % 2
    term = math.cos(theta) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(theta) ** 2
        total += term
    return (theta + math.sin(theta) * total) * 2 / math.pi if odd else math.sin(theta) * total


def final_bpb(runs: Iterable[Outcome]) -> dict[int, float]:
    """val_bpb by seed, of the runs that did not diverge."""
    return {run.seed: run.val_bpb for run in runs if not run.diverged and run.val_bpb is not None}


def paired_differences(arm: list[Outcome], baseline: list[Outcome]) -> list[float]:
    """val_bpb of `arm` less that of `baseline`, for each seed with which neither diverged."""
    here, there = final_bpb(arm), final_bpb(baseline)
    return [here[seed] - there[seed] for seed in here if seed in there]


def by_arm(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    arms: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        arms.setdefault(outcome.arm, []).append(outcome)
    return arms


# --- the table -------------------------------------------------------------------------------------------------------


def as_csv(rows: list[dict[str, Any]]) -> str:
    """The rows, which have the same keys, under a heading of these."""
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def table(outcomes: list[Outcome]) -> str:
    """Markdown, a row per arm; the first is the baseline."""
    arms = by_arm(outcomes)
    baseline = next(iter(arms))
    lines = [
        f"| norm | placement | rate | val_bpb | less {baseline}, paired | diverged | tokens/s | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, runs in arms.items():
        differences = paired_differences(runs, arms[baseline]) if arm != baseline else []
        cells = [
            runs[0].norm,
            runs[0].placement,
            f"{runs[0].lr:g}",
            show_interval(list(final_bpb(runs).values())),
            show_interval(differences, sign="+"),
            f"{sum(run.diverged for run in runs)} of {len(runs)}",
            show_mean([run.tokens_per_second for run in runs]),
            show_mean([run.seconds for run in runs]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def show_interval(values: list[float], sign: str = "") -> str:
    """`1.7642 ± 0.0031`, without the interval for one value, and a dash for none."""
    if not values:
        return "–"
    middle, half = mean_interval(values)
    return f"{middle:{sign}.4f}" + ("" if half is None else f" ± {half:.4f}")


def show_mean(values: list[float | None]) -> str:
    """Without decimals, over the runs that got as far as to say."""
    said = [value for value in values if value is not None]
    return f"{mean(said):,.0f}" if said else "–"


def rates_table(picking: list[Outcome]) -> str:
    """Markdown, a row per arm and a column per rate: mean val_bpb of the runs that pick one, the best in bold."""
    rates = sorted({outcome.lr for outcome in picking})
    lines = [f"| arm | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---" * (len(rates) + 1) + "|"]
    for arm, runs in by_arm(picking).items():
        cells = []
        for rate in rates:
            there = [run for run in runs if run.lr == rate]
            lost = sum(run.diverged for run in there)
            text = f"{lost} of {len(there)} diverged" if lost else f"{mean(final_bpb(there).values()):.4f}"
            cells.append(f"**{text}**" if rate == best_rate(runs) else text)
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def best_rate(runs: list[Outcome]) -> float:
    """The learning rate at which the fewest of an arm's `runs` diverged and, among such, val_bpb is lowest."""

    def badness(rate: float) -> tuple[float, float, float]:
        there = [run for run in runs if run.lr == rate]
        ended = final_bpb(there).values()
        return 1 - len(ended) / len(there), mean(ended) if ended else 0.0, rate

    return min({run.lr for run in runs}, key=badness)


# --- plots -----------------------------------------------------------------------------------------------------------


def plot_curves(outcomes: list[Outcome], path: Path) -> None:
    """Training loss and val_bpb over the steps that all runs of an arm took: their mean, and its 95 % interval."""
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
            points = {step: mean_interval(there) for step, there in values.items() if len(there) == len(runs)}
            middle = [point[0] for point in points.values()]
            half = [point[1] or 0.0 for point in points.values()]
            (line,) = panel.plot(list(points), middle, ".-" if name == "val_bpb" else "-", label=arm)
            low, high = ([m + sign * h for m, h in zip(middle, half, strict=True)] for sign in (-1, 1))
            panel.fill_between(list(points), low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        panel.set(xlabel="step", ylabel=label)
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path, dpi=120)


def plot_differences(outcomes: list[Outcome], path: Path) -> None:
    """val_bpb less the baseline's at the last step: each seed a dot, the mean and its 95 % interval a bar."""
    arms = by_arm(outcomes)
    baseline, *others = arms
    figure = Figure(figsize=(8, 1.6 + 0.4 * len(others)), layout="constrained")
    axes = figure.subplots()
    for height, arm in enumerate(others):
        differences = paired_differences(arms[arm], arms[baseline])
        if not differences:
            axes.text(0, height, " diverged", va="center")
            continue
        middle, half = mean_interval(differences)
        axes.plot(differences, [height] * len(differences), "o", color="0.6", markersize=4)
        axes.errorbar(middle, height, xerr=half, fmt="s", color="C0", capsize=4)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(others)), others)
    axes.set_ylim(len(others), -1)
    axes.set_xlabel(f"val_bpb less that of {baseline}, seed by seed (left is better)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
