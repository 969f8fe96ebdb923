"""What must survive kills, signals, full disks and damaged files: tiny runs, and commands in forks of this process."""

import gc
import multiprocessing.context
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import train
from machine.process import stop_at_signals
from runtime.run_dir import read_rows

SIZES = "--dim 32 --layers 2 --heads 2 --context 32 --batch-size 8 --tokenizer bytes --device cpu --dtype float32"
STEPS = "--steps 9 --save-every 3 --eval-every 9 --eval-tokens 64 --dropout 0.1"


def flags_in(folder: Path, text: Path) -> list[str]:
    return f"{SIZES} --data {text} --cache-dir {folder / 'cache'} --out {folder / 'run'}".split()


@pytest.fixture
def flags(text: Path, tmp_path: Path) -> list[str]:
    """Flags of a tiny run in tmp_path/run, without --steps."""
    return flags_in(tmp_path, text)


@pytest.fixture
def command(flags: list[str], undisturbed: Path) -> list[str]:
    """A run of 9 steps in tmp_path/run that saves at every third."""
    return [*flags, *STEPS.split(), "--cache-dir", str(undisturbed.parent / "cache")]


@pytest.fixture(scope="session")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, finished, in a folder that it shares with the prepared text."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train.main([*flags_in(folder, text), *STEPS.split()])
    return folder / "run"


@pytest.fixture(scope="session")
def same(fingerprint: Callable[[Path], list[str]]) -> Callable[[Path, Path], bool]:
    """`same(run, other)`: whether two runs have the same weights, optimizer state, log without times, and samples."""
    timed = ("seconds", "tokens_per_second")

    def content(run: Path) -> tuple:
        log = [{name: row[name] for name in row if name not in timed} for row in read_rows(run / "metrics.jsonl")]
        return fingerprint(run), log, (run / "samples.txt").read_text()

    return lambda run, other: content(run) == content(other)


@contextmanager
def before_step(step: int, action: Callable[[train.Trainer], Any]) -> Iterator[None]:
    """Inside, `action(trainer)` is called before this training step."""
    train_step = train.Trainer.train_step

    def act_and_step(trainer: train.Trainer) -> None:
        if trainer.step == step - 1:
            action(trainer)
        train_step(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", act_and_step)
        yield


@contextmanager
def limit(name: str, size: int) -> Iterator[None]:
    """Inside, this process has at most `size` bytes of a resource."""
    resource = pytest.importorskip("resource")  # missing on Windows
    number = getattr(resource, name)
    soft, hard = resource.getrlimit(number)
    resource.setrlimit(number, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(number, (soft, hard))


ForkProcess = getattr(multiprocessing.context, "ForkProcess", multiprocessing.Process)  # missing on Windows


class Child(ForkProcess):  # type: ignore[misc,valid-type]
    """Calls a function as a command does: in a process of its own, which ends at signals. Its output goes to a file."""

    def __init__(self, log: Path, function: Callable, arguments: tuple):
        super().__init__(target=function, args=arguments)
        self.log = log
        log.touch()

    def run(self) -> None:
        gc.freeze()  # collecting what belongs to threads of this process, which a fork lacks, may crash
        sys.stdout = sys.stderr = self.log.open("w", buffering=1)
        for descriptor in (1, 2):
            os.dup2(sys.stderr.fileno(), descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        stop_at_signals()
        super().run()

    @property
    def text(self) -> str:
        return self.log.read_text("utf-8")

    def ended(self) -> bool:
        return self.exitcode is not None

    def wait(self) -> int | None:
        """Its exit code: -9 after SIGKILL. Its output is shown if the test fails."""
        self.join(120)
        print(self.text)
        return self.exitcode

    def send(self, number: int) -> None:
        if not self.ended():
            os.kill(self.pid, number)


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], None]:
    """`until(condition)` waits, and fails after a minute."""

    def wait(condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it took too long"
            time.sleep(0.005)

    return wait


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """`fork(train.main, flags)` starts a child. Those that are left at the end are killed."""
    if sys.platform != "linux":
        pytest.skip("forks, and finds processes in /proc")
    children: list[Child] = []

    def run(function: Callable, *arguments: Any) -> Child:
        children.append(Child(tmp_path / f"output-{len(children)}.txt", function, arguments))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads, of which none is needed
            children[-1].start()
        return children[-1]

    yield run
    for child in children:
        child.send(signal.SIGKILL)
        child.wait()
