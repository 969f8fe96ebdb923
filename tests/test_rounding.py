"""Weights in fewer bits against the float32 model, autocast, and int8 products by hand."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import decode
from config import ModelConfig
from decode import Product
from machine import has_bfloat16
from model import Linear, Llama
from rounding import Int8Product, round_weights

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
needs_kernels = pytest.mark.skipif(not decode.available(), reason="no C compiler")
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(CPU), reason="the processor does not compute in bfloat16")


def vivid(changes: dict) -> Llama:
    model = Llama(dataclasses.replace(BASE, **changes)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise / math.sqrt(weight.shape[-1]) if weight.ndim == 2 else 1 + 0.3 * noise)
    return model


def rounded(changes: dict, dtype: torch.dtype) -> Llama:
    model = vivid(changes)
    round_weights(model, dtype)
    return model


def of_rounded_weights(changes: dict, dtype: torch.dtype) -> Llama:
    """The plain float64 model, its matrices replaced by the numbers that `dtype` keeps of them."""
    model = vivid({**changes, "tie_embeddings": False})
    if changes.get("tie_embeddings", True):
        model.lm_head.weight = torch.nn.Parameter(model.embed_tokens.weight.detach().clone())
    for module in model.modules():
        if isinstance(module, Linear):
            if dtype == torch.int8:
                steps = (module.weight.detach().abs().amax(1, keepdim=True) / 127).bfloat16()
                kept = (module.weight.detach().double() / steps).round().clamp(-127, 127) * steps
            else:
                kept = module.weight.detach().to(dtype)
            module.weight = torch.nn.Parameter(kept.double())
    return model.double()


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).square().mean().sqrt())


def step_by_step(model: Llama, first: int = 8) -> Tensor:
    """Logits of what follows each token from number `first` on, B T V, a token at a time after the first ones."""
    cache = model.new_cache()
    steps = [model.next_logits(TOKENS[:, :first], cache)]
    return torch.stack([*steps, *(model.next_logits(token, cache) for token in TOKENS[:, first:].T.unsqueeze(-1))], 1)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.inference_mode()
def test_half_the_bits_are_what_autocast_computes(changes):
    with torch.autocast("cpu", torch.float16):
        autocast = vivid(changes)(TOKENS)
    assert torch.equal(rounded(changes, torch.float16)(TOKENS), autocast)


@needs_bfloat16
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.inference_mode()
def test_a_prompt_in_bfloat16_is_as_exact_as_autocast(changes):
    model = vivid(changes)
    exact = model(TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = model(TOKENS)
    assert 0 < error(rounded(changes, torch.bfloat16)(TOKENS), exact) < 1.1 * error(autocast, exact)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.inference_mode()
def test_token_by_token_only_the_weights_are_rounded(changes, dtype):
    if dtype == torch.bfloat16 and not has_bfloat16(CPU):
        pytest.skip("the processor does not compute in bfloat16")
    expected = of_rounded_weights(changes, dtype)(TOKENS)
    # in float32, some 20 sums of about 100 terms one after the other
    assert error(step_by_step(rounded(changes, dtype), first=1), expected) < 1e-5 * error(expected, expected.mean())


@needs_bfloat16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.inference_mode()
def test_token_by_token_equals_the_whole(changes, kernels, dtype, monkeypatch):
    if not kernels:
        monkeypatch.setattr(decode, "library", lambda source: (None, "there is no compiler"))
        decode.functions.cache_clear()
    model = rounded(changes, dtype)
    # both are roundings of the same float32 logits
    limit = 1.5 * error(rounded(changes, torch.bfloat16)(TOKENS), vivid(changes)(TOKENS))
    assert error(step_by_step(model), model(TOKENS)[:, 7:]) < limit
    decode.functions.cache_clear()


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """By complex numbers: features i and i + D/2 are the parts of one."""
    a, b = x.chunk(2, -1)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), -1)


@needs_kernels
@pytest.mark.parametrize("batch, heads, kv_heads, head_dim", [(1, 6, 6, 48), (3, 4, 2, 6), (2, 5, 1, 34), (1, 1, 1, 2)])
@pytest.mark.parametrize("spread", [0.3, 30.0])
@torch.inference_mode()
def test_attention_of_one_more_token(batch, heads, kv_heads, head_dim, spread):
    generator = torch.Generator().manual_seed(3)
    context, seen = 40, 37
    keys, values = torch.randn(2, batch, kv_heads, context, head_dim, generator=generator) * spread
    before = keys.clone(), values.clone()
    qkv = torch.randn(batch, 1, heads + 2 * kv_heads, head_dim, generator=generator)  # strided, as from one product
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 2)
    angles = torch.rand(1, head_dim // 2, generator=generator, dtype=torch.float64) * 9
    rope = angles.cos().float(), angles.sin().float()
    attend = decode.Attend(keys, values, heads)
    got = attend(q, k, v, rope, seen)
    assert torch.equal(attend(q.clone(), k.contiguous(), v.transpose(0, 1).clone().transpose(0, 1), rope, seen), got)

    new_k, new_v = turned(k.double(), angles).transpose(1, 2), v.double().transpose(1, 2)
    all_k, all_v = (
        torch.cat((old[:, :, :seen].double(), new), 2) for old, new in zip(before, (new_k, new_v), strict=True)
    )
    all_k, all_v = (x.repeat_interleave(heads // kv_heads, 1) for x in (all_k, all_v))
    scores = turned(q.double(), angles).transpose(1, 2) @ all_k.mT / math.sqrt(head_dim)
    expected = (scores.softmax(-1) @ all_v).transpose(1, 2).flatten(2)
    # a score is off by 2^-24 of what is added up in it, up to some 300 with the large spread: e to that power
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-5 * spread)
    torch.testing.assert_close(keys[:, :, seen : seen + 1].double(), new_k, rtol=0, atol=1e-6)
    others = torch.arange(context) != seen
    assert all(
        torch.equal(now[:, :, others], then[:, :, others]) for now, then in zip((keys, values), before, strict=True)
    )


@needs_kernels
@torch.inference_mode()
def test_what_is_not_a_number_stays_none():
    keys = torch.zeros(1, 1, 8, 16)
    q, k, v = torch.ones(3, 1, 1, 1, 16)
    q[..., 3] = math.nan
    rope = torch.ones(1, 8), torch.zeros(1, 8)
    assert decode.Attend(keys, keys.clone(), 1)(q, k, v, rope, 2).isnan().all()
    assert Product(torch.ones(4, 16))(q).isnan().all()


@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("outputs, inputs", [(48, 64), (1, 1), (7, 33), (130, 15), (257, 512)])
@torch.inference_mode()
def test_products_of_a_few_rows(rows, outputs, inputs):
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    whole, steps = torch.randint(-127, 128, weight.shape, generator=generator).to(torch.int8), weight[:, 0].exp()
    for product, kept in (
        (Product(weight), weight.double()),
        (Product(weight.bfloat16()), weight.bfloat16().double()),
        (Product(whole, steps), whole * steps.double()[:, None]),
    ):
        got, expected = product(x), x.double() @ kept.T
        assert got.dtype == torch.float32 and got.shape == expected.shape
        # each of `inputs` roundings is at most 2^-24 of the sum of what is added up
        torch.testing.assert_close(
            got.double(), expected, rtol=0, atol=float((x.double().abs() @ kept.abs().T).max()) * 1e-6
        )
        strided = torch.stack((x, x), -1).view(1, rows, -1)[..., ::2]
        assert torch.equal(product(strided), got[None])


@torch.inference_mode()
def test_int8_products_by_hand():
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(48, 64, generator=generator) * torch.logspace(-3, 2, 48).unsqueeze(1)
    weight[5] = 0
    x = torch.randn(2, 3, 64, generator=generator)
    got = Int8Product(weight)(x)
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
    model, before = rounded({}, torch.float16), vivid({})
    kept = dict(model.named_parameters())
    names = {name for name, _ in before.named_parameters() if "proj" not in name}
    assert names == kept.keys() and all(torch.equal(kept[name], before.get_parameter(name)) for name in names)
    assert model.lm_head.weight.dtype == torch.float16 and model.embed_tokens.weight.dtype == torch.float32
    assert model.hidden(TOKENS).dtype == torch.float32
