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
    """A command that ignores SIGTERM is killed when its part is out of time."""
    long = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    long += "; print(os.getpid(), flush=True); time.sleep(60)"
    parts = {"long": [["-c", "exit(3)"], ["-c", long]], "next": [["-c", "print(6 * 7)"]]}
    monkeypatch.setattr(gpu, "PART_SECONDS", 2)
    monkeypatch.setattr(gpu, "commands", lambda config: parts)
    monkeypatch.setattr(gpu.GPUConfig, "device", "cpu")
    with pytest.raises(SystemExit) as ended:
        bench.main(f"gpu --folder {tmp_path}/out --json {tmp_path}/report.json".split())
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert ended.value.code == 1 and [row["ended"] for row in rows] == ["exit 3", "out of time", "exit 0"]
    assert "42" in (tmp_path / "out" / "next.txt").read_text()
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
