"""Runs of `train.py` that are compared: which arms there are, running them, and what came out.

An arm is a value for each factor: a norm, a placement, and any other option of `train.py`. A cell is one run: an arm
at a learning rate with a seed, in a directory of its own. Arms share their seeds, and so their initial weights and
batches: they are compared in pairs.
"""

import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import Any

from tqdm import tqdm

import train
from config import ModelConfig, TrainConfig, flag_name, require
from data.prepare import Prepared
from experiments.ablation.outcome import Arm, Outcome, best_lr, read_outcome
from experiments.ablation.processes import last_line, start_process
from norms.placement import Unsupported
from runtime.plugins import check_imports, import_flags
from runtime.process import IN_USE, NOT_FINITE, CellFailed, Stopped, bad_input, stop_requests
from runtime.run import resolve
from runtime.run_dir import read_rows, read_run_file

SELECTION_SEEDS = 2  # seeds that select each arm's learning rate
MAX_SEEDS = 1000  # reported seeds; selection seeds start at this offset
POLL_SECONDS = 0.3  # between checks of the running cells
NOT_COMPARED = {"out", "cache_dir", "log", "keep", "save_every"}  # options that change no result


@dataclass(frozen=True)
class Cell:
    """One run of `train.py`."""

    arm: Arm
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.=+-]", "-", f"{self.arm.name}-lr{self.lr}-seed{self.seed}")


Outcomes = dict[Cell, Outcome]  # of the cells that have ended
Settings = dict[Arm, tuple[ModelConfig, TrainConfig]]


def cells(arms: Iterable[Arm], lrs: Iterable[float], seeds: Iterable[int]) -> list[Cell]:
    arms, seeds = list(arms), list(seeds)
    return [Cell(arm, lr, seed) for lr in lrs for seed in seeds for arm in arms]


def resolve_arms(arms: Iterable[Arm], train_flags: list[str]) -> Settings:
    """The configurations of each arm, with `train_flags` for all. Prints why it skips an unsupported combination.

    `--dtype auto` is decided once, for all arms. Raises ValueError if no arm is left.
    """
    settings: Settings = {}
    shared, reason = train_flags, ""
    for arm in dict.fromkeys(arms):
        try:
            settings[arm] = resolve(train.parse([*shared, *arm.flags]))
        except Unsupported as error:
            reason = str(error)
            print(f"skipped: {reason}", file=sys.stderr)
            continue
        config = settings[arm][1]
        require(not config.init_from, "an ablation compares runs from random initialization; leave out --init-from")
        shared = [*train_flags, "--dtype", config.dtype]
    require(bool(settings), reason)
    return settings


def compared(model: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """The options that must match between runs of an arm. The GPU index is ignored."""
    device = training["device"].partition(":")[0]
    options = model | training | {"device": device}
    return {name: options[name] for name in options if name not in NOT_COMPARED}


def settings_digest(settings: Settings) -> str:
    """Short hash of the compared settings. More seeds or learning rates do not change it."""
    arms = [(arm.factors, compared(asdict(model), asdict(config))) for arm, (model, config) in settings.items()]
    return hashlib.sha256(json.dumps(arms).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Grid:
    """Runs in one folder, on each device `jobs` at a time, with `threads` CPU threads each."""

    folder: Path
    settings: Settings  # their learning rate and seed are replaced by those of a cell
    train_flags: list[str]  # flags of train.py that all cells share
    data: Prepared
    jobs: int
    threads: int
    devices: tuple[str, ...] = ("",)  # the --device of the runs; "" leaves it to `train_flags`

    def cell_folder(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name

    def log(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.log"

    def outcomes(self, cells: Iterable[Cell]) -> Outcomes:
        """The outcomes of those of `cells` that have ended."""
        found = {}
        with bad_input():  # a damaged log
            for cell in cells:
                model_config, config = self.settings[cell.arm]
                rows = read_rows(self.cell_folder(cell) / "metrics.jsonl")
                uniform = math.log(model_config.vocab_size)  # the loss of a uniform prediction
                if outcome := read_outcome(cell.arm, cell.lr, cell.seed, rows, config.steps, uniform):
                    found[cell] = outcome
        return found

    def check(self, cells: Iterable[Cell]) -> None:
        """Raise ValueError if the folder is not for runs like these, or holds a cell trained with other settings."""
        folder = self.folder
        ours = (folder / "cells").is_dir() or not folder.exists() or not any(folder.iterdir())
        require(ours, f"--out {folder} is not empty; choose another folder")
        for cell in cells:
            run_file = self.cell_folder(cell) / "run.json"
            if run_file.exists():
                model_config, config = self.settings[cell.arm]
                run, name = read_run_file(run_file), f"the run in {run_file.parent}"
                there = compared(run["model"], run["training"])
                here = compared(asdict(model_config), asdict(replace(config, lr=cell.lr, seed=cell.seed)))
                changed = [
                    f"{flag_name(option)} {there.get(option)}, not {value}"
                    for option, value in here.items()
                    if there.get(option) != value
                ]
                require(not changed, f"{name} has {'; '.join(changed)}; choose another --out")
                same_text = run["corpus"]["hash"] == self.data.corpus_hash
                require(same_text, f"the text of {name} has changed since it started")
                imports = check_imports(run)
                require(not imports, f"{name}: {'; '.join(imports)}")

    # Running.

    def run(self, cells: list[Cell]) -> Outcomes:
        """Run those of `cells` that have not ended. Returns all their outcomes, in the order of `cells`.

        Raises Stopped after a signal and CellFailed if a run fails. Running cells save before either.
        """
        with bad_input():
            self.check(cells)
        outcomes = self.outcomes(cells)
        waiting = [cell for cell in dict.fromkeys(cells) if cell not in outcomes]
        free = list(self.devices) * self.jobs
        running: dict[Cell, tuple[Popen, str]] = {}
        with stop_requests() as stop, tqdm(total=len(waiting), unit="run", disable=None, dynamic_ncols=True) as bar:
            try:
                while waiting or running:
                    while waiting and free:
                        cell, device = waiting.pop(0), free.pop(0)
                        running[cell] = self.start(cell, device), device
                    time.sleep(POLL_SECONDS)
                    if stop:
                        raise Stopped(stop[0], "the same command")
                    for cell in [cell for cell, (process, _) in running.items() if process.poll() is not None]:
                        process, device = running.pop(cell)
                        free.append(device)
                        if process.returncode == IN_USE:  # a process of a killed command holds the lock: retry
                            waiting.append(cell)
                            continue
                        ended = self.outcomes([cell])
                        if not ended or process.returncode not in (0, NOT_FINITE):
                            log = self.log(cell)
                            raise CellFailed(str(log), process.returncode, last_line(log))
                        outcomes |= ended
                        bar.update()
                        bar.write(str(outcomes[cell]))
            finally:
                for process, _ in running.values():
                    process.terminate()
                for process, _ in running.values():
                    process.wait()
        return {cell: outcomes[cell] for cell in cells}

    def start(self, cell: Cell, device: str) -> Popen:
        return start_process(self.command(cell, device), self.log(cell), self.threads)

    def command(self, cell: Cell, device: str = "") -> list[str]:
        """The command that starts a cell on `device`, or resumes it. What depends on the machine has been decided."""
        folder, config = self.cell_folder(cell), self.settings[cell.arm][1]
        if (folder / "run.json").exists():
            cache = getattr(train.parse(self.train_flags), "cache_dir", "")
            flags = ["--resume", *import_flags(), *(["--cache-dir", cache] if cache else [])]
        else:
            flags = [*self.train_flags, *cell.arm.flags, "--lr", str(cell.lr), "--seed", str(cell.seed)]
            flags += ["--dtype", config.dtype, "--compile" if config.compile else "--no-compile"]
        flags += ["--device", device] if device else []
        return [sys.executable, train.__file__, *flags, "--out", str(folder)]

    # Learning rates.

    def selection(self, arms: Iterable[Arm], lrs: Iterable[float], first_seed: int) -> list[Cell]:
        """The runs that select each arm's learning rate, on seeds that are not reported."""
        first = first_seed + MAX_SEEDS
        return cells(arms, lrs, range(first, first + SELECTION_SEEDS))

    def select_lrs(
        self, arms: list[Arm], lrs: list[float], first_seed: int, widen: int = 0
    ) -> tuple[dict[Arm, float], Outcomes]:
        """Each arm's best learning rate of `lrs`, and the runs that selected it, with up to `widen` rates beyond."""
        tried = {arm: sorted(set(lrs)) for arm in arms}
        found: Outcomes = {}
        for _ in range(widen + 1):
            wanted = [cell for arm in arms for cell in self.selection([arm], tried[arm], first_seed)]
            found |= self.run(wanted)
            best = {arm: best_lr([found[cell] for cell in found if cell.arm == arm]) for arm in arms}
            beyond = {arm: lr for arm in arms if (lr := next_lr(tried[arm], best[arm]))}
            tried |= {arm: sorted([*tried[arm], lr]) for arm, lr in beyond.items()}
        return best, found


def next_lr(lrs: list[float], best: float) -> float | None:
    """The rate beyond the end of the sorted grid `lrs` at which `best` lies, or None if it lies inside or is alone."""
    if len(lrs) < 2 or lrs[0] < best < lrs[-1]:
        return None
    neighbor = lrs[1] if best == lrs[0] else lrs[-2]
    return float(f"{best * best / neighbor:.3g}")
