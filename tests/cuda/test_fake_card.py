"""train.py and generate.py on CUDA tensors without a card: no operation mixes devices, and Python does not wait for it.

`on_fake_card.py` runs the cases in two processes, since they need a library that is loaded before torch.
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

from norms import KINDS, TRAITS
from norms.placement import PLACEMENTS, supports

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
SOURCE = HERE / "card.cpp"
Results = dict[str, dict[str, dict[str, Any]]]  # part -> case -> its error and waits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library is built for Linux")


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config) -> Path:
    """The library that `card.cpp` makes, from an earlier session if neither it nor torch has changed."""
    if torch.version.cuda or torch.version.hip:
        pytest.skip("needs a CPU build of torch; `-m gpu` tests a GPU")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler was found")
    assert pytestconfig.cache is not None
    digest = hashlib.sha256(f"{torch.__version__} {TORCH} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    built = pytestconfig.cache.mkdir("fake_card") / f"{digest}.so"
    if not built.exists():
        part = built.with_suffix(".part")
        options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{TORCH}/include", f"-L{TORCH}/lib"]
        options += ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH}/lib"]
        subprocess.run([compiler, str(SOURCE), *options, "-o", str(part)], check=True, timeout=300)
        part.replace(built)
    return built


def run_parts(library: Path, folder: Path, *parts: list[str]) -> Results:
    """The results of all `parts`, each list in a process of its own, side by side."""
    (folder / "text.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(400)))
    command = [sys.executable, str(HERE / "on_fake_card.py"), str(library)]
    processes = []
    for number, names in enumerate(parts):
        own = folder / str(number)
        own.mkdir()
        shutil.copy(folder / "text.txt", own)
        processes.append(
            subprocess.Popen([*command, str(own), *names], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    results: Results = {}
    try:
        for process in processes:
            out, err = process.communicate(timeout=600)
            assert process.returncode == 0, err
            results |= json.loads(out)
    finally:
        for process in processes:
            process.kill()
    return results


@pytest.fixture(scope="module")
def results(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    first = ["lines", "planted", "evaluate", "log", "train bfloat16"]
    return run_parts(library, tmp_path_factory.mktemp("fake-card"), first, ["generate", "train float32"])


def failures(cases: dict[str, dict[str, Any]], allowed: int = 0) -> dict[str, Any]:
    """The cases that raised an error or waited more than `allowed` times."""
    return {name: case for name, case in cases.items() if case["error"] or len(case["waits"]) > allowed}


# --- the harness -----------------------------------------------------------------------------------------------------

COPY_TO, COPY_FROM = "copy from cpu to cuda", "copy from cuda to cpu"
EXPECTED = {
    "x.sum().item()": ["item"],
    "float(x[0])": ["item"],
    "bool(x.isfinite().all())": ["item"],
    "x.tolist()": [COPY_FROM],
    "x.cpu()": [COPY_FROM],
    "torch.tensor([1.0], device='cuda')": [COPY_TO],
    "ids.to('cuda')": [COPY_TO],
    "ids.to('cuda', non_blocking=True)": [COPY_TO],  # from memory that is not pinned
    "pinned.to('cuda')": [COPY_TO],
    "x[ids]": ["index from the CPU"],
    "x[:2].copy_(ids)": [COPY_TO],
    "pinned.to('cuda', non_blocking=True)": [],
    "x.copy_(pinned, non_blocking=True)": [],
    "x * 2 + x.mean()": [],
    "torch.full((), 2.0, device='cuda')": [],
    "x.double().cumsum(0)": [],
}
RAISES = {"x * torch.ones(3)": "at least two devices, cuda:0 and cpu", "x.nonzero()": "DynamicOutputShape"}


def test_single_lines_are_recorded(results):
    assert results["lines"].keys() == EXPECTED.keys() | RAISES.keys()
    for text, expected in EXPECTED.items():
        case = results["lines"][text]
        assert case["error"] is None and [what for what, _ in case["waits"]] == expected, text
    for text, message in RAISES.items():
        assert message in results["lines"][text]["error"]


def test_what_is_planted_in_a_training_step_is_found(results):
    """An `item`, a tensor on the CPU in a norm, and a blocking copy of the batch, each with its line."""
    found, lines = results["planted"], (HERE / "on_fake_card.py").read_text().splitlines()
    for name, what in (("item", ["item"]), ("copy", [COPY_TO, COPY_TO])):
        assert [wait for wait, _ in found[name]["waits"]] == what
        for _, where in found[name]["waits"]:
            path, _, line = where.partition(":")
            assert path == "tests/cuda/on_fake_card.py" and "# planted" in lines[int(line) - 1]
    assert "at least two devices" in found["mix"]["error"]
    assert set(failures(found)) == {"item", "copy", "mix"}


# --- the project -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_training_steps_neither_mix_devices_nor_wait(results, dtype):
    """Every kind and every placement that has a choice, in both dtypes. Not yet every kind in every placement."""
    cases = results[f"train {dtype}"]
    assert not failures(cases)
    kinds = {kind for kind in KINDS if not TRAITS[kind].identity}
    placements = {name for name in PLACEMENTS if not PLACEMENTS[name].own_norm}
    for flag, names in (("--norm", kinds), ("--placement", placements)):
        assert names <= {case.split(f"{flag} ")[1].split()[0] for case in cases}
    for option in ("--dropout", "--recompute", "--micro-batch-size", "muon", "--qk-norm full", "--qk-norm head"):
        assert any(option in case for case in cases)


@pytest.mark.slow
def test_the_other_cells_neither_mix_devices_nor_wait(library, results, tmp_path):
    """Every kind in every placement, in both dtypes."""
    supported = sum(supports(name, kind) for kind in KINDS for name in PLACEMENTS)
    names = ["train the rest in bfloat16", "train the rest in float32"]
    rest = run_parts(library, tmp_path, *([name] for name in names))
    for dtype in ("bfloat16", "float32"):
        cases = rest[f"train the rest in {dtype}"]
        assert not failures(cases) and len(cases) + len(results[f"train {dtype}"]) == supported > 100


def test_the_training_loop_waits_at_logs(results):
    (case,) = results["log"].values()
    assert case["error"] is None and {what for what, _ in case["waits"]} == {"item"}


def test_an_evaluation_waits_once(results):
    assert len(results["evaluate"]) == 2
    for case in results["evaluate"].values():
        assert case["error"] is None and [what for what, _ in case["waits"]] == [COPY_FROM]


def test_generation_waits_once_for_each_token(results):
    assert len(results["generate"]) == 12
    assert not failures(results["generate"], allowed=1)
    assert all(wait == COPY_FROM for case in results["generate"].values() for wait, _ in case["waits"])
