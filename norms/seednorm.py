"""SeeDNorm: Self-Rescaled Dynamic Normalization, arXiv 2510.22777."""

from typing import Literal

import torch
from torch import Tensor, nn

from norms.numerics import check_eps, upcast
from norms.registry import register


@register("seednorm", scale_invariant=False)
class SeeDNorm(nn.Module):
    """(tanh(x·β) · α + weight) ⊙ x / sqrt(mean(x²) + eps) over the last axis, (..., dim) → (..., dim).

    RMSNorm with a gain that depends on x and its scale: x·β is the scalar product. β, in `beta`, starts at 0 and α, in
    `alpha`, at 1, so it starts as RMSNorm. x·β grows with the width and can saturate tanh; `divisor` divides it by √dim
    or by dim. Computed in fp32, then cast back once.

    From secondary texts: the paper was not seen. They say that its authors decay α and β, which is not done here.
    """

    def __init__(self, dim: int, eps: float = 1e-6, *, divisor: Literal["none", "sqrt_dim", "dim"] = "none"):
        super().__init__()
        check_eps(eps)
        self.eps, self.divisor = eps, {"none": 1.0, "sqrt_dim": dim**0.5, "dim": float(dim)}[divisor]
        self.weight, self.alpha = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = upcast(x)
        score = (h * self.beta).sum(-1, keepdim=True) / self.divisor  # h @ β would be bf16 under autocast
        gain = torch.tanh(score) * self.alpha + self.weight
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps) * gain).to(x.dtype)
