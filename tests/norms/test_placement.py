"""Placements in whole models against float64 formulas with the model's sublayers and norms; their initialization."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from config import ModelConfig
from model import Llama
from norms.placement import PLACEMENTS, PostNorm, PreNorm, ngpt
from norms.rmsnorm import RMSNorm
from roles import matrices
from tests.random_values import drawn, randomize

CONFIG = ModelConfig(dim=16, layers=8, heads=2, kv_heads=1, hidden_dim=24, context=12, vocab_size=19)
TOKENS = torch.tensor([[1, 18, 4, 4, 9, 0], [7, 2, 2, 11, 5, 18]])


def model_of(placement: str, **changes) -> Llama:
    return Llama(dataclasses.replace(CONFIG, placement=placement, **changes)).eval()


def unit(h: Tensor) -> Tensor:
    return h / (h * h).sum(-1, keepdim=True) ** 0.5


def mixture(sources: list[Tensor], query: Tensor) -> Tensor:
    stacked = torch.stack(sources)  # m B T C
    keys = stacked / ((stacked * stacked).mean(-1, keepdim=True) + 1e-6) ** 0.5
    return torch.einsum("mbt,mbtc->btc", ((keys @ query) / 4).softmax(0), stacked)


def reference_logits(placement: str, model: Any) -> Tensor:
    """Logits by the table of placements, with the norms and sublayers of the model, each by its name."""
    sublayers: list[tuple[int, Any, Callable]] = []  # block index from 1, residual connection, sublayer
    for block, layer in enumerate(model.layers, 1):
        attention = partial(layer.self_attn, rope=model.rope(slice(6)))
        sublayers += [(block, layer.attention_residual, attention), (block, layer.mlp_residual, layer.mlp)]
    x, layers, final = model.embed_tokens(TOKENS), CONFIG.layers, model.final_norm
    if placement == "ngpt":
        x = unit(x)
    y, sources = x, [x]
    for number, (block, at, f) in enumerate(sublayers):
        match placement:
            case "deepnorm":
                x = at.norm((2 * layers) ** 0.25 * x + f(x))
            case "sandwich":
                x = x + at.norm_out(f(at.norm(x)))
            case "reordered":
                x = x + at.norm(f(x))
            case "lns":
                x = x + f(at.norm(x) / math.sqrt(block))
            case "mix":  # the first 2 of 8 blocks are post-norm
                x = at.norm(x + f(x)) if block <= 2 else x + f(at.norm(x))
            case "residual":
                z = f(x)
                x, y = at.norm(x + z), y + z
            case "hybrid-star" if block == 1:
                x = x + f(at.norm(x))
            case "hybrid" | "hybrid-star":
                h = x if number % 2 == 0 else at.norm(x)
                x = h + f(h)
            case "siamese":
                h = at.norm_x(x)
                z = f(at.norm(h + at.norm_y(y)))
                x, y = h + z / math.sqrt(2 * block), y + z
            case "rezero":
                x = x + at.a * f(x)
            case "keel" if number == 0:
                x = x + f(at.norm(x))
            case "keel":
                x = at.norm_out((1 if number == 1 else 2 * layers) * x + f(at.norm(x)))
            case "attnres":
                sources.append(f(at.norm(sources[0] if number == 0 else mixture(sources, at.query))))
            case "ngpt":
                x = unit(x + (0.05 * 4 * at.alpha).abs() * (unit(f(x)) - x))
    match placement:
        case "deepnorm" | "keel" | "ngpt":
            pass
        case "residual":
            x = x + final.norm(y)
        case "attnres":
            x = final.norm(mixture(sources, final.query))
        case "siamese":
            x = final.norm(final.norm_x(x) + final.norm_y(y))
        case _:
            x = final(x)
    return model.lm_head(x)


ELSEWHERE = ["pre", "post"]  # test_minimal.py compares these with examples/minimal.py
ELSEWHERE += ["parallel", "minimax", "mhc", "attnres-block"]  # and test_recipes.py these with released code


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name not in ELSEWHERE])
def test_values_and_gradients(placement):
    """And the keys of the state dict, which has no buffers."""
    model = randomize(model_of(placement, tie_embeddings=False), gains=0.4)
    model = model.double()
    leaves = dict(model.named_parameters())
    assert model.state_dict().keys() == leaves.keys()
    got, expected = model(TOKENS), reference_logits(placement, model)
    # both are float64: 1e-16 per operation, amplified by 16 sublayers
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    grad_y = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    gradients = (torch.autograd.grad((logits * grad_y).sum(), [*leaves.values()]) for logits in (got, expected))
    for name, gradient, expected_gradient in zip(leaves, *gradients, strict=True):
        assert gradient.ndim >= 1 and gradient.abs().max() > 0, name  # FSDP2 refuses parameters without dimensions
        assert (gradient - expected_gradient).abs().max() <= 1e-9 * expected_gradient.abs().max(), name


NORMED: dict[tuple[str, ...], list[str]] = {  # on queries, keys and values, and on rotated queries and keys
    ("residual", "head"): ["RMSNorm", "RMSNorm", "Identity", "Identity", "Identity"],
    ("hybrid", "none"): ["RMSNorm", "RMSNorm", "RMSNorm", "Identity", "Identity"],
    ("hybrid-star", "head", "rotated"): ["Identity", "Identity", "RMSNorm", "RMSNorm", "RMSNorm"],
    ("hybrid", "full"): ["FullWidth", "FullWidth", "RMSNorm", "Identity", "Identity"],
    ("ngpt", "head"): ["RMSNorm", "RMSNorm", "Identity", "UnitQuery", "UnitKey"],
}


@pytest.mark.parametrize("asked", NORMED, ids="-".join)
def test_norms_of_queries_keys_and_values(asked):
    attention: Any = model_of(asked[0], qk_norm=asked[1], qk_norm_after_rope="rotated" in asked).layers[0].self_attn
    assert [type(norm).__name__ for name, norm in attention.named_children() if "norm" in name[1:]][1:] == NORMED[asked]


def test_scales_of_ngpt():
    """The paper has √D · (s q̂)ᵀ(s k̂), and attention divides by √D. The factors are those of a width of 16."""
    start = {name: set(each.tolist()) for name, each in model_of("ngpt").named_parameters() if each.ndim == 1}
    assert start == {name: {1.0 if "mlp." in name else 0.25} for name in start}, "α is 0.05, and s of q and head is 1"
    model: Any = randomize(model_of("ngpt", tie_embeddings=False)).double()
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    q, x = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q = q.view(1, 6, 2, 8)
    torch.testing.assert_close(attention.rotated_k_norm(q), unit(q))
    scale = 4 * attention.rotated_q_norm.scale.view(2, 8)
    torch.testing.assert_close(attention.rotated_q_norm(q), 8 * scale * scale * unit(q))
    for matrix, factor in ((mlp.gate_proj, 4), (mlp.up_proj, 1), (model.lm_head, 4)):
        torch.testing.assert_close(matrix(x), factor * matrix.scale * (x @ matrix.weight.T))
    ngpt.return_to_sphere(rows := torch.tensor([[3.0, 4.0], [0.0, 0.0]]), mlp.gate_proj.role)
    assert torch.equal(rows, torch.tensor([[0.6, 0.8], [0.0, 0.0]])), "a row of zeros stays"


def test_rezero_starts_as_the_identity_with_one_scalar_per_sublayer():
    model = model_of("rezero", norm="none")
    with torch.no_grad():
        assert torch.equal(model(TOKENS), model.lm_head(model.embed_tokens(TOKENS)))
    assert [a.tolist() for a in model.parameters() if a.ndim == 1] == [[0.0]] * 16


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_output_norms_are_those_whose_result_is_in_the_stream(placement):
    """So their gains have gradients that do not come through the sublayer, which returns a constant here."""
    model: Any = model_of(placement)
    stream, constant = model.init_stream(model.embed_tokens(TOKENS)), torch.ones(2, 6, CONFIG.dim, requires_grad=True)
    for block in model.layers:
        for residual in (block.attention_residual, block.mlp_residual):
            stream = residual(stream, lambda h, *args: constant)
            total = constant.sum() + torch.stack([*PLACEMENTS[placement].streams(stream)]).square().sum()
            norms: Any = {name: norm.weight for name, norm in residual.named_children() if isinstance(norm, RMSNorm)}
            gradients = torch.autograd.grad(total, [constant, *norms.values()], retain_graph=True, allow_unused=True)
            found = [name for name, gradient in zip(norms, gradients[1:], strict=True) if gradient is not None]
            assert found == list(getattr(residual, "output_norms", ()))


@pytest.mark.parametrize("layers, post", [(1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (12, 3)])
def test_mix_is_post_norm_in_the_first_quarter(layers, post):
    blocks = model_of("mix", layers=layers).layers
    for site in ("attention_residual", "mlp_residual"):
        kinds = [type(block.get_submodule(site)) for block in blocks]
        assert kinds == [PostNorm] * post + [PreNorm] * (layers - post)


@pytest.mark.parametrize("placement", ["attnres", "attnres-block"])
def test_scores_that_are_not_scaled_are_those_of_a_larger_query(placement):
    """By the root of the width, 4. A power of two changes no other bit."""
    model, scaled = (randomize(model_of(placement, placement_args={"scale_scores": each})) for each in (False, True))
    for name, weight in scaled.named_parameters():
        weight.data.mul_(4 if name.endswith("query") else 1)
    assert torch.equal(model(TOKENS), scaled(TOKENS))


BETA = 0.42044820762685725  # (8 · 4)^-¼
GAINS = {"value": BETA, "attention_out": BETA, "gate": BETA, "up": BETA, "down": BETA}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("init", ["normal", "xavier"])
def test_init_std_by_role_and_the_default_of_depth_scaled_init(placement, init):
    default = placement not in ("deepnorm", "sandwich", "reordered", "lns", "keel", "ngpt")
    for wanted in (None, False, True):
        options: dict[str, Any] = dict(layers=4, tie_embeddings=False, attention_gate="element")
        for role, name, weight in matrices(model_of(placement, **options, init=init, depth_scaled_init=wanted)):
            std = 0.02 if init == "normal" or role.name == "embedding" else math.sqrt(2 / sum(weight.shape))
            std *= GAINS.get(role.name, 1.0) if placement == "deepnorm" else 1.0
            into_stream = role.name in ("attention_out", "down")
            if init == "normal" and (default if wanted is None else wanted) and into_stream:
                std /= math.sqrt(8)
            expected = std * drawn(0, name, weight.shape)
            if placement == "ngpt":  # every row or column with the 16 features of the stream has length 1
                expected = expected / expected.norm(dim=0 if into_stream else 1, keepdim=True)
            torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0)
