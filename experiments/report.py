"""The tables of an ablation: one row per run, means and paired differences with 95% intervals."""

import csv
import io
from statistics import mean
from typing import Any

from experiments.outcome import Outcome, best_lr, by_arm, final_bpb, paired_differences
from experiments.statistics import estimate


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
