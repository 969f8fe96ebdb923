"""Odd surroundings of commands: no reader, home, UTF-8, packages or memory, another folder, warnings as errors."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import train
from files import ROOT
from machine.process import PACKAGES, SETUP, out_of_memory
from runtime.checkpoint import list_checkpoints, verify
from runtime.huggingface.weights import stored_tensors
from runtime.run_dir import read_rows
from tests.robustness.conftest import before_step, limit

TINY = "--dim 16 --layers 1 --heads 1 --context 32 --batch-size 4 --tokenizer bytes --device cpu --dtype float32"
COMMANDS = [name for name in ("train.py", "generate.py", "ablate.py", "bench.py") if (ROOT / name).exists()]
PLACES = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "PATH"), "/dev/null/missing")
ODD = PLACES | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONWARNINGS": "error"}
ODD |= {"MPLBACKEND": "missing"}  # a notebook's, as for !python train.py


def test_a_run_in_odd_surroundings(tmp_path):
    """Its folder, text and options are not ASCII, and the reader of its output leaves."""
    (tmp_path / "é.txt").write_text("grüße an alle, die das hier lesen\n" * 500, "utf-8")
    command = f"{TINY} --data é.txt --steps 4 --eval-every 2 --save-every 2 --out ü".split()
    whole = [sys.executable, str(ROOT / "train.py"), *command]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(whole, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"} | ODD, **streams)
    assert process.stdout
    process.stdout.close()
    assert process.wait(120) == 0 and not (tmp_path / "ü/.lock").read_bytes()
    assert [row["step"] for row in read_rows(tmp_path / "ü/metrics.jsonl") if "val_loss" in row] == [2, 4]
    assert len(list((tmp_path / "ü/checkpoints").glob("step-*"))) == 2 and (tmp_path / "ü/report.html").exists()


def test_the_printed_command_generates_elsewhere(fork, monkeypatch, tmp_path):
    """`generate.py` in the folder where train.py was started, with the file of its norm. A closed output ends it."""
    norm = "import torch\nfrom norms import register\n\n@register('mine')\nclass Mine(torch.nn.RMSNorm):\n"
    (tmp_path / "my norm.py").write_text(norm + "    def __init__(self, dim: int):\n        super().__init__(dim)\n")
    flags = [*f"{TINY} --data {__file__} --steps 2 --norm mine --out run".split(), "--import", "my norm.py"]
    monkeypatch.chdir(tmp_path)
    child = fork(train.main, flags)
    assert child.wait() == 0
    printed = child.text.split("generate text: python ")[1].strip()
    generate = f"set -o pipefail; {sys.executable} {printed} --tokens 3 | head -c 1"
    left = subprocess.run(["bash", "-c", generate], cwd=tmp_path, capture_output=True)
    assert left.returncode == 0 and left.stdout and b"Traceback" not in left.stderr, left.stderr


@pytest.mark.parametrize("script", COMMANDS)
def test_missing_packages_are_one_line(script, tmp_path):
    """As outside the virtual environment. -S leaves out what is installed."""
    command = [sys.executable, "-S", str(ROOT / script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert SETUP in done.stderr and all(package in done.stderr for package in PACKAGES)
    assert SETUP in (ROOT / "README.md").read_text("utf-8")


LACKING = [("os.chmod", "EPERM"), ("os.fsync", "EINVAL"), ("fcntl.flock", "ENOSYS"), ("fcntl.flock", "EIO")]


@pytest.mark.parametrize("call, name", LACKING)
def test_a_file_system_of_a_cluster(call, name, flags, ends, tmp_path, monkeypatch):
    """What it lacks is left out, and a line says so if two runs could meet. A disk that fails is an error."""
    number = getattr(errno, name)
    monkeypatch.setattr(call, Mock(side_effect=OSError(number, os.strerror(number))))
    code, error = ends(train.main, [*flags, "--steps=1"])
    assert error.count("warning: the file system has no locks") == (name == "ENOSYS")
    assert (code, f": '{tmp_path}/" in error) == ((1, True) if name == "EIO" else (0, False))


def test_a_training_step_without_memory(flags, ends, tmp_path):
    """Exit code 3, and what to change. The checkpoint before it is intact."""
    with before_step(5, lambda trainer: torch.empty(1 << 60)):
        code, error = ends(train.main, [*flags, "--steps=6", "--save-every=3"])
    assert code == 3 and error.splitlines()[-1].startswith("error: out of memory; try a smaller --micro-batch-size")
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000003"]
    verify(tmp_path / "run/checkpoints/step-000003")
    said = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "backend='inductor' raised:\nMemoryError: ")
    assert all(map(out_of_memory, map(RuntimeError, said)))


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_weights_that_do_not_fit_into_memory_are_named(tmp_path):
    path, size = tmp_path / "model.safetensors", 1 << 32
    header = json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)  # a sparse file
    (stored,) = stored_tensors(path).values()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    error = rf"^out of memory: {path} has x of the shape \(1073741824,\)$"
    with limit("RLIMIT_AS", used + size // 4), pytest.raises(MemoryError, match=error):
        stored.read()
