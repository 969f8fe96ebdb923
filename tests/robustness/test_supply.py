"""What the project is made of and what a run touches: pinned packages with known licenses, two folders, no network."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(?P<name>[\w-]+)==(?P<version>[\d.]+) +# (?P<license>.+)")


def requirements() -> list[re.Match]:
    lines = [
        line for name in ("requirements.txt", "requirements-dev.txt") for line in (ROOT / name).read_text().split("\n")
    ]
    lines = [line for line in lines if line and not line.startswith(("#", "-r "))]
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return [match for match in found if match]


def stated_license(package: str) -> str:
    """As an SPDX expression, as a classifier, or else in a field of text."""
    fields = metadata(package)
    classifiers = [each for each in fields.get_all("Classifier") or [] if each.startswith("License ::")]
    if "License-Expression" in fields:  # from Python 3.12 on, reading a missing field is deprecated
        return fields["License-Expression"]
    return classifiers[-1].split(" :: ")[-1] if classifiers else fields["License"]


def test_requirements_are_pinned_and_their_licenses_are_listed():
    checked = 0
    for match in requirements():
        try:
            installed = metadata(match["name"])["Version"].partition("+")[0]
        except PackageNotFoundError:
            continue  # needed by some tests only
        if installed == match["version"]:
            assert stated_license(match["name"]) == match["license"], match["name"]
            checked += 1
    if not checked:
        pytest.skip("other versions are installed")


def imported_packages() -> set[str]:
    """What the sources import at the top of a file, apart from the standard library and our own packages."""
    names = set()
    for path in [
        *ROOT.glob("*.py"),
        *(path for part in ("data", "norms", "runtime") for path in (ROOT / part).rglob("*.py")),
    ]:
        names |= set(re.findall(r"^(?:import|from) (\w+)", path.read_text("utf-8"), re.M))
    return {name for name in names - sys.stdlib_module_names if not list(ROOT.glob(f"{name}*"))}


def test_nothing_else_is_imported():
    assert imported_packages() <= {match["name"] for match in requirements()}


WATCH = """
import json, os, sys
written, connected = set(), []

def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if isinstance(path, (str, bytes)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.add(os.path.abspath(os.fsdecode(path)))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate"):
        written.update(os.path.abspath(os.fsdecode(part)) for part in arguments[:2] if isinstance(part, (str, bytes)))
    elif event in ("socket.connect", "socket.getaddrinfo", "urllib.Request"):
        connected.append(event)

sys.addaudithook(watch)
sys.dont_write_bytecode = True
import train
try:
    train.main(sys.argv[1:])
finally:
    print(json.dumps([sorted(written), connected]))
"""


def test_a_run_writes_to_its_folder_and_the_cache_and_uses_no_network(text, tmp_path):
    """Apart from temporary files of torch and Matplotlib's list of fonts. The kernels of fast/ have a cache too."""
    sizes = (
        "--dim 32 --layers 1 --heads 2 --context 32 --tokenizer bytes --device cpu --dtype float32 --steps 2 --no-fast"
    )
    places = ["--data", str(text), "--cache-dir", str(tmp_path / "cache"), "--out", str(tmp_path / "run")]
    (tmp_path / "here").mkdir()
    command = [sys.executable, "-c", WATCH, *sizes.split(), *places]
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary")}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # set by a torch.compile in this process
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "here", env=environment)
    assert result.returncode == 0, result.stderr
    written, connected = json.loads(result.stdout.splitlines()[-1])
    ours = [str(tmp_path / name) for name in ("cache", "run", "temporary")]
    allowed = (*ours, os.devnull, matplotlib.get_cachedir(), matplotlib.get_configdir())
    assert not [path for path in written if not path.startswith(allowed)]
    assert any(path.startswith(str(tmp_path / "run")) for path in written) and not connected
    assert not list((tmp_path / "here").iterdir())
