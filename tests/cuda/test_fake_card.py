"""train.py and generate.py on CUDA tensors without a card: no operation mixes devices, and Python does not wait for it.

`on_fake_card.py` runs the cases in a process of its own, which loads a library before torch.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from norms import KINDS
from norms.placement import PLACEMENTS

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
SOURCE = HERE / "card.cpp"
Results = dict[str, dict[str, dict[str, Any]]]  # part -> case -> its error and waits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library is built for Linux")


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that `card.cpp` makes, from an earlier session if neither it nor torch has changed.

    Without pytest's cache, each session makes its own.
    """
    if torch.version.cuda or torch.version.hip:
        pytest.skip("needs a CPU build of torch; `-m gpu` tests a GPU")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler was found")
    digest = hashlib.sha256(f"{torch.__version__} {TORCH} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    cache = getattr(pytestconfig, "cache", None)
    built = (cache.mkdir("fake_card") if cache else tmp_path_factory.mktemp("card")) / f"{digest}.so"
    if not built.exists():
        part = built.with_suffix(".part")
        options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{TORCH}/include", f"-L{TORCH}/lib"]
        options += ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH}/lib"]
        subprocess.run([compiler, str(SOURCE), *options, "-o", str(part)], check=True, timeout=300)
        part.replace(built)
    return built


@pytest.fixture(scope="module")
def results(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("fake-card")
    (folder / "text.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(400)))
    command = [sys.executable, str(HERE / "on_fake_card.py"), str(library), str(folder)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600).stdout)


def failures(cases: dict[str, dict[str, Any]], allowed: int = 0) -> dict[str, Any]:
    """The cases that raised an error or waited more than `allowed` times."""
    return {name: case for name, case in cases.items() if case["error"] or len(case["waits"]) > allowed}


COPY_TO, COPY_FROM = "copy from cpu to cuda", "copy from cuda to cpu"


def test_what_is_planted_in_a_training_step_is_found(results):
    """An `item` and a blocking copy of the batch, each with its line, and an operation that mixes devices."""
    found, lines = results["planted"], (HERE / "on_fake_card.py").read_text().splitlines()
    for name, what in (("item", "item"), ("copy", COPY_TO)):
        assert {wait for wait, _ in found[name]["waits"]} == {what}
        for _, where in found[name]["waits"]:
            path, _, line = where.partition(":")
            assert path == "tests/cuda/on_fake_card.py" and "# planted" in lines[int(line) - 1]
    assert "at least two devices, cuda:0 and cpu" in found["mix"]["error"]


def test_training_steps_neither_mix_devices_nor_wait(results):
    """Each norm, and each placement."""
    assert len(results["train bfloat16"]) == len(KINDS) and len(results["train float32"]) == len(PLACEMENTS)
    assert not failures(results["train bfloat16"]) and not failures(results["train float32"])


def test_an_evaluation_waits_once(results):
    assert len(results["evaluate"]) == 2
    for case in results["evaluate"].values():
        assert case["error"] is None and [what for what, _ in case["waits"]] == [COPY_FROM]


def test_generation_waits_once_for_each_token(results):
    assert len(results["generate"]) == 8
    assert not failures(results["generate"], allowed=1)
    assert all(wait == COPY_FROM for case in results["generate"].values() for wait, _ in case["waits"])


@pytest.mark.parametrize(("capability", "dtype", "waits"), [("(7, 5)", "float16", 1), ("(9, 0)", "bfloat16", 0)])
def test_the_default_step_of_a_card(capability, dtype, waits, results):
    """Float16 waits once, to read whether the gradient has overflowed. Attention is what fused kernels support."""
    case = results["default"][capability]
    assert case["error"] is None and len(case["waits"]) == waits, case
    call = {"dtype": f"torch.{dtype}", "same_heads": True, "attn_mask": None, "dropout_p": 0.2, "is_causal": True}
    assert case["calls"] == [call] * 2  # blocks
