"""Runs of `train.py` that are compared: which arms there are, running them, and what came out.

An arm is a value for each factor: a norm, a placement, and any other option of `train.py`. A cell is one run: an arm
at a learning rate with a seed, in a directory of its own. Arms share their seeds, and so their initial weights and
batches: they are compared in pairs.
"""

import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import which
from statistics import fmean
from typing import Any

from tqdm import tqdm

import train
from config import DEFAULTS, Asked, ModelConfig, TrainConfig, combine, flag_name
from data.prepare import Prepared, prepare
from data.tokenizer import NoTokenizer
from experiments.ablation.outcome import Arm, Outcome, final_bpb, grouped, read_outcome
from experiments.ablation.rates import Losses, Optimum, find_optimum, most_runs, next_runs
from files import InUse, digest, require, warn
from machine.device import pick_device
from machine.process import CellFailed, NotFinite, Stopped, bad_input, stop_requests
from norms.placement import Unsupported
from runtime.flags import to_flags
from runtime.plugins import check_imports, import_flags
from runtime.run import fields_of, read_config_file, resolve
from runtime.run_dir import read_rows, read_run_file

SKIPPED = "skipped: "  # the beginning of a line on an arm that is not supported
WIDEN = 8  # rates and seeds that an arm may try beyond the first ones
MAX_SEEDS = 1000  # reported seeds; selection seeds start at this offset
POLL_SECONDS = 0.3  # between checks of the running cells
END_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM") if which("setpriv") else ()
# Options that change no result. A run that is continued gets those of the command that continues it.
RESUMED_WITH = ("cache_dir", "log", "keep", "save_every", "save_minutes", "max_minutes", "watch")
NOT_COMPARED = {*RESUMED_WITH, "out"}


@dataclass(frozen=True)
class Cell:
    """One run of `train.py`."""

    arm: Arm
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.=+-]", "-", f"{self.arm.name}-lr{self.lr}-seed{self.seed}")


Outcomes = dict[Cell, Outcome]  # only cells that have ended
Settings = dict[Arm, tuple[ModelConfig, TrainConfig]]


def resolve_arms(arms: Iterable[Arm], shared: Asked) -> Settings:
    """The configurations of each arm, with what all share. Prints why it skips an unsupported combination.

    `--dtype auto` is decided once, for all arms. Raises ValueError if the first one, the baseline, is not supported.
    """
    settings: Settings = {}
    previous = read_config_file(shared)
    for arm in dict.fromkeys(arms):
        try:
            _, model, config = resolve(combine(shared, arm.asked), previous)
        except Unsupported as error:
            require(settings, f"the first arm, {arm.name}, is the baseline and cannot be trained: {error}")
            warn(f"{SKIPPED}{arm.name}, as {error}")
            continue
        settings[arm] = model, config
        require(not config.init_from, "an ablation compares runs from random initialization; leave out --init-from")
        bits = "an ablation compares val_bpb, so token files need their tokenizer: --tokenizer DIR or bytes"
        require(config.tokenizer != NoTokenizer.kind, bits)
        shared = {**shared, "dtype": config.dtype}
    return settings


def prepare_text(settings: Settings) -> Prepared:
    """The text that all arms share."""
    model, config = next(iter(settings.values()))
    context = max(model.context for model, _ in settings.values())
    cache, val_names, column = Path(config.cache_dir), config.val_data, config.text_column
    return prepare(config.data, config.tokenizer, model.vocab_size, cache, context, val_names=val_names, column=column)


def compared(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The options that must match between runs of an arm. The GPU index is ignored."""
    options = DEFAULTS | dict(resolved)  # an earlier version may lack some
    options["device"] = resolved["device"].partition(":")[0]
    return {name: options[name] for name in options if name not in NOT_COMPARED}


def settings_digest(settings: Settings) -> str:
    """Short hash of the compared settings. More seeds or learning rates do not change it."""
    arms = [(arm.factors, compared(fields_of(*each))) for arm, each in settings.items()]
    return digest(arms)[:8]


def resolve_devices(device: str) -> tuple[str, ...]:
    """The devices that `--device` names: ("cuda:0", "cuda:1") for "cuda:0,1". Raises ValueError if one is missing."""
    kind, _, indices = device.partition(":")
    names = [f"{kind}:{index}" for index in indices.split(",")] if "," in indices else [device]
    return tuple(str(pick_device(name)) for name in names)


@dataclass(frozen=True)
class Grid:
    """Runs in one folder, on each device `jobs` at a time, with `threads` CPU threads each."""

    folder: Path
    settings: Settings  # their learning rate and seed are replaced by those of a cell
    shared: Asked  # options of train.py for all cells
    data: Prepared
    seeds: range  # reported
    jobs: int
    threads: int
    devices: tuple[str, ...] = ("",)  # the --device of the runs; "" leaves it to `shared`
    lrs: Sequence[float] = ()  # of all arms: the reported one, or several from which the search starts
    print_commands: bool = False  # instead of running
    asked: list[Cell] = field(default_factory=list)  # all cells that `run` was called with
    took: list[float] = field(default_factory=list)  # seconds of each run that has ended meanwhile

    def cell_folder(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name

    def log(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.log"

    def outcomes(self, cells: Iterable[Cell]) -> Outcomes:
        """The outcomes of those of `cells` that have ended. Raises BadInput if one is of other settings, or damaged."""
        found = {}
        with bad_input():
            for cell in cells:
                self.check(cell)
                model, config = self.settings[cell.arm]
                rows = read_rows(self.cell_folder(cell) / "metrics.jsonl")
                outcome = read_outcome(cell.arm, cell.lr, cell.seed, rows, config.steps, model.vocab_size)
                if outcome.ended:
                    found[cell] = outcome
        return found

    def check(self, cell: Cell) -> None:
        """Raise ValueError if a cell has an invalid seed or rate, or its run exists and has other settings."""
        folder = self.cell_folder(cell)
        model, config = self.settings[cell.arm]
        here = compared(fields_of(model, replace(config, lr=cell.lr, seed=cell.seed)))
        if not (folder / "run.json").exists():
            return
        run, name = read_run_file(folder / "run.json"), f"the run in {folder}"
        there = compared(run["resolved"])
        changed = (option for option in here if there[option] != here[option])
        differences = "; ".join(f"{flag_name(option)} {there[option]}, not {here[option]}" for option in changed)
        require(not differences, f"{name} has {differences}; choose another --out")
        same_text = run["corpus"]["hash"] == self.data.corpus_hash
        require(same_text, f"{name} was trained on other text; delete it, or choose another --out")
        imports = check_imports(run["imports"])
        require(not imports, f"{name}: {'; '.join(imports)}; delete it, or choose another --out")

    def run(self, cells: list[Cell], later: int = 0) -> Outcomes:
        """Run those of `cells` that have not ended. Returns all their outcomes, in the order of `cells`.

        A line says how many runs that is, with at most so many `later` ones, and how long these take.
        Raises Stopped after a signal and CellFailed if a run fails. Running cells save before either. With
        `print_commands`, prints a line of shell for each run that has not ended, and exits.
        """
        self.asked.extend(cells)
        outcomes = self.outcomes(cells)
        waiting = [cell for cell in dict.fromkeys(cells) if cell not in outcomes]
        if self.print_commands and waiting:
            print(*map(self.shell_line, waiting), sep="\n")
            sys.exit()
        free = list(self.devices) * self.jobs
        running: dict[Cell, tuple[subprocess.Popen, str, float]] = {}
        with stop_requests() as stop, tqdm(total=len(waiting), unit="run", disable=None, dynamic_ncols=True) as bar:
            if waiting:
                more = f"; at most {later} more after these" if later else ""
                if self.took:
                    whole = fmean(self.took) * (len(waiting) + later) / len(free)
                    more += f", which takes {tqdm.format_interval(whole)}"
                bar.write(f"{len(waiting)} runs, {min(len(free), len(waiting))} at a time{more}")
            try:
                while waiting or running:
                    while waiting and free:
                        cell, device = waiting.pop(0), free.pop(0)
                        running[cell] = self.start(cell, device), device, time.monotonic()
                    time.sleep(POLL_SECONDS)
                    if stop:
                        raise Stopped(stop[0], "the same command")
                    for cell, (process, device, started) in list(running.items()):
                        if process.poll() is None:
                            continue
                        del running[cell]
                        free.append(device)
                        if process.returncode == InUse.code:  # a process of a killed command holds the lock: retry
                            warn(f"waiting for {self.cell_folder(cell)}, which another process uses")
                            waiting.append(cell)
                            continue
                        ended = self.outcomes([cell])
                        if not ended or process.returncode not in (0, NotFinite.code):
                            log = self.log(cell)
                            raise CellFailed(str(log), process.returncode, last_line(log))
                        outcomes |= ended
                        self.took.append(time.monotonic() - started)
                        bar.update()
                        bar.write(str(outcomes[cell]))
            finally:
                for process, *_ in running.values():
                    process.terminate()
                for process, *_ in running.values():
                    process.wait()
        return {cell: outcomes[cell] for cell in cells}

    def start(self, cell: Cell, device: str) -> subprocess.Popen:
        """Start a cell in a process of its own, whose output goes to a new log.

        Where Linux's `setpriv` is installed, it gets SIGTERM when this process is killed.
        """
        log = self.log(cell)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as file:
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
        folder, config = self.cell_folder(cell), self.settings[cell.arm][1]
        if (folder / "run.json").exists() if started is None else started:
            asked: dict[str, Any] = {"resume": True} | {name: getattr(config, name) for name in RESUMED_WITH}
        else:
            decided = {"lr": cell.lr, "seed": cell.seed, "dtype": config.dtype, "compile": config.compile}
            asked = combine(self.shared, cell.arm.asked, decided)
        asked |= ({"device": device} if device else {}) | {"out": str(folder)}
        return [sys.executable, train.__file__, *import_flags(), *to_flags(asked)]

    def reported(self, optima: Mapping[Arm, Optimum]) -> list[Cell]:
        """Every arm with every seed, at the arm's learning rate. Nothing before these are known."""
        return [Cell(arm, optima[arm].lr, seed) for seed in self.seeds for arm in self.settings if optima]

    def tune(self, lrs: Mapping[Arm, Sequence[float]], widen: int = WIDEN) -> tuple[dict[Arm, Optimum], Outcomes]:
        """The optimum of each arm, and the runs that found it.

        An arm starts with its `lrs` and one other seed. Up to `widen` times, it gets another rate or seed.
        """
        found: Outcomes = {}
        losses: dict[Arm, Losses] = {}
        wanted = {arm: (rates, 1) for arm, rates in lrs.items()}
        for rounds in range(widen, -1, -1):
            asked = [
                Cell(arm, lr, self.seeds.start + MAX_SEEDS + number)
                for arm, (rates, count) in wanted.items()
                for lr in rates
                for number in range(count)
            ]
            most = sum(most_runs(losses.get(arm, {}), *more, rounds) for arm, more in wanted.items())
            found |= self.run(asked, most - len(set(asked) - found.keys()) + len(lrs) * len(self.seeds))
            losses |= {arm: losses_of(arm, found.values()) for arm in wanted}
            wanted = {arm: more for arm in wanted if (more := next_runs(losses[arm], len(self.seeds)))}
            lowest = {arm: self.settings[arm][1].min_lr for arm in wanted}  # train.py refuses rates below
            wanted = {arm: (rates, count) for arm, (rates, count) in wanted.items() if rates[0] >= lowest[arm]}
            if not wanted:
                break
        return {arm: find_optimum(losses[arm]) for arm in lrs}, found


def last_line(log: Path) -> str:
    """The last error line in `log`, or else its last line."""
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


def losses_of(arm: Arm, runs: Iterable[Outcome]) -> dict[float, list[float]]:
    """val_bpb of an arm's runs, by learning rate; infinite if they diverged."""
    return grouped((run.lr, final_bpb([run]).get(run.seed, math.inf)) for run in runs if run.arm == arm)
