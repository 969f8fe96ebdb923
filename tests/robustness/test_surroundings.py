"""Odd surroundings: closed standard streams, a reader that leaves, no home or temporary folder, a locale without UTF-8,
another working directory, optimized Python, warnings as errors, no compiler, a read-only installation, the plotting
backend of a notebook. All four commands work there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Changes of the environment, where None removes a variable; the descriptors that are closed; and what else.
Surroundings = tuple[dict[str, str | None], tuple[int, ...], str]

ROOT = Path(__file__).parents[2]
TINY = "--dim 16 --layers 1 --heads 1 --context 32 --batch-size 4 --tokenizer bytes --device cpu --dtype float32"
GONE = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR", "TEMP", "TMP", "MPLCONFIGDIR"))
NOTEBOOK: dict[str, str | None] = {"MPLBACKEND": "missing"}  # as for !python train.py
ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": None}
SURROUNDINGS: dict[str, Surroundings] = {
    "closed output": ({}, (1,), ""),
    "closed error": ({}, (2,), ""),
    "all closed": ({}, (0, 1, 2), ""),
    "reader leaves": ({"PYTHONUNBUFFERED": "1"}, (), "reader leaves"),
    "no home": (GONE, (), ""),
    "home and temporary folder missing": (GONE | {"HOME": "/dev/null/missing", "TMPDIR": "/dev/null/missing"}, (), ""),
    "C": (ASCII | {"LC_ALL": "C"}, (), ""),
    "POSIX": (ASCII | {"LC_ALL": "POSIX"}, (), ""),
    "optimized": ({"PYTHONOPTIMIZE": "1"}, (), ""),
    "warnings are errors": ({"PYTHONWARNINGS": "error"}, (), ""),
    "no compiler": ({"PATH": "/dev/null/missing", "XDG_CACHE_HOME": "/dev/null/missing"}, (), ""),
    "read-only installation": ({}, (), "read-only"),
    "in a notebook": (NOTEBOOK, (), ""),
}
MISSING = GONE | {"HOME": "/dev/null/missing", "TMPDIR": "/dev/null/missing", "PATH": "/dev/null/missing"}
STRICT = {"LC_ALL": "C", "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": "1"}  # with the last, each line is written
TOGETHER: Surroundings = (MISSING | ASCII | STRICT | NOTEBOOK, (2,), "reader leaves")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory: not the project's, and with a text and a name that are not ASCII."""
    folder = tmp_path_factory.mktemp("surroundings")
    (folder / "é.txt").write_text("grüße an alle, die das hier lesen\n" * 500, "utf-8")
    return folder


@contextmanager
def installation(read_only: bool, folder: Path) -> Iterator[Path]:
    """The folder of the project, or a copy of it on which nothing can be written."""
    if not read_only:
        yield ROOT
        return
    copy = Path(tempfile.mkdtemp(dir=folder)) / "installed"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "results", "runs"))
    remount = ["mount", "--bind", "-o", "ro", str(copy), str(copy)]
    if os.geteuid() == 0 and (not shutil.which("mount") or subprocess.run(remount, capture_output=True).returncode):
        pytest.skip("root can write everywhere and may not mount")
    for path in () if os.geteuid() == 0 else (copy, *copy.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        yield copy
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(copy)], check=True)


def close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def run(command: str, surroundings: Surroundings, folder: Path) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    changes, closed, other = surroundings
    inherited = {name: value for name, value in os.environ.items() if name not in changes}
    environment = inherited | {name: value for name, value in changes.items() if value} | {"OMP_NUM_THREADS": "1"}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number in closed:
            streams[name] = None
    with installation(other == "read-only", folder) as root:
        process = subprocess.Popen(
            [sys.executable, str(root / command.split()[0]), *command.split()[1:]],
            cwd=folder,
            env=environment,
            preexec_fn=lambda: close(closed),
            encoding="utf-8",
            errors="replace",
            **streams,
        )
        if other == "reader leaves" and process.stdout:
            process.stdout.readline()
            process.stdout.close()
        errors = process.stderr.read() if process.stderr else ""
        if process.stdout and not process.stdout.closed:
            process.stdout.read()
            process.stdout.close()
        return process.wait(), errors


def train_and_check(name: str, surroundings: Surroundings, folder: Path) -> None:
    out = folder / name
    command = f"train.py {TINY} --data é.txt --steps 4 --eval-every 2 --save-every 2 --out {out}"
    assert run(command, surroundings, folder)[0] == 0
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["step-000002", "step-000004"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4]
    assert re.search(
        r"<td>(é|\\udcc3\\udca9)\.txt</td>", (out / "report.html").read_text("utf-8")
    )  # escaped if not UTF-8 here


def test_surroundings_together(folder):
    """One run with all of them that need no command of their own."""
    train_and_check("ü-together", TOGETHER, folder)


def test_surroundings(folder, full, record):
    """All four commands in each."""
    if not full:
        pytest.skip("takes minutes: --full")
    train_and_check("model", SURROUNDINGS["closed output"], folder)
    ended = {}
    for number, (name, surroundings) in enumerate(SURROUNDINGS.items()):
        train_and_check(f"ü-{number}", surroundings, folder)
        checked = {
            "generate.py --checkpoint model --tokens 3 --prompt é": None,
            f"bench.py norms --rows 64 --dim 16 --device cpu --out bench-{number}.json": f"bench-{number}.json",
            f"ablate.py {TINY} --data é.txt --steps 2 --seeds 1 --jobs 1 --out ä-{number}": f"ä-{number}/table.md",
        }
        for command, file in checked.items():
            code, errors = run(command, surroundings, folder)
            assert code == 0 and "Traceback" not in errors, (name, command, errors)
            assert not file or (folder / file).is_file(), (name, command)
        ended[name] = "all four commands worked"
    record(**ended)
