"""Derf, the dynamic error function: Stronger Normalization-Free Transformers, arXiv 2512.10938."""

import math

import torch
from torch import Tensor, nn

from norms.numerics import upcast
from norms.registry import register


@register("derf", scale_invariant=False)
class Derf(nn.Module):
    """weight · erf(α · x + s) + bias, feature by feature: no statistics, α in `alpha` and s in `shift`, of shape (1,).

    Like DyT with erf instead of tanh and a learned shift: α starts at `alpha`, s at 0. Computed in fp32,
    then cast back once.
    """

    def __init__(self, dim: int, *, alpha: float = 0.5):
        super().__init__()
        if not 0 < alpha < math.inf:
            raise ValueError(f"alpha of derf must be a positive number, not {alpha}")
        self.alpha, self.shift = nn.Parameter(torch.full((1,), float(alpha))), nn.Parameter(torch.zeros(1))
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.erf(self.alpha * upcast(x) + self.shift) * self.weight + self.bias).to(x.dtype)
