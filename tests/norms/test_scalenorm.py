"""ScaleNorm: one learned length."""

import pytest
import torch
from torch import Tensor

from norms.scalenorm import ScaleNorm
from tests.random_values import normal


def oracle(x: Tensor, state: dict[str, Tensor], eps: float = 1e-5) -> Tensor:
    return state["weight"] * x / x.pow(2).sum(-1, keepdim=True).sqrt().clamp_min(eps)


def test_weight_is_the_output_length_and_starts_at_sqrt_dim():
    norm, x = ScaleNorm(64).double(), normal(5, 6, 64).double()
    assert norm.weight.shape == (1,)
    torch.testing.assert_close(norm(x).norm(dim=-1), torch.full((5, 6), 8.0, dtype=torch.float64))
    norm.weight.data.fill_(2.5)
    torch.testing.assert_close(norm(x).norm(dim=-1), torch.full((5, 6), 2.5, dtype=torch.float64))


@pytest.mark.parametrize(("length", "expected"), [(1e-4, 8.0), (1e-5, 8.0), (1e-6, 0.8), (0.0, 0.0)])
def test_eps_is_the_lower_bound_of_the_divisor(length, expected):
    """eps is a lower bound on the length; it is not added to it."""
    x = torch.full((64,), length / 8, dtype=torch.float64)
    assert ScaleNorm(64).double()(x).norm().item() == pytest.approx(expected, rel=1e-12)
