"""What a report says: each kind of sentence, the tables, the files for scripts, and the published runs once more."""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from experiments.compare import find_records
from experiments.findings import Finding
from experiments.records import Arm, Record, name_arms
from experiments.report import columns_of, compare_records, write_report
from experiments.statistics import holm
from files import ROOT
from tests.experiments.made import KNOWN, record, records, search

STUDY = ROOT / "results/study"
RATES = [0.01 * 1.5**i for i in range(-2, 3)]


@pytest.fixture
def said(tmp_path, undrawn):
    """`said(records)`: the summary of a report in the folder `tmp_path`."""
    return lambda runs, **options: write_report(tmp_path, runs, **options)


def shifted(**differences: float) -> list[Record]:
    """Three seeds of each norm. Differences of -0.01, 0, 0.01 around their mean are ± 4.3027 · 0.01 / √3 = 0.0248."""
    means = {norm: [1.99 + each, 3 + each, 4.01 + each] for norm, each in differences.items()}
    return records({"rmsnorm": [2.0, 3.0, 4.0]} | means)


def searched(norm: str, vertex: float = 0.01, curvature: float = 0.1, **values: Any) -> list[Record]:
    """The search of an arm whose losses are a parabola with its lowest point at 3."""
    losses = {lr: [3 + curvature * math.log(lr / vertex) ** 2] for lr in RATES}
    return search(Arm.of(norm=norm), losses, **values)


# --- sentences -------------------------------------------------------------------------------------------------------


def test_without_a_search_nothing_is_better_only_better_at_this_rate(said):
    assert said(shifted(layernorm=-0.1, dyt=0.1)) == [
        "Compared with rmsnorm, at learning rate 0.01, which was not tuned: layernorm (−0.100 ± 0.025, p = 0.0066) is "
        "better at this rate; dyt (+0.100 ± 0.025, p = 0.0066) is worse at this rate.",
        "n = 3; 0.2M parameters, 0.5M tokens of python, float32; equal tokens.",
        "Four of five repetitions would show a true difference of 0.042, the median of all arms.",
    ]
    runs = [replace(run, lr=0.02) if run.arm.name == "dyt" else run for run in shifted(dyt=0.1)]
    assert said(runs)[0] == (
        "Compared with rmsnorm, at learning rates that differ and were not tuned: dyt (+0.100 ± 0.025, p = 0.0033) is "
        "worse at these rates."
    )


def test_with_a_search_arms_are_compared_at_their_best_rates(said):
    """If not all arms were searched for theirs, these comparisons are undecided."""
    runs = [*shifted(layernorm=-0.1, none=0.1), *searched("rmsnorm"), *searched("layernorm"), *searched("none", 1.0)]
    assert said(runs)[0] == (
        "Compared with rmsnorm, each at its own best learning rate: layernorm (−0.100 ± 0.025, p = 0.0066) is better; "
        "none (+0.100 ± 0.025) is undecided, as the best learning rate was not found, here or in the baseline."
    )
    assert said([run for run in runs if run.arm.name != "none" or not run.search])[0].startswith(
        "Compared with rmsnorm, at learning rates that were not all tuned: layernorm (−0.100 ± 0.025, p = 0.0066) is be"
    )


def test_many_arms_are_named_by_verdict_in_order_of_effect_without_numbers(said):
    runs = shifted(dyt=0.001, none=1.0, layernorm=-1.0, derf=-2.0)
    runs += records({"seednorm": [2.0, 3.4, 4.8], "groupnorm": [2.0, None, 3.0], "scalenorm": [2.0, 3.0, 4.0]})
    assert said(runs)[0] == (
        "Compared with rmsnorm, at learning rate 0.01, which was not tuned: derf and layernorm are better at this "
        "rate; none is worse at this rate; scalenorm is as good up to 0.01 at this rate; groupnorm is undecided, as "
        "runs diverged or have not ended, here or in the baseline; dyt and seednorm are undecided."
    )
    more = records({norm: [2.0, 3.4, 4.8] for norm in ("prmsnorm", "batchnorm", "a", "b", "c")})
    assert said(runs + more)[0].endswith("; 7 of 12 arms are undecided.")


def test_one_seed_has_no_verdict_and_two_are_too_few(said):
    assert said(records({"rmsnorm": [2.0], "dyt": [2.5]}))[:2] == [
        "Compared with rmsnorm, at learning rate 0.01, which was not tuned: one seed, so no verdict: dyt +0.500.",
        "n = 1; 0.2M parameters, 0.5M tokens of python, float32; equal tokens.",
    ]
    two = records({"rmsnorm": [2.0, 2.0], "dyt": [2.5, 2.502]})
    assert said(two)[0].endswith(": dyt (+0.501 ± 0.013, p = 0.0013) is undecided, as two seeds are too few to tell.")


def test_one_arm_and_arms_on_other_text(said):
    assert said(records({"dyt": [2.0, 2.2]}))[0] == "One arm, dyt: val_bpb 2.1000 ± 1.2706 (2)."
    runs, elsewhere = records({"rmsnorm": [2.0], "dyt": [2.5]}), {"settings": KNOWN | {"data": "text@ff"}}
    assert said([*runs, *records({"none": [2.0]}, **elsewhere)])[0] == (
        "Compared with rmsnorm, at learning rate 0.01, which was not tuned: one seed, so no verdict: dyt +0.500. Not "
        "compared, as no other arm has the same text and batches: none."
    )
    two = records({"none": [2.0], "derf": [2.5]}, **elsewhere)
    assert said([*runs, *two])[0].startswith("Compared with the first arm with the same text and batches, at learning")


def test_what_diverged_or_has_not_ended_is_said(said, tmp_path):
    waiting = [record(Arm.of(norm="dyt"), 3, 2.0, val_loss=None, val_bpb=None, step=5)]
    runs = [*records({"rmsnorm": [2.0, 2.1, 2.2, 2.3], "layernorm": [None] * 4, "dyt": [2.0, 2.1, 2.2]}), *waiting]
    summary = said(runs)
    assert summary[0] == (
        "**Partial: 11 of 12 runs have ended.** Compared with rmsnorm, at learning rate 0.01, which was not tuned: dyt "
        "and layernorm are undecided, as runs diverged or have not ended, here or in the baseline."
    )
    table = (tmp_path / "table.md").read_text()
    assert (
        "| dyt | +0.0000 ± 0.0000 (3 of 4)† | undecided | – | – | 2.1000 ± 0.2484 (3 of 4)† | 0.01 | 0 of 3 |" in table
    )
    assert "| layernorm | – | undecided | – | – | – | 0.01 | 4 of 4 |" in table
    summary = said(searched("rmsnorm") + [replace(run, val_loss=None) for run in searched("dyt")])
    assert summary == ["**Partial: the search for learning rates has not ended; 5 of its runs have.**"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["arms"] and report["summary"] == summary[0] and not report["tuned"]


@pytest.mark.parametrize(
    "changed, said_to_be, then",
    [
        ({"step_time": 1.27}, "equal tokens", "; a step of dyt takes 1.27 times as long."),
        ({"step_time": 1.02, "flops": 8.1e11}, "equal tokens", "of 0.031."),
        ({"flops": 1e12}, "equal tokens", "; a step of dyt takes 1.25 times the FLOPs."),
        ({"tokens": 409_600, "flops": 8e11, "step_time": 1.3}, "equal FLOPs", "1.30 times as long."),
        ({"tokens": 409_600, "flops": 9e11, "settings": {"steps": "10"}, "step_time": 2.0}, "equal time", "the FLOPs."),
        ({"tokens": 409_600, "flops": 9e11, "step_time": None}, "at different costs", "takes 1.12 times the FLOPs."),
        ({"flops": None, "step_time": None}, "equal tokens", "of 0.031."),
    ],
)
def test_costs_are_said_where_they_differ(changed, said_to_be, then, said):
    """By more than 3%, to which the time of a step is measured."""
    settings = KNOWN | changed.pop("settings", {})
    runs = [replace(run, **changed, settings=settings) if run.arm.name == "dyt" else run for run in shifted(dyt=0.1)]
    summary = said(runs)
    assert f"; {said_to_be}" in summary[1] and summary[2].endswith(then)


def test_costs_of_many_arms_are_a_range(said):
    runs = shifted(dyt=0.1, none=0.2, derf=0.3, seednorm=0.4)
    times = {"dyt": 0.9, "none": 0.8, "derf": 1.3, "seednorm": 1.2}
    runs = [replace(run, step_time=times.get(run.arm.name, 1.0), parameters=8_256) for run in runs]
    summary = said(runs)
    assert summary[2].endswith("; a step takes 0.80 to 1.30 times as long.") and "8,256 parameters" in summary[1]


def test_other_options_that_differ_are_said(said):
    settings = KNOWN | {"qk_norm": "head", "norm": "dyt"}
    runs = [replace(run, settings=settings) if run.arm.name == "dyt" else run for run in shifted(dyt=0.1)]
    assert said(runs)[1].endswith("; equal tokens; arms also differ in qk norm.")


def test_a_ladder_says_trends_and_what_it_could_have_shown(said, tmp_path):
    sizes = [("size", f"dim={dim},heads=2,steps=9") for dim in (32, 64)]
    arms = [Arm((size, ("norm", norm))) for size in sizes for norm in ("rmsnorm", "dyt")]
    losses = [[3.0, 3.1, 3.2, 3.4], [3.5, 3.61, 3.69, 3.9], [2.0, 2.1, 2.2, 2.4], [2.1, 2.2, 2.31, 2.49]]
    runs = records(dict(zip(arms, losses, strict=True)))
    runs = [replace(run, flops=1e9 if run.arm.width == "dim=32" else 8e9) for run in runs]
    summary = said(runs)
    assert summary[0] == (
        "With compute, the gap closes at this rate for dyt. Compared with rmsnorm of the same size, at learning rate "
        "0.01, which was not tuned: dim=32 dyt (+0.500 ± 0.013, p = 3.6e-06) and dim=64 dyt (+0.100 ± 0.013, p = "
        "0.00015) are worse at this rate."
    )
    assert "; the whole ladder would show a change of 0.0" in summary[2]
    (slope,) = json.loads((tmp_path / "report.json").read_text())["slopes"]
    assert [*slope["flops"].values()] == [1e9, 8e9] and slope["left_out"] == []
    assert slope["difference"] == pytest.approx(-0.4 / 3)
    row = r"\| dyt \| -0\.1333 ± 0\.0\d+ \(4\) \| the gap closes at this rate \| < 0\.0001 \| 0\.\d+ \| \+0\.5000 ± "
    assert re.search(row, (tmp_path / "table.md").read_text())
    more = [replace(run, arm=Arm((run.arm.factors[0], ("norm", "x")))) for run in runs if "dyt" in run.arm.name]
    assert "dyt (dim=32, dim=64) and x (dim=32, dim=64) are worse at this rate." in said([*runs, *more])[0]


# --- tables ----------------------------------------------------------------------------------------------------------


def test_the_whole_table_by_hand(said, tmp_path):
    """The variance of 2, 3, 4 is 1; of 1.5, 2.6, 3.4 it is 0.91; of -0.5, -0.4, -0.6 it is 0.01.

    The two values of batchnorm differ by 2, and the two differences are equal. (7.6489 + 1.0607) · 0.1/√3 is detectable
    at 0.05/3. t is 5√3, p 0.0131, times three tests.
    """
    bpb: dict[str, list] = {
        "rmsnorm": [2.0, 3.0, 4.0],
        "none": [None] * 3,
        "layernorm": [1.5, 2.6, 3.4],
        "batchnorm": [1.9, None, 3.9],
    }
    runs = [replace(run, step_time=1.27, flops=8.8e11) if run.arm.name == "layernorm" else run for run in records(bpb)]
    said(runs, command="python ablate.py", notes=["skipped: a."])
    text = (tmp_path / "table.md").read_text()
    start, end = text.index("| arm"), text.index("\n\n`python ablate.py`\n\nseeds 0 to 2\n\nskipped: a.")
    titles, _, *rows = text[start:end].splitlines()
    assert titles.startswith("| arm | difference from rmsnorm (n) | verdict | p | detectable | val_bpb (n) | lr | div")
    assert rows == [
        "| rmsnorm | – | – | – | – | 3.0000 ± 2.4841 (3) | 0.01 | 0 of 3 | 1.00 | 1.00 |",
        "| layernorm | -0.5000 ± 0.2484 (3) | better at this rate | 0.039 | 0.5028 | 2.5000 ± 2.3697 (3) | 0.01 | 0 "
        "of 3 | 1.10 | 1.27 |",
        "| batchnorm | -0.1000 ± 0.0000 (2 of 3)† | undecided | – | – | 2.9000 ± 12.7062 (2 of 3)† | 0.01 | 1 of 3 "
        "| 1.00 | 1.00 |",
        "| none | – | undecided | – | – | – | 0.01 | 3 of 3 | 1.00 | 1.00 |",
    ]
    with (tmp_path / "arms.csv").open(newline="") as file:
        by_arm = {row["arm"]: row for row in csv.DictReader(file)}
    assert by_arm["layernorm"].items() >= {"step_time": "1.27", "dtype": "float32", "diverged": "0"}.items()
    report = json.loads((tmp_path / "report.json").read_text())
    (found,) = (each for each in report["comparisons"] if each["arm"] == "layernorm")
    assert found["raw_p"] == pytest.approx(0.0131, abs=1e-4) and found["p"] == pytest.approx(3 * found["raw_p"])
    assert (report["tests"], report["alpha"], report["margin"], report["tuned"]) == (3, 0.05, 0.01, False)
    assert report["dtype"] == ["float32"] and report["data"] == [KNOWN["data"]]
    printed = [columns_of(Finding(None, 2, p=p))[2] for p in (0.0, 0.012, 0.0499, 0.0501)]
    assert printed == ["< 0.0001", "0.012", "0.0499", "0.05"]


def test_the_table_of_learning_rates(said, tmp_path):
    """The second arm has tried one more rate, of which a run is missing. For two values t is 12.7062."""
    runs = search(Arm.of(norm="rmsnorm"), {0.001: [1.0, 1.5], 0.003: [2.0, 2.5], 0.01: [None, 1.0]})
    runs += search(Arm.of(norm="dyt"), {0.001: [3.0, 3.5], 0.003: [2.0, 2.25], 0.01: [None, None], 0.03: [4.0, 4.0]})
    runs[-1] = replace(runs[-1], val_loss=None, val_bpb=None)
    rows = [
        "| arm | 0.001 | 0.003 | 0.01 | 0.03 | reported at | regret |",
        "| rmsnorm | 1.2500 ± 3.1766 (2) | 2.2500 ± 3.1766 (2) | 1.0000 (1 of 2)† | – | – | – |",
        "| dyt | 3.2500 ± 3.1766 (2) | 2.1250 ± 1.5883 (2) | diverged | 4.0000 (1 of 2)† | – | – |",
    ]
    said(runs)
    text = (tmp_path / "table.md").read_text()
    assert all(row in text for row in rows)
    said([*runs, *records({"rmsnorm": [1.0], "dyt": [2.0]}, lr=0.003)])
    assert rows[2].replace("– | – |", "0.003 | optimum not found |") in (tmp_path / "table.md").read_text()
    said([*records({"rmsnorm": [3.0], "dyt": [3.0]}), *searched("rmsnorm"), *searched("dyt")])
    assert (tmp_path / "table.md").read_text().count(" | 0.01 | 0.0000 |\n") == 2


def test_a_factor_at_a_time(said, tmp_path):
    arms = [Arm.of(placement=place, optimizer=name) for place in ("pre", "post") for name in ("muon", "adamw")]
    said(records({arm: [2.0 + number, 3.0 + number] for number, arm in enumerate(arms)}))
    text = (tmp_path / "table.md").read_text()
    text = text[text.index("## One factor at a time") :]
    assert [line.split(" | ")[:2] for line in text.splitlines()[4:8]] == [
        ["| optimizer=adamw − optimizer=muon", "pre"],
        ["| post − pre", "optimizer=muon"],
        ["| post − pre", "optimizer=adamw"],
        ["| optimizer=adamw − optimizer=muon", "post"],
    ]


def test_the_page_has_sentences_table_figures_and_folded_the_rest(said, tmp_path):
    (tmp_path / "ladder.png").touch()  # of an earlier report
    log = [{"step": step, "train_loss": 5.0 - step / 10, "tokens": 8 * step} for step in (10, 20)]
    runs = [replace(run, log=log) for run in shifted(dyt=0.1)]
    said([*runs, *searched("rmsnorm"), *searched("dyt")], command="python ablate.py --norms")
    html = (tmp_path / "report.html").read_text("utf-8")
    order = "<h1>rmsnorm, dyt</h1>.*Compared with.*<h2>Comparison.*<td>dyt</td>.*<img.*<img.*<h2>Learning rates"
    assert re.search(f"{order}.*<details><summary>How to.*ablate.py --norms.*<summary>Settings", html, re.DOTALL)
    assert html.count('src="data:') == 2 and not (tmp_path / "ladder.png").exists()
    said(records({str(number): [2.0] for number in range(14)}))
    assert ", 10, 11 and 2 more</h1>" in (tmp_path / "report.html").read_text("utf-8")


# --- the published runs ----------------------------------------------------------------------------------------------


CHANGED = {  # arms with another verdict than published: one is unsure, and the others cannot exclude errors of rates
    "recipes-adamw": ["gemma3"],
    "derf": ["derf vector_lr=0.1"],
    "trend": ["dim=64 qwen3_next"],
    "decay": ["rmsnorm:zero_centered=true decay_gains=input"],
}


@pytest.mark.parametrize("folder", sorted(path.name for path in STUDY.iterdir() if path.is_dir()))
def test_published_runs_give_the_published_differences(folder):
    """Their order is the same. Intervals and p-values are those of scipy, with what errors of learning rates may cost.

    Without a search, everything is as it was published. With one, the allowance has grown, because the lowest point of
    a cubic counts, and two arms are unsure.
    """
    published = json.loads((STUDY / folder / "report.json").read_text())["comparisons"]
    found = compare_records(name_arms(find_records([STUDY / folder]))[0])
    raw, changed = [], []
    for (pair, each), old in zip(found.pairs.items(), published, strict=True):
        row, regrets, values = each.row, [found.arms[arm].regret for arm in pair], np.array(each.values)
        slack = sum(filter(None, regrets))
        interval = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert row["difference"] == pytest.approx(old["difference"], abs=1e-12)
        assert row["half_width"] == pytest.approx((interval.high - interval.low) / 2 + slack, rel=1e-9)
        beyond = max(0.0, abs(values.mean()) - slack) / scipy.stats.sem(values)
        raw.append(1.0 if each.p is None else 2 * scipy.stats.t.sf(beyond, len(values) - 1))
        if row["verdict"].removesuffix(" at this rate") != old["verdict"]:
            changed.append(pair[0].name)
        if not found.search:
            for name in ("half_width", "p", "detectable"):
                assert row[name] == pytest.approx(old[name], rel=1e-9)
        elif None not in regrets:
            assert row["half_width"] >= old["half_width"] - 1e-9
    corrected = holm([*raw, *(slope.row["raw_p"] for slope in found.trends.values())])
    assert [1.0 if each.p is None else each.p for each in found.pairs.values()] == pytest.approx(corrected[: len(raw)])
    assert changed == CHANGED.get(folder, [])


def test_two_published_folders_are_compared_each_with_its_own_baseline(said):
    """Whether their text is the same is not known."""
    folders: list[Path] = [STUDY / "recipes-muon", STUDY / "recipes-adamw"]
    summary = said(find_records(folders))
    assert summary[0].startswith(
        "Compared with the first arm of its folder, each at its own best learning rate: muse_gl"
    )
    assert "gemma3 recipes-adamw and gemma4 recipes-adamw are undecided, as the best learning rate was no" in summary[0]
    assert summary[1] == "n = 6 or 8; 0.2M parameters, 0.5M to 1.0M tokens; equal tokens."
    one = [run for run in find_records(folders) if not run.search and run.folder.endswith("muon")]
    new = [replace(run, folder="new") for run in records({Arm.of(recipe="qwen3"): [2.0, 2.1]})]
    assert "qwen3 new" in said([*one, *new])[0]
