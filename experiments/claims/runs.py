"""The runs of a claim: making them from a protocol, and asking for their losses."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from data.prepare import prepare
from experiments.ablation.grid import Cell, Grid, cells, resolve_arms, settings_digest
from experiments.ablation.outcome import Arm, Outcome
from experiments.claims.claim import Lab, Measured, Protocol
from experiments.statistics import Estimate, estimate

Losses = dict[int, float]  # nats per token by seed

# 0.23 million parameters, 0.4 million tokens: about half a minute on one core. Bytes, so that no tokenizer is trained;
# nats per token are nats per byte.
CPU_MODEL = "--tokenizer bytes --dim 64 --layers 4 --heads 2 --context 128 --batch-size 8 --dtype float32"
CPU_RUN = f"{CPU_MODEL} --optimizer adamw --steps 400 --eval-every 100 --eval-tokens 32768 --save-every 400 --keep 1"
CPU_LRS = (1e-3, 3e-3, 1e-2)

# For DyT and Derf, which do not rescale what they get. With the init and embedding of the other runs, the residual
# stream is so small at this width that they learn only the frequencies of the bytes.
NO_STATISTICS = "--init xavier --scaled-embedding"

# 0.27 million parameters in 12 blocks. Xavier's init, under which the troubles of depth show at this width.
DEEP_RUN = (
    "--tokenizer bytes --dim 40 --layers 12 --heads 2 --context 128 --batch-size 8 --dtype float32 --init xavier "
    "--optimizer adamw --steps 200 --eval-every 100 --eval-tokens 32768 --save-every 200 --keep 1"
)

# 27 million parameters, 65 million tokens: about 10 minutes on an H100.
GPU_RUN = (
    "--preset small --optimizer adamw --steps 2000 --eval-every 200 --save-every 2000 --keep 1 --dtype bfloat16 "
    "--compile"
)
GPU_LRS = (3e-4, 1e-3, 3e-3, 1e-2)
CLEARLY = 0.1  # nats below `unigram_loss`: runs that learn only the frequencies end within 0.02 of it
WIDEN = 2  # rates beyond the grid that are tried where an arm's best rate is its lowest or highest


def make_grid(protocol: Protocol, lab: Lab) -> Grid:
    """The runs of a protocol. Claims with the same shared flags share a folder, and so their runs."""
    shared = [*protocol.flags.split(), "--device", lab.device, "--cache-dir", lab.cache_dir]
    base = resolve_arms([Arm(())], shared)
    settings = resolve_arms([Arm.of(**arm) for arm in protocol.arms], shared)
    model_config, config = base[Arm(())]
    torch.set_num_threads(lab.threads)  # a run's description of its device includes them
    data = prepare(config.data, config.tokenizer, model_config.vocab_size, Path(config.cache_dir), model_config.context)
    return Grid(lab.folder / settings_digest(base), settings, shared, data, lab.jobs, lab.threads, lab.devices)


def make_runs(protocol: Protocol, lab: Lab) -> Measured:
    """Run every arm of `protocol` with every seed: at its best rate, or at all of them.

    {"runs": the reported runs, "selection": those that selected rates and variants}
    """
    grid = make_grid(protocol, lab)
    arms = list(grid.settings)
    first_seed = protocol.settings.get("first_seed", 0)
    seeds = range(first_seed, first_seed + protocol.seeds)
    grid.check(cells(arms, protocol.lrs, seeds))
    selection: dict[Cell, Outcome] = {}
    if protocol.select_lr:
        best, selection = grid.select_lrs(arms, list(protocol.lrs), first_seed=0, widen=WIDEN)
        if protocol.best_variant:
            arms = best_variants(best, selection)
        wanted = [Cell(arm, best[arm], seed) for seed in seeds for arm in arms]
    else:
        wanted = cells(arms, protocol.lrs, seeds)
    outcomes = grid.run(wanted)
    return {
        "runs": [to_json(outcome) for outcome in outcomes.values()],
        "selection": [to_json(outcome) for outcome in selection.values()],
    }


def best_variants(best: dict[Arm, float], selection: dict[Cell, Outcome]) -> list[Arm]:
    """Of arms that differ in their norm's arguments only, the one with the lowest loss at its best rate."""
    chosen: dict[Arm, tuple[float, Arm]] = {}
    for arm, lr in best.items():
        runs = [outcome for cell, outcome in selection.items() if (cell.arm, cell.lr) == (arm, lr)]
        loss = mean(math.inf if run.diverged or run.val_loss is None else run.val_loss for run in runs)
        kind = Arm.of(**(dict(arm.factors) | {"norm": arm["norm"].partition(":")[0]}))
        if kind not in chosen or loss < chosen[kind][0]:
            chosen[kind] = loss, arm
    return [arm for _, arm in chosen.values()]


def to_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome without its log, and with its evaluations."""
    curve = [[row["step"], row["val_loss"]] for row in outcome.log if "val_loss" in row]
    row = asdict(replace(outcome, log=[])) | {"arm": dict(outcome.arm.factors), "curve": curve}
    del row["log"]
    return row


class Runs:
    """Runs from a results file, to be asked for by the values of their factors."""

    def __init__(self, rows: Iterable[dict[str, Any]]):
        self.rows = list(rows)

    def where(self, **wanted: Any) -> "Runs":
        """Those with these values of lr, seed or factors, whatever their other factors."""
        return Runs(
            row for row in self.rows if all((row | row["arm"]).get(name) == value for name, value in wanted.items())
        )

    def of(self, arm: Mapping[str, str]) -> "Runs":
        """Those of an arm: with these factors and no others."""
        return Runs(row for row in self.rows if row["arm"] == arm)

    def losses(self, which: str = "val_loss") -> Losses:
        """By seed, of the runs that did not diverge. `which` may be best_val_loss."""
        return {row["seed"]: row[which] for row in self.rows if not row["diverged"]}

    @property
    def diverged(self) -> int:
        return sum(row["diverged"] for row in self.rows)

    @property
    def lr(self) -> float:
        """The learning rate of all of them."""
        (lr,) = {row["lr"] for row in self.rows}
        return lr


def paired(arm: Runs, baseline: Runs, which: str = "val_loss") -> list[float]:
    """Loss of `arm` minus that of `baseline`, for each seed with which neither diverged."""
    ours, theirs = arm.losses(which), baseline.losses(which)
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]


def nats(found: Estimate) -> str:
    """`+0.0123 ± 0.0045 nats (n = 5)`."""
    half = "" if found.half_width is None else f" ± {found.half_width:.4f}"
    return f"{found.mean:+.4f}{half} nats (n = {found.n})"


def unigram_loss(val: np.ndarray) -> float:
    """Loss in nats per token of a model that knows the frequencies of `val`'s tokens and nothing else."""
    counts = np.unique(val, return_counts=True)[1]
    return float(-(counts / counts.sum() * np.log(counts / counts.sum())).sum())


def learned(row: Mapping[str, Any], unigram: float) -> bool:
    """Whether a run did not diverge and learned clearly more than the frequencies of the tokens."""
    return not row["diverged"] and row["val_loss"] < unigram - CLEARLY


def geometric(values: Iterable[float]) -> Estimate:
    """The estimate of the logarithms of positive values, for ratios."""
    return estimate([math.log(value) for value in values])


def ratio(logarithms: Estimate) -> str:
    """`1.23 [1.10, 1.37]`: the ratio and its interval, from an estimate of its logarithm."""
    middle, low, high = (math.exp(value) for value in (logarithms.mean, logarithms.low, logarithms.high))
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"
