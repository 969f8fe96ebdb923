"""The GPU benchmark suite: how its parts are run, and that their flags are valid. No GPU is needed."""

import json
import shlex
from pathlib import Path

import pytest

import ablate
import bench
import train
from experiments import gpu


def test_a_part_reports_a_row_per_command(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "PARTS", {"good": ["-c 'print(6 * 7)'", "-c 'exit(3)'"], "other": ["-c pass"]})
    rows = gpu.run_parts(["good"], tmp_path / "out")
    assert [row["ended"] for row in rows] == ["exit 0", "exit 3"]
    assert gpu.exit_code(rows) == 1 and gpu.exit_code(rows[:1]) == 0
    assert json.loads((tmp_path / "out" / "gpu.json").read_text()) == rows
    assert "42" in (tmp_path / "out" / "good.txt").read_text()


def test_a_relative_folder_is_relative_to_the_caller(tmp_path, monkeypatch):
    """Although the commands run in the project's folder."""
    monkeypatch.chdir(tmp_path)
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
    monkeypatch.setattr(gpu, "PARTS", {"good": [f"-c '{program}' {{out}}/made"]})
    (row,) = gpu.run_parts(["good"], Path("out"))
    assert row["ended"] == "exit 0" and (tmp_path / "out" / "made").exists()


def test_a_part_stops_when_its_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "PARTS", {"long": ["-c 'import time; print(1, flush=True); time.sleep(60)'"]})
    monkeypatch.setattr(gpu, "PART_SECONDS", 1.5)
    (row,) = gpu.run_parts(["long"], tmp_path)
    assert row["ended"] == "out of time" and row["seconds"] < 30
    assert "1" in (tmp_path / "long.txt").read_text().splitlines()


@pytest.mark.parametrize("command", [command for commands in gpu.PARTS.values() for command in commands])
def test_every_command_is_valid(command, tmp_path):
    program, *arguments = shlex.split(command.format(out=tmp_path))
    if program == "bench.py":
        bench.make_config(bench.parse(arguments))
    elif program != "-m":
        {"train.py": train.parse, "ablate.py": ablate.parse}[program](arguments)
