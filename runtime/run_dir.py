"""The directory of a run: who may write to it, its run.json, and its logs."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from config import REMOVED, check_fields
from files import Json, describe_write_error, is_a, lock_file, read_ours, require, warn, write_atomically, write_ours

RUNS_FOLDER = Path("runs")
LOCK = ".lock"  # only one process at a time may write to a folder that has it
RUN_FORMAT = 3  # version of run.json; increase it whenever its fields change, or what they mean
SAMPLE_HEADING = "----- step {} -----\n"
RunFile = Json  # the contents of a run.json
Row = Json  # a line of a .jsonl
Tracker = Callable[[Row], None]
write_run_file = partial(write_ours, format=RUN_FORMAT)  # path, run


def newest_run() -> Path:
    """The run that was started or resumed last. Raises ValueError if there is none."""
    started = sorted(RUNS_FOLDER.glob("*/run.json"), key=lambda file: file.stat().st_mtime_ns)
    require(started, f"there is no run in {RUNS_FOLDER}/ yet; start one with python train.py, or name one")
    return started[-1].parent


def check_has_no_run(folder: Path) -> None:
    """Raise ValueError unless `folder` can take a new run, and InUse if another process is at it.

    A run exists from the moment its run.json does. One that was killed before has left the lock and a part of that.
    """
    if (folder / "run.json").is_file():
        with lock_file(folder / LOCK):
            raise ValueError(f"--out {folder} already holds a run; add --resume to continue, or choose another folder")
    others = {path.name for path in folder.glob("*")} - {LOCK, "run.json.part"}
    require(not others, f"--out {folder} is not empty; choose a new folder")


def make_run_dir(out: Path | None, name: str) -> Path:
    """Create `out`, or the first unused one of runs/NAME, runs/NAME-2, ... Raises ValueError if that fails."""
    number = 1
    while True:
        folder = out or RUNS_FOLDER / (f"{name}-{number}" if number > 1 else name)
        try:
            folder.mkdir(parents=True, exist_ok=folder == out)
            return folder
        except FileExistsError:
            require(folder != out, f"--out {folder} is a file; name a folder")
        number += 1


def read_run_file(path: Path) -> RunFile:
    """The contents of a run.json. Raises ValueError if it is missing, damaged or edited, or has another format."""
    run = read_ours(path, RUN_FORMAT)
    for options in (run["asked"], run["resolved"]):
        for name in [name for name, default in REMOVED.items() if options.get(name) == default]:
            del options[name]
    check_fields(run["resolved"], str(path))
    return run


def load_run(folder: Path) -> RunFile:
    """The run.json of the run in `folder`. Raises ValueError if it or a log is damaged, or its checkpoints are gone."""
    has_run = (folder / "run.json").is_file()
    require(has_run, f"there is no run in {folder}; start one with python train.py, or name another folder")
    run, rows = read_run_file(folder / "run.json"), read_rows(folder / "metrics.jsonl")
    read_rows(folder / "watch.jsonl")
    first = min(run["resolved"]["save_every"], run["resolved"]["steps"])  # a step is saved before it is evaluated
    logged = any(row["step"] > first or (row["step"] == first and "val_loss" in row) for row in rows)
    lost = f"{folder}/checkpoints holds no checkpoint; restore it, or delete metrics.jsonl to begin again"
    require(not logged or any((folder / "checkpoints").glob("step-*")), lost)
    return run


def machine_of(run: RunFile) -> str:
    """What the bits of a run depend on."""
    return f"{run['device']}, {run['instruction_set']}, torch {run['versions']['torch']}"


def continued(earlier: RunFile, run: RunFile, step: int) -> RunFile:
    """The run.json of a run that is resumed at `step`. If the machine has changed, a line on standard error says so."""
    there, here = machine_of(earlier), machine_of(run)
    if there != here:
        warn(f"warning: the last digits may differ from an uninterrupted run: {there}, now {here}")
    resumed = [*earlier.get("resumed", []), {"step": step, "commit": run["commit"], "command": run["command"]}]
    imports = [record for record in earlier["imports"] if record not in run["imports"]] + run["imports"]
    kept = {name: earlier[name] for name in ("command", "commit", "weights_from") if name in earlier}
    return run | kept | {"resumed": resumed, "imports": imports}


class Log:
    """`metrics.jsonl` of a run, whose rows the `tracker` gets too, and `samples.txt`.

    What was logged after `step` is dropped. A sample is written before its row, so one without a row is dropped too.
    """

    def __init__(self, folder: Path, step: int, tracker: Tracker):
        self.path, self.samples, self.tracker = folder / "metrics.jsonl", folder / "samples.txt", tracker
        self.rows = keep_rows(self.path, step)
        if (folder / "watch.jsonl").exists():
            keep_rows(folder / "watch.jsonl", step)
        evaluated = max((row["step"] for row in self.rows if "val_loss" in row), default=0)
        kept = [SAMPLE_HEADING.format(step) + text for step, text in read_samples(folder) if step <= evaluated]
        write_atomically(self.samples, "".join(kept))

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        append(self.path, json.dumps(row, allow_nan=False) + "\n")
        self.tracker(row)

    def add_sample(self, step: int, text: str) -> None:
        append(self.samples, SAMPLE_HEADING.format(step) + text + "\n")


def append(path: Path, text: str) -> None:
    """Add `text` to a file. Raises OSError, naming the file, if the disk is full."""
    data = text.encode()
    with describe_write_error(path, len(data)), path.open("ab") as file:
        file.write(data)


def keep_rows(path: Path, step: int) -> list[Row]:
    """Drop the rows after `step` from a `.jsonl`, and return the others."""
    rows = [row for row in read_rows(path) if row["step"] <= step]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def read_samples(folder: Path) -> list[tuple[int, str]]:
    """The samples of the run in `folder`, each with its step. What is not UTF-8 is shown as U+FFFD."""
    path = folder / "samples.txt"
    text = path.read_bytes().decode("utf-8", "replace") if path.exists() else ""
    parts = re.split(SAMPLE_HEADING.format(r"(\d+)"), text)[1:]
    return [(int(step), sample) for step, sample in zip(parts[::2], parts[1::2], strict=True)]


def read_rows(path: Path) -> list[Row]:
    """The rows of a `.jsonl`, or none. A truncated last line is ignored.

    Raises ValueError, naming the line, for other damage: a row that is there twice, steps that fall, NaN.
    """
    rows: list[Row] = []
    found = set()
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for number, line in enumerate(lines, 1):
        row: Any = None
        with suppress(ValueError):
            row = json.loads(line)
        damaged = f"{path} is damaged in line {number}; repair or remove the file"
        require(isinstance(row, dict) and is_a(row.get("step"), int), damaged)
        require(all(math.isfinite(value) for value in row.values() if isinstance(value, float)), damaged)
        names = (row["step"], row.get("block"), row.get("site"), *row)  # what is there once
        require(names not in found and (not rows or row["step"] >= rows[-1]["step"]), damaged)
        found.add(names)
        rows.append(row)
    return rows


@contextmanager
def open_tracker(kind: str, folder: Path, run: RunFile, step: int) -> Iterator[Tracker]:
    """A function that passes rows on to TensorBoard or Weights & Biases (offline with WANDB_MODE=offline), if any.

    TensorBoard then hides earlier rows after `step`. Weights & Biases continues the run with this id, and marks it as
    failed if an error ends it.
    """
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1) as writer:

            def to_tensorboard(row: Row) -> None:
                for name, value in row.items():
                    if name != "step" and value is not None:
                        writer.add_scalar(name, value, row["step"])
                writer.flush()

            yield to_tensorboard
    elif kind == "wandb":
        import wandb

        project = os.environ.get("WANDB_PROJECT", "normal-llama")
        names = {"project": project, "name": folder.name, "dir": str(folder), "id": run["id"]}
        tracked, failed = wandb.init(**names, config=run, resume="allow", reinit="finish_previous"), True
        try:
            yield lambda row: tracked.log({name: row[name] for name in row.keys() - {"step"}}, step=row["step"])
            failed = False
        finally:
            tracked.finish(exit_code=int(failed))  # as a context, it would print a traceback
    else:
        yield lambda row: None
