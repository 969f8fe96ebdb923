"""Claims: every verdict rule on measurements that are made up so that it must confirm, refute, and leave open."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import ablate
from experiments.ablation.grid import Cell, Grid
from experiments.ablation.outcome import Arm, Outcome
from experiments.claims import (
    affine_and_order,
    batchnorm_small_batch,
    deepnorm_depth,
    derf_muon,
    dyt_fixed_compute,
    dyt_replaces_norm,
    largest_rate,
    lns_depth_scaled_init,
    load_claims,
    ngpt_steps,
    prenorm_stability,
    qk_norm_rates,
    rmsnorm_layernorm,
)
from experiments.claims.claim import CONFIRMED, NOT_RUN, OPEN, REFUTED, SCALES, Lab, Protocol
from experiments.claims.document import to_markdown
from experiments.claims.results import read_entries, results_file, run_claim
from experiments.claims.runs import best_variants, learned, make_runs, unigram_loss

ROOT = Path(__file__).parents[3]
NOISE = (0.004, -0.006, 0.001, -0.003, 0.004)  # by seed; sums to 0
BASE = (2.0, 2.1, 1.9, 2.05, 1.95)  # by seed, shared by all arms
SPREAD = 10  # times the noise: too much for any verdict


def run(arm: dict[str, str], seed: int, loss: float | None, lr: float = 0.01, **more: Any) -> dict[str, Any]:
    """A row of a results file. Without a loss, the run diverged."""
    step = int(arm.get("steps", 400))
    row = {"arm": arm, "lr": lr, "seed": seed, "diverged": loss is None, "step": step, "val_loss": loss}
    return row | {"best_val_loss": loss, "val_bpb": loss, "seconds": 1.0, "curve": [[step, loss]]} | more


def runs(arms: list[tuple[dict[str, str], float]], spread: float = 1.0) -> dict[str, Any]:
    """Measurements in which each arm's loss is above the base by its number, with noise that differs between arms."""
    rows = [
        run(arm, seed, BASE[seed] + shift + spread * NOISE[(seed + number) % len(NOISE)])
        for seed in range(len(BASE))
        for number, (arm, shift) in enumerate(arms)
    ]
    return {"runs": rows, "selection": rows}


def shifted(arms, *shifts: float, spread: float = 1.0) -> dict[str, Any]:
    return runs(list(zip(arms, shifts, strict=True)), spread)


def rates(kind: str, init: str, largest: float, unstable: float | None) -> list[dict[str, Any]]:
    """Runs at every rate and seed, which end below the unigram loss up to `largest`; seed 0 at `unstable` instead."""
    arm = largest_rate.KINDS[kind] | {"init": init}
    limits = [unstable or largest] + [largest] * 7
    return [
        run(arm, seed, 2.0 if lr <= limit else None, lr) for seed, limit in enumerate(limits) for lr in largest_rate.LRS
    ]


def stable_rates(pre: tuple[float, float], none: tuple[float, float], unstable: float | None = None) -> dict[str, Any]:
    """The largest stable rates under normal and Xavier init, with the norm and without."""
    rows = []
    for kind, pair in (("pre", pre), ("none", none), ("rezero", none)):
        for init, largest in zip(largest_rate.INITS, pair, strict=True):
            rows += rates(kind, init, largest, unstable if kind == "pre" else None)
    return {"runs": rows, "selection": [], "unigram": 3.0}


def depth_failures(post: int, deepnorm: int, shallow: int = 0) -> dict[str, Any]:
    """So many of 5 runs fail at 48 blocks; at 4 blocks, `shallow` of post-norm's."""
    rows = []
    failures = {("post", "4"): shallow, ("deepnorm", "4"): 0, ("post", "48"): post, ("deepnorm", "48"): deepnorm}
    for (placement, layers), failed in failures.items():
        for seed in range(5):
            loss = 2.5 if seed >= failed else None if seed % 2 else 3.2
            rows.append(run({"placement": placement, "layers": layers}, seed, loss))
    return {"runs": rows, "selection": rows, "unigram": 3.0}


def directions(times: float, spread: float) -> dict[str, Any]:
    """Cosines of so many times 1/√d."""
    values = [times + spread * noise for noise in NOISE]
    return {"dim": 64, "runs": [], "start": [[0.125] * 5] * 5, "end": [[value / 8] * 5 for value in values]}


def stable_ranges(none: tuple[float, ...], head: tuple[float, ...]) -> dict[str, Any]:
    """The largest stable learning rate of each seed; the smallest is 3e-4."""
    rows = []
    for qk_norm, largest in (("none", none), ("head", head)):
        for seed, limit in enumerate(largest):
            for lr in qk_norm_rates.LRS:
                loss = 2.0 if lr <= limit else None if lr > 0.05 else 2.5
                rows.append(run({"qk_norm": qk_norm}, seed, loss, lr, largest_logit=loss and 10 * lr))
    return {"runs": rows, "selection": []}


def with_orders(arms, shift: float, *orders: float, spread: float = 1.0) -> dict[str, Any]:
    """Claim 16: the model without scale and shift, and the MLP with the norm after activation and after dropout."""
    losses = {
        order: [BASE[seed] + more + spread * NOISE[(seed + number) % 5] for seed in range(5)]
        for number, (order, more) in enumerate(zip(affine_and_order.ORDERS, (0.0, *orders), strict=True))
    }
    return shifted(arms, 0, shift, spread=spread) | {"orders": losses}


ARMS_1, ARMS_4, ARMS_10, ARMS_18 = (
    module.CLAIM.protocols["cpu"].arms
    for module in (rmsnorm_layernorm, prenorm_stability, batchnorm_small_batch, derf_muon)
)
ARMS_18 = tuple(arm for arm in ARMS_18 if arm["norm"] in ("rmsnorm", "derf:alpha=1.0"))
ARMS_19 = ngpt_steps.CLAIM.protocols["cpu"].arms
ARMS_8 = (lns_depth_scaled_init.PLAIN, lns_depth_scaled_init.SCALED, lns_depth_scaled_init.LNS)
ARMS_9 = tuple(dyt_replaces_norm.arm(norm, steps) for steps in ("40", "2000") for norm in ("rmsnorm", "dyt:alpha=0.5"))
ARMS_20 = dyt_fixed_compute.ARMS[:2]
LOW = (1e-2,) * 8

CASES: dict[str, dict[str, Any]] = {  # by claim: measurements for each verdict
    "rmsnorm-layernorm": {
        CONFIRMED: shifted(ARMS_1, 0, 0.005),
        REFUTED: shifted(ARMS_1, 0, 0.05),
        OPEN: shifted(ARMS_1, 0, 0.005, spread=SPREAD),
    },
    "prenorm-stability": {  # pre and post with warmup, pre and post without
        CONFIRMED: shifted(ARMS_4, 0, 0.01, 0, 0.2) | {"unigram": 3.0},
        REFUTED: shifted(ARMS_4, 0, 0, 0, -0.1) | {"unigram": 3.0},
        OPEN: shifted(ARMS_4, 0, 0.1, 0, 0.1) | {"unigram": 3.0},
    },
    "deepnorm-depth": {
        CONFIRMED: depth_failures(5, 0),
        REFUTED: depth_failures(0, 5),
        OPEN: depth_failures(2, 0),
    },
    "lns-depth-scaled-init": {
        CONFIRMED: shifted(ARMS_8, 0.1, 0, 0.005),
        REFUTED: shifted(ARMS_8, 0.1, 0.1, 0),
        OPEN: shifted(ARMS_8, 0, 0, 0, spread=SPREAD),
    },
    "dyt-replaces-norm": {
        CONFIRMED: shifted(ARMS_9, 0, 0, 0, 0),
        REFUTED: shifted(ARMS_9, 0, 0, 0, 0.1),
        OPEN: shifted(ARMS_9, 0, 0, 0, 0.02, spread=SPREAD),
    },
    "batchnorm-small-batch": {  # LayerNorm and BatchNorm at 32, at 8, at 2
        CONFIRMED: shifted(ARMS_10, 0, 0, 0, 0.1, 0, 0.3),
        REFUTED: shifted(ARMS_10, 0, 0.3, 0, 0.1, 0, 0),
        OPEN: shifted(ARMS_10, 0, 0, 0, 0, 0, 0.02, spread=SPREAD),
    },
    "qk-norm-rates": {
        CONFIRMED: stable_ranges((1e-2, 3e-2, *LOW[2:]), (1e-1, 1e-1, 3e-1, *(1e-1,) * 5)),
        REFUTED: stable_ranges(LOW, LOW),
        OPEN: stable_ranges(LOW, (1e-1, 1e-3, 1e-2, 3e-2, 3e-3, 1e-2, 1e-1, 1e-3)),
    },
    "largest-rate": {
        CONFIRMED: stable_rates((3e-2, 3e-2), (1e-2, 1e-3), unstable=1e-1),
        REFUTED: stable_rates((1e-3, 1e-3), (1e-2, 1e-2), unstable=3e-3),
        OPEN: stable_rates((3e-2, 3e-2), (1e-2, 1e-2), unstable=1e-1),
    },
    "ones-direction": {
        CONFIRMED: directions(1.0, 1),
        REFUTED: directions(3.0, 1),
        OPEN: directions(1.5, 1),
    },
    "affine-and-order": {
        CONFIRMED: with_orders(affine_and_order.ARMS, 0.005, 0.05, 0.1),
        REFUTED: with_orders(affine_and_order.ARMS, 0.005, -0.05, 0.1),
        OPEN: with_orders(affine_and_order.ARMS, 0.005, 0, 0),
    },
    "derf-muon": {  # RMSNorm and Derf with AdamW, RMSNorm and Derf with Muon
        CONFIRMED: shifted(ARMS_18, 0.1, 0, 0, 0.2),
        REFUTED: shifted(ARMS_18, 0, 0.1, 0, 0.1),
        OPEN: shifted(ARMS_18, 0.005, 0, 0, 0, spread=SPREAD),
    },
    "ngpt-steps": {  # pre-norm; nGPT with all steps, a half, a quarter
        CONFIRMED: shifted(ARMS_19, 0, -0.3, -0.2, -0.1),
        REFUTED: shifted(ARMS_19, 0, -0.1, 0.1, 0.3),
        OPEN: shifted(ARMS_19, 0, -0.1, 0, 0.02, spread=SPREAD),
    },
    "dyt-fixed-compute": {
        CONFIRMED: shifted(ARMS_20, 0, 0.1),
        REFUTED: shifted(ARMS_20, 0.1, 0),
        OPEN: shifted(ARMS_20, 0, 0.02, spread=SPREAD),
    },
}
CLAIMS = load_claims()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("verdict", [CONFIRMED, REFUTED, OPEN])
def test_rule(name, verdict):
    judgment = CLAIMS[name].judge(CASES[name][verdict])
    assert judgment.verdict == verdict, judgment
    assert judgment.ours != "–" and judgment.reason
    assert judgment.p is None or (judgment.p < 0.05) == (verdict != OPEN) or "too" in judgment.reason


@pytest.mark.parametrize("name", CASES)
def test_plot(name):
    assert isinstance(CLAIMS[name].plot(CASES[name][CONFIRMED]), Figure)


AVERAGING = sorted(CASES.keys() - {"deepnorm-depth", "largest-rate", "qk-norm-rates", "ones-direction"})


@pytest.mark.parametrize("name", AVERAGING)
def test_a_diverged_run_is_never_left_out_silently(name):
    """Where losses are averaged, one diverged run leaves the claim open."""
    measured = CASES[name][CONFIRMED]
    first, *rest = measured["runs"]
    judgment = CLAIMS[name].judge(measured | {"runs": [first | {"diverged": True, "val_loss": None}, *rest]})
    assert judgment.verdict == OPEN and "1 of the reported runs diverged" in judgment.reason


def test_warmup_is_not_judged_where_post_norm_learned_nothing():
    judgment = CLAIMS["prenorm-stability"].judge(shifted(ARMS_4, 0, 1, 0, 1.2) | {"unigram": 2.8})
    assert judgment.verdict == OPEN and "post-norm learned only" in judgment.reason


# --- what the rules rest on ------------------------------------------------------------------------------------------


def test_largest_stable_rate_is_the_last_before_a_failure_above_a_success():
    arm = largest_rate.KINDS["pre"] | {"init": "normal"}
    losses = {0: (2.0, 2.0, 3.5, 2.0), 1: (2.0, 2.0, 2.0, None), 2: (3.1, 2.0, 2.0, None), 3: (None, 3.5, 3.1, None)}
    rows = [
        run(arm, seed, loss, lr) for seed, row in losses.items() for lr, loss in zip((1, 2, 4, 8), row, strict=True)
    ]
    found = largest_rate.largest_stable({"runs": rows, "unigram": 3.0}, "pre", "normal")
    assert found == {0: 2, 1: 4, 2: 4, 3: 0.5}


def test_post_norm_that_fails_at_every_depth_says_nothing_about_depth():
    judgment = deepnorm_depth.judge(depth_failures(5, 0, shallow=3))
    assert judgment.verdict == OPEN and "4 blocks too" in judgment.reason
    assert deepnorm_depth.judge(depth_failures(5, 0, shallow=2)).verdict == CONFIRMED


def test_a_seed_all_of_whose_runs_diverge_has_no_stable_range():
    measured = stable_ranges(LOW, LOW)
    rows = [row | ({"diverged": True, "val_loss": None} if row["seed"] == 3 else {}) for row in measured["runs"]]
    assert qk_norm_rates.stable_range({"runs": rows}, "none")[3] == 1


def test_unigram_loss_is_the_entropy():
    tokens = np.array([5, 5, 7, 9])
    assert unigram_loss(tokens) == pytest.approx(1.5 * math.log(2))


def test_a_run_near_the_unigram_loss_has_learned_nothing():
    assert learned(run({}, 0, 2.8), unigram=3.0)
    assert not learned(run({}, 0, 2.95), unigram=3.0) and not learned(run({}, 0, None), unigram=3.0)


def test_best_variant_is_the_lowest_on_the_selection_seeds():
    arms = [Arm.of(norm=norm, placement="pre") for norm in ("rmsnorm", "dyt:alpha=0.2", "dyt:alpha=1.0")]
    losses = {arms[0]: (2.0, 2.0), arms[1]: (1.8, None), arms[2]: (2.1, 2.2)}
    selection = {}
    for arm, pair in losses.items():
        for seed, loss in enumerate(pair):
            outcome = Outcome(arm, 0.01, seed, loss is None, 400, loss, loss, loss, None, None, [])
            selection[Cell(arm, 0.01, seed)] = outcome
            selection[Cell(arm, 0.1, seed)] = Outcome(arm, 0.1, seed, False, 400, 0.1, 0.1, 0.1, None, None, [])
    assert best_variants(dict.fromkeys(arms, 0.01), selection) == [arms[0], arms[2]]


# --- the document ----------------------------------------------------------------------------------------------------


def test_a_claim_reports_the_seeds_of_its_protocol(tmp_path, monkeypatch):
    """A second experiment has seeds that the first one did not see. Nothing is trained."""

    def ended(grid: Grid, wanted: list[Cell], on_end: Any = None) -> dict[Cell, Outcome]:
        return {cell: Outcome(cell.arm, cell.lr, cell.seed, False, 4, 2.0, 2.0, 2.0, None, None, []) for cell in wanted}

    monkeypatch.setattr(Grid, "run", ended)
    text = tmp_path / "text.txt"
    text.write_text("the cat sees a dog. " * 200)
    protocol = Protocol(
        minutes=0, flags=f"{TOY} --data {text}", arms=({"norm": "rmsnorm"}, {"norm": "dyt"}), lrs=(1e-3,), seeds=2,
        settings={"first_seed": 8},
    )  # fmt: skip
    for select_lr in (True, False):
        lab = Lab(tmp_path / "runs", "cpu", cache_dir=str(tmp_path / "cache"))
        measured = make_runs(replace(protocol, select_lr=select_lr), lab)
        assert [row["seed"] for row in measured["runs"]] == [8, 8, 9, 9]
        assert not {8, 9} & {row["seed"] for row in measured["selection"]}


def test_claims_are_numbered_and_named_once():
    numbers = [claim.number for claim in CLAIMS.values()]
    assert numbers == sorted(set(numbers)) and len(CLAIMS) == len(numbers)
    assert all(set(claim.protocols) <= set(SCALES) for claim in CLAIMS.values())


def test_a_claim_without_results_is_listed_as_not_run(tmp_path):
    entries = read_entries({"qk-norm-rates": CLAIMS["qk-norm-rates"]}, tmp_path)
    assert [(entry.judgment, entry.verdict) for entry in entries] == [(NOT_RUN, f"{OPEN}: not run")]
    text = to_markdown(entries)
    assert (
        "*inconclusive at this scale: not run*" in text and "python ablate.py claim qk-norm-rates --scale gpu" in text
    )


@pytest.mark.parametrize("text", ['{"protocol":', "{}", "[]"])
def test_a_damaged_result_is_named(text, tmp_path):
    claim = CLAIMS["outliers"]
    file = results_file(tmp_path, claim, "quick")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(ValueError, match=r"outliers\.json is not .*; run .* outliers --scale quick again"):
        read_entries({claim.name: claim}, tmp_path)


def test_claim_16_is_refuted_with_the_p_of_the_order_that_is_better():
    """Of the other orders, one is better and one about equal."""
    judgment = affine_and_order.judge(with_orders(affine_and_order.ARMS, 0.005, -0.05, 0.0005))
    assert judgment.verdict == REFUTED and judgment.p is not None and judgment.p < 0.001


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--runs file", "--runs {}/file is not a folder"),
        ("--runs file/runs", "Not a directory: '{}/file/runs'"),
        ("--results file", "--results {}/file is not a folder"),
        ("--results linked/results", "{}/linked/CLAIMS.md is not a regular file"),
        ("--results other/results", "{}/other/results/quick/claims/outliers.png is a folder"),
    ],
)
def test_where_it_writes_is_checked_before_it_measures(flags, named, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("experiments.claims.command.run_claim", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/CLAIMS.md").symlink_to("nothing")
    (tmp_path / "other/results/quick/claims/outliers.png").mkdir(parents=True)
    flag, path = flags.split()
    with pytest.raises(SystemExit) as exit:
        ablate.main(["claim", "outliers", "--runs", str(tmp_path / "runs"), flag, str(tmp_path / path)])
    lines = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and len(lines) == 1 and named.format(tmp_path) in lines[0]


# --- whole protocols at toy size -------------------------------------------------------------------------------------

TOY = (
    "--tokenizer bytes --dim 16 --layers 2 --heads 2 --hidden-dim 32 --context 16 --batch-size 4 --dtype float32 "
    "--no-compile --no-fast --steps 4 --eval-every 2 --eval-tokens 256 --save-every 4"
)


@pytest.mark.slow
@pytest.mark.parametrize("name, scale", [(name, scale) for name in CASES for scale in CLAIMS[name].protocols])
def test_a_protocol_runs_from_its_flags_to_a_verdict(name, scale, tmp_path_factory):
    """Small models with two seeds and one or two learning rates. Values of factors are those of the protocol."""
    whole = CLAIMS[name].protocols[scale]
    lrs = whole.lrs[:1] if whole.select_lr else whole.lrs[:2]
    protocol = replace(whole, flags=f"{whole.flags} {TOY}", lrs=lrs, seeds=2)
    claim = replace(CLAIMS[name], protocols={scale: protocol})
    folder = tmp_path_factory.getbasetemp() / "claims"
    judgment = run_claim(claim, Lab(folder / "runs", scale, jobs=2), folder / "results")
    assert judgment.verdict in (CONFIRMED, REFUTED, OPEN)
    (entry,) = read_entries({name: claim}, folder / "results")
    assert entry.judgment == judgment
    first = protocol.settings.get("first_seed", 0)
    assert {row["seed"] for row in entry.content["measured"]["runs"]} == {first, first + 1}
    assert results_file(folder / "results", claim, scale).with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("checkpoints")}
    assert run_claim(claim, Lab(folder / "runs", scale, jobs=2), folder / "results") == judgment
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("checkpoints")}


# --- what is committed -----------------------------------------------------------------------------------------------


def test_claims_md_is_what_the_results_say():
    """Every result fits its protocol, and CLAIMS.md is generated from the results."""
    entries = read_entries(CLAIMS, ROOT / "results")
    assert (ROOT / "CLAIMS.md").read_text("utf-8") == to_markdown(entries)
