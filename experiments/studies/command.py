"""`python ablate.py claim NAME`: the runs of a study, made by the grid of an ablation, and what follows from them."""

import json
import math
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from config import DEVICES, Asked
from data.batches import evaluation_batches
from data.corpus import RULES, Corpus
from experiments.ablation.grid import Cell, Grid, prepare_text, resolve_arms, resolve_devices, settings_digest
from experiments.ablation.outcome import Arm, Outcome, grouped
from experiments.ablation.rates import SPACING
from experiments.studies import trained, untrained
from experiments.studies.page import RESULTS, read_entries, write_page
from experiments.studies.study import Measured, Protocol, Row, Study
from files import commit, digest, lock_file, read_json, require, write_atomically
from machine.device import describe
from machine.process import bad_input
from runtime.checkpoint import load_pretrained
from runtime.flags import Parser, read_train
from runtime.run_dir import LOCK, RUNS_FOLDER, read_run_file
from runtime.watch import stream_rms

STUDIES = {study.name: study for study in (*untrained.STUDIES, *trained.STUDIES)}
RUNS = RUNS_FOLDER / "claims"
WIDEN = 14  # rates and seeds that an arm may try beyond the first ones
THREADS = 1  # CPU threads of each run; another number changes the last digits


def main(arguments: list[str]) -> None:
    """Test a claim and write CLAIMS.md. Continues if it was stopped. Without NAME, only write the page."""
    parser = Parser(prog="ablate.py claim", description=main.__doc__)
    add = parser.add_argument
    add("name", nargs="?", default=None, choices=STUDIES, metavar="NAME", help=", ".join(STUDIES))
    add("--scale", default=None, help="scale of the protocol, such as S or gpu (default: all except gpu)")
    add("--out", type=Path, default=Path(), metavar="DIR", help="folder of CLAIMS.md and results/ (default: .)")
    add("--seed", type=int, default=0, metavar="INT", help="first seed (default: 0)")
    add("--jobs", type=int, default=2, metavar="INT", help="runs at a time (default: 2)")
    add("--device", default="cpu", help=f"{DEVICES}; cuda:0,1 spreads the runs over two GPUs (default: cpu)")
    add("--cache-dir", default=".cache", metavar="DIR", help="directory for prepared corpora (default: .cache)")
    asked = parser.read(arguments[1:])
    name, scale, out = asked["name"], asked["scale"], asked["out"]
    results = out / RESULTS
    if name:
        study = STUDIES[name]
        scales = [scale] if scale else list(study.protocols)
        with bad_input():
            for flag, least in (("jobs", 1), ("seed", 0)):
                require(asked[flag] >= least, f"--{flag} must be at least {least}, not {asked[flag]}")
            require(scales[0] in study.scales, f"--scale {scale}: choose from {', '.join(study.scales)}")
            asked["devices"] = resolve_devices(asked["device"])
            for folder in (RUNS, results):
                folder.mkdir(parents=True, exist_ok=True)
        with lock_file(RUNS / LOCK):
            for scale in scales:
                run_study(study, scale, asked, results / f"{name}.json")
    with bad_input():
        require(name or not scale, f"--scale {scale} needs the NAME of a claim")
        entries = read_entries(STUDIES.values(), results)
        require(entries, f"there are no results in {results}; name a claim: {', '.join(STUDIES)}")
    write_page(entries, out)
    verdicts = {entry.study.name: entry.verdict for entry in entries}
    for each in [name] if name else STUDIES:
        print(f"{each}: {verdicts.get(each, 'not run')}")
    print(f"see {out / 'CLAIMS.md'}")


def run_study(study: Study, scale: str, asked: Asked, file: Path) -> None:
    """Measure a study at a scale and add that to `file`, by the scale and the rules of the corpus.

    So a result on text that other rules split stays, and the new one stands beside it.
    """
    protocol, started = study.scales[scale], time.process_time()
    seeds, rules = range(asked["seed"], asked["seed"] + protocol.seeds), RULES if protocol.arms else ""
    with bad_input():
        content: dict[str, Any] = read_json(file, dict) if file.exists() else {}
    if study.measure and not protocol.arms:
        values = {seed: study.measure(protocol, seed) for seed in seeds}
        rows = [{"arm": arm, "seed": seed, "value": values[seed][arm]} for seed in seeds for arm in values[seed]]
        measured: Measured = {"runs": rows, "search": [], "device": describe(torch.device("cpu"))}
    else:
        measured = train_arms(protocol, seeds, asked)
    rows = measured["runs"] + measured["search"]
    seconds = time.process_time() - started + sum(row.get("seconds") or 0 for row in rows)
    environment = {
        "protocol": study.hash(scale, rules),
        "commits": sorted({row.get("commit", commit()) or "unknown" for row in rows}),
        "device": measured.pop("device"),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hours": round(seconds / 3600, 3),
    }
    content[f"{scale}, {rules}" if rules else scale] = {"environment": environment, "measured": measured}
    write_atomically(file, json.dumps(content) + "\n")


def train_arms(protocol: Protocol, seeds: range, asked: Asked) -> Measured:
    """Train every arm with every seed, at its best learning rate or at all of its rates."""
    measured: Measured = {"runs": [], "search": [], "corpora": {}, "optima": {}}
    optima = measured["optima"]
    for data, group in grouped((runs.data, (name, runs)) for name, runs in protocol.arms.items()).items():
        arms = {name: Arm.of(**runs.factors) for name, runs in group}
        with bad_input():  # the text may need a download
            grid = make_grid(protocol.flags, list(arms.values()), data, seeds, asked)
        starts = {}
        for name, runs in group:
            if runs.lr:
                starts[arms[name]] = [float(f"{runs.lr * SPACING**power:.3g}") for power in range(-2, 3)]
        found, tried = grid.tune(starts, WIDEN)
        nats_per_bit = [run.val_loss / run.val_bpb for run in tried.values() if run.val_loss and run.val_bpb]
        optima |= {name: asdict(found[arms[name]].scaled(nats_per_bit[0])) for name in arms if arms[name] in found}
        cells = [
            Cell(arms[name], lr, seed)
            for seed in seeds  # all arms in turn, so that a stopped measurement has pairs
            for name, runs in group
            for lr in runs.lrs or (optima[runs.like or name]["lr"],)
        ]
        measured["runs"] += rows_of(grid, grid.run(cells), arms)
        measured["search"] += rows_of(grid, tried, arms)
        measured["corpora"][data] = grid.data.corpus_hash
    measured["initial"] = math.log(grid.data.tokenizer.vocab_size)
    return measured | {"device": describe(torch.device(grid.devices[0]))}


def make_grid(flags: str, arms: list[Arm], data: str, seeds: range, asked: Asked) -> Grid:
    """The runs on one text. Studies with the same flags share a folder, and so their runs."""
    devices, cache_dir = asked["devices"], asked["cache_dir"]
    source = excerpt(int(data), cache_dir) if data.isdigit() else ["--data", data]
    shared = read_train([*flags.split(), *source, "--device", devices[0], "--cache-dir", cache_dir])
    torch.set_num_threads(THREADS)  # a run's description of its device includes them
    base = resolve_arms([Arm(())], shared)
    text = prepare_text(base)
    folder = RUNS / digest([settings_digest(base), text.corpus_hash])[:8]
    return Grid(folder, resolve_arms(arms, shared), shared, text, seeds, asked["jobs"], THREADS, devices)


def rows_of(grid: Grid, outcomes: Mapping[Cell, Outcome], arms: Mapping[str, Arm]) -> list[Row]:
    """Runs as results have them. The value is the last loss, in nats per token, and None if the run diverged."""
    names, rows = {arm: name for name, arm in arms.items()}, []
    for cell, run in outcomes.items():
        folder, residual_rms = grid.cell_folder(cell), None
        if not run.diverged:
            model = load_pretrained(folder)[0]
            tokens, _ = next(evaluation_batches(grid.data.val, model.config.context, 8))
            residual_rms = [round(value, 6) for value in stream_rms(model.train(), tokens)]
        row = {"arm": names[cell.arm], "lr": cell.lr, "seed": cell.seed}
        row |= {"value": None if run.diverged else run.val_loss, "best": run.best_val_loss, "seconds": run.seconds}
        made_by = read_run_file(folder / "run.json")["commit"]
        rows.append(row | {"residual_rms": residual_rms, "commit": made_by})
    return rows


def excerpt(size: int, cache_dir: str) -> list[str]:
    """Flags for `size` bytes of the default corpus's training documents, with all of its validation documents."""
    corpus, flags = Corpus(["python"], Path(cache_dir)), []
    for flag, split, most in (("--data", "train", size), ("--val-data", "val", math.inf)):
        path = RUNS / f"python-{corpus.hash[:8]}-{most}.jsonl"
        if not path.exists():
            kept = []
            for part, _, chunks in corpus.parts():
                text = "".join(chunks) if part == split else ""
                if text and (length := len(text.encode())) <= most:
                    kept.append(json.dumps({"text": text}) + "\n")
                    most -= length
            write_atomically(path, "".join(kept))
        flags += [flag, str(path)]
    return flags
