"""The runs of an ablation: starting, watching and finding them, and the search for learning rates.

A cell is one run of `train.py`: an arm at a learning rate with a seed, in a directory of its own. Arms share their
seeds, and so their initial weights and batches: they are compared in pairs.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import which

from tqdm import tqdm

from config import Asked, flag_name
from data.prepare import Prepared
from experiments.costs import Configs
from experiments.rates import Optimum, find_optimum, losses_of, next_runs
from experiments.records import RESUMED_WITH, SEARCH, UNNAMED, Arm, Record, commits_of, outcome, settings_of
from files import ROOT, Ended, require, warn
from machine.device import pick_device
from machine.process import NotFinite, Stopped, bad_input, stop_requests
from runtime.flags import to_flags
from runtime.plugins import check_imports, import_flags, import_records
from runtime.run import fields_of
from runtime.run_dir import RunFile, machine_of, read_rows, read_run_file

WIDEN = 8  # rates and seeds that an arm may try beyond the first ones
POLL_SECONDS = 0.3  # between checks of the running cells
END_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM") if which("setpriv") else ()


class CellFailed(Ended):
    """A run that this command started has failed with exit code `code`. Its log says why."""

    def __init__(self, log: Path, code: int):
        super().__init__(f"{log}: exit code {code}: {last_line(log).removeprefix('error: ')}")
        self.code = max(1, code)


@dataclass(frozen=True)
class Cell:
    """One run of `train.py`."""

    arm: Arm
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.=+-]", "-", f"{self.arm.name}-lr{self.lr}-seed{self.seed}")


Records = dict[Cell, Record]


def resolve_devices(device: str) -> tuple[str, ...]:
    """The devices that `--device` names: ("cuda:0", "cuda:1") for "cuda:0,1". Raises ValueError if one is missing."""
    kind, _, indices = device.partition(":")
    names = [f"{kind}:{index}" for index in indices.split(",")] if "," in indices else [device]
    return tuple(str(pick_device(name)) for name in names)


@dataclass(frozen=True)
class Grid:
    """Runs in one folder, on each device `jobs` at a time, with `threads` CPU threads each."""

    folder: Path
    configs: Configs  # with the learning rate and seed of each cell
    asked: Mapping[Arm, Asked]  # what an arm asks of train.py, without the device
    costs: Mapping[Arm, Asked]  # of a run of each arm: parameters, tokens, FLOPs, relative time of a step
    data: Prepared
    seeds: range  # reported
    lrs: Mapping[Arm, Sequence[float]]  # of each arm: the reported one, or several from which the search starts
    jobs: int
    threads: int
    devices: tuple[str, ...] = ("",)  # the --device of the runs; "" leaves it to train.py
    print_commands: bool = False  # instead of running
    planned: list[Cell] = field(default_factory=list)  # all cells that `run` was called with

    def cell_folder(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name

    def log(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.log"

    def record(self, cell: Cell) -> Record:
        """What has come of a cell. Raises ValueError if it cannot be trained, is damaged, or has other settings."""
        folder, (model, config) = self.cell_folder(cell), self.configs[cell.arm]
        config = replace(config, lr=cell.lr, seed=cell.seed)
        run: RunFile = {
            "resolved": fields_of(model, config),
            "asked": self.asked[cell.arm],
            "imports": import_records(),
            "corpus": {"name": self.data.corpus_name, "hash": self.data.corpus_hash},
            "tokenizer": {"kind": self.data.tokenizer.kind, "hash": self.data.tokenizer.hash},
        }
        settings, values = settings_of(run), dict(self.costs[cell.arm], lost=self.data.lost)
        with bad_input():
            values |= outcome(read_rows(folder / "metrics.jsonl"), config.steps, model.vocab_size)
            if (folder / "run.json").exists():
                run = read_run_file(folder / "run.json")
                values |= {"machine": machine_of(run), "commit": commits_of(run)}
                run["corpus"]["name"] = self.data.corpus_name  # a text may have several names, but has one hash
                here, there = UNNAMED | settings, UNNAMED | settings_of(run)
                problems = [
                    f"has {flag_name(name)} {there[name]}, not {here[name]}"
                    for name in here
                    if here[name] != there[name] and name != "imports"
                ]
                problems += check_imports(run["imports"])
                require(not problems, f"the run in {folder} {'; '.join(problems)}; choose another --out")
        values |= {"search": cell.seed not in self.seeds, "run": cell.name, "folder": str(self.folder)}
        return Record(**vars(cell), **values, settings=settings)

    def run(self, cells: list[Cell]) -> Records:
        """Run those of `cells` that have not ended. Returns all their records, in the order of `cells`.

        Raises Stopped after a signal and CellFailed if a run fails. Running cells save before either. With
        `print_commands`, prints a line of shell for each run that has not ended, and exits.
        """
        self.planned.extend(cells)
        records = {cell: self.record(cell) for cell in cells}
        waiting = [cell for cell, record in records.items() if not record.ended]
        watched = any(config.watch for _, config in self.configs.values())
        for cell in records.keys() - waiting:
            if watched and not (self.cell_folder(cell) / "watch.jsonl").exists():
                warn("--watch: runs that have ended are not trained again to be watched")
        if self.print_commands and waiting:
            print(*map(self.shell_line, waiting), sep="\n")
            sys.exit()
        free = list(self.devices) * self.jobs
        running: dict[Cell, tuple[subprocess.Popen, str]] = {}
        with stop_requests() as stop, tqdm(total=len(waiting), unit="run", disable=None, dynamic_ncols=True) as bar:
            if waiting:
                bar.write(f"{len(waiting)} runs, {min(len(free), len(waiting))} at a time")
            try:
                while waiting or running:
                    while waiting and free:
                        cell, device = waiting.pop(0), free.pop(0)
                        running[cell] = self.start(cell, device), device
                    time.sleep(POLL_SECONDS)
                    if stop:
                        raise Stopped(stop[0], "the same command")
                    for cell, (process, device) in list(running.items()):
                        if process.poll() is None:
                            continue
                        del running[cell]
                        free.append(device)
                        records[cell] = self.record(cell)
                        if not records[cell].ended or process.returncode not in (0, NotFinite.code):
                            raise CellFailed(self.log(cell), process.returncode)
                        bar.update()
                        bpb = records[cell].val_bpb
                        bar.write(f"{cell.name}: {'diverged' if bpb is None else f'val_bpb {bpb:.4f}'}")
            finally:
                for process, _ in running.values():
                    process.terminate()
                for process, _ in running.values():
                    process.wait()
        return records

    def start(self, cell: Cell, device: str) -> subprocess.Popen:
        """Start a cell in a process of its own, whose output goes to a new log.

        Where Linux's `setpriv` is installed, it gets SIGTERM when this process is killed.
        """
        with open(self.log(cell), "wb") as file:
            return subprocess.Popen(
                [*END_WITH_PARENT, *self.command(cell, device)],
                env=os.environ | self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C reaches only this process, and it passes it on
            )

    def environment(self) -> dict[str, str]:
        return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))

    def shell_line(self, cell: Cell) -> str:
        """A line for a shell that starts a cell or, where it was started before, resumes it."""
        start, resume = (shlex.join(self.command(cell, self.devices[0], started)) for started in (False, True))
        variables = " ".join(f"{name}={value}" for name, value in self.environment().items())
        file = shlex.quote(str(self.cell_folder(cell) / "run.json"))
        return f"export {variables}; if [ -e {file} ]; then {resume}; else {start}; fi"

    def command(self, cell: Cell, device: str = "", started: bool | None = None) -> list[str]:
        """The command that starts a cell on `device`, or resumes it. What depends on the machine has been decided."""
        folder, config = self.cell_folder(cell), self.configs[cell.arm][1]
        if (folder / "run.json").exists() if started is None else started:
            asked = {"resume": True} | {name: getattr(config, name) for name in RESUMED_WITH}
        else:
            decided = {"lr": cell.lr, "seed": cell.seed, "dtype": config.dtype, "compile": config.compile}
            asked = self.asked[cell.arm] | decided
        if device:
            asked["device"] = device
        asked["out"] = str(folder)
        return [sys.executable, str(ROOT / "train.py"), *import_flags(), *to_flags(asked)]

    def reported(self, optima: Mapping[Arm, Optimum]) -> list[Cell]:
        """Every arm with every seed, at the arm's learning rate. Nothing before these are known."""
        return [Cell(arm, optima[arm].lr, seed) for seed in self.seeds for arm in optima]

    def tune(self) -> dict[Arm, Optimum]:
        """The optimum of each arm. It starts with `lrs` and one other seed, and up to `WIDEN` times it gets more."""
        if max(map(len, self.lrs.values())) == 1:
            return {arm: Optimum(rates[0], None) for arm, rates in self.lrs.items()}
        found: Records = {}
        losses = {}
        wanted = {arm: (rates, 1) for arm, rates in self.lrs.items()}
        for _ in range(WIDEN + 1):
            cells = [
                Cell(arm, lr, self.seeds.start + SEARCH + number)
                for arm, (rates, count) in wanted.items()
                for lr in rates
                for number in range(count)
            ]
            found |= self.run(cells)
            for arm in [*wanted]:
                losses[arm] = losses_of(found[cell] for cell in found if cell.arm == arm)
                more = next_runs(losses[arm], len(self.seeds))
                if more and more[0][0] >= self.configs[arm][1].min_lr:  # train.py refuses lower rates
                    wanted[arm] = more
                else:
                    del wanted[arm]
            if not wanted:
                break
        return {arm: find_optimum(losses[arm]) for arm in self.configs}


def last_line(log: Path) -> str:
    """The last error line in `log`, or else its last line."""
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]
