"""What must survive kills, signals, full disks and damaged files: a few cases by default, all of them with --full."""

import hashlib
import itertools
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.claims.results import commit
from runtime.checkpoint import find_checkpoint
from runtime.device import describe
from runtime.process import stop_at_signals
from runtime.run_dir import read_rows

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


@pytest.fixture(scope="session")
def flags_in(text: Path) -> Callable[[Path], list[str]]:
    """`flags_in(folder)`: flags of a tiny run in folder/run, without --steps."""
    return lambda folder: f"{SIZES} --data {text} --cache-dir {folder / 'cache'} --out {folder / 'run'}".split()


@pytest.fixture
def flags(flags_in: Callable[[Path], list[str]], tmp_path: Path) -> list[str]:
    """Flags of a tiny run in tmp_path/run, without --steps."""
    return flags_in(tmp_path)


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


@pytest.fixture(scope="session")
def logged() -> Callable[[Path], list[dict[str, Any]]]:
    """`logged(run)`: the rows of its metrics.jsonl without times."""
    timed = ("seconds", "tokens_per_second")

    def rows(run: Path) -> list[dict[str, Any]]:
        return [{name: row[name] for name in row if name not in timed} for row in read_rows(run / "metrics.jsonl")]

    return rows


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


# --- commands in forks of this process, which has imported everything ------------------------------------------------


@dataclass
class Child:
    """A forked process. Its output goes to a file."""

    pid: int
    log: Path
    started: float
    code: int | None = None  # -9 after SIGKILL

    @property
    def text(self) -> str:
        return self.log.read_text("utf-8")

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def wait(self, seconds: float = 120) -> int:
        """Its exit code."""
        deadline = time.monotonic() + seconds
        while not self.ended():
            assert time.monotonic() < deadline, self.text
            time.sleep(0.002)
        assert self.code is not None
        return self.code

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """`fork(train.main, flags)` calls a function as a command does: in a process of its own, which ends at signals.

    What is left of them at the end is killed.
    """
    children: list[Child] = []

    def run(function: Callable, *arguments: Any) -> Child:
        log = tmp_path / f"output-{len(children)}.txt"
        log.touch()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                sys.stdout = sys.stderr = log.open("w", buffering=1)
                os.dup2(sys.stderr.fileno(), 1)
                os.dup2(sys.stderr.fileno(), 2)
                signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
                signal.signal(signal.SIGHUP, signal.SIG_DFL)
                stop_at_signals()
                function(*arguments)
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(Child(pid, log, time.monotonic()))
        return children[-1]

    yield run
    for child in children:
        if not child.ended():
            child.send(signal.SIGKILL)
            child.wait()


@pytest.fixture(scope="session")
def before_file_event() -> Callable[[Callable[[int], None]], None]:
    """`before_file_event(action)` calls `action(k)` before the k-th call of this process that writes to the disk.

    These are: open a file for writing, flush a file or a directory to the disk, rename, delete, make a directory. What
    safetensors writes has no event of its own. It cannot be undone, so it is for forked processes.
    """
    changing = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}

    def install(action: Callable[[int], None]) -> None:
        events, fsync = itertools.count(), os.fsync

        def hook(event: str, arguments: tuple) -> None:
            if event in changing or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                action(next(events))

        def counted(descriptor: int) -> None:
            action(next(events))
            fsync(descriptor)

        sys.addaudithook(hook)
        os.fsync = counted  # type: ignore[assignment]

    return install
