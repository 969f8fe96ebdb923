"""`python ablate.py compare DIR DIR ...`: what differs between runs, in their settings and in their losses.

It only reads. Runs that differ in nothing but their seed are an arm; that of the first run is the baseline. Of a run
that was resumed with other options, the last ones count.
"""

import csv
import re
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

from config import DEFAULTS, as_text, split
from experiments.ablation.grid import Cell, compared
from experiments.ablation.outcome import Arm, Outcome, read_outcome
from experiments.ablation.plots import arm_styles, plot_curves
from experiments.ablation.report import NONE, PARTIAL, Comparison, comparison_section, missing, table
from experiments.ablation.run import write_files
from files import digest, read_json, require
from machine.process import bad_input
from norms.registry import TRAITS, Traits
from runtime.flags import Parser
from runtime.plugins import import_first
from runtime.run_dir import RUNS_FOLDER, check_run_dir, read_rows, read_run_file

Settings = dict[Path, dict[str, str]]  # options of each run, as flags take them
PAIRED_BY = ("data", "tokenizer", "batch_size", "context", "eval_tokens")  # besides the seed
NAMED = 3  # settings in the name of an arm; one that needs more is named after its first run, without its seed


def main(arguments: list[str]) -> None:
    """Compare existing runs: differing settings, final losses, curves. The arm of the first run is the baseline."""
    parser = Parser(prog="ablate.py compare", description=main.__doc__)
    what = "directory of a run, or of an ablation for the runs that it reports"
    parser.add_argument("runs", nargs="+", metavar="DIR", help=what)
    parser.add_argument("--out", metavar="DIR", help="folder for the results (default: runs/compare-HASH of the runs)")
    import_first(parser, arguments)
    asked = parser.read(arguments[1:])
    with bad_input():
        folders = find_runs(asked["runs"])
        settings = {folder: read_settings(folder) for folder in folders}
        logs = {folder: read_rows(folder / "metrics.jsonl") for folder in folders}
        name = f"compare-{digest([str(folder.resolve()) for folder in folders])[:8]}"
        out = Path(asked.get("out") or RUNS_FOLDER / name)
        taken = (out / "run.json").exists() or (out / "cells").exists()
        require(not taken, f"--out {out} holds runs, with a report of their own; choose another folder")
        out.mkdir(parents=True, exist_ok=True)
    options = [name for name in settings[folders[0]] if name not in ("seed", "folder")]
    differing = [name for name in options if len({run[name] for run in settings.values()}) > 1]
    arms, configs, runs = arms_of(settings, differing or ["norm", "placement"]), {}, {}
    for folder, run in settings.items():
        log, steps, vocab_size = logs[folder], int(run["steps"]), int(run["vocab_size"])
        runs[folder] = read_outcome(arms[folder], float(run["lr"]), int(run["seed"]), log, steps, vocab_size)
        with suppress(ValueError):  # its norm or placement is not imported
            configs[arms[folder]] = split(DEFAULTS | read_run_file(folder / "run.json")["resolved"])
    comparison = summarize(settings, runs, differing)
    figures = {"curves": plot_curves(list(runs.values()), arm_styles(arms.values()), "", ["step", "tokens", "seconds"])}
    named = {str(folder): run for folder, run in runs.items()}
    write_files(out, f"Comparison of {len(folders)} runs", comparison, named, configs, [], figures)
    print(f"{comparison.text[0]}\nsee {out}/report.html or {out}/table.md")


def find_runs(names: list[str]) -> list[Path]:
    """The directories of the runs, with those that each ablation reports. Raises ValueError if one has no run.

    Files beside runs and earlier comparisons are ignored, so that `runs/*` names all runs.
    """
    found: dict[Path, Path] = {}  # keys are resolved paths
    for folder in map(Path, names):
        if folder.is_file() or ((folder / "report.json").exists() and not (folder / "cells").exists()):
            continue
        file, report = folder / "runs.csv", folder / "report.json"
        summary = read_json(report, dict).get("summary") if report.exists() else PARTIAL
        ended = not ((folder / "cells").exists() and str(summary).startswith(PARTIAL))
        require(ended, f"{folder} has not ended; continue it, or name runs of it, such as {folder}/cells/*-seed0")
        lines = file.read_text("utf-8", "replace").splitlines() if file.exists() else []
        rows = [row for row in csv.DictReader(lines) if row.get("run")]
        cells = [folder / "cells" / row["run"] for row in rows if row.get("search") != "True"]
        for run in cells or [folder]:
            check_run_dir(run, exists=True)
            found.setdefault(run.resolve(), run)
    require(len(found) > 1, f"compare needs at least two runs, not {len(found)}")
    return list(found.values())


def read_settings(folder: Path) -> dict[str, str]:
    """The options that can change a run's results. What comes from files has a part of their hash."""
    run = read_run_file(folder / "run.json")
    settings = {name: as_text(value) for name, value in compared(run["resolved"]).items()}
    for kind in ("norm", "placement"):
        arguments = settings.pop(f"{kind}_args").replace(" ", ",")
        settings[kind] += f":{arguments}" if arguments else ""
    imported = {f"{record['file']}@{record['sha256'][:6]}" for record in run["imports"]}
    settings["imports"] = " ".join(sorted(imported)) or "none"
    if TRAITS.get(run["resolved"]["norm"], Traits()).per_token:
        settings["micro_batch_size"] = settings["batch_size"]  # micro-batches change rounding only
    if "weights_from" in run:
        settings["init_from"] += f"@{digest(run['weights_from']['sha256'])[:6]}"
    settings["data"] = f"{run['corpus']['name']}@{run['corpus']['hash'][:6]}"
    del settings["val_data"], settings["text_column"]  # the hash covers them
    settings["tokenizer"] += f"@{run['tokenizer']['hash'][:6]}"
    return settings | {"folder": str(folder.parent.parent if folder.parent.name == "cells" else folder)}


def arms_of(settings: Settings, names: list[str]) -> dict[Path, Arm]:
    """The arm of each run: the settings `names`, and the folder if another run has the same of these and seed."""
    distinct = set(map(itemgetter("seed", *names), settings.values()))
    if len(distinct) < len(settings):
        names = [*names, "folder"]
    arms = {folder: Arm(tuple((name, run[name]) for name in names)) for folder, run in settings.items()}
    if len(names) > NAMED:
        first = {arm: folder for folder, arm in reversed(arms.items())}
        short = {arm: re.sub(r"-seed\d+$", "", folder.name) for arm, folder in first.items()}
        unique = len(set(short.values())) == len(short)
        arms = {folder: Arm.of(run=short[arm] if unique else str(first[arm])) for folder, arm in arms.items()}
    return arms


def summarize(settings: Settings, runs: dict[Path, Outcome], differing: list[str]) -> Comparison:
    """What was found, with a table of the runs."""
    paired, rows, notes = {}, [], []
    baseline, first = next(iter(settings.items()))
    for folder, run in settings.items():
        outcome = runs[folder]
        losses = [row["val_bpb"] for row in outcome.log if row.get("val_bpb") is not None]
        last, step = f"{losses[-1]:.4f}" if losses else NONE, f"{outcome.step} of {run['steps']}"
        rows.append([str(folder), run["seed"], *(run[name] for name in differing), step, last])
        if outcome.diverged or outcome.val_bpb is None:
            how = "diverged" if outcome.diverged else "has not ended: it is"
            notes.append(f"{folder} {how} at step {step}, its last val_bpb is {last}.")
        if other := [name.replace("_", " ") for name in PAIRED_BY if run[name] != first[name]]:
            notes.append(f"Not paired with {runs[baseline].arm.name}: {outcome.arm.name} (other {', '.join(other)}).")
        else:
            paired[Cell(outcome.arm, outcome.lr, outcome.seed)] = outcome
    comparison = comparison_section(list(paired), paired)
    text = comparison.text
    if not differing and not comparison.found:
        text[0] = f"The runs differ in their seed only. {text[0]}"
    text[0] = " ".join(filter(None, [missing(runs, runs), text[0], *dict.fromkeys(notes)]))
    text += ["## Runs", table(["run", "seed", *differing, "step", "val_bpb"], rows)]
    return comparison
