"""Preempted: SIGTERM, SIGINT, SIGHUP and SIGUSR1 at any moment end with one line, a saved run and no process."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

import train
from files import ROOT
from machine import process
from runtime.checkpoint import find_checkpoint
from runtime.plugins import command_to_type
from tests.robustness.conftest import before_step


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_while_torch_is_imported():
    """From the first line of a command. What is before it takes Python a few milliseconds."""
    command, pipe = [sys.executable, str(ROOT / "train.py")], subprocess.PIPE
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    started = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    signal.signal(signal.SIGINT, before)
    while not caught(started.pid, signal.SIGTERM):  # Python itself catches SIGINT
        assert started.poll() is None
    time.sleep(0.1)  # the three handlers are installed in turn
    started.send_signal(signal.SIGINT)
    output, errors = started.communicate(timeout=60)
    assert (started.returncode, output, errors) == (130, "", "error: stopped by SIGINT\n")


def test_ipython_keeps_its_signals_and_streams(monkeypatch):
    monkeypatch.setattr("sys.ps1", "In : ", raising=False)
    before = [*map(signal.getsignal, process.STOP_SIGNALS)], sys.stdout
    process.start()
    assert before == ([*map(signal.getsignal, process.STOP_SIGNALS)], sys.stdout)


def caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal."""
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def train_and_send(arguments: list[str], pause: float, *numbers: int) -> None:
    """Train, and get signals in the middle of step 5, each with a pause after it."""

    def send(trainer: train.Trainer) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause)

    with before_step(5, send):
        train.main(arguments)


# Two within a second are one: a terminal that closes sends several. A later one stops at once, without saving.
SIGNALS = [("SIGINT", 0, 130), ("SIGTERM", 0, 143), ("SIGHUP", 0, 129), ("SIGUSR1", 0, 138), ("SIGHUP", 1.1, 143)]


@pytest.mark.parametrize("number, pause, code", SIGNALS)
def test_a_signal_while_training(number, pause, code, command, undisturbed, fork, same, tmp_path):
    """The step is finished and saved, and the resumed run ends as if there had been no signal, its log included."""
    resume = ["--resume", "--out", str(tmp_path / "run")]
    child = fork(train_and_send, command, pause, getattr(signal, number), signal.SIGTERM)
    assert child.wait() == code
    stopped = "SIGTERM" if pause else f"{number}; continue with {command_to_type('train.py', *resume)}"
    assert re.findall("^error.*", child.text, re.M) == [f"error: stopped by {stopped}"]
    assert find_checkpoint(tmp_path / "run").name == ("step-000003" if pause else "step-000005")
    train.main(resume)
    assert same(tmp_path / "run", undisturbed)


def test_minutes_of_a_command_and_since_a_save(command, undisturbed, capsys, same, monkeypatch, tmp_path):
    """Every step takes 25 seconds. It stops after two, resumed too, and saves two after a save, to the same bits."""
    clock, train_step = [0.0], train.Trainer.train_step

    def slowly(trainer: train.Trainer) -> None:
        train_step(trainer)
        clock[0] += 25

    monkeypatch.setattr(train.Trainer, "train_step", slowly)
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for flags, newest in (([], "step-000002"), (["--resume"], "step-000004")):
        with pytest.raises(SystemExit) as ended:
            train.main([*command, "--max-minutes", "0.8", *flags])
        assert ended.value.code == 143 and find_checkpoint(tmp_path / "run").name == newest
        assert re.findall("^error: stopped by --max-minutes; continue", capsys.readouterr().err, re.M)
    with patch.object(train.checkpoints, "save_checkpoint", wraps=train.checkpoints.save_checkpoint) as save:
        train.main([*command, "--resume", "--max-minutes", "0", "--save-minutes", "0.5"])
    assert [call.args[1] for call in save.call_args_list] == [6, 8, 9]
    assert same(tmp_path / "run", undisturbed)


def test_ignored_signals_stay_ignored(command, undisturbed, fork, same, tmp_path):
    """SIGHUP under nohup and SIGINT in a background job, before the training loop and in it."""

    def train_in_background() -> None:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        process.stop_at_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        train_and_send(command, 0, signal.SIGHUP, signal.SIGINT)

    assert fork(train_in_background).wait() == 0
    assert same(tmp_path / "run", undisturbed)
