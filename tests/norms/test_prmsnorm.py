"""pRMSNorm: how many features it uses."""

import pytest
import torch
from torch import Tensor

from norms.prmsnorm import PartialRMSNorm
from tests.random_values import normal


def oracle(x: Tensor, state: dict[str, Tensor], eps: float = 1e-6, p: float = 0.0625) -> Tensor:
    used = [i for i in range(x.shape[-1]) if i < p * x.shape[-1]]
    square = x[..., used].pow(2).sum(-1, keepdim=True) / len(used)
    return state["weight"] * x / (square + eps).sqrt()


@pytest.mark.parametrize("dim, p, first", [(64, 0.0625, 4), (65, 0.0625, 5), (1, 1, 1), (100, 0.07, 7), (64, 1e-9, 1)])
def test_uses_only_the_first_features_rounded_up(dim, p, first):
    norm, x = PartialRMSNorm(dim, p=p).double(), normal(3, dim).double()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(norm(x)[:, -1].sum(), x)  # derivative of the last output by every feature
    used_features = grad.ne(0).all(0).nonzero().flatten().tolist()
    assert used_features == sorted({*range(first), dim - 1})
