"""Compare norms: `python ablate.py --norms rmsnorm layernorm --placements pre post --seeds 3 --steps 200`.

An arm is a norm in a placement. A cell is one run of `train.py`: an arm at a learning rate with a seed, in a folder of
its own. Arms share their seeds, hence initial draws and batches, so that they are compared in pairs.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shlex
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
from checkpoint import load_model
from config import ModelConfig, Parser, TrainConfig, add_flags, check_sizes, require
from data.batches import Prepared, evaluation_batches, prepare
from exits import IN_USE, NOT_FINITE, CellFailed, Stopped, as_command, bad_input, exit_codes
from machine import describe
from model import Llama
from norms import KINDS
from norms.placement import PLACEMENTS, Senseless
from probe import plot_depth, probe
from report import Outcome, as_csv, best_rate, plot_curves, plot_differences, rates_table, read_outcome, table
from run import RUNS, locked, read_rows, write_whole

PICKERS = 2  # seeds that pick each arm's learning rate
FIRST_PICKER = 1000  # they count from here, those that are reported stay below
POLL = 0.3  # seconds between two looks at the cells under way
HOUSEKEEPING = {"out", "cache_dir", "log", "keep", "save_every"}  # fields of TrainConfig that change no figure


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    flags, passed = parse(arguments)
    with exit_codes("--jobs, --micro-batch-size, --context or --dim"):
        with bad_input():
            ablation = settle(flags, passed)
        with locked(ablation.folder):
            outcomes = train_grid(ablation)
            write_report(ablation, outcomes, shlex.join(["python", "ablate.py", *arguments]))
            if ablation.probe:
                write_probes(ablation, outcomes)
    print(f"look at {ablation.folder}/table.md")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """All flags, and those of the `arguments` that are train.py's, which every cell passes on."""
    everything = Parser(
        prog="ablate.py", description="Train norms × placements × seeds, and compare.", allow_abbrev=False
    )
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for parser in (everything, own):  # neither takes --seed for short of --seeds
        add = parser.add_argument_group("comparison").add_argument
        add("--norms", nargs="+", default=["rmsnorm"], metavar="KIND[:KEY=VALUE,...]", help="the first is the baseline")
        add("--placements", nargs="+", default=["pre"], choices=PLACEMENTS, help="as with --norms")
        add("--seeds", type=int, default=3, metavar="INT", help="runs of each arm, from --seed on (default: 3)")
        add("--lrs", nargs="+", type=float, default=[], metavar="FLOAT", help="rates to pick each arm's best from")
        add("--jobs", type=int, metavar="INT", help="runs side by side (default: one for each core, or one on a GPU)")
        add("--threads", type=int, default=1, metavar="INT", help="of the processor, for each run (default: 1)")
        add("--probe", action="store_true", help="look into each block before and after training")
    add_flags(everything)
    own.add_argument("--out")
    return everything.parse_args(arguments), own.parse_known_args(arguments)[1]


@dataclass(frozen=True)
class Arm:
    """What is compared: a kind of norm, perhaps with arguments, in a placement."""

    norm: str  # as in --norms
    placement: str

    @property
    def flags(self) -> list[str]:
        kind, _, norm_args = self.norm.partition(":")
        pairs = norm_args.split(",") if norm_args else []
        return ["--norm", kind, "--placement", self.placement, *(f"--norm-arg={pair}" for pair in pairs)]


@dataclass(frozen=True)
class Cell:
    """One run."""

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
    """All that an ablation is made from."""

    folder: Path
    settings: dict[Arm, tuple[ModelConfig, TrainConfig]]  # at the shared learning rate, with the first seed
    lrs: list[float]  # to pick from, if any
    seeds: range
    passed: list[str]  # train.py's flags that all cells share
    data: Prepared
    jobs: int
    threads: int
    probe: bool

    @property
    def common(self) -> TrainConfig:
        """How training goes in all arms."""
        return next(iter(self.settings.values()))[1]

    @property
    def reported(self) -> list[Cell]:
        """Every arm with every seed, at the shared rate."""
        return self.cells([self.common.lr], self.seeds)

    @property
    def picking(self) -> list[Cell]:
        """The runs that pick each arm's rate, on seeds that are not reported."""
        first = self.seeds.start + FIRST_PICKER
        return self.cells(self.lrs, range(first, first + PICKERS))

    def cells(self, lrs: Iterable[float], seeds: Iterable[int]) -> list[Cell]:
        return [Cell(arm, lr, seed) for lr in lrs for seed in seeds for arm in self.settings]

    def folder_of(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name

    def ended(self, cells: Iterable[Cell]) -> dict[Cell, Outcome]:
        """How those of `cells` ended that have."""
        return {cell: outcome for cell in cells if (outcome := self.outcome(cell))}

    def outcome(self, cell: Cell) -> Outcome | None:
        """How a cell ended, or None if it has not."""
        rows = read_rows(self.folder_of(cell) / "metrics.jsonl")
        guessing = math.log(self.settings[cell.arm][0].vocab_size)
        return read_outcome(cell.arm.norm, cell.arm.placement, cell.lr, cell.seed, rows, self.common.steps, guessing)


def settle(flags: argparse.Namespace, passed: list[str]) -> Ablation:
    """Turn flags into an ablation, with the cheap checks first. Raises ValueError for what does not fit."""
    check_sizes(flags, "seeds", "jobs", "threads")
    require(flags.seeds <= FIRST_PICKER, f"--seeds must be at most {FIRST_PICKER}, not {flags.seeds}")
    require(all(0 < lr < math.inf for lr in flags.lrs), "--lrs must be positive numbers")
    for name in ("norm", "placement"):
        require(not hasattr(flags, name), f"--{name} is for a single run; here, name all of them with --{name}s")
    for kind in (norm.partition(":")[0] for norm in flags.norms):
        require(kind in KINDS, f"--norms: unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    settings = settle_arms(flags.norms, flags.placements, passed)
    model_config, config = next(iter(settings.values()))
    cores = torch.get_num_threads()
    torch.set_num_threads(flags.threads)  # which a run's description of its device counts in
    data = prepare(config.data, config.tokenizer, model_config.vocab_size, Path(config.cache_dir), model_config.context)
    lrs = sorted(set(flags.lrs))
    compared = {name: value for name, value in asdict(config).items() if name not in HOUSEKEEPING}
    grid = [[asdict(arm), asdict(model)] for arm, (model, _) in settings.items()]  # more seeds or rates go on with it
    digest = hashlib.sha256(json.dumps([compared, grid]).encode()).hexdigest()
    ablation = Ablation(
        folder=Path(getattr(flags, "out", "") or RUNS / f"ablation-{digest[:8]}"),
        settings=settings,
        lrs=lrs,
        seeds=range(config.seed, config.seed + flags.seeds),
        passed=passed,
        data=data,
        jobs=flags.jobs or (max(1, cores // flags.threads) if config.device == "cpu" else 1),
        threads=flags.threads,
        probe=flags.probe,
    )
    check_earlier_cells(ablation)
    (ablation.folder / "cells").mkdir(parents=True, exist_ok=True)
    return ablation


def settle_arms(
    norms: list[str], placements: list[str], passed: list[str]
) -> dict[Arm, tuple[ModelConfig, TrainConfig]]:
    """Each arm's configurations. What makes no sense is left out, with its reason.

    Raises ValueError if that leaves nothing.
    """
    settings, reason = {}, ""
    for arm in dict.fromkeys(Arm(norm, placement) for norm in norms for placement in placements):
        try:
            settings[arm] = train.resolve(train.parse([*passed, *arm.flags]))
        except Senseless as error:
            reason = str(error)
            print(f"left out: {reason}", file=sys.stderr)
    require(bool(settings), reason)
    return settings


def check_earlier_cells(ablation: Ablation) -> None:
    """Raise ValueError if the folder is something else's, or holds a cell that was trained in another way."""
    folder = ablation.folder
    if folder.exists() and not (folder / "cells").is_dir():
        require(folder.is_dir() and not any(folder.iterdir()), f"--out {folder} holds something else; choose another")
    compared = [field.name for field in fields(TrainConfig) if field.name not in HOUSEKEEPING]
    here = f"{describe(torch.device(ablation.common.device))} with torch {torch.__version__}"
    for cell in (*ablation.reported, *ablation.picking, *ablation.cells(ablation.lrs, ablation.seeds)):
        run_file = ablation.folder_of(cell) / "run.json"
        if run_file.exists():
            model_config, config = ablation.settings[cell.arm]
            config = replace(config, lr=cell.lr, seed=cell.seed)
            train.check_same_settings(run_file, model_config, config, compared)
            train.check_same_text(run_file, ablation.data)
            run = json.loads(run_file.read_text())
            there = f"{run['device']} with torch {run['versions']['torch']}"
            require(there == here, f"the run in {run_file.parent} was trained on {there}, not {here}")


# --- the cells -------------------------------------------------------------------------------------------------------


def train_grid(ablation: Ablation) -> dict[Cell, Outcome]:
    """Train what is not trained yet: all arms at the shared rate, then each at its best of `lrs`."""
    cells, steps = [*ablation.reported, *ablation.picking], ablation.common.steps
    at_most = len(cells) + (len(ablation.reported) if ablation.lrs else 0)
    progress = tqdm(
        total=at_most * steps,
        initial=len(ablation.ended(cells)) * steps,
        unit="step",
        smoothing=0,  # time left from the mean speed
        disable=None,
        dynamic_ncols=True,
    )
    with train.stop_requests() as stop, progress as bar:
        outcomes: dict[Cell, Outcome] = {}
        train_cells(ablation, cells, outcomes, bar, stop)
        if ablation.lrs:
            at_best = [cell for cell in at_best_rate(ablation, outcomes) if cell not in outcomes]
            bar.total = (len(outcomes) + len(at_best)) * steps
            train_cells(ablation, at_best, outcomes, bar, stop)
            cells += at_best
    return {cell: outcomes[cell] for cell in cells}  # in this order, whichever ended first


def at_best_rate(ablation: Ablation, outcomes: dict[Cell, Outcome]) -> list[Cell]:
    """Every arm with every seed, at the rate that was best for it on other seeds."""
    best = {
        arm: best_rate([outcomes[cell] for cell in ablation.picking if cell.arm == arm]) for arm in ablation.settings
    }
    return [Cell(arm, best[arm], seed) for seed in ablation.seeds for arm in ablation.settings]


def train_cells(
    ablation: Ablation, cells: list[Cell], outcomes: dict[Cell, Outcome], bar: tqdm, stop: list[int]
) -> None:
    """Add how each of `cells` ends to `outcomes`, training those that have not ended, several side by side.

    Raises Stopped after a signal and CellFailed where a run goes wrong; those under way save first.
    """
    outcomes |= ablation.ended(cells)
    waiting = [cell for cell in cells if cell not in outcomes]
    running: dict[Cell, subprocess.Popen] = {}
    try:
        while waiting or running:
            while waiting and len(running) < ablation.jobs:
                cell = waiting.pop(0)
                running[cell] = start(ablation, cell)
            time.sleep(POLL)
            if stop:
                raise Stopped(stop[0], "the same command")
            for cell, process in list(running.items()):
                if process.poll() is not None:
                    del running[cell]
                    if process.returncode == IN_USE:  # by a run that an earlier call left behind: wait for it
                        waiting.append(cell)
                        continue
                    outcomes[cell] = result(ablation, cell, process.returncode)
                    bar.write(str(outcomes[cell]))
            under_way = sum(steps_taken(ablation, cell) for cell in running)
            bar.update(len(outcomes) * ablation.common.steps + under_way - bar.n)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def start(ablation: Ablation, cell: Cell) -> subprocess.Popen:
    """Train a cell in a process of its own, or go on with it. What it prints goes to a file beside its folder."""
    folder = ablation.folder_of(cell)
    flags = ["--resume"] if (folder / "run.json").exists() else [*ablation.passed, *cell.flags]
    threads = {name: str(ablation.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with open(f"{folder}.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, train.__file__, *flags, "--out", str(folder)],
            env=os.environ | threads,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for us, who pass it on
        )


def result(ablation: Ablation, cell: Cell, code: int) -> Outcome:
    """How a cell ended whose process did, with exit code `code`. Raises CellFailed for one that went wrong."""
    outcome = ablation.outcome(cell)
    if outcome is None or code not in (0, NOT_FINITE):
        log = Path(f"{ablation.folder_of(cell)}.log")
        raise CellFailed(str(log), code, log.read_text().strip().rpartition("\n")[2])
    return outcome


def steps_taken(ablation: Ablation, cell: Cell) -> int:
    rows = read_rows(ablation.folder_of(cell) / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


# --- what they show --------------------------------------------------------------------------------------------------


def write_report(ablation: Ablation, outcomes: dict[Cell, Outcome], command: str) -> None:
    """`runs.csv`, `table.md`, the plots and `command.txt`."""
    folder, config = ablation.folder, ablation.common
    write_whole(folder / "command.txt", command + "\n")
    write_whole(folder / "runs.csv", as_csv([outcome.row for outcome in outcomes.values()]))
    reported = [outcomes[cell] for cell in ablation.reported]
    sections = [
        f"`{command}`",
        f"{config.steps} steps, seeds {ablation.seeds[0]} to {ablation.seeds[-1]}, on "
        f"{describe(torch.device(config.device))} in {config.dtype}, {ablation.jobs} runs side by side, torch "
        f"{torch.__version__}. val_bpb is a mean over the seeds ± half its 95 % interval (Student's t). The difference "
        "to the first row is taken seed by seed, from the same draws and batches: below zero is better. Each interval "
        "is for one comparison; of many, some miss the truth. Means leave out runs that diverged: whose loss was no "
        "longer finite, or ended above that of guessing blindly.",
        f"## All arms at the same rate, {config.lr:g}",
        table(reported),
    ]
    plot_curves(reported, folder / "curves.png")
    plot_differences(reported, folder / "differences.png")
    if ablation.lrs:
        at_best = [outcomes[cell] for cell in at_best_rate(ablation, outcomes)]
        sections += [
            "## Each arm at its best rate",
            f"Picked on {PICKERS} seeds that are not reported; the mean val_bpb there (where the best is the lowest or "
            "highest of the rates, a wider sweep may find a better one):",
            rates_table([outcomes[cell] for cell in ablation.picking]),
            "On the reported seeds:",
            table(at_best),
        ]
        plot_curves(at_best, folder / "curves-best.png")
        plot_differences(at_best, folder / "differences-best.png")
    write_whole(folder / "table.md", "\n\n".join(section.strip() for section in sections) + "\n")


def write_probes(ablation: Ablation, outcomes: dict[Cell, Outcome]) -> None:
    """`probe.csv` and `probe.png`: the blocks of all runs at the shared rate, before and after training."""
    rows: list[dict[str, Any]] = []
    for cell in ablation.reported:
        model_config, config = ablation.settings[cell.arm]
        windows = evaluation_batches(ablation.data.val.tokens, model_config.context, config.micro_batch_size)
        batch = next(windows)
        models = {"start": Llama(model_config, cell.seed)}
        if not outcomes[cell].diverged:
            checkpoint = ablation.folder_of(cell) / "checkpoints" / f"step-{config.steps:06d}"
            with bad_input():  # it may have been deleted since
                models["end"] = load_model(checkpoint, "cpu")[0]
        for when, model in models.items():
            torch.manual_seed(cell.seed)  # of the dropout
            rows += [
                asdict(cell.arm) | {"seed": cell.seed, "when": when} | asdict(seen) for seen in probe(model, *batch)
            ]
    write_whole(ablation.folder / "probe.csv", as_csv(rows))
    plot_depth(rows, ablation.folder / "probe.png")


if __name__ == "__main__":
    as_command(main)
