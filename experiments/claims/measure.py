"""What a claim measures, and the measurement that claims about training share: arms × learning rates × seeds.

All use of the ablation is here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from data.prepare import prepare
from experiments.ablation.grid import Cell, Grid, cells, resolve_arms, settings_digest
from experiments.ablation.outcome import Arm, Outcome

WIDEN = 2  # rates beyond the grid that are tried where an arm's best rate is its lowest or highest
THREADS = 1  # of each run; another number changes the last digits
KEPT = ("lr", "seed", "diverged", "val_loss", "best_val_loss", "tokens_per_second", "seconds")  # of an outcome

Factors = Mapping[str, str]  # options of train.py: {"norm": "dyt:alpha=0.5", "placement": "pre"}
Variants = Sequence[Factors]  # of an arm; the one with the lowest loss on the selection seeds is reported
Measured = dict[str, Any]  # JSON: {"runs": [{"arm": factors, "seed": 0, "val_loss": 2.0, ...}, ...], ...}


@dataclass(frozen=True)
class Protocol:
    """What is measured. `minutes` is the expected time on the hardware of its scale."""

    minutes: float
    arms: Mapping[str, Variants]  # by name
    flags: str = ""  # of train.py, shared by all arms
    lrs: tuple[float, ...] = ()
    select_lr: bool = True  # report each arm at its best rate, selected on two other seeds; else at every rate
    seeds: tuple[int, ...] = tuple(range(5))  # the same for all arms: values are paired


@dataclass(frozen=True)
class Lab:
    """Where and how runs are made. Finished runs in `folder` are reused."""

    folder: Path
    jobs: int = 1
    devices: tuple[str, ...] = ("cpu",)  # runs are spread over them
    cache_dir: str = ".cache"


def train_grid(protocol: Protocol, lab: Lab) -> Measured:
    """Train every arm with every seed, at its best learning rate or at all rates.

    {"runs": the reported runs, "selection": runs that selected rates and variants, "unigram": see `unigram_loss`}
    """
    grid = make_grid(protocol, lab)
    selection: dict[Cell, Outcome] = {}
    if protocol.select_lr:
        best, selection = grid.select_lrs(list(grid.settings), list(protocol.lrs), first_seed=0, widen=WIDEN)
        chosen = [best_variant(named(variants), best, selection) for variants in protocol.arms.values()]
        wanted = [Cell(arm, best[arm], seed) for seed in protocol.seeds for arm in chosen]
    else:
        wanted = cells(grid.settings, protocol.lrs, protocol.seeds)
    return {
        "runs": [row(outcome) for outcome in grid.run(wanted).values()],
        "selection": [row(outcome) for outcome in selection.values()],
        "unigram": unigram_loss(grid.data.val),
    }


def make_grid(protocol: Protocol, lab: Lab) -> Grid:
    """The runs of a protocol. Claims with the same shared flags share a folder, and so their runs."""
    shared = [*protocol.flags.split(), "--device", lab.devices[0], "--cache-dir", lab.cache_dir]
    base = resolve_arms([Arm(())], shared)
    settings = resolve_arms([arm for variants in protocol.arms.values() for arm in named(variants)], shared)
    model_config, config = base[Arm(())]
    torch.set_num_threads(THREADS)  # a run's description of its device includes them
    data = prepare(config.data, config.tokenizer, model_config.vocab_size, Path(config.cache_dir), model_config.context)
    return Grid(lab.folder / settings_digest(base), settings, shared, data, lab.jobs, THREADS, lab.devices)


def named(variants: Variants) -> list[Arm]:
    return [Arm.of(**factors) for factors in variants]


def best_variant(variants: list[Arm], best: dict[Arm, float], selection: dict[Cell, Outcome]) -> Arm:
    """The variant with the lowest mean loss at its best rate on the selection seeds."""

    def loss(arm: Arm) -> float:
        runs = [outcome for cell, outcome in selection.items() if (cell.arm, cell.lr) == (arm, best[arm])]
        return mean(math.inf if run.diverged or run.val_loss is None else run.val_loss for run in runs)

    return min(variants, key=loss)


def row(outcome: Outcome) -> Measured:
    return {"arm": dict(outcome.arm.factors)} | {name: getattr(outcome, name) for name in KEPT}


def unigram_loss(val: np.ndarray) -> float:
    """Loss in nats per token of a model that knows the frequencies of `val`'s tokens and nothing else."""
    counts = np.unique(val, return_counts=True)[1]
    return float(-(counts / counts.sum() * np.log(counts / counts.sum())).sum())
