"""ScaleNorm: one learned length."""

import pytest
import torch
from torch import Tensor

from norms.scalenorm import ScaleNorm


def oracle(x: Tensor, state: dict[str, Tensor], eps: float = 1e-5) -> Tensor:
    return state["weight"] * x / x.pow(2).sum(-1, keepdim=True).sqrt().clamp_min(eps)


@pytest.mark.parametrize(("length", "expected"), [(1e-4, 8.0), (1e-5, 8.0), (1e-6, 0.8), (0.0, 0.0)])
def test_eps_is_the_lower_bound_of_the_divisor(length, expected):
    """eps is a lower bound on the length; it is not added to it. One number is learned."""
    norm, x = ScaleNorm(64).double(), torch.full((64,), length / 8, dtype=torch.float64)
    assert norm.weight.shape == (1,) and norm(x).norm().item() == pytest.approx(expected, rel=1e-12)
