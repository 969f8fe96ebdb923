"""Killed at any moment: after SIGKILL the same command, or --resume, ends with the same bits. One folder, one run."""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import train

CHANGING = {"os.rename": 1, "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "shutil.rmtree": 0}  # arguments with the path


def before_file_event(action: Callable[[str, Path], None]) -> None:
    """Call `action(event, path)` before "open" for writing, "fsync" and CHANGING. For forks: it cannot be undone."""
    fsync = os.fsync

    def hook(event: str, arguments: tuple) -> None:
        if event in CHANGING:
            action(event, Path(os.fsdecode(arguments[CHANGING[event]])))
        elif event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR) and not isinstance(arguments[0], int):
            action(event, Path(os.fsdecode(arguments[0])))

    def counted(descriptor: int) -> None:
        action("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    sys.addaudithook(hook)
    os.fsync = counted  # type: ignore[assignment]


def train_until(what: str, name: str, k: int, number: int, arguments: list[str]) -> None:
    """Train, and get a signal before this happens to a file of this name for the k-th time, from 0."""
    seen = itertools.count()

    def send(event: str, path: Path) -> None:
        if (event, path.name) == (what, name) and next(seen) == k:
            os.kill(os.getpid(), number)

    before_file_event(send)
    train.main(arguments)


# What happens to which file; the k-th time, from 0.
MOMENTS = {
    "before there is a run": ("os.rename", "run.json", 0),
    "the log": ("os.rename", "metrics.jsonl", 0),
    "the first save": ("os.rename", "step-000003", 0),
    "a save that is not flushed": ("fsync", ".step-000006-unfinished", 0),
    "a save that is not renamed": ("os.rename", "step-000006", 0),
    "an old checkpoint that is half deleted": ("os.rmdir", ".step-000003-retired", 0),
    "a sample without a row": ("open", "metrics.jsonl", 3),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_kills_before_changes_of_the_disk(moment, command, undisturbed, fork, same, tmp_path):
    run = tmp_path / "run"
    assert fork(train_until, *MOMENTS[moment], signal.SIGKILL, command).wait() == -signal.SIGKILL
    again = ["--resume", "--out", str(run)] if (run / "run.json").exists() else command
    assert fork(train.main, again).wait() == 0
    assert same(run, undisturbed) and not [*run.rglob("*.part"), *run.rglob(".step-*")]


def test_order_of_flushes_and_renames(command, fork, tmp_path):
    """What is renamed is on the disk before, and its new name before anything else is renamed or deleted."""
    # A power failure may undo renames that were not flushed, and empty files that were not.
    trace, run = tmp_path / "trace.txt", tmp_path / "run"

    def traced() -> None:
        lines = trace.open("w", buffering=1)
        before_file_event(lambda event, path: print(event, path, file=lines) if path != trace else None)
        train.main([*command, "--keep", "1"])

    assert fork(traced).wait() == 0
    events = [(event, Path(path)) for event, _, path in (line.partition(" ") for line in trace.read_text().split("\n"))]
    events = [(event, path) for event, path in events if path.is_relative_to(run)]
    saved = [path.name for path in (run / "checkpoints/step-000009").iterdir()]
    renamed = []
    for number, ((event, path), following) in enumerate(itertools.pairwise(events)):
        if event != "os.rename" or "-unfinished" in str(path):
            continue
        renamed.append(path.name)
        if not path.name.endswith("-retired"):
            flushed = {path for event, path in events[:number] if event == "fsync"}
            unfinished = path.with_name(f".{path.name}-unfinished")
            whole = [unfinished, *(unfinished / name for name in saved)]
            assert flushed.issuperset([path.with_name(f"{path.name}.part")] if path.suffix else whole), path
            assert following == ("fsync", path.parent), path
    # The checkpoint before goes last: with one to keep, a kill must not leave none.
    saves = ["step-000003", "step-000006", ".step-000003-retired", "step-000009", ".step-000006-retired"]
    assert renamed == ["run.json", "metrics.jsonl", "samples.txt", *saves, "loss.png", "report.html"]


def suspended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_two_runs_in_one_folder(command, undisturbed, fork, same, until, tmp_path):
    """Started together or resumed: one trains as if alone, the other exits with 4. After SIGKILL the folder is free."""
    run = tmp_path / "run"
    pair = [fork(train_until, "open", "trainer.json", 0, signal.SIGSTOP, command) for _ in range(2)]
    until(lambda: any(child.ended() for child in pair) and any(not c.ended() and suspended(c.pid) for c in pair))
    loser, winner = sorted(pair, key=lambda child: not child.ended())
    assert loser.exitcode == 4 and loser.text.endswith(f"error: {run} is in use by another process\n"), loser.text
    for again in (command, ["--resume", "--out", str(run)]):
        other = fork(train.main, again)
        assert other.wait() == 4 and other.text == f"error: {run} is in use by another process\n", other.text
    winner.send(signal.SIGKILL)
    winner.wait()
    train.main(["--resume", "--out", str(run)])
    assert same(run, undisturbed)
