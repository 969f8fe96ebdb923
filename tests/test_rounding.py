"""Weights in fewer bits against the float32 model, autocast, and int8 products by hand."""

import copy
import dataclasses
import gc
import math
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import decode
from config import ModelConfig
from decode import Product, Tape, Value
from machine import has_bfloat16
from model import BlockCache, KVCache, Linear, Llama
from norms import KINDS, build_norm
from norms.calling import noted
from norms.fused import normalise
from norms.placement import PLACEMENTS
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


def step_by_step(model: Llama, first: int = 8, tokens: Tensor = TOKENS) -> Tensor:
    """Logits of what follows each token from number `first` on, B T V, a token at a time after the first ones."""
    cache = model.new_cache()
    steps = [model.next_logits(tokens[:, :first], cache)]
    return torch.stack([*steps, *(model.next_logits(token, cache) for token in tokens[:, first:].T.unsqueeze(-1))], 1)


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


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_the_same_on_other_processors(dtype, without_avx512):
    test_token_by_token_only_the_weights_are_rounded({}, dtype)


def test_weights_are_rounded_once():
    model = rounded({}, torch.bfloat16)
    for wrong in (model, vivid({}).bfloat16()):
        with pytest.raises(ValueError, match="only once"):
            round_weights(wrong, torch.bfloat16)


@needs_bfloat16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.inference_mode()
def test_token_by_token_equals_the_whole(changes, kernels, dtype, monkeypatch):
    if not kernels:
        monkeypatch.setattr(decode, "library", lambda source: (None, "there is no compiler"))
    model = rounded(changes, dtype)
    # both are roundings of the same float32 logits
    limit = 1.5 * error(rounded(changes, torch.bfloat16)(TOKENS), vivid(changes)(TOKENS))
    assert error(step_by_step(model), model(TOKENS)[:, 7:]) < limit


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """By complex numbers: features i and i + D/2 are the parts of one."""
    a, b = x.chunk(2, -1)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), -1)


def rms_normed(x: Tensor, norm: Any) -> Tensor:
    if isinstance(norm, torch.nn.Identity):
        return x
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def recording(shape: tuple[int, ...], context: int = 1) -> Value:
    tape = Tape(context)
    return Value(tape, tape.room(*shape))


@needs_kernels
@pytest.mark.parametrize("batch, heads, kv_heads, head_dim", [(1, 6, 6, 48), (3, 4, 2, 6), (2, 5, 1, 34), (1, 1, 1, 2)])
@pytest.mark.parametrize("on_tape, qk_norm", [(True, "none"), (True, "head"), (False, "none"), (False, "head")])
@pytest.mark.parametrize("spread", [0.3, 30.0])
@torch.inference_mode()
def test_attention_of_one_more_token(batch, heads, kv_heads, head_dim, on_tape, qk_norm, spread):
    generator = torch.Generator().manual_seed(3)
    dim, context, seen = heads * head_dim, 40, 37
    shape = dict(dim=dim, layers=1, heads=heads, kv_heads=kv_heads, context=context, qk_norm=qk_norm)
    plain: Any = vivid(shape).layers[0].self_attn
    cache = BlockCache(context)
    cache.length = seen
    cache.keys, cache.values = torch.randn(2, batch, kv_heads, context, head_dim, generator=generator) * spread
    before = cache.keys.clone(), cache.values.clone()
    x = torch.randn(batch, 1, dim, generator=generator)
    angles = torch.rand(1, head_dim // 2, generator=generator, dtype=torch.float64) * 9
    rope = angles.cos().float(), angles.sin().float()
    if on_tape:
        products: Any = copy.copy(plain)  # by C, as are the norms
        vars(products)["qkv"] = Product(torch.cat([part.weight for part in plain.qkv.parts]))
        vars(products)["o_proj"] = Product(plain.o_proj.weight)
        if qk_norm == "head":
            vars(products).update(q_norm=decode.Norm(plain.q_norm), k_norm=decode.Norm(plain.k_norm))
        start = recording((batch, 1, dim), context)
        end = decode.Attention(products)(start, rope)
        start.data.copy_(x)
        start.tape.play(rope, [cache])
        got = end.data
    else:
        got = decode.Attention(plain)(x, rope, cache)

    q, k, v = (
        (x.double() @ part.weight.double().T).view(batch, 1, -1, head_dim).transpose(1, 2) for part in plain.qkv.parts
    )
    q, k = (turned(rms_normed(part, norm), angles) for part, norm in ((q, plain.q_norm), (k, plain.k_norm)))
    all_k, all_v = (
        torch.cat((old[:, :, :seen].double(), new), 2).repeat_interleave(heads // kv_heads, 1)
        for old, new in zip(before, (k, v), strict=True)
    )
    mixed = (q @ all_k.mT / math.sqrt(head_dim)).softmax(-1) @ all_v
    expected = mixed.transpose(1, 2).flatten(2) @ plain.o_proj.weight.double().T
    # a score is off by 2^-24 of what is added up in it, up to some 300 with the large spread: e to that power
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-5 * spread)
    assert cache.length == seen + 1
    for now, then, new in zip((cache.keys, cache.values), before, (k, v), strict=True):
        torch.testing.assert_close(now[:, :, seen : seen + 1].double(), new, rtol=0, atol=3e-6)
        assert torch.equal(now[:, :, :seen], then[:, :, :seen])
        assert torch.equal(now[:, :, seen + 1 :], then[:, :, seen + 1 :])


@needs_kernels
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("dim, hidden", [(288, 768), (34, 33), (6, 3), (2, 17)])
@torch.inference_mode()
def test_mlp_of_one_more_token(rows, dim, hidden):
    plain: Any = vivid(dict(dim=dim, heads=1, kv_heads=1, hidden_dim=hidden)).layers[0].mlp
    gate, up, down = (part.weight for part in (plain.gate_proj, plain.up_proj, plain.down_proj))
    products: Any = copy.copy(plain)
    vars(products).update(gate_up=Product(torch.cat((gate, up))), down_proj=Product(down))
    start = recording((rows, 1, dim))
    end = decode.MLP(products)(start)
    x = start.data.copy_(torch.randn(rows, 1, dim, generator=torch.Generator().manual_seed(rows)) * 9).double()
    start.tape.play((torch.empty(0), torch.empty(0)), [])
    gate, up, down = gate.double(), up.double(), down.double()
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    # each rounding is at most 2^-24 of the sum of what is added up
    largest = ((x.abs() @ gate.abs().T) * (x.abs() @ up.abs().T)) @ down.abs().T
    torch.testing.assert_close(end.data.double(), expected, rtol=0, atol=float(largest.max()) * 1e-7)


CELLS = [(kind, "pre") for kind in KINDS] + [("rmsnorm", placement) for placement in PLACEMENTS]


@needs_kernels
@pytest.mark.parametrize("rows, qk_norm", [(3, "none"), (1, "head"), (1, "full")])
@pytest.mark.parametrize("norm, placement", CELLS)
@torch.inference_mode()
def test_every_norm_and_placement_is_recorded(norm, placement, rows, qk_norm):
    changes = dict(norm=norm, placement=placement, qk_norm=qk_norm)
    model, plain = rounded(changes, torch.float32), vivid(changes).double()
    tape = decode.recorded(model, rows)
    assert tape and (len(tape.parts) == 1 or (placement == "hybrid" and rows == 3))  # one call of C
    got = step_by_step(model, first=1, tokens=TOKENS[:rows])
    expected = plain(TOKENS[:rows])
    # in float32, some 20 sums of about 100 terms one after the other
    assert error(got, expected) < 1e-5 * error(expected, expected.mean())


@needs_kernels
@torch.inference_mode()
def test_norms_that_are_not_one_function_of_c():
    norm: Any = build_norm("rmsnorm", 64)
    generator = torch.Generator().manual_seed(5)
    others: list[Callable] = [
        lambda x: 2 * norm(x),  # something is done after the function,
        lambda x: norm(2 + x),  # before it,
        lambda x: norm(norm(x)),  # it is two functions,
        lambda x: normalise(norm.formula, norm.statistics, x, 1 + x[0, 0]),  # or is given something else for each token
        lambda x: x / x.abs().amax(-1, keepdim=True),  # or there is none
    ]
    for other in others:
        start = recording((3, 1, 64))
        end = start.tape.norm(other, start) + start
        for _ in range(2):
            x = start.data.copy_(torch.randn(3, 1, 64, generator=generator))
            start.tape.play((torch.empty(0), torch.empty(0)), [])
            assert torch.equal(end.data, other(x) + x)


@needs_kernels
@torch.inference_mode()
def test_functions_of_c_that_a_tape_cannot_call(monkeypatch):
    norm, start = build_norm("rmsnorm", 64), recording((3, 1, 64))
    monkeypatch.setattr(decode, "NORM_ARGUMENTS", (3, 11))  # it has 5
    start.tape.norm(norm, start)
    assert callable(start.tape.parts[0])
    with noted() as calls:
        pass
    norm(start.data)
    assert not calls


@needs_kernels
def test_a_norm_by_formula_in_any_mode():
    changes = dict(norm_args={"cast_order": "llama"}, qk_norm="head")
    model, expected = rounded(changes, torch.float32), vivid(changes)(TOKENS)[:, 7:]
    with torch.inference_mode():
        torch.testing.assert_close(step_by_step(model), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(step_by_step(model), expected, rtol=0, atol=1e-5)


@needs_kernels
@torch.inference_mode()
def test_what_cannot_be_recorded_is_not():
    half, other = recording((2, 1, 64)).split([32, 32], -1)
    for values in (
        (half, other),
        (recording((2, 1, 64)), recording((2, 1, 1))),
    ):  # not together, not alike
        with pytest.raises(decode.Unrecordable):
            values[0] + values[1]
    gain = torch.linspace(1, 2, 64)
    for start in (torch.tanh, lambda x: x * gain, lambda x: x + gain[:1], lambda x: x + 0):
        model, plain = rounded({}, torch.float32), vivid({})
        for each in (model, plain):
            vars(each)["placement"] = dataclasses.replace(each.placement, start=start)
        assert decode.recorded(model, 1) is None
        torch.testing.assert_close(step_by_step(model), plain(TOKENS)[:, 7:], rtol=0, atol=1e-5)


@needs_kernels
@torch.inference_mode()
def test_caches_that_do_not_fit():
    model, plain = rounded({}, torch.float32), vivid({})
    for context in (24, 64):  # neither is the model's
        cache = KVCache(2, context)
        steps = [model.next_logits(tokens, cache) for tokens in TOKENS.split(1, 1)]
        torch.testing.assert_close(torch.stack(steps, 1), plain(TOKENS), rtol=0, atol=1e-5)
    cache = model.new_cache()
    model.next_logits(TOKENS[:1], cache)
    with pytest.raises(AssertionError):  # of one sequence, not of three
        model.next_logits(TOKENS[:, :1], cache)
    with pytest.raises(IndexError):
        model.next_logits(TOKENS[:1, :0], cache)
    for length in range(24, 32):
        assert cache.length == length
        model.next_logits(TOKENS[:1, :1], cache)
    with pytest.raises(ValueError, match="context"):
        model.next_logits(TOKENS[:1, :1], cache)
    block: Any = model.layers[0]
    with pytest.raises(AssertionError):  # full
        block.self_attn(torch.zeros(1, 1, 64), model.rope(31, 1), cache.blocks[0])


@needs_kernels
@torch.inference_mode()
def test_a_rounded_model_is_freed_with_its_last_name():
    model = rounded({}, torch.float32)
    step_by_step(model)
    freed = weakref.ref(model)
    gc.disable()
    del model
    gc.enable()
    assert freed() is None


@needs_kernels
@torch.inference_mode()
def test_other_numbers_of_sequences_in_turn():
    model, expected = rounded({}, torch.float32), vivid({})(TOKENS)
    caches = [(rows, model.new_cache()) for rows in (1, 3, 2)]
    for position, tokens in enumerate(TOKENS.split(1, 1)):
        for rows, cache in caches:
            got = model.next_logits(tokens[:rows], cache)
            torch.testing.assert_close(got, expected[:rows, position], rtol=0, atol=1e-5)
    one_more: Any = model.next_logits
    last, cache = one_more.rows, model.new_cache()
    for tokens in TOKENS[:1, :2].expand(33, -1).split(1, 1):  # more than decode.c is the faster one for
        model.next_logits(tokens, cache)
    assert one_more.rows == last


@needs_kernels
def test_a_tape_is_played_by_one_thread_at_a_time_in_any_mode():
    model = rounded(dict(dim=288, heads=6, kv_heads=3, hidden_dim=300), torch.float32)
    with torch.inference_mode():
        alone = step_by_step(model)

    @torch.no_grad()
    def logits(_: int) -> Tensor:
        return step_by_step(model)

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(each, alone) for each in pool.map(logits, range(8)))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@torch.inference_mode()
def test_neither_threads_nor_other_samples_change_a_bit(dtype, each_number_of_threads):
    if dtype == torch.bfloat16 and not has_bfloat16(CPU):
        pytest.skip("the processor does not compute in bfloat16")
    model = rounded(dict(dim=288, heads=6, kv_heads=3, hidden_dim=300, vocab_size=301), dtype)  # enough for two threads
    logits = each_number_of_threads(lambda: step_by_step(model, first=1)[:, 1:])
    assert all(torch.equal(those, logits[0]) for those in logits)
    cache, alone = model.new_cache(), []
    for token in TOKENS[1]:
        alone.append(model.next_logits(token.view(1, 1), cache))
    assert torch.equal(torch.cat(alone)[1:], logits[0][1])


@needs_kernels
@torch.inference_mode()
def test_what_is_not_a_number_stays_none():
    model = rounded({}, torch.float32)
    x = torch.ones(1, 1, 64)
    x[..., 3] = math.nan
    block: Any = model.layers[0]
    cache, rope = model.new_cache(), model.rope(2, 1)
    model.next_logits(TOKENS[:1, :2], cache)
    assert block.self_attn(x, rope, cache.blocks[0]).isnan().all()
    assert block.mlp(x).isnan().all()
    assert Product(torch.ones(4, 64))(x).isnan().all()


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
