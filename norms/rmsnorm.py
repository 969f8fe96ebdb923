"""Root Mean Square Layer Normalization, arXiv 1910.07467; LLaMA's norm, arXiv 2302.13971."""

from typing import Literal

import torch
from torch import Tensor, nn

from norms.numerics import check_eps, upcast
from norms.registry import register


@register("rmsnorm")
class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis, (..., dim) → (..., dim).

    A sublayer then gets inputs of the same size, however large the residual stream has become.

    Computed in fp32 whatever the dtype of x. `cast_order` says when the result is cast back: "fp32" after the gain,
    "llama" before it, which rounds twice and is how pretrained LLaMA weights were trained. With `zero_centered`, the
    gain is 1 + weight, as in Gemma: weight decay then pulls it to 1, not to 0.

    Gradients lose digits for |x| beyond 1e12, where the derivative of torch.rsqrt(s), -½ / √s³, underflows.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        elementwise_affine: bool = True,
        zero_centered: bool = False,
        cast_order: Literal["fp32", "llama"] = "fp32",
    ):
        super().__init__()
        check_eps(eps)
        self.eps, self.zero_centered, self.cast_order = eps, zero_centered, cast_order
        initial = torch.zeros if zero_centered else torch.ones
        self.weight = nn.Parameter(initial(dim)) if elementwise_affine else None

    def forward(self, x: Tensor) -> Tensor:
        h = upcast(x)
        y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        if self.cast_order == "llama":
            y = y.to(x.dtype)
        if self.weight is not None:
            y = y * (1 + upcast(self.weight) if self.zero_centered else self.weight)
        return y.to(x.dtype)
