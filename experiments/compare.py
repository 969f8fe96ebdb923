"""`python ablate.py compare DIR DIR ...`: what differs between runs, in their settings and in their losses.

It only reads. Runs that differ in nothing but their seed are an arm; that of the first run is the baseline.
"""

import hashlib
import math
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from config import Parser, require
from experiments.ablation.grid import Cell, Outcomes, compared
from experiments.ablation.outcome import Arm, read_outcome
from experiments.ablation.plots import CROSS, METRICS, looks
from experiments.ablation.report import INCOMPLETE, NONE, comparison_section, table
from files import write_atomically
from runtime.process import bad_input
from runtime.report import figure, markdown, page, save_plot, shown
from runtime.run_dir import RUNS_FOLDER, check_run_dir, read_rows, read_run_file

Settings = dict[Path, dict[str, str]]  # of each run, as flags take them
Logs = dict[Path, list[dict[str, Any]]]
PAIRED_BY = ("data", "tokenizer", "batch_size", "context", "eval_tokens")  # and by the seed
NAMED = 3  # settings in the name of an arm; one that needs more is named after its first run
COLUMNS = 6  # more runs than this are the rows of their table
FINAL = {"val_bpb": ".4f", "val_loss": ".4f", "train_loss": ".4f", "tokens": ",", "seconds": ",.0f"}
HOW_TO_READ = (
    "Means over n seeds have 95% intervals. Differences are paired: the same seed gives the same batches. p is that of "
    "a paired t test, corrected by Holm's method; `detectable` is the smallest true difference that so many seeds show "
    f"in four of five experiments. {INCOMPLETE} Other runs diverged or have not ended. Seconds depend on the machine."
)


def main(arguments: list[str]) -> None:
    """Compare runs that exist: differing settings, final losses, curves. The arm of the first is the baseline."""
    parser = Parser(prog="ablate.py compare", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="DIR", help="directory of a run, or of an ablation for all its runs")
    parser.add_argument("--out", metavar="DIR", help="where the page goes (default: runs/compare-HASH of the runs)")
    flags = parser.parse_args(arguments)
    with bad_input():
        folders = find_runs(flags.runs)
        settings = {folder: read_settings(folder) for folder in folders}
        logs = {folder: read_rows(folder / "metrics.jsonl") for folder in folders}
        digest = hashlib.sha256(" ".join(str(folder.resolve()) for folder in folders).encode()).hexdigest()
        out = Path(flags.out or RUNS_FOLDER / f"compare-{digest[:8]}")
        out.mkdir(parents=True, exist_ok=True)
    options = [name for name in settings[folders[0]] if name not in ("seed", "folder")]
    differing = [name for name in options if len({run[name] for run in settings.values()}) > 1]
    arms = arms_of(settings, differing or ["norm", "placement"])
    summary, *tables = describe(settings, logs, arms, differing)
    plot = plot_curves(logs, arms)
    save_plot(plot, out / "compare.png")
    write_atomically(out / "compare.md", "\n\n".join([summary, "![loss curves](compare.png)", *tables]) + "\n")
    sections = [markdown(summary), figure(plot, alt="losses of the runs"), markdown("\n\n".join(tables))]
    write_atomically(out / "compare.html", page(f"Comparison of {len(folders)} runs", sections))
    print(f"{summary}\nsee {out}/compare.html or {out}/compare.md")


def find_runs(names: list[str]) -> list[Path]:
    """The directories of the runs, with those of each ablation. Raises ValueError if one is neither."""
    found: list[Path] = []
    for folder in map(Path, names):
        cells = sorted(file.parent for file in folder.glob("cells/*/run.json"))
        if not cells:
            check_run_dir(folder, exists=True)
        found += cells or [folder]
    require(len(set(found)) > 1, f"compare needs at least two runs; {names[0]} is one")
    return list(dict.fromkeys(found))


def read_settings(folder: Path) -> dict[str, str]:
    """The options that can change a run's results. Text, tokenizer and norms from files have a part of their hash."""
    run = read_run_file(folder / "run.json")
    settings = {name: shown(value) for name, value in compared(run["model"], run["training"]).items()}
    imported = [record["sha256"][:6] for record in run["imports"] if settings["norm"] in record["norms"]]
    norm_args = settings.pop("norm_args").replace(" ", ",")
    settings["norm"] = "@".join([settings["norm"], *imported]) + (norm_args and f":{norm_args}")
    settings["data"] = f"{run['corpus']['name']}@{run['corpus']['hash'][:6]}"
    settings["tokenizer"] += f"@{run['tokenizer']['hash'][:6]}"
    return settings | {"folder": str(folder.parent.parent if folder.parent.name == "cells" else folder)}


def arms_of(settings: Settings, names: list[str]) -> dict[Path, Arm]:
    """The arm of each run: the settings `names`, and the folder if another run has the same of these and seed."""
    if len({(run["seed"], *(run[name] for name in names)) for run in settings.values()}) < len(settings):
        names = [*names, "folder"]
    arms = {folder: Arm(tuple((name, run[name]) for name in names)) for folder, run in settings.items()}
    first = {arm: Arm.of(run=str(folder)) for folder, arm in reversed(arms.items())}
    return arms if len(names) <= NAMED else {folder: first[arm] for folder, arm in arms.items()}


def describe(settings: Settings, logs: Logs, arms: dict[Path, Arm], differing: list[str]) -> list[str]:
    """What was found, in a paragraph, and the tables of arms and of runs."""
    paired: list[Cell] = []
    outcomes: Outcomes = {}
    notes: list[str] = []
    bpb: dict[Path, str] = {}
    columns = [["run", "seed", *differing, "step", *FINAL]]
    baseline, first = next(iter(settings.items()))
    for folder, run in settings.items():
        log, steps, cell = logs[folder], int(run["steps"]), Cell(arms[folder], float(run["lr"]), int(run["seed"]))
        last = {name: value for row in log for name, value in row.items()}
        losses = [f"{last[name]:{spec}}" if name in last else NONE for name, spec in FINAL.items()]
        step = f"{last.get('step', 0)} of {steps}"
        bpb[folder] = losses[0]
        columns.append([str(folder), run["seed"], *(run[name] for name in differing), step, *losses])
        outcome = read_outcome(cell.arm, cell.lr, cell.seed, log, steps, math.log(int(run["vocab_size"])))
        if outcome:
            outcomes[cell] = outcome
        if outcome is None or outcome.diverged:
            how = "diverged" if outcome else "has not ended: it is"
            notes.append(f"{folder} {how} at step {step}, its last val_bpb is {bpb[folder]}.")
        if other := [name.replace("_", " ") for name in PAIRED_BY if run[name] != first[name]]:
            pair = f"{folder} (val_bpb {bpb[folder]}) and {baseline} (val_bpb {bpb[baseline]})"
            notes.append(f"{pair} are not paired: they differ in {', '.join(other)}.")
        else:
            paired.append(cell)
    summary, *tables = comparison_section(paired, outcomes, None)
    if not differing and len(set(arms.values())) == 1:
        summary = "The runs differ in their seed only."
    if texts := {"data", "tokenizer"} & set(differing):
        unfair = ", and of different texts not even that fairly" if "data" in texts else ""
        fair = f"only bits per byte of each one's own validation text (val_bpb) can be compared{unfair}"
        summary = f"The runs differ in {' and '.join(sorted(texts))}, so {fair}. {summary}".strip()
    titles, *rows = columns if len(columns) > COLUMNS + 1 else map(list, zip(*columns, strict=True))
    return [" ".join([summary, *notes]).strip(), *filter(None, tables), "## Runs", table(titles, rows), HOW_TO_READ]


def plot_curves(logs: Logs, arms: dict[Path, Arm]) -> Figure:
    """val_bpb and training loss over steps, tokens and seconds, one below the other, narrow enough for a phone."""
    look = looks(dict.fromkeys(arms.values()))
    plot = Figure(figsize=(5, 12 + 0.2 * len(look)), layout="constrained")
    panels = product(("val_bpb", "train_loss"), ("step", "tokens", "seconds"))
    for axes, (metric, unit) in zip(plot.subplots(6), panels, strict=True):
        for folder, log in logs.items():
            arm = arms[folder]
            at = {row["step"]: row[unit] for row in log if unit in row}
            points = [(at[row["step"]], row[metric]) for row in log if metric in row and row["step"] in at]
            marker = "o" if metric == "val_bpb" else ""
            xs, ys = zip(*points, strict=True) if points else ((), ())
            axes.plot(xs, ys, marker=marker, ms=3, label=arm.name, **look[arm])
            if points and "not_finite" in log[-1]:
                axes.plot(*points[-1], color=look[arm]["color"], **CROSS)
        axes.set_title(METRICS[metric], loc="left", fontsize="medium")
        axes.set_xlabel(unit)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.3)
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    plot.legend(lines.values(), lines.keys(), loc="outside upper center", fontsize="small")
    return plot
