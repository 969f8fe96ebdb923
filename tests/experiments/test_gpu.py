"""The GPU benchmark suite: how its parts are run, and that their flags are valid. No GPU is needed."""

import json
import subprocess
import time

import pytest

import ablate
import bench
import train
from config import configs_from
from experiments import gpu


def test_a_failure_stops_nothing_and_ends_with_1(tmp_path, monkeypatch):
    parts = {"good": [["-c", "print(6 * 7)"], ["-c", "exit(3)"]], "other": [["-c", "pass"]]}
    monkeypatch.setattr(gpu, "commands", lambda config: parts)
    monkeypatch.setattr(gpu.GPUConfig, "device", "cpu")
    with pytest.raises(SystemExit) as ended:
        bench.main(f"gpu --folder {tmp_path}/out --json {tmp_path}/report.json".split())
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert ended.value.code == 1 and [row["ended"] for row in rows] == ["exit 0", "exit 3", "exit 0"]
    assert "42" in (tmp_path / "out" / "good.txt").read_text()


def test_out_of_time_leaves_no_process(tmp_path, monkeypatch):
    """Neither the command nor a process it has started, although both ignore SIGTERM."""
    ignore = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    child = f"subprocess.Popen([sys.executable, '-c', {ignore + 'time.sleep(60)'!r}])"
    monkeypatch.setattr(gpu, "PART_SECONDS", 1)
    monkeypatch.setattr(gpu, "STOP_SECONDS", 0.3)
    parts = {"long": [["-c", f"{ignore} print({child}.pid, flush=True); time.sleep(60)"]], "next": [["-c", "pass"]]}
    assert [row["ended"] for row in gpu.run_parts(parts, tmp_path / "out")] == ["out of time", "exit 0"]
    status = ["ps", "-o", "stat=", "-p", (tmp_path / "out/long.txt").read_text().split()[-1]]
    deadline = time.monotonic()
    while subprocess.run(status, capture_output=True, text=True).stdout.strip() not in ("", "Z"):
        assert time.monotonic() < deadline + 10
        time.sleep(0.05)


def test_every_command_is_valid(tmp_path, monkeypatch):
    """The parsers and the checks of the commands accept it, except for the device, which may be missing here."""
    text = tmp_path / "text of two {words}.txt"
    monkeypatch.setattr(bench.benchmarks, "pick_device", lambda name: bench.torch.device("cpu"))
    parts = gpu.commands(gpu.GPUConfig(folder=str(tmp_path / "the out"), text=str(text)))
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
    assert str(text) in parts["loss"][0] and str(tmp_path / "the out/loss") in parts["loss"][0]
