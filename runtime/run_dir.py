"""The directory of a run: who may write to it, and its logs."""

import hashlib
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from files import DISK_FAILED, explained, is_a, load_json, lock_file, write_atomically

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
CHECKSUM = "sha256"  # of everything else in the file
REQUIRED = {
    "model": dict,
    "training": dict,
    "corpus": dict,
    "tokenizer": dict,
    "command": list[str],
    "versions": dict[str, str],
}
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
    """Keep other processes from writing to `folder`. Raises InUse if one already does.

    The operating system frees the lock when the process ends, however it ends.
    """
    refuse_links(folder)
    with lock_file(folder / ".lock"):
        yield


def check_not_in_use(folder: Path) -> None:
    """Raise InUse if another process writes to `folder`, so that a second command need not prepare the text first.

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


def _append(path: Path, text: str) -> None:
    data = text.encode()
    with explained(path, len(data)), path.open("ab") as file:
        file.write(data)


# --- run.json ------------------------------------------------------------------------------------------------------


def write_run_file(path: Path, description: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(description | {CHECKSUM: _checksum(description)}, indent=2) + "\n")


def read_run_file(path: Path) -> dict[str, Any]:
    """The contents of a run.json. Raises ValueError, naming the file, if it is missing or damaged.

    Those of earlier versions have no checksum. One that was edited by hand is taken once its checksum is removed.
    """
    try:
        description = load_json(path)
        valid = is_a(description, dict) and all(is_a(description.get(name), kind) for name, kind in REQUIRED.items())
    except (OSError, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"{path} is missing or damaged")
    if description.pop(CHECKSUM, None) not in (None, _checksum(description)):
        raise ValueError(f"{path} is damaged: its {CHECKSUM} differs; remove that line if you have edited the file")
    return description


def continued(earlier: dict[str, Any], description: dict[str, Any], step: int) -> dict[str, Any]:
    """The `description` of a run that is resumed at `step`, with its first command and a list of those that resumed it.

    If the machine has changed, a line on standard error says so.
    """
    if moved := changed_machine(earlier, description):
        print(f"warning: not the same bits as without the interruption: {'; '.join(moved)}", file=sys.stderr)
    imports = description["imports"]
    description |= {
        "command": earlier["command"],
        "resumed": [*earlier.get("resumed", []), {"step": step, "command": description["command"]}],
        "imports": [record for record in earlier.get("imports", []) if record not in imports] + imports,
    }
    return description | {name: earlier[name] for name in ("weights_from",) if name in earlier}


def changed_machine(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of the machine in a `run.json` may change the last digits and has changed, as "device A, now B"."""
    then, here = (
        {name: run.get(name) for name in ("device", "instruction_set")} | {"torch": run["versions"].get("torch")}
        for run in (earlier, now)
    )
    return [f"{name} {value}, now {here[name]}" for name, value in then.items() if value not in (None, here[name])]


def _checksum(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


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
