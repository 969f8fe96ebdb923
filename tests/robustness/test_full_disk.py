"""A disk that is full at any point of a run: one line with the path and the bytes it needs, exit code 1, no temporary
files, earlier checkpoints untouched, and once there is space the run goes on to the same bits.
"""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import train

try:
    import resource
except ImportError:  # missing on Windows
    resource = None  # type: ignore[assignment]

# A model so small that its checkpoint is smaller than loss.png.
COMMAND = "--dim 4 --hidden-dim 4 --layers 1 --heads 1 --context 16 --batch-size 4 --tokenizer bytes --device cpu "
COMMAND += "--dtype float32 --no-fast --eval-every 2 --save-every 2 --keep 2"


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 2 steps, one of 4, their prepared text, and the command of both."""
    folder = tmp_path_factory.mktemp("runs")
    for steps in (2, 4):
        train.main(
            [*command(text, folder / "cache", folder / str(steps)), "--schedule", "constant", f"--steps={steps}"]
        )
    return folder


def command(text: Path, cache: Path, run: Path) -> list[str]:
    return f"{COMMAND} --data {text} --cache-dir {cache} --out {run}".split()


def state(run: Path) -> dict[str, bytes]:
    """What a run leaves that does not depend on the time."""
    kept = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.safetensors")}
    rows = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "val_loss" in line]
    return kept | {"samples": (run / "samples.txt").read_bytes(), "evaluations": "".join(rows).encode()}


def end(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and last error line of train.py in this process."""
    capsys.readouterr()
    code = 0
    try:
        train.main(arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    return code, "".join(capsys.readouterr().err.splitlines(keepends=True)[-1:]).strip()


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".part") or path.name.startswith(".step")]


@contextmanager
def file_size_limit(size: int, folder: Path | None = None) -> Iterator[None]:
    """No file may grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FullDisk:
    """Makes Python's n-th attempt to create, open for writing or rename something in `folder` fail."""

    def __init__(self) -> None:
        self.folder, self.remaining = "/nowhere", 0
        sys.addaudithook(self.hook)  # which cannot be removed

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            mode, flags = arguments[1] or "", arguments[2] or 0
            writes = any(letter in mode for letter in "wax+") or flags & (os.O_WRONLY | os.O_RDWR)
        else:
            writes = event == "os.rename" or (event == "os.mkdir" and not os.path.isdir(arguments[0]))
        if writes and str(arguments[0]).startswith(self.folder):
            self.remaining -= 1
            if self.remaining == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

    @contextmanager
    def at(self, attempt: int, folder: Path) -> Iterator[None]:
        self.folder, self.remaining = str(folder), attempt
        try:
            yield
        finally:
            self.folder = "/nowhere"


@pytest.fixture(scope="module")
def full_disk() -> FullDisk:
    return FullDisk()


Disturbance = Callable[[Path], AbstractContextManager[None]]


def fails_and_goes_on(
    runs: Path, folder: Path, text: Path, disturbed: Disturbance, capsys: pytest.CaptureFixture[str]
) -> str | None:
    """Resume a copy of the short run in `folder` under a disturbance, then without one.

    Returns the error line, or None if the run was not disturbed.
    """
    run = shutil.copytree(runs / "2", folder / "run")
    resume = [*command(text, runs / "cache", run), "--resume", "--steps=4"]
    earlier = {path: path.read_bytes() for path in (run / "checkpoints/step-000002").iterdir()}
    with disturbed(folder):
        code, line = end(resume, capsys)
    if code:
        assert code == 1 and line.startswith("error: ") and str(folder) in line, line
        assert leftovers(folder) == [], line
        assert all(path.read_bytes() == content for path, content in earlier.items()), line
        assert end(resume, capsys)[0] == 0
    assert state(run) == state(runs / "4"), line
    shutil.rmtree(run)
    return line if code else None


@pytest.mark.skipif(resource is None, reason="needs a limit on the size of files")
def test_full_disk_by_file_size(runs, text, tmp_path, cases, record, capsys):
    """Every file in turn is the first that does not fit, from run.json to report.html."""
    sizes = {path.name: path.stat().st_size for path in (runs / "4").rglob("*") if path.is_file()}
    in_checkpoint = max(path.stat().st_size for path in (runs / "4/checkpoints/step-000004").iterdir())
    limits = [0, sizes["run.json"] + 500, in_checkpoint + 100, sizes["loss.png"] + 2000]
    limits += [sizes["report.html"] * number // 100 for number in range(cases(0, 100))]
    lines = []
    for limit in limits:
        lines.append(fails_and_goes_on(runs, tmp_path, text, partial(file_size_limit, limit), capsys))
    assert all(line and " bytes, and " in line and line.endswith(" are free") for line in lines), lines
    first = {line.split()[1].removeprefix(str(tmp_path / "run")) for line in filter(None, lines)}
    assert {"/run.json", "/checkpoints/step-000004", "/loss.png", "/report.html"} <= first
    record(limits=len(limits), exit_code_1=len(lines), first_that_did_not_fit=sorted(first))


def test_full_disk_by_operation(runs, text, tmp_path, full_disk, cases, record, capsys):
    """Every file and folder that is created, opened for writing or renamed, in turn, cannot be."""
    lines, full_disk.remaining = [], 0
    for attempt in range(1, 1000, cases(16, 1)):
        lines.append(fails_and_goes_on(runs, tmp_path, text, partial(full_disk.at, attempt), capsys))
        if full_disk.remaining > 0:  # there are fewer
            break
    assert lines.pop() is None and all(lines) and len(lines) >= 2, lines
    record(operations=len(lines), exit_code_1=len(lines))


@pytest.mark.skipif(resource is None, reason="needs a limit on the size of files")
def test_full_disk_while_the_text_is_prepared(text, tmp_path, full_disk, cases, record, capsys):
    """Nothing is left in the cache, and no run is started."""
    cache, run = tmp_path / "cache", tmp_path / "run"
    sentencepiece = ["--tokenizer=sentencepiece", "--vocab-size=290", "--steps=2"]
    arguments = [*command(text, cache, run), *sentencepiece]
    sizes = [size * 400 for size in range(cases(3, 100))]  # the tokenizer has 5 kB, the training text 40 kB
    attempts = range(1, 9, cases(3, 1))  # to create, open or rename something in the cache
    for disturbance in [*map(file_size_limit, sizes), *(full_disk.at(attempt, cache) for attempt in attempts)]:
        with disturbance:
            code, line = end(arguments, capsys)
        assert code == 1 and str(cache) in line, line
        assert "it needs" in line or "[Errno 28]" in line, line  # the latter for the folder itself
        assert not run.exists() and {path.suffix for path in cache.iterdir()} <= {".lock"}, line
    assert end(arguments, capsys)[0] == 0
    record(file_sizes=len(sizes), operations=len(attempts), exit_code_1=len(sizes) + len(attempts))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB in memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@contextmanager
def filled(free: int, disk: Path) -> Iterator[None]:
    """Leave `free` bytes of a disk from the first step on."""
    update, filler = train.Trainer.update, disk / "filler"

    def fill_and_update(trainer: train.Trainer, rate: float) -> None:
        if not filler.exists():
            filler.write_bytes(bytes(shutil.disk_usage(disk).free - free))
        update(trainer, rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "update", fill_and_update)
        yield
    filler.unlink(missing_ok=True)


def test_full_disk_in_memory(runs, text, small_disk, cases, record, capsys):
    """A disk that something else fills while the run trains, up to so many bytes."""
    free = [4096 * pages for pages in range(0, 60, cases(60, 1))]
    lines = [fails_and_goes_on(runs, small_disk, text, partial(filled, n), capsys) for n in free]
    assert lines[0] and "are free" in lines[0]
    record(
        disks=len(free),
        exit_code_1=sum(line is not None for line in lines),
        largest_that_failed=max(size for size, line in zip(free, lines, strict=True) if line),
    )


@pytest.mark.parametrize("flags", ["", "--optimizer adamw --no-tie-embeddings"])
def test_a_run_whose_checkpoints_do_not_fit_is_refused(flags, text, runs, tmp_path, capsys):
    """Before it starts. What it asks for is the size of the tensors in a checkpoint, up to those of the norms."""
    arguments = [*command(text, runs / "cache", tmp_path / "run"), "--dim=64", "--hidden-dim=96", *flags.split()]
    assert end([*arguments, "--steps=1"], capsys)[0] == 0
    saved = tmp_path / "run/checkpoints/step-000001"
    size = sum((saved / name).stat().st_size for name in ("model.safetensors", "optimizer.safetensors"))
    shutil.rmtree(tmp_path / "run")
    endless = [f"--steps={2**31 - 1}", "--save-every=1", f"--keep={2**31 - 1}", "--lr=1e38"]  # would diverge at once
    code, line = end([*arguments, *endless], capsys)
    assert code == 1 and "bytes free, and this run's checkpoints need" in line and "lower --keep" in line
    assert list(tmp_path.iterdir()) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: (2**30, 2**30, 0))
        finished = end(["--resume", f"--out={runs / '4'}"], capsys)  # has nothing left to save
    assert finished[0] == 0
    asked = int(line.rpartition(" of ")[2].partition(";")[0].replace(",", ""))
    assert 0.9 * size < asked <= size
