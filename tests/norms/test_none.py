"""The identity: no parameters, and a bit-exact output."""

import torch
from torch import Tensor

from norms.none import NoNorm


def oracle(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    return x.clone()


def error_bound(x: Tensor, state: dict[str, Tensor], eps: float) -> Tensor:
    return torch.full_like(x, torch.finfo(x.dtype).tiny)  # no error is allowed, but the contract test divides by this


def test_has_no_parameters_and_is_bit_exact():
    norm = NoNorm(4)
    assert not norm.state_dict()
    x = torch.tensor([float("inf"), -0.0, 1e-45, 65504.0])
    assert torch.equal(norm(x).view(torch.int32), x.view(torch.int32))
