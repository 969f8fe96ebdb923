"""The GPU benchmark suite: how its parts are run, and that their flags are valid. No GPU is needed."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

import ablate
import bench
import train
from config import configs_from
from experiments import gpu
from runtime.process import Stopped


def test_a_failure_stops_nothing_and_ends_with_1(tmp_path, monkeypatch):
    parts = {"good": [["-c", "print(6 * 7)"], ["-c", "exit(3)"]], "other": [["-c", "pass"]]}
    monkeypatch.setattr(gpu, "commands", lambda config: parts)
    with pytest.raises(SystemExit) as ended:
        bench.main(f"gpu --toy --device cpu --folder {tmp_path}/out --json {tmp_path}/report.json".split())
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert ended.value.code == 1 and [row["ended"] for row in rows] == ["exit 0", "exit 3", "exit 0"]
    assert "42" in (tmp_path / "out" / "good.txt").read_text()


IGNORE = "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
PARENT = IGNORE + f"child = subprocess.Popen([sys.executable, '-c', {IGNORE + 'time.sleep(60)'!r}]); "
PARENT += "print(child.pid, flush=True); os.kill(os.getppid(), {signal}); time.sleep(60)"


@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_out_of_time_or_at_a_signal_no_process_is_left(number, tmp_path, monkeypatch):
    """Neither the command nor a process it has started, although both ignore SIGTERM."""
    monkeypatch.setattr(gpu, "PART_SECONDS", 10 if number else 1)
    monkeypatch.setattr(gpu, "STOP_SECONDS", 0.3)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    parts = {"long": [["-c", PARENT.replace("{signal}", str(int(number)))]], "next": [["-c", "pass"]]}
    try:
        if number:
            with pytest.raises(Stopped, match="SIGTERM"):
                gpu.run_parts(parts, tmp_path / "out")
        else:
            assert [row["ended"] for row in gpu.run_parts(parts, tmp_path / "out")] == ["out of time", "exit 0"]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "out/next.txt").exists() == (not number)
    pid, deadline = (tmp_path / "out/long.txt").read_text().splitlines()[1], time.monotonic() + 10
    while subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip() not in (
        "",
        "Z",
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("toy", [False, True])
def test_every_command_is_valid(toy, tmp_path, monkeypatch):
    """The parsers and the checks of the commands accept it, except for the device, which may be missing here."""
    text = tmp_path / "text of two {words}.txt"
    monkeypatch.setattr(bench.benchmarks, "pick_device", lambda name: bench.torch.device("cpu"))
    parts = gpu.commands(gpu.GPUConfig(toy=toy, folder=str(tmp_path / "the out"), text=str(text)))
    assert list(parts) == list(gpu.PARTS)
    for program, *arguments in (command for part in parts.values() for command in part):
        if program == "bench.py":
            bench.make_config(bench.parse(arguments))
        elif program == "train.py":
            configs_from(train.parse(arguments), "cuda")
        elif program == "ablate.py":
            configs_from(train.parse(ablate.parse(arguments)[1]), "cuda")
        else:
            assert program == "-m" and arguments[0] == "pytest"
    assert str(text) in parts["loss"][0] and str(Path(tmp_path / "the out/loss")) in parts["loss"][0]


@pytest.mark.slow
def test_the_suite_rehearsed(tmp_path):
    """Every command at toy sizes, on the CPU. It needs a C++ compiler for --compile."""
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 200)
    flags = f"gpu --toy --device cpu --text {text} --folder {tmp_path}/gpu --json {tmp_path}/gpu.json"
    bench.main(flags.split())
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {row["ended"] for row in rows} == {"exit 0"} and {row["part"] for row in rows} == set(gpu.PARTS)
