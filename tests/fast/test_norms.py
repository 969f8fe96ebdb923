"""The kernels of RMSNorm and LayerNorm against the plain modules in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fast.norms
from fast import accelerate
from norms.layernorm import LayerNorm
from norms.rmsnorm import RMSNorm

KINDS = {
    "rmsnorm": lambda dim: RMSNorm(dim),
    "rmsnorm without gain": lambda dim: RMSNorm(dim, elementwise_affine=False),
    "layernorm": lambda dim: LayerNorm(dim),
    "layernorm without bias": lambda dim: LayerNorm(dim, bias=False),
    "layernorm without gain": lambda dim: LayerNorm(dim, elementwise_affine=False),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_and_fast(kind: str, dim: int) -> tuple[Any, Any]:
    """The same norm twice, with random parameters."""
    plain = KINDS[kind](dim)
    for seed, parameter in enumerate(plain.parameters()):
        parameter.data.copy_(draw(*parameter.shape, seed=seed + 1))
    return plain, accelerate(copy.deepcopy(plain))


def results(norm: nn.Module, x: Tensor, grad_y: Tensor) -> list[Tensor]:
    """Output and gradients."""
    x = x.detach().requires_grad_()
    y = norm(x)
    return [y.detach(), *torch.autograd.grad(y, (x, *norm.parameters()), grad_y)]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What the kernels are called for."""
    names: list[str] = []
    real = fast.norms.kernels

    def noticed():
        names.append("called")
        return real()

    monkeypatch.setattr(fast.norms, "kernels", noticed)
    return names


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, dim", [(1, 16), (3, 5), (700, 64), (2000, 100), (517, 768), (33, 4100)], ids=str)
def test_output_and_gradients_are_those_of_float64(kind, dtype, rows, dim, calls):
    """Relative to the largest element: sums over rows differ most in fp32, 6 · 2^-23; bf16 rounds to half of 2^-7."""
    plain, ours = plain_and_fast(kind, dim)
    x, grad_y = (3 * draw(rows, dim) + 1).to(dtype), draw(rows, dim, seed=9, dtype=dtype)
    exact = results(plain.double(), x.double(), grad_y.double())
    found = results(ours, x, grad_y)
    assert len(calls) == 2
    assert [y.dtype for y in found] == [dtype, dtype, *(torch.float32 for _ in found[2:])]
    for a, b in zip(found, exact, strict=True):
        tolerance = 7e-7 if a.dtype == torch.float32 else 2**-8 * 1.01
        assert a.shape == b.shape and (a - b).abs().max() <= tolerance * b.abs().max()


@each_kind
def test_threads_change_no_bit(kind, same_bits_on_any_threads):
    _, ours = plain_and_fast(kind, 96)
    same_bits_on_any_threads(lambda: results(ours, draw(3000, 96), draw(3000, 96, seed=9)))


def test_a_row_does_not_depend_on_its_neighbors():
    _, ours = plain_and_fast("layernorm", 72)
    x = draw(500, 72)
    assert torch.equal(ours(x)[100:101], ours(x[100:101]))


def test_layernorm_over_several_axes():
    plain, ours = LayerNorm([4, 5, 6]), accelerate(LayerNorm([4, 5, 6]))
    x, grad_y = draw(8, 4, 5, 6), draw(8, 4, 5, 6, seed=1)
    for a, b in zip(results(ours, x, grad_y), results(plain.double(), x.double(), grad_y.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=2e-6)  # fp32 of numbers up to 10


@each_kind
def test_inputs_may_be_strided(kind):
    _, ours = plain_and_fast(kind, 48)
    x, grad_y = draw(48, 10).T, draw(10, 96, seed=1)[:, ::2]
    for a, b in zip(results(ours, x, grad_y), results(ours, x.contiguous(), grad_y.contiguous()), strict=True):
        assert torch.equal(a, b)


def test_constant_rows_and_rows_far_from_zero_keep_their_digits():
    """The contract's bound of LayerNorm: 2 · 2^-23 · (1 + |x̂|)(|w| + ...), see tests/norms."""
    for dim in (100, 4096):
        plain, ours = plain_and_fast("layernorm", dim)
        one_far = draw(8, dim)
        one_far[::2, 0], one_far[1::2, dim // 2] = 1e3, -1e3
        plain = plain.double()
        for x in (one_far, draw(8, dim) + 1e3, draw(8, dim) - 1e5):  # fp32 cannot hold the mean of the last two
            exact = plain(x.double())
            terms = plain.weight.abs() + (exact - plain.bias).abs() + plain.bias.abs()
            assert ((ours(x) - exact).abs() / terms).max() <= 2**-22
        assert torch.equal(ours(torch.full((2, dim), 1e6 + 0.3)), ours.bias.expand(2, dim))


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
@each_kind
def test_nan_and_infinity_stay_in_their_row(kind, special):
    for dtype in (torch.float32, torch.bfloat16):
        plain, ours = plain_and_fast(kind, 40)
        x = draw(3, 40, dtype=dtype)
        x[1, 17] = special
        if dtype == torch.bfloat16:
            x.view(torch.int16)[x.isnan()] = 0x7FFF  # rounding this up must not give zero
        assert torch.equal(ours(x).isnan(), plain(x).isnan())


def test_subnormal_results_in_bf16_are_not_flushed_to_zero():
    plain, ours = plain_and_fast("rmsnorm", 40)
    for norm in (plain, ours):
        norm.weight.data *= 1e-38
    x = draw(4, 40, dtype=torch.bfloat16)
    assert (plain(x).abs() < torch.finfo(torch.bfloat16).tiny).any()
    assert (ours(x).float() - plain(x).float()).abs().max() <= 2**-133  # the smallest there is


@pytest.mark.parametrize("what", ["float64", "float16", "bf16 gain", "empty", "llama", "negative view", "float64 gain"])
def test_the_formula_does_what_the_kernel_cannot(what, calls):
    ours: Any = accelerate(RMSNorm(32))
    x = draw(4, 32)
    if what in ("float64", "float16"):
        x = x.to(getattr(torch, what))
    if what == "bf16 gain":
        ours.bfloat16()
    if what == "empty":
        x = x[:0]
    if what == "llama":
        ours = accelerate(RMSNorm(32, cast_order="llama"))
    if what == "negative view":
        x = torch._neg_view(-x)
    if what == "float64 gain":
        ours.weight = nn.Parameter(torch.ones(32, dtype=torch.float64))
    assert torch.equal(ours(x), RMSNorm.forward(ours, x))
    assert not calls


def test_a_gain_of_another_size_is_never_read_beyond_its_end():
    for kind in ("rmsnorm", "layernorm"):
        _, ours = plain_and_fast(kind, 32)
        for size in (16, 64):
            with pytest.raises(RuntimeError):
                torch.func.functional_call(ours, {"weight": torch.ones(size)}, (draw(4, 32),))
    with pytest.raises(ValueError, match="32 features"):
        accelerate(LayerNorm(32))(draw(4, 16))


@each_kind
def test_frozen_inputs_and_gains(kind):
    _, ours = plain_and_fast(kind, 32)
    x, grad_y = draw(40, 32), draw(40, 32, seed=1)
    _, grad_x, *gains = results(ours, x, grad_y)
    if gains:
        ours(x).backward(grad_y)
        assert all(torch.equal(p.grad, gain) for p, gain in zip(ours.parameters(), gains, strict=True))
    ours.requires_grad_(False)
    assert torch.equal(results(ours, x, grad_y)[1] if not gains else grad_x, grad_x)
    leaf = x.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(ours(leaf), leaf, grad_y)[0], grad_x)


# --- whoever looks into the computation sees the formula -------------------------------------------------------------


@each_kind
def test_second_derivatives(kind):
    plain, ours = plain_and_fast(kind, 32)

    def second(norm: nn.Module) -> tuple:
        x, grad_y = draw(6, 32).requires_grad_(), draw(6, 32, seed=1)
        grads = torch.autograd.grad(norm(x), (x, *norm.parameters()), grad_y, create_graph=True)
        return torch.autograd.grad(torch.stack([grad.pow(2).sum() for grad in grads]).sum(), x)

    torch.testing.assert_close(second(ours), second(plain), rtol=1e-4, atol=1e-4)


@each_kind
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_transforms_and_recorders(kind, calls):
    plain, ours = plain_and_fast(kind, 32)
    x, direction = draw(4, 32), draw(4, 32, seed=1)

    def loss(norm):
        return lambda x: norm(x).pow(3).sum()

    pairs = [(make(ours), make(plain)) for make in (
        lambda norm: torch.func.vmap(torch.func.grad(loss(norm)))(x),
        lambda norm: torch.func.jacrev(norm)(x),
        lambda norm: torch.func.jvp(norm, (x,), (direction,))[1],
        lambda norm: make_fx(norm)(draw(4, 32, seed=3))(x),
        lambda norm: torch.jit.trace(norm, draw(4, 32, seed=3), check_trace=False)(x),
        lambda norm: torch.export.export(norm, (draw(4, 32, seed=3),)).module()(x),
        lambda norm: torch.compile(norm, backend="aot_eager", fullgraph=True)(x),
    )]  # fmt: skip
    assert not calls
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, direction)
        pairs.append((forward_ad.unpack_dual(ours(dual)).tangent, forward_ad.unpack_dual(plain(dual)).tangent))
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@each_kind
def test_gradients_in_batches_are_those_one_by_one(kind):
    _, ours = plain_and_fast(kind, 32)
    x = draw(4, 32).requires_grad_()
    y, incoming = ours(x), draw(3, 4, 32, seed=1)
    expected = torch.stack([torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in incoming])
    (found,) = torch.autograd.grad(y, x, incoming, is_grads_batched=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
