"""The list of what to measure on a card: how it is run, whatever is in it, and that its flags are known."""

import json
import shlex
from pathlib import Path

import pytest

import ablate
import bench
import gpu
import train


def test_a_part_is_a_row_for_each_command(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "PARTS", {"good": ["-c 'print(6 * 7)'", "-c 'exit(3)'"], "other": ["-c pass"]})
    rows = gpu.run_parts(["good"], tmp_path / "out")
    assert [row["ended"] for row in rows] == ["exit 0", "exit 3"]
    assert gpu.exit_code(rows) == 1 and gpu.exit_code(rows[:1]) == 0
    assert json.loads((tmp_path / "out" / "gpu.json").read_text()) == rows
    assert "42" in (tmp_path / "out" / "good.txt").read_text()


def test_a_folder_is_where_the_caller_says(tmp_path, monkeypatch):
    """Commands run in the project's folder, whatever the caller's."""
    monkeypatch.chdir(tmp_path)
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
    monkeypatch.setattr(gpu, "PARTS", {"good": [f"-c '{program}' {{out}}/made"]})
    (row,) = gpu.run_parts(["good"], Path("out"))
    assert row["ended"] == "exit 0" and (tmp_path / "out" / "made").exists()


def test_a_part_ends_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "PARTS", {"long": ["-c 'import time; print(1, flush=True); time.sleep(60)'"]})
    monkeypatch.setattr(gpu, "MOST_SECONDS", 1.5)
    (row,) = gpu.run_parts(["long"], tmp_path)
    assert row["ended"] == "no time left" and row["seconds"] < 30
    assert "1" in (tmp_path / "long.txt").read_text().splitlines()


@pytest.mark.parametrize("command", [command for commands in gpu.PARTS.values() for command in commands])
def test_every_command_is_understood(command, tmp_path):
    program, *arguments = shlex.split(command.format(out=tmp_path))
    if program == "bench.py":
        flags = bench.parse(arguments)
        bench.COMMANDS[flags.command][1](**{name: value for name, value in vars(flags).items() if name != "command"})
    elif program != "-m":
        {"train.py": train.parse, "ablate.py": ablate.parse}[program](arguments)
