"""For all tests: one thread, because their tensors are small; norms from files outside the repository; fixtures."""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import find_checkpoint
from runtime.plugins import import_files

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "also test the norms that this file registers, with the oracle in test_KIND.py next to it"
    parser.addoption("--import", dest="imports", action="append", default=[], metavar="FILE.py", help=help)


def pytest_configure(config: pytest.Config) -> None:
    try:
        import_files(config.getoption("imports"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are not drawn, which would take longer than a tiny run, unless the test is marked as looking at them."""
    if not request.node.get_closest_marker("pictures"):
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **options: None)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of six of ten words, in 40 kB: simple enough that any model that learns gets far below chance."""
    draw, path = random.Random(0), tmp_path_factory.mktemp("corpus") / "text.txt"
    words = ["the", "cat", "dog", "sees", "hears", "a", "bird", "and", "sings", "sleeps"]
    path.write_text("".join(" ".join(draw.choices(words, k=6)) + ".\n" for _ in range(1500)))
    return path


@pytest.fixture(scope="session")
def fingerprint() -> Callable[[Path], list[str]]:
    """`fingerprint(run)`: the SHA-256 of weights and optimizer state in a run's last checkpoint."""

    def digests(run: Path) -> list[str]:
        files = [find_checkpoint(run) / f"{name}.safetensors" for name in ("model", "optimizer")]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]

    return digests


@pytest.fixture
def file_size_limit() -> Callable[[int], AbstractContextManager]:
    """`with file_size_limit(size)`: no file of this process may grow beyond `size` bytes."""
    resource = pytest.importorskip("resource")  # missing on Windows

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def refused(capsys: pytest.CaptureFixture) -> Callable[[Callable[[Any], Any], Any], str]:
    """`refused(command, arguments)`: the only line that a command prints which ends with exit code 2."""

    def run(command: Callable[[Any], Any], arguments: Any) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command(arguments)
        printed = capsys.readouterr()
        assert (ended.value.code, printed.out, printed.err.count("\n")) == (2, "", 1), printed.err
        return printed.err

    return run
