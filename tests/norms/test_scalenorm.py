"""ScaleNorm: one learned length, and its relation to RMSNorm."""

import pytest
import torch
from torch import Tensor

from norms.rmsnorm import RMSNorm
from norms.scalenorm import ScaleNorm


def oracle(x: Tensor, state: dict[str, Tensor], eps: float = 1e-5) -> Tensor:
    return state["weight"] * x / x.pow(2).sum(-1, keepdim=True).sqrt().clamp_min(eps)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_equals_rmsnorm_with_one_gain_for_all_features():
    scalenorm, rmsnorm = ScaleNorm(64).double(), RMSNorm(64, eps=1e-30).double()
    assert rmsnorm.weight is not None
    scalenorm.weight.data.fill_(3.7)
    torch.nn.init.constant_(rmsnorm.weight, 3.7 / 64**0.5)
    a, b = random(5, 6, 64).requires_grad_(), random(5, 6, 64).requires_grad_()
    torch.testing.assert_close(scalenorm(a), rmsnorm(b), rtol=1e-14, atol=0)
    grad_a, grad_w = torch.autograd.grad(scalenorm(a).pow(3).sum(), (a, scalenorm.weight))
    grad_b, grad_gain = torch.autograd.grad(rmsnorm(b).pow(3).sum(), (b, rmsnorm.weight))
    torch.testing.assert_close(grad_a, grad_b, rtol=0, atol=1e-14 * grad_b.abs().max().item())
    torch.testing.assert_close(grad_w, grad_gain.sum(0, keepdim=True) / 64**0.5)


def test_weight_is_the_output_length_and_starts_at_sqrt_dim():
    norm, x = ScaleNorm(64).double(), random(5, 6, 64)
    assert norm.weight.shape == (1,)
    torch.testing.assert_close(norm(x).norm(dim=-1), torch.full((5, 6), 8.0, dtype=torch.float64))
    norm.weight.data.fill_(2.5)
    torch.testing.assert_close(norm(x).norm(dim=-1), torch.full((5, 6), 2.5, dtype=torch.float64))


@pytest.mark.parametrize(("length", "expected"), [(1e-4, 8.0), (1e-5, 8.0), (1e-6, 0.8), (0.0, 0.0)])
def test_eps_is_the_lower_bound_of_the_divisor(length, expected):
    """eps is a lower bound on the length; it is not added to it."""
    x = torch.full((64,), length / 8, dtype=torch.float64)
    assert ScaleNorm(64).double()(x).norm().item() == pytest.approx(expected, rel=1e-12)
