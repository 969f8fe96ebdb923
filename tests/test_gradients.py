"""Computations with their gradients by hand, against the plain formulas."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

import gradients as by_hand
import native
from gradients import CausalAttention, LinearCrossEntropy, Rotate
from norms.calling import formula_only

CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [grad.double() for grad in torch.autograd.grad(loss, inputs)]


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.fixture(params=["kernel", "kernel without AVX-512", "formula"])
def way(request) -> Iterator[str]:
    """By the kernel and by the formula, where there are both."""
    if request.param == "kernel without AVX-512":
        request.getfixturevalue("without_avx512")
    if request.param == "formula":
        with formula_only():
            yield request.param
    elif native.library(by_hand.KERNELS)[0] is None:
        pytest.skip("no C compiler")
    else:
        yield "kernel"


# --- rotation --------------------------------------------------------------------------------------------------------


def test_rotation_is_the_formula():
    x, angle = draw(2, 5, 3, 8), torch.arange(20.0, dtype=torch.float64).view(5, 4)
    turned = Rotate.apply(x, angle.cos(), angle.sin())
    as_complex = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    torch.testing.assert_close(turned, torch.cat((as_complex.real, as_complex.imag), -1), rtol=0, atol=1e-14)
    assert gradcheck(lambda x: Rotate.apply(x, angle.cos(), angle.sin()), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_rounds_once_and_turns_back(way, dtype):
    for heads, width in ((3, 8), (1, 2), (2, 1030)):
        x, grad = (draw(2, 5, heads, width, seed=seed, dtype=dtype) for seed in range(2))
        angle = torch.arange(5.0 * width / 2).view(5, -1)
        cos, sin = angle.cos(), angle.sin()
        turned = Rotate.apply(x, cos, sin)
        same = x.detach().double().requires_grad_()
        exact = Rotate.apply(same, cos.double(), sin.double())
        assert turned.dtype == dtype and turned.shape == x.shape
        # Half a unit in the last place of a bf16 number, and fp32's own rounding of two products.
        unit = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-23
        assert ((turned.double() - exact).abs() <= 0.501 * unit * exact.abs() + 1e-6).all()
        (back,) = gradients((turned * grad).sum(), x)
        (exact_back,) = gradients((exact * grad.double()).sum(), same)
        assert ((back - exact_back).abs() <= 0.51 * unit * exact_back.abs() + 1e-6).all()


def test_bfloat16_is_rounded_as_pytorch_rounds(way):
    """To the nearest, to the even one of two as near: 1 + 2^-8 lies between two numbers of bfloat16."""
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 3e38, 1e-38, 1e-39, -1e-40])
    x = torch.cat([special, torch.arange(1.0, 249.0)]).bfloat16().view(1, 1, 1, 256)
    cos = torch.full((1, 128), 1 + 2.0**-8)
    turned = Rotate.apply(x, cos, torch.zeros(1, 128))
    expected = (x.float() * cos.repeat(1, 2)).bfloat16()
    finite = x.view(2, 128).isfinite().all(0).repeat(2)  # a number that is turned with infinity is none
    assert torch.equal(turned[..., finite], expected[..., finite])
    assert turned[0, 0, 0, 2].isnan()


# --- the gate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 1), (4, 600)])
def test_gated_silu(way, shape, dtype):
    gate, up, grad = (draw(*shape, seed=seed, dtype=dtype) for seed in range(3))
    with torch.no_grad():
        gate *= 8
    g, u = gate.detach().double().requires_grad_(), up.detach().double().requires_grad_()
    expected = g / (1 + (-g).exp()) * u
    y = by_hand.gated_silu(torch.cat((gate, up), -1))
    assert y.dtype == dtype
    found = [y.double(), *gradients((y * grad).sum(), gate, up)]
    wanted = [expected, *gradients((expected * grad.double()).sum(), g, u)]
    # The kernel rounds once, torch's own functions up to four times.
    roundings = 0.51 if way == "kernel" else 4
    unit = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-19
    for ours, exact in zip(found, wanted, strict=True):
        assert ((ours - exact).abs() <= roundings * unit * exact.abs() + unit * 1e-2).all()


def test_a_gate_far_from_zero_is_open_or_shut(way):
    gate = torch.tensor([1e4, -1e4, math.inf, 0.0], requires_grad=True)
    y = by_hand.gated_silu(torch.stack((gate, torch.full((4,), 3.0)), -1)).squeeze(-1)
    assert y.tolist() == pytest.approx([3e4, 0.0, math.inf, 0.0], abs=1e-30)  # the kernel's exp ends at 1e-38
    (grad,) = torch.autograd.grad(y[[0, 1, 3]].sum(), gate)
    assert [grad[i].item() for i in (0, 1, 3)] == pytest.approx([3.0, 0.0, 1.5], abs=1e-30)
    assert by_hand.gated_silu(torch.tensor([math.nan, 1.0])).isnan()


# --- attention -------------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By the definition, one query at a time."""
    rows = []
    for t in range(q.shape[2]):
        scores = (q[:, :, t : t + 1] * k[:, :, : t + 1]).sum(-1) / math.sqrt(q.shape[-1])  # B H t+1
        rows.append((scores.exp() / scores.exp().sum(-1, keepdim=True)).unsqueeze(-1).mul(v[:, :, : t + 1]).sum(2))
    return torch.stack(rows, 2)


def test_attention_is_the_formula():
    q, k, v = (draw(2, 3, 7, 4, seed=seed) for seed in range(3))
    torch.testing.assert_close(CausalAttention.apply(q, k, v), attention(q, k, v), rtol=0, atol=1e-14)
    assert gradcheck(CausalAttention.apply, (q, k, v))


@pytest.mark.parametrize("length", [1, 5, 16, 33, 100])
@pytest.mark.parametrize("at_once", [1, 3000])
def test_attention_has_the_gradients_of_the_formula(way, monkeypatch, length, at_once):
    monkeypatch.setattr(by_hand, "SCORES_AT_ONCE", at_once)  # one head, then as many as fit
    q, k, v, grad = (draw(2, 3, length, 8, seed=seed, dtype=torch.float32) for seed in range(4))
    exact = gradients((attention(*(x.double() for x in (q, k, v))) * grad.double()).sum(), q, k, v)
    for ours, wanted in zip(gradients((CausalAttention.apply(q, k, v) * grad).sum(), q, k, v), exact, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_the_future_does_not_reach_a_gradient(way):
    q, k, v, grad = (draw(1, 2, 40, 16, seed=seed, dtype=torch.bfloat16) for seed in range(4))
    past, found = slice(21), []
    with torch.no_grad():
        grad[:, :, 21:] = 0
        for future in (1, 1e3):
            k[:, :, 21:], v[:, :, 21:] = future, -future
            with torch.enable_grad():
                grads = gradients((CausalAttention.apply(q, k, v) * grad).sum(), q, k, v)
            found.append([grad[:, :, past] for grad in grads])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_attention_in_bf16_has_gradients_as_near_as_pytorchs():
    shape = (2, 3, 64, 16)
    q, k, v, grad = (draw(*shape, seed=seed, dtype=torch.bfloat16) for seed in range(4))
    exact = gradients((attention(*(x.double() for x in (q, k, v))) * grad.double()).sum(), q, k, v)
    ours = gradients((CausalAttention.apply(q, k, v) * grad).sum(), q, k, v)
    theirs = gradients((F.scaled_dot_product_attention(q, k, v, is_causal=True) * grad).sum(), q, k, v)
    for name, wanted, here, there in zip("qkv", exact, ours, theirs, strict=True):
        # Theirs keeps the scores in fp32, ours rounds them to bf16, as plain attention does: within twice.
        assert rms(here - wanted) < 2 * rms(there - wanted), name
        assert rms(here - wanted) < 0.02 * rms(wanted), name


# --- cross-entropy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits_at_once", [1 << 24, 27, 1], ids=["whole", "three rows", "row by row"])
def test_cross_entropy_is_the_formula(monkeypatch, logits_at_once):
    monkeypatch.setattr(by_hand, "LOGITS_AT_ONCE", logits_at_once)
    h, w, targets = draw(11, 6), draw(9, 6, seed=1), torch.arange(11) % 9
    p = (h @ w.T).exp() / (h @ w.T).exp().sum(-1, keepdim=True)
    expected = -p[torch.arange(11), targets].log().mean()
    torch.testing.assert_close(LinearCrossEntropy.apply(h, w, targets, True), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(LinearCrossEntropy.apply(h, w, targets, False), expected, rtol=0, atol=1e-14)
    assert gradcheck(lambda h, w: LinearCrossEntropy.apply(h, w, targets, True), (h, w))


def test_cross_entropy_passes_on_the_gradient_of_what_follows():
    h, w, targets = draw(11, 6), draw(9, 6, seed=1), torch.arange(11) % 9
    once = gradients(LinearCrossEntropy.apply(h, w, targets, True), h, w)
    thrice = gradients(3 * LinearCrossEntropy.apply(h, w, targets, True), h, w)
    for single, triple in zip(once, thrice, strict=True):
        torch.testing.assert_close(triple, 3 * single)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [400, 255, 130, 50], ids=["whole", "three times", "four times", "eight times"])
def test_cross_entropy_under_autocast_is_as_near_as_the_plain_one(way, monkeypatch, rows, dtype):
    monkeypatch.setattr(by_hand, "LOGITS_AT_ONCE", 101 * rows)
    h, w = draw(400, 33, dtype=torch.float32), draw(101, 33, seed=1, dtype=torch.float32)
    targets = torch.arange(400) % 101
    exact_loss = F.cross_entropy(h.double() @ w.double().T, targets)
    exact = gradients(exact_loss, h, w)
    with torch.autocast("cpu", dtype):
        ours_loss = LinearCrossEntropy.apply(h, w, targets, True)
        theirs_loss = F.cross_entropy(F.linear(h, w).float(), targets)
    assert ours_loss.dtype == torch.float32
    assert abs(ours_loss.item() - theirs_loss.item()) < 1e-6 * theirs_loss.item()  # the same products, fp32 sums
    ours, theirs = gradients(ours_loss, h, w), gradients(theirs_loss * 2**10, h, w)  # scaled for fp16, as in training
    for wanted, here, there in zip(exact, ours, theirs, strict=True):
        assert rms(here - wanted) < 1.2 * rms(there / 2**10 - wanted)


@pytest.mark.parametrize("ids, rows", [(32000, 1024), (2048, 16384), (1 << 20, 32), (1 << 26, 1)])
def test_rows_of_logits_are_a_multiple_of_64_where_so_many_fit(ids, rows):
    assert by_hand.rows_at_once(ids) == rows


@pytest.mark.parametrize("height, width", [(1, 1), (16, 16), (32, 48), (33, 47), (5, 100), (100, 5), (300, 257)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_transposed(way, height, width, kind, other):
    """To the bit: the sum and its product with the scale in fp32, or one rounding to bf16."""
    x, more = draw(height, width, dtype=kind).detach(), draw(height, width, seed=1, dtype=other).detach()
    scale = torch.tensor(1 / 3)
    scaled = by_hand.transposed([x, more], torch.float32, scale)
    assert torch.equal(scaled, ((x.float() + more.float()) * scale).T)
    assert torch.equal(by_hand.transposed([x], other), x.to(other).T)
    assert torch.equal(by_hand.transposed([x.T], other), x.to(other))


def test_cross_entropy_of_no_tokens_is_no_number(way):
    h, w = torch.ones(0, 8, requires_grad=True), torch.ones(5, 8, requires_grad=True)
    loss = LinearCrossEntropy.apply(h, w, torch.ones(0, dtype=torch.int64), True)
    grad_h, grad_w = torch.autograd.grad(loss, (h, w))
    assert loss.isnan() and grad_h.shape == h.shape and grad_w.isnan().all() and grad_w.shape == w.shape


def test_cross_entropy_of_a_hopeless_guess_is_finite():
    h, w = torch.tensor([[200.0]], requires_grad=True), torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = LinearCrossEntropy.apply(h, w, torch.tensor([1]), True)
    assert loss.item() == 400  # -log of e^-400, which fp32 holds as 0
    loss.backward()
    torch.testing.assert_close(h.grad, torch.tensor([[2.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, width", [(70, 257), (3, 2048), (1, 1), (200, 15)])
def test_cross_entropy_of_rows(way, rows, width, dtype):
    logits = (5 * draw(rows, width)).to(dtype).detach()
    targets = torch.arange(rows) * 7 % width
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    (expected_grad,) = torch.autograd.grad(expected.sum(), exact)
    losses, grad = by_hand.cross_entropy(logits.clone(), targets, torch.float32)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=2e-6)  # fp32 of numbers up to 40
    # Half a unit in bf16's last place, of which one is 2⁻⁷; in fp32 a few of 2⁻²³, and of p where p - 1 is near 0.
    relative = 0.51 * 2**-7 if dtype == torch.bfloat16 else 2e-6
    assert ((grad.double() - expected_grad).abs() <= relative * expected_grad.abs() + 3e-7).all()


def test_what_is_no_number_stays_none(way):
    for bad in (math.nan, math.inf):
        logits = torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]])
        losses, grad = by_hand.cross_entropy(logits, torch.tensor([0, 0]), torch.float32)
        assert losses[0].isnan() and losses[1].isfinite()
        assert grad[1].isfinite().all()


def test_targets_may_lie_anywhere_but_must_be_token_ids(way):
    logits, targets = draw(6, 5, dtype=torch.float32).detach(), torch.tensor([0, 4, 1, 3, 2, 0])
    expected, _ = by_hand.cross_entropy(logits.clone(), targets, torch.float32)
    strided = torch.stack((targets, targets + 1), 1)[:, 0]
    for same in (strided, targets.clone()):
        assert torch.equal(by_hand.cross_entropy(logits.clone(), same, torch.float32)[0], expected)
    if way == "kernel":
        for wrong in (targets + 1, targets - 1, targets[:5]):
            with pytest.raises(IndexError, match="from 0 to 4"):
                by_hand.cross_entropy(logits.clone(), wrong, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit_of_the_kernels(each_number_of_threads, dtype):
    def everything() -> list[Tensor]:
        logits, x = draw(130, 500, dtype=dtype).detach(), draw(4, 90, 4, 64, dtype=dtype)
        turned = Rotate.apply(x, *(draw(90, 32, seed=seed, dtype=torch.float32).detach() for seed in (1, 2)))
        gated = by_hand.gated_silu(draw(400, 258, dtype=dtype))
        scores = (draw(6, 90, 90, seed=seed, dtype=dtype).detach() for seed in (3, 4))
        losses, grad = by_hand.cross_entropy(logits.clone(), torch.arange(130), torch.float32)
        return [losses, grad, turned, gated, by_hand.transposed([logits], torch.bfloat16), *causal(*scores)]

    def causal(scores: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return by_hand.causal_softmax(scores, grad, 0.3)

    one, *others = each_number_of_threads(everything)
    assert all(torch.equal(a, b) for other in others for a, b in zip(one, other, strict=True))


def test_what_the_default_dtype_is_does_not_matter(way):
    h, w, targets = draw(5, 8, dtype=torch.float32), draw(7, 8, dtype=torch.float32), torch.arange(5)
    expected = LinearCrossEntropy.apply(h, w, targets, False)
    torch.set_default_dtype(torch.float64)
    try:
        assert LinearCrossEntropy.apply(h, w, targets, False) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_tables_of_rotation_may_be_for_one_position(way):
    x = draw(2, 5, 3, 8, dtype=torch.float32)
    cos, sin = (draw(1, 4, seed=seed, dtype=torch.float32).detach() for seed in (1, 2))
    turned = Rotate.apply(x, *(table.expand(5, 4) for table in (cos, sin)))
    torch.testing.assert_close(Rotate.apply(x, cos, sin), turned)
