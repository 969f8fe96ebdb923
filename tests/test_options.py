"""Options of attention, MLP, embedding and loss: off by default, and what holds for each in training and generation.

What they compute is compared with released models in test_recipes.py, and here with formulas where no recipe has it.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch

from config import ModelConfig
from model import Llama
from norms.placement import PLACEMENTS
from roles import matrices
from runtime.huggingface.architectures import to_theirs
from runtime.watch import measure_sites
from sampling import cast_matrices
from tests.random_values import drawn, randomize

SMALL = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, hidden_dim=48, context=16, vocab_size=29)
TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8]])
OPTIONS: list[dict[str, Any]] = [
    {"mlp": "plain"},
    {"activation": "relu2"},
    {"activation": "gelu_tanh"},
    {"attention_gate": "head"},
    {"attention_gate": "element", "gate_activation": "softplus"},
    {"attention_cap": 0.5},
    {"logit_cap": 2.0},
    {"embedding_norm": "plain"},
    {"embedding_norm": "gain"},
    {"embedding_scale": "sqrt"},
    {"qk_norm_args": {"elementwise_affine": False}, "qk_norm": "head"},
    {"qk_norm_after_rope": True, "qk_norm": "full"},
    {"attention_bias": True},
    {"v_norm": True},
    {"inner_norm": True},
    {"norm_args": {"zero_centered": True}},
    {"placement": "parallel"},
    {"placement": "minimax", "placement_args": {"alpha": 2.0, "beta": 0.5}},
    {"placement": "mhc"},
    {"placement": "mhc", "placement_args": {"streams": 2, "end": "mean"}},
    {"placement": "attnres"},
    {"placement": "attnres-block", "placement_args": {"layers": 1, "normalize_values": True, "scale_scores": False}},
    {"z_loss": 0.1},
]
NAMES = [str(option.get("placement", next(iter(option)))) for option in OPTIONS]


def random_weights_model(**options: Any) -> Llama:
    """A model in float64 in which every weight matters."""
    return randomize(Llama(dataclasses.replace(SMALL, **{"qk_norm": "head"} | options)), matrices=1.5).double()


def assert_same_with_a_cache(decoder: Any, model: Llama) -> None:
    """The decoder takes several tokens at a time, and then one."""
    cache, ends = decoder.new_cache(), [4, 7, 8]
    for part, end in zip(TOKENS.split([4, 3, 1], dim=1), ends, strict=True):
        found, expected = decoder.next_logits(part, cache), model(TOKENS[:, :end])[:, -1]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # the table of RoPE is in fp32


@pytest.mark.parametrize("option", OPTIONS, ids=NAMES)
def test_an_option_is_off_by_default_and_changes_no_initial_weight(option):
    """And it changes what is computed, so Llama does not have it."""
    plain, other = Llama(SMALL, seed=3), Llama(dataclasses.replace(SMALL, **option), seed=3)
    before = {name: weight for _, name, weight in matrices(plain)}
    after = {name: weight for _, name, weight in matrices(other)}
    assert all("mlp.gate" in name for name in before.keys() - after.keys())
    assert all("attn.gate" in name or "maps" in name for name in after.keys() - before.keys())
    for name, weight in after.items():
        assert torch.equal(weight, before[name] if name in before else 0.02 * drawn(3, name, weight.shape)), name
    name = next(iter(option))
    if name == "z_loss":  # training only
        assert to_theirs(other.config)["model_type"] == "llama"
        return
    assert not torch.equal(random_weights_model(**option)(TOKENS), random_weights_model()(TOKENS))
    named = "zero_centered" if name == "norm_args" else name
    if expressed := {"attention_bias": "qwen2", "embedding_scale": "granite"}.get(name):
        assert to_theirs(other.config)["model_type"] == expressed
    else:
        with pytest.raises(ValueError, match=f"no Hugging Face architecture computes this: .*{named}"):
            to_theirs(other.config)


@pytest.mark.parametrize("option", OPTIONS, ids=NAMES)
def test_generation_with_a_cache_is_that_without(option):
    """Gradient checkpointing leaves a model with a cache alone. And --watch sees the model."""
    model = random_weights_model(**option)
    model.recompute = True
    assert_same_with_a_cache(model, model)
    rows = measure_sites(model, TOKENS)
    assert not any(column.startswith("second") for row in rows for column in row)  # no option has two streams
    assert len(rows) == 6 and all(math.isfinite(row["max_logit"]) for row in rows if row["site"] == "attention")


@pytest.mark.parametrize("option", [{}, *(x for x in OPTIONS if "placement" in x), {"placement": "ngpt"}], ids=str)
def test_the_stream_and_its_maps_are_in_fp32_also_in_mixed_precision(option):
    """And when matrices are stored in bf16 for generation. A model that is bf16 throughout runs as well."""
    model: Any = Llama(dataclasses.replace(SMALL, **option)).eval()
    streams, seen = PLACEMENTS[model.config.placement].streams, list[torch.Tensor]()
    for block in model.layers:
        block.register_forward_hook(lambda module, args, output: seen.extend(streams(output)))
    for module in model.modules():
        if getattr(getattr(module, "role", None), "name", "") == "stream_map":
            module.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.autocast("cpu", torch.bfloat16):
        model(TOKENS)
    assert {x.dtype for x in seen} == {torch.float32} and len(seen) >= SMALL.layers
    cast_matrices(model, torch.bfloat16)
    low = {name for name, weight in model.named_parameters() if weight.dtype == torch.bfloat16}
    assert low == {name for name in dict(model.named_parameters()) if name.endswith(("_proj.weight", "lm_head.weight"))}
    logits = model.bfloat16()(TOKENS)
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()


def test_the_embedding_is_scaled_after_its_norm():
    """By a constant and by a learned number, at first the square root of the width."""
    options: dict[str, Any] = dict(embedding_norm="gain", embedding_scale=3.0, scaled_embedding=True)
    embedding: Any = Llama(dataclasses.replace(SMALL, **options)).embed_tokens
    assert embedding.scale.item() == pytest.approx(math.sqrt(SMALL.dim))
    expected = 3 * 0.5 * embedding.norm(embedding.weight[TOKENS])
    embedding.scale.data.fill_(0.5)
    torch.testing.assert_close(embedding(TOKENS), expected)
