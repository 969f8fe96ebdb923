"""What a report says: each kind of sentence, the tables, the files for scripts, and the published runs once more."""

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from experiments.compare import find_records
from experiments.findings import compare
from experiments.markdown import markdown
from experiments.records import Arm, Record, name_arms, read_csv
from experiments.report import make_report
from files import ROOT
from tests.experiments.made import KNOWN, record, records, search

STUDY = ROOT / "results/study"
FOUR = "Four of five repetitions would show a true difference of about "
TUNED, UNTUNED = ", each at its own best learning rate: ", ", at learning rate 0.01, which was not tuned: "
RATES = [0.01 * 1.5**i for i in range(-2, 3)]


@pytest.fixture
def summarize(tmp_path) -> Callable[..., list[str]]:
    """`summarize(records)`: the summary of a report in the folder `tmp_path`."""
    return lambda runs, **options: make_report(tmp_path, runs, **options)


def shifted(*searches: str, lr: float = 0.01, **differences: float) -> list[Record]:
    """Three seeds of each norm. Differences of -0.01, 0, 0.01 around their mean are ± 4.3027 · 0.01 / √3 = 0.0248."""
    means = {norm: [1.99 + each, 3 + each, 4.01 + each] for norm, each in differences.items()}
    losses = {rate: [3 + 0.1 * math.log(rate / lr) ** 2] for rate in RATES}  # of searches, lowest at `lr`
    searched = [run for norm in searches for run in search(Arm.of(norm=norm), losses)]
    return records({"rmsnorm": [2.0, 3.0, 4.0]} | means) + searched


def changed(norm: str, runs: list[Record], **values: Any) -> list[Record]:
    """With other values in the runs of this norm."""
    return [replace(run, **values) if run.arm.name == norm else run for run in runs]


MANY = shifted(dyt=0.001, none=1.0, layernorm=-1.0, derf=-1.5)
MANY += records({"seednorm": [2.0, 3.4, 4.8], "groupnorm": [2.0, None, 3.0], "scalenorm": [2.0, 3.0, 4.0]})
ONE, OTHER = records({"rmsnorm": [2.0], "dyt": [2.5]}), KNOWN | {"data": "text@ff"}
RED = f"a\n\x1b[31m{'c' * 200_000}"
WILD = records({"a": [2.0], f"{RED}d": [2.5], f"{RED}e": [2.5]}, commit=RED, machine=RED, settings={"data": RED})
BROKEN = records({"rmsnorm": [2.0, None], "dyt": [2.0, 3.0], "none": [None, None], "derf": [3.0, 4.0]})
NOT_FOUND = "none (+0.100 ± 0.025) is undecided, as the best learning rate was not found, here or in the baseline"
BETTER, WORSE = "layernorm (−0.100 ± 0.025, p = 0.00663) is better", "dyt (+0.100 ± 0.025, p = 0.00663) is worse"
UNTUNED_ARM = shifted("rmsnorm", "layernorm", layernorm=-0.1, none=0.1)
LONE = [*ONE, *records({"a": [2.0]}, settings=OTHER)]
SEARCHING = changed("dyt", shifted("rmsnorm", "dyt")[3:], val_loss=None)
STOPPED = [*records({"rmsnorm": [2.0, None], "dyt": [2.0, None]}), record(Arm.of(norm="dyt"), 2, 2.0, val_loss=None)]
SENTENCES: list[tuple[list[Record], str]] = [
    (shifted(layernorm=-0.1, dyt=0.1), f"Compared with rmsnorm{UNTUNED}{BETTER} at this rate; {WORSE} at this rate."),
    (changed("dyt", shifted(dyt=0.1), lr=0.02), "rmsnorm, at learning rate 0.01 to 0.02, which was not tuned: dyt"),
    ([*UNTUNED_ARM, *shifted("none", lr=1.0)[3:]], f" that were not all tuned: {BETTER}; {NOT_FOUND}"),
    (shifted("rmsnorm", "layernorm", layernorm=-0.1), f"Compared with rmsnorm{TUNED}layernorm (−0.100"),
    (MANY, "derf and layernorm are better at this rate; none is worse at this rate; scalenorm is as good up to 0.01"),
    (MANY, "at this rate; groupnorm is undecided, as 1 of its 3 runs diverged; dyt and seednorm are undecided."),
    (BROKEN, "dyt and derf are undecided, as 1 of rmsnorm's 2 runs diverged; none is undecided, as 2 of its 2 runs "),
    (LONE, f"Compared with rmsnorm{UNTUNED}one seed, so no verdict: dyt +0.500. Not compared, as no other arm has"),
    (WILD, rf"one seed, so no verdict: a\n\x1b[31m{'c' * 193}…"),
    ([*ONE, *records({"rmsnorm": [2.0]}, settings=OTHER)], "batches: rmsnorm data=text@ff (val_bpb 2.0000 (1))."),
    ([*LONE, *records({"b": [2.5]}, settings=OTHER)], "Compared with the first arm with the same text and batches, at"),
    (STOPPED, "as 1 of its 3 runs diverged and 1 of its 3 runs did not end; 1 of rmsnorm's 2 runs diverged."),
    (SEARCHING, "**Partial: the search for learning rates has not ended; 5 of its runs did.**"),
]


@pytest.mark.parametrize("runs, sentence", SENTENCES, ids=range(len(SENTENCES)))
def test_a_sentence_says_what_is_known(runs, sentence, summarize, tmp_path):
    """A report on the report says the same."""
    found = summarize(runs)[0]
    assert sentence in found
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["summary"] == found and report["tuned"] == (", each at its own" in found)
    assert summarize(again := find_records([tmp_path]))[0] == found and all("data" in run.settings for run in again)
    assert all(line.isprintable() and len(line) < 3000 for line in (tmp_path / "table.md").read_text().split("\n"))


@pytest.mark.parametrize(
    "changes, conditions, resolution",
    [
        ({}, "n = 3; 0.2M parameters, 0.5M tokens of python, float32; equal tokens.", f"{FOUR}0.051."),
        ({"step_time": 1.27, "parameters": 9000}, "9,000 to 0.2M parameters", "step of dyt takes 1.27 times as long."),
        ({"tokens": 500_000, "step_time": 1.02, "flops": 8.1e11}, "python, float32; equal time.", f"{FOUR}0.051."),
        ({"tokens": 409_600, "step_time": 1.3}, "; equal FLOPs.", "1.30 times as long."),
        ({"tokens": 409_600, "flops": 9e11, "settings": KNOWN | {"steps": "10"}, "step_time": 2.0}, "; equal time", ""),
        ({"tokens": 409_600, "flops": 9e11, "step_time": None}, "unequal or unknown costs.", "1.12 times the FLOPs."),
        ({"settings": KNOWN | {"qk_norm": "head"}}, "; equal tokens; arms also differ in qk norm.", ""),
    ],
)
def test_conditions_and_costs_are_said_where_they_differ(changes, conditions, resolution, summarize):
    """By more than 3%, to which the time of a step is measured."""
    summary = summarize(changed("dyt", shifted(dyt=0.1), **changes))
    assert conditions in summary[1] and summary[2].startswith(FOUR) and summary[2].endswith(resolution)


def test_an_arm_whose_tokenizer_loses_text_is_called_lossy(summarize, tmp_path):
    summary = summarize([*ONE, *records({"dyt": [1.0]}, settings=KNOWN | {"tokenizer": "hf@a"}, lost=0.0012)])
    assert summary[0].endswith(": dyt tokenizer=hf@a lossy (0.12%) (val_bpb 1.0000 (1)).")
    assert summary[1].endswith("; lossy: the tokenizer of some arms loses 0.12% of the text.")
    assert "| dyt tokenizer=hf@a lossy (0.12%) |" in (tmp_path / "table.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["arms"][2]["lost"] == 0.0012
    assert [run.lost for run in read_csv(tmp_path / "runs.csv")] == [0, 0, 0.0012]
    assert "of all arms loses 50% of" in summarize(records({"rmsnorm": [2.0], "dyt": [2.5]}, lost=0.5))[1]


def test_a_ladder_says_trends_and_what_it_could_have_shown(summarize, tmp_path):
    sizes = [("size", f"dim={dim},heads=2,\n") for dim in (32, 64)]
    arms = [Arm((size, ("norm", norm))) for size in sizes for norm in ("rmsnorm", "dyt")]
    losses = [[3.0, 3.1, 3.2, 3.4], [3.5, 3.61, 3.69, 3.9], [2.0, 2.1, 2.2, 2.4], [2.1, 2.2, 2.31, 2.49]]
    runs = records(dict(zip(arms, losses, strict=True)))
    runs = [replace(run, flops=1e9 if "dim=32" in run.arm.name else 8e9) for run in runs]
    summary = summarize(runs)
    assert summary[0] == (
        "With compute, the difference falls at this rate for dyt. Compared with rmsnorm of the same size"
        f"{UNTUNED}dim=32 dyt (+0.500 ± 0.013, p = 3.6e-06) and dim=64 dyt (+0.100 ± 0.013, p = 0.000149) are worse at "
        "this rate."
    )
    assert "; the whole ladder would show a change of about 0.061." in summary[2]
    (slope,) = json.loads((tmp_path / "report.json").read_text())["slopes"]
    assert [*slope["flops"].values()] == [1e9, 8e9]
    table = (tmp_path / "table.md").read_text()
    assert "| dyt | -0.1333 ± 0.0075 (4) | the difference falls at this rate | " in table
    assert r" FLOPs: dim=32,heads=2,\n: 1e+09; dim=64,heads=2,\n: 8e+09." in table and "†" not in table


def test_the_whole_table_by_hand(summarize, tmp_path):
    """The variance of 2, 3, 4 is 1; of 1.5, 2.6, 3.4 it is 0.91; of -0.5, -0.4, -0.6 it is 0.01.

    The two values of batchnorm differ by 2, and the two differences are equal. At 0.05/3, 7.6489 · exp(√(0.6932² +
    0.1299²)) · 0.1/√3 is detectable. t is 5√3, p 0.0131, times three tests.
    """
    bpb: dict[str, list] = {"rmsnorm": [2.0, 3.0, 4.0], "no|ne": [None] * 3, "layernorm": [1.5, 2.6, 3.4]}
    runs = records(bpb | {"batchnorm": [1.9, None, 3.9]}, machine="CPU", commit="abc", seconds=2.5)
    runs = changed("layernorm", runs, step_time=1.27, flops=8.8e11, commit="abc-dirty-1")
    runs[1] = replace(runs[1], diverged=False)  # it did not end
    summary = summarize(runs, command="python ablate.py")
    assert summary[1].endswith("; runs differ in their commit: abc and abc-dirty-1.")
    text = (tmp_path / "table.md").read_text()
    start, end = text.index("| arm"), text.index("\n\n`python ablate.py`\n\nseeds 0, 1, 2; CPU\n\n")
    assert "\n\n† Some seeds are missing" in text[end:]
    titles, _, *rows = text[start:end].splitlines()
    assert titles.startswith("| arm | difference from rmsnorm (n) | verdict | p | detectable | val_bpb (n) | lr | div")
    assert rows == [
        "| rmsnorm | – | – | – | – | 3.0000 ± 2.4841 (3) | 0.01 | 0 of 3 | 1.00 | 1.00 |",
        "| layernorm | -0.5000 ± 0.2484 (3) | better at this rate | 0.0392 | 0.8939 | 2.5000 ± 2.3697 (3) | 0.01 | 0 "
        "of 3 | 1.10 | 1.27 |",
        "| batchnorm | -0.1000 ± 0.0000 (2 of 3)† | undecided | – | – | 2.9000 ± 12.7062 (2 of 3)† | 0.01 | 1 of 3 "
        "| 1.00 | 1.00 |",
        "| no¦ne | – | undecided | – | – | – | 0.01 | 2 of 2 | 1.00 | 1.00 |",
    ]
    with (tmp_path / "arms.csv").open(newline="") as file:
        by_arm = {row["arm"]: row for row in csv.DictReader(file)}
    assert by_arm["batchnorm"].items() >= {"n": "2", "step_time": "1.0", "dtype": "float32", "diverged": "1"}.items()
    report = json.loads((tmp_path / "report.json").read_text())
    (found,) = (each for each in report["comparisons"] if each["arm"] == "layernorm")
    assert found["raw_p"] == pytest.approx(0.0131, abs=1e-4) and found["p"] == pytest.approx(3 * found["raw_p"])
    known = {"tests": 3, "correction": "Holm", "alpha": 0.05, "margin": 0.01, "tuned": False, "seconds": 30}
    known |= {"machines": ["CPU"], "commits": ["abc", "abc-dirty-1"], "dtype": ["float32"], "data": [KNOWN["data"]]}
    assert report | known | {"tokenizer": [KNOWN["tokenizer"]]} == report


def test_the_table_of_learning_rates(summarize, tmp_path):
    """One of the runs is missing. For two values t is 12.7062."""
    runs = search(Arm.of(norm="dyt"), {0.001: [3.0, 3.5], 0.003: [2.0, 2.25], 0.01: [None, None], 0.03: [4.0, 4.0]})
    runs[-1] = replace(runs[-1], val_loss=None, val_bpb=None)
    row = "| dyt | 3.2500 ± 3.1766 (2) | 2.1250 ± 1.5883 (2) | diverged | 4.0000 (1 of 2)† |"
    for reported, found in (([], "– | – |"), (records({"dyt": [2.0]}, lr=0.003), "0.003 | optimum not found |")):
        summarize([*runs, *reported])
        table = (tmp_path / "table.md").read_text()
        assert f"| arm | 0.001 | 0.003 | 0.01 | 0.03 | reported at | regret |\n|{'---|' * 7}\n{row} {found}\n" in table


def test_the_page_has_sentences_table_figures_and_folded_the_rest(summarize, tmp_path):
    log = [{"step": step, "train_loss": 5.0 - step / 10, "tokens": 8 * step} for step in (10, 20)]
    runs = [replace(run, log=[] if run.search else log) for run in shifted("rmsnorm", "dyt", dyt=0.1)]
    summarize(runs, command="python ablate.py --norms")
    html = (tmp_path / "report.html").read_text("utf-8")
    order = f"<h1>{tmp_path.name}: rmsnorm and dyt</h1>.*Compared .*<h2>Comp.*<td>dyt</td>.*<h2>Learning rates"
    order += ".*<img.*<img.*<details><summary>How to.*ablate.py --norms.*<summary>Settings"
    assert re.search(order, html, re.DOTALL) and html.count("<td>0.01</td><td>0.0000</td>") == 2
    assert markdown("## A\n\n**1** or *2* **3**") == "<h2>A</h2>\n<p><strong>1</strong> or *2* <strong>3</strong></p>"
    assert markdown("`--out <x>`") == "<p><code>--out &lt;x&gt;</code></p>"


def test_two_factors_are_compared_with_the_first_arm_and_within_each_other(summarize, tmp_path):
    losses = ([2.0, 2.1, 2.2], [2.1, 2.2, 2.31], [2.3, 2.41, 2.5], [2.4, 2.5, 2.61])
    arms = [Arm.of(norm=norm, clip=clip) for norm in ("rmsnorm", "dyt") for clip in "01"]
    times = dict(zip(arms, (1.0, 1.05, 1.15, 1.05), strict=True))
    runs = records(dict(zip(arms, losses, strict=True)))
    summary = summarize([replace(run, step_time=times[run.arm]) for run in runs])
    assert summary[0].startswith(f"Compared with rmsnorm clip=0{UNTUNED}rmsnorm clip=1 (+0.103 ± 0.014, p = ")
    assert "; a step of rmsnorm clip=1 and dyt clip=1 takes 1.05 times as long; a step of dyt clip=0" in summary[2]
    near = records({"rmsnorm": [2.0, 3.0, 4.0], "dyt": [2.001, 3.0, 4.002], "derf": [2.0005, 3.0, 4.001]})
    report = json.loads((tmp_path / "report.json").read_text())
    pairs = [(each["arm"], each["baseline"]) for each in report["comparisons"]]
    assert pairs[:3] == [(arm.name, "rmsnorm clip=0") for arm in arms[1:]]
    assert pairs[3:] == [("dyt clip=1", "rmsnorm clip=1"), ("dyt clip=1", "dyt clip=0")]
    assert report["comparisons"][3]["difference"] == pytest.approx(0.3)
    assert summarize(near)[2] == f"{FOUR}0.005, the median of all arms, or call it as good up to 0.01."


CHANGED = {  # arms with another verdict than published: one is unsure, and the others cannot exclude errors of rates
    "recipes-adamw": ["gemma3"],
    "derf": ["derf vector_lr=0.1"],
    "trend": ["dim=64 qwen3_next"],
    "decay": ["rmsnorm:zero_centered=true decay_gains=input"],
}


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in STUDY.glob("*/runs.csv")))
def test_published_runs_give_the_published_differences(folder):
    """With what errors of rates may cost, which has grown since."""
    published = json.loads((STUDY / folder / "report.json").read_text())["comparisons"]
    found = compare(name_arms(find_records([STUDY / folder]))[0])
    assert found.runs[0].parameters and len(found.trends) == {"trend": 5, "equal-time": 2}.get(folder, 0)
    verdicts = []
    for (pair, each), old in zip(found.pairs.items(), published, strict=True):
        row, regrets = each.row, [found.arms[arm].regret for arm in pair]
        assert row["difference"] == pytest.approx(old["difference"], abs=1e-12)
        assert each.slack == sum(filter(None, regrets))
        if not found.search:
            for name in ("half_width", "p", "detectable"):
                assert row[name] == pytest.approx(old[name], rel=1e-9)
        elif None not in regrets:
            assert row["half_width"] >= old["half_width"] - 1e-9
        if row["verdict"].removesuffix(" at this rate") != old["verdict"]:
            verdicts.append(pair[0].name)
    assert verdicts == CHANGED.get(folder, [])


def test_two_published_folders_are_compared_each_with_its_own_baseline(summarize, tmp_path):
    """Whether their text is the same is not known. A report on the report says the same."""
    summary = summarize(find_records([STUDY / "recipes-muon", STUDY / "recipes-adamw"]))
    assert summary[0].startswith("Compared with the first arm of its folder, at learning rates that were not all tuned")
    assert "gemma3 recipes-adamw and gemma4 recipes-adamw are undecided, as the best learning rate was no" in summary[0]
    assert summary[1] == "n = 6 or 8; 0.2M parameters, 0.5M to 1.0M tokens; equal tokens."
    assert summarize(find_records([tmp_path])) == summary
