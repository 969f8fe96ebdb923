"""Weights in fewer bits against the float32 model, autocast, and int8 products by hand."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from config import ModelConfig
from generate import Sampling, compile_step, generate
from machine import has_bfloat16
from model import Llama
from rounding import Int8Linear, round_weights

CPU = torch.device("cpu")
BASE = ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, hidden_dim=96, context=32, vocab_size=101)
TOKENS = torch.randint(0, 101, (3, 24), generator=torch.Generator().manual_seed(0))
VARIANTS = [
    {},
    {"tie_embeddings": False, "qk_norm": "head"},
    {"placement": "post", "qk_norm": "full"},
    {"placement": "siamese"},
    {"placement": "hybrid", "norm": "layernorm"},
]
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(CPU), reason="the processor does not compute in bfloat16")


def vivid(changes: dict) -> Llama:
    model = Llama(dataclasses.replace(BASE, **changes)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise / math.sqrt(weight.shape[-1]) if weight.ndim == 2 else 1 + 0.3 * noise)
    return model


def rounded(changes: dict, dtype: torch.dtype, pack: bool = True) -> Llama:
    model = vivid(changes)
    round_weights(model, dtype, pack)
    return model


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected).square().mean().sqrt())


@needs_bfloat16
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.inference_mode()
def test_bfloat16_weights_are_what_autocast_computes(changes):
    model = vivid(changes)
    exact = model(TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = model(TOKENS)
    assert torch.equal(rounded(changes, torch.bfloat16, pack=False)(TOKENS), autocast)
    # packed products sum in another order, which now and then rounds to the neighbour: as large an error, other digits
    packed = rounded(changes, torch.bfloat16)(TOKENS)
    assert packed.dtype == torch.bfloat16
    assert 0 < error(packed, exact) < 1.1 * error(autocast, exact)


@needs_bfloat16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.inference_mode()
def test_token_by_token_equals_the_whole(changes, dtype):
    model = rounded(changes, dtype)
    whole, cache = model(TOKENS), model.new_cache()
    steps = [model.next_logits(TOKENS[:, :8], cache)] + [
        model.next_logits(token, cache) for token in TOKENS[:, 8:].T.unsqueeze(-1)
    ]
    # both are roundings of the same float32 logits
    limit = 1.5 * error(rounded(changes, torch.bfloat16)(TOKENS), vivid(changes)(TOKENS))
    assert error(torch.stack(steps, 1), whole[:, 7:].float()) < limit


@torch.inference_mode()
def test_int8_products_by_hand():
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(48, 64, generator=generator) * torch.logspace(-3, 2, 48).unsqueeze(1)
    weight[5] = 0
    x = torch.randn(2, 3, 64, generator=generator)
    got = Int8Linear(weight)(x)
    steps = (weight.abs().amax(1) / 127).bfloat16().double().clamp(min=1e-30)
    whole = (weight.double() / steps[:, None]).round().clamp(-127, 127)
    expected = x.bfloat16().double() @ whole.T * steps
    assert got.dtype == torch.bfloat16 and torch.equal(got[..., 5], torch.zeros(2, 3, dtype=torch.bfloat16))
    # the result is rounded to bfloat16: half of 2^-7 of it, and the sum of 64 in fp32 comes to less
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=2e-6)
    # and a whole number of steps is at most half a step off, or one where the step itself was rounded down
    assert ((whole * steps[:, None] - weight).abs() <= steps[:, None]).all()


@torch.inference_mode()
def test_only_matrix_products_are_rounded():
    model, before = rounded({}, torch.bfloat16, pack=False), vivid({})
    kept = dict(model.named_parameters())
    names = {name for name, _ in before.named_parameters() if "proj" not in name}
    assert names == kept.keys() and all(torch.equal(kept[name], before.get_parameter(name)) for name in names)
    assert model.lm_head.weight.dtype == torch.bfloat16 and model.embed_tokens.weight.dtype == torch.float32
    assert model.hidden(TOKENS).dtype == torch.float32


@pytest.mark.slow
def test_the_compiled_step_gives_the_tokens_of_the_eager_one():
    model, greedy = vivid({}), Sampling(tokens=20, temperature=0)
    eager = list(generate(model, [7, 8], greedy, 0, 2))
    assert list(generate(model, [7, 8], greedy, 0, 2, compile_step(model, 2))) == eager
