"""The directory of a run: who may write to it, and its logs."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # missing on Windows: locking is skipped there
    fcntl = None  # type: ignore[assignment]

from runtime.exit_codes import RunInUse

RUNS = Path("runs")
Tracker = Callable[[dict[str, Any]], None]


def newest_run() -> Path:
    """The run that was started or resumed last. Raises ValueError if there is none."""
    started = {file.stat().st_mtime_ns: file.parent for file in RUNS.glob("*/run.json")}
    if not started:
        raise ValueError(f"there is no run in {RUNS}/ yet; start one with python train.py, or name one")
    return started[max(started)]


def check_run_dir(folder: Path, exists: bool, writes: bool = True) -> None:
    """Raise ValueError unless `folder` holds a run (`exists`) or can take a new one, and is writable (`writes`).

    A run exists from the moment its run.json does. If a run was killed before, its folder has at most the lock
    and a part of run.json, and takes a new run.
    """
    if exists:
        if not (folder / "run.json").is_file():
            raise ValueError(f"there is no run in {folder}; start one with python train.py, or name another folder")
    elif (folder / "run.json").exists():
        raise ValueError(f"--out {folder} already holds a run; add --resume to continue it, or choose another folder")
    elif folder.is_dir() and any(path.name not in (".lock", "run.json.part") for path in folder.iterdir()):
        raise ValueError(f"--out {folder} is not empty; choose a new folder")
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if writes and not os.access(parent, os.W_OK):
        raise ValueError(f"--out {folder}: no permission to write in {parent}")


def make_run_dir(out: Path | None, name: str) -> Path:
    """Create `out`, or the first unused one of runs/NAME, runs/NAME-2, ... Raises ValueError if that fails."""
    candidates = [out] if out else (RUNS / (f"{name}-{number}" if number > 1 else name) for number in count(1))
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=folder == out)
            return folder
        except FileExistsError:
            if folder == out:
                raise ValueError(f"--out {folder} is a file") from None
        except OSError as error:
            raise ValueError(f"--out {folder} cannot be created: {error.strerror}") from None
    raise AssertionError("count() is infinite")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to `folder`. Raises RunInUse if one already does.

    The operating system frees the lock when the process ends, however it ends.
    """
    with open(folder / ".lock", "w") as lock:
        if fcntl:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunInUse(f"{folder} is in use by another process") from None
        yield


def check_not_in_use(folder: Path) -> None:
    """Raise RunInUse if another process writes to `folder`, so that a second command need not prepare the text first.

    Of two that start together, `locked` decides.
    """
    if (folder / ".lock").exists() and os.access(folder / ".lock", os.W_OK):
        with locked(folder):
            pass


class Log:
    """`metrics.jsonl` of a run, one JSON object a line, also passed to the `tracker`; and `samples.txt`.

    Resuming from `step` drops what was logged after it, since those steps run again.
    """

    def __init__(self, folder: Path, step: int, tracker: Tracker):
        self.path, self.tracker = folder / "metrics.jsonl", tracker
        self.rows = [row for row in read_rows(self.path) if row["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.samples = folder / "samples.txt"
        if self.samples.exists():
            write_atomically(self.samples, samples_until(step, self.samples.read_text("utf-8")))

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self.tracker(row)

    def add_sample(self, step: int, text: str) -> None:
        with self.samples.open("a", encoding="utf-8") as file:
            file.write(f"----- step {step} -----\n{text}\n")


def samples_until(step: int, text: str) -> str:
    """The part of a `samples.txt` that belongs to the first `step` steps."""
    later = (found.start() for found in re.finditer(r"^----- step (\d+) -----$", text, re.M) if int(found[1]) > step)
    return text[: next(later, len(text))]


def last_sample(folder: Path) -> str:
    """The newest sample in the `samples.txt` of the run in `folder`, or nothing if there is none."""
    samples = folder / "samples.txt"
    text = samples.read_text("utf-8") if samples.exists() else ""
    return re.split(r"^----- step \d+ -----\n", text, flags=re.M)[-1]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, or none if there is no such file. A truncated last line is ignored."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that no reader ever sees half of it, nor anyone after a power failure."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf-8")
    sync(part)
    part.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a directory
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_tracker(kind: str) -> None:
    """Raise ValueError if the package that `make_tracker` needs is not installed."""
    if kind != "none" and find_spec(kind) is None:
        raise ValueError(f"--log {kind} needs the package {kind}: pip install {kind}")


def make_tracker(kind: str, folder: Path, run: dict[str, Any]) -> Tracker:
    """A function that passes rows on to TensorBoard, to Weights & Biases (offline with WANDB_MODE=offline), or drops
    them.
    """
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))

        def to_tensorboard(row: dict[str, Any]) -> None:
            for name in row.keys() - {"step"}:
                writer.add_scalar(name, row[name], row["step"])
            writer.flush()

        return to_tensorboard
    if kind == "wandb":
        import wandb

        tracked = wandb.init(project="normal-llama", name=folder.name, dir=str(folder), config=run)
        return lambda row: tracked.log({name: row[name] for name in row.keys() - {"step"}}, step=row["step"])
    return lambda row: None
