"""The GPU benchmark suite: how its parts are run, and that their flags are valid. No GPU is needed."""

import json
import os

import pytest

import ablate
import bench
from config import configure
from experiments import gpu
from runtime.flags import read_train


def test_a_failure_stops_nothing_and_ends_with_1(tmp_path, monkeypatch):
    parts = {"good": [["-c", "print(6 * 7)"], ["-c", "exit(3)"]], "other": [["-c", "pass"]]}
    monkeypatch.setattr(gpu, "commands", lambda config: parts)
    monkeypatch.setattr(gpu.GPUConfig, "device", "cpu")
    with pytest.raises(SystemExit) as ended:
        bench.main(f"gpu --folder {tmp_path}/out --json {tmp_path}/report.json".split())
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert ended.value.code == 1 and [row["ended"] for row in rows] == ["exit 0", "exit 3", "exit 0"]
    assert "42" in (tmp_path / "out" / "good.txt").read_text()


def test_a_command_out_of_time_is_killed(tmp_path, monkeypatch):
    """Although it ignores SIGTERM, and the next part runs."""
    ignore = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    monkeypatch.setattr(gpu, "PART_SECONDS", 2)
    parts = {"long": [["-c", f"{ignore}; print(os.getpid(), flush=True); time.sleep(60)"]], "next": [["-c", "pass"]]}
    assert [row["ended"] for row in gpu.run_parts(parts, tmp_path / "out")] == ["out of time", "exit 0"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "out/long.txt").read_text().split()[-1]), 0)


def test_every_command_is_valid(tmp_path, monkeypatch):
    """The parsers and the checks of the commands accept it, except for the device, which may be missing here."""
    text = tmp_path / "text of two {words}.txt"
    monkeypatch.setattr(bench.benchmarks, "pick_device", lambda name: bench.torch.device("cpu"))
    parts = gpu.commands(gpu.GPUConfig(folder=str(tmp_path / "the out"), text=str(text)))
    assert list(parts) == list(gpu.PARTS)
    for program, *arguments in (command for part in parts.values() for command in part):
        if program == "bench.py":
            given = bench.parse(arguments)
            bench.make_config(given.pop("command"), given)
        elif program == "train.py":
            configure(read_train(arguments))
        elif program == "ablate.py":
            configure(ablate.parse(arguments)[1])
        else:
            assert program == "-m" and arguments[0] == "pytest"
    assert str(text) in parts["loss"][0] and str(tmp_path / "the out/loss") in parts["loss"][0]
