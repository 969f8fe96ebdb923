"""Norms × placements × seeds: which runs an ablation needs, running them, and writing the report.

An arm is a norm in a placement. A cell is one run of `train.py`: an arm at a learning rate with a seed, in a directory
of its own. Arms share their seeds, and so their initial draws and batches: they are compared in pairs.
"""

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import train
from config import ModelConfig, TrainConfig, check_sizes, require
from data.batches import Prepared, evaluation_batches, prepare
from experiments.probe import plot_depth, probe
from experiments.report import (
    Outcome,
    arms_table,
    best_lr,
    lr_table,
    plot_curves,
    plot_differences,
    read_outcome,
    to_csv,
)
from model import Llama
from norms import KINDS
from norms.placement import Unsupported
from runtime.checkpoint import load_model
from runtime.device import describe
from runtime.exit_codes import IN_USE, NOT_FINITE, CellFailed, Stopped, bad_input
from runtime.run_dir import RUNS, read_rows, write_atomically

SELECTION_SEEDS = 2  # seeds that select each arm's learning rate
MAX_SEEDS = 1000  # reported seeds; selection seeds start at this offset
POLL_SECONDS = 0.3  # between checks of the running cells
NOT_COMPARED = {"out", "cache_dir", "log", "keep", "save_every"}  # fields of TrainConfig that change no result


@dataclass(frozen=True)
class Arm:
    """A kind of norm, with or without arguments, in a placement."""

    norm: str  # as in --norms: KIND[:KEY=VALUE,...]
    placement: str

    @property
    def flags(self) -> list[str]:
        kind, _, norm_args = self.norm.partition(":")
        pairs = norm_args.split(",") if norm_args else []
        return ["--norm", kind, "--placement", self.placement, *(f"--norm-arg={pair}" for pair in pairs)]


@dataclass(frozen=True)
class Cell:
    """One run of `train.py`."""

    arm: Arm
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.=+-]", "-", f"{self.arm.norm}-{self.arm.placement}-lr{self.lr}-seed{self.seed}")

    @property
    def flags(self) -> list[str]:
        return [*self.arm.flags, "--lr", str(self.lr), "--seed", str(self.seed)]


@dataclass(frozen=True)
class Ablation:
    """A resolved ablation: the arms, the seeds, and how to run the cells."""

    folder: Path
    settings: dict[Arm, tuple[ModelConfig, TrainConfig]]  # with the shared learning rate and the first seed
    lrs: list[float]  # learning rates to select from; may be empty
    seeds: range
    train_flags: list[str]  # flags of train.py that all cells share
    data: Prepared
    jobs: int
    threads: int
    probe: bool

    @property
    def common(self) -> TrainConfig:
        """The training settings that all arms share."""
        return next(iter(self.settings.values()))[1]

    @property
    def reported(self) -> list[Cell]:
        """Every arm with every seed, at the shared learning rate."""
        return self.cells([self.common.lr], self.seeds)

    @property
    def selection(self) -> list[Cell]:
        """The runs that select each arm's learning rate, on seeds that are not reported."""
        first = self.seeds.start + MAX_SEEDS
        return self.cells(self.lrs, range(first, first + SELECTION_SEEDS))

    def cells(self, lrs: Iterable[float], seeds: Iterable[int]) -> list[Cell]:
        return [Cell(arm, lr, seed) for lr in lrs for seed in seeds for arm in self.settings]

    def cell_folder(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name

    def outcome(self, cell: Cell) -> Outcome | None:
        """The outcome of a cell, or None if it has not ended."""
        rows = read_rows(self.cell_folder(cell) / "metrics.jsonl")
        uniform_loss = math.log(self.settings[cell.arm][0].vocab_size)
        return read_outcome(
            cell.arm.norm, cell.arm.placement, cell.lr, cell.seed, rows, self.common.steps, uniform_loss
        )

    def outcomes(self, cells: Iterable[Cell]) -> dict[Cell, Outcome]:
        """The outcomes of those of `cells` that have ended."""
        return {cell: outcome for cell in cells if (outcome := self.outcome(cell))}


# --- from flags to an ablation ---------------------------------------------------------------------------------------


def resolve_ablation(flags: argparse.Namespace, train_flags: list[str]) -> Ablation:
    """Turn flags into an ablation, cheap checks first. Raises ValueError for invalid flags.

    `train_flags` are those of train.py, which every cell gets.
    """
    check_sizes(flags, "seeds", "jobs", "threads")
    require(flags.seeds <= MAX_SEEDS, f"--seeds must be at most {MAX_SEEDS}, not {flags.seeds}")
    require(all(0 < lr < math.inf for lr in flags.lrs), "--lrs must be positive numbers")
    for name in ("norm", "placement"):
        require(not hasattr(flags, name), f"--{name} is for a single run; use --{name}s here and list all of them")
    for kind in (norm.partition(":")[0] for norm in flags.norms):
        require(kind in KINDS, f"--norms: unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    settings = resolve_arms(flags.norms, flags.placements, train_flags)
    model_config, config = next(iter(settings.values()))
    cores = torch.get_num_threads()
    torch.set_num_threads(flags.threads)  # a run's description of its device includes them
    data = prepare(config.data, config.tokenizer, model_config.vocab_size, Path(config.cache_dir), model_config.context)
    ablation = Ablation(
        folder=Path(getattr(flags, "out", "") or RUNS / f"ablation-{settings_digest(settings)}"),
        settings=settings,
        lrs=sorted(set(flags.lrs)),
        seeds=range(config.seed, config.seed + flags.seeds),
        train_flags=train_flags,
        data=data,
        jobs=flags.jobs or (max(1, cores // flags.threads) if config.device == "cpu" else 1),
        threads=flags.threads,
        probe=flags.probe,
    )
    check_existing_cells(ablation)
    (ablation.folder / "cells").mkdir(parents=True, exist_ok=True)
    return ablation


def resolve_arms(
    norms: list[str], placements: list[str], train_flags: list[str]
) -> dict[Arm, tuple[ModelConfig, TrainConfig]]:
    """The configurations of each arm. Prints why it skips an unsupported combination.

    Raises ValueError if no arm is left.
    """
    settings, reason = {}, ""
    for arm in dict.fromkeys(Arm(norm, placement) for norm in norms for placement in placements):
        try:
            settings[arm] = train.resolve(train.parse([*train_flags, *arm.flags]))
        except Unsupported as error:
            reason = str(error)
            print(f"skipped: {reason}", file=sys.stderr)
    require(bool(settings), reason)
    return settings


def settings_digest(settings: dict[Arm, tuple[ModelConfig, TrainConfig]]) -> str:
    """Short hash of the compared settings. More seeds or learning rates do not change it."""
    config = next(iter(settings.values()))[1]
    training = {name: value for name, value in asdict(config).items() if name not in NOT_COMPARED}
    arms = [[asdict(arm), asdict(model_config)] for arm, (model_config, _) in settings.items()]
    return hashlib.sha256(json.dumps([training, arms]).encode()).hexdigest()[:8]


def check_existing_cells(ablation: Ablation) -> None:
    """Raise ValueError if the folder does not belong to an ablation, or holds a cell trained with other settings."""
    folder = ablation.folder
    if folder.exists() and not (folder / "cells").is_dir():
        require(folder.is_dir() and not any(folder.iterdir()), f"--out {folder} is not empty; choose another folder")
    compared = [field.name for field in fields(TrainConfig) if field.name not in NOT_COMPARED]
    here = f"{describe(torch.device(ablation.common.device))} with torch {torch.__version__}"
    for cell in (*ablation.reported, *ablation.selection, *ablation.cells(ablation.lrs, ablation.seeds)):
        run_file = ablation.cell_folder(cell) / "run.json"
        if run_file.exists():
            model_config, config = ablation.settings[cell.arm]
            config = replace(config, lr=cell.lr, seed=cell.seed)
            train.check_same_settings(run_file, model_config, config, compared)
            train.check_same_text(run_file, ablation.data)
            run = json.loads(run_file.read_text())
            there = f"{run['device']} with torch {run['versions']['torch']}"
            require(there == here, f"the run in {run_file.parent} was trained on {there}, not {here}")


# --- running the cells -----------------------------------------------------------------------------------------------


def run_grid(ablation: Ablation) -> dict[Cell, Outcome]:
    """Run the cells that have not ended: all arms at the shared learning rate, then each at its best of `lrs`."""
    cells, steps = [*ablation.reported, *ablation.selection], ablation.common.steps
    at_most = len(cells) + (len(ablation.reported) if ablation.lrs else 0)
    progress = tqdm(
        total=at_most * steps,
        initial=len(ablation.outcomes(cells)) * steps,
        unit="step",
        smoothing=0,  # estimate the remaining time from the mean speed
        disable=None,
        dynamic_ncols=True,
    )
    with train.stop_requests() as stop, progress as bar:
        outcomes: dict[Cell, Outcome] = {}
        run_cells(ablation, cells, outcomes, bar, stop)
        if ablation.lrs:
            at_best = [cell for cell in cells_at_best_lr(ablation, outcomes) if cell not in outcomes]
            bar.total = (len(outcomes) + len(at_best)) * steps
            run_cells(ablation, at_best, outcomes, bar, stop)
            cells += at_best
    return {cell: outcomes[cell] for cell in cells}  # in this order, whichever ended first


def cells_at_best_lr(ablation: Ablation, outcomes: dict[Cell, Outcome]) -> list[Cell]:
    """Every arm with every seed, at the learning rate that was best for the arm on the selection seeds."""
    best = {
        arm: best_lr([outcomes[cell] for cell in ablation.selection if cell.arm == arm]) for arm in ablation.settings
    }
    return [Cell(arm, best[arm], seed) for seed in ablation.seeds for arm in ablation.settings]


def run_cells(ablation: Ablation, cells: list[Cell], outcomes: dict[Cell, Outcome], bar: tqdm, stop: list[int]) -> None:
    """Run those of `cells` that have not ended, `jobs` at a time, and add all their outcomes to `outcomes`.

    Raises Stopped after a signal and CellFailed if a run fails. Running cells save before either.
    """
    outcomes |= ablation.outcomes(cells)
    waiting = [cell for cell in cells if cell not in outcomes]
    running: dict[Cell, subprocess.Popen] = {}
    try:
        while waiting or running:
            while waiting and len(running) < ablation.jobs:
                cell = waiting.pop(0)
                running[cell] = start_cell(ablation, cell)
            time.sleep(POLL_SECONDS)
            if stop:
                raise Stopped(stop[0], "the same command")
            for cell, process in list(running.items()):
                if process.poll() is not None:
                    del running[cell]
                    if process.returncode == IN_USE:  # a process of a killed ablation still holds the lock: retry
                        waiting.append(cell)
                        continue
                    outcomes[cell] = finished_outcome(ablation, cell, process.returncode)
                    bar.write(str(outcomes[cell]))
            steps = sum(steps_done(ablation, cell) for cell in running)
            bar.update(len(outcomes) * ablation.common.steps + steps - bar.n)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def start_cell(ablation: Ablation, cell: Cell) -> subprocess.Popen:
    """Start or resume a cell in a process of its own. Its output goes to a log file next to its folder."""
    folder = ablation.cell_folder(cell)
    flags = ["--resume"] if (folder / "run.json").exists() else [*ablation.train_flags, *cell.flags]
    threads = {name: str(ablation.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with open(f"{folder}.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, train.__file__, *flags, "--out", str(folder)],
            env=os.environ | threads,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
        )


def finished_outcome(ablation: Ablation, cell: Cell, code: int) -> Outcome:
    """The outcome of a cell whose process ended with exit code `code`. Raises CellFailed if the run failed."""
    outcome = ablation.outcome(cell)
    if outcome is None or code not in (0, NOT_FINITE):
        log = Path(f"{ablation.cell_folder(cell)}.log")
        raise CellFailed(str(log), code, log.read_text().strip().rpartition("\n")[2])
    return outcome


def steps_done(ablation: Ablation, cell: Cell) -> int:
    rows = read_rows(ablation.cell_folder(cell) / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


# --- the report ------------------------------------------------------------------------------------------------------


def write_report(ablation: Ablation, outcomes: dict[Cell, Outcome], command: str) -> None:
    """Write `runs.csv`, `table.md`, the plots and `command.txt`."""
    folder, config = ablation.folder, ablation.common
    write_atomically(folder / "command.txt", command + "\n")
    write_atomically(folder / "runs.csv", to_csv([outcome.row for outcome in outcomes.values()]))
    reported = [outcomes[cell] for cell in ablation.reported]
    kernels = "with the CPU kernels" if config.fast else "in plain PyTorch"
    sections = [
        f"`{command}`",
        f"{config.steps} steps, seeds {ablation.seeds[0]} to {ablation.seeds[-1]}, on "
        f"{describe(torch.device(config.device))} in {config.dtype} {kernels}, {ablation.jobs} runs at a time, torch "
        f"{torch.__version__}. val_bpb is the mean over the seeds ± the half-width of its 95% interval (Student's t). "
        "Differences from the first row are paired: each seed gives both arms the same initial draws and batches. "
        "Below zero is better. Each interval is for one comparison; among many, some miss the true value. Means leave "
        "out runs that diverged: their loss was not finite, or ended above that of a uniform prediction.",
        f"## All arms at the same learning rate, {config.lr:g}",
        arms_table(reported),
    ]
    plot_curves(reported, folder / "curves.png")
    plot_differences(reported, folder / "differences.png")
    if ablation.lrs:
        at_best = [outcomes[cell] for cell in cells_at_best_lr(ablation, outcomes)]
        sections += [
            "## Each arm at its best learning rate",
            f"Selected by mean val_bpb on {SELECTION_SEEDS} seeds that are not reported. If the best is the lowest "
            "or the highest, a wider sweep may find a better one:",
            lr_table([outcomes[cell] for cell in ablation.selection]),
            "On the reported seeds:",
            arms_table(at_best),
        ]
        plot_curves(at_best, folder / "curves-best.png")
        plot_differences(at_best, folder / "differences-best.png")
    write_atomically(folder / "table.md", "\n\n".join(section.strip() for section in sections) + "\n")


def write_probes(ablation: Ablation, outcomes: dict[Cell, Outcome]) -> None:
    """Write `probe.csv` and `probe.png`: all runs at the shared learning rate, before and after training."""
    rows: list[dict[str, Any]] = []
    for cell in ablation.reported:
        model_config, config = ablation.settings[cell.arm]
        windows = evaluation_batches(ablation.data.val.tokens, model_config.context, config.micro_batch_size)
        batch = next(windows)
        models = {"start": Llama(model_config, cell.seed)}
        if not outcomes[cell].diverged:
            checkpoint = ablation.cell_folder(cell) / "checkpoints" / f"step-{config.steps:06d}"
            with bad_input():  # the checkpoint may have been deleted
                models["end"] = load_model(checkpoint, "cpu")[0]
        for when, model in models.items():
            torch.manual_seed(cell.seed)  # for dropout
            rows += [
                asdict(cell.arm) | {"seed": cell.seed, "when": when} | asdict(block) for block in probe(model, *batch)
            ]
    write_atomically(ablation.folder / "probe.csv", to_csv(rows))
    plot_depth(rows, ablation.folder / "probe.png")
