"""Logit parity with `transformers`: weights of their randomly initialized models are loaded into ours.

`pytest tests/test_parity.py -s` prints the table of errors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from config import ModelConfig
from model import Llama
from runtime.huggingface import from_hugging_face

transformers = pytest.importorskip("transformers")

SIZES = dict(dim=64, layers=3, heads=4, kv_heads=2, hidden_dim=96, context=48, vocab_size=89, rope_theta=500.0)
THEIR_SIZES = dict(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
    max_position_embeddings=48, vocab_size=89, tie_word_embeddings=False, attn_implementation="eager",
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 500.0}


def gemma_to_ours(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gemma's gain is 1 + w. √d is folded into the embedding, so the head is no longer tied to it."""
    gains = {name: 1 + weight for name, weight in state.items() if weight.ndim == 1}
    return state | gains | {"model.embed_tokens.weight": state["model.embed_tokens.weight"] * 64**0.5}


@dataclass(frozen=True)
class Pair:
    """A model of transformers, and the config values that make it and our model equivalent."""

    model: str  # classes in transformers: {model}ForCausalLM, {model}Config
    theirs: dict[str, Any]
    ours: dict[str, Any]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict


PAIRS = [
    Pair("Llama", dict(rms_norm_eps=1e-3), dict(norm_args={"eps": 1e-3})),
    Pair("Qwen3", dict(head_dim=16), dict(qk_norm="head")),
    Pair("Olmo", {}, dict(norm="layernorm", norm_args={"elementwise_affine": False})),
    Pair("Olmo2", dict(rms_norm_eps=1e-6), dict(placement="reordered", qk_norm="full")),
    Pair("StableLm", dict(rope_parameters=ROPE | {"partial_rotary_factor": 1.0}), dict(norm="layernorm")),
    Pair(
        "Gemma2",
        dict(
            head_dim=16, query_pre_attn_scalar=16, hidden_activation="silu", attn_logit_softcapping=None,
            final_logit_softcapping=None, layer_types=["full_attention"] * 3,
        ),
        dict(placement="sandwich"),
        gemma_to_ours,
    ),
]  # fmt: skip


def their_model(pair: Pair) -> Any:
    """A model with random weights: sharp attention, gains far from 1, and logits of about 1."""
    config = getattr(transformers, f"{pair.model}Config")(**THEIR_SIZES | {"rope_parameters": ROPE} | pair.theirs)
    model = getattr(transformers, f"{pair.model}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 2:
                weight.copy_(noise / math.sqrt(weight.shape[-1]))
            else:
                center = 0 if name.endswith("bias") or pair.model.startswith("Gemma") else 1
                weight.copy_(center + 0.3 * noise)
    return model


def our_model(pair: Pair, state: dict[str, Tensor]) -> Llama:
    config = ModelConfig(**SIZES | {"tie_embeddings": False} | pair.ours)
    model = Llama(config).eval()
    model.load_state_dict(from_hugging_face(pair.convert(state), config))
    return model


TOKENS = torch.randint(0, 89, (32, 48), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def logit_errors(pair: Pair) -> tuple[float, float, float]:
    """Errors of the logits: the largest difference in fp32, and in bf16 the RMS error of our model and of theirs.

    In bf16 both models have bf16 matrices and a bf16 residual stream. Their gains are bf16, ours are the same values in
    fp32. Both are compared with their model in float64 with the same bf16-rounded weights.
    """
    theirs = their_model(pair)
    ours = our_model(pair, theirs.state_dict())
    fp32 = float((ours(TOKENS) - theirs(TOKENS).logits).abs().max())
    for weight in theirs.parameters():  # not `theirs.bfloat16()`, which would round the RoPE frequencies too
        weight.data = weight.bfloat16()
    exact = their_model(pair).double()
    exact.load_state_dict(theirs.state_dict())
    ours = our_model(pair, {name: weight.float() for name, weight in theirs.state_dict().items()})
    for weight in ours.parameters():
        if weight.ndim == 2:
            weight.data = weight.bfloat16()
    bf16_logits = (ours(TOKENS), theirs(TOKENS).logits)
    assert all(logits.dtype == torch.bfloat16 for logits in bf16_logits)
    ours_bf16, theirs_bf16 = (float((logits - exact(TOKENS).logits).square().mean().sqrt()) for logits in bf16_logits)
    return fp32, ours_bf16, theirs_bf16


@pytest.fixture(scope="module")
def errors() -> dict[str, tuple[float, float, float]]:
    table = {pair.model: logit_errors(pair) for pair in PAIRS}
    print("\n\n| model | fp32 max error | bf16 RMS error, ours | bf16 RMS error, theirs |\n|---|---|---|---|")
    for model, (fp32, ours, theirs) in table.items():
        print(f"| {model} | {fp32:.1e} | {ours:.2e} | {theirs:.2e} |")
    return table


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.model)
def test_logits_match_transformers(pair, errors):
    fp32, ours, theirs = errors[pair.model]
    assert fp32 <= 1e-5
    assert ours <= theirs


def test_placement_without_hugging_face_names_is_refused():
    with pytest.raises(
        ValueError, match="no Hugging Face model uses --placement post; supported: pre, reordered, sandwich"
    ):
        from_hugging_face({}, ModelConfig(placement="post"))
