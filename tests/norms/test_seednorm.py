"""SeeDNorm: what its scalar product is divided by."""

import pytest
import torch
from torch import Tensor

from norms.seednorm import SeeDNorm
from tests.random_values import normal, randomize

GRADIENT_ERROR = 8  # times the usual one: rounding of x·β, a sum of up to 1024 terms, moves tanh's slope; measured: 6.5


def oracle(x: Tensor, state: dict[str, Tensor], eps: float = 1e-6, divisor: float = 1) -> Tensor:
    rms = (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    squashed = torch.tanh(x @ state["beta"] / divisor)
    return x / rms * (torch.outer(squashed.flatten(), state["alpha"]).view(x.shape) + state["weight"])


def error_bound(x: Tensor, state: dict[str, Tensor], eps: float, **norm_args) -> Tensor:
    """Rounding of x·β as propagated by tanh, of tanh, the gain, and RMSNorm. Measured: 0.6 of this bound."""
    tanh = torch.tanh(x @ state["beta"])[..., None]
    propagated = (x * state["beta"]).abs().sum(-1, keepdim=True) * (1 - tanh**2)
    gain = (propagated + 2 * tanh.abs()) * state["alpha"].abs() + 4 * (tanh * state["alpha"] + state["weight"]).abs()
    return eps * (gain * (x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).abs()).clamp_min(1e-30)


@pytest.mark.parametrize("name, divisor", [("none", 1), ("sqrt_dim", 8), ("dim", 64)])
def test_what_the_scalar_product_is_divided_by(name, divisor):
    norm, x = randomize(SeeDNorm(64, divisor=name).double()), normal(4, 12, 64, dtype=torch.float64)
    exact = oracle(x, dict(norm.named_parameters()), divisor=divisor)
    torch.testing.assert_close(norm(x), exact, rtol=1e-12, atol=1e-14)
