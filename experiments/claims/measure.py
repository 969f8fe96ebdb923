"""The measurement that claims about training share. All use of the ablation is here."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from data.batches import evaluation_batches
from data.corpus import Corpus
from data.prepare import prepare
from experiments.ablation.grid import Cell, Grid, Outcomes, resolve_arms, settings_digest
from experiments.ablation.outcome import Arm as Factors
from experiments.ablation.outcome import Outcome, grouped
from experiments.ablation.rates import SPACING, Optimum
from experiments.claims.claim import Measured, Protocol, Row
from files import digest, write_atomically
from runtime.checkpoint import load_pretrained
from runtime.device import describe
from runtime.process import bad_input
from runtime.watch import stream_rms

WIDEN = 14  # rates and seeds that an arm may try on top until its optimum is found
THREADS = 1  # of each run; another number changes the last digits
CURVE = 20  # points of a loss curve that are kept
OUTCOME = ("diverged", "step", "val_loss", "val_bpb", "best_val_loss", "tokens_per_second", "seconds")


@dataclass(frozen=True)
class Lab:
    """Where and how runs are made. `ledger` has a line for each that has ended: with it, a measurement continues."""

    folder: Path
    ledger: Path
    jobs: int = 1
    devices: tuple[str, ...] = ("cpu",)
    cache_dir: str = ".cache"
    first_seed: int = 0
    commit: str = "unknown"

    def seeds(self, protocol: Protocol) -> range:
        return range(self.first_seed, self.first_seed + protocol.seeds)


@dataclass(frozen=True, kw_only=True)
class RecordedGrid(Grid):
    """A grid that reads and writes the ledger."""

    lab: Lab

    def outcomes(self, cells: Iterable[Cell]) -> Outcomes:
        known = read_ledger(self.lab.ledger)
        found, new = {}, {}
        for cell in cells:
            key = self.key(cell)
            if row := known.get(key):
                found[cell] = Outcome(cell.arm, cell.lr, cell.seed, **{name: row[name] for name in OUTCOME}, log=[])
            elif ended := super().outcomes([cell]):
                found |= ended
                new[key] = self.row(cell, ended[cell])
        if new:
            lines = (json.dumps(row) + "\n" for row in (known | new).values())
            write_atomically(self.lab.ledger, "".join(lines))
        return found

    def key(self, cell: Cell) -> str:
        """What the run was made from."""
        return digest(self.options(cell) | {"data": self.data.corpus_hash})[:16]

    def row(self, cell: Cell, outcome: Outcome) -> Row:
        """Its line in the ledger."""
        losses = [[row["step"], round(row["train_loss"], 4)] for row in outcome.log if "train_loss" in row]
        residual_rms = None
        if not outcome.diverged:
            model = load_pretrained(self.cell_folder(cell))[0]
            tokens, _ = next(evaluation_batches(self.data.val, model.config.context, 8))
            residual_rms = [round(value, 6) for value in stream_rms(model.train(), tokens)]
        return {
            "key": self.key(cell),
            "arm": cell.arm.name,
            "lr": cell.lr,
            "seed": cell.seed,
            **{name: getattr(outcome, name) for name in OUTCOME},
            "train_loss": losses[:: max(1, len(losses) // CURVE)],
            "residual_rms": residual_rms,
            "commit": self.lab.commit,
            "device": describe(torch.device(self.lab.devices[0])),
        }


def read_ledger(path: Path) -> dict[str, Row]:
    rows = map(json.loads, path.read_text("utf-8").splitlines()) if path.exists() else []
    return {row["key"]: row for row in rows}


def train(protocol: Protocol, lab: Lab) -> Measured:
    """Train every arm with every seed, at its best learning rate or at all of its rates."""
    with bad_input():  # the text may need a download
        grids = {arm.data: make_grid(protocol, arm.data, lab) for arm in protocol.arms.values()}
    optima: dict[str, Optimum] = {}
    search: list[Row] = []
    tuned = [((arm.data, arm.lr), (Factors.of(**arm.factors), name)) for name, arm in protocol.arms.items() if arm.lr]
    for (data, lr), pairs in grouped(tuned).items():
        lrs = [float(f"{lr * SPACING**power:.3g}") for power in range(-2, 3)]
        names = dict(pairs)
        best, tried = grids[data].tune(list(names), lrs, lab.seeds(protocol), WIDEN, first=1)
        nats = next(run.val_loss / run.val_bpb for run in tried.values() if run.val_loss and run.val_bpb)  # per bit
        optima |= {names[factors]: optimum.scaled(nats) for factors, optimum in best.items()}
        search += to_rows(grids[data], {cell: names[cell.arm] for cell in tried})
    runs: list[Row] = []
    for seed in lab.seeds(protocol):  # of all arms in turn: a stopped measurement has pairs
        for data, grid in grids.items():
            wanted = {
                Cell(Factors.of(**arm.factors), lr, seed): name
                for name, arm in protocol.arms.items()
                if arm.data == data
                for lr in arm.lrs or (optima[arm.like or name].lr,)
            }
            grid.run(list(wanted))
            runs += to_rows(grid, wanted)
    return {
        "runs": runs,
        "search": search,
        "optima": {name: asdict(each) for name, each in optima.items()},
        "corpora": {data: grid.data.corpus_hash for data, grid in grids.items()},
        "initial": math.log(next(iter(grids.values())).data.tokenizer.vocab_size),
    }


def to_rows(grid: RecordedGrid, arms: Mapping[Cell, str]) -> list[Row]:
    """Runs as results have them. The value is the last loss, in nats per token, and None if the run diverged."""
    ledger = read_ledger(grid.lab.ledger)
    rows = []
    for cell, name in arms.items():
        row = ledger[grid.key(cell)]
        kept = {key: row[key] for key in ("lr", "seed", "seconds", "residual_rms", "commit")}
        value = None if row["diverged"] else row["val_loss"]
        rows.append({"arm": name, "value": value, "best": row["best_val_loss"], **kept})
    return rows


def make_grid(protocol: Protocol, data: str, lab: Lab) -> RecordedGrid:
    """The runs of a protocol on one text. Claims with the same shared flags share a folder, and so their runs."""
    source = str(excerpt(int(data), lab)) if data.isdigit() else data
    shared = [*protocol.flags.split(), "--data", source, "--device", lab.devices[0], "--cache-dir", lab.cache_dir]
    base = resolve_arms([Factors(())], shared)
    mine = [Factors.of(**arm.factors) for arm in protocol.arms.values() if arm.data == data]
    settings = resolve_arms(mine, shared)
    ((model, config),) = base.values()
    torch.set_num_threads(THREADS)  # a run's description of its device includes them
    text = prepare([source], config.tokenizer, model.vocab_size, Path(lab.cache_dir), model.context)
    folder = lab.folder / settings_digest(base)
    return RecordedGrid(folder, settings, shared, text, lab.jobs, THREADS, lab.devices, lab=lab)


def excerpt(size: int, lab: Lab) -> Path:
    """A file with `size` bytes of the default corpus's training documents, and all of those for validation."""
    corpus = Corpus(["python"], Path(lab.cache_dir))
    kept = []
    path = lab.folder / f"python-{corpus.hash[:8]}-{size}.jsonl"
    if not path.exists():
        for document in corpus.documents("train"):
            text = "".join(document)
            if (length := len(text.encode())) <= size:
                kept.append(text)
                size -= length
        kept.extend(map("".join, corpus.documents("val")))
        write_atomically(path, "".join(json.dumps({"text": text}) + "\n" for text in kept))
    return path
