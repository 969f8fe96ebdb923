"""The GPU benchmark suite: how its parts are run, and that their flags are valid. No GPU is needed."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ablate
import bench
import train
from config import configs_from
from experiments import gpu
from runtime.process import Stopped

ROOT = Path(__file__).parents[2]


def test_a_part_reports_a_row_per_command_and_failures_stop_nothing(tmp_path):
    parts = {"good": ["-c 'print(6 * 7)'", "-c 'exit(3)'"], "other": ["-c pass"]}
    rows = gpu.run_parts(parts, tmp_path / "out")
    assert [row["ended"] for row in rows] == ["exit 0", "exit 3", "exit 0"]
    assert gpu.exit_code(rows) == 1 and gpu.exit_code(rows[:1]) == 0
    assert json.loads((tmp_path / "out" / "gpu.json").read_text()) == rows
    assert "42" in (tmp_path / "out" / "good.txt").read_text()


def test_the_command_says_that_a_part_failed_and_writes_its_report_first(tmp_path, monkeypatch):
    flags = f"--toy --device cpu --part norms --folder {tmp_path / 'gpu'} --out {tmp_path / 'report.json'}"
    monkeypatch.setattr(gpu, "commands", lambda config: {"norms": ["-c pass"]})
    bench.main(["gpu", *flags.split()])
    monkeypatch.setattr(gpu, "commands", lambda config: {"norms": ["-c pass", "-c 'exit(3)'"]})
    with pytest.raises(SystemExit) as exit:
        bench.main(["gpu", *flags.split()])
    assert exit.value.code == 1
    ended = [row["ended"] for row in json.loads((tmp_path / "report.json").read_text())["rows"]]
    assert ended == ["exit 0", "exit 3"]


def test_a_relative_folder_is_relative_to_the_caller(tmp_path, monkeypatch):
    """Although the commands run in the project's folder."""
    monkeypatch.chdir(tmp_path)
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
    (row,) = gpu.run_parts({"good": [f"-c '{program}' {{out}}/made"]}, Path("out"))
    assert row["ended"] == "exit 0" and (tmp_path / "out" / "made").exists()


def test_the_commands_of_a_part_share_its_time(tmp_path, monkeypatch):
    """Each takes 300 of the 480 seconds, and one that begins too late still gets one."""
    now, given = [0.0], []

    def run(command, output, seconds, requests) -> str:
        given.append(seconds)
        now[0] += 300
        return "exit 0"

    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gpu, "run", run)
    rows = gpu.run_parts({"one": ["-c pass"] * 3, "other": ["-c pass"]}, tmp_path)
    assert given == [480, 180, 1, 480] and [row["seconds"] for row in rows] == [300] * 4


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_part_out_of_time_leaves_no_process(tmp_path, monkeypatch):
    """Neither the command nor a process it has started, although both ignore SIGTERM."""
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    child = f"{ignore} time.sleep(60)"
    program = f"{ignore} import subprocess, sys; "
    program += f"print(subprocess.Popen([sys.executable, '-c', '{child}']).pid, flush=True); time.sleep(60)"
    monkeypatch.setattr(gpu, "PART_SECONDS", 2)
    monkeypatch.setattr(gpu, "STOP_SECONDS", 0.5)
    (row,) = gpu.run_parts({"long": [f"-c {shlex.quote(program)}"]}, tmp_path)
    assert row["ended"] == "out of time" and row["seconds"] < 30
    pid = int((tmp_path / "long.txt").read_text().splitlines()[1])
    deadline = time.monotonic() + 10
    while running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_signal_stops_the_command_and_the_suite(tmp_path, monkeypatch):
    program = "import os, signal, time; print(os.getpid(), flush=True); "
    program += "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    monkeypatch.setattr(gpu, "PART_SECONDS", 10)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(Stopped, match="SIGTERM"):
            gpu.run_parts({"good": ["-c pass"], "long": [f"-c {shlex.quote(program)}"], "next": ["-c pass"]}, tmp_path)
        assert signal.getsignal(signal.SIGTERM) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not running(int((tmp_path / "long.txt").read_text().splitlines()[1]))
    assert [row["part"] for row in json.loads((tmp_path / "gpu.json").read_text())] == ["good"]
    assert not (tmp_path / "next.txt").exists()


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state not in ("", "Z")


def test_another_call_takes_another_folder(tmp_path):
    first = gpu.unused_folder(tmp_path / "gpu")
    assert first == tmp_path / "gpu" and first.is_dir()
    assert gpu.unused_folder(tmp_path / "gpu") == first  # still empty
    (first / "gpu.json").touch()
    second = gpu.unused_folder(tmp_path / "gpu")
    assert second == tmp_path / "gpu-2"
    (second / "gpu.json").touch()
    assert gpu.unused_folder(tmp_path / "gpu") == tmp_path / "gpu-3"


def test_time_to_the_loss():
    rows = [{"seconds": 1.0}, {"val_loss": 1.6}, {"seconds": 2.0}, {"val_loss": 1.46}, {"seconds": 3.0}]
    assert gpu.reached(rows) == "val_loss 1.4600 after 2.0 s"
    assert gpu.reached(rows[:2]) == "val_loss 1.6000, above 1.4697"
    assert gpu.reached([]) == ""


CONFIGS = [gpu.GPUConfig(), gpu.GPUConfig(toy=True, device="cpu"), gpu.GPUConfig(text=__file__)]
COMMANDS = [command for config in CONFIGS for part in gpu.commands(config).values() for command in part]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_valid(command, tmp_path):
    """The parsers and the checks of the commands accept it, but for the device, which may be missing here."""
    program, *arguments = shlex.split(command.format(out=tmp_path))
    if program == "bench.py":
        bench.make_config(bench.parse(arguments))
    elif program == "train.py":
        configs_from(train.parse(arguments), "cuda")
    elif program == "ablate.py":
        _, train_flags = ablate.parse(arguments)
        configs_from(train.parse(train_flags), "cuda")
    else:
        assert arguments[0] == "pytest"


def test_a_rehearsal_has_every_part():
    full, toy = (gpu.commands(config) for config in CONFIGS[:2])
    assert list(full) == list(toy) == list(gpu.PARTS)
    for name in full:
        programs = [{command.split()[0] for command in parts[name]} for parts in (full, toy)]
        assert programs[0] == programs[1]


@pytest.mark.parametrize(("flags", "named"), [("--device cpu", "--toy"), ("--text missing.txt --toy", "--text")])
def test_bad_input_ends_in_one_line(flags, named, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["gpu", *flags.split()])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and named in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_suite_rehearsed(tmp_path):
    """Every command at toy sizes, on the CPU. It needs a C++ compiler for --compile."""
    text = tmp_path / "text of two {words}.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 200)
    flags = ["--toy", "--device", "cpu", "--text", str(text), "--folder", str(tmp_path / "gpu")]
    done = subprocess.run([sys.executable, "bench.py", "gpu", *flags, "--out", str(tmp_path / "gpu.json")], cwd=ROOT)
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert done.returncode == 0 and {row["ended"] for row in rows} == {"exit 0"}
    assert {row["part"] for row in rows} == set(gpu.PARTS)
