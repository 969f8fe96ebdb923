"""Claims 2 and 17, which measure speed and training in this process: their rules, and what they measure."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from config import ModelConfig
from experiments.claims import load_claims
from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Lab
from experiments.claims.covariate_shift import BASELINE, drift, input_statistics
from experiments.claims.rmsnorm_speed import PlainLayerNorm
from model import Llama
from norms import KINDS

CLAIMS = load_claims()
SPEED, SHIFT = CLAIMS["rmsnorm-speed"], CLAIMS["covariate-shift"]
NOISE = (0.98, 0.99, 1.0, 1.01, 1.02)  # between seeds or groups of rounds


@pytest.mark.parametrize(
    "plain, compiled, expected", [(0.7, 0.85, CONFIRMED), (0.7, 1.0, REFUTED), (1.2, 1.3, REFUTED), (0.7, 0.95, OPEN)]
)
def test_rule_of_rmsnorm_speed(plain, compiled, expected):
    middle = {"plain, norm forward": 0.6, "plain, training step": plain, "compiled, training step": compiled}
    measured = {"ratios": {name: [value * noise for noise in NOISE] for name, value in middle.items()}}
    judgment = SPEED.judge(json.loads(json.dumps(measured)))
    assert judgment.verdict == expected
    assert "norm forward" not in judgment.ours and f"compiled, training step {compiled:.3g} [" in judgment.ours


def shift(drift_ratio: float, loss_difference: float, diverged: bool = False) -> dict:
    """Runs with RMSNorm, LayerNorm and without a norm. Only RMSNorm's drift and loss are at issue."""
    effects = {"none": (1.0, 0.0), "rmsnorm": (drift_ratio, loss_difference), "layernorm": (0.1, -0.5)}
    rows = [
        {
            "arm": {"norm": norm, "placement": "pre"},
            "lr": 0.003,
            "seed": seed,
            "diverged": diverged and norm == "rmsnorm" and seed == 0,
            "val_loss": 2 + difference + (noise - 1 if norm == "rmsnorm" else 0),
            "log_drift": math.log(ratio * (noise if norm == "rmsnorm" else 1)),
        }
        for norm, (ratio, difference) in effects.items()
        for seed, noise in enumerate(NOISE)
    ]
    return {"runs": rows, "selection": []}


@pytest.mark.parametrize(
    "measured, expected",
    [
        (shift(0.2, -0.4), CONFIRMED),
        (shift(1.5, -0.4), REFUTED),  # faster without removing the shift
        (shift(0.2, 0.4), REFUTED),  # without the shift, but not faster
        (shift(0.5, -0.4), OPEN),
        (shift(0.2, 0.0), OPEN),
        (shift(0.2, -0.4, diverged=True), OPEN),
    ],
)
def test_rule_of_covariate_shift(measured, expected):
    assert SHIFT.judge(json.loads(json.dumps(measured))).verdict == expected


def test_plain_layernorm_equals_pytorchs():
    torch.manual_seed(0)
    norm = PlainLayerNorm(64).double()
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 64, dtype=torch.float64) + 3
    torch.testing.assert_close(norm(x), F.layer_norm(x, (64,), norm.weight, norm.bias, norm.eps), rtol=0, atol=1e-13)


def test_drift_is_the_divergence_in_both_directions():
    torch.manual_seed(0)
    (mean0, mean1), (var0, var1) = torch.randn(2, 3, 8).double(), torch.rand(2, 3, 8).double() + 0.1
    p, q = Normal(mean0, var0.sqrt()), Normal(mean1, var1.sqrt())
    expected = float((kl_divergence(p, q) + kl_divergence(q, p)).mean())
    assert drift((mean0, var0), (mean1, var1)) == pytest.approx(expected, rel=1e-12)
    rescaled = drift((7 * mean0 + 2, 49 * var0), (7 * mean1 + 2, 49 * var1))
    assert rescaled == pytest.approx(expected, rel=1e-12) and drift((mean0, var0), (mean0, var0)) == 0


@pytest.mark.parametrize("norm", ["rmsnorm", "none"])
def test_statistics_are_those_of_what_the_sublayers_get(norm):
    model = Llama(ModelConfig(norm=norm, dim=16, layers=2, heads=2, context=8, vocab_size=20)).double()
    tokens = torch.randint(20, (3, 8), generator=torch.Generator().manual_seed(0))
    means, variances = input_statistics(model, tokens)
    assert means.shape == variances.shape == (4, 16)
    x = model.embed_tokens(tokens).detach()
    inputs = [x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() if norm == "rmsnorm" else x]
    last = model.get_submodule("layers.1.mlp")
    last.register_forward_hook(lambda mlp, args, out: inputs.append(args[0].detach()))
    model(tokens)
    for sublayer, x in ((0, inputs[0]), (3, inputs[1])):
        torch.testing.assert_close(means[sublayer], x.mean((0, 1)))
        torch.testing.assert_close(variances[sublayer], x.var((0, 1)))
    assert len(inputs) == 2  # the hooks of input_statistics are gone


@pytest.mark.slow
def test_covariate_shift_is_measured(tmp_path):
    """Two tiny runs: the reported seeds are fresh, drift is finite, and training writes no files."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(2000)))
    protocol = replace(
        SHIFT.protocols["cpu"],
        flags="--tokenizer bytes --dim 16 --layers 1 --heads 2 --context 32 --batch-size 2 --optimizer adamw "
        f"--steps 3 --eval-tokens 256 --no-fast --dtype float32 --data {text}",
        arms=(BASELINE, {"norm": "rmsnorm", "placement": "pre"}),
        lrs=(0.01,),
        seeds=1,
    )
    before = set(Path().iterdir())
    measured = SHIFT.measure(protocol, Lab(tmp_path, "cpu", cache_dir=str(tmp_path)))
    assert set(Path().iterdir()) == before
    assert [(row["arm"]["norm"], row["lr"], row["seed"]) for row in measured["runs"]] == [
        ("none", 0.01, 0),
        ("rmsnorm", 0.01, 0),
    ]
    assert {row["seed"] for row in measured["selection"]} == {1000, 1001}
    for row in measured["runs"]:
        assert not row["diverged"] and 0 < row["val_loss"] < math.log(257) and math.isfinite(row["log_drift"])
    SHIFT.plot(measured).savefig(tmp_path / "figure.png")


@pytest.mark.slow
def test_speed_is_measured(tmp_path):
    protocol = SPEED.protocols["cpu"]
    step = {"dim": 16, "layers": 1, "heads": 2, "hidden_dim": 32, "vocab_size": 32, "context": 8, "batch_size": 2}
    settings = {**protocol.settings, "rows": 16, "dim": 16, "groups": 2, "rounds": 1, "step": step}
    measured = SPEED.measure(replace(protocol, settings=settings), Lab(tmp_path, "cpu"))
    kernels = {name.partition(",")[0] for name in measured["ratios"]}
    assert kernels >= {"plain", "compiled"} and len(measured["ratios"]) == 3 * len(kernels)
    assert all(len(values) == 2 and min(values) > 0 for values in measured["ratios"].values())
    assert "plain-layernorm" not in KINDS
    SPEED.plot(measured).savefig(tmp_path / "figure.png")
