"""The project without fast/: it trains, samples, and gives the same results to rounding."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAVE_OUT = shutil.ignore_patterns("fast", "tests", "results", "runs", ".*", "__pycache__")
FLAGS = "--tokenizer bytes --dim 32 --layers 2 --heads 2 --context 32 --batch-size 8 --steps 20 --eval-tokens 512"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(400)))
    return path


@pytest.fixture(scope="module")
def without_fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project after `rm -r fast`."""
    copy = tmp_path_factory.mktemp("project") / "normal-llama"
    shutil.copytree(ROOT, copy, ignore=LEAVE_OUT)
    assert not (copy / "fast").exists()
    return copy


def command(project: Path, script: str, *arguments: str | Path) -> subprocess.CompletedProcess:
    where = {"cwd": project, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, str(project / script), *map(str, arguments)], **where)  # type: ignore


def train(project: Path, text: Path, out: Path, *flags: str) -> list[dict]:
    arguments: list[str | Path] = ["--data", text, "--cache-dir", text.parent / "cache", "--out", out]
    arguments += ["--device", "cpu", *FLAGS.split()]
    ended = command(project, "train.py", *arguments, *flags)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_it_trains_and_samples_as_with_fast(without_fast, text, tmp_path):
    rows = train(without_fast, text, tmp_path / "without")
    settings = json.loads((tmp_path / "without/run.json").read_text())["training"]
    assert settings["fast"] is False
    reference = train(ROOT, text, tmp_path / "with", "--dtype", "float32")
    if settings["dtype"] == "float32":
        for ours, theirs in zip(rows, reference, strict=True):
            for name in ("train_loss", "val_loss", "val_bpb"):
                if name in ours:
                    assert ours[name] == pytest.approx(theirs[name], abs=1e-3)  # rounding grows over 20 steps
    assert rows[-1]["val_loss"] < rows[0]["train_loss"]
    ended = command(without_fast, "generate.py", "--checkpoint", tmp_path / "without", "--prompt", "def ")
    assert ended.returncode == 0 and ended.stdout.startswith("def "), ended.stderr
    assert "fast" not in ended.stderr.splitlines()[0]


def test_asking_for_it_is_refused_in_one_line(without_fast, text, tmp_path):
    arguments = ["--data", text, "--cache-dir", text.parent / "cache", "--out", tmp_path / "run", *FLAGS.split()]
    ended = command(without_fast, "train.py", *arguments, "--device", "cpu", "--fast")
    assert ended.returncode == 2 and not (tmp_path / "run").exists()
    assert ended.stderr == "error: the kernels of --fast cannot be used: the package fast/ is missing; use --no-fast\n"
