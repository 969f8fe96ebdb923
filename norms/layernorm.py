"""Layer Normalization, arXiv 1607.06450."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from norms.numerics import check_eps, upcast
from norms.registry import register


@register("layernorm", shift_invariant=True)
class LayerNorm(nn.Module):
    """(x − μ) / sqrt(σ² + eps) · weight + bias, with μ and the biased σ² over the trailing axes `normalized_shape`.

    An int means the last axis, of that size; torch.Size and lists name several, such as [C, H, W] for images.
    In a sequence (B, T, dim) that must be dim alone: statistics over (T, dim) would mix time steps.
    With `zero_centered`, the gain is 1 + weight, as in Nemotron: weight decay then pulls it to 1, not to 0. Computed in
    fp32 whatever the dtype of x, then cast back once.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        elementwise_affine: bool = True,
        zero_centered: bool = False,
        bias: bool = True,
    ):
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        check_eps(eps)
        self.normalized_shape, self.eps, self.zero_centered = shape, eps, zero_centered
        initial = torch.zeros if zero_centered else torch.ones
        self.weight = nn.Parameter(initial(shape)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(shape)) if elementwise_affine and bias else None

    def forward(self, x: Tensor) -> Tensor:
        h = upcast(x)
        # (h − μ) / sqrt(σ² + eps). On constant rows of 1e6 + 0.3, the formula gives 0.9999 in fp32, this function 0.
        y = F.layer_norm(h, self.normalized_shape, eps=self.eps)
        # Gain and bias are applied separately: F.layer_norm loses digits when it sums their gradients over many rows.
        if self.weight is not None:
            y = y * (1 + upcast(self.weight) if self.zero_centered else self.weight)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype)
