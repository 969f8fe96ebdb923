"""Runs of `train.py` that are compared: which arms there are, running them, and what came out.

An arm is a value for each factor: a norm, a placement, and any other option of `train.py`. A cell is one run: an arm
at a learning rate with a seed, in a directory of its own. Arms share their seeds, and so their initial draws and
batches: they are compared in pairs.
"""

import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import train
from config import ModelConfig, TrainConfig, require
from data.prepare import Prepared
from experiments.ablation.outcome import Arm, Outcome, best_lr, read_outcome
from experiments.ablation.processes import Process
from norms.placement import Unsupported
from runtime.device import describe
from runtime.plugins import check_imports, import_flags
from runtime.process import IN_USE, NOT_FINITE, CellFailed, Stopped, bad_input, stop_requests
from runtime.run import check_same_text, differences, resolve
from runtime.run_dir import read_rows, read_run_file, refuse_links

SELECTION_SEEDS = 2  # seeds that select each arm's learning rate
MAX_SEEDS = 1000  # reported seeds; selection seeds start at this offset
POLL_SECONDS = 0.3  # between checks of the running cells
LONGEST_ROW = 1000  # bytes of a metrics.jsonl in which there is at least one whole row
NOT_COMPARED = {"out", "cache_dir", "log", "keep", "save_every"}  # fields of TrainConfig that change no result


@dataclass(frozen=True)
class Cell:
    """One run of `train.py`."""

    arm: Arm
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.=+-]", "-", f"{self.arm.name}-lr{self.lr}-seed{self.seed}")

    @property
    def flags(self) -> list[str]:
        return [*self.arm.flags, "--lr", str(self.lr), "--seed", str(self.seed)]


def cells(arms: Iterable[Arm], lrs: Iterable[float], seeds: Iterable[int]) -> list[Cell]:
    arms = list(arms)
    seeds = list(seeds)
    return [Cell(arm, lr, seed) for lr in lrs for seed in seeds for arm in arms]


OnEnd = Callable[[dict["Cell", Outcome]], None]  # gets the outcomes so far


def ignore(outcomes: dict[Cell, Outcome]) -> None:
    pass


Settings = dict[Arm, tuple[ModelConfig, TrainConfig]]


def resolve_arms(arms: Iterable[Arm], train_flags: list[str]) -> Settings:
    """The configurations of each arm, with `train_flags` for all. Prints why it skips an unsupported combination.

    Raises ValueError if no arm is left.
    """
    settings, reason = {}, ""
    for arm in dict.fromkeys(arms):
        try:
            settings[arm] = resolve(train.parse([*train_flags, *arm.flags]))
            require(not settings[arm][1].init_from, "runs are compared from drawn weights; leave out --init-from")
        except Unsupported as error:
            reason = str(error)
            print(f"skipped: {reason}", file=sys.stderr)
    require(bool(settings), reason)
    return settings


def settings_digest(settings: Settings) -> str:
    """Short hash of the compared settings. More seeds, learning rates or options at their defaults do not change it."""
    config = next(iter(settings.values()))[1]
    config = replace(config, device=torch.device(config.device).type)  # the same on every card
    defaults = asdict(ModelConfig()) | asdict(TrainConfig())

    def chosen(values: dict[str, Any]) -> dict[str, Any]:
        return {name: values[name] for name in sorted(values.keys() - NOT_COMPARED) if values[name] != defaults[name]}

    arms = []
    for arm, (model_config, _) in settings.items():
        values = asdict(model_config)
        if model_config.head_dim == model_config.dim // model_config.heads:
            values["head_dim"] = defaults["head_dim"]
        arms.append([dict(arm.factors), chosen(values)])
    return hashlib.sha256(json.dumps([chosen(asdict(config)), arms]).encode()).hexdigest()[:8]


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

    def checkpoint(self, cell: Cell) -> Path:
        """The last checkpoint of a finished cell."""
        return self.cell_folder(cell) / "checkpoints" / f"step-{self.settings[cell.arm][1].steps:06d}"

    def outcome(self, cell: Cell) -> Outcome | None:
        """The outcome of a cell, or None if it has not ended."""
        model_config, config = self.settings[cell.arm]
        rows = read_rows(self.cell_folder(cell) / "metrics.jsonl")
        return read_outcome(cell.arm, cell.lr, cell.seed, rows, config.steps, math.log(model_config.vocab_size))

    def outcomes(self, cells: Iterable[Cell]) -> dict[Cell, Outcome]:
        """The outcomes of those of `cells` that have ended."""
        with bad_input():  # a damaged log
            return {cell: outcome for cell in cells if (outcome := self.outcome(cell))}

    def check(self, cells: Iterable[Cell]) -> None:
        """Raise ValueError if the folder is not for runs like these, or holds a cell trained with other settings."""
        folder = self.folder
        if folder.exists() and not (folder / "cells").is_dir():
            require(
                folder.is_dir() and not any(folder.iterdir()), f"--out {folder} is not empty; choose another folder"
            )
        for part in (folder, folder / "cells"):
            refuse_links(part)
        # The index of a card does not matter; its kind is compared by its name.
        compared = [field.name for field in fields(TrainConfig) if field.name not in NOT_COMPARED | {"device"}]
        for cell in cells:
            run_file = self.cell_folder(cell) / "run.json"
            if run_file.exists():
                model_config, config = self.settings[cell.arm]
                config = replace(config, lr=cell.lr, seed=cell.seed)
                run = read_run_file(run_file)
                different, compared_here = differences(run, model_config, config).items(), {*compared, *run["model"]}
                listed = [f"{name} {there}, not {here}" for name, (there, here) in different if name in compared_here]
                require(not listed, f"the run in {run_file.parent} has {'; '.join(listed)}")
                check_same_text(run_file.parent, run, self.data)
                for line in check_imports(run):
                    raise ValueError(f"the run in {run_file.parent}: {line}")
                here = f"{describe(torch.device(config.device))} with torch {torch.__version__}"
                there = f"{run.get('device')} with torch {run['versions'].get('torch')}"
                require(there == here, f"the run in {run_file.parent} was trained on {there}, not {here}")

    # Running.

    def run(self, cells: list[Cell], on_end: OnEnd = ignore) -> dict[Cell, Outcome]:
        """Run those of `cells` that have not ended. Returns all their outcomes, in the order of `cells`.

        `on_end` gets the outcomes so far after each cell that ends. Raises Stopped after a signal and CellFailed if a
        run fails. Running cells save before either.
        """
        with bad_input():
            self.check(cells)
        outcomes = self.outcomes(cells)
        waiting = [cell for cell in dict.fromkeys(cells) if cell not in outcomes]
        steps = {cell: self.settings[cell.arm][1].steps for cell in cells}
        free = list(self.devices) * self.jobs
        running: dict[Cell, tuple[Process, str]] = {}
        with stop_requests() as stop, tqdm(
            total=sum(steps.values()), initial=sum(steps[cell] for cell in outcomes), unit="step",
            smoothing=0, disable=None, dynamic_ncols=True,  # the remaining time is estimated from the mean speed
        ) as bar:  # fmt: skip
            try:
                while waiting or running:
                    while waiting and free:
                        cell, device = waiting.pop(0), free.pop(0)
                        running[cell] = self.start(cell, device), device
                    time.sleep(POLL_SECONDS)
                    if stop:
                        raise Stopped(stop[0], "the same command")
                    for cell, (process, device) in list(running.items()):
                        if process.poll() is not None:
                            del running[cell]
                            free.append(device)
                            if process.returncode == IN_USE:  # a process of a killed command holds the lock: retry
                                waiting.append(cell)
                                continue
                            line = process.last_line() if process.returncode else ""
                            outcomes[cell] = self.finished_outcome(cell, process.returncode, line)
                            bar.write(str(outcomes[cell]))
                            on_end(outcomes)
                    done = sum(steps[cell] for cell in outcomes) + sum(self.steps_done(cell) for cell in running)
                    bar.update(done - bar.n)
            finally:
                for process, _ in running.values():
                    process.terminate()
                for process, _ in running.values():
                    process.wait()
        return {cell: outcomes[cell] for cell in cells}

    def start(self, cell: Cell, device: str = "") -> Process:
        """Start or resume a cell in a process of its own. Its output goes to a log file next to its folder."""
        folder = self.cell_folder(cell)
        folder.parent.mkdir(parents=True, exist_ok=True)
        return Process(self.command(cell, device), Path(f"{folder}.log"), self.threads)

    def command(self, cell: Cell, device: str = "") -> list[str]:
        """The command that starts a cell on `device`, or resumes it."""
        folder = self.cell_folder(cell)
        flags = [*self.train_flags, *cell.flags]
        if (folder / "run.json").exists():
            cache = getattr(train.parse(self.train_flags), "cache_dir", "")
            flags = ["--resume", *import_flags(), *(["--cache-dir", cache] if cache else [])]
        flags += ["--device", device] if device else []
        return [sys.executable, train.__file__, *flags, "--out", str(folder)]

    def finished_outcome(self, cell: Cell, code: int, line: str = "") -> Outcome:
        """The outcome of a cell whose process ended with exit code `code`. Raises CellFailed if the run failed.

        `line` is its error line or its last line.
        """
        outcome = self.outcome(cell)
        if outcome is None or code not in (0, NOT_FINITE):
            raise CellFailed(f"{self.cell_folder(cell)}.log", code, line)
        return outcome

    def steps_done(self, cell: Cell) -> int:
        """The last step in a running cell's log, of which only the end is read: this is done several times a second."""
        log = self.cell_folder(cell) / "metrics.jsonl"
        if not log.exists():
            return 0
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LONGEST_ROW))
            steps = re.findall(rb'"step": (\d+),', file.read())
        return int(steps[-1]) if steps else 0

    # Learning rates.

    def selection(self, arms: Iterable[Arm], lrs: Iterable[float], first_seed: int) -> list[Cell]:
        """The runs that select each arm's learning rate, on seeds that are not reported."""
        first = first_seed + MAX_SEEDS
        return cells(arms, lrs, range(first, first + SELECTION_SEEDS))

    def select_lrs(
        self, arms: list[Arm], lrs: list[float], first_seed: int, widen: int = 0, on_end: OnEnd = ignore
    ) -> tuple[dict[Arm, float], dict[Cell, Outcome]]:
        """Each arm's best learning rate of `lrs` on the selection seeds, and the runs that selected it.

        While an arm's best is its lowest or its highest, a rate beyond it is tried, at the spacing of the grid and up
        to `widen` times.
        """
        tried = {arm: sorted(set(lrs)) for arm in arms}
        found: dict[Cell, Outcome] = {}
        for _ in range(widen + 1):
            wanted = [cell for arm in arms for cell in self.selection([arm], tried[arm], first_seed)]
            found |= self.run(wanted, on_end)
            best = {arm: best_lr([found[cell] for cell in found if cell.arm == arm]) for arm in arms}
            beyond = {arm: lr for arm in arms if (lr := next_lr(tried[arm], best[arm]))}
            if not beyond:
                break
            tried |= {arm: sorted([*tried[arm], lr]) for arm, lr in beyond.items()}
        return best, found


def next_lr(lrs: list[float], best: float) -> float | None:
    """The rate beyond the end of the sorted grid `lrs` at which `best` lies, or None if it lies inside or is alone."""
    if len(lrs) < 2 or lrs[0] < best < lrs[-1]:
        return None
    neighbor = lrs[1] if best == lrs[0] else lrs[-2]
    return float(f"{best * best / neighbor:.3g}")
