"""Killed at any moment: after SIGKILL the same command, or --resume, ends with the same bits."""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ablate
import train
from runtime.checkpoint import list_checkpoints
from runtime.process import STOP_SIGNALS
from runtime.run_dir import read_rows

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and finds processes in /proc"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # it has threads, of which none is needed
]
SAVE_EVERY = 3
STEPS = f"--steps 9 --save-every {SAVE_EVERY} --eval-every 9 --eval-tokens 64 --dropout 0.1"


@pytest.fixture
def command(flags: list[str], tmp_path: Path) -> list[str]:
    """A run in tmp_path/run."""
    return [*flags, *STEPS.split()]


@pytest.fixture(scope="module")
def undisturbed(flags_in, tmp_path_factory) -> Iterator[Path]:
    """The same run, not killed. It logs every step, and so do those that are forked from here."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "LOG_EVERY", 1)
        train.main([*flags_in(folder), *STEPS.split()])
        yield folder / "run"


def again(command: list[str], run: Path) -> list[str]:
    """What the user types after a kill."""
    return ["--resume", "--out", str(run)] if (run / "run.json").exists() else command


def steps_lost(run: Path) -> int:
    """Steps that were logged and will run again."""
    rows, checkpoints = read_rows(run / "metrics.jsonl"), list_checkpoints(run)
    saved = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0
    return (rows[-1]["step"] if rows else 0) - saved


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.suffix == ".part" or path.name.startswith(".step-")]


def test_kills_at_random_moments(cases, record, command, undisturbed, fork, fingerprint, tmp_path, logged):
    """Of preparation, training, saving and the end. Imports write nothing, so they are left out."""
    draw, run, cache, number = random.Random(0), tmp_path / "run", tmp_path / "cache", cases(2, 200)
    expected, rows = fingerprint(undisturbed), logged(undisturbed)
    child = fork(train.main, [*command, "--out", str(tmp_path / "timed")])
    assert child.wait() == 0, child.text
    seconds = time.monotonic() - child.started
    kills = finished = most_lost = before_run_json = 0
    while kills < number or run.exists():
        if not run.exists():
            shutil.rmtree(cache, ignore_errors=True)
        child = fork(train.main, again(command, run))
        if kills < number:
            time.sleep(draw.uniform(0, seconds))
            child.send(signal.SIGKILL)
        if child.wait() == -signal.SIGKILL:
            kills += 1
            before_run_json += not (run / "run.json").exists()
            most_lost = max(most_lost, steps_lost(run))
            assert most_lost <= SAVE_EVERY
        else:
            assert child.code == 0, child.text
            assert fingerprint(run) == expected and logged(run) == rows and not leftovers(run)
            finished += 1
            shutil.rmtree(run)
    record(kills=kills, before_run_json=before_run_json, runs=finished, identical=finished, most_steps_lost=most_lost)
    shutil.rmtree(tmp_path)


def test_kills_at_file_system_calls(
    cases, record, command, undisturbed, fork, fingerprint, before_file_event, tmp_path, logged
):
    """SIGKILL before each call of a new run that writes to the disk, from the preparation to the report."""
    run, cache, counted = tmp_path / "run", tmp_path / "cache", tmp_path / "events"
    expected, rows = fingerprint(undisturbed), logged(undisturbed)

    def train_and_count() -> None:
        last = [0]
        before_file_event(lambda event: last.__setitem__(0, event))
        try:
            train.main(command)
        finally:
            counted.write_text(str(last[0] + 1))

    def train_until(event: int) -> None:
        before_file_event(lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == event else None)
        train.main(command)

    assert fork(train_and_count).wait() == 0
    events = int(counted.read_text())
    chosen = sorted(random.Random(0).sample(range(events), cases(3, events)))
    most_lost = 0
    for event in chosen:
        for folder in (run, cache):
            shutil.rmtree(folder, ignore_errors=True)
        killed = fork(train_until, event)
        assert killed.wait() == -signal.SIGKILL, (event, killed.text)
        most_lost = max(most_lost, steps_lost(run))
        child = fork(train.main, again(command, run))
        assert child.wait() == 0, (event, child.text)
        assert fingerprint(run) == expected and logged(run) == rows and not leftovers(run), event
    assert most_lost <= SAVE_EVERY
    record(calls=events, kills=len(chosen), identical=len(chosen), most_steps_lost=most_lost)
    shutil.rmtree(tmp_path)


def test_order_of_flushes_and_renames(command, undisturbed, fork, tmp_path):
    """What is renamed is on the disk before, and its new name before anything else is renamed or deleted.

    A power failure may undo renames that were not flushed, and empty files that were not. This is about checkpoints
    and the files of the run directory. A prepared corpus does not need it: its tokens are flushed before the header
    that says so, and it is prepared anew if header, size or tokenizer are not right.
    """
    trace = tmp_path / "trace.jsonl"

    def traced() -> None:
        synced: set[int] = set()
        lines, fsync = trace.open("w", buffering=1), os.fsync

        def note(**entry: Any) -> None:
            lines.write(json.dumps(entry) + "\n")

        def hook(event: str, arguments: tuple) -> None:
            if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR) and os.path.exists(arguments[0]):
                synced.discard(os.stat(arguments[0]).st_ino)
            elif event == "os.rename":
                source, target = map(Path, arguments[:2])
                moved = [source, *source.glob("*")]
                unsynced = [path.name for path in moved if path.stat().st_ino not in synced]
                note(renamed=str(target), unsynced=unsynced, folder=target.parent.stat().st_ino)
            elif event == "shutil.rmtree":
                note(deleted=str(arguments[0]))

        def traced_fsync(descriptor: int) -> None:
            fsync(descriptor)
            synced.add(os.fstat(descriptor).st_ino)
            note(synced=os.fstat(descriptor).st_ino)

        sys.addaudithook(hook)
        os.fsync = traced_fsync  # type: ignore[assignment]
        train.main([*command, "--keep", "1"])

    child = fork(traced)
    assert child.wait() == 0, child.text
    entries = [json.loads(line) for line in trace.read_text().splitlines()]
    run = tmp_path / "run"
    checked = []
    for entry, following in pairwise(entries):
        name = Path(entry.get("renamed", ""))
        inside = name.is_relative_to(run) and not name.parent.name.startswith(".step-")
        if not inside or name.name.endswith("-retired"):
            continue
        assert entry["unsynced"] == [] and following == {"synced": entry["folder"]}, entry
        checked.append(name.name)
    saves = [f"step-{step:06d}" for step in (3, 6, 9)]
    assert checked == ["run.json", "metrics.jsonl", *saves, "loss.png", "report.html"]
    retired = [entry["renamed"] for entry in entries if entry.get("renamed", "").endswith("-retired")]
    assert len(retired) == 2 and all({"deleted": path} in entries for path in retired)


def test_leftovers_of_a_save_go_at_the_next_start(command, undisturbed, tmp_path, capsys):
    """Also where there is nothing left to do but the report."""
    (undisturbed / "report.html").rename(undisturbed / "report.html.part")
    leftover = undisturbed / "checkpoints" / ".step-000009-retired"
    shutil.copytree(undisturbed / "checkpoints" / "step-000009", leftover)
    train.main(["--resume", "--out", str(undisturbed)])
    assert "already finished" in capsys.readouterr().out and not leftovers(undisturbed)
    assert (undisturbed / "report.html").exists()


# --- ablations -------------------------------------------------------------------------------------------------------


def processes_with(text: str) -> list[int]:
    """The processes that have `text` in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [int(path.parent.name)] if text.encode() in path.read_bytes() else []
        except OSError:  # it has just ended
            continue
    return found


def wait_until(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


def test_killed_ablations(cases, record, flags, fork, fingerprint, full, tmp_path):
    """No run goes on without its ablation, and the same command ends with the same bits. Other signals save first."""
    draw, out = random.Random(0), tmp_path / "run"
    command = [*flags, "--steps", "8", "--save-every", "2", "--eval-tokens", "64", "--seeds", "2", "--jobs", "2"]
    whole, seconds = [], 1.0
    if full:
        child = fork(ablate.main, command)
        assert child.wait(300) == 0, child.text
        whole, seconds = [fingerprint(cell) for cell in sorted(out.glob("cells/*/"))], time.monotonic() - child.started
        shutil.rmtree(out)
    for number in [signal.SIGKILL, *STOP_SIGNALS][: cases(1, 4)] * cases(1, 2):
        child = fork(ablate.main, command)
        wait_until(lambda: processes_with(f"{out}/cells/"), 60)
        time.sleep(draw.uniform(0, seconds))
        child.send(number)
        child.wait()
        wait_until(lambda: not processes_with(f"{out}/cells/"), 10)
        if full:
            child = fork(ablate.main, command)
            assert child.wait(300) == 0, child.text
            assert [fingerprint(cell) for cell in sorted(out.glob("cells/*/"))] == whole
            shutil.rmtree(out)
    record(stops=8, kills=2, identical=8, orphans=0)
