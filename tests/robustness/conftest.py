"""What must survive kills, signals, full disks and damaged files: a few cases by default, all of them with --full."""

import hashlib
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.claims.results import commit
from runtime.checkpoint import find_checkpoint
from runtime.device import describe

ROOT = Path(__file__).parents[2]
SIZES = "--dim 32 --layers 2 --heads 2 --context 32 --batch-size 8 --tokenizer bytes --device cpu --dtype float32"


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether all cases were asked for."""
    return request.config.getoption("--full")


@pytest.fixture(scope="session")
def cases(full: bool) -> Callable[[int, int], int]:
    """`cases(few, all)`: how many to try."""
    return lambda few, many: many if full else few


@pytest.fixture
def record(request: pytest.FixtureRequest, full: bool) -> Callable[..., None]:
    """`record(name=value, ...)` writes figures to results/robustness/TEST.json, if the test ran in full."""

    def write(**figures: Any) -> None:
        if not full:
            return
        name = request.node.originalname.removeprefix("test_")
        environment = {
            "device": describe(torch.device("cpu")),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "commit": commit(),
            "command": f"python -m pytest tests/robustness --full -k {name}",
        }
        file = ROOT / "results/robustness" / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"environment": environment, "figures": figures}, indent=1) + "\n")

    return write


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 40 kB."""
    draw = random.Random(0)
    words = ["the", "cat", "dog", "sees", "hears", "a", "bird", "and", "sings", "sleeps"]
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(" ".join(draw.choices(words, k=6)) + ".\n" for _ in range(1500)))
    return path


@pytest.fixture
def flags(text: Path, tmp_path: Path) -> list[str]:
    """Flags of a tiny run in tmp_path/run, without --steps."""
    return f"{SIZES} --data {text} --cache-dir {tmp_path / 'cache'} --out {tmp_path / 'run'}".split()


@pytest.fixture
def start() -> Callable[..., subprocess.Popen]:
    """`start("train.py", *flags)` starts a command in a process of its own, with one thread and its output in pipes."""

    def run(command: str, *arguments: Any, **options: Any) -> subprocess.Popen:
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        options = piped | {"env": os.environ | {"OMP_NUM_THREADS": "1"}} | options
        return subprocess.Popen([sys.executable, str(ROOT / command), *map(str, arguments)], **options)

    return run


@pytest.fixture(scope="session")
def fingerprint() -> Callable[[Path], dict[str, str]]:
    """`fingerprint(run)`: the SHA-256 of weights and optimizer state in a run's last checkpoint."""

    def hashes(run: Path) -> dict[str, str]:
        last = find_checkpoint(run)
        names = ("model.safetensors", "optimizer.safetensors")
        return {name: hashlib.sha256((last / name).read_bytes()).hexdigest() for name in names}

    return hashes


@pytest.fixture
def ends(capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str]]:
    """`ends(command, arguments)`: the exit code of a command that runs in this process, and its standard error."""

    def run(command: Callable[[list[str]], None], arguments: list[str]) -> tuple[int, str]:
        capsys.readouterr()
        code = 0
        try:
            command(arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        return code, capsys.readouterr().err

    return run
