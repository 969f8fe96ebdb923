"""The project without its attachments: fast/, and experiments/ with its two commands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import generate
from config import ModelConfig
from data.tokenizer import ByteTokenizer
from files import ROOT
from model import Llama
from runtime.checkpoint import save_pretrained
from runtime.run_dir import read_rows
from tests.random_values import randomize

ATTACHMENTS = [("fast",), ("experiments", "ablate.py", "bench.py")]
NOT_COPIED = ("runs", ".*", "__pycache__", "env*", "venv*")
HERE = "--device cpu --dtype float32"
SIZES = "--tokenizer bytes --dim 32 --layers 2 --heads 2 --context 32 --batch-size 8 --eval-tokens 512"
PROGRAM = """
import sys, generate, train
for command, *flags in map(str.split, sys.argv[1:]):
    {"train": train, "generate": generate}[command].main(flags)
"""


def without(removed: tuple[str, ...], folder: Path) -> Path:
    """A copy of the project in which these were removed, with their tests."""
    project = shutil.copytree(ROOT, folder / "project", ignore=shutil.ignore_patterns(*NOT_COPIED))
    paths = [path for name in removed for path in (name, f"tests/{name}") if (project / path).exists()]
    subprocess.run(["rm", "-r", *paths], cwd=project, check=True)
    return project


@pytest.mark.slow
@pytest.mark.parametrize("removed", ATTACHMENTS, ids=" ".join)
def test_the_tests_that_are_left_are_collected(removed, tmp_path):
    """test_structure.py tells sooner that one needs what was removed."""
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    done = subprocess.run(collect, capture_output=True, text=True, cwd=without(removed, tmp_path))
    assert done.returncode == 0 and "::test_what_is_left_trains" in done.stdout, done.stdout


def test_what_is_left_trains_resumes_watches_and_samples(tmp_path, text, capsys):
    """Its samples are those of the whole project, also of a directory as transformers has it."""
    config = ModelConfig(dim=32, layers=2, heads=2, hidden_dim=48, vocab_size=257)
    save_pretrained(tmp_path / "theirs", randomize(Llama(config)), ByteTokenizer())
    new = f"train {HERE} {SIZES} --data {text} --cache-dir {tmp_path} --out {tmp_path}/run --steps 10 --watch 5"
    flags = f"{HERE} --prompt def --temperature 0 --tokens 20 --checkpoint {tmp_path}"
    models = [f"{flags}/run", f"{flags}/theirs"]
    commands = [new, f"train --resume --out {tmp_path}/run --steps 15", *(f"generate {flags}" for flags in models)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", PROGRAM, *commands]
    project = without(ATTACHMENTS[0] + ATTACHMENTS[1], tmp_path)
    done = subprocess.run(run, capture_output=True, text=True, cwd=project, env=environment)
    assert done.returncode == 0, done.stderr
    assert {row["step"] for row in read_rows(tmp_path / "run/watch.jsonl")} == {1, 5, 10, 15}
    capsys.readouterr()
    for flags in models:
        generate.main(flags.split())
    here = capsys.readouterr()
    assert done.stdout.endswith(here.out) and here.err.count("20 tokens in") == done.stderr.count("20 tokens in") == 2
    assert done.stderr.count("without fast/: the package is missing\n") == 2
