"""The claims that train nothing: their rules on made-up measurements, what they measure, and their results."""

import json
import math
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats

from experiments.claims import load_claims
from experiments.claims.centered_rmsnorm import center
from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Lab
from experiments.claims.deepnorm_details import WRONG
from experiments.claims.eps_placement import EpsOutside
from experiments.claims.initial import initial_model, random_batch, with_norms, with_placements
from experiments.claims.outliers import effect
from experiments.claims.residual_growth import exponents, variance_row
from experiments.claims.results import commit, read_results, run_claim
from experiments.claims.verdict import Comparison, all_of, equal_within
from norms import KINDS, TRAITS, build_norm
from norms.placement import PLACEMENTS

CLAIMS = load_claims()
QUICK = ("centered-rmsnorm", "deepnorm-details", "residual-growth", "eps-placement", "outliers")
NOISE = (-0.02, -0.01, 0.0, 0.01, 0.02)  # between seeds


def verdict(name: str, measured: dict) -> str:
    """The verdict on measurements that have been through a results file."""
    return CLAIMS[name].judge(json.loads(json.dumps(measured))).verdict


# --- the rule that several claims share ------------------------------------------------------------------------------


def around(center: float, noise: float = 1.0) -> list[float]:
    return [center + noise * each for each in NOISE]


@pytest.mark.parametrize(
    "centers, expected",
    [((1, -1), CONFIRMED), ((1, 1), REFUTED), ((-1, -1), REFUTED), ((1, 0), OPEN), ((0, 1), REFUTED)],
)
def test_all_comparisons_must_hold(centers, expected):
    above, below = centers
    comparisons = [Comparison("a", around(above), "above"), Comparison("b", around(below), "below")]
    assert all_of(comparisons, "").verdict == expected


def test_comparisons_are_with_their_threshold_and_corrected():
    p = all_of([Comparison("a", around(0.013), "above")], "").p
    shifted = all_of([Comparison("a", around(5.013), "above", 5.0)], "")
    assert p is not None and shifted.p == pytest.approx(p) and shifted.verdict == OPEN
    one = all_of([Comparison("a", around(0.023), "above")], "")
    two = all_of([Comparison("a", around(0.023), "above"), Comparison("b", around(0.023), "above")], "")
    assert one.p is not None and two.p == pytest.approx(2 * one.p)
    assert (one.verdict, two.verdict) == (CONFIRMED, OPEN)


# --- rules on made-up measurements -----------------------------------------------------------------------------------


def equivalence(float64: float, float32: float, uncentered: float) -> dict:
    return {
        "rows": [
            {"seed": 0, "dtype": dtype, "logits": value, "gradients": value, "uncentered logits": uncentered}
            for dtype, value in (("float64", float64), ("float32", float32))
        ]
    }


@pytest.mark.parametrize(
    "float64, float32, uncentered, expected",
    [
        (1e-14, 3e-6, 0.5, CONFIRMED),
        (1e-3, 1e-3, 0.5, REFUTED),
        (1e-9, 3e-6, 0.5, OPEN),  # larger than rounding, but too small for float32
        (1e-14, 3e-6, 1e-3, OPEN),  # models that hardly differ anyway
    ],
)
def test_rule_of_centered_rmsnorm(float64, float32, uncentered, expected):
    assert verdict("centered-rmsnorm", equivalence(float64, float32, uncentered)) == expected


def gradients(**ratios: list[float]) -> dict:
    arms = dict(zip(("deepnorm", *WRONG), ratios.values(), strict=True))
    rows = [
        {"arm": arm, "seed": seed, "gradients": [value, 5.0, 1.0]}
        for arm, values in arms.items()
        for seed, value in enumerate(values)
    ]
    return {"rows": rows}


NEAR_1, LARGE, SMALL, UNCLEAR = [1.1, 0.9, 1.0, 1.2], [1e4, 2e4, 1e5, 3e4], [1e-4, 2e-4, 1e-5, 3e-4], [1.0, 90, 4, 30]


@pytest.mark.parametrize(
    "ratios, expected",
    [
        (dict(right=NEAR_1, branch=LARGE, gain=LARGE), CONFIRMED),
        (dict(right=NEAR_1, branch=SMALL, gain=LARGE), CONFIRMED),  # vanishing counts as exploding does
        (dict(right=NEAR_1, branch=NEAR_1, gain=LARGE), REFUTED),
        (dict(right=LARGE, branch=LARGE, gain=LARGE), REFUTED),
        (dict(right=NEAR_1, branch=UNCLEAR, gain=LARGE), OPEN),
    ],
)
def test_rule_of_deepnorm_details(ratios, expected):
    assert verdict("deepnorm-details", gradients(**ratios)) == expected


def growth(**powers: float) -> dict:
    """Variances that grow with these powers of the block's number, up to noise."""
    rows = [
        variance_row(placement, "judged", seed, [block ** ((power + noise) / 2) for block in range(1, 9)])
        for placement, power in powers.items()
        for seed, noise in enumerate(NOISE)
    ]
    return {"judged": "judged", "rows": rows}


@pytest.mark.parametrize(
    "powers, expected",
    [
        (dict(pre=1.0, sandwich=0.2, lns=0.1), CONFIRMED),
        (dict(pre=3.0, sandwich=1.0, lns=0.1), CONFIRMED),
        (dict(pre=1.0, sandwich=0.9, lns=0.1), REFUTED),
        (dict(pre=-0.5, sandwich=-1.0, lns=-1.0), REFUTED),
        (dict(pre=1.0, sandwich=0.5, lns=0.1), OPEN),
    ],
)
def test_rule_of_residual_growth(powers, expected):
    measured = growth(**powers)
    assert exponents(measured, "sandwich", "judged") == pytest.approx([powers["sandwich"] + noise for noise in NOISE])
    assert verdict("residual-growth", measured) == expected


def eps_rows(far: float, near: list[float], finite: tuple[bool, bool] = (True, False), between: float = 0.5) -> dict:
    cells = [(1.0, far), (0.1, between), *((0.01, difference) for difference in near)]
    rows = [
        {"what": "norm", "seed": 0, "eps": 1e-4, "rms": rms, "output": 0.0, "gradient": difference}
        for rms, difference in cells
    ]
    return {"rows": rows, "finite gradient at zero": dict(zip(("RMSNorm", "EpsOutside"), finite, strict=True))}


@pytest.mark.parametrize(
    "measured, expected",
    [
        (eps_rows(far=0.001, near=[0.5, 0.3], between=0.001), CONFIRMED),
        (eps_rows(far=0.05, near=[0.5, 0.3]), REFUTED),
        (eps_rows(far=0.001, near=[0.01, 0.01], finite=(True, True), between=0.001), REFUTED),
        (eps_rows(far=0.001, near=[0.5, 0.01], between=0.001), OPEN),
        (eps_rows(far=0.001, near=[0.5], finite=(True, True), between=0.001), OPEN),
        (eps_rows(far=0.001, near=[], between=0.001), OPEN),
    ],
)
def test_rule_of_eps_placement(measured, expected):
    assert verdict("eps-placement", measured) == expected


@pytest.mark.parametrize("difference, expected", [(0.2, CONFIRMED), (0.0, REFUTED), (-0.2, REFUTED), (0.012, OPEN)])
def test_rule_of_outliers(difference, expected):
    rows = [
        {"norm": norm, "seed": seed, "size": 100.0, "left": left, "shift": 0.0}
        for seed, noise in enumerate(NOISE)
        for norm, left in (("rmsnorm", 0.22 + difference + noise / 5), ("layernorm", 0.22))
    ]
    assert verdict("outliers", {"rows": rows}) == expected


# --- what is measured ------------------------------------------------------------------------------------------------


def test_centered_weights_write_nothing_along_the_ones_vector():
    protocol = CLAIMS["centered-rmsnorm"].protocols["quick"]
    model = initial_model(protocol, protocol.arms[1], seed=0).double()
    center(model)
    streams: list[torch.Tensor] = []
    for block in model.layers:
        block.register_forward_hook(lambda block, args, out: streams.append(out))
    model(random_batch(model, 2, seed=0)[0])
    assert len(streams) == 4
    for stream in streams:
        assert stream.mean(-1).abs().max() < 1e-14 < 1e-3 < stream.abs().mean()


def test_wrong_placements_differ_where_they_are_wrong():
    """Against the formulas, with the factors of 48 blocks: α = 96^¼ and the gain 384^-¼."""
    protocol = CLAIMS["deepnorm-details"].protocols["quick"]
    with with_placements(WRONG):
        right, branch, inverted = (initial_model(protocol, arm, seed=0) for arm in protocol.arms)
    x = torch.randn(2, 3, 64)
    for model, expected in ((right, 96**0.25 * x + x.sin()), (branch, x + 96**0.25 * x.sin())):
        expected = (expected - expected.mean(-1, keepdim=True)) / expected.std(-1, correction=0, keepdim=True)
        # LayerNorm's eps, 1e-5, changes values of variance above 1 by at most 5e-6.
        residual = model.get_submodule("layers.0.mlp_residual")
        torch.testing.assert_close(residual(x, torch.sin), expected, rtol=0, atol=5e-5)
    for path, factor in {"mlp.up_proj": 384**0.5, "self_attn.v_proj": 384**0.5, "self_attn.q_proj": 1.0}.items():
        weights = [model.get_parameter(f"layers.7.{path}.weight") for model in (right, branch, inverted)]
        torch.testing.assert_close(weights[1], weights[0])
        torch.testing.assert_close(weights[2], factor * weights[0])
    assert not set(WRONG) & set(PLACEMENTS)


def test_temporary_kinds_go_away_after_an_error():
    with pytest.raises(KeyError), with_norms({"eps-outside": EpsOutside}):
        assert isinstance(build_norm("eps-outside", 4), EpsOutside)
        raise KeyError
    assert "eps-outside" not in KINDS and "eps-outside" not in TRAITS


def test_eps_outside_the_root():
    """Its output RMS is r / (r + ε), at an RMS of r; the other's is r / √(r² + ε)."""
    x = torch.randn(5, 64, dtype=torch.float64)
    x = 1e-3 * x / x.square().mean(-1, keepdim=True).sqrt()
    for norm, expected in ((EpsOutside(64, 1e-5), 1e-3 / 1.01e-3), (build_norm("rmsnorm", 64, eps=1e-5), 1 / 11**0.5)):
        rms = norm(x).square().mean(-1).sqrt()
        torch.testing.assert_close(rms, torch.full_like(rms, expected), rtol=1e-12, atol=0)


def test_effect_of_an_outlier():
    """With values ±1 and an outlier of 7, RMSNorm divides by √(1 + 48/n), and LayerNorm also subtracts 7/n."""
    n = 1001  # one outlier, 500 of each sign
    clean = torch.tensor([0.0] + [1.0, -1.0] * 500, dtype=torch.float64)
    x = clean.clone()
    x[0] = 7.0
    shrunk = math.sqrt((n - 1) / n) / math.sqrt((n - 1 + 49) / n)  # the clean row's RMS is not quite 1
    assert effect(build_norm("rmsnorm", n), clean, x) == (pytest.approx(shrunk, rel=1e-5), pytest.approx(0, abs=1e-12))
    left, shift = effect(build_norm("layernorm", n), clean, x)
    sd = math.sqrt((n - 1 + 49) / n - (7 / n) ** 2)
    assert left == pytest.approx(math.sqrt((n - 1) / n) / sd, rel=1e-5)
    assert shift == pytest.approx(7 / n * math.sqrt((n - 2) / (n - 1)), rel=1e-5)


@pytest.mark.parametrize("center, expected", [(0.0, CONFIRMED), (0.33, OPEN), (0.35, OPEN), (0.38, REFUTED)])
def test_equal_within_a_margin_has_two_sides(center, expected):
    """Refuted at 5% for both sides together: with 0.35 one side alone would be below it, at 4%."""
    differences = [center + 3 * each for each in NOISE]
    for sign in (1, -1):
        found = equal_within([sign * value for value in differences], 0.3, diverged=0)
        assert found.verdict == expected, found
    outside = stats.ttest_1samp(differences, 0.3).pvalue
    assert (outside < 0.05) == (expected == REFUTED) or expected == CONFIRMED
    if expected == REFUTED:
        assert found.p == pytest.approx(outside)


# --- a run of each ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUICK)
def test_a_smaller_run_is_judged_and_drawn_from_its_results_file(name, tmp_path):
    protocol = CLAIMS[name].protocols["quick"]
    settings = {"eps": (1e-6,), "rms": (1e-4, 1.0), "sizes": (10.0, 100.0)}
    settings = {key: settings.get(key, value) for key, value in protocol.settings.items()}
    small = replace(protocol, flags=protocol.flags.replace("--layers 48", "--layers 3"), seeds=2, settings=settings)
    claim = replace(CLAIMS[name], protocols={"quick": small})
    judgment = run_claim(claim, Lab(tmp_path, "quick"), tmp_path)
    assert judgment == claim.judge(read_results(tmp_path, claim, "quick")["measured"])
    assert (tmp_path / "quick" / "claims" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for changed in (replace(small, seeds=3), replace(small, settings=settings | {"new": 1})):
        with pytest.raises(ValueError, match="was measured with another protocol"):
            read_results(tmp_path, replace(claim, protocols={"quick": changed}), "quick")
    read_results(tmp_path, replace(claim, protocols={"quick": replace(small, minutes=99)}), "quick")


def test_results_name_the_commit_of_the_code():
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    named = commit()
    assert head.startswith(named.removesuffix("-dirty")) and len(named) >= 12 if head and named else named is None


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_there_is_no_commit_if_git_fails_with_a_line_that_is_not_utf8(tmp_path, monkeypatch):
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\nprintf 'fatal: d\\351p\\364t\\n' >&2; exit 128\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_the_verdict_is_that_of_the_committed_results(name, tmp_path):
    committed = read_results(Path(__file__).parents[3] / "results", CLAIMS[name], "quick")
    assert (
        run_claim(CLAIMS[name], Lab(tmp_path, "quick"), tmp_path).verdict
        == CLAIMS[name].judge(committed["measured"]).verdict
    )
