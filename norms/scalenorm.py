"""ScaleNorm: Transformers without Tears, arXiv 1910.05895."""

import math

import torch
from torch import Tensor, nn

from norms.numerics import check_eps, upcast
from norms.registry import register


@register("scalenorm")
class ScaleNorm(nn.Module):
    """weight · x / max(‖x‖, eps) over the last axis, (..., dim) → (..., dim).

    The learned scale is one number, √dim at the start: RMSNorm with the single gain weight/√dim for all features.
    Computed in fp32, then cast back once.
    """

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        check_eps(eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.full((1,), math.sqrt(dim)))

    def forward(self, x: Tensor) -> Tensor:
        h = upcast(x)
        # The clamp is on the square, not on the norm, whose derivative at a zero row is infinite.
        square = h.square().sum(-1, keepdim=True).clamp_min(self.eps**2)
        return (h * torch.rsqrt(square) * self.weight).to(x.dtype)
