"""Decoding one token: products, MLP and attention against the plain modules in float64, then whole models."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from config import ModelConfig
from fast import accelerate, decode
from fast.native import kernels
from model import Attention, LayerCache, Linear, Llama, Rope, SwiGLU
from norms import KINDS
from norms.placement import PLACEMENTS

TOKENS = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(0))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """In inference mode; one entry for each call of a kernel."""
    made: list[str] = []

    def counted() -> Any:
        made.append("called")
        return kernels()

    monkeypatch.setattr(decode, "kernels", counted)
    with torch.inference_mode():
        yield made


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(module: Any, dtype: torch.dtype = torch.float32) -> Any:
    """`module` in evaluation, with weights of the size that keeps activations at about 1."""
    for linear in module.modules():
        if isinstance(linear, Linear):
            linear.weight.data = (draw(*linear.weight.shape) * linear.in_features**-0.5).to(dtype)
    return module.eval()


def holder(inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> Any:
    return filled(nn.ModuleDict({"inner": Linear(inputs, outputs)}), dtype)


def assert_same_bits_on_any_threads(function: Callable[[], list[Tensor]]) -> None:
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(function())
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@DTYPES
@pytest.mark.parametrize("inputs, outputs", [(288, 768), (5, 3), (64, 1), (33, 130), (100, 257)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16])
def test_products(dtype, inputs, outputs, rows):
    """Within 4 units of 2^-23 of the sum of the products' sizes; the same for a row alone, on any threads."""
    module, x = holder(inputs, outputs, dtype), draw(rows, inputs)
    y: Any = decode.linear(x, module, "inner")
    w = module.inner.weight.double()
    assert ((y - x.double() @ w.T).abs() <= 4 * 2**-23 * (x.double().abs() @ w.abs().T)).all()
    one_by_one: list[Any] = [decode.linear(row, module, "inner") for row in x.split(1)]
    assert torch.equal(torch.cat(one_by_one), y)
    assert_same_bits_on_any_threads(lambda: [decode.linear(x, module, "inner")])  # type: ignore[list-item]


@DTYPES
@pytest.mark.parametrize("hidden", [1, 16, 100, 768])
@pytest.mark.parametrize("rows", [1, 5])
def test_mlp(dtype, hidden, rows, calls):
    """1e-6 of values around 1, and the weights as they are rounded. NaN stays NaN in its row."""
    plain = filled(SwiGLU(ModelConfig(dim=72, heads=6, hidden_dim=hidden)), dtype)
    ours, x = accelerate(copy.deepcopy(plain)), draw(rows, 1, 72)
    exact, y = plain.double()(x.double()), ours(x)
    assert calls == ["called"] and y.dtype == torch.float32
    assert (y - exact).abs().max() <= 1e-6 * max(1, exact.abs().max())
    assert torch.equal(ours(x[-1:]), y[-1:])
    assert_same_bits_on_any_threads(lambda: [ours(x)])
    x[0, 0, 3] = torch.nan
    y = ours(x)
    assert y[0].isnan().all() and y[1:].isfinite().all()


@DTYPES
@pytest.mark.parametrize("heads, kv_heads, dim", [(6, 2, 72), (4, 1, 40), (2, 2, 140), (3, 3, 6)])
@pytest.mark.parametrize("norms", [{}, {"qk_norm": "full"}, {"placement": "hybrid"}], ids=str)
def test_attention(dtype, heads, kv_heads, dim, norms, calls):
    """Token after token to a full context: 2e-6 of values around 1."""
    settings = ModelConfig(dim=dim, heads=heads, kv_heads=kv_heads, context=21, **norms)
    plain = filled(Attention(settings), dtype)
    ours, rope = accelerate(copy.deepcopy(plain)), Rope(settings.head_dim, 21, 10000.0)
    exact, exact_rope = plain.double(), [table.double() for table in rope(0, 21)]
    exact_cache, cache, steps = LayerCache(21), LayerCache(21), draw(21, 3, 1, dim)
    keys, values = (draw(3, kv_heads, 4, settings.head_dim, seed=seed) for seed in (1, 2))
    exact_cache.extend(keys.double(), values.double())
    cache.extend(keys, values)
    for t in range(4, 21):
        expected = exact(steps[t].double(), [table[t : t + 1] for table in exact_rope], exact_cache)
        y = ours(steps[t], rope(t, 1), cache)
        assert cache.length == t + 1 == len(calls) // 2 + 4
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(cache.keys.double(), exact_cache.keys, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(cache.values.double(), exact_cache.values, rtol=1e-5, atol=2e-6)

    def again(rows: slice = slice(None)) -> list[Tensor]:
        kept = LayerCache(21)
        kept.extend(cache.keys[rows, :, :20], cache.values[rows, :, :20])
        return [ours(steps[20][rows], rope(20, 1), kept), kept.keys, kept.values]

    assert_same_bits_on_any_threads(again)
    assert torch.equal(again(slice(1, 2))[0], y[1:2])


CHANGES: list[Callable] = [
    lambda module: module.update({"inner": type("Adapter", (Linear,), {})(32, 7)}),
    lambda module: module.inner.register_forward_hook(lambda *args: None),
    lambda module: module.inner.register_forward_pre_hook(lambda *args: None),
    lambda module: setattr(module.inner, "bias", nn.Parameter(torch.ones(7))),
    lambda module: setattr(module.inner, "forward", lambda x: x),
    lambda module: nn.utils.parametrizations.weight_norm(module.inner),
    lambda module: setattr(module.inner, "weight", nn.Parameter(draw(32, 7).T)),
    lambda module: module.half(),
]


def test_only_a_plain_linear_is_left_to_the_kernel():
    plain = holder(32, 7)
    for change in CHANGES:
        change(changed := holder(32, 7))
        assert decode.linear(draw(1, 32), changed, "inner") is None
    for x in (draw(33, 32), draw(0, 32), draw(1, 31), draw(1, 32).double(), draw(32, 2).T):
        assert decode.linear(x, plain, "inner") is None
    with torch.autocast("cpu", torch.bfloat16):
        assert decode.linear(draw(1, 32), plain, "inner") is None  # the result is in bf16
    with torch.inference_mode(False), torch.no_grad():
        assert decode.linear(draw(1, 32), plain, "inner") is None
    with nn.modules.module.register_module_forward_hook(lambda *args: None):  # as profilers do
        assert decode.linear(draw(1, 32), plain, "inner") is None


def test_what_attention_leaves_to_the_formula(calls):
    ours: Any = accelerate(filled(Attention(ModelConfig(dim=72, heads=6, kv_heads=3, context=8))))
    rope, x = Rope(12, 8, 10000.0), draw(1, 3, 72)

    def kernels_called(cache: LayerCache, new: int = 1) -> bool:
        calls.clear()
        ours(x[:, :new], rope(cache.length % 8, new), cache)
        return bool(calls)

    cache, other = LayerCache(8), type("Other", (LayerCache,), {})(8)
    assert not kernels_called(cache)  # the first token makes the cache
    assert not kernels_called(cache, 2) and kernels_called(cache) and cache.length == 4
    assert not kernels_called(other, 2) and not kernels_called(other)
    for change in (nn.Dropout.train, lambda dropout: dropout.register_forward_hook(lambda *args: None)):
        change(ours.dropout)
        assert not kernels_called(cache)
        ours.dropout = nn.Dropout(0.0).eval()
    ours.q_norm.register_forward_hook(lambda module, args, output: 0 * output)  # q = 0 attends to all alike
    y = ours(x[:, :1], rope(cache.length, 1), cache)[:, 0]
    assert calls
    mean = cache.values[:, :, : cache.length].mean(2).repeat_interleave(2, 1)
    torch.testing.assert_close(y, ours.o_proj(mean.flatten(1)))
    cache.length = 8  # it is full: the kernel would write beyond its end
    assert not kernels_called(cache)


def test_scores_far_beyond_what_exp_holds():
    """exp overflows at 88. fp32 scores of up to 1000 are off by 1e-4, which moves weights by as much."""
    plain = filled(Attention(ModelConfig(dim=72, heads=6, kv_heads=3, context=8)))
    plain.q_proj.weight.mul_(300)
    rope, x, cache = Rope(12, 8, 10000.0), draw(1, 8, 72), LayerCache(8)
    plain(x[:, :7], rope(0, 7), cache)
    expected, cache.length = plain(x[:, 7:], rope(7, 1), cache), 7
    torch.testing.assert_close(accelerate(plain)(x[:, 7:], rope(7, 1), cache), expected, rtol=1e-3, atol=1e-3)


def models(**settings: Any) -> tuple[Any, Any]:
    """Plain and accelerated, with random gains, and every matrix large enough for all parts to matter."""
    small = {"dim": 24, "layers": 2, "heads": 4, "hidden_dim": 40, "vocab_size": 61, "context": 17}
    plain = Llama(ModelConfig(**small | settings)).eval()
    for seed, (name, parameter) in enumerate(plain.named_parameters()):
        values = draw(*parameter.shape, seed=seed)
        gain = 0.2 if "rotated_q_norm" in name else 1  # about where it starts: more, and softmax amplifies roundings
        parameter.data.copy_(0.15 * values if parameter.dim() == 2 else gain * (1 + 0.2 * values))
    return plain, accelerate(copy.deepcopy(plain))


def cached_logits(model: Any) -> Tensor:
    """Logits after a prompt of four tokens and after each token that follows."""
    cache = model.new_cache()
    return torch.stack([model.next_logits(step, cache) for step in (TOKENS[:, :4], *TOKENS[:, 4:].split(1, 1))], 1)


VARIANTS: list[dict[str, Any]] = [
    *({"placement": placement} for placement in PLACEMENTS),
    *({"norm": kind} for kind in sorted(KINDS)),
    {"kv_heads": 1, "qk_norm": "head", "norm": "layernorm"},
    {"qk_norm": "full", "tie_embeddings": False, "embedding_scale": 4.9},
    {"head_dim": 10, "kv_heads": 2},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_generation_continues_the_uncached_forward(settings, calls):
    """fp32 rounds to 2^-24; a few hundred roundings, some amplified, stay within 2e-5."""
    plain, ours = models(**settings)
    expected, found = plain(TOKENS)[:, 3:], cached_logits(ours)
    assert len(calls) >= 13 * 3 * len(ours.layers) or settings.get("placement") == "ngpt"  # its scales are plain
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("head_dim", [6, 10, 40])
def test_generation_with_weights_and_cache_in_bf16(head_dim):
    """Within 0.02 of a forward in fp32 with the same weights: the prompt is in bf16."""
    plain, ours = models(tie_embeddings=False, head_dim=head_dim)
    for model, kept in ((plain, torch.float32), (ours, torch.bfloat16)):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.bfloat16().to(kept)
    with torch.autocast("cpu", torch.bfloat16):
        found = cached_logits(ours)
    expected = plain(TOKENS)[:, 3:]
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


@torch.inference_mode(False)
def test_training_is_that_of_the_plain_model():
    """To the last bit, dropout included."""
    found = []
    for model in models(dropout=0.3):
        torch.manual_seed(0)
        loss = model.train().loss(TOKENS[:, :-1], TOKENS[:, 1:])
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(map(torch.equal, *found))
