"""Products, MLP and attention of one new token against the plain modules in float64."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fast.decode
from config import ModelConfig
from fast import accelerate, decode
from model import Attention, LayerCache, Linear, Rope, SwiGLU


def linear(x: Tensor, holder: Any) -> Any:
    return decode.linear(x, holder, "inner")


class RoundedCache(LayerCache):
    """Rounds what it keeps to bf16."""

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().extend(k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype))


class Holder(nn.Module):
    """A linear module in a module."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.inner = Linear(inputs, outputs)
        nn.init.normal_(self.inner.weight)
        self.inner.to(dtype)
        self.eval()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def config(**settings: Any) -> ModelConfig:
    return ModelConfig(**{"dim": 72, "heads": 6, "hidden_dim": 100, "layers": 1, "vocab_size": 300} | settings)


def filled(module: Any, dtype: torch.dtype) -> Any:
    """`module` with weights of about the size that keeps activations at 1."""
    for linear in module.modules():
        if isinstance(linear, Linear):
            linear.weight.data = (draw(*linear.weight.shape) * linear.in_features**-0.5).to(dtype)
    return module.eval()


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> Iterator[list[str]]:
    """Without gradients; what the kernels are called for."""
    names: list[str] = []
    real = fast.decode.kernels

    def noticed() -> Any:
        names.append("called")
        return real()

    monkeypatch.setattr(fast.decode, "kernels", noticed)
    with torch.inference_mode():
        yield names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs, outputs", [(288, 768), (5, 3), (64, 1), (33, 130), (100, 257)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16])
def test_products(dtype, inputs, outputs, rows, same_bits_on_any_threads):
    """Within 4 units of 2^-23 of the sum of the products' sizes; the same for a row alone, on any threads."""
    holder, x = Holder(inputs, outputs, dtype), draw(rows, inputs)
    y = linear(x, holder)
    assert y is not None and y.dtype == torch.float32
    w = holder.inner.weight.double()
    assert ((y - x.double() @ w.T).abs() <= 4 * 2**-23 * (x.double().abs() @ w.abs().T)).all()
    for row in range(rows):
        assert torch.equal(linear(x[row : row + 1], holder)[0], y[row])
    same_bits_on_any_threads(lambda: [linear(x, holder)])


def test_products_of_strided_rows_and_of_too_many(calls):
    holder = Holder(32, 7)
    x = draw(3, 4, 32)[:, -1]
    assert torch.equal(linear(x, holder), linear(x.contiguous(), holder))
    assert linear(draw(32, 32), holder) is not None
    assert linear(draw(33, 32), holder) is None
    assert linear(draw(0, 32), holder) is None
    assert linear(draw(1, 31), holder) is None
    assert linear(draw(1, 32).double(), holder) is None


def test_only_a_plain_linear_is_left_to_the_kernel():
    x = draw(1, 32)

    def refused(change: Any) -> bool:
        holder = Holder(32, 7)
        change(holder)
        return linear(x, holder) is None

    class Adapter(Linear):
        pass

    assert not refused(lambda holder: None)
    assert refused(lambda holder: setattr(holder, "inner", Adapter(32, 7)))
    assert refused(lambda holder: setattr(holder, "inner", nn.Linear(32, 7)))
    assert refused(lambda holder: holder.inner.register_forward_hook(lambda *args: None))
    assert refused(lambda holder: holder.inner.register_forward_pre_hook(lambda *args: None))
    assert refused(lambda holder: holder.inner.register_full_backward_hook(lambda *args: None))
    assert refused(lambda holder: setattr(holder.inner, "bias", nn.Parameter(torch.ones(7))))
    assert refused(lambda holder: setattr(holder.inner, "forward", lambda x: x))
    assert refused(lambda holder: nn.utils.parametrizations.weight_norm(holder.inner))
    assert refused(lambda holder: setattr(holder.inner, "weight", nn.Parameter(draw(32, 7).T)))
    assert refused(lambda holder: holder.half())
    assert refused(lambda holder: holder.train())
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert refused(lambda holder: None)
    finally:
        handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert refused(lambda holder: None)  # the result is in bf16
        assert not refused(lambda holder: holder.bfloat16())
    with torch.inference_mode(False), torch.enable_grad():
        assert refused(lambda holder: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [1, 16, 100, 768])
@pytest.mark.parametrize("rows", [1, 5])
def test_mlp(dtype, hidden, rows, same_bits_on_any_threads, calls):
    """1e-6 of values around 1, and the weights as they are rounded."""
    plain = filled(SwiGLU(config(hidden_dim=hidden)), dtype)
    ours, x = accelerate(copy.deepcopy(plain)), draw(rows, 1, 72)
    exact, y = plain.double()(x.double()), ours(x)
    assert calls == ["called"] and y.dtype == torch.float32
    assert (y - exact).abs().max() <= 1e-6 * max(1, exact.abs().max())
    assert torch.equal(ours(x[-1:]), y[-1:])
    same_bits_on_any_threads(lambda: [ours(x)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, kv_heads, dim", [(6, 6, 72), (6, 2, 72), (4, 1, 40), (2, 2, 140), (3, 3, 6)])
@pytest.mark.parametrize("norms", [{}, {"qk_norm": "head"}, {"qk_norm": "full"}, {"placement": "hybrid"}], ids=str)
def test_attention(dtype, cache_dtype, heads, kv_heads, dim, norms, same_bits_on_any_threads, calls):
    """Token after token to a full context. In fp32 2e-6 of values around 1. A cache in bf16 may round a few keys and
    values the other way, each of which moves the result by up to 1e-3.
    """
    settings = config(dim=dim, heads=heads, kv_heads=kv_heads, context=21, **norms)
    plain = filled(Attention(settings), dtype)
    ours, rope = accelerate(copy.deepcopy(plain)), Rope(settings.head_dim, 21, 10000.0)
    exact_cache = LayerCache(21) if cache_dtype == torch.float32 else RoundedCache(21)
    cache = LayerCache(21)
    x = draw(3, 21, dim)
    exact = plain.double()
    wide = tuple(table.double() for table in rope(0, 21))

    for cached, made in ((exact_cache, torch.float64), (cache, cache_dtype)):
        shape = 3, kv_heads, 4, settings.head_dim
        cached.extend(draw(*shape, seed=1).to(cache_dtype).to(made), draw(*shape, seed=2).to(cache_dtype).to(made))
    for t in range(4, 21):
        expected = exact(x[:, t : t + 1].double(), (wide[0][t : t + 1], wide[1][t : t + 1]), exact_cache)
        y = ours(x[:, t : t + 1], rope(t, 1), cache)
        assert y.dtype == torch.float32 and cache.length == t + 1 == len(calls) // 2 + 4
        tolerance = 2e-6 if cache_dtype == torch.float32 else 2e-3
        assert (y - expected).abs().max() <= tolerance
    for kept, wanted in ((cache.keys, exact_cache.keys), (cache.values, exact_cache.values)):
        torch.testing.assert_close(
            kept.double(), wanted, rtol=0.008 if cache_dtype == torch.bfloat16 else 1e-5, atol=2e-6
        )

    def again() -> list[Tensor]:
        cache.length = 20
        return [ours(x[:, 20:], rope(20, 1), cache), cache.keys.clone(), cache.values.clone()]

    same_bits_on_any_threads(again)
    alone = LayerCache(21)
    alone.extend(cache.keys[1:2, :, :20], cache.values[1:2, :, :20])
    assert torch.equal(ours(x[1:2, 20:], rope(20, 1), alone), y[1:2])


def test_what_attention_leaves_to_the_formula(calls):
    settings = config(context=8)
    ours: Any = accelerate(filled(Attention(settings), torch.float32))
    rope, x = Rope(12, 8, 10000.0), draw(1, 3, 72)
    cache = LayerCache(8)
    ours(x[:, :1], rope(0, 1), cache)  # the first token makes the cache
    ours(x[:, 1:], rope(1, 2), cache)  # several tokens
    assert not calls and cache.length == 3
    cache.length = 8  # it is full: the kernel would write beyond its end
    ours(x[:, :1], rope(7, 1), cache)
    assert not calls
    cache.length, cache.keys = 3, cache.keys.double()
    with pytest.raises(RuntimeError):  # as the formula does
        ours(x[:, :1], rope(3, 1), cache)
    assert not calls
    cache = LayerCache(8)
    ours(x, rope(0, 3), cache)
    ours.q_norm.register_forward_hook(lambda module, args, output: 0 * output)
    ours(x[:, :1], rope(3, 1), cache)  # q = 0 attends to all alike
    assert calls
    mean = cache.values[:, :, :4].mean(2).flatten(1)
    with torch.inference_mode():
        cache.length = 3
        torch.testing.assert_close(ours(x[:, :1], rope(3, 1), cache)[:, 0], ours.o_proj(mean))


def test_nan_stays_nan():
    holder, x = Holder(32, 7), draw(2, 32)
    x[0, 3] = torch.nan
    y = linear(x, holder)
    assert y[0].isnan().all() and y[1].isfinite().all()
    mlp: Any = accelerate(filled(SwiGLU(config()), torch.float32))
    x = draw(2, 1, 72)
    x[0, 0, 3] = torch.nan
    assert mlp(x)[0].isnan().all() and mlp(x)[1].isfinite().all()


def test_scores_far_beyond_what_exp_holds():
    """exp overflows at 88. fp32 scores of up to 1000 are off by 1e-4, which moves weights by as much."""
    settings = config(context=8)
    plain = filled(Attention(settings), torch.float32)
    plain.q_proj.weight.mul_(300)
    rope, x, found = Rope(12, 8, 10000.0), draw(2, 8, 72), []
    for module in (plain, accelerate(copy.deepcopy(plain))):
        cache = LayerCache(8)
        module(x[:, :7], rope(0, 7), cache)
        found.append(module(x[:, 7:], rope(7, 1), cache))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
