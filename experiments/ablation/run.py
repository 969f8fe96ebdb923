"""Norms × placements × other factors × seeds: which runs an ablation needs, and what it writes about them."""

import argparse
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from config import TrainConfig, check_sizes, require
from data.batches import evaluation_batches
from experiments.ablation.comparison import ended
from experiments.ablation.factors import check_comparable, resolve_factors
from experiments.ablation.formats import to_csv
from experiments.ablation.grid import MAX_SEEDS, Cell, Grid, cells, resolve_arms, settings_digest
from experiments.ablation.outcome import Arm, Outcome
from experiments.ablation.page import plot_title, write_pictures
from experiments.ablation.plots import plot_depth
from experiments.ablation.processes import resolve_devices
from experiments.ablation.report import Document, write_document
from experiments.probe import BlockStatistics, probe
from files import write_atomically
from model import Llama
from runtime.checkpoint import load_pretrained
from runtime.process import bad_input
from runtime.report import save_plot
from runtime.run import prepare_text
from runtime.run_dir import RUNS_FOLDER, check_not_in_use

MAX_PROCESSES = 1024  # at a time, or threads of each


@dataclass(frozen=True)
class Ablation:
    """A resolved ablation: its runs, and which of them to report."""

    grid: Grid
    lrs: list[float]  # learning rates to select from, with the shared one; empty without a sweep
    widen: int  # how many rates beyond them each arm may try
    seeds: range
    margin: float | None  # for tests of equivalence, in val_bpb
    probe: bool

    @property
    def folder(self) -> Path:
        return self.grid.folder

    @property
    def arms(self) -> list[Arm]:
        return list(self.grid.settings)

    @property
    def common(self) -> TrainConfig:
        """The training settings of the first arm: the learning rate and what is no factor are those of all."""
        return self.grid.settings[self.arms[0]][1]

    @property
    def reported(self) -> list[Cell]:
        """Every arm with every seed, at the shared learning rate."""
        return cells(self.arms, [self.common.lr], self.seeds)

    @property
    def selection(self) -> list[Cell]:
        """The runs that select each arm's learning rate, on seeds that are not reported."""
        return self.grid.selection(self.arms, self.lrs, self.seeds.start)

    def tried(self, found: dict[Cell, Outcome]) -> list[Cell]:
        """The runs that select learning rates, with those of `found` at rates beyond the sweep."""
        widened = [cell for cell in found if cell.seed not in self.seeds]
        return list(dict.fromkeys([*self.selection, *widened]))

    def at_best(self, best: dict[Arm, float]) -> list[Cell]:
        """Every arm with every seed, at the arm's own learning rate. Empty if there are none yet."""
        return [Cell(arm, best[arm], seed) for seed in self.seeds for arm in self.arms] if best else []


def resolve_ablation(flags: argparse.Namespace, train_flags: list[str]) -> Ablation:
    """Turn flags into an ablation, cheap checks first. Raises ValueError for invalid flags.

    `train_flags` are those of train.py, which every cell gets.
    """
    check_sizes(flags, "seeds", most=MAX_SEEDS)
    check_sizes(flags, "jobs", "threads", most=MAX_PROCESSES)
    require(all(0 < lr < math.inf for lr in flags.lrs), "--lrs must be positive numbers")
    require(flags.widen >= 0, f"--widen must be 0 or more, not {flags.widen}")
    require(not flags.widen or bool(flags.lrs), "--widen needs --lrs, the rates to start from")
    margin = flags.equivalence
    require(margin is None or 0 < margin < math.inf, f"--equivalence must be a positive number, not {margin}")
    arms = resolve_factors(flags)
    devices = resolve_devices(flags.device) if hasattr(flags, "device") else ("",)
    settings = resolve_arms(arms, [*train_flags, *(["--device", devices[0]] if devices[0] else [])])
    check_comparable(settings)
    model_config, config = next(iter(settings.values()))
    context = max(model_config.context for model_config, _ in settings.values())
    cores = torch.get_num_threads()
    torch.set_num_threads(flags.threads)  # a run's description of its device includes them
    folder = Path(getattr(flags, "out", "") or RUNS_FOLDER / f"ablation-{settings_digest(settings)}")
    check_not_in_use(folder)
    grid = Grid(
        folder=folder,
        settings=settings,
        train_flags=train_flags,
        data=prepare_text(replace(model_config, context=context), config),
        jobs=flags.jobs or (max(1, cores // flags.threads) if config.device == "cpu" else 1),
        threads=flags.threads,
        devices=devices,
    )
    lrs = sorted({*flags.lrs, config.lr}) if flags.lrs else []
    seeds = range(config.seed, config.seed + flags.seeds)
    ablation = Ablation(grid, lrs, flags.widen, seeds, margin, flags.probe)
    grid.check([*ablation.reported, *ablation.selection, *cells(ablation.arms, ablation.lrs, ablation.seeds)])
    (ablation.folder / "cells").mkdir(parents=True, exist_ok=True)
    return ablation


def run_ablation(ablation: Ablation, command: str) -> None:
    """Run what has not ended: all arms at the shared learning rate, then each at its best.

    Writes the tables after each run that ends, and everything at the end or when interrupted.
    """
    grid = ablation.grid
    write_atomically(ablation.folder / "command.txt", command + "\n")
    found = grid.outcomes([*ablation.reported, *ablation.selection])
    best: dict[Arm, float] = {}

    def record(outcomes: dict[Cell, Outcome]) -> None:
        found.update(outcomes)
        write_tables(ablation, found, best, command)

    try:
        found |= grid.run(ablation.reported, record)
        if ablation.lrs:
            selected, selection = grid.select_lrs(
                ablation.arms, ablation.lrs, ablation.seeds.start, ablation.widen, record
            )
            found |= selection
            best |= selected
            found |= grid.run(ablation.at_best(best), record)
    finally:
        if found:
            write_tables(ablation, found, best, command)
            runs = [ended(cells, found) for cells in (ablation.reported, ablation.at_best(best), ablation.tried(found))]
            write_pictures(grid, *runs)
    if ablation.probe:
        write_probes(ablation, found)


# --- what it writes --------------------------------------------------------------------------------------------------


def write_tables(ablation: Ablation, found: dict[Cell, Outcome], best: dict[Arm, float], command: str) -> None:
    """Write `runs.csv`, `table.md`, `table.csv` and `table.tex` about the runs that have ended."""
    tried, at_best = ablation.tried(found), ablation.at_best(best)
    runs = ended(dict.fromkeys([*ablation.reported, *tried, *at_best]), found)
    write_atomically(ablation.folder / "runs.csv", to_csv([run.row for run in runs]))
    document = Document(ablation.grid, ablation.seeds, ablation.margin, command, found)
    document.compare("shared", f"All arms at the same learning rate, {ablation.common.lr:g}", ablation.reported)
    if ablation.lrs:
        document.sweep(tried, best)
        document.compare("best", "Each arm at its best learning rate", at_best)
    write_document(document, ablation.folder)


def write_probes(ablation: Ablation, outcomes: dict[Cell, Outcome]) -> None:
    """Write `probe.csv` and `probe.png`: all runs at the shared learning rate, before and after training."""
    rows: list[dict[str, Any]] = []
    blocks: list[tuple[Arm, str, BlockStatistics]] = []
    reported = {cell: outcomes[cell] for cell in ablation.reported}
    for cell, outcome in reported.items():
        model_config, config = ablation.grid.settings[cell.arm]
        windows = evaluation_batches(ablation.grid.data.val.tokens, model_config.context, config.micro_batch_size)
        batch = next(windows)
        models = {"start": Llama(model_config, cell.seed)}
        if not outcome.diverged:
            with bad_input():  # the checkpoint may have been deleted
                models["end"] = load_pretrained(ablation.grid.checkpoint(cell), "cpu")[0]
        for when, model in models.items():
            torch.manual_seed(cell.seed)  # for dropout
            for block in probe(model, *batch):
                rows.append(dict(cell.arm.factors) | {"seed": cell.seed, "when": when} | asdict(block))
                blocks.append((cell.arm, when, block))
    write_atomically(ablation.folder / "probe.csv", to_csv(rows))
    title = plot_title(ablation.grid.settings, reported.values(), "before and after training")
    save_plot(plot_depth(blocks, title), ablation.folder / "probe.png")
