"""Flags of ablate.py and bench.py: refused as those of train.py are, and their defaults."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

import ablate
import bench
from experiments.ablation import AblationConfig
from tests.robustness import test_flags as train_py

REFUSED: dict[str, tuple[Callable, str]] = {
    "--norms rmsnorm --out taken": (ablate.main, "taken is a file, or not empty; choose another folder"),
    "--norms compare": (ablate.main, "--norms: unknown 'compare'; choose from batchnorm"),
    "--placements pre mhc:stream=2": (ablate.main, "placement 'mhc' has no argument 'stream'; it takes streams, end"),
    "--norm rmsnorm": (ablate.main, "--norm is for a single run; list all values with --norms"),
    "--factor optimiser=muon,adamw": (ablate.main, "'optimiser' is not an option that can vary"),
    **{f"--factor clip={values}": (ablate.main, "--factor clip needs distinct values") for values in ("1,1", "1,")},
    "--init-from taken": (ablate.main, "an ablation compares runs from random initialization; leave out --init-from"),
    "--tokens-per-parameter 3": (ablate.main, "--tokens-per-parameter is for a --ladder"),
    "--lrs 0.005 --min-lr 0.01": (ablate.main, "--min-lr 0.01 is above the learning rate, 0.005; --lr"),
    "--ladder 32 40 --head-dim 16": (ablate.main, "--dim follows from --ladder; leave it out"),
    "--tokenizer none --vocab-size 300": (ablate.main, "an ablation compares val_bpb, so token files need their token"),
    "norms --row 3 --rowz 3": (bench.main, "did you mean --rows?"),
    **{f"norms --json {name}": (bench.main, f"{name} is not a regular file") for name in ("taken", "/dev/fd/0")},
}
place = train_py.place


@pytest.mark.parametrize("flags", REFUSED)
def test_a_wrong_flag(flags, place, ends, monkeypatch):
    monkeypatch.chdir(place)
    train_py.assert_refused(flags, *REFUSED[flags], place, ends)


def test_defaults_are_as_recorded(kept):
    found = {f"bench.py {name}": dataclasses.asdict(each[1]()) for name, each in bench.COMMANDS.items()}
    found["ablate.py"] = dataclasses.asdict(AblationConfig())
    kept(Path(__file__).with_name("options.json"), found)
