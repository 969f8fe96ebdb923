"""Placements in whole models, compared with hand-written float64 models, and their initialization.

Rotation and attention without norms are compared in test_minimal.py.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from config import ModelConfig
from model import Llama, precompute_freqs_cis, rotate
from norms.placement import PLACEMENTS, PostNorm, PreNorm
from norms.rmsnorm import RMSNorm
from roles import matrices
from tests.random_values import drawn, randomize

CONFIG = ModelConfig(dim=16, layers=8, heads=2, kv_heads=1, hidden_dim=24, context=12, vocab_size=19)
TOKENS = torch.tensor([[1, 18, 4, 4, 9, 0]])


def model_of(placement: str, **changes) -> Llama:
    return Llama(dataclasses.replace(CONFIG, placement=placement, **changes)).eval()


# --- hand-written models ---------------------------------------------------------------------------------------------


def reference_logits(
    placement: str, w: Mapping[str, Tensor], tokens: Tensor, layers: int, qk_norm: str = "none"
) -> Tensor:
    """Logits from weights by name, by the table of placements. Norms with a bias are LayerNorm, others RMSNorm.

    It reads each weight of the state dict, under its name: autograd refuses gradients of weights that are not used.
    """

    def norm(path: str) -> Callable[[Tensor], Tensor]:
        gain = w[path + ".weight"]
        if path + ".bias" not in w:
            return lambda h: h * gain / ((h * h).mean(-1, keepdim=True) + 1e-6) ** 0.5

        def standardized(h: Tensor) -> Tensor:
            centered = h - h.mean(-1, keepdim=True)
            return centered * gain / ((centered * centered).mean(-1, keepdim=True) + 1e-5) ** 0.5 + w[path + ".bias"]

        return standardized

    def unit(h: Tensor) -> Tensor:
        return h / (h * h).sum(-1, keepdim=True) ** 0.5

    def attention(path: str) -> Callable[[Tensor], Tensor]:
        def f(h: Tensor) -> Tensor:
            q, k, v = (h @ w[f"{path}{part}_proj.weight"].T for part in "qkv")
            hybrid = placement in ("hybrid", "hybrid-star")
            if qk_norm == "full":
                q, k = norm(path + "q_norm.norm")(q), norm(path + "k_norm.norm")(k)
            q, k, v = (x.unflatten(-1, (-1, 8)) for x in (q, k, v))  # B T H D, B T K D twice
            if qk_norm == "head" or (hybrid and qk_norm == "none"):
                q, k = norm(path + "q_norm")(q), norm(path + "k_norm")(k)
            v = norm(path + "v_norm")(v) if hybrid else v
            q, k = (rotate(x, precompute_freqs_cis(8, h.shape[1])) for x in (q, k))
            if placement == "ngpt":
                scale = 4 * w[path + "rotated_q_norm.scale"].view(2, 8)
                q, k = unit(q) * scale * scale * 8, unit(k)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return y.transpose(1, 2).flatten(2) @ w[path + "o_proj.weight"].T

        return f

    def mlp(path: str) -> Callable[[Tensor], Tensor]:
        def f(h: Tensor) -> Tensor:
            gate, up = h @ w[path + "gate_proj.weight"].T, h @ w[path + "up_proj.weight"].T
            if placement == "ngpt":
                gate, up = gate * w[path + "gate_proj.scale"] * 4, up * w[path + "up_proj.scale"]
            return (gate / (1 + (-gate).exp()) * up) @ w[path + "down_proj.weight"].T

        return f

    def mixture(sources: list[Tensor], query: Tensor) -> Tensor:
        stacked = torch.stack(sources)  # m B T C
        keys = stacked / ((stacked * stacked).mean(-1, keepdim=True) + 1e-6) ** 0.5
        return torch.einsum("mbt,mbtc->btc", ((keys @ query) / 4).softmax(0), stacked)

    sublayers = []  # (block index from 1, sublayer, path of its residual connection)
    for layer in range(layers):
        at = f"layers.{layer}."
        sublayers.append((layer + 1, attention(at + "self_attn."), at + "attention_residual."))
        sublayers.append((layer + 1, mlp(at + "mlp."), at + "mlp_residual."))
    x = w["embed_tokens.weight"][tokens]
    if placement == "ngpt":
        x = unit(x)
    y, sources = x, [x]
    for number, (block, f, at) in enumerate(sublayers):
        first = at + "norm"
        match placement:
            case "deepnorm":
                x = norm(first)((2 * layers) ** 0.25 * x + f(x))
            case "sandwich":
                x = x + norm(at + "norm_out")(f(norm(first)(x)))
            case "reordered":
                x = x + norm(first)(f(x))
            case "lns":
                x = x + f(norm(first)(x) / math.sqrt(block))
            case "mix":  # the first 2 of 8 blocks are post-norm
                x = norm(first)(x + f(x)) if block <= 2 else x + f(norm(first)(x))
            case "residual":
                z = f(x)
                x, y = norm(first)(x + z), y + z
            case "hybrid-star" if block == 1:
                x = x + f(norm(first)(x))
            case "hybrid" | "hybrid-star":
                h = x if number % 2 == 0 else norm(first)(x)
                x = h + f(h)
            case "siamese":
                h = norm(at + "norm_x")(x)
                z = f(norm(first)(h + norm(at + "norm_y")(y)))
                x, y = h + z / math.sqrt(2 * block), y + z
            case "rezero":
                x = x + w[at + "a"] * f(x)
            case "keel" if number == 0:
                x = x + f(norm(first)(x))
            case "keel":
                alpha = 1 if number == 1 else 2 * layers
                x = norm(at + "norm_out")(alpha * x + f(norm(first)(x)))
            case "attnres":
                read = sources[0] if number == 0 else mixture(sources, w[at + "query"])
                sources.append(f(norm(first)(read)))
            case "ngpt":
                x = unit(x + (0.05 * 4 * w[at + "alpha"]).abs() * (unit(f(x)) - x))
    match placement:
        case "deepnorm" | "keel":
            pass
        case "ngpt":
            return x @ w["lm_head.weight"].T * w["lm_head.scale"] * 4
        case "residual":
            x = x + norm("final_norm.norm")(y)
        case "attnres":
            x = norm("final_norm.norm")(mixture(sources, w["final_norm.query"]))
        case "siamese":
            x = norm("final_norm.norm")(norm("final_norm.norm_x")(x) + norm("final_norm.norm_y")(y))
        case _:
            x = norm("final_norm")(x)
    return x @ w["lm_head.weight"].T


ELSEWHERE = ["pre", "post"]  # test_minimal.py compares these with examples/minimal.py
ELSEWHERE += ["parallel", "minimax", "mhc", "attnres-block"]  # and test_recipes.py these with released code
CELLS = [(name, "rmsnorm", "none") for name in PLACEMENTS if name not in ELSEWHERE] + [
    ("sandwich", "layernorm", "none"), ("siamese", "layernorm", "none"), ("hybrid", "layernorm", "none"),
    ("hybrid", "rmsnorm", "head"), ("hybrid", "rmsnorm", "full"), ("reordered", "rmsnorm", "full"),
    ("residual", "rmsnorm", "head"), ("ngpt", "rmsnorm", "head"),
]  # fmt: skip


@pytest.mark.parametrize("placement, kind, qk_norm", CELLS)
def test_values_and_gradients(placement, kind, qk_norm):
    """And the keys of the state dict, which has no buffers."""
    model = randomize(model_of(placement, norm=kind, qk_norm=qk_norm, tie_embeddings=False), gains=0.4)
    for name, weight in model.named_parameters():
        if name.endswith("residual.a"):  # small: nothing else limits the growth of ReZero's stream
            weight.data.mul_(0.3)
    model = model.double()
    leaves = dict(model.named_parameters())
    assert model.state_dict().keys() == leaves.keys()
    got, expected = model(TOKENS), reference_logits(placement, leaves, TOKENS, CONFIG.layers, qk_norm)
    # both are float64: 1e-16 per operation, amplified by 16 sublayers
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    grad_y = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    weights = list(leaves.values())
    gradients, expected_gradients = (
        torch.autograd.grad((logits * grad_y).sum(), weights) for logits in (got, expected)
    )
    for name, gradient, expected_gradient in zip(leaves, gradients, expected_gradients, strict=True):
        assert gradient.ndim >= 1 and gradient.abs().max() > 0, name  # FSDP2 refuses parameters without dimensions
        assert (gradient - expected_gradient).abs().max() <= 1e-9 * expected_gradient.abs().max(), name


# --- sites and starts ------------------------------------------------------------------------------------------------


def test_rezero_starts_as_the_identity_with_one_scalar_per_sublayer():
    model = model_of("rezero", norm="none")
    with torch.no_grad():
        assert torch.equal(model(TOKENS), model.lm_head(model.embed_tokens(TOKENS)))
    scalars = {name: tensor for name, tensor in model.named_parameters() if tensor.ndim == 1}
    assert len(scalars) == 16 and all(torch.equal(a.detach(), torch.zeros(1)) for a in scalars.values())


def test_ngpt_starts_with_the_scales_of_the_paper():
    """α = 0.05 and s = 1, so the logits are cosines."""
    model: Any = model_of("ngpt", tie_embeddings=False).double()
    with torch.no_grad():
        hidden, logits = model.hidden(TOKENS), model(TOKENS)
        torch.testing.assert_close(hidden.norm(dim=-1), torch.ones(1, 6).double())
        cosines = torch.cosine_similarity(hidden[:, :, None], model.lm_head.weight, dim=-1)
        torch.testing.assert_close(logits, cosines, rtol=1e-6, atol=1e-7)
        x, residual = torch.eye(16).double(), model.layers[0].mlp_residual
        expected = (0.95 * x + 0.05 * x.roll(1, -1)) / math.hypot(0.95, 0.05)
        torch.testing.assert_close(residual(x, lambda x: 7 * x.roll(1, -1)), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_output_norms_are_those_whose_result_is_in_the_stream(placement):
    """So their gains have gradients that do not come through the sublayer, which returns a constant here."""
    model: Any = model_of(placement)
    stream, constant = model.init_stream(model.embed_tokens(TOKENS)), torch.ones(1, 6, CONFIG.dim, requires_grad=True)
    for block in model.layers:
        for residual in (block.attention_residual, block.mlp_residual):
            stream = residual(stream, lambda h, *args: constant)
            total = sum(part.square().sum() for part in PLACEMENTS[placement].streams(stream))
            norms = {name: norm for name, norm in residual.named_children() if isinstance(norm, RMSNorm)}
            gains = [*(norm.weight for norm in norms.values()), constant]
            *gradients, _ = torch.autograd.grad(total, gains, retain_graph=True, allow_unused=True, materialize_grads=True)
            found = [name for name, gradient in zip(norms, gradients, strict=True) if gradient.any()]
            assert found == list(getattr(residual, "output_norms", ()))


@pytest.mark.parametrize("layers, post", [(1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (12, 3)])
def test_mix_is_post_norm_in_the_first_quarter(layers, post):
    blocks = model_of("mix", layers=layers).layers
    for site in ("attention_residual", "mlp_residual"):
        kinds = [type(block.get_submodule(site)) for block in blocks]
        assert kinds == [PostNorm] * post + [PreNorm] * (layers - post)


# --- initialization --------------------------------------------------------------------------------------------------


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
