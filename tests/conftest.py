"""For all tests: one thread, because their tensors are small; no CUDA device; imported norms; fixtures."""

import gc
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.checkpoint import find_checkpoint
from runtime.plugins import import_files

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "also test the norms that this file registers, with the oracle in test_KIND.py next to it"
    parser.addoption("--import", dest="imports", action="append", default=[], metavar="FILE.py", help=help)
    parser.addoption("--record", action="store_true", help="write the records of defaults again, options.json")


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        # With a visible GPU autograd has threads, so a test could not fork.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        import_files(config.getoption("imports"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_finish() -> None:
    gc.freeze()  # the imports of torch and transformers, which take long to go through
    gc.set_threshold(50_000)  # to collect seldom saves 5 to 10% of the time


def pytest_runtest_setup() -> None:
    torch.set_flush_denormal(False)  # `train.train` sets it for its process


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is not marked `pictures` draws no plots, which takes longer than a tiny run. Wider fixtures do."""
    if not request.node.get_closest_marker("pictures"):
        monkeypatch.setattr("pages.run.plot_loss", lambda rows, gzip_bpb: None)
        monkeypatch.setattr("pages.html.image_of", lambda plot, kind: b"")


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
def kept(pytestconfig: pytest.Config) -> Callable[[Path, dict[str, dict]], None]:
    """`kept(file, found)`: no option of a record, by their owners, is gone or has another default. More may be new."""

    def compare(file: Path, found: dict[str, dict]) -> None:
        if pytestconfig.getoption("record"):
            file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        for name, options in json.loads(file.read_text("utf-8")).items():
            changed = [option for option in options.items() if option not in found.get(name, {}).items()]
            assert not changed, f"{name}: {changed}; if that is meant, --record writes {file}"

    return compare


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def ends(capsys: pytest.CaptureFixture) -> Callable[[Callable[[Any], Any], Any], tuple[int, str]]:
    """`ends(command, arguments)`: the exit code of a command that runs in this process, and its standard error."""

    def run(command: Callable[[Any], Any], arguments: Any) -> tuple[int, str]:
        capsys.readouterr()
        code = 0
        try:
            command(arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def refused(ends: Callable[..., tuple[int, str]]) -> Callable[[Callable[[Any], Any], Any], str]:
    """`refused(command, arguments)`: the only line on standard error of a command that ends with exit code 2."""

    def run(command: Callable[[Any], Any], arguments: Any) -> str:
        code, error = ends(command, arguments)
        assert (code, error.count("\n")) == (2, 1), error
        return error

    return run
