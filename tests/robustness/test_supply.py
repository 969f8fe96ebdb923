"""What the project is made of and what a run touches: pinned packages with known licenses, two folders, no network."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import matplotlib

from runtime.process import PACKAGES

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(?P<name>[\w-]+)==(?P<version>[\d.]+) +# (?P<license>.+)")


def requirements(file: str) -> list[re.Match]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith(("#", "-r "))]
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), lines
    return [match for match in found if match]


def test_requirements_are_pinned_and_their_licenses_are_listed():
    for match in requirements("requirements.txt") + requirements("requirements-dev.txt"):
        try:
            fields = metadata(match["name"])
        except PackageNotFoundError:
            continue  # needed by some tests only
        if fields["Version"].partition("+")[0] == match["version"]:
            classifiers = [each for each in fields.get_all("Classifier") or [] if each.startswith("License ::")]
            stated = [each.split(" :: ")[-1] for each in classifiers[-1:]] or [fields.get("License", "")]
            assert fields.get("License-Expression", stated[0]) == match["license"], match["name"]


def test_nothing_else_is_imported():
    """At the top of a file, apart from the standard library and our own packages."""
    required = {match["name"] for match in requirements("requirements.txt")}
    assert required >= set(PACKAGES)
    sources = [path for folder in ("data", "norms", "runtime") for path in (ROOT / folder).rglob("*.py")]
    for path in [*ROOT.glob("*.py"), *sources]:
        names = set(re.findall(r"^(?:import|from) (\w+)", path.read_text("utf-8"), re.M)) - sys.stdlib_module_names
        assert {name for name in names if not list(ROOT.glob(f"{name}*"))} <= required, path


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


def test_a_run_writes_to_its_folder_and_the_cache_and_uses_no_network(flags, tmp_path):
    """Apart from temporary files of torch and Matplotlib's list of fonts."""
    for folder in ("here", "temporary"):
        (tmp_path / folder).mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary")}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # set by a torch.compile in this process
    command = [sys.executable, "-c", WATCH, *flags, "--steps", "2"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "here", env=environment)
    assert result.returncode == 0, result.stderr
    written, connected = json.loads(result.stdout.splitlines()[-1])
    ours = [str(tmp_path / name) for name in ("cache", "run", "temporary")]
    allowed = (*ours, os.devnull, matplotlib.get_cachedir(), matplotlib.get_configdir())
    assert not [path for path in written if not path.startswith(allowed)]
    assert any(path.startswith(str(tmp_path / "run")) for path in written) and not connected
    assert not list((tmp_path / "here").iterdir())
