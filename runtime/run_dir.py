"""The directory of a run: who may write to it, and its logs."""

import json
import math
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # missing on Windows: locking is skipped there
    fcntl = None  # type: ignore[assignment]

from norms import is_a
from runtime.exit_codes import DISK_FAILED, RunInUse

RUNS = Path("runs")
COLUMNS = {  # of metrics.jsonl: a row has those of a training entry, an evaluation, a skipped step or a divergence
    "step": int,
    "tokens": int,
    "seconds": float,
    "train_loss": float,
    "lr": float,
    "grad_norm": float,
    "tokens_per_second": float,
    "val_loss": float,
    "val_bpb": float,
    "skipped": int,
    "not_finite": bool,
    "row_starts": list[int],
}
MAX_ROW_BYTES = 16 << 20  # of a line of metrics.jsonl
MAX_SAMPLES_BYTES = 64 << 20  # of samples.txt
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
    check_name(folder)
    if writes:
        refuse_links(folder)
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if writes and not os.access(parent, os.W_OK):
        raise ValueError(f"--out {folder}: no permission to write in {parent}")


def check_name(folder: Path) -> None:
    """Raise ValueError if the path of a folder is not UTF-8, as a file system allows."""
    try:
        os.fsencode(folder).decode()
    except UnicodeDecodeError:
        raise ValueError(f"--out {folder}: its name is not UTF-8, so safetensors could not read it") from None


def refuse_links(folder: Path) -> None:
    """Raise ValueError if there is anything but regular files and directories in `folder`.

    What is written to a link would go elsewhere, and opening a pipe may wait forever. `checkpoints` may be a link, to
    another disk.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode) and path.name != "checkpoints":
                raise ValueError(f"{path} is a symbolic link, and a run writes only to its own folder; delete it")
            if not any(kind(mode) for kind in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)):
                raise ValueError(f"{path} is neither a file nor a directory; delete it")


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
            if error.errno in DISK_FAILED:
                raise
            raise ValueError(f"--out {folder} cannot be created: {error.strerror}") from None
    raise AssertionError("count() is infinite")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to `folder`. Raises RunInUse if one already does.

    The operating system frees the lock when the process ends, however it ends.
    """
    refuse_links(folder)
    with open(folder / ".lock", "a") as lock:
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

    Resuming from `step` drops what was logged after it, since those steps run again. A sample is written before the
    row of its evaluation, so one without a row is dropped as well, unless samples.txt is larger than
    `MAX_SAMPLES_BYTES`. The last `unlogged` of those steps had no row yet.
    """

    def __init__(self, folder: Path, step: int, tracker: Tracker, unlogged: int = 0):
        self.path, self.tracker = folder / "metrics.jsonl", tracker
        self.rows = [row for row in read_rows(self.path) if row["step"] <= step]
        last = self.rows[-1]["step"] if self.rows else 0
        if last < step - unlogged:
            missing = f"steps {last + 1} to {step - unlogged}"
            print(f"warning: {self.path} is cut off: {missing} are not in it", file=sys.stderr)
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.samples = folder / "samples.txt"
        if self.samples.exists() and self.samples.stat().st_size <= MAX_SAMPLES_BYTES:
            evaluated = max((row["step"] for row in self.rows if "val_loss" in row), default=0)
            write_atomically(self.samples, samples_until(evaluated, read_samples(folder)))

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        _append(self.path, json.dumps(row, allow_nan=False) + "\n")
        self.tracker(row)

    def add_sample(self, step: int, text: str) -> None:
        _append(self.samples, f"----- step {step} -----\n{text}\n")


def samples_until(step: int, text: str) -> str:
    """The part of a `samples.txt` that belongs to the first `step` steps."""
    later = (found.start() for found in re.finditer(r"^----- step (\d+) -----$", text, re.M) if int(found[1]) > step)
    return text[: next(later, len(text))]


def last_sample(folder: Path) -> str:
    """The newest sample in the `samples.txt` of the run in `folder`, or nothing if there is none."""
    return re.split(r"^----- step \d+ -----\n", read_samples(folder), flags=re.M)[-1]


def read_samples(folder: Path) -> str:
    """The end of the `samples.txt` of the run in `folder`, or nothing.

    It is only to look at: damage in it is shown as U+FFFD.
    """
    samples = folder / "samples.txt"
    if not samples.is_file():
        return ""
    with samples.open("rb") as file:
        file.seek(max(0, samples.stat().st_size - MAX_SAMPLES_BYTES))
        return file.read().decode("utf-8", errors="replace")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, or none if there is no such file. A truncated last line is ignored.

    Raises ValueError, naming file and line, for anything but rows in the order of their steps. A digit that has
    become another digit is not noticed.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not _is_row(row) or (rows and row["step"] < rows[-1]["step"]):
            raise ValueError(f"{path} is damaged: line {number} is not a row of the log; repair or remove the file")
        rows.append(row)
    return rows


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, if it exists, but not a last one without its end. Long ones come in parts."""
    if path.is_file():
        with path.open("rb") as file:
            while line := file.readline(MAX_ROW_BYTES):
                if line.endswith(b"\n") or len(line) == MAX_ROW_BYTES:
                    yield line


def _is_row(row: Any) -> bool:
    """Whether the log can have written `row`. A gradient norm is null in a float16 step that overflowed."""
    return (
        is_a(row, dict)
        and "step" in row
        and row.keys() & {"train_loss", "val_bpb", "skipped", "not_finite"}
        and ("val_loss" in row) == ("val_bpb" in row)
        and all(
            (name == "grad_norm" and value is None) or (is_a(value, COLUMNS.get(name)) and _is_finite(value))
            for name, value in row.items()
        )
    )


def _is_finite(value: float | list[int]) -> bool:
    return all(abs(number) < math.inf for number in (value if isinstance(value, list) else [value]))


def has_evaluation(folder: Path, step: int) -> bool:
    """Whether the run in `folder` has logged the evaluation of `step`. Raises ValueError if its log is damaged."""
    return any(row["step"] == step and "val_loss" in row for row in read_rows(folder / "metrics.jsonl"))


# --- writing ---------------------------------------------------------------------------------------------------------


@contextmanager
def explained(path: Path, size: int) -> Iterator[None]:
    """Make an OSError inside, usually of a full disk, name what was to be written and its size in bytes."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        reason = f"{error.strerror or error}; it needs {size:,} bytes, and {free:,} are free"
        raise disk_error(error.errno, f"{path} cannot be written: {reason}") from None


def disk_error(number: int | None, message: str) -> OSError:
    """An OSError with this `errno` whose text is only the message."""
    error = OSError(message)
    error.errno = number
    return error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that no reader ever sees half of it, nor anyone after a power failure.

    What UTF-8 cannot encode, as in file names, is escaped. Raises OSError as `explained`.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    part = path.with_name(path.name + ".part")
    try:
        with explained(path, len(data)):
            part.unlink(missing_ok=True)  # it may be a link
            part.write_bytes(data)
            sync(part)
            part.replace(path)
            sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a directory
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _append(path: Path, text: str) -> None:
    data = text.encode()
    with explained(path, len(data)), path.open("ab") as file:
        file.write(data)


# --- trackers --------------------------------------------------------------------------------------------------------


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
                if isinstance(row[name], int | float):
                    writer.add_scalar(name, row[name], row["step"])
            writer.flush()

        return to_tensorboard
    if kind == "wandb":
        import wandb

        tracked = wandb.init(project="normal-llama", name=folder.name, dir=str(folder), config=run)
        return lambda row: tracked.log({name: row[name] for name in row.keys() - {"step"}}, step=row["step"])
    return lambda row: None
