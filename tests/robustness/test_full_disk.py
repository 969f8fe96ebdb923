"""A full disk: a line with path and bytes, exit code 1, earlier checkpoints untouched, and with space the same bits."""

import re
import shutil
from pathlib import Path

import pytest

import train
from tests.robustness.conftest import limit

pytestmark = pytest.mark.pictures
# A model so small that its checkpoint is smaller than loss.png.
COMMAND = "--dim 4 --hidden-dim 4 --layers 1 --heads 1 --context 16 --batch-size 4 --tokenizer bytes --device cpu "
COMMAND += "--dtype float32 --eval-every 2 --save-every 2 --schedule constant"


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
    with limit("RLIMIT_FSIZE", (runs / "4" / fits).stat().st_size + 2000):  # of any file
        code, error = ends(train.main, resume)
    pattern = rf"(?m)^error: {run}/{first}\S* cannot be written: .*; it needs [\d,]+ bytes, and [\d,]+ are free$"
    assert code == 1 and re.search(pattern, error), error
    assert not [*run.rglob("*.part"), *run.rglob(".step*")]
    assert all(path.read_bytes() == content for path, content in earlier.items())
    assert ends(train.main, resume)[0] == 0
    assert same(run, runs / "4")
