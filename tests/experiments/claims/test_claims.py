"""Claims: the judge on made-up measurements, derived values by hand, measuring, the command, and what is committed."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

import ablate
import train as training
from data.corpus import Corpus
from experiments.ablation.grid import Grid, resolve_arms
from experiments.ablation.outcome import Arm as Factors
from experiments.claims import measure
from experiments.claims.claim import Arm, Claim, Effect, Protocol, difference, slope
from experiments.claims.command import CLAIMS, read_entries
from experiments.claims.document import plot, write_pages
from experiments.claims.initial import by_depth
from experiments.claims.judge import DERIVED, Entry, judge, slack_of
from experiments.claims.measure import Lab, excerpt, train
from experiments.statistics import Estimate

ROOT = Path(__file__).parents[3]
NOISE = (0.004, -0.006, 0.001, -0.003, 0.004)  # by seed; sums to 0
ABOVE, SMALL = (0.0, math.inf), (-math.inf, 0.02)
OPTIMUM = {"lr": 0.01, "regret": 0.0, "loss": math.nan, "curvature": 0.1, "noise": 0.01}


def claim(*effects: Effect, arms: str = "abcd", **more: Any) -> Claim:
    protocol = Protocol(5, "", {arm: Arm({}, 0.01) for arm in arms})
    return Claim("made-up", effects, {"S": protocol}, **more)


def shifted(regret: float | None = 0.0, spread: float = 1.0, **shifts: float) -> dict[str, Any]:
    """Runs in which each arm's loss is 2 plus its number, with noise that differs between arms."""
    rows = [
        {"arm": arm, "seed": seed, "lr": 0.01, "value": 2 + shift + spread * NOISE[(seed + number) % 5], "best": None}
        for number, (arm, shift) in enumerate(shifts.items())
        for seed in range(5)
    ]
    return {"runs": rows, "optima": {arm: OPTIMUM | {"regret": regret} for arm in shifts}, "initial": 5.0}


def rows(**values: Any) -> list[dict[str, Any]]:
    return [{"arm": arm, "value": value} for arm, group in values.items() for value in group]


def found(effect: Effect, measured: dict[str, Any], *more: Effect) -> tuple[str, float | None]:
    made_up = claim(effect, *more)
    judgment = judge(made_up, made_up.protocols["S"], json.loads(json.dumps(measured)))
    return judgment.verdict, judgment.p


NOT_WORSE = difference("a", "b", reproduced=SMALL, expected=SMALL)
WORSE = difference("a", "b", reproduced=ABOVE, expected=(0.05, math.inf))
EQUAL = difference("c", "d", reproduced=(-0.02, 0.02), expected=(-0.02, 0.02))


@pytest.mark.parametrize(
    "effects, measured, verdict",
    [
        ([NOT_WORSE], shifted(a=0.005, b=0), "reproduced"),
        ([NOT_WORSE], shifted(a=-0.5, b=0), "reproduced"),
        ([NOT_WORSE], shifted(a=0.05, b=0), "not reproduced"),
        ([NOT_WORSE], shifted(a=0.005, b=0, spread=10), "undecided"),
        ([NOT_WORSE], shifted(a=0.005, b=0, regret=0.007), "undecided"),  # 2 · 0.007 more might be the rates'
        ([NOT_WORSE], shifted(a=0.05, b=0, regret=0.02), "undecided"),
        ([NOT_WORSE], shifted(a=0.005, b=0, regret=None), "undecided"),
        ([WORSE], shifted(a=0.1, b=0), "reproduced"),
        ([WORSE], shifted(a=0.02, b=0), "not reproduced"),  # above 0, but not what was expected
        ([WORSE], shifted(a=0.045, b=0), "reproduced"),
        ([WORSE, EQUAL], shifted(a=0.1, b=0, c=0, d=0), "reproduced"),
        ([WORSE, EQUAL], shifted(a=0.1, b=0, c=0.1, d=0), "not reproduced"),
        ([WORSE, EQUAL], shifted(a=0.1, b=0, c=0.018, d=0), "undecided"),
        ([difference("a", "b")], shifted(a=0.1, b=0), "shown"),
    ],
)
def test_judge(effects, measured, verdict):
    assert found(*effects[:1], measured, *effects[1:])[0] == verdict


def test_a_diverged_run_leaves_a_claim_undecided_and_the_other_effects_as_they_are():
    measured = shifted(a=0.1, b=0, c=0.2, d=0)
    measured["runs"][0]["value"] = None
    judgment = judge(made_up := claim(WORSE, difference("c", "d")), made_up.protocols["S"], measured)
    assert (judgment.verdict, [type(each) for _, each in judgment.found]) == ("undecided", [str, Estimate])
    rows = [{"arm": "a", "seed": 0, "value": None, "residual_rms": None}]
    assert DERIVED["growth"](rows, measured) == {"a": math.inf}


def test_errors_of_rates_count_as_much_as_they_move_an_effect():
    """The slope of pre-norm at 200 is 1 nat for a factor of 2; nGPT's rate costs 0.1 and pre-norm's own less."""
    losses = {"pre muon 100": 3.0, "pre muon 200": 2.0, "nGPT muon 100": 2.5}
    runs = [
        row | {"seed": seed, "best": None}
        for row in rows(**{arm: [loss] for arm, loss in losses.items()})
        for seed in (0, 1)
    ]
    measured: dict[str, Any] = {"runs": runs}
    effect = Effect("speed-up", {"muon 100": 1}, value="speed-up")
    protocol = Protocol(2, "", {arm: Arm({}, 0.01) for arm in losses})
    measured["optima"] = {"nGPT muon 100": OPTIMUM | {"regret": 0.1}}
    assert slack_of(effect, protocol, measured) == pytest.approx(0.1 * math.log(2))
    for missing in ({"regret": None}, {"loss": 2.89}):  # or other seeds, at 3, end far from the parabola
        measured["optima"]["pre muon 100"] = OPTIMUM | missing
        assert math.isnan(slack_of(effect, protocol, measured))
    measured["optima"]["pre muon 100"] = OPTIMUM | {"loss": 2.91, "regret": 0.0}
    assert slack_of(effect, protocol, measured) == pytest.approx(0.1 * math.log(2))
    measured["optima"]["nGPT muon 100"] = OPTIMUM | {"regret": 0.6}  # as good as no run of pre-norm
    judgment = judge(Claim("", [effect], {"S": protocol}), protocol, measured)
    assert judgment.found == [(effect, "a run diverged or is out of range")]


def test_p_values_are_those_of_scipy():
    """Two-sided, so that p < 0.05 just if the 95% interval lies where it should."""
    measured = shifted(a=0.006, b=0)
    a, b = (np.array([row["value"] for row in measured["runs"] if row["arm"] == arm]) for arm in "ab")
    assert found(NOT_WORSE, measured)[1] == pytest.approx(stats.ttest_1samp(a - b, 0.02).pvalue)
    assert found(WORSE, measured)[1] == pytest.approx(stats.ttest_1samp(a - b, 0.05).pvalue)
    worse = measured | {"optima": {arm: OPTIMUM | {"regret": 0.001} for arm in "ab"}}
    assert found(NOT_WORSE, worse)[1] == pytest.approx(stats.ttest_1samp(a - b, 0.018).pvalue)


def test_derived_values_by_hand():
    """Sensitivity: 3, and instead of 9 and of infinity 5, over 2: (0 + 1 + 3 + 3) / 4."""
    measured = {"initial": 5.0}
    assert DERIVED["sensitivity"](rows(a=[2.0, 3.0, 9.0, None]), measured) == {"a": 1.75}
    assert DERIVED["value"](rows(a=[2.5, 2.0, None]), measured) == {"a": 2.0}
    depth = np.arange(1.0, 25)
    streams = {"power": np.sqrt(depth), "exponential": np.exp(0.1 * depth)}
    noise = 1 + 0.01 * np.cos(9 * depth)
    grown = [{"arm": arm, "residual_rms": [1.0, *(stream * noise)]} for arm, stream in streams.items()]
    fits = DERIVED["growth"](grown, measured)
    assert fits["power"] < -3 and fits["exponential"] > 3
    losses = {"pre muon 100": 3.0, "pre muon 200": 2.0, "pre muon 400": 1.5}
    losses |= {"nGPT muon 100": 2.5, "nGPT muon 200": 3.0, "nGPT muon 400": 1.25}  # the last is beyond
    speed = DERIVED["speed-up"](rows(**{arm: [loss] for arm, loss in losses.items()}), measured)
    expected = {"muon 100": 0.5, "muon 200": -1, "muon 400": math.inf}  # in powers of 2
    assert speed == pytest.approx({arm: power * math.log(2) for arm, power in expected.items()})
    terms = slope("", {0.0: {"a": 1}, 1.0: {"b": 1, "c": -1}, 2.0: {"d": 1}}).terms
    assert terms == {"a": -0.5, "b": 0, "c": 0, "d": 0.5}


@pytest.mark.parametrize("name", CLAIMS)
def test_protocols_are_complete(name):
    """Every arm can be trained, and every effect has its arms at some scale, the judged ones at the first."""
    assert len(CLAIMS) == 12
    complete = set()
    for number, protocol in enumerate(CLAIMS[name].protocols.values()):
        arms = [Factors.of(**arm.factors) for arm in protocol.arms.values()]
        if arms:
            flags = [*protocol.flags.split(), "--device", "cpu", "--dtype", "float32", "--no-compile"]
            settings = resolve_arms(arms, flags)
            assert len(settings) == len(set(arms)) and len(set(map(repr, settings.values()))) == len(set(arms))
        for arm in protocol.arms.values():
            assert (arm.lr is not None) + bool(arm.like) + bool(arm.lrs) == 1
            assert not arm.like or arm.like in protocol.arms
        for effect in CLAIMS[name].effects:
            if effect.terms.keys() <= protocol.arms.keys() or effect.value == "speed-up" or not arms:
                complete.add(effect.name)
            assert not (effect.judged and number == 0) or effect.name in complete
    assert complete == {effect.name for effect in CLAIMS[name].effects}


# --- measuring -------------------------------------------------------------------------------------------------------


def test_models_at_initialization():
    """Shallow, but the exponents of depth are already near those that the papers derive."""
    rows = by_depth(Protocol(1, depths=(4, 16)), Lab(Path()))["runs"]
    found = {row["arm"]: row["value"] for row in rows}
    assert abs(found["post 16"] - found["post 4"]) < 0.15 * math.log(4)
    assert -0.9 < (found["pre 16"] - found["pre 4"]) / math.log(4) < -0.3
    assert abs(found["deepnorm 16, SGD"] - found["deepnorm 4, SGD"]) < 0.15 * math.log(4)
    assert found["post 16, SGD"] > found["post 4, SGD"] + 1


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Runs train in this process, and the default corpus is a small text. `lab.started` has the cells."""
    started: list[str] = []

    def start(grid: Grid, cell: Any, device: str) -> SimpleNamespace:
        started.append(cell.name)
        training.main(grid.command(cell, device)[2:])
        return SimpleNamespace(returncode=0, poll=lambda: 0, terminate=lambda: None, wait=lambda: 0)

    monkeypatch.setattr(Grid, "start", start)
    monkeypatch.setattr("experiments.ablation.grid.POLL_SECONDS", 0.0)
    (tmp_path / "texts").mkdir()
    (tmp_path / "runs").mkdir()
    for number in range(300):
        (tmp_path / f"texts/{number}.txt").write_text(f"the cat {number} sees a dog. " * 3)
    monkeypatch.setattr(measure, "Corpus", lambda names, cache: Corpus([str(tmp_path / "texts")], cache))
    lab = Lab(tmp_path / "runs", cache_dir=str(tmp_path / "cache"))
    return SimpleNamespace(lab=lab, started=started, text=str(tmp_path / "texts"))


TOY = "--tokenizer bytes --dim 16 --layers 2 --context 16 --batch-size 4 --steps 2 --no-compile --dtype float32"


def test_a_measurement_continues_and_shares_runs_with_others(lab, undrawn):
    tuned = Arm({"norm": "rmsnorm"}, 0.01, data=lab.text)
    like = Arm({"norm": "layernorm"}, like="a", data=lab.text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "WIDEN", 0)
        measured = train(Protocol(1, TOY, {"a": tuned, "b": like}), lab.lab)
    assert len(measured["search"]) == 5 and len(lab.started) == 7
    assert [row["lr"] for row in measured["runs"]] == 2 * [measured["optima"]["a"]["lr"]]
    norms = {"a": "rmsnorm", "b": "dyt"}
    arms = {name: Arm({"norm": norm}, lrs=(0.01, 0.02), data=lab.text) for name, norm in norms.items()}
    protocol = Protocol(2, TOY, arms)
    del lab.started[:]
    first = train(protocol, lab.lab)
    assert [(row["arm"], row["lr"], row["seed"]) for row in first["runs"]] == [
        (arm, lr, seed) for seed in (0, 1) for arm in "ab" for lr in (0.01, 0.02)
    ]
    assert all(len(row["residual_rms"]) == 3 and row["train_loss"] and "commit" in row for row in first["runs"])
    del lab.started[:]
    assert train(protocol, lab.lab) == first and not lab.started
    one = train(replace(protocol, arms={"only": arms["b"]}), lab.lab)
    assert [row["value"] for row in one["runs"]] == [row["value"] for row in first["runs"] if row["arm"] == "b"]
    assert not lab.started
    longer = replace(protocol, flags=TOY.replace("--steps 2", "--steps 3"), seeds=1)
    assert len(train(longer, lab.lab)["runs"]) == len(lab.started) == 4


def test_an_excerpt_has_less_training_text_and_the_same_validation_text(lab):
    cache, flags = Path(lab.lab.cache_dir), excerpt(3000, lab.lab)
    assert flags[::2] == ["--data", "--val-data"]
    whole, part = Corpus([lab.text], cache), Corpus([flags[1]], cache, [flags[3]])
    assert 2900 < part.sizes["train"] < 3100 < whole.sizes["train"]  # with the ends of documents
    texts = [["".join(chunks) for _, chunks in corpus.documents("val")] for corpus in (whole, part)]
    assert texts[0] == texts[1]


# --- the command and what is committed -------------------------------------------------------------------------------


@pytest.mark.pictures
def test_a_claim_writes_its_results_and_both_pages_and_no_name_writes_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ablate.main(["claim", "prenorm-equivalence"])
    assert "prenorm-equivalence: exact" in capsys.readouterr().out
    (content,) = json.loads(Path("results/claims/prenorm-equivalence.json").read_text()).values()
    found = {(row["arm"], row["value"] < 1e-13, row["value"] > 0.01) for row in content["measured"]["runs"]}
    assert found == {("centered", True, False), ("not centered", False, True)}
    pages = [Path(name).read_text("utf-8") for name in ("CLAIMS.md", "claims.html")]
    assert all("We formally establish the equivalence" in text for text in pages) and "<svg" not in pages[0]
    Path("CLAIMS.md").unlink()
    ablate.main(["claim"])
    assert "lns: not run" in capsys.readouterr().out
    assert [Path(name).read_text("utf-8") for name in ("CLAIMS.md", "claims.html")] == pages
    assert Path("results/claims/prenorm-equivalence.png").read_bytes().startswith(b"\x89PNG")
    exact = CLAIMS["prenorm-equivalence"]
    fewer = replace(exact, protocols={"initialization": replace(exact.protocols["initialization"], seeds=2)})
    other = replace(exact, effects=[replace(each, reproduced=SMALL) for each in exact.effects])
    for changed in (fewer, other):
        with pytest.raises(ValueError, match="was measured with other rules"):
            read_entries({"x": changed}, Path("results/claims"))


def test_p_values_of_the_page_are_corrected_for_all_trained_claims(tmp_path):
    made_up = {name: replace(claim(WORSE), name=name) for name in ("one", "two", "three")}
    for name in made_up:
        environment = dict.fromkeys(("device", "instruction_set"), "x") | {"hours": 1, "commits": []}
        environment["protocol"] = made_up[name].hash("S")
        content = {"S": {"environment": environment, "measured": shifted(a=0.1, b=0)}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    found = read_entries(made_up, tmp_path)
    alone = next(iter(found[0].judgments.values())).p
    assert [entry.p for entry in found] == [3 * alone] * 3
    assert (replace(found[0], p=0.06).verdict, found[0].verdict) == ("undecided", "reproduced at S")


def test_a_scale_without_a_result_has_its_place_in_the_figure():
    made_up, unknown = claim(WORSE), "no best learning rate was found"
    results = {"S": shifted(a=0.1, b=0, regret=None), "M": shifted(a=0.1, b=0)}
    judgments = {scale: judge(made_up, made_up.protocols["S"], measured) for scale, measured in results.items()}
    content = {scale: {"measured": measured} for scale, measured in results.items()}
    (axes,) = plot(Entry(made_up, content, judgments)).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["S", "M"]
    assert [(text.get_text(), text.get_position()[0]) for text in axes.texts] == [(unknown, 0)]
    assert list(axes.containers[0][0].get_xdata()) == [1]


def test_committed_results_have_their_verdicts_and_claims_md_says_so(tmp_path, undrawn):
    entries: list[Entry] = read_entries(CLAIMS, ROOT / "results" / "claims")
    (tmp_path / "results" / "claims").mkdir(parents=True)
    write_pages(entries, tmp_path)
    assert (tmp_path / "CLAIMS.md").read_text("utf-8") == (ROOT / "CLAIMS.md").read_text("utf-8")
    assert {entry.claim.name for entry in entries} == {path.stem for path in (ROOT / "results/claims").glob("*.png")}
    sections = (ROOT / "experiments/claims/page.md").read_text("utf-8")
    assert [name for name in CLAIMS if f"<!-- {name} -->" not in sections] == []
