"""Claims: the judge on made-up measurements, the grid without training, the command, and what is committed."""

import json
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import ablate
from experiments.ablation.grid import Cell, Grid
from experiments.ablation.outcome import Outcome
from experiments.claims.claim import OPEN, Claim, Comparison, Scale
from experiments.claims.command import CLAIMS
from experiments.claims.document import to_markdown
from experiments.claims.judge import judge, log_lr_range
from experiments.claims.measure import Lab, Protocol, train_grid, unigram_loss
from experiments.claims.plot import plot
from experiments.claims.quick import measure_outliers
from experiments.claims.results import commit, read_entries, read_entry

ROOT = Path(__file__).parents[3]
NOISE = (0.004, -0.006, 0.001, -0.003, 0.004)  # by seed; sums to 0
BASE = (2.0, 2.1, 1.9, 2.05, 1.95)  # by seed, shared by all arms
ARMS = {name: [{"norm": name}] for name in "abcd"}
PROTOCOL = Protocol(1, ARMS)
A_MINUS_B = {"a": 1, "b": -1}


def claim(*comparisons: Comparison, **more: Any) -> Claim:
    return Claim("made-up", "a is better", "source", "published", "rule", {"cpu": PROTOCOL}, comparisons, **more)


def run(arm: str, seed: int, loss: float | None, lr: float = 0.01) -> dict[str, Any]:
    """A row of a results file. Without a loss, the run diverged."""
    return {"arm": {"norm": arm}, "lr": lr, "seed": seed, "diverged": loss is None, "val_loss": loss}


def shifted(spread: float = 1.0, **shifts: float) -> dict[str, Any]:
    """Runs in which each arm's loss is above the base by its number, with noise that differs between arms."""
    rows = [
        run(arm, seed, BASE[seed] + shift + spread * NOISE[(seed + number) % 5])
        for number, (arm, shift) in enumerate(shifts.items())
        for seed in range(5)
    ]
    return {"runs": rows, "unigram": 3.0}


def failures(a: int, b: int) -> dict[str, Any]:
    """So many of 5 runs fail: every other one diverges, the others learn only the frequencies."""
    rows = [
        run(arm, seed, 2.0 if seed >= failed else None if seed % 2 else 2.95)
        for arm, failed in (("a", a), ("b", b))
        for seed in range(5)
    ]
    return {"runs": rows, "unigram": 3.0}


def control(failed: int) -> dict[str, Any]:
    """All runs of a fail, none of b, and so many of a control."""
    rows = [row | {"arm": ARMS["c"][0]} for row in failures(failed, 0)["runs"] if row["arm"] == ARMS["a"][0]]
    return {"runs": [*failures(5, 0)["runs"], *rows], "unigram": 3.0}


def ranges(*largest: float) -> dict[str, Any]:
    """Stable up to these rates by seed with arm a, and up to 1e-2 with arm b."""
    rows = [
        run(arm, seed, 2.0 if lr <= limit else None if lr > 0.05 else 2.5, lr)
        for seed, with_a in enumerate(largest)
        for arm, limit in (("a", with_a), ("b", 1e-2))
        for lr in (1e-3, 1e-2, 3e-2, 1e-1)
    ]
    return {"runs": rows, "unigram": 3.0}


WITHIN = claim(Comparison(A_MINUS_B, "within", 0.02))
BELOW = claim(Comparison(A_MINUS_B, "below", 0.02))
ABOVE = claim(Comparison(A_MINUS_B, "above", negligible=0.02))
BOTH = claim(Comparison(A_MINUS_B, "above"), Comparison({"a": 1, "b": -1, "c": -1, "d": 1}, "below"))
FAILED = claim(Comparison(A_MINUS_B, "above", value="failed"))
CONTROLLED = replace(FAILED, must_learn=("c",))
RATIO = claim(Comparison(A_MINUS_B, "above", value="log_lr_range", negligible=math.log(1.5)))


@pytest.mark.parametrize(
    "made_up, measured, verdict",
    [
        (WITHIN, shifted(a=0.005, b=0), "confirmed"),
        (WITHIN, shifted(a=-0.05, b=0), "refuted"),
        (WITHIN, shifted(a=0.005, b=0, spread=10), OPEN),
        (BELOW, shifted(a=0.005, b=0), "confirmed"),  # worse, by less than the bound
        (BELOW, shifted(a=0.05, b=0), "refuted"),
        (ABOVE, shifted(a=0.1, b=0), "confirmed"),
        (ABOVE, shifted(a=0.001, b=0), "refuted"),  # shown to be negligible
        (ABOVE, shifted(a=0.02, b=0, spread=10), OPEN),
        (BOTH, shifted(a=0.1, b=0, c=0, d=0), "refuted"),  # the interaction has the other sign
        (BOTH, shifted(a=0.1, b=0, c=0.1, d=0), OPEN),
        (FAILED, failures(5, 0), "confirmed"),
        (FAILED, failures(0, 5), "refuted"),
        (CONTROLLED, control(2), "confirmed"),
        (RATIO, ranges(3e-2, 1e-1, 1e-1, 3e-2, 1e-1), "confirmed"),
        (RATIO, ranges(1e-2, 1e-2, 1e-2, 1e-2, 1e-2), "refuted"),  # equal
    ],
)
def test_judge(made_up, measured, verdict):
    judgment = judge(made_up, PROTOCOL, json.loads(json.dumps(measured)))
    assert judgment.verdict == verdict, judgment
    assert judgment.ours != "–" and judgment.p is not None
    assert (judgment.p < 0.05) == (verdict != OPEN)
    assert len(plot(made_up, PROTOCOL, measured).axes[0].texts) == len(made_up.comparisons)


def test_diverged_runs_and_a_control_that_learns_nothing_leave_a_claim_open():
    diverged = shifted(a=0.1, b=0)
    diverged["runs"][0] |= {"diverged": True, "val_loss": None}
    plot(ABOVE, PROTOCOL, diverged)
    judgments = judge(ABOVE, PROTOCOL, diverged), judge(CONTROLLED, PROTOCOL, control(3))
    assert [each.verdict for each in judgments] == [OPEN, OPEN]
    assert [each.reason for each in judgments] == ["1 of the reported runs diverged", "most runs of c learn nothing"]


def test_p_values_are_those_of_scipy():
    measured = shifted(a=0.03, b=0, c=0.02, d=0)
    a, b, c, d = (np.array([row["val_loss"] for row in measured["runs"] if row["arm"] == ARMS[arm][0]]) for arm in ARMS)

    def p(*comparisons: Comparison) -> float | None:
        return judge(claim(*comparisons), PROTOCOL, measured).p

    assert p(Comparison(A_MINUS_B, "below", 0.025)) == pytest.approx(stats.ttest_1samp(a - b, 0.025).pvalue)
    tost = stats.ttest_1samp(a - b, 0.04, alternative="less").pvalue
    assert p(Comparison(A_MINUS_B, "within", 0.04)) == pytest.approx(tost)
    small, large = (stats.ttest_1samp(values, 0).pvalue for values in (a - b, a - b - c + d))
    first, second = BOTH.comparisons
    assert p(first, replace(second, expected="above")) == pytest.approx(large)  # open; Holm: above 2 · small
    assert p(replace(first, expected="below"), second) == pytest.approx(2 * small)  # refuted by the first
    counts = judge(FAILED, PROTOCOL, failures(5, 1))
    assert counts.p == pytest.approx(stats.fisher_exact([[5, 0], [1, 4]]).pvalue) and "5 and 1 of 5" in counts.ours
    shown = judge(claim(first, Comparison({"c": 1, "d": -1}, "anything")), PROTOCOL, measured)  # not corrected for it
    assert (shown.verdict, shown.p) == ("confirmed", pytest.approx(small)) and "c − d: " in shown.ours


def test_derived_values_by_hand():
    rows = [run("a", 0, loss, lr) for lr, loss in ((0.001, 2.5), (0.01, 2.05), (0.1, 2.0), (1.0, None))]
    assert log_lr_range(rows, {}) == pytest.approx(math.log(10))
    assert log_lr_range([run("a", 0, None)], {}) == 0
    assert unigram_loss(np.array([5, 5, 7, 9])) == pytest.approx(1.5 * math.log(2))


TOY = "--tokenizer bytes --dim 16 --layers 1 --context 16 --batch-size 4 --steps 4"


@pytest.mark.parametrize("select_lr", [True, False])
def test_a_grid_reports_its_seeds_at_the_best_rate_and_variant(select_lr, tmp_path, monkeypatch):
    def losses(grid: Grid, wanted: list[Cell], on_end: Any = None) -> dict[Cell, Outcome]:
        """Nothing is trained. Lower rates are better, and alpha 0.5 has a lower loss but diverges."""
        outcomes = {}
        for cell in wanted:
            diverged = "0.5" in cell.arm["norm"]
            loss = 2 + cell.lr - diverged
            outcomes[cell] = Outcome(cell.arm, cell.lr, cell.seed, diverged, 4, loss, loss, loss, None, None, [])
        return outcomes

    monkeypatch.setattr(Grid, "run", losses)
    text = tmp_path / "text.txt"
    text.write_text("the cat sees a dog. " * 200)
    arms = {"rmsnorm": [{"norm": "rmsnorm"}], "dyt": [{"norm": "dyt:alpha=0.5"}, {"norm": "dyt:alpha=2.0"}]}
    toy = Protocol(1, arms, f"{TOY} --data {text}", (0.001, 0.003), select_lr, seeds=(8, 9))
    measured = json.loads(json.dumps(train_grid(toy, Lab(tmp_path / "runs", cache_dir=str(tmp_path)))))
    reported = {(row["arm"]["norm"], row["lr"], row["seed"]) for row in measured["runs"]}
    if select_lr:  # two rates beyond the grid were tried
        assert reported == {(norm, 0.000111, seed) for norm in ("rmsnorm", "dyt:alpha=2.0") for seed in (8, 9)}
        assert not {8, 9} & {row["seed"] for row in measured["selection"]}
    else:
        norms = ("rmsnorm", "dyt:alpha=0.5", "dyt:alpha=2.0")
        assert reported == {(norm, lr, seed) for norm in norms for lr in (0.001, 0.003) for seed in (8, 9)}
    assert 1 < measured["unigram"] < math.log(257)


def test_effect_of_an_outlier():
    """Both divide by about the RMS of the row, √((511 + 100²) / 512)."""
    protocol = replace(CLAIMS["outliers"].protocols["quick"], seeds=(0, 1, 2))
    for row in measure_outliers(protocol, Lab(Path()))["runs"]:
        assert row["left"] == pytest.approx(math.sqrt(512 / (511 + 100**2)), rel=0.05)


def test_a_quick_claim_writes_its_result_and_claims_md_and_report_writes_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ablate.main(["claims", "--list"])
    assert [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()] == list(CLAIMS)
    ablate.main(["claim", "outliers"])
    assert "RMSNorm is more robust to outliers than LayerNorm: refuted" in capsys.readouterr().out
    content = json.loads(Path("results/quick/claims/outliers.json").read_text())
    assert content["environment"].keys() >= {"command", "commit", "device", "instruction_set", "torch", "seconds"}
    document, picture = Path("CLAIMS.md").read_text("utf-8"), Path("results/quick/claims/outliers.png")
    assert "| *refuted* | quick |" in document and "- `python ablate.py claim ngpt-steps --scale cpu`" in document
    Path("CLAIMS.md").unlink()
    picture.unlink()
    ablate.main(["claims", "--report"])
    assert Path("CLAIMS.md").read_text("utf-8") == document and picture.read_bytes().startswith(b"\x89PNG")
    fewer: dict[Scale, Protocol] = {"quick": replace(CLAIMS["outliers"].protocols["quick"], seeds=(0, 1))}
    with pytest.raises(ValueError, match="was measured with another protocol"):
        read_entry(Path("results"), replace(CLAIMS["outliers"], protocols=fewer), "quick")
    for text in ("{", "[]", "{}"):
        Path("results/quick/claims/outliers.json").write_text(text)
        with pytest.raises(SystemExit) as exit:
            ablate.main(["claims", "--report"])
        assert exit.value.code == 2 and "outliers.json is damaged; run python" in capsys.readouterr().err


def test_committed_results_have_their_verdicts_and_claims_md_says_so():
    text = (ROOT / "CLAIMS.md").read_text("utf-8")
    assert text == to_markdown(read_entries(CLAIMS, ROOT / "results"))
    for file in (ROOT / "results").glob("*/claims/*.png"):  # of claims of earlier versions too
        assert file.relative_to(ROOT).as_posix() in text


def test_results_name_the_commit_of_the_code():
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    named = commit()
    assert head.startswith(named.removesuffix("-dirty")) and len(named) >= 12 if head and named else named is None
