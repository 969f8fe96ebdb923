"""Records of runs: what came of them, their settings, runs.csv, and the names of arms."""

from dataclasses import replace
from typing import Any

import pytest

from config import configure
from experiments.records import Arm, Record, name_arms, outcome, read_csv, rows_of, settings_of
from experiments.report import make_report
from runtime.run import fields_of
from tests.experiments.made import KNOWN, records, search

TRAINED = {"step": 20, "train_loss": 4.0, "seconds": 2.5}
LAST = {"step": 20, "val_loss": 4.0, "val_bpb": 2.5}


@pytest.mark.parametrize(
    "log, expected",
    [
        ([TRAINED | {"step": 10, "seconds": 1.0}, TRAINED, LAST], (False, 20, 4.0, 2.5, 2.5)),
        ([TRAINED, LAST | {"val_loss": 5.56}], (True, 20, 5.56, 2.5, 2.5)),  # a uniform prediction has ln 257 = 5.549
        ([TRAINED, LAST, {"step": 20, "not_finite": True}], (True, 20, None, None, 2.5)),
        ([TRAINED | {"step": 10}, LAST | {"step": 10}], (False, 10, None, None, 2.5)),  # not at the end
        ([], (False, 0, None, None, None)),
    ],
)
def test_what_a_log_says(log, expected):
    found = outcome(log, steps=20, vocab_size=257)
    assert tuple(found.values()) == (*expected, log)
    assert Record(Arm(), 0.01, 0, **found).ended == (expected[0] or expected[3] is not None)


def test_settings_are_what_can_change_a_result_and_is_not_at_its_default():
    """What is only saved, logged or watched is none. Micro-batches are one if a norm has statistics over them."""

    def settings(imports: tuple = (), weights: str = "", **asked: Any) -> dict[str, str]:
        run: dict[str, Any] = {"asked": asked, "resolved": fields_of(*configure(asked)), "imports": imports}
        run |= {"weights_from": {"sha256": {"model.safetensors": weights}}} if weights else {}
        run |= {"corpus": {"name": "text", "hash": "c" * 64}, "tokenizer": {"kind": "bytes", "hash": "d" * 64}}
        del run["resolved"]["min_lr"]  # as before there was one
        return settings_of(run)

    derived = settings()
    assert derived.items() >= {"data": "text@cccccccccccc", "tokenizer": "bytes@dddddddddddd"}.items()
    changes: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"seed": 5, "lr": 0.1, "out": "x", "keep": 9, "watch": 3, "micro_batch_size": 4, "recipe": "llama"}, {}),
        ({"norm": "dyt", "norm_args": {"alpha": 0.5}, "clip": 3.0}, {"norm": "dyt:alpha=0.5", "clip": "3"}),
        ({"norm": "batchnorm", "micro_batch_size": 4}, {"norm": "batchnorm", "micro_batch_size": "4"}),
        ({"device": "cuda:1", "steps": 500}, {"device": "cuda"}),
        ({"recipe": "olmo", "norm": "rmsnorm"}, {"recipe": "olmo"}),
        ({"imports": ({"file": "p.py", "sha256": "1" * 8},)}, {"imports": "p.py@111111"}),
        ({"init_from": "base", "weights": "2" * 64}, {"init_from": "base@acb948"}),
    ]
    for asked, expected in changes:
        assert dict(settings(**asked).items() - derived.items()) == expected


def test_runs_csv_comes_back_as_it_was(tmp_path):
    """Also runs that diverged or have not ended, a search, factors as they were spelled, imports. As Excel saves it."""
    arms = [Arm.of(norm=norm, clip=clip) for norm in ("rmsnorm", "dyt:alpha=1e-1") for clip in ("1", "0.50")]
    settings = KNOWN | {"recipe": "olmo", "imports": "p.py@111111", "norm": "dyt:alpha=0.1", "clip": "0.5"}
    known = {"settings": settings, "machine": "CPU, AVX2", "commit": "abc", "lost": 0.125}
    runs = records({arm: [2.0, 2.1, None] for arm in arms}, **known)
    runs += [replace(runs[0], seed=3, step=0, val_loss=None, val_bpb=None)]
    runs += search(arms[1], {0.003: [2.5], 1e-05: [None]}, **known)
    assert [row["clip"] for row in rows_of([runs[0], replace(runs[0], settings={}, arm=Arm())])] == ["1", ""], "unknown"
    make_report(tmp_path, runs)
    (tmp_path / "runs.csv").write_text("\ufeff" + (tmp_path / "runs.csv").read_text().replace(",True,", ",TRUE,"))
    again = read_csv(tmp_path / "runs.csv")
    assert [run.options for run in again] == [run.options for run in runs]
    assert [replace(run, settings={}) for run in again] == [replace(run, settings={}) for run in runs]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("val_bpb", "bpb", " lacks the column 'val_bpb'; it is not a runs.csv of this project"),
        ("0.01,1,", "fast,1,", ", line 3: lr is 'fast', not of type float"),
        ("0.01,1,", ",1,", ", line 3 has no learning rate or no seed"),
        ("0.01,1,", "inf,1,", ", line 3: lr is 'inf', not of type float"),
        (",20\n", ",many\n", ", line 2: steps is 'many', not of type int"),
        (",20\n", ",0\n", ", line 2 has no steps"),
        ("0.01,1,", "-1,1,", ", line 3: lr is '-1', not of type float or below 0"),
        ("0.01,1,", f"0.01,1{'0' * 400},", ", line 3: seed is '100"),
        ("python@123456789abc", "a,b", ", line 2 does not have"),
        (None, "", " lacks the column 'lr'"),
    ],
)
def test_what_is_no_runs_csv_is_refused_in_a_line_that_names_it(old, new, message, tmp_path):
    make_report(tmp_path, records({"rmsnorm": [2.25, 2.5]}))
    file = tmp_path / "runs.csv"
    file.write_text(file.read_text().replace(old, new, 1) if old else "")
    with pytest.raises(ValueError) as error:
        read_csv(file)
    assert str(error.value).startswith(f"{file}{message}")


GEMMA: dict[str, Any] = {"recipe": "gemma3", "placement": "sandwich", "init": "mup"}
FREE = dict(attention_bias="true", rope_theta="5e5", rotary_fraction="0.5", tie_embeddings="false", dropout="0.1")
LOSSY = {"tokenizer": "hf@a", "vocab_size": "9", "lost": 0.1}
STAR: list[dict[str, Any]] = [{"dim": "32"}, {"clip": "0"}, {"lr": "0.1"}, {"momentum": "0.5"}]  # all four are needed


@pytest.mark.parametrize(
    "runs, names, others",
    [
        ([{}, LOSSY], [f"tokenizer={KNOWN['tokenizer']}", "tokenizer=hf@a lossy (10%)"], []),
        ([{"lost": 0.1}, {"clip": "0", "lost": 0.2}], ["clip=1 lossy (10%)", "clip=0 lossy (20%)"], []),
        ([{}, {"steps": "1000", "warmup": "50"}], ["steps=20", "steps=1000"], ["warmup"]),
        ([{}, {"lr": "0.03"}, {"lr": "0.03", "seed": 1}], ["lr=0.015", "lr=0.03", "lr=0.03"], []),
        ([{}, GEMMA | FREE], ["llama", "gemma3"], [*FREE]),
        ([{"hidden_dim": "352"}, GEMMA | {"hidden_dim": "384", "heads": "4"}], ["llama"], ["heads", "hidden_dim"]),
        ([{"hidden_dim": "352"}, GEMMA | {"hidden_dim": "704", "dim": "256", "compile": "x"}], ["llama", "gemma3"], []),
        ([{}, {"recipe": "qwen3", "qk_norm": "head", "init": "mup"}], ["llama", "qwen3"], ["init"]),
        ([{}, GEMMA, GEMMA | {"clip": "0"}], ["llama clip=1", "gemma3 clip=1", "gemma3 clip=0"], []),
        ([{}, *STAR], ["dim=128 lr=0.015 momentum=0.85 clip=1", "dim=32 lr=0.015 momentum=0.85 clip=1"], []),
        ([{"folder": "x/a"}, {"folder": "x/b"}], ["a", "b"], []),  # the same options and seed
        ([{"folder": "x/a"}, {"folder": "y/a"}], ["x/a", "y/a"], []),
    ],
)
def test_arms_are_named_by_the_fewest_options_that_tell_them_apart(runs, names, others):
    """What follows from a recipe is not said. What differs besides the name is. A report's own names stay."""
    made = []
    for number, options in enumerate(runs):
        own: dict[str, Any] = {"lr": 0.015, "seed": 0, "folder": "runs", "lost": 0.0} | options
        settings = KNOWN | {name: own.pop(name) for name in options if name not in ("lr", "seed", "folder", "lost")}
        made.append(Record(Arm(), float(own.pop("lr")), run=str(number), settings=settings, **own))
    found, differing = name_arms(made)
    assert ([run.arm.name for run in found][: len(names)], differing) == (names, others)
    assert name_arms(found) == (found, differing)


def test_factors_of_an_ablation_are_kept_and_those_of_two_ablations_joined():
    """A learning rate that was searched for is no option, and the options of an earlier report are not known."""
    arms = [Arm.of(norm=norm, placement="pre") for norm in ("rmsnorm", "dyt")]
    runs = records({arms[0]: [2.0], arms[1]: [2.1]})

    def names(*more: Record) -> list[str]:
        return list(dict.fromkeys(run.arm.name for run in name_arms([*runs, *more])[0]))

    assert names(*search(arms[0], {0.02: [2.0], 0.03: [2.0]})) == ["rmsnorm", "dyt"]
    changed = [replace(run, folder="x/more", settings=KNOWN | {"steps": "40"}) for run in runs]
    assert names(*changed) == ["rmsnorm steps=20", "dyt steps=20", "rmsnorm steps=40", "dyt steps=40"]
    assert names(*(replace(run, folder="x/more", seed=5) for run in runs)) == ["rmsnorm", "dyt"]
    earlier = (replace(run, folder="x/old", seed=5, settings={}) for run in runs)
    assert names(*earlier) == ["rmsnorm folder", "dyt folder", "rmsnorm old", "dyt old"]
