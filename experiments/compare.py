"""`python ablate.py compare DIR DIR ...`: the report on runs that exist.

It changes none of them. Each DIR is a run, an ablation, or a folder with only the `runs.csv` of one. Runs that differ
in nothing but their seed are an arm; that of the first run is the baseline. Of a run that was resumed with other
options, the last ones count.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from config import DEFAULTS, configs_of
from experiments.costs import costs
from experiments.records import SEARCH, Arm, Record, commits_of, outcome, read_csv, settings_of
from experiments.report import make_report
from files import digest, require, warn
from machine.process import bad_input
from runtime.flags import Parser
from runtime.run_dir import RUNS_FOLDER, machine_of, read_rows, read_run_file


def main(arguments: list[str]) -> None:
    """Report on existing runs: what differs, and whether that is chance. The arm of the first run is the baseline."""
    parser = Parser(prog="ablate.py compare", description=main.__doc__)
    parser.add_argument("runs", nargs="+", metavar="DIR", help="of a run or an ablation, or with its runs.csv")
    parser.add_argument("--out", metavar="DIR", help="folder for the results (default: runs/compare-HASH of the runs)")
    asked = parser.read(arguments[1:])
    with bad_input():
        folders = [*map(Path, asked["runs"])]
        records = find_records(folders)
        name = f"compare-{digest([str(folder.resolve()) for folder in folders])[:8]}"
        out = Path(asked.get("out") or RUNS_FOLDER / name)
        taken = (out / "run.json").exists() or (out / "cells").exists() or out.resolve() in map(Path.resolve, folders)
        require(not taken, f"--out {out} holds runs, with a report of their own; choose another folder")
        out.mkdir(parents=True, exist_ok=True)
    summary = make_report(out, records)
    print(*summary, f"see {out}/report.html or {out}/table.md", sep="\n")


def find_records(folders: list[Path]) -> list[Record]:
    """The runs in all folders. Raises ValueError if one has no run.

    Files beside runs are ignored. A run that an earlier report has as well counts once, so that `runs/*` names all.
    """
    found = dict[tuple, Record]()
    taken = dict[tuple, tuple]()
    texts = dict[str, str]()
    for folder in folders:
        if folder.is_file():
            continue
        file = folder / "runs.csv"
        cells = {path.parent.name for path in folder.glob("cells/*/run.json")}
        require(file.is_file() or (folder / "run.json").is_file(), f"{folder} has no run.json and no runs.csv")
        records = read_csv(file) if file.is_file() else [read_run(folder)]
        if others := cells - {record.run for record in records}:
            warn(f"runs in {folder}/cells left out, because runs.csv does not have them: {len(others)}")
        for record in records:
            if text := record.settings.get("data"):  # it may have several names, and gets the first
                record.settings["data"] = texts.setdefault(text.rpartition("@")[2], text)
            if record.run in cells:  # elsewhere, another run may stand where that of a report did
                record = read_run(record.path, record)
            known = record.arm, record.lr, record.seed, *record.settings.items()  # of a run that has logged no seconds
            same = Path(record.run).name, record.val_bpb, record.seconds or known
            if same not in found or (record.log and not found[same].log):
                found[same] = record
            require(record.val_bpb or not record.val_loss, f"{record.run} has no val_bpb; train with --tokenizer DIR")
            key = record.folder, record.lr, record.seed, str(record.options)
            require(taken.setdefault(key, same) == same, f"{record.run} has options and seed of another run; name one")
    require(len(found) > 1, f"compare needs at least two runs, not {len(found)}; name folders, not files")
    one = len({record.folder for record in found.values()}) == 1  # relative times of two ablations do not compare
    return [record if one else replace(record, step_time=None) for record in found.values()]


def read_run(folder: Path, planned: Record | None = None) -> Record:
    """The record of a run directory, or what has come of a `planned` run. Raises ValueError if it is damaged."""
    run = read_run_file(folder / "run.json")
    log = read_rows(folder / "metrics.jsonl")
    resolved = DEFAULTS | run["resolved"]
    values = outcome(log, resolved["steps"], resolved["vocab_size"]) | {
        "machine": machine_of(run),
        "commit": commits_of(run),
        "lost": run["tokenizer"].get("lost", 0.0),
    }
    if not planned:
        search = folder.parent.name == "cells" and resolved["seed"] >= SEARCH
        values |= {"settings": settings_of(run), "run": str(folder), "folder": str(folder.parent)}
        planned = Record(Arm(), resolved["lr"], resolved["seed"], search)
        with suppress(ValueError):  # its norm or placement is not imported
            values |= costs(*configs_of(resolved))
    return replace(planned, **values)
