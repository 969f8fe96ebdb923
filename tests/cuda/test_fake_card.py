"""Runs the tests in `on_fake_card.py`, in a process that loads a library before torch."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
SOURCE = HERE / "card.cpp"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library is built for Linux")


def test_training_and_generation(pytestconfig, tmp_path):
    """With the library that `card.cpp` makes, from an earlier session if neither it nor torch has changed."""
    if torch.version.cuda or torch.version.hip:
        pytest.skip("needs a CPU build of torch; `-m gpu` tests a GPU")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler was found")
    digest = hashlib.sha256(f"{torch.__version__} {TORCH} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    cache = getattr(pytestconfig, "cache", None)  # missing with `-p no:cacheprovider`
    built = (cache.mkdir("fake_card") if cache else tmp_path) / f"{digest}.so"
    if not built.exists():
        part = built.with_suffix(".part")
        options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{TORCH}/include", f"-L{TORCH}/lib"]
        options += ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH}/lib"]
        subprocess.run([compiler, str(SOURCE), *options, "-o", str(part)], check=True, timeout=300)
        part.replace(built)
    command = [sys.executable, str(HERE / "on_fake_card.py"), str(built)]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
