"""Rotation, attention and loss against the plain formulas in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fast.training as training
import model
from fast.training import CausalAttention, causal_attention, cross_entropy, linear_cross_entropy, rotate

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def double(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


def grads(y: Tensor, grad_y: Tensor, *inputs: Tensor, **options: bool) -> list[Tensor]:
    return [grad.double() for grad in torch.autograd.grad(y, inputs, grad_y.to(y.dtype), **options)]


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@DTYPES
@pytest.mark.parametrize("heads, width", [(3, 8), (1, 2), (2, 130), (2, 48)])
def test_rotation(dtype, heads, width):
    """One rounding of the result, and in fp32 those of two products: 2^-23 of the larger of the two features."""
    x, grad = draw(2, 5, heads, width, dtype=dtype), draw(2, 5, heads, width, seed=1, dtype=dtype)
    rope = model.precompute_freqs_cis(width, 7)
    rope = rope[0][2:], rope[1][2:]
    (exact_x,) = double(x)
    exact = model.rotate(exact_x, (rope[0].double(), rope[1].double()))
    found = rotate(x, rope)
    assert found.dtype == dtype and found.transpose(1, 2).is_contiguous()
    unit = 0.502 * 2.0**-7 if dtype == torch.bfloat16 else 0.0
    for ours, wanted in ((found, exact), (grads(found, grad, x)[0], grads(exact, grad, exact_x)[0])):
        assert ((ours - wanted).abs() <= unit * wanted.abs() + 1e-6).all()
    strided = draw(2, heads, 5, 2 * width, dtype=dtype).transpose(1, 2)[..., ::2]
    assert torch.equal(rotate(strided, rope), rotate(strided.contiguous(), rope))


def test_bf16_is_rounded_to_nearest_even():
    """1.5 times an odd number of 8 bits often lies halfway between two numbers of bfloat16. All kernels round alike."""
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 3e38, 1e-38, 1e-39, -1e-40])
    x = torch.cat([special, torch.arange(8.0, 256.0)]).bfloat16().view(1, 1, 1, 256)
    cos = torch.full((1, 128), 1.5)
    found, expected = rotate(x, (cos, torch.zeros(1, 128))), (x.float() * cos.repeat(1, 2)).bfloat16()
    finite = x.view(2, 128).isfinite().all(0).repeat(2)  # infinity · 0 is NaN
    assert torch.equal(found[..., finite], expected[..., finite]) and found[0, 0, 0, 2].isnan()


@pytest.mark.parametrize("length", [1, 5, 16, 33, 100])
@pytest.mark.parametrize("at_once", [1, 3000])
def test_gradients_of_attention(monkeypatch, length, at_once):
    """In fp32, where the error of plain products is known: 1e-5 of numbers around one."""
    monkeypatch.setattr(training, "SCORES_AT_ONCE", at_once)  # one head at a time, then as many as fit
    q, k, v, grad = (draw(2, 3, length, 8, seed=seed) for seed in range(4))
    exact = double(q, k, v)
    wanted = grads(training.attention_formula(*exact), grad, *exact)
    for ours, value in zip(grads(CausalAttention.apply(q, k, v), grad, q, k, v), wanted, strict=True):
        torch.testing.assert_close(ours, value, rtol=1e-5, atol=1e-5)


def test_attention_in_bf16_is_as_exact_as_torchs():
    """Torch keeps the scores in fp32; we round them to bf16, as plain products do: within twice its error."""
    q, grad = draw(2, 4, 64, 16, dtype=torch.bfloat16), draw(2, 4, 64, 16, seed=3, dtype=torch.bfloat16)
    k, v = draw(2, 2, 64, 16, seed=1, dtype=torch.bfloat16), draw(2, 2, 64, 16, seed=2, dtype=torch.bfloat16)
    exact = double(q, k, v)
    repeated = exact[0], *(x.repeat_interleave(2, 1) for x in exact[1:])
    wanted = grads(training.attention_formula(*repeated), grad, *exact)
    y = causal_attention(q, k, v, 0.0, True)
    assert "CausalAttention" in type(y.grad_fn).__name__
    theirs = grads(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), grad, q, k, v)
    for ours, there, value in zip(grads(y, grad, q, k, v), theirs, wanted, strict=True):
        assert rms(ours - value) < 2 * rms(there - value) and rms(ours - value) < 0.02 * rms(value)


def test_the_future_does_not_reach_a_gradient():
    q, k, v, grad = (draw(1, 2, 40, 16, seed=seed, dtype=torch.bfloat16) for seed in range(4))
    grad.data[:, :, 21:] = 0
    found = []
    for future in (1, 1e3):
        k.data[:, :, 21:], v.data[:, :, 21:] = future, -future
        found.append([x[:, :, :21] for x in grads(causal_attention(q, k, v, 0.0, False), grad, q, k, v)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("logits_at_once", [1 << 24, 27 * 101, 101], ids=["whole", "27 rows", "row by row"])
@pytest.mark.parametrize("ids", [101, 64])
def test_loss_in_fp32(monkeypatch, logits_at_once, ids):
    """1e-5 of the largest gradient: sums of up to 400 products in fp32."""
    monkeypatch.setattr(training, "LOGITS_AT_ONCE", logits_at_once)
    h, w, targets = draw(400, 33), draw(ids, 33, seed=1), torch.arange(400) * 7 % ids
    exact = double(h, w)
    exact_loss = F.cross_entropy(exact[0] @ exact[1].T, targets)
    loss = linear_cross_entropy(h, w, targets)
    assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-6)
    with torch.no_grad():
        assert linear_cross_entropy(h, w, targets) == loss
    three = torch.tensor(3.0)
    for ours, value in zip(grads(loss, three, h, w), grads(exact_loss, three, *exact), strict=True):
        assert (ours - value).abs().max() <= 1e-5 * value.abs().max()


@pytest.mark.parametrize("rows", [400, 255, 130, 10], ids=["whole", "two parts", "four parts", "forty parts"])
def test_loss_under_autocast_is_as_exact_as_the_plain_one(monkeypatch, rows):
    """However many parts: their gradients of the head are added in fp32. In bf16, the error would grow with them."""
    monkeypatch.setattr(training, "LOGITS_AT_ONCE", 101 * rows)
    h, w, targets = draw(400, 33), draw(101, 33, seed=1), torch.arange(400) % 101
    exact = double(h, w)
    wanted = grads(F.cross_entropy(exact[0] @ exact[1].T, targets), torch.tensor(1.0), *exact)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = linear_cross_entropy(h, w, targets), training.head_formula(h, w, targets)
    assert ours.dtype == torch.float32 and ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    one = torch.tensor(1.0)
    for value, here, there in zip(wanted, grads(ours, one, h, w), grads(theirs, one, h, w), strict=True):
        assert rms(here - value) < 1.2 * rms(there - value)


@DTYPES
@pytest.mark.parametrize("rows, width", [(70, 257), (3, 2048), (1, 1), (200, 15)])
def test_cross_entropy_of_rows(dtype, rows, width):
    logits, targets = (5 * draw(rows, width)).detach().to(dtype), torch.arange(rows) * 7 % width
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    (wanted,) = torch.autograd.grad(expected.sum(), exact)
    losses = cross_entropy(logits, targets)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=2e-6)  # fp32 of numbers up to 40
    # Half a unit of bf16; in fp32 a few units of 2^-23, of p where p - 1 is near 0.
    relative = 0.51 * 2**-7 if dtype == torch.bfloat16 else 2e-6
    assert ((logits - wanted).abs() <= relative * wanted.abs() + 3e-7).all()


def test_a_hopeless_guess_has_a_finite_loss_and_nan_stays_nan():
    h, w = torch.tensor([[200.0]], requires_grad=True), torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = linear_cross_entropy(h, w, torch.tensor([1]))
    assert loss.item() == 400  # -log of e^-400, which fp32 holds as 0
    torch.testing.assert_close(torch.autograd.grad(loss, h)[0], torch.tensor([[2.0]]))
    for bad in (math.nan, math.inf):
        logits = torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]])
        losses = cross_entropy(logits, torch.tensor([0, 0]))
        assert losses[0].isnan() and losses[1].isfinite() and logits[1].isfinite().all()


@pytest.mark.parametrize("height, width", [(1, 1), (16, 16), (32, 48), (33, 47), (5, 100), (100, 5), (300, 257)])
@DTYPES
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16], ids=str)
def test_transposed_sum_is_exact(height, width, dtype, other):
    x, more = draw(height, width, dtype=dtype).detach(), draw(height, width, seed=1, dtype=other).detach()
    scale = torch.tensor(1 / 3)
    found = training.transpose_sum([x, more], torch.float32, scale)
    assert torch.equal(found, ((x.float() + more.float()) * scale).T)
    assert torch.equal(training.transpose_sum([x], other), x.to(other).T)
    assert torch.equal(training.transpose_sum([x.T], other), x.to(other))


@DTYPES
def test_threads_change_no_bit(dtype, same_bits_on_any_threads):
    def everything() -> list[Tensor]:
        logits, x = draw(130, 500, dtype=dtype).detach(), draw(4, 90, 4, 64, dtype=dtype)
        q = rotate(x, model.precompute_freqs_cis(64, 90))
        losses = cross_entropy(logits, torch.arange(130))
        y = CausalAttention.apply(q.transpose(1, 2), q.transpose(1, 2), x.transpose(1, 2))
        scores, grad = (draw(6, 90, 90, seed=seed, dtype=dtype).detach() for seed in (3, 4))
        sizes = 6, 90, dtype == torch.bfloat16, 0.3
        training.kernels().causal_softmax(*sizes, scores.data_ptr(), grad.data_ptr())
        assert y.shape == (4, 4, 90, 64)
        return [losses, logits, q, scores, grad, training.transpose_sum([logits], torch.bfloat16)]

    same_bits_on_any_threads(everything)


def test_second_derivatives_and_batched_gradients_are_the_formulas():
    x = draw(2, 5, 3, 8)
    h, w, targets = draw(11, 6), draw(9, 6, seed=1), torch.arange(11) % 9
    q, k, v = (draw(1, 2, 5, 8, seed=seed) for seed in range(3))
    rope = model.precompute_freqs_cis(8, 5)
    for ours, formula, inputs in (
        (lambda x: rotate(x, rope), lambda x: model.rotate(x, rope), (x,)),
        (lambda h, w: linear_cross_entropy(h, w, targets), lambda h, w: training.head_formula(h, w, targets), (h, w)),
        (CausalAttention.apply, training.attention_formula, (q, k, v)),
    ):
        found = []
        for function in (ours, formula):
            y = function(*inputs)
            first = torch.autograd.grad(y.pow(2).sum(), inputs, create_graph=True)
            second = torch.autograd.grad(torch.stack([grad.pow(2).sum() for grad in first]).sum(), inputs)
            y, incoming = function(*inputs), torch.stack([torch.ones_like(y), torch.full_like(y, 2.0)])
            found.append([*first, *second, *torch.autograd.grad(y, inputs, incoming, is_grads_batched=True)])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
