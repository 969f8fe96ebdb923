"""A disk that is full at any point of a run: one line with the path and the bytes it needs, exit code 1, no temporary
files, earlier checkpoints untouched, and once there is space the run continues to the same bits.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import train

pytestmark = pytest.mark.pictures
# A model so small that its checkpoint is smaller than loss.png.
COMMAND = "--dim 4 --hidden-dim 4 --layers 1 --heads 1 --context 16 --batch-size 4 --tokenizer bytes --device cpu "
COMMAND += "--dtype float32 --eval-every 2 --save-every 2 --schedule constant"


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes."""
    resource = pytest.importorskip("resource")  # missing on Windows
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 2 steps, and one of 4."""
    folder = tmp_path_factory.mktemp("runs")
    for steps in (2, 4):
        flags = f"--data {text} --cache-dir {folder / 'cache'} --out {folder / str(steps)} --steps {steps}"
        train.main(f"{COMMAND} {flags}".split())
    return folder


FIRST = [("checkpoints/step-000004", "run.json"), ("loss.png", "checkpoints/step-000004/optimizer.safetensors")]


@pytest.mark.parametrize("first, fits", FIRST)
def test_a_run_whose_disk_is_full(first, fits, runs, tmp_path, ends, same):
    """`first` is the first file that does not fit, and `fits` the largest that does."""
    run = shutil.copytree(runs / "2", tmp_path / "run")
    resume = ["--resume", "--out", str(run), "--steps=4"]
    earlier = {path: path.read_bytes() for path in (run / "checkpoints/step-000002").iterdir()}
    with file_size_limit((runs / "4" / fits).stat().st_size + 2000):
        code, error = ends(train.main, resume)
    pattern = rf"(?m)^error: {run}/{first}\S* cannot be written: .*; it needs [\d,]+ bytes, and [\d,]+ are free$"
    assert code == 1 and re.search(pattern, error), error
    assert not [*run.rglob("*.part"), *run.rglob(".step*")]
    assert all(path.read_bytes() == content for path, content in earlier.items())
    assert ends(train.main, resume)[0] == 0
    assert same(run, runs / "4")
