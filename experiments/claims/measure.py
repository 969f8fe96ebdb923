"""The measurement that claims about training share: it searches rates and trains arms as an ablation does."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from data.batches import evaluation_batches
from data.corpus import Corpus
from data.prepare import prepare
from experiments.ablation.grid import Cell, Grid, Outcomes, resolve_arms, settings_digest
from experiments.ablation.outcome import Arm as Factors
from experiments.ablation.outcome import Outcome, grouped
from experiments.ablation.rates import SPACING
from experiments.claims.claim import Arm, Measured, Protocol, Row
from files import write_atomically
from runtime.checkpoint import load_pretrained
from runtime.process import bad_input
from runtime.run_dir import read_run_file
from runtime.watch import stream_rms

WIDEN = 14  # rates and seeds that an arm may try on top until its optimum is found
THREADS = 1  # of each run; another number changes the last digits
CURVE = 20  # points of a loss curve that are kept


@dataclass(frozen=True)
class Lab:
    """Where and how runs are made."""

    folder: Path
    jobs: int = 1
    devices: tuple[str, ...] = ("cpu",)
    cache_dir: str = ".cache"
    first_seed: int = 0

    def seeds(self, protocol: Protocol) -> range:
        return range(self.first_seed, self.first_seed + protocol.seeds)


def train(protocol: Protocol, lab: Lab) -> Measured:
    """Train every arm with every seed, at its best learning rate or at all of its rates."""
    runs: list[Row] = []
    search: list[Row] = []
    optima, corpora = {}, {}
    seeds = lab.seeds(protocol)
    for data, named in grouped((arm.data, (name, arm)) for name, arm in protocol.arms.items()).items():
        arms: dict[str, Arm] = dict(named)
        factors = {name: Factors.of(**arm.factors) for name, arm in arms.items()}
        with bad_input():  # the text may need a download
            grid = make_grid(protocol.flags, list(factors.values()), data, lab)
        for lr, names in grouped((arm.lr, name) for name, arm in arms.items() if arm.lr).items():
            lrs = [float(f"{lr * SPACING**power:.3g}") for power in range(-2, 3)]
            best, tried = grid.tune([factors[name] for name in names], lrs, seeds, WIDEN, first=1)
            nats = next(run.val_loss / run.val_bpb for run in tried.values() if run.val_loss and run.val_bpb)  # per bit
            optima.update({name: best[factors[name]].scaled(nats) for name in names})
            search += rows(grid, tried, factors)
        cells = [
            Cell(factors[name], lr, seed)
            for seed in seeds  # of all arms in turn: a stopped measurement has pairs
            for name, arm in arms.items()
            for lr in arm.lrs or (optima[arm.like or name].lr,)
        ]
        runs += rows(grid, grid.run(cells), factors)
        corpora[data] = grid.data.corpus_hash
    return {
        "runs": runs,
        "search": search,
        "optima": {name: asdict(optimum) for name, optimum in optima.items()},
        "corpora": corpora,
        "initial": math.log(grid.data.tokenizer.vocab_size),
    }


def make_grid(flags: str, factors: list[Factors], data: str, lab: Lab) -> Grid:
    """The runs on one text. Claims with the same shared flags share a folder, and so their runs."""
    source = excerpt(int(data), lab) if data.isdigit() else ["--data", data]
    shared = [*flags.split(), *source, "--device", lab.devices[0], "--cache-dir", lab.cache_dir]
    base = resolve_arms([Factors(())], shared)
    ((model, config),) = base.values()
    torch.set_num_threads(THREADS)  # a run's description of its device includes them
    cache = Path(lab.cache_dir)
    text = prepare(config.data, config.tokenizer, model.vocab_size, cache, model.context, val_names=config.val_data)
    folder = lab.folder / settings_digest(base)
    return Grid(folder, resolve_arms(factors, shared), shared, text, lab.jobs, THREADS, lab.devices)


def rows(grid: Grid, outcomes: Outcomes, factors: Mapping[str, Factors]) -> list[Row]:
    names = {arm: name for name, arm in factors.items()}
    return [to_row(grid, cell, outcome, names[cell.arm]) for cell, outcome in outcomes.items()]


def to_row(grid: Grid, cell: Cell, outcome: Outcome, arm: str) -> Row:
    """A run as results have it. The value is the last loss, in nats per token, and None if the run diverged."""
    folder, residual_rms = grid.cell_folder(cell), None
    losses = [[row["step"], round(row["train_loss"], 4)] for row in outcome.log if "train_loss" in row]
    if not outcome.diverged:
        model = load_pretrained(folder)[0]
        tokens, _ = next(evaluation_batches(grid.data.val, model.config.context, 8))
        residual_rms = [round(value, 6) for value in stream_rms(model.train(), tokens)]
    return {
        "arm": arm,
        "lr": cell.lr,
        "seed": cell.seed,
        "value": None if outcome.diverged else outcome.val_loss,
        "best": outcome.best_val_loss,
        "seconds": outcome.seconds,
        "train_loss": losses[:: max(1, len(losses) // CURVE)],
        "residual_rms": residual_rms,
        "commit": read_run_file(folder / "run.json")["commit"],
    }


def excerpt(size: int, lab: Lab) -> list[str]:
    """Flags for `size` bytes of the default corpus's training documents, with all of its validation documents."""
    corpus = Corpus(["python"], Path(lab.cache_dir))
    flags = []
    for flag, split, most in (("--data", "train", size), ("--val-data", "val", math.inf)):
        path = lab.folder / f"python-{corpus.hash[:8]}-{most}.jsonl"
        if not path.exists():
            kept = []
            for _, chunks in corpus.documents(split):
                text = "".join(chunks)
                if (length := len(text.encode())) <= most:
                    kept.append(json.dumps({"text": text}) + "\n")
                    most -= length
            write_atomically(path, "".join(kept))
        flags += [flag, str(path)]
    return flags
