"""Studies: the verdict on made-up measurements, values by hand, measuring, the command, and what is committed."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import ablate
from data.corpus import RULES, Corpus
from experiments.ablation.grid import resolve_arms
from experiments.ablation.outcome import Arm
from experiments.ablation.rates import Optimum
from experiments.studies import command
from experiments.studies.command import STUDIES, excerpt, train_arms
from experiments.studies.page import format_effect, judge, plot, read_entries, slack_of, write_page
from experiments.studies.study import ABOVE, Effect, Protocol, Runs, Study, difference, lowest, slope
from experiments.studies.trained import growth, sensitivity, speed_up
from experiments.studies.untrained import gradients_and_updates
from runtime.flags import read_train

ROOT = Path(__file__).parents[3]
NOISE = (0.004, -0.006, 0.001, -0.003, 0.004)  # by seed; sums to 0
OPTIMUM = {"lr": 0.01, "regret": 0.0, "loss": math.nan, "curvature": 0.1, "noise": 0.01}


def study(*effects: Effect) -> Study:
    return Study("made-up", effects, {"S": Protocol(5, "", {arm: Runs({}, 0.01) for arm in "abcd"})})


def shifted(regret: float | None = 0.0, spread: float = 1.0, **shifts: float) -> dict[str, Any]:
    """Runs in which each arm's loss is 2 plus its number, with noise that differs between arms."""
    rows = [
        {"arm": arm, "seed": seed, "lr": 0.01, "value": 2 + shift + spread * NOISE[(seed + number) % 5], "best": None}
        for number, (arm, shift) in enumerate(shifts.items())
        for seed in range(5)
    ]
    return {"runs": rows, "optima": {arm: OPTIMUM | {"regret": regret} for arm in shifts}, "initial": 5.0}


def rows(**values: Any) -> list[dict[str, Any]]:
    return [{"arm": arm, "value": value, "best": None} for arm, group in values.items() for value in group]


def verdict(measured: dict[str, Any], *effects: Effect) -> tuple[str, float]:
    made_up = study(*effects)
    return judge(made_up, made_up.protocols["S"], json.loads(json.dumps(measured)))[:2]


NOT_WORSE = difference("a", "b", reproduced=(-math.inf, 0.02))
WORSE = difference("a", "b", reproduced=ABOVE, expected=(0.05, math.inf))
EQUAL = difference("c", "d", reproduced=(-0.02, 0.02))


@pytest.mark.parametrize(
    "effects, measured, expected",
    [
        ([NOT_WORSE], shifted(a=0.005, b=0), "reproduced"),
        ([NOT_WORSE], shifted(a=0.05, b=0), "not reproduced"),
        ([NOT_WORSE], shifted(a=0.005, b=0, spread=10), "undecided"),
        ([NOT_WORSE], shifted(a=0.005, b=0, regret=0.007), "undecided"),  # 2 · 0.007 more might be the rates'
        ([NOT_WORSE], shifted(a=0.05, b=0, regret=0.02), "undecided"),
        ([NOT_WORSE], shifted(a=0.005, b=0, regret=None), "undecided"),
        ([WORSE], shifted(a=0.02, b=0), "not reproduced"),  # above 0, but not what was expected
        ([WORSE], shifted(a=0.045, b=0), "reproduced"),
        ([WORSE, EQUAL], shifted(a=0.1, b=0, c=0, d=0), "reproduced"),
        ([WORSE, EQUAL], shifted(a=0.1, b=0, c=0.1, d=0), "not reproduced"),
        ([WORSE, EQUAL], shifted(a=0.1, b=0, c=0.018, d=0), "undecided"),
        ([difference("a", "b")], shifted(a=0.1, b=0), "shown"),
    ],
)
def test_verdict(effects, measured, expected):
    assert verdict(measured, *effects)[0] == expected


def test_p_values_are_those_of_scipy():
    """Two-sided, so that p < 0.05 just if the 95% interval lies where it should.

    Of two judged effects, one being outside is enough: its p counts twice. Both being inside takes the larger p.
    """
    measured = shifted(a=0.006, b=0, c=0.01, d=0)
    a, b, c, d = (np.array([row["value"] for row in measured["runs"] if row["arm"] == arm]) for arm in "abcd")
    inside, outside = stats.ttest_1samp(a - b, 0.02).pvalue, stats.ttest_1samp(a - b, 0.05).pvalue
    other = stats.ttest_1samp(c - d, 0.02).pvalue
    assert verdict(measured, NOT_WORSE) == ("reproduced", pytest.approx(inside))
    assert verdict(measured, WORSE) == ("not reproduced", pytest.approx(outside))
    assert verdict(measured, WORSE, EQUAL) == ("not reproduced", pytest.approx(2 * outside))
    assert verdict(measured, NOT_WORSE, EQUAL)[1] == pytest.approx(max(inside, other))
    worse = measured | {"optima": {arm: OPTIMUM | {"regret": 0.001} for arm in "ab"}}
    assert verdict(worse, NOT_WORSE)[1] == pytest.approx(stats.ttest_1samp(a - b, 0.018).pvalue)


def test_a_diverged_run_leaves_a_study_undecided_and_the_other_effects_as_they_are():
    measured = shifted(a=0.1, b=0, c=0.2, d=0)
    measured["runs"][0]["value"] = None
    made_up = study(WORSE, difference("c", "d"))
    found, p, effects = judge(made_up, made_up.protocols["S"], measured)
    assert (found, p) == ("undecided", 1.0)
    assert [format_effect(*each) for each in effects] == ["a run diverged or is out of range", "+0.2 ± 0.00908 (n = 5)"]


def test_errors_of_rates_count_as_much_as_they_move_an_effect():
    """The slope of pre-norm at 200 is 1 nat for a factor of 2; nGPT's rate costs 0.1 and pre-norm's own less."""
    losses = {"pre muon 100": 3.0, "pre muon 200": 2.0, "nGPT muon 100": 2.5}
    runs = [row | {"seed": seed} for row in rows(**{arm: [loss] for arm, loss in losses.items()}) for seed in (0, 1)]
    measured: dict[str, Any] = {"runs": runs, "optima": {"nGPT muon 100": OPTIMUM | {"regret": 0.1}}}
    effect = Effect("speed-up", {"muon 100": 1}, value="speed-up")
    protocol = Protocol(2, "", {arm: Runs({}, 0.01) for arm in losses})
    nothing = Study("", [effect], {"S": protocol}, values={"speed-up": speed_up})
    slack = partial(slack_of, nothing, effect, protocol)
    assert slack(measured) == pytest.approx(0.1 * math.log(2))
    for missing in ({"regret": None}, {"loss": 2.89}):  # or other seeds, at 3, end far from the parabola
        measured["optima"]["pre muon 100"] = OPTIMUM | missing
        assert math.isnan(slack(measured))
        assert format_effect(*judge(nothing, protocol, measured)[2][0]) == "no best learning rate was found"
    measured["optima"]["pre muon 100"] = OPTIMUM | {"loss": 2.91, "regret": 0.0}
    assert slack(measured) == pytest.approx(0.1 * math.log(2))
    measured["optima"]["nGPT muon 100"] = OPTIMUM | {"regret": 0.6}  # as good as no run of pre-norm
    assert math.isinf(slack(measured))


def test_values_by_hand():
    """Sensitivity: 3, and instead of 9 and of infinity 5, over 2: (0 + 1 + 3 + 3) / 4."""
    assert sensitivity(rows(a=[2.0, 3.0, 9.0, None]), {"initial": 5.0}) == {"a": 1.75}
    assert lowest(rows(a=[2.5, 2.0, None]), {}) == {"a": 2.0}
    depth = np.arange(1.0, 25)
    streams = {"power": np.sqrt(depth), "exponential": np.exp(0.1 * depth)}
    noise = 1 + 0.01 * np.cos(9 * depth)
    grown = [{"arm": arm, "residual_rms": [1.0, *(stream * noise)]} for arm, stream in streams.items()]
    fits = growth([*grown, {"arm": "diverged", "residual_rms": None}], {})
    assert fits["power"] < -3 and fits["exponential"] > 3 and fits["diverged"] == math.inf
    losses = {"pre muon 100": 3.0, "pre muon 200": 2.0, "pre muon 400": 1.5}
    losses |= {"nGPT muon 100": 2.5, "nGPT muon 200": 3.0, "nGPT muon 400": 1.25}  # the last is beyond
    speed = speed_up(rows(**{arm: [loss] for arm, loss in losses.items()}), {})
    expected = {"muon 100": 0.5, "muon 200": -1, "muon 400": math.inf}  # in powers of 2
    assert speed == pytest.approx({arm: power * math.log(2) for arm, power in expected.items()})
    terms = slope("", {1: {"a": 1}, 2: {"b": 1, "c": -1}, 4: {"d": 1}}).terms  # per factor of e, not of 2
    assert {arm: weight * math.log(2) for arm, weight in terms.items()} == {"a": -0.5, "b": 0, "c": 0, "d": 0.5}


@pytest.mark.parametrize("name", STUDIES)
def test_protocols_are_complete(name):
    """Every arm can be trained, each differs from the others, and each effect has its arms, the judged ones first."""
    complete, judged = set(), {effect.name for effect in STUDIES[name].effects if effect.reproduced}
    for protocol in STUDIES[name].scales.values():
        arms = {Arm.of(**runs.factors) for runs in protocol.arms.values()}
        here = {"device": "cpu", "dtype": "float32", "compile": False}
        settings = resolve_arms(arms, read_train(protocol.flags.split()) | here) if arms else {}
        assert len(set(map(repr, settings.values()))) == len(settings) == len(arms)
        for effect in STUDIES[name].effects:
            if effect.terms.keys() <= protocol.arms.keys() or effect.value == "speed-up" or not arms:
                complete.add(effect.name)
        assert judged <= complete
    assert complete == {effect.name for effect in STUDIES[name].effects}


# --- measuring -------------------------------------------------------------------------------------------------------


def test_models_at_initialization():
    """Shallow, but the exponents of depth are already near those that the papers derive."""
    found = gradients_and_updates(Protocol(1, depths=(4, 16)), 0)
    assert abs(found["post 16"] - found["post 4"]) < 0.15 * math.log(4)
    assert -0.9 < (found["pre 16"] - found["pre 4"]) / math.log(4) < -0.3
    assert abs(found["deepnorm 16, SGD"] - found["deepnorm 4, SGD"]) < 0.15 * math.log(4)
    assert found["post 16, SGD"] > found["post 4, SGD"] + 1


@pytest.fixture
def texts(tmp_path, monkeypatch) -> str:
    """A folder that stands for the default corpus."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number}.txt").write_text(f"the cat {number} sees a dog. " * 3)
    monkeypatch.setattr(command, "Corpus", lambda names, cache: Corpus([str(folder)], cache))
    return str(folder)


TOY = "--tokenizer bytes --dim 16 --layers 2 --context 16 --batch-size 4 --steps 2 --no-compile --dtype float32"


def test_a_measurement_continues_and_shares_runs_with_others(texts, in_process, undrawn):
    asked = {"jobs": 1, "devices": ("cpu",), "cache_dir": ".cache"}
    tuned, like = Runs({"norm": "rmsnorm"}, 0.01, data=texts), Runs({"norm": "layernorm"}, like="a", data=texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "WIDEN", 0)
        patch.setattr("experiments.ablation.grid.find_optimum", lambda losses: Optimum(0.01, 0.5))  # in bits per byte
        measured = train_arms(Protocol(1, TOY, {"a": tuned, "b": like}), range(1), asked)
    assert len(measured["search"]) == 5 and len(in_process) == 7
    assert [row["lr"] for row in measured["runs"]] == [0.01, 0.01]
    assert measured["optima"]["a"]["regret"] == pytest.approx(0.5 * math.log(2), rel=0.02)  # in nats per byte
    arms = {name: Runs({"norm": norm}, lrs=(0.01, 0.02), data=texts) for name, norm in (("a", "rmsnorm"), ("b", "dyt"))}
    protocol = Protocol(2, TOY, arms)
    del in_process[:]
    first = train_arms(protocol, range(2), asked)
    assert [(row["arm"], row["lr"], row["seed"]) for row in first["runs"]] == [
        (arm, lr, seed) for seed in (0, 1) for arm in "ab" for lr in (0.01, 0.02)
    ]
    assert all(len(row["residual_rms"]) == 3 and row["seconds"] and "commit" in row for row in first["runs"])
    del in_process[:]
    assert train_arms(protocol, range(2), asked) == first and not in_process
    one = train_arms(replace(protocol, arms={"only": arms["b"]}), range(2), asked)
    assert [row["value"] for row in one["runs"]] == [row["value"] for row in first["runs"] if row["arm"] == "b"]
    assert not in_process
    longer = replace(protocol, flags=TOY.replace("--steps 2", "--steps 3"))
    assert len(train_arms(longer, range(1), asked)["runs"]) == len(in_process) == 4


def test_an_excerpt_has_less_training_text_and_the_same_validation_text(texts, tmp_path):
    command.RUNS.mkdir(parents=True)
    flags = excerpt(3000, ".cache")
    assert flags[::2] == ["--data", "--val-data"]
    whole, part = Corpus([texts], tmp_path), Corpus([flags[1]], tmp_path, [flags[3]])
    assert 2900 < part.sizes["train"] < 3100 < whole.sizes["train"]  # with the ends of documents
    val = [["".join(chunks) for part, _, chunks in corpus.parts() if part == "val"] for corpus in (whole, part)]
    assert val[0] == val[1]


# --- the command and what is committed -------------------------------------------------------------------------------


@pytest.mark.pictures
def test_a_claim_writes_its_results_and_the_page_and_no_name_writes_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ablate.main(["claim", "prenorm-equivalence"])
    assert "prenorm-equivalence: exact" in capsys.readouterr().out
    page, *results = [Path("CLAIMS.md"), *sorted(Path("results/claims").iterdir())]
    (content,) = json.loads(results[0].read_text()).values()
    found = {(row["arm"], row["value"] < 1e-13, row["value"] > 0.01) for row in content["measured"]["runs"]}
    assert found == {("centered", True, False), ("not centered", False, True)}
    before = [file.read_bytes() for file in (page, *results)]
    assert "We formally establish the equivalence" in before[0].decode() and before[2].startswith(b"\x89PNG")
    page.unlink()
    ablate.main(["claim"])
    assert "lns: not run" in capsys.readouterr().out
    assert [file.read_bytes() for file in (page, *results)] == before
    exact = STUDIES["prenorm-equivalence"]
    fewer = replace(exact, protocols={"initialization": replace(exact.protocols["initialization"], seeds=2)})
    other = replace(exact, effects=[replace(each, reproduced=(0.0, 0.02)) for each in exact.effects])
    for changed in (fewer, other):
        with pytest.raises(ValueError, match="initialization has another protocol"):
            read_entries([changed], Path("results/claims"))


@pytest.mark.usefixtures("undrawn")
def test_under_other_rules_of_the_corpus_a_new_result_stands_beside_the_old(texts, in_process, tmp_path, monkeypatch):
    """The hash of the new one names the rules. That of b246c92 does not, and the verdict stays."""
    arms = {"a": Runs({}, lrs=(0.01,), data=texts)}
    made_up = Study("lns", [Effect("loss", {"a": 1}, ABOVE)], {"S": Protocol(2, TOY, arms)})
    monkeypatch.setattr(command, "STUDIES", {"lns": made_up})
    environment = json.loads((ROOT / "results/claims/lns.json").read_text())["12 blocks"]["environment"]
    old = {"environment": environment | {"protocol": made_up.hash("S")}, "measured": shifted(a=0)}
    file = tmp_path / "results/claims/lns.json"
    file.parent.mkdir(parents=True)
    file.write_text(before := json.dumps({"S": old}))
    for rules in (RULES, RULES, "split 3"):
        for module in ("data.corpus", "experiments.studies.command"):
            monkeypatch.setattr(f"{module}.RULES", rules)
        ablate.main(["claim", "lns"])
    content = json.loads(file.read_text())
    assert list(content) == ["S", f"S, {RULES}", "S, split 3"] and len(in_process) == 4
    assert file.read_text().startswith(before[:-1])
    hashes = [result["environment"]["protocol"] for result in content.values()]
    assert hashes == [made_up.hash("S", rules) for rules in ("", RULES, "split 3")] and len(set(hashes)) == 3
    page = (tmp_path / "CLAIMS.md").read_text("utf-8")
    assert "**reproduced at S**" in page and re.search(r"^\| loss \| S, split 3 \| \+5", page, re.M)


def test_committed_results_have_their_verdicts_and_claims_md_says_so(tmp_path, undrawn):
    entries = read_entries(STUDIES.values(), ROOT / "results/claims")
    (tmp_path / "results/claims").mkdir(parents=True)
    write_page(entries, tmp_path)
    assert (tmp_path / "CLAIMS.md").read_text("utf-8") == (ROOT / "CLAIMS.md").read_text("utf-8")
    lns, derf = (next(each for each in entries if each.study.name == name) for name in ("lns", "derf-muon"))
    assert lns.p == pytest.approx(8 * lns.judged["12 blocks"].p)  # the smallest of eight trained studies
    assert (replace(lns, p=0.06).verdict, lns.verdict) == ("undecided", "not reproduced at 12 blocks")
    (axes,) = plot(derf).axes  # the rest was not tuned
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Derf − RMSNorm, S", "Derf − RMSNorm, M"]
    named = {path.stem for path in (ROOT / "results/claims").glob("*.png")}
    assert {entry.study.name for entry in entries} == named == STUDIES.keys()
