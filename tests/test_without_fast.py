"""The project without fast/: it trains, and generates the same text as with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import generate

ROOT = Path(__file__).parents[1]
LEAVE_OUT = shutil.ignore_patterns("fast", "tests", "results", "runs", ".*", "__pycache__", "env*", "venv*")
CPU_FLOAT32 = ["--device", "cpu", "--dtype", "float32"]
FLAGS = "--tokenizer bytes --dim 32 --layers 2 --heads 2 --context 32 --batch-size 8 --steps 20 --eval-tokens 512"


def command(project: Path, script: str, *arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(project / script), *CPU_FLOAT32, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=project,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_it_trains_and_generates_as_with_fast(tmp_path, text, capsys):
    run, without = tmp_path / "run", tmp_path / "normal-llama"
    shutil.copytree(ROOT, without, ignore=LEAVE_OUT)
    assert not (without / "fast").exists()
    trained = command(without, "train.py", "--data", text, "--cache-dir", tmp_path, "--out", run, *FLAGS.split())
    assert trained.returncode == 0, trained.stderr
    flags = f"--checkpoint {run} --prompt def --temperature 0 --tokens 20".split()
    plain = command(without, "generate.py", *flags)
    assert "in float32, without fast/: the package is missing\n" in plain.stderr
    generate.main([*CPU_FLOAT32, *flags])
    accelerated = capsys.readouterr()
    assert plain.stdout == accelerated.out and len(plain.stdout) > 20
    assert "tokens computed by fast/\n" in accelerated.err or "needs Linux" in accelerated.err
