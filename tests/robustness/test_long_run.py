"""A long run stays as fast, as small and with as few open files as it began."""

import gc
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from scipy import stats

import train
from generate import Sampling
from runtime.run_dir import read_rows

SECONDS, SAMPLE_EVERY = 3600, 5
WINDOWS = 12  # of five minutes; the first one, in which memory fills up, is left out
SIZES = "--dim 64 --context 128 --batch-size 16 --steps 10000000 --warmup 100"
TEXT = "--data python"
EVERY = "--eval-every 500 --save-every 500 --eval-tokens 4096"


LINUX = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at processes in Linux's /proc")


@LINUX
def test_evaluations_and_checkpoints_leave_nothing_behind(flags, monkeypatch):
    """Neither tensors nor open files: there are as many after the fifth as after the second."""
    found, save = {}, train.Trainer.save

    def save_and_count(trainer: train.Trainer) -> None:
        save(trainer)
        if trainer.step in (4, 10):
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


def slope_per_hour(windows: list[dict], name: str) -> dict[str, float]:
    """A straight line through the windows' values of `name`: their mean, its slope, and 95% interval of the slope."""
    values = [window[name] for window in windows]
    line = stats.linregress([window["hours"] for window in windows], values)
    slope, half_width = float(line.slope), float(stats.t.ppf(0.975, len(values) - 2) * line.stderr)
    mean = sum(values) / len(values)
    return {"mean": mean, "slope_per_hour": slope, "low": slope - half_width, "high": slope + half_width}


def measure(pid: int, log: Path) -> dict[str, float]:
    """Memory, open files and CPU seconds of a process, and the tokens of its last line of training loss."""
    used = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]).split()[11:13]  # user and system, after the name
    lines = log.read_text().split("\n")[:-1]
    return {
        "MB": int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "open_files": len(os.listdir(f"/proc/{pid}/fd")),
        "cpu_seconds": sum(map(int, used)) / os.sysconf("SC_CLK_TCK"),
        "tokens": next(json.loads(line)["tokens"] for line in reversed(lines) if "tokens" in line),
    }


@LINUX
def test_long_run(full, record, start, flags, tmp_path):
    if not full:
        pytest.skip("takes an hour; --full runs it")
    log = tmp_path / "run/metrics.jsonl"
    with open(tmp_path / "output.txt", "w") as output:
        process = start("train.py", *flags, *f"{SIZES} {TEXT} {EVERY}".split(), stdout=output, stderr=output)
    try:
        while not (log.exists() and "tokens" in log.read_text()):
            time.sleep(1)
            assert process.poll() is None, (tmp_path / "output.txt").read_text()
        began, windows = time.monotonic(), []
        for number in range(WINDOWS):
            samples = [measure(process.pid, log)]
            while time.monotonic() < began + (number + 1) * SECONDS / WINDOWS:
                time.sleep(SAMPLE_EVERY)
                samples.append(measure(process.pid, log))
            first, last = samples[0], samples[-1]
            windows.append(
                {
                    "hours": (number + 0.5) * SECONDS / WINDOWS / 3600,
                    "MB": sum(sample["MB"] for sample in samples) / len(samples),
                    "open_files": min(sample["open_files"] for sample in samples),  # more while it writes
                    "cpu_seconds_per_million_tokens": 1e6
                    * (last["cpu_seconds"] - first["cpu_seconds"])
                    / (last["tokens"] - first["tokens"]),
                }
            )
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143, (tmp_path / "output.txt").read_text()
    finally:
        process.kill()

    rows = read_rows(log)
    trained = [row for row in rows if "tokens" in row]
    for number, window in enumerate(windows):
        seconds = (number * SECONDS / WINDOWS, (number + 1) * SECONDS / WINDOWS)
        speeds = [row["tokens_per_second"] for row in trained if seconds[0] <= row["seconds"] < seconds[1]]
        window["tokens_per_second"] = sum(speeds) / len(speeds)
    names = ("MB", "tokens_per_second", "cpu_seconds_per_million_tokens")
    lines = {name: slope_per_hour(windows[1:], name) for name in names}
    record(
        seconds=SECONDS,
        steps=trained[-1]["step"],
        evaluations=sum("val_loss" in row for row in rows),
        rows_logged=len(rows),
        windows=windows,
        **lines,
    )
    assert len({window["open_files"] for window in windows[1:]}) == 1
    assert lines["MB"]["low"] < 30, "memory grows; the rows logged in an hour, which it keeps, take less than 15 MB"
    cost = lines["cpu_seconds_per_million_tokens"]
    assert cost["low"] < 0.05 * cost["mean"], "a step costs more and more"
