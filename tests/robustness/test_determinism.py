"""The same bits every time on one machine, and a warning where a resumed run cannot have them. Nothing piles up."""

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from generate import Sampling

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize("arm", ["--dtype bfloat16 --norm dyt", "--dtype float16 --norm batchnorm --placement post"])
def test_two_runs_have_the_same_bits(arm, command, same, tmp_path):
    runs = [tmp_path / name for name in "ab"]
    for run in runs:
        train.main([*command, *arm.split(), "--out", str(run)])
    assert same(*runs)


def test_a_resume_elsewhere_is_warned_about(flags, monkeypatch, capsys):
    """In one line, which names what has changed. The threads are part of the device."""
    train.main([*flags, "--steps", "1"])
    train.main([*flags, "--resume", "--steps", "2"])
    assert "same bits" not in capsys.readouterr().err
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    train.main([*flags, "--resume", "--steps", "3"])
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "same bits" in line]
    assert f"{threads} threads), now " in warning and f"{threads + 1} threads)" in warning
    assert "torch" not in warning and "instruction_set" not in warning


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in Linux's /proc")
def test_evaluations_and_checkpoints_leave_nothing_behind(flags, monkeypatch):
    """Neither tensors nor open files: there are as many after the fifth as after the second."""
    found, save = {}, train.Trainer.save

    def save_and_count(trainer: train.Trainer) -> None:
        save(trainer)
        gc.collect()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        found[trainer.step] = tensors, len(os.listdir("/proc/self/fd"))

    monkeypatch.setattr(train.Trainer, "save", save_and_count)
    monkeypatch.setattr(train, "SAMPLE", Sampling(tokens=4))
    every = "--eval-every 2 --save-every 2 --eval-tokens 256"
    train.main([*flags, "--steps", "10", *every.split()])
    assert found[4] == found[10] and found[4][0] > 20


FLUSHED = """
import contextlib, io, runpy, sys, torch
sys.argv = ["train.py", "--help"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    runpy.run_path("train.py", run_name="__main__")
print(float(torch.tensor([1e-39]) * 0.5))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="not every other CPU can flush them")
def test_subnormal_numbers_are_flushed_to_zero():
    """A model that is sure of itself has many. With them, an hour of training ended at a seventh of its speed."""
    result = subprocess.run([sys.executable, "-c", FLUSHED], cwd=Path(train.__file__).parent, capture_output=True)
    assert result.stdout.split() == [b"0.0"], result.stderr
