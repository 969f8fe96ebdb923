"""Flags of train.py and generate.py: refused in a line that names the flag, with exit code 2; nothing is created."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import generate
import train
from files import ROOT
from tests.robustness.test_surroundings import COMMANDS

RUN = "--data text.txt --tokenizer bytes --device cpu --dtype float32 --dim 8 --layers 1 --context 16 --eval-tokens 32 "
RUN += "--steps 2"
REFUSED: dict[str, tuple[Callable, str]] = {
    "--norm batch": (train.main, "argument --norm: invalid choice: 'batch' (choose from "),
    "--norm-arg eps": (train.main, "--norm-arg takes key=value, not 'eps'"),
    "--learning-rate=3 --stesp 4": (train.main, "--learning-rate=3 --stesp 4; did you mean --lr and --steps?"),
    "--import=": (train.main, "--import : no such file; name a Python file"),
    "--out text.txt": (train.main, "--out text.txt is a file"),
    "--resume --out missing": (train.main, "there is no run in missing"),
    "--resume --out taken --preset small": (train.main, "--preset and --config are for new runs"),
    "--data . --norm dyt": (train.main, "--data contains runs, where the run is written; choose an --out elsewhere"),
    "--data python --out python/x --context 99999999": (train.main, "split has at most"),  # the folder is no text
    "--resume --out taken --seed 1 --batch-size 4": (train.main, "has --batch-size 8, not 4; --seed 0, not 1"),
    "--resume --init-from taken": (train.main, "--init-from is for new runs"),
    "--eval-only --data a.txt --val-data b.txt": (train.main, "--eval-only takes --data or --val-data, not both"),
    "--device= --out=": (train.main, " must not be empty; leave it out"),
    "--shard": (train.main, "--shard needs several ranks"),
    "--norm batchnorm --recompute": (train.main, "--recompute does not support --norm batchnorm"),
    "--config missing.json": (train.main, "missing.json is missing or damaged"),
    "--checkpoint taken --temperature -1": (generate.main, "--temperature must be at least 0, not -1.0"),
    "--checkpoint missing": (generate.main, "missing has no checkpoint; name a run"),
}


@pytest.fixture(scope="module")
def place(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in, with a text, its cache and a run."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text.txt").write_bytes(text.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train.main(f"{RUN} --out taken".split())
    return folder


def contents(folder: Path) -> set[tuple[Path, int]]:
    """Without locks, and without the index of texts."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".index")
    return {(path, path.stat().st_mtime_ns) for path in files if ".lock" not in (path.name, path.suffix)}


def assert_refused(flags: str, command: Callable, message: str, place: Path, ends: Callable) -> None:
    """In addition to those of a run, unless the flags are complete."""
    whole = flags.startswith(("--resume", "--checkpoint", "norms "))
    before, (code, error) = contents(place), ends(command, f"{'' if whole else RUN} {flags}".split())
    assert code == 2 and message in error and error.count("error: ") == error.count("\n") == 1, error
    assert contents(place) == before


def test_an_error_that_is_longer_than_a_screen_is_cut(refused):
    error = refused(train.main, ["--import", "\x1b/" * 600])
    assert r"error: --import \x1b/\x1b/" in error and 1500 < len(error) < 1700


@pytest.mark.parametrize("flags", REFUSED)
def test_a_wrong_flag(flags, place, ends, monkeypatch):
    monkeypatch.chdir(place)
    assert_refused(flags, *REFUSED[flags], place, ends)


@pytest.mark.parametrize("script", COMMANDS)
def test_the_version_is_that_of_the_citation(script, capsys):
    with pytest.raises(SystemExit, match="0"):
        import_module(script.removesuffix(".py")).main(["--version"])
    name, version = capsys.readouterr().out.split()
    assert {f"title: {name}", f"version: {version}"} < {*(ROOT / "CITATION.cff").read_text("utf-8").splitlines()}
