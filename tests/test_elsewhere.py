"""The project from Python, from another folder and from another virtual environment."""

import os
import re
import runpy
import site
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = "--tokenizer bytes --dim 16 --layers 1 --heads 1 --context 128 --batch-size 2 --steps 2 --eval-tokens 128"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new virtual environment that sees the packages of this one, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=os.name != "nt")
    packages = next(folder.rglob("site-packages"))
    (packages / "tested.pth").write_text("\n".join(site.getsitepackages()))
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def run(python: Path, folder: Path, *arguments: str | Path, **variables: str) -> str:
    """Standard output of a command in `folder` that must not fail."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *map(str, arguments)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=inherited | variables)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_train_elsewhere_then_readme_lines(python, tmp_path):
    """train.py in another folder writes there, and README's Python lines work on that run with PYTHONPATH."""
    (tmp_path / "text.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(200)))
    name = "python-rmsnorm-pre"
    run(python, tmp_path, ROOT / "train.py", *TINY.split(), "--data", "text.txt", "--out", f"runs/{name}")
    assert (tmp_path / f"runs/{name}/report.html").is_file() and (tmp_path / ".cache").is_dir()
    assert (
        not (ROOT / f"runs/{name}/run.json").exists() or "text.txt" not in (ROOT / f"runs/{name}/run.json").read_text()
    )
    lines = "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S))
    assert f'load_pretrained("runs/{name}")' in lines and "generate(model, " in lines
    assert run(python, tmp_path, "-c", lines, PYTHONPATH=str(ROOT)).startswith("def ")


def test_quickstart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = runpy.run_path(str(ROOT / "examples/quickstart.py"))
    output = capsys.readouterr().out
    losses = [
        [float(value) for value in pair] for pair in re.findall(r"norm: ([\d.]+) .* before, ([\d.]+) after", output)
    ]
    assert len(losses) == 2 and all(after < before - 1 for before, after in losses)
    assert f"{losses[0][1]:.3f} nats per token" in output.splitlines()[-1]  # the saved model is the trained one
    assert len(cells["ids"]) == 54 and "def " in output


# --- pip install . ----------------------------------------------------------------------------------------------------


def build_system() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]


@pytest.mark.parametrize(
    "hook",
    ["get_requires_for_build_wheel", "get_requires_for_build_editable", "build_wheel", "build_editable", "build_sdist"],
)
def test_installing_is_refused_in_one_line(hook):
    """Called as pip calls it, in an environment without packages."""
    backend = build_system()
    assert backend["requires"] == [] and backend["backend-path"] == ["."]
    code = f"import sys; sys.path.insert(0, '.'); import {backend['build-backend']} as backend; backend.{hook}(None)"
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    for part in ("not installed", "pip install -r requirements.txt", "python FOLDER/train.py", "PYTHONPATH=FOLDER"):
        assert part in ended.stderr
