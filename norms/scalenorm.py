"""ScaleNorm: Transformers without Tears, arXiv 1910.05895."""

import math

import torch
from torch import Tensor, nn

from norms.fused import Statistics, normalise
from norms.numerics import check_arguments, upcast
from norms.registry import register


@register("scalenorm")
class ScaleNorm(nn.Module):
    """weight · x / max(‖x‖, eps) over the last axis, (..., dim) → (..., dim).

    The learnt length is one number, √dim at the start: RMSNorm with a single gain, weight/√dim, for all features.
    Computed in fp32, then cast back once.
    """

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        check_arguments(dim, eps=eps)
        self.dim, self.eps = dim, eps
        self.statistics = Statistics((dim,), floor=eps**2 / dim)
        self.weight = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, math.sqrt(self.dim))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight.to(torch.promote_types(x.dtype, torch.float32)) / math.sqrt(self.dim)
        return normalise(self.formula, self.statistics, x, gain.expand(self.dim))

    def formula(self, x: Tensor, gain: Tensor, bias: None = None) -> Tensor:
        h = upcast(x)
        # Squares are compared, not lengths: the root's derivative at a zero row would be infinite.
        squares = h.square().mean(-1, keepdim=True).clamp_min(self.eps**2 / self.dim)
        return (h * torch.rsqrt(squares) * gain).to(x.dtype)
