"""Norms × placements × seeds: which runs an ablation needs, and its report."""

import argparse
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from config import TrainConfig, check_sizes, require
from data.batches import evaluation_batches, prepare
from experiments.grid import MAX_SEEDS, SELECTION_SEEDS, Cell, Grid, cells, resolve_arms, settings_digest
from experiments.outcome import Arm, Outcome
from experiments.page import plot_title, write_pictures
from experiments.plots import plot_depth
from experiments.probe import BlockStatistics, probe
from experiments.report import arms_table, lr_table, to_csv
from model import Llama
from norms import KINDS
from runtime.checkpoint import load_model
from runtime.device import describe
from runtime.exit_codes import bad_input
from runtime.run_dir import RUNS, write_atomically
from runtime.run_report import DPI


@dataclass(frozen=True)
class Ablation:
    """A resolved ablation: its runs, and which of them to report."""

    grid: Grid
    lrs: list[float]  # learning rates to select from; may be empty
    seeds: range
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
    arms = [Arm.of(norm=norm, placement=placement) for norm in flags.norms for placement in flags.placements]
    settings = resolve_arms(arms, train_flags)
    model_config, config = next(iter(settings.values()))
    cores = torch.get_num_threads()
    torch.set_num_threads(flags.threads)  # a run's description of its device includes them
    grid = Grid(
        folder=Path(getattr(flags, "out", "") or RUNS / f"ablation-{settings_digest(settings)}"),
        settings=settings,
        train_flags=train_flags,
        data=prepare(
            config.data, config.tokenizer, model_config.vocab_size, Path(config.cache_dir), model_config.context
        ),
        jobs=flags.jobs or (max(1, cores // flags.threads) if config.device == "cpu" else 1),
        threads=flags.threads,
    )
    ablation = Ablation(grid, sorted(set(flags.lrs)), range(config.seed, config.seed + flags.seeds), probe=flags.probe)
    grid.check([*ablation.reported, *ablation.selection, *cells(ablation.arms, ablation.lrs, ablation.seeds)])
    (ablation.folder / "cells").mkdir(parents=True, exist_ok=True)
    return ablation


def run_ablation(ablation: Ablation, command: str) -> None:
    """Run what has not ended: all arms at the shared learning rate, then each at its best. Write the report."""
    grid = ablation.grid
    outcomes = grid.run(ablation.reported)
    best: dict[Arm, float] = {}
    if ablation.lrs:
        best, selection = grid.select_lrs(ablation.arms, ablation.lrs, ablation.seeds.start)
        outcomes |= selection
        outcomes |= grid.run(at_best(ablation, best))
    write_report(ablation, outcomes, best, command)
    planned = [ablation.reported, at_best(ablation, best) if best else [], ablation.selection]
    write_pictures(grid, *([outcomes[cell] for cell in cells] for cells in planned))
    if ablation.probe:
        write_probes(ablation, outcomes)


def at_best(ablation: Ablation, best: dict[Arm, float]) -> list[Cell]:
    """Every arm with every seed, at the arm's own learning rate."""
    return [Cell(arm, best[arm], seed) for seed in ablation.seeds for arm in ablation.arms]


# --- the report ------------------------------------------------------------------------------------------------------


def write_report(ablation: Ablation, outcomes: dict[Cell, Outcome], best: dict[Arm, float], command: str) -> None:
    """Write `runs.csv`, `table.md` and `command.txt`."""
    folder, config = ablation.folder, ablation.common
    write_atomically(folder / "command.txt", command + "\n")
    write_atomically(folder / "runs.csv", to_csv([outcome.row for outcome in outcomes.values()]))
    reported = [outcomes[cell] for cell in ablation.reported]
    kernels = "with the CPU kernels" if config.fast else "in plain PyTorch"
    sections = [
        f"`{command}`",
        f"{config.steps} steps, seeds {ablation.seeds[0]} to {ablation.seeds[-1]}, on "
        f"{describe(torch.device(config.device))} in {config.dtype} {kernels}, {ablation.grid.jobs} runs at a time, "
        f"torch {torch.__version__}. val_bpb is the mean over the seeds ± the half-width of its 95% interval "
        "(Student's t). Differences from the first row are paired: each seed gives both arms the same initial draws "
        "and batches. Below zero is better. Each interval is for one comparison; among many, some miss the true value. "
        "Means leave out runs that diverged: their loss was not finite, or ended above that of a uniform prediction.",
        f"## All arms at the same learning rate, {config.lr:g}",
        arms_table(reported),
    ]
    if best:
        best_runs = [outcomes[cell] for cell in at_best(ablation, best)]
        sections += [
            "## Each arm at its best learning rate",
            f"Selected by mean val_bpb on {SELECTION_SEEDS} seeds that are not reported. If the best is the lowest "
            "or the highest, a wider sweep may find a better one:",
            lr_table([outcomes[cell] for cell in ablation.selection]),
            "On the reported seeds:",
            arms_table(best_runs),
        ]
    write_atomically(folder / "table.md", "\n\n".join(section.strip() for section in sections) + "\n")


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
                models["end"] = load_model(ablation.grid.checkpoint(cell), "cpu")[0]
        for when, model in models.items():
            torch.manual_seed(cell.seed)  # for dropout
            for block in probe(model, *batch):
                rows.append(dict(cell.arm.factors) | {"seed": cell.seed, "when": when} | asdict(block))
                blocks.append((cell.arm, when, block))
    write_atomically(ablation.folder / "probe.csv", to_csv(rows))
    title = plot_title(ablation.grid.settings, reported.values(), "before and after training")
    plot_depth(blocks, title).savefig(ablation.folder / "probe.png", dpi=DPI)
