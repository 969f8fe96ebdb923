"""Records of runs: what came of them, their settings, runs.csv, and the names of arms."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config import configure
from experiments.records import Arm, Record, name_arms, outcome, read_csv, settings_of
from experiments.report import write_report
from files import ROOT
from runtime.run import fields_of
from tests.experiments.made import KNOWN, record, records, search

STUDY = ROOT / "results/study"
TRAINING = {"step": 10, "train_loss": 5.0, "seconds": 1.0, "tokens_per_second": 300.0}
MIDDLE = {"step": 15, "train_loss": 4.5, "seconds": 2.0, "tokens_per_second": 280.0}
LATER = {"step": 20, "train_loss": 4.0, "seconds": 2.5, "tokens_per_second": 100.0}
EARLY = {"step": 10, "val_loss": 3.5, "val_bpb": 2.2}
LAST = {"step": 20, "val_loss": 4.0, "val_bpb": 2.5}
NOT_FINITE = {"step": 20, "not_finite": True}


@pytest.mark.parametrize(
    "log, expected",
    [
        pytest.param([TRAINING, EARLY, MIDDLE, LATER, LAST], (False, 20, 4.0, 2.5, 3.5, 280.0, 2.5), id="done"),
        pytest.param([LATER, LAST | {"val_loss": 5.54}], (False, 20, 5.54, 2.5, 5.54, 100.0, 2.5), id="uniform"),
        pytest.param([LATER, LAST | {"val_loss": 5.56}], (True, 20, 5.56, 2.5, 5.56, 100.0, 2.5), id="above"),
        pytest.param([TRAINING, NOT_FINITE], (True, 20, None, None, None, 300.0, 1.0), id="not finite"),
        pytest.param([NOT_FINITE | {"step": 3}], (True, 3, None, None, None, None, None), id="at once"),
        pytest.param([TRAINING, LATER, LAST, NOT_FINITE], (True, 20, None, None, 4.0, 200.0, 2.5), id="unsaved"),
        pytest.param([TRAINING, LATER], (False, 20, None, None, None, 200.0, 2.5), id="not evaluated"),
        pytest.param([TRAINING, LAST | {"step": 10}], (False, 10, None, None, 4.0, 300.0, 1.0), id="not at the end"),
        pytest.param([], (False, 0, None, None, None, None, None), id="empty"),
    ],
)
def test_what_a_log_says(log, expected):
    """A run diverged if it ends above a uniform prediction, ln 257 = 5.549 nats."""
    found = outcome(log, steps=20, vocab_size=257)
    assert tuple(found.values()) == (*expected, log)
    assert Record(Arm(), 0.01, 0, **found).ended == (expected[0] or expected[3] is not None)


def run_file(imports: list = [], weights: str = "", **asked: Any) -> dict[str, Any]:  # noqa: B006
    run: dict[str, Any] = {"asked": asked, "resolved": fields_of(*configure(asked)), "imports": imports}
    run |= {"corpus": {"name": "text", "hash": "c" * 64}, "tokenizer": {"kind": "bytes", "hash": "d" * 64}}
    return run | ({"weights_from": {"sha256": {"model.safetensors": weights}}} if weights else {})


def test_settings_are_what_can_change_a_result_and_is_not_at_its_default():
    """What is only saved, logged or watched is none. Micro-batches are one if a norm has statistics over them."""
    plain = {"data": "text@cccccccccccc", "tokenizer": "bytes@dddddddddddd"}
    derived = settings_of(run_file())
    assert derived.items() >= plain.items() and "steps" not in derived and "lr" not in derived

    def changed(**asked: Any) -> dict[str, str]:
        return dict(settings_of(run_file(**asked)).items() - derived.items())

    assert not changed(seed=5, lr=0.1, out="x", keep=9, save_every=7, watch=3, log="wandb", micro_batch_size=4)
    assert changed(norm="dyt", norm_args={"alpha": 0.5}) == {"norm": "dyt:alpha=0.5"}
    assert changed(norm="batchnorm", micro_batch_size=4) == {"norm": "batchnorm", "micro_batch_size": "4"}
    assert changed(clip=3.0) == {"clip": "3"} and changed(device="cuda:1") == {"device": "cuda"}
    assert changed(recipe="llama") == {} and changed(recipe="gemma3").items() >= {"recipe": "gemma3"}.items()
    one, two = ([{"file": "p.py", "sha256": digit * 8}] for digit in "12")
    assert (changed(imports=one), changed(imports=two)) == ({"imports": "p.py@111111"}, {"imports": "p.py@222222"})
    weights = [changed(init_from="w", tokenizer="pretrained", weights=digit)["init_from"] for digit in "12"]
    assert len({*weights}) == 2 and weights[0].startswith("w@")
    earlier = run_file()
    del earlier["resolved"]["min_lr"]  # as before there was one
    assert settings_of(earlier) == derived


# --- runs.csv --------------------------------------------------------------------------------------------------------


def test_runs_csv_comes_back_as_it_was(tmp_path, undrawn):
    """Also a run that diverged, one that has not ended, a search, factors as they were spelled, imports."""
    arms = [Arm.of(norm=norm, clip=clip) for norm in ("rmsnorm", "dyt:alpha=1e-1") for clip in ("1", "0.50")]
    settings = KNOWN | {"recipe": "olmo", "imports": "p.py@111111", "norm": "dyt:alpha=0.1", "clip": "0.5"}
    runs = records({arm: [2.0, 2.1, None] for arm in arms}, settings=settings, machine="CPU, AVX2", commit="abc")
    runs += [replace(runs[0], seed=3, step=0, val_loss=None, val_bpb=None, best_val_loss=None)]
    runs += search(arms[1], {0.003: [2.5], 1e-05: [None]}, settings=settings)
    write_report(tmp_path, runs)
    again = read_csv(tmp_path / "runs.csv")
    assert [run.options for run in again] == [run.options for run in runs]
    assert [replace(run, settings={}) for run in again] == [replace(run, settings={}) for run in runs]
    (tmp_path / "again").mkdir()
    write_report(tmp_path / "again", again)
    for name in ("runs.csv", "arms.csv", "report.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_earlier_files_lack_columns():
    """The costs come from arms.csv. Seeds from 1000 on are the search. A factor may be in the name of the arm."""
    muon = read_csv(STUDY / "recipes-muon/runs.csv")
    assert len(muon) == 193 and sum(run.search for run in muon) == 193 - 13 * 8
    assert muon[0].arm == Arm.of(recipe="llama") and (muon[0].lr, muon[0].seed) == (0.0198, 0)
    assert muon[1].flops == 855834624000.0 == next(run for run in muon if run.arm.name == "qwen3_next").flops
    rates = read_csv(STUDY / "rates/runs.csv")
    assert rates[0].arm == Arm.of(run="plain-0.01-0") and rates[0].parameters == 230016 and not rates[0].known
    assert read_csv(STUDY / "deep/runs.csv")[0].tokens == 512000  # its arms are named by rates as well in arms.csv


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("val_bpb", "bpb", "lacks the column 'val_bpb'; it is not a runs.csv of this project"),
        ("0.01,1,", "fast,1,", ", line 3: lr is 'fast', not of type float"),
        ("0.01,1,", "0.01,1.5,", ", line 3: seed is '1.5', not of type int"),
        ("0.01,1,", ",1,", ", line 3 has no learning rate or no seed"),
        ("False,False", "no,False", ", line 2: search is 'no', not of type bool"),
        ("2.25", "nan", ", line 2: val_loss is nan, which is not finite"),
        ("python@123456789abc", "a,b", ", line 2 does not have"),
        (None, "", "lacks the column 'lr'"),
    ],
)
def test_what_is_no_runs_csv_is_refused_in_a_line_that_names_it(old, new, message, tmp_path, undrawn):
    write_report(tmp_path, records({"rmsnorm": [2.25, 2.5]}))
    file = tmp_path / "runs.csv"
    file.write_text(file.read_text().replace(old, new, 1) if old else "")
    with pytest.raises(ValueError) as error:
        read_csv(file)
    assert message in str(error.value) and str(error.value).startswith(str(file))


# --- names -----------------------------------------------------------------------------------------------------------


def named(*runs: dict[str, str], folders: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """The names of the arms of plain runs with these options, and which others differ."""
    made = []
    for number, options in enumerate(runs):
        lr, seed = float(options.get("lr", 0.015)), int(options.get("seed", 0))
        settings = KNOWN | {name: value for name, value in options.items() if name not in ("lr", "seed")}
        folder = folders[number] if folders else "runs"
        made.append(Record(Arm(), lr, seed, run=f"{folder}/{number}", settings=settings, folder=folder))
    found, others = name_arms(made)
    return [run.arm.name for run in found], others


def test_arms_are_named_by_the_fewest_options_that_tell_them_apart():
    """What follows from a recipe is not said. What differs besides the name is."""
    assert named({}, {"seed": "1"}) == (["rmsnorm pre"] * 2, [])
    assert named({}, {"norm": "dyt:alpha=1"}) == (["rmsnorm", "dyt:alpha=1"], [])
    assert named({}, {"steps": "1000", "warmup": "50"}) == (["steps=20", "steps=1000"], ["warmup"])
    assert named({}, {"lr": "0.03"}, {"lr": "0.03", "seed": "1"}) == (["lr=0.015", "lr=0.03", "lr=0.03"], [])
    gemma = {"recipe": "gemma3", "placement": "sandwich", "activation": "gelu"}
    assert named({}, gemma) == (["llama", "gemma3"], [])
    assert named({}, gemma, gemma | {"clip": "0"})[0] == ["llama clip=1", "gemma3 clip=1", "gemma3 clip=0"]
    star = [{"dim": "32"}, {"clip": "0"}, {"lr": "0.1"}, {"momentum": "0.5"}]  # no three options tell them apart
    assert named({}, *star)[0][3] == "dim=128 lr=0.1 momentum=0.85 clip=1"


def test_a_folder_is_in_the_name_where_runs_have_the_same_options_and_seed():
    assert named({}, {}, folders=("a", "b")) == (["a", "b"], [])
    assert named({}, {}, folders=("x/runs", "y/runs"))[0] == ["x/runs", "y/runs"]
    assert named({}, {"norm": "dyt"}, {"seed": "1"}, folders=("a", "a", "b"))[0] == ["rmsnorm", "dyt", "rmsnorm"]


def test_factors_of_an_ablation_are_kept_and_those_of_two_ablations_joined():
    """A learning rate that was searched for is no option, and the options of an earlier report are not known."""
    arms = [Arm.of(norm=norm, placement="pre") for norm in ("rmsnorm", "dyt")]
    runs = records({arms[0]: [2.0], arms[1]: [2.1]})
    assert [run.arm.name for run in name_arms(runs)[0]] == ["rmsnorm", "dyt"]
    tuned = [*runs, *search(arms[0], {0.02: [2.0], 0.03: [2.0]})]
    assert {run.arm.name for run in name_arms(tuned)[0]} == {"rmsnorm", "dyt"}
    more = [replace(run, folder="more", settings=KNOWN | {"steps": "40"}) for run in runs]
    assert [run.arm.name for run in name_arms(runs + more)[0]][1:3] == ["dyt steps=20", "rmsnorm steps=40"]
    later = [replace(run, folder="more", seed=5) for run in runs]
    assert [run.arm.name for run in name_arms(runs + later)[0]] == ["rmsnorm", "dyt"] * 2
    earlier = [replace(run, folder="x/old", seed=5, settings={}) for run in runs]
    found, others = name_arms(runs + earlier)
    assert [run.arm.name for run in found][1:3] == ["dyt folder", "rmsnorm old"] and not others


def test_a_size_is_named_by_its_width():
    arm = Arm((("size", "dim=64,heads=4,steps=40"), ("norm", "dyt"), ("clip", "0")))
    assert (arm.name, arm.width, arm.without_size.name) == ("dim=64 dyt clip=0", "dim=64", "dyt clip=0")
    assert Arm().name == "model" and record(arm, 0, 2.0).steps == 20


def test_a_run_says_how_it_ended():
    runs = records({"rmsnorm": [2.25, None]}, lr=0.5)
    assert [*map(str, runs)] == [
        "rmsnorm, lr 0.5, seed 0: val_bpb 2.2500",
        "rmsnorm, lr 0.5, seed 1: diverged at step 7",
    ]
    assert runs[0].path == Path("rmsnorm-lr0.5-seed0")
