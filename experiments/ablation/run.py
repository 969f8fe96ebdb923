"""The command: which runs an ablation needs, and what it writes about them."""

import argparse
import csv
import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from config import check_sizes, require
from data.batches import evaluation_batches
from experiments.ablation.factors import resolve_factors
from experiments.ablation.grid import MAX_SEEDS, Cell, Grid, Outcomes, cells, resolve_arms, settings_digest
from experiments.ablation.outcome import Arm
from experiments.ablation.plots import plot_curves, plot_differences
from experiments.ablation.processes import resolve_devices
from experiments.ablation.report import comparison_section, introduction, sweep_section
from experiments.probe import probe
from files import write_atomically
from model import Llama
from runtime.checkpoint import load_pretrained
from runtime.process import bad_input
from runtime.report import figure, markdown, page, save_plot, settings_table
from runtime.run import prepare_text
from runtime.run_dir import RUNS, check_not_in_use


@dataclass(frozen=True)
class Ablation:
    """A resolved ablation."""

    grid: Grid
    lr: float  # of all arms, without a sweep
    lrs: list[float]  # learning rates to select from, with the shared one; empty without a sweep
    widen: int  # how many rates beyond them each arm may try
    seeds: range  # reported
    margin: float | None  # for tests of equivalence, in val_bpb
    probe: bool

    @property
    def arms(self) -> list[Arm]:
        return list(self.grid.settings)

    def reported(self, lrs: Mapping[Arm, float]) -> list[Cell]:
        """Every arm with every seed, at the arm's learning rate."""
        return [Cell(arm, lrs[arm], seed) for seed in self.seeds for arm in self.arms]


def resolve_ablation(flags: argparse.Namespace, train_flags: list[str]) -> Ablation:
    """Turn flags into an ablation, cheap checks first. Raises ValueError for invalid flags.

    `train_flags` are those of train.py, which every cell gets.
    """
    check_sizes(flags, "seeds", most=MAX_SEEDS)
    check_sizes(flags, "jobs", "threads", most=1024)
    require(all(0 < lr < math.inf for lr in flags.lrs), "--lrs must be positive numbers")
    require(flags.widen == 0 or (flags.widen > 0 and bool(flags.lrs)), "--widen must be 0 or more, and needs --lrs")
    margin = flags.equivalence
    require(margin is None or 0 < margin < math.inf, f"--equivalence must be a positive number, not {margin}")
    arms = resolve_factors(flags)
    devices = resolve_devices(flags.device) if hasattr(flags, "device") else ("",)
    on_device = [*train_flags, *(["--device", devices[0]] if devices[0] else [])]
    settings = resolve_arms(arms, on_device)
    folder = Path(getattr(flags, "out", "") or RUNS / f"ablation-{settings_digest(settings)}")
    check_not_in_use(folder)
    model_config, config = next(iter(settings.values()))
    context = max(model_config.context for model_config, _ in settings.values())
    cores = torch.get_num_threads()
    torch.set_num_threads(flags.threads)  # a run's description of its device includes them
    grid = Grid(
        folder=folder,
        settings=settings,
        train_flags=train_flags,
        data=prepare_text(flags, replace(model_config, context=context), config),
        jobs=flags.jobs or (max(1, cores // flags.threads) if config.device == "cpu" else 1),
        threads=flags.threads,
        devices=devices,
    )
    lrs = sorted({*flags.lrs, config.lr}) if flags.lrs else []
    seeds = range(config.seed, config.seed + flags.seeds)
    ablation = Ablation(grid, config.lr, lrs, flags.widen, seeds, margin, flags.probe)
    grid.check([*cells(arms, lrs or [config.lr], seeds), *grid.selection(arms, lrs, seeds.start)])
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    return ablation


def run_ablation(ablation: Ablation, command: str) -> None:
    """Run what has not ended, and write the report, also when interrupted."""
    grid, arms = ablation.grid, ablation.arms
    write_atomically(grid.folder / "command.txt", command + "\n")
    best = {} if ablation.lrs else dict.fromkeys(arms, ablation.lr)
    sweep = grid.selection(arms, ablation.lrs, ablation.seeds.start)
    try:
        if ablation.lrs:
            best, found = grid.select_lrs(arms, ablation.lrs, ablation.seeds.start, ablation.widen)
            sweep = list(found)
        grid.run(ablation.reported(best))
    finally:
        write_report(ablation, sweep, best, command)
    if ablation.probe:
        write_probes(ablation, grid.outcomes(ablation.reported(best)))


# --- what it writes --------------------------------------------------------------------------------------------------


def write_report(ablation: Ablation, sweep: list[Cell], best: dict[Arm, float], command: str) -> None:
    """Write `runs.csv`, `table.md`, the plots and `report.html` about the runs that have ended.

    `sweep` are the runs that select learning rates, and `best` is what they have selected: empty before all have ended.
    """
    grid, folder = ablation.grid, ablation.grid.folder
    reported = ablation.reported(best) if best else []
    outcomes = grid.outcomes(dict.fromkeys([*reported, *sweep]))
    if not outcomes:
        return
    write_csv(folder / "runs.csv", [run.row for run in outcomes.values()])
    blocks = introduction(grid, ablation.seeds, command)
    if sweep:
        blocks += sweep_section(sweep, outcomes, best)
    if reported:
        blocks += comparison_section(reported, outcomes, ablation.margin)
    text = "\n\n".join(filter(None, blocks)) + "\n"
    write_atomically(folder / "table.md", text)
    first_seed = f"seeds {ablation.seeds[0]} to {ablation.seeds[-1]}"
    figures = {}
    if runs := [outcomes[cell] for arm in ablation.arms for cell in reported if cell in outcomes and cell.arm == arm]:
        figures["curves"] = plot_curves(runs, first_seed)
        if len(ablation.arms) > 1 and runs[0].arm == ablation.arms[0]:
            figures["differences"] = plot_differences(runs, first_seed)
    for name, plot in figures.items():
        save_plot(plot, folder / f"{name}.png")
    model_config, config = next(iter(grid.settings.values()))
    sections = [
        markdown(text),
        *(figure(plot, alt=name) for name, plot in figures.items()),
        markdown("## Settings of the first arm"),
        settings_table(asdict(model_config) | asdict(config)),
    ]
    write_atomically(folder / "report.html", page(f"Ablation {folder.name}", sections))


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows that all have the same keys, with a header."""
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, file.getvalue())


def write_probes(ablation: Ablation, outcomes: Outcomes) -> None:
    """Write `probe.csv`: statistics of the blocks of all reported runs, before and after training."""
    rows: list[dict[str, Any]] = []
    for cell, outcome in outcomes.items():
        model_config, config = ablation.grid.settings[cell.arm]
        windows = evaluation_batches(ablation.grid.data.val.tokens, model_config.context, config.micro_batch_size)
        batch = next(windows)
        models = {"start": Llama(model_config, cell.seed)}
        if not outcome.diverged:
            with bad_input():  # the checkpoint may have been deleted
                models["end"] = load_pretrained(ablation.grid.cell_folder(cell))[0]
        for when, model in models.items():
            torch.manual_seed(cell.seed)  # for dropout
            blocks = probe(model, *batch)
            rows += [dict(cell.arm.factors) | {"seed": cell.seed, "when": when} | asdict(block) for block in blocks]
    write_csv(ablation.grid.folder / "probe.csv", rows)
