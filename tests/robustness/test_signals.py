"""Preempted: SIGTERM, SIGINT and SIGHUP at any moment end with one line, a saved run and no process."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ablate
import train
from runtime import process as signals
from runtime.checkpoint import find_checkpoint
from runtime.run_dir import read_rows

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and finds processes in /proc"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # it has threads, of which none is needed
]
STEPS = "--steps 9 --save-every 4 --eval-every 9 --eval-tokens 64 --dropout 0.1"
STOPS = {number: 128 + number for number in signals.STOP_SIGNALS}


@pytest.fixture
def command(flags: list[str], tmp_path: Path) -> list[str]:
    """A run in tmp_path/run."""
    return [*flags, *STEPS.split()]


@pytest.fixture(scope="module")
def undisturbed(flags_in, tmp_path_factory) -> Iterator[Path]:
    """The same run, not stopped. It logs every second step, and so do those that are forked from here."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "LOG_EVERY", 2)
        train.main([*flags_in(folder), *STEPS.split()])
        yield folder / "run"


def again(command: list[str], run: Path) -> list[str]:
    """What the user types after the line that the run ended with."""
    return ["--resume", "--out", str(run)] if (run / "run.json").exists() else command


def check_stopped(child: Any, number: int, run: Path) -> bool:
    """Whether `child` was stopped by signal `number`, properly, and not after its last step."""
    name = signal.Signals(number).name
    errors = re.findall(r"^error: .*$|Traceback|Exception", child.text, re.M)
    if child.wait() == 0:
        assert not errors, child.text
        return False
    in_loop = f"error: stopped by {name}; continue with --resume"
    assert child.code == STOPS[number] and errors in ([f"error: stopped by {name}"], [in_loop]), child.text
    if errors == [in_loop]:  # saved after the step in which it arrived
        saved = json.loads((find_checkpoint(run) / "trainer.json").read_text())["step"]
        assert saved - max([row["step"] for row in read_rows(run / "metrics.jsonl")], default=0) in (0, 1)
    return True


def caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal."""
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_signals_during_start_up(cases, record, start, command, tmp_path):
    """From the first line of a command, while it imports and later. What is before it takes Python a few milliseconds.

    A signal is served when the C code in which it arrives returns.
    """
    train_or_ablate = [*command, "--out", str(tmp_path / "run")]
    commands = [("train.py", train_or_ablate), ("ablate.py", [*train_or_ablate, "--seeds", "1"])]
    commands += [("generate.py", ["--checkpoint", tmp_path / "none"]), ("bench.py", ["norms", "--device", "cpu"])]
    draw, slowest, stopped = random.Random(0), 0.0, 0
    for case in range(cases(4, 48)):
        number = draw.choice(signals.STOP_SIGNALS)
        name, arguments = commands[case % 4]
        process = start(name, *arguments, preexec_fn=default_signals)
        while not caught(process.pid, signal.SIGTERM):
            assert process.poll() is None
        time.sleep(draw.uniform(0, 0.3 if case < 4 else 3))
        began = time.monotonic()
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
        if process.returncode == 2:  # generate.py has found that there is no checkpoint
            assert name == "generate.py" and errors.count("\n") == 1
            continue
        stopped += 1
        slowest = max(slowest, time.monotonic() - began)
        line = f"error: stopped by {signal.Signals(number).name}\n"
        assert process.returncode == STOPS[number] and (output, errors) == ("", line), (name, errors)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    record(signals=stopped, one_line=stopped, slowest_seconds=round(slowest, 2))


def default_signals() -> None:
    for number in signals.STOP_SIGNALS:  # a shell's background jobs ignore SIGINT
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def test_signals_at_random_moments(cases, record, command, undisturbed, fork, fingerprint, tmp_path, logged):
    """Of preparation, training, saving and the end."""
    draw, run, cache, number = random.Random(0), tmp_path / "run", tmp_path / "cache", cases(2, 50)
    expected, rows = fingerprint(undisturbed), logged(undisturbed)
    child = fork(train.main, [*command, "--out", str(tmp_path / "timed")])
    assert child.wait() == 0, child.text
    seconds = time.monotonic() - child.started
    sent = finished = in_loop = 0
    slowest = 0.0
    while sent < number or run.exists():
        if not run.exists():
            shutil.rmtree(cache, ignore_errors=True)
        child = fork(train.main, again(command, run))
        which = draw.choice(signals.STOP_SIGNALS)
        if sent < number:
            time.sleep(draw.uniform(0, seconds))
            began = time.monotonic()
            child.send(which)
        child.wait()
        if check_stopped(child, which, run):
            sent += 1
            in_loop += "continue with --resume" in child.text
            slowest = max(slowest, time.monotonic() - began)
        else:
            assert fingerprint(run) == expected and logged(run) == rows
            finished += 1
            shutil.rmtree(run)
    record(signals=sent, saved=in_loop, runs=finished, identical=finished, slowest_seconds=round(slowest, 2))


def test_signals_at_file_system_calls(
    cases, record, command, undisturbed, fork, fingerprint, before_file_event, tmp_path, logged
):
    """A signal before each call of a new run that writes to the disk: while it prepares, evaluates, saves, reports."""
    run, cache, counted = tmp_path / "run", tmp_path / "cache", tmp_path / "events"
    expected, rows = fingerprint(undisturbed), logged(undisturbed)

    def train_and_count() -> None:
        last = [0]
        before_file_event(lambda event: last.__setitem__(0, event))
        try:
            train.main(command)
        finally:
            counted.write_text(str(last[0] + 1))

    def train_with_signal(event: int, number: int) -> None:
        before_file_event(lambda now: os.kill(os.getpid(), number) if now == event else None)
        train.main(command)

    assert fork(train_and_count).wait() == 0
    events = int(counted.read_text())
    chosen = sorted(random.Random(1).sample(range(events), cases(3, events // 2)))
    stopped = 0
    for index, event in enumerate(chosen):
        for folder in (run, cache):
            shutil.rmtree(folder, ignore_errors=True)
        number = signals.STOP_SIGNALS[index % len(STOPS)]
        child = fork(train_with_signal, event, number)
        child.wait()
        if check_stopped(child, number, run):
            stopped += 1
            child = fork(train.main, again(command, run))
            assert child.wait() == 0, (event, child.text)
        assert fingerprint(run) == expected and logged(run) == rows, event
    record(calls=events, signals=len(chosen), stopped=stopped, identical=len(chosen))


def test_a_second_signal_stops_immediately(command, undisturbed, fork, tmp_path, logged):
    """Without finishing the step or saving. The last checkpoint is complete.

    Signals in quick succession are one: a closed terminal may cause several.
    """

    def train_with_two() -> None:
        update = train.Trainer.update

        def update_and_stop(trainer: train.Trainer, rate: float) -> None:
            if trainer.step == 5:
                os.kill(os.getpid(), signal.SIGHUP)
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(1.1)
                os.kill(os.getpid(), signal.SIGTERM)
            update(trainer, rate)

        train.Trainer.update = update_and_stop  # type: ignore[assignment,method-assign]
        train.main(command)

    child = fork(train_with_two)
    assert child.wait() == 143 and child.text.endswith("\nerror: stopped by SIGTERM\n"), child.text
    assert find_checkpoint(tmp_path / "run").name == "step-000004"
    train.main(["--resume", "--out", str(tmp_path / "run")])
    assert logged(tmp_path / "run") == logged(undisturbed)


@pytest.mark.parametrize("ranks, stopped", [(1, [signal.SIGTERM]), (2, [])])
def test_a_second_signal_stops_no_rank_that_is_saving(ranks, stopped, monkeypatch):
    """One rank of several may get the terminal's signal and, later, that of torchrun. All must save together."""
    ended: list[int] = []
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(signals, "SAME_STOP", 0.005)
    monkeypatch.setattr(signals, "stop_now", ended.append)
    with signals.stop_requests() as requests:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.02)
    assert requests == [signal.SIGTERM] * 2 and ended == stopped


def test_a_row_of_the_log_goes_on_where_a_signal_stopped_the_run(command, undisturbed, fork, capsys, tmp_path, logged):
    """Its loss is the mean since the row before, not since the signal, and no row is missed."""

    def train_until_step_7() -> None:
        update = train.Trainer.update

        def update_and_stop(trainer: train.Trainer, rate: float) -> None:
            update(trainer, rate)
            if trainer.step == 6:
                os.kill(os.getpid(), signal.SIGTERM)

        train.Trainer.update = update_and_stop  # type: ignore[assignment,method-assign]
        train.main(command)

    child = fork(train_until_step_7)
    assert child.wait() == 143, child.text
    assert find_checkpoint(tmp_path / "run").name == "step-000007"
    assert read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 6
    train.main(["--resume", "--out", str(tmp_path / "run")])
    assert logged(tmp_path / "run") == logged(undisturbed)
    assert "warning" not in capsys.readouterr().err


def test_no_descendant_is_left(fork, tmp_path):
    """A compiler's processes, say, of which only the first is a child."""
    pids, folder = tmp_path / "pids", tmp_path / "temporary"
    folder.mkdir()

    def start_others() -> None:
        signals.temporary_folders.append(str(folder))
        subprocess.Popen(["sh", "-c", f"sleep 60 & echo $$ $! > {pids}.part; mv {pids}.part {pids}; wait"])
        time.sleep(60)

    child = fork(start_others)
    wait_until(pids.exists)
    child.send(signal.SIGTERM)
    assert child.wait() == 143 and child.text == "error: stopped by SIGTERM\n"
    wait_until(lambda: not any(running(pid) for pid in pids.read_text().split()))
    assert not folder.exists()


def running(pid: int | str) -> bool:
    """Whether a process exists and is no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Callable[[], Any], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


def test_ignored_signals_stay_ignored(command, undisturbed, fork, tmp_path, logged):
    """SIGHUP under nohup and SIGINT in a background job, before the training loop and in it."""

    def train_in_background() -> None:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        signals.stop_at_signals()
        update = train.Trainer.update

        def update_and_send(trainer: train.Trainer, rate: float) -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGINT)
            update(trainer, rate)

        train.Trainer.update = update_and_send  # type: ignore[assignment,method-assign]
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
        train.main(command)

    child = fork(train_in_background)
    assert child.wait() == 0, child.text
    assert logged(tmp_path / "run") == logged(undisturbed)


def test_the_library_installs_no_handlers():
    """This process has imported the commands."""
    for number in signals.STOP_SIGNALS:
        assert signal.getsignal(number) not in (signals.stop_now, signals.stop_silently)


def test_a_stopped_ablation_leaves_no_process(cases, record, flags, fork, tmp_path):
    """Its runs save and end before it does."""
    draw, out = random.Random(0), tmp_path / "run"
    command = [*flags, "--steps", "100000", "--eval-tokens", "64", "--seeds", "2", "--jobs", "2"]
    for _ in range(cases(1, 10)):
        shutil.rmtree(out, ignore_errors=True)
        child, number = fork(ablate.main, command), draw.choice(signals.STOP_SIGNALS)
        wait_until(lambda: any(f"{out}/cells/".encode() in line for line in command_lines()), 60)
        time.sleep(draw.uniform(0, cases(0, 12)))
        child.send(number)
        assert child.wait() == STOPS[number], child.text
        assert child.text.count("error:") == 1 and "Traceback" not in child.text, child.text
        assert child.text.splitlines()[-1].startswith(f"error: stopped by {signal.Signals(number).name}"), child.text
        assert not any(str(out).encode() in line for line in command_lines())
    record(signals=10, orphans=0)


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:  # it has just ended
            continue


def test_signals_to_two_ranks(cases, record, command, undisturbed, fork, tmp_path, logged):
    """To torchrun or to one rank, from the rank's first line on. All ranks end, rank 0 alone says why, and a resumed
    run logs the same rows. Of the rest of the output, torchrun writes its own report.

    Only with --full: a launch takes many seconds.
    """
    if not cases(0, 1):
        pytest.skip("takes minutes; tests/runtime/test_distributed.py stops a run of two ranks once")
    draw, run = random.Random(0), tmp_path / "run"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += [train.__file__, *command, "--steps", "150"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def started(flags: list[str]) -> subprocess.Popen:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*launch, *flags], env=environment, stdout=pipe, stderr=pipe, text=True, preexec_fn=default_signals
        )

    began = time.monotonic()
    process = started(["--out", str(tmp_path / "whole")])
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors
    seconds, stopped, in_loop, moments = time.monotonic() - began, 0, 0, 8
    for moment in range(moments):
        process, number = started([]), draw.choice(signals.STOP_SIGNALS)
        wait_until(partial(both_ranks_catch, process), 60)
        time.sleep(draw.uniform(0, 0.8 * seconds))
        ranks = [] if moment % 2 else ranks_of(process)  # none if the run has ended
        os.kill(draw.choice(ranks or [process.pid]), number)
        output, errors = process.communicate(timeout=120)
        # A rank that did not get the signal gets SIGTERM from torchrun, if it is not in the training loop.
        lines = re.findall(r"^error: stopped by .*$", errors, re.M)
        finished = "generate text:" in output  # and the signal came when Python was about to exit
        assert (process.returncode != 0 and len(lines) == 1) or finished, (moment, number, errors)
        assert not any(str(run).encode() in line for line in command_lines())
        stopped += not finished
        in_loop += "continue with --resume" in "".join(lines)
        process = started(["--resume"] if (run / "run.json").exists() else [])
        errors = process.communicate(timeout=300)[1]
        assert process.returncode == 0, errors
        assert logged(run) == logged(tmp_path / "whole")
        shutil.rmtree(run)
    assert stopped > moments // 2
    record(signals=moments, stopped=stopped, saved=in_loop, one_line=stopped, orphans=0)


def both_ranks_catch(launcher: subprocess.Popen) -> bool:
    """Whether both run train.py and have handlers. Until a rank's program starts, it has those of torchrun."""
    ranks = ranks_of(launcher)
    started = [b"torch.distributed.run" not in Path(f"/proc/{rank}/cmdline").read_bytes() for rank in ranks]
    return started == [True, True] and all(caught(rank, signal.SIGTERM) for rank in ranks)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
