"""Flags of all commands: refused in one line that names the flag, with exit code 2, before anything is created."""

from collections.abc import Callable
from pathlib import Path

import pytest

import ablate
import bench
import generate
import train
from files import ROOT

SMALL = "--tokenizer bytes --device cpu --dtype float32 --dim 8 --layers 1 --context 16 --eval-tokens 32 --steps 2"
REFUSED: dict[str, tuple[Callable, str]] = {
    "--norm batch": (train.main, "argument --norm: invalid choice: 'batch' (choose from "),
    "--norm-arg eps": (train.main, "--norm-arg takes key=value, not 'eps'"),
    "--learning-rate 3 --stesp 4": (train.main, "--learning-rate 3 --stesp 4; did you mean --lr and --steps?"),
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
    "--checkpoint taken --tokens 16": (generate.main, "--tokens 16 plus 1 of the prompt exceed the model's context of"),
    "--checkpoint missing": (generate.main, "missing has no checkpoint; name a run"),
    "--norms rmsnorm --out taken": (ablate.main, "taken is a file, or not empty; choose another folder"),
    "--norms rmsnrm": (ablate.main, "--norms: unknown 'rmsnrm'; choose from batchnorm"),
    "--placements pre mhc:stream=2": (ablate.main, "placement 'mhc' has no argument 'stream'; it takes streams, end"),
    "--norm rmsnorm": (ablate.main, "--norm is for a single run; list all values with --norms"),
    "--factor optimiser=muon,adamw": (ablate.main, "'optimiser' is not an option that can vary"),
    "--factor clip=1,1": (ablate.main, "--factor clip needs distinct values"),
    "--lrs 0.005 --min-lr 0.01": (ablate.main, "--min-lr must be from 0 to --lr, 0.005, not 0.01"),
    "--ladder 32 40 --head-dim 16": (ablate.main, "--dim follows from --ladder; leave it out"),
    "--tokenizer none --vocab-size 300": (ablate.main, "an ablation compares val_bpb, so token files need their token"),
    "norms --row 3 --rowz 3": (bench.main, "did you mean --rows?"),
    "norms --json taken": (bench.main, "--json taken is not a regular file"),
}


@pytest.fixture(scope="module")
def place(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in, with a text, its cache and a run."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text.txt").write_bytes(text.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train.main([*SMALL.split(), "--data", "text.txt", "--out", "taken"])
    return folder


def contents(folder: Path) -> set[tuple[Path, int]]:
    """Without locks, and without the index of texts."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".index")
    return {(path, path.stat().st_mtime_ns) for path in files if ".lock" not in (path.name, path.suffix)}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_wrong_flag(flags, place, ends, monkeypatch):
    monkeypatch.chdir(place)
    before, (command, message) = contents(place), REFUSED[flags]
    whole = command in (generate.main, bench.main) or flags.startswith("--resume")
    code, error = ends(command, [*([] if whole else [*SMALL.split(), "--data", "text.txt"]), *flags.split()])
    assert code == 2 and message in error and error.count("error: ") == error.count("\n") == 1, error
    assert contents(place) == before


def test_an_error_that_is_longer_than_a_screen_is_cut(refused):
    error = refused(train.main, ["--norm", "x" * 5000])
    assert "argument --norm: invalid choice: 'xxx" in error and "xxx ... xxx" in error and "(choose from " in error
    assert len(error) < 1700


@pytest.mark.parametrize("command", [train, generate, ablate, bench])
def test_the_version_is_that_of_the_citation(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        command.main(["--version"])
    name, version = capsys.readouterr().out.split()
    assert {f"title: {name}", f"version: {version}"} < {*(ROOT / "CITATION.cff").read_text("utf-8").splitlines()}
